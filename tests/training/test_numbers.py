"""Schedule, parameter counts, FLOPs, stage bounds, optimizer groups and clipping: values written out or counted another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_simple.arguments import config_from
from megatron_simple.checks import resolve
from megatron_simple.config import ModelConfig, TrainingConfig, resolve_model
from megatron_simple.model.transformer import Transformer, layer_specs, parameter_table
from megatron_simple.parallel.mesh import Axis
from megatron_simple.training.flops import forward_flops_per_token, model_flops_utilization
from megatron_simple.training.optimizer import build_optimizer, clip_gradients
from megatron_simple.training.pipeline import blocks_per_stage, stage_bounds
from megatron_simple.training.schedule import learning_rate
from megatron_simple.zoo import MODELS


def rates(style: str, **settings) -> list[float]:
    run = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 2, "train_iters": 10, "lr_decay_style": style, **settings}
    return [learning_rate(i, TrainingConfig(**run)) for i in range(1, 11)]


def test_learning_rates_step_by_step() -> None:
    cosine = [0.55 + 0.45 * math.cos(math.pi * k / 8) for k in range(1, 9)]
    assert rates("cosine") == pytest.approx([0.5, 1.0, *cosine])
    assert cosine[-1] == pytest.approx(0.1)
    assert rates("linear") == pytest.approx([0.5, *(1.0 - 0.9 * k / 8 for k in range(9))])
    assert rates("constant") == [0.5] + [1.0] * 9
    assert rates("wsd", lr_wsd_decay_iters=3) == pytest.approx([0.5, *[1.0] * 6, 0.7, 0.4, 0.1])
    assert rates("constant", lr_warmup_iters=0) == [1.0] * 10


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # embedding and head, blocks of q k v o and the MLP, gains: written out from the shapes of the published models
        ("llama2-7b", 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 65 * 4096),
        ("llama3-8b", 2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 65 * 4096),
        ("gpt2-124m", 50257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768),
    ],
)
def test_parameter_counts_of_published_sizes(name: str, parameters: int) -> None:
    """6,738,415,616 for Llama-2 7B, 8,030,261,248 for Llama-3 8B, 124,439,808 for GPT-2, as their own releases count."""
    assert parameters in (6_738_415_616, 8_030_261_248, 124_439_808)
    normalization = "LayerNorm" if name.startswith("gpt2") else "RMSNorm"
    config = ModelConfig(**MODELS[name], norm_placement="prenorm", normalization=normalization)
    table = parameter_table(resolve_model(config, 1024))
    assert sum(math.prod(shape) for shape, _ in table.values()) == parameters


@pytest.mark.parametrize(("name", "billions"), [("llama2-1b", 1.0), ("gpt2-1.4b", 1.4)])
def test_parameter_counts_of_the_papers_own_sizes(name: str, billions: float) -> None:
    table = parameter_table(resolve_model(ModelConfig(**MODELS[name]), 1024))
    assert sum(math.prod(shape) for shape, _ in table.values()) / 1e9 == pytest.approx(billions, rel=0.08)


@pytest.mark.parametrize("name", ["llama3-tiny", "gpt2-tiny"])
def test_flops_equal_torchs_own_count(name: str) -> None:
    config = resolve_model(ModelConfig(**{**MODELS[name], "vocab_size": 128}), 16)
    with FlopCounterMode(display=False) as counter:
        Transformer(config)(torch.zeros(1, 16, dtype=torch.int64))
    ours = forward_flops_per_token(config, 16)
    scores = ours.pop("attention_scores")
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    assert sum(ours.values()) * 16 == products
    assert scores * 16 == config.num_layers * 4 * config.hidden_size * sum(range(1, 17))  # the causal half, key by key


def test_utilization_of_a_known_and_an_unknown_device() -> None:
    config = resolve_model(ModelConfig(**MODELS["llama2-7b"]), 2048)
    used = model_flops_utilization(config, 2048, tokens_per_second=20_000, device_name="NVIDIA A800-SXM4-80GB", devices=8)
    assert used == pytest.approx(20_000 * 6 * 6.9e9 / (312e12 * 8), rel=0.05)  # 6 N and a little for attention
    assert model_flops_utilization(config, 2048, tokens_per_second=1, device_name="Abacus", devices=1) is None
    assert model_flops_utilization(config, 2048, tokens_per_second=1, device_name=None, devices=1) is None


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [(8, 4, (2, 2, 2, 2)), (30, 4, (7, 8, 8, 7)), (31, 4, (8, 8, 8, 7)), (9, 4, (2, 3, 2, 2)), (3, 2, (2, 1)), (2, 2, (1, 1))],
)
def test_blocks_per_stage(layers: int, stages: int, wanted: tuple[int, ...]) -> None:
    assert blocks_per_stage(layers, stages) == wanted


@pytest.mark.parametrize("backbone", ["llama2", "nanogpt"])
def test_stages_hold_every_layer_once_with_the_ends_at_the_ends(backbone: str) -> None:
    model = ModelConfig(backbone=backbone, num_layers=5, hidden_size=32, num_attention_heads=2, vocab_size=9)
    specs = layer_specs(resolve_model(model, 8))
    bounds = stage_bounds(specs, (1, 3, 1))
    stages = [[spec.name for spec in specs[a:b]] for a, b in zip(bounds, bounds[1:], strict=False)]
    front = ["embed_tokens", "position_embeddings"] if backbone == "nanogpt" else ["embed_tokens"]
    back = ["final_norm", "embed_tokens" if backbone == "nanogpt" else "lm_head"]
    assert stages == [[*front, "layers.0"], ["layers.1", "layers.2", "layers.3"], ["layers.4", *back]]


def small_model() -> Transformer:
    model = {"backbone": "nanogpt", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 9}
    return Transformer(resolve_model(ModelConfig(**model, add_bias_linear=True), 8))


@pytest.mark.parametrize("on", ["matrices", "all"])
def test_weight_decay_groups(on: str) -> None:
    model = small_model()
    settings = {"train_iters": 1, "data_path": ("unused",), "weight_decay": 0.3, "weight_decay_on": on, "lr": 1e-3}
    optimizer = build_optimizer(model, resolve(config_from(settings), world_size=1).training)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.3 if on == "all" or parameter.ndim == 2 else 0.0), parameter.logical_name


@pytest.mark.parametrize(("limit", "shrinks"), [(0.0, False), (1e-3, True), (1e6, False)])
def test_clipping_scales_to_the_limit_and_returns_the_norm_before(limit: float, shrinks: bool) -> None:
    model = small_model()
    model(torch.arange(8)[None]).square().sum().backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = clip_gradients(model, limit, tp=Axis())
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert norm.item() == pytest.approx(before.double().norm().item(), rel=1e-5)
    expected = before * (limit / norm.item()) if shrinks else before
    assert torch.allclose(after, expected, rtol=1e-4, atol=0)
