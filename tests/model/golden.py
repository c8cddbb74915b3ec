"""The golden cases: models run through the released code in float64, and a name map of its own, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_simple.config import ModelConfig, resolve_model
from megatron_simple.model.init import shard_of

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("llama2_prenorm", "llama2_simplegpt", "gpt2_bias", "gpt2_simplenorm_rms")
GPT2_LINEARS = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
GPT2_NORMS = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", "self_attn.q_proj.norm": "attn.q_norm",
    "self_attn.k_proj.norm": "attn.k_norm", "self_attn.v_proj.norm": "attn.v_norm",
    "self_attn.o_proj.norm": "attn.o_norm", "mlp.up_proj.norm": "mlp.fc_norm", "mlp.down_proj.norm": "mlp.proj_norm",
}  # fmt: skip
GPT2_OUTSIDE = {"embed_tokens": "wte", "position_embeddings": "wpe", "final_norm": "ln_f"}


def golden_config(case: str) -> ModelConfig:
    saved = json.loads((GOLDEN / case / "config.json").read_text())
    common = {"vocab_size": saved["vocab_size"], "make_vocab_size_divisible_by": 1}
    if saved["model_type"].endswith("gpt2"):
        config = ModelConfig(
            backbone="nanogpt", num_layers=saved["n_layer"], hidden_size=saved["n_embd"],
            num_attention_heads=saved["n_head"], norm_placement=saved["norm_placement"],
            normalization="RMSNorm" if saved.get("normalization") == "rmsnorm" else "LayerNorm",
            add_bias_linear=saved["bias"], **common,
        )  # fmt: skip
    else:
        config = ModelConfig(
            backbone="llama2", num_layers=saved["num_hidden_layers"], hidden_size=saved["hidden_size"],
            ffn_hidden_size=saved["intermediate_size"], num_attention_heads=saved["num_attention_heads"],
            norm_placement=saved["norm_placement"], **common,
        )  # fmt: skip
    return resolve_model(config, 64)


def golden_arrays(case: str) -> Any:
    return np.load(GOLDEN / case / "golden.npz", allow_pickle=False)


def disk_name(name: str) -> str:
    """The Hugging Face name of a logical one; for GPT-2's q, k and v the fused tensor."""
    if name.startswith(("embed_tokens", "layers", "final_norm", "lm_head")):
        name = name.replace("_proj.norm.", "_norm.")
    outside = {"final_norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
    renamed = name.replace("attention_norm", "input_layernorm").replace("mlp_norm", "post_attention_layernorm")
    return outside.get(name, "model." + renamed)


def gpt2_disk_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in GPT2_OUTSIDE:
        return f"transformer.{GPT2_OUTSIDE[stem]}.{leaf}"
    _, layer, path = stem.split(".", 2)
    path = GPT2_NORMS.get(path) or GPT2_LINEARS.get(path) or "attn.c_attn"
    return f"transformer.h.{layer}.{path}.{leaf}"


def whole_tensor(weights: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """The logical parameter `name` out of the golden model's tensors."""
    if config.rotary:
        return weights[disk_name(name)]
    value = weights[gpt2_disk_name(name)]
    linear = name.endswith(("_proj.weight", "_proj.bias"))
    value = value.T if linear and value.ndim == 2 else value
    if ".self_attn." in name and linear and "o_proj" not in name:
        value = value.chunk(3)["qkv".index(name.split(".self_attn.")[1][0])]
    return value


def fill(model: nn.Module, case: str, config: ModelConfig) -> None:
    """Golden weights into a model, sliced where it is split."""
    weights = load_file(GOLDEN / case / "model.safetensors")
    used = set()
    with torch.no_grad():
        for parameter in model.parameters():
            name = parameter.logical_name
            parameter.copy_(shard_of(whole_tensor(weights, name, config).to(parameter.dtype), parameter))
            used.add(disk_name(name) if config.rotary else gpt2_disk_name(name))
    assert used == set(weights), f"unused or missing tensors: {used ^ set(weights)}"


def probe(gradient: Tensor) -> Tensor:
    """sum_i g_i cos(0.37 (i + 1)) over the flat index i."""
    flat = gradient.reshape(-1)
    return (flat * torch.cos(0.37 * torch.arange(1, flat.numel() + 1, dtype=flat.dtype))).sum()
