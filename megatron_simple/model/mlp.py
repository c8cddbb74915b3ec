"""The MLP: SwiGLU (gate, up, down) or GELU (up, down), its inner width split over the tensor-parallel axis."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_simple.config import ModelConfig
from megatron_simple.model.norm import make_norm, normalize_group
from megatron_simple.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_group
from megatron_simple.parallel.mesh import Axis


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))) with the erf form of GELU, as nanoGPT has it."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        width, bias = config.ffn_hidden_size, config.add_bias_linear

        def column(site: str) -> ColumnParallelLinear:
            norm = make_norm(config, site, width, axis=tp)
            return ColumnParallelLinear(config.hidden_size, width, tp=tp, bias=bias, norm=norm)

        self.gate_proj = column("gate_proj") if config.gated_mlp else None
        self.up_proj = column("up_proj")
        self.down_proj = RowParallelLinear(
            width,
            config.hidden_size,
            tp=tp,
            bias=bias,
            sequence_parallel=sequence_parallel,
            norm=make_norm(config, "down_proj", config.hidden_size, shared=tp if sequence_parallel else Axis()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] (or a sequence shard) -> the same shape."""
        linears = [self.up_proj] if self.gate_proj is None else [self.gate_proj, self.up_proj]
        zs = column_parallel_group(x, linears, tp=self.tp, sequence_parallel=self.sequence_parallel)
        activation = "gelu" if self.gate_proj is None else "swiglu"
        (inner,) = normalize_group(zs, [linear.norm for linear in linears], axis=self.tp, activation=activation)
        return self.down_proj(inner)  # inner [B, S, F / tp]
