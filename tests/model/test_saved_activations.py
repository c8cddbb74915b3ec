"""Bytes that one block keeps for backward, counted by hooks against the formula that the README's table comes from."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.block_memory import kept_bytes, kept_elements
from megatron_simple.config import BACKBONES, PLACEMENTS, ModelConfig, resolve_model


def config_of(**settings) -> ModelConfig:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 100}
    return resolve_model(ModelConfig(**sizes, **settings), 64)


@pytest.mark.parametrize(("backbone", "placement"), list(itertools.product(BACKBONES, PLACEMENTS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hooks_count_what_the_formula_says(backbone: str, placement: str, dtype: torch.dtype) -> None:
    config = config_of(backbone=backbone, norm_placement=placement)
    activations, scalars = kept_elements(config)
    expected = 64 * (activations * dtype.itemsize + scalars * 4)
    assert kept_bytes(config, tokens=64, dtype=dtype) == expected


def test_a_gated_mlp_with_norms_keeps_two_scalars_per_token_more() -> None:
    plain, normed = (config_of(norm_sites=sites) for sites in ((), ("gate_proj", "up_proj")))
    difference = kept_bytes(normed, tokens=64, dtype=torch.bfloat16) - kept_bytes(plain, tokens=64, dtype=torch.bfloat16)
    assert difference == 64 * 2 * 4


def test_simplenorm_keeps_little_more_than_qknorm_at_the_7b_shape() -> None:
    sizes = {"model": "llama2-7b", "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}

    def kept(placement: str) -> int:
        activations, scalars = kept_elements(resolve_model(ModelConfig(**sizes, norm_placement=placement), 2048))
        return activations * 2 + scalars * 4

    assert kept("simplenorm") / kept("qknorm") <= 1.15
