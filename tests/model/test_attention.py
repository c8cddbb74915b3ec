"""Rotary tables against transformers, and attention with grouped queries against a loop over heads, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_simple.config import ModelConfig, resolve_model
from megatron_simple.model.attention import SelfAttention
from megatron_simple.model.rotary import LLAMA31_SCALING, apply_rotary, rotary_table
from megatron_simple.parallel.mesh import Axis

DOUBLE = {"dtype": torch.float64, "device": torch.device("cpu")}


@pytest.mark.parametrize("scaling", [None, "llama3.1"])
@pytest.mark.parametrize(("head_dim", "base"), [(32, 1e4), (128, 5e5)])
def test_rotation_equals_transformers(head_dim: int, base: float, scaling: str | None) -> None:
    rope = {"rope_type": "default", "rope_theta": base}
    if scaling:
        rope |= {"rope_type": "llama3", **LLAMA31_SCALING}
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=rope)
    config.max_position_embeddings = 131_072
    x = torch.randn(1, 2, 300, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(300)[None])
    wanted, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotary_table(300, head_dim, base=base, scaling=scaling, dtype=torch.float32, device=torch.device("cpu"))
    assert (apply_rotary(x, *ours) - wanted).abs().max() <= 1e-4  # angles of up to 300 radians in fp32


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rotary_table(9, 8, base=100.0, scaling=None, **DOUBLE)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotated_q, rotated_k = (apply_rotary(t.expand(1, 1, 9, 8), cos, sin)[0, 0] for t in (q, k))
    assert torch.allclose(rotated_q.norm(dim=-1), q.norm(), rtol=1e-12)
    scores = rotated_q @ rotated_k.T
    for distance in range(-8, 9):
        line = scores.diagonal(distance)
        assert torch.allclose(line, line[0], rtol=0, atol=1e-12)


def by_hand(layer: SelfAttention, x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """One head, one query at a time."""
    length, head_dim = x.shape[1], config.head_dim
    q, k, v = (x @ linear.weight.T for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    angles = torch.outer(
        torch.arange(length, dtype=x.dtype),
        config.rotary_base ** (-torch.arange(0, head_dim, 2, dtype=x.dtype) / head_dim),
    )

    def rotated(t: torch.Tensor, position: int) -> torch.Tensor:
        first, second = t[: head_dim // 2], t[head_dim // 2 :]
        cos, sin = angles[position].cos(), angles[position].sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    out = torch.zeros_like(q)
    for head in range(config.num_attention_heads):
        group = head // (config.num_attention_heads // config.num_query_groups)
        mine, theirs = (slice(i * head_dim, (i + 1) * head_dim) for i in (head, group))
        for position in range(length):
            query = rotated(q[0, position, mine], position)
            keys = torch.stack([rotated(k[0, j, theirs], j) for j in range(position + 1)])
            weights = (keys @ query / math.sqrt(head_dim)).softmax(-1)
            out[0, position, mine] = weights @ v[0, : position + 1, theirs]
    return out @ layer.o_proj.weight.T


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_equal_a_loop(groups: int) -> None:
    config = resolve_model(
        ModelConfig(backbone="llama2", norm_sites=(), hidden_size=32, num_attention_heads=4, num_query_groups=groups,
                    vocab_size=8), 16,
    )  # fmt: skip
    layer = SelfAttention(config, tp=Axis(), sequence_parallel=False, recompute=False).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
        x = torch.randn(1, 7, 32, generator=generator, dtype=torch.float64)
        assert torch.allclose(layer(x), by_hand(layer, x, config), rtol=0, atol=1e-10)
