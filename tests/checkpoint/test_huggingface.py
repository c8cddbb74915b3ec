"""Native checkpoint <-> Hugging Face folder: the same logits, the same bytes on the way back, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_simple.checkpoint.export import ExportSettings, export
from megatron_simple.checkpoint.huggingface import architecture_of, disk_tensors
from megatron_simple.checkpoint.import_folder import ImportSettings, import_folder
from megatron_simple.checkpoint.logits_check import check_logits
from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.config import ConfigError
from megatron_simple.model.norm import PLACEMENTS, sites_of
from megatron_simple.model.transformer import parameter_table
from tests.checkpoint.models import GPT2, native_checkpoint, sharded_checkpoint, small_config
from tests.model.golden import GOLDEN

LLAMA = "LlamaForCausalLM"
VARIANTS = [
    *[({"norm_placement": placement, "backbone": "llama3"}, "SimpleGPTForCausalLM") for placement in ("qknorm", "peri")],
    ({"norm_placement": "prenorm", "backbone": "llama3"}, LLAMA),
    ({"norm_placement": "simplenorm", "rope_scaling": "llama3.1"}, "SimpleGPTForCausalLM"),
    ({"norm_placement": "olmo2", "norm_epsilon": 1e-4}, "Olmo2ForCausalLM"),
    ({"norm_placement": "olmo2", "qk_norm_width": "head"}, "SimpleGPTForCausalLM"),
    ({"norm_placement": "prenorm", "rope_scaling": "llama3.1", "tie_embeddings": True, "add_bias_linear": True}, LLAMA),
    (
        {"norm_sites": ("q_proj", "v_proj", "mlp_norm"), "qk_norm_width": "head", "normalization": "LayerNorm",
         "add_bias_linear": True},
        "SimpleGPTForCausalLM",
    ),
    *[({"norm_placement": placement, "backbone": "nanogpt"}, "SimpleGPT2LMHeadModel") for placement in PLACEMENTS],
    *[({**GPT2, "add_bias_linear": bias}, "GPT2LMHeadModel") for bias in (True, False)],
    ({**GPT2, "tie_embeddings": False}, "GPT2LMHeadModel"),
    ({**GPT2, "num_query_groups": 2, "add_bias_linear": True}, "SimpleGPT2LMHeadModel"),
    ({**GPT2, "norm_sites": ("k_proj",), "qk_norm_width": "head", "tie_embeddings": False}, "SimpleGPT2LMHeadModel"),
]  # fmt: skip


def silent(text: str) -> None:
    pass


def to_folder(checkpoint: Path, output: Path, **settings: Any) -> dict:
    return export(ExportSettings(str(checkpoint), str(output), **settings), say=silent)


def to_checkpoint(folder: Path, save: Path, **settings: Any) -> dict:
    return import_folder(ImportSettings(str(folder), str(save), **settings), say=silent)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged |= load_file(path)
    return merged


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert set(first) == set(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert value.equal(second[name]), name


@pytest.mark.parametrize(("model", "wanted"), VARIANTS)
def test_there_and_back_gives_the_same_logits_and_bytes(tmp_path: Path, model: dict, wanted: str) -> None:
    config = small_config(**model)
    checkpoint = native_checkpoint(tmp_path / "native", config)
    summary = to_folder(checkpoint, tmp_path / "hf")
    assert summary["class"] == wanted
    assert summary["logits_difference"] < 1e-4
    assert summary["parameters"] == sum(torch.Size(shape).numel() for shape, _ in parameter_table(config.model).values())
    assert to_checkpoint(tmp_path / "hf", tmp_path / "again")["logits_difference"] < 1e-4
    with CheckpointReader(tmp_path / "again") as reader, CheckpointReader(checkpoint) as original:
        assert sites_of(reader.config.model) == sites_of(config.model)
        free = ("model", "backbone", "norm_sites", "norm_placement", "qk_norm_width", "make_vocab_size_divisible_by")
        kept = {f.name for f in dataclasses.fields(config.model)} - set(free)
        assert all(getattr(reader.config.model, name) == getattr(config.model, name) for name in kept)
        for name in original.parameters:
            assert reader.read(name).equal(original.read(name)), name
    to_folder(tmp_path / "again", tmp_path / "hf2", verify=False, max_shard_size="60KB")
    assert len(list((tmp_path / "hf2").glob("model-0000*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "hf", tmp_path / "hf2")


def test_bf16_is_the_default_of_a_bf16_run_and_comes_back_unchanged(tmp_path: Path) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config(bf16=True))
    assert to_folder(checkpoint, tmp_path / "hf")["dtype"] == "bfloat16"
    stored = tensors(tmp_path / "hf")
    with CheckpointReader(checkpoint) as reader:
        for tensor in disk_tensors(reader.config.model):
            assert stored[tensor.name].equal(tensor.join(reader.read).bfloat16()), tensor.name
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert to_checkpoint(tmp_path / "hf", tmp_path / "again")["dtype"] == "bfloat16"
    to_folder(tmp_path / "again", tmp_path / "hf2", verify=False)
    assert_same_tensors(tmp_path / "hf", tmp_path / "hf2")
    assert to_folder(checkpoint, tmp_path / "hf3", dtype="float32")["dtype"] == "float32"


@pytest.mark.parametrize("model", [{"backbone": "llama3"}, {**GPT2, "add_bias_linear": True}])
def test_a_tensor_parallel_checkpoint_gives_the_same_folder(tmp_path: Path, model: dict) -> None:
    config = small_config(**model)
    to_folder(native_checkpoint(tmp_path / "one", config), tmp_path / "hf1")
    to_folder(sharded_checkpoint(tmp_path / "two", config, shards=2), tmp_path / "hf2")
    assert_same_tensors(tmp_path / "hf1", tmp_path / "hf2")
    name = "transformer.wte.weight" if model.get("backbone") == "nanogpt" else "model.embed_tokens.weight"
    assert len(tensors(tmp_path / "hf2")[name]) == config.model.vocab_size < config.model.padded_vocab_size(2)


@pytest.mark.parametrize("case", ["llama2_prenorm", "llama2_simplegpt", "gpt2_bias", "gpt2_simplenorm_rms"])
def test_golden_folders_there_and_back(tmp_path: Path, case: str) -> None:
    assert to_checkpoint(GOLDEN / case, tmp_path / "native")["logits_difference"] < 1e-4
    summary = to_folder(tmp_path / "native", tmp_path / "hf")
    assert summary["class"] == json.loads((GOLDEN / case / "config.json").read_text())["architectures"][0]
    assert_same_tensors(GOLDEN / case, tmp_path / "hf")


def test_every_parameter_is_on_disk_exactly_once() -> None:
    for model, _ in VARIANTS:
        config = small_config(**model).model
        parts = [part for tensor in disk_tensors(config) for part in tensor.parts]
        assert sorted(parts) == sorted(parameter_table(config))
        names = [tensor.name for tensor in disk_tensors(config)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ({"norm_placement": "prenorm"}, {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"norm_placement": "prenorm"}, {"rms_norm_eps": 1e-6}),
        ({"norm_placement": "simplenorm"}, {"rms_norm_eps": 1e-6}),
        ({"norm_placement": "simplenorm"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}),
        ({**GPT2}, {"activation_function": "gelu_new"}),
    ],
)  # fmt: skip
def test_a_wrong_setting_fails_the_check(tmp_path: Path, model: dict, change: dict) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config(**model))
    to_folder(checkpoint, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with CheckpointReader(checkpoint) as reader:
        assert not check_logits(tmp_path / "hf", reader, dtype="float32").passed


def test_norms_of_another_width_do_not_load(tmp_path: Path) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config(norm_placement="qknorm"))
    to_folder(checkpoint, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"qk_norm_width": "head"}))
    with CheckpointReader(checkpoint) as reader, pytest.raises((ValueError, RuntimeError), match="k_norm|mismatch"):
        check_logits(tmp_path / "hf", reader, dtype="float32")


def test_swapped_tensors_fail_the_check_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config())
    files = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    read = CheckpointReader.read
    calls = []

    def swapped(self: CheckpointReader, name: str, **kwargs: Any) -> torch.Tensor:
        calls.append(name)
        exporting = len(calls) <= len(self.parameters)
        parts = name.split(".")
        if exporting and len(parts) > 3 and parts[-2] in files:
            name = ".".join([*parts[:-2], files[parts[-2]], parts[-1]])
        return read(self, name, **kwargs)

    monkeypatch.setattr(CheckpointReader, "read", swapped)
    with pytest.raises(ValueError, match="does not compute what the training model computes"):
        to_folder(checkpoint, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["native"]


def test_gpt2_files_without_prefix_with_masks_and_a_tied_head(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(GOLDEN / "gpt2_bias", source)
    old = {name.removeprefix("transformer."): value for name, value in tensors(source).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, source / "model.safetensors")
    to_checkpoint(source, tmp_path / "native", verify=False)
    to_folder(tmp_path / "native", tmp_path / "hf2")
    assert_same_tensors(GOLDEN / "gpt2_bias", tmp_path / "hf2")


def edited(tmp_path: Path, case: str, config: dict | None = None, weights: dict | None = None) -> Path:
    """A golden folder with other settings; a tensor of `weights` that is None is left out."""
    source = tmp_path / "edited"
    shutil.copytree(GOLDEN / case, source)
    values = json.loads((source / "config.json").read_text()) | (config or {})
    (source / "config.json").write_text(json.dumps(values))
    if weights:
        merged = {**tensors(source), **weights}
        save_file({name: value for name, value in merged.items() if value is not None}, source / "model.safetensors")
    return source


REFUSALS = [
    ("llama2_prenorm", {"model_type": "mistral"}, None, "model_type 'mistral' is not known"),
    ("llama2_prenorm", {"hidden_act": "gelu"}, None, "hidden_act is gelu"),
    ("llama2_prenorm", {"head_dim": 32}, None, "head_dim is 32"),
    ("llama2_prenorm", {"rope_theta": 5e5}, None, "contradict each other"),
    ("llama2_prenorm", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, None, "type 'yarn'"),
    (
        "llama2_prenorm",
        {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}, None, "type 'llama3' with these numbers",
    ),
    ("llama2_prenorm", {"quantization_config": {"bits": 4}}, None, "quantised"),
    ("llama2_prenorm", {"num_hidden_layers": 4}, None, "model.layers.3.* is missing"),
    ("llama2_prenorm", {"num_hidden_layers": 2}, None, "model.layers.2.* is not part of the model"),
    ("llama2_prenorm", {"intermediate_size": 160}, None, r"has shape \[.*192.*\], config.json means \[.*160"),
    ("llama2_prenorm", {"tie_word_embeddings": True}, None, "lm_head.weight differs from the embedding"),
    ("llama2_prenorm", None, {"model.extra.weight": torch.ones(2)}, "model.extra.weight is not part"),
    ("llama2_prenorm", None, {"model.norm.weight": None}, "model.norm.weight is missing"),
    ("gpt2_bias", {"activation_function": "gelu_new"}, None, "exact .erf. GELU"),
    ("gpt2_bias", {"bias": False}, None, "bias false"),
    ("gpt2_bias", {"scale_attn_by_inverse_layer_idx": True}, None, "scale_attn_by_inverse_layer_idx"),
    ("llama2_simplegpt", {"norm_sites": ["z_proj"]}, None, "z_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "weights", "message"), REFUSALS)
def test_import_refuses_what_it_cannot_keep(
    tmp_path: Path, case: str, config: dict | None, weights: dict | None, message: str
) -> None:
    source = edited(tmp_path, case, config, weights)
    with pytest.raises(ValueError, match=message):
        to_checkpoint(source, tmp_path / "native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edited"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3 does not divide the model's 4 attention heads"),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4: the model has 3 layers"),
    ],
)  # fmt: skip
def test_import_refuses_a_layout_that_cannot_be_trained(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_checkpoint(GOLDEN / "llama2_prenorm", tmp_path / "native", **settings)


def test_an_existing_output_is_refused_and_stays(tmp_path: Path) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config())
    output = tmp_path / "hf"
    output.mkdir()
    to_folder(checkpoint, output)  # an empty folder is fine
    with pytest.raises(ValueError, match="--output .* exists and is not an empty folder"):
        to_folder(checkpoint, output)
    with pytest.raises(ValueError, match="--save .* exists and is not an empty folder"):
        to_checkpoint(output, checkpoint)
    assert (output / "README.md").is_file()


def test_the_folder_names_no_place_of_this_machine(tmp_path: Path) -> None:
    checkpoint = native_checkpoint(tmp_path / "native", small_config())
    to_folder(checkpoint, tmp_path / "hf")
    for path in (tmp_path / "hf").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name
    report = json.loads((tmp_path / "hf/conversion.json").read_text())
    assert report["iteration"] == 7
    assert report["model"]["norm_placement"] == "simplenorm"
    assert architecture_of(small_config().model).causal_lm == report["class"]
