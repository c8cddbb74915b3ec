"""Our Hugging Face classes: the golden numbers, and generation, padding, checkpointing and saving as transformers has them."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_simple.hf import (
    SimpleGPT2Config,
    SimpleGPT2LMHeadModel,
    SimpleGPTConfig,
    SimpleGPTForCausalLM,
    configuration_simplegpt,
    configuration_simplegpt2,
    modeling_simplegpt,
    modeling_simplegpt2,
)
from megatron_simple.model.norm import PLACEMENTS
from tests.model.golden import CASES, GOLDEN, golden_arrays

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "simplegpt": (SimpleGPTConfig, {**LLAMA_SIZES}),
    "simplegpt-head-llama3": (
        SimpleGPTConfig,
        {**LLAMA_SIZES, "norm_placement": "qknorm", "qk_norm_width": "head", "rope_parameters": LLAMA3_ROPE,
         "max_position_embeddings": 9000},
    ),
    "simplegpt-layernorm-tied": (
        SimpleGPTConfig,
        {**LLAMA_SIZES, "norm_sites": ["q_proj", "mlp_norm"], "normalization": "layernorm", "attention_bias": True,
         "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "simplegpt2": (SimpleGPT2Config, {**GPT2_SIZES}),
    "simplegpt2-grouped": (
        SimpleGPT2Config,
        {**GPT2_SIZES, "n_kv_head": 2, "norm_placement": "peri", "normalization": "layernorm", "bias": True,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


def build(name: str, *, attention: str = "sdpa") -> nn.Module:
    """A model with random gains and biases, so that a norm that is left out shows."""
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes), attn_implementation=attention)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            spread = 0.3 * torch.randn_like(parameter)
            parameter.copy_(1 + spread if path.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")) else spread)
    return model.eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_golden_logits_in_float64(case: str, attention: str) -> None:
    golden = golden_arrays(case)
    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / case, dtype=torch.float64, attn_implementation=attention, trust_remote_code=False
    )
    ids = torch.from_numpy(golden["tokens"].astype(np.int64))
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    # transformers' own Llama computes its rotary table (and eager softmax) in fp32 whatever the model's type
    stock = case == "llama2_prenorm"
    assert np.abs(logits.numpy() - golden["f64/logits"]).max() <= (2e-6 if stock else 1e-10)
    assert abs(loss - float(golden["f64_rope32/loss" if stock else "f64/loss"])) <= (3e-8 if stock else 1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_generation_with_cache_without_and_by_hand(name: str) -> None:
    model, prompt = build(name), tokens(2, 7)
    common = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    cached = model.generate(prompt, **common)
    by_hand = prompt
    with torch.no_grad():
        for _ in range(12):
            by_hand = torch.cat([by_hand, model(by_hand).logits[:, -1:].argmax(-1)], dim=1)
    assert len(set(cached[0].tolist())) > 3, "too simple to tell anything"
    assert cached.equal(by_hand)
    assert cached.equal(model.generate(prompt, use_cache=False, **common))
    assert cached.equal(model.generate(prompt, cache_implementation="static", **common))
    assert model.generate(prompt, num_beams=3, **common).shape == cached.shape


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_left_padding_changes_nothing(name: str, attention: str) -> None:
    model, short, long = build(name, attention=attention), tokens(1, 5), tokens(1, 9)
    padded = torch.cat([torch.full((1, 4), 3), short], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    both = model.generate(torch.cat([padded, long]), attention_mask=mask, **common)
    for row, alone in ((both[0, 4:], short), (both[1], long)):
        assert row.equal(model.generate(alone, attention_mask=torch.ones_like(alone), **common)[0])


@pytest.mark.parametrize("name", MODELS)
def test_eager_equals_sdpa_and_gives_hidden_states_and_attentions(name: str) -> None:
    eager, sdpa, ids = build(name, attention="eager"), build(name), tokens(2, 11)
    with torch.no_grad():
        output = eager(ids, output_attentions=True, output_hidden_states=True)
        assert (output.logits - sdpa(ids).logits).abs().max() < 1e-5 * output.logits.abs().max()
        assert len(output.attentions) == 2
        assert output.attentions[0].shape == (2, 4, 11, 11)
        assert (output.attentions[1].sum(-1) - 1).abs().max() < 1e-5
        assert output.attentions[1].triu(1).abs().max() == 0
        assert len(output.hidden_states) == 3
        assert (eager.get_output_embeddings()(output.hidden_states[-1]) - output.logits).abs().max() < 1e-5
        assert eager(ids, return_dict=False)[0].equal(output.logits)
        assert eager(ids, logits_to_keep=3).logits.equal(output.logits[:, -3:])
        embedded = eager.get_input_embeddings()(ids)
        assert eager(inputs_embeds=embedded).logits.equal(output.logits)
    sdpa.set_attn_implementation("eager")
    with torch.no_grad():
        assert sdpa(ids).logits.equal(output.logits)
    with pytest.raises(ValueError, match="exactly one of"):
        eager()


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_mean_over_shifted_labels(name: str) -> None:
    model, ids = build(name), tokens(2, 11)
    with torch.no_grad():
        output = model(ids, labels=ids)
    wanted = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_keeps_the_gradients(name: str, reentrant: bool) -> None:
    model, ids = build(name).train(), tokens(2, 11)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=True).loss.backward()
        return {path: parameter.grad.clone() for path, parameter in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = gradients()
    for path, gradient in plain.items():
        assert (again[path] - gradient).abs().max() <= 1e-6 * gradient.abs().max(), path
    assert all(gradient.abs().sum() > 0 for gradient in plain.values())


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(tmp_path: Path, name: str) -> None:
    model, ids = build(name), tokens(2, 11)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(again) is type(model)
    base = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert again(ids).logits.equal(model(ids).logits)
        assert base(ids).last_hidden_state.equal(model.base_model(ids).last_hidden_state)
    if model.config.tie_word_embeddings:
        assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    saved = AutoConfig.from_pretrained(tmp_path)
    assert saved.norm_sites == model.config.norm_sites
    assert saved.tie_word_embeddings == model.config.tie_word_embeddings
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16


def test_fresh_weights_follow_the_initializer_range() -> None:
    for kind, sizes in ((SimpleGPTConfig, LLAMA_SIZES), (SimpleGPT2Config, GPT2_SIZES)):
        model = AutoModelForCausalLM.from_config(kind(**sizes, initializer_range=0.05))
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2:
                assert parameter.std().item() == pytest.approx(0.05, rel=0.15), path
            else:
                assert parameter.eq(1).all(), path


def test_either_spelling_of_the_rotary_settings() -> None:
    rule = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    older = SimpleGPTConfig(**LLAMA_SIZES, rope_theta=5e5, rope_scaling=rule)
    newer = SimpleGPTConfig(**LLAMA_SIZES, rope_parameters=LLAMA3_ROPE)
    assert older.rope_parameters == newer.rope_parameters == LLAMA3_ROPE
    assert SimpleGPTConfig(**LLAMA_SIZES, rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_placement": "postnorm"}, {"norm_sites": ["z_proj"]}, {"normalization": "batchnorm"},
        {"qk_norm_width": "half"}, {"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "yarn"}},
    ],
)  # fmt: skip
def test_a_setting_that_the_model_lacks_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="config.json: "):
        SimpleGPTConfig(**LLAMA_SIZES, **wrong)
    if "rope_parameters" not in wrong:
        renamed = {name.replace("hidden_act", "activation_function"): value for name, value in wrong.items()}
        renamed = {name: "relu" if name == "activation_function" else value for name, value in renamed.items()}
        with pytest.raises(ValueError, match="config.json: "):
            SimpleGPT2Config(**GPT2_SIZES, **renamed)


def test_the_placements_are_those_of_training() -> None:
    ungated = {name: tuple(site for site in row if site != "gate_proj") for name, row in PLACEMENTS.items()}
    assert PLACEMENTS == configuration_simplegpt.PLACEMENTS
    assert ungated == configuration_simplegpt2.PLACEMENTS


def test_what_both_modelling_files_share_is_the_same() -> None:
    """Each file travels alone, so a few functions stand in both."""
    for name in ("eager_attention_forward", "causal_mask", "cache_and_places"):
        one, other = (inspect.getsource(getattr(module, name)) for module in (modeling_simplegpt, modeling_simplegpt2))
        assert one == other, name
    one, other = (
        inspect.getsource(kind).replace("SimpleGPT2", "SimpleGPT")
        for kind in (modeling_simplegpt.SimpleGPTRMSNorm, modeling_simplegpt2.SimpleGPT2RMSNorm)
    )
    assert one == other
    assert issubclass(SimpleGPTForCausalLM, nn.Module)
    assert issubclass(SimpleGPT2LMHeadModel, nn.Module)
