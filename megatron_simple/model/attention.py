"""Causal self-attention with grouped queries, heads split over the tensor-parallel axis.

Letters: B batch, S sequence, D model width, N query heads, K key/value heads, H head dim, tp the axis' size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_simple.config import ModelConfig
from megatron_simple.model.norm import make_norm, normalize_group
from megatron_simple.model.rotary import apply_rotary, rotary_table
from megatron_simple.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_group
from megatron_simple.parallel.mesh import Axis


class SelfAttention(nn.Module):
    """q, k, v projections (with the norms of their sites), scaled dot-product attention, output projection."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool, recompute: bool):
        super().__init__()
        self.config, self.tp, self.sequence_parallel, self.recompute = config, tp, sequence_parallel, recompute
        self.heads = tp.part(config.num_attention_heads)
        self.kv_heads = tp.part(config.num_query_groups)
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_query_groups * config.head_dim

        def column(site: str, out: int) -> ColumnParallelLinear:
            norm = make_norm(config, site, out, axis=tp)
            return ColumnParallelLinear(config.hidden_size, out, tp=tp, bias=config.add_bias_linear, norm=norm)

        self.q_proj = column("q_proj", width)
        self.k_proj = column("k_proj", kv_width)
        self.v_proj = column("v_proj", kv_width)
        self.o_proj = RowParallelLinear(
            width,
            config.hidden_size,
            tp=tp,
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
            norm=make_norm(config, "o_proj", config.hidden_size, shared=tp if sequence_parallel else Axis()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] (or a sequence shard [B, S / tp, D]) -> the same shape."""
        projections = [self.q_proj, self.k_proj, self.v_proj]
        zs = column_parallel_group(x, projections, tp=self.tp, sequence_parallel=self.sequence_parallel)
        q, k, v = normalize_group(zs, [linear.norm for linear in projections], axis=self.tp)
        if self.recompute:
            out = checkpoint(self.core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self.core(q, k, v)
        return self.o_proj(out)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, S, N / tp * H], k and v [B, S, K / tp * H] -> [B, S, N / tp * H]; the part without parameters."""
        head_dim = self.config.head_dim
        q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))  # [B, heads / tp, S, H]
        if self.config.rotary:
            cos, sin = rotary_table(
                q.shape[2], head_dim, base=self.config.rotary_base, scaling=self.config.rope_scaling,
                dtype=q.dtype, device=q.device,
            )  # fmt: skip
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return out.transpose(1, 2).flatten(2)
