"""Linears and the embedding, split over the tensor-parallel axis; a linear takes the norm behind it as a part.

Letters: B batch, S sequence, I and O a linear's input and output width, V vocabulary rows, D model width, tp the axis' size.
A norm behind a row-parallel linear is applied by it; those behind a group of column-parallel linears are applied together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_simple.parallel.collectives import (
    copy_to_tp,
    gather_from_sequence,
    reduce_from_tp,
    reduce_scatter_to_sequence,
)
from megatron_simple.parallel.mesh import Axis


def mark_shard(parameter: nn.Parameter, *, partition_dim: int | None, axis: Axis) -> nn.Parameter:
    """Writes the marks that the gradient norm, checkpoints, export and init read.

    `partition_dim` is the dim that is split over `axis`; None means that every rank holds the same whole parameter.
    DeepSpeed reads `tensor_model_parallel` for its own gradient norm.
    """
    split = partition_dim is not None and axis.size > 1
    parameter.tensor_model_parallel = split
    parameter.partition_dim = partition_dim
    parameter.shards = axis.size if split else 1
    parameter.shard = axis.rank if split else 0
    parameter.local_shape = tuple(parameter.shape)  # ZeRO-3 leaves an empty tensor between uses
    return parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the O output columns split: weight [O / tp, I], bias [O / tp].

    `forward` is the product alone: `norm` is applied to all projections of an input together (model/norm.py).
    """

    def __init__(self, in_features: int, out_features: int, *, tp: Axis, bias: bool, norm: nn.Module | None = None):
        super().__init__()
        rows = tp.part(out_features)
        self.weight = mark_shard(nn.Parameter(torch.empty(rows, in_features)), partition_dim=0, axis=tp)
        self.bias = mark_shard(nn.Parameter(torch.empty(rows)), partition_dim=0, axis=tp) if bias else None
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # [B, S, O / tp]


def column_parallel_group(
    x: Tensor, linears: Sequence[ColumnParallelLinear], *, tp: Axis, sequence_parallel: bool
) -> list[Tensor]:
    """The products of projections that share an input, with one copy of it in backward; their norms are not applied yet.

    x [B, S, I] (or a sequence shard [B, S / tp, I]) -> one [B, S, O_i / tp] per linear.
    """
    x = gather_from_sequence(x, tp) if sequence_parallel else copy_to_tp(x, tp)
    return [linear(x) for linear in linears]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the I input columns split: weight [O, I / tp], bias [O]; the output is whole.

    x [B, S, I / tp] -> [B, S, O], or its sequence shard [B, S / tp, O] under sequence parallelism, where the bias'
    gradient is a partial sum and goes through copy_to_tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        bias: bool,
        sequence_parallel: bool,
        norm: nn.Module | None = None,
    ):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.weight = mark_shard(nn.Parameter(torch.empty(out_features, tp.part(in_features))), partition_dim=1, axis=tp)
        self.bias = mark_shard(nn.Parameter(torch.empty(out_features)), partition_dim=None, axis=tp) if bias else None
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y = reduce_scatter_to_sequence(y, self.tp) if self.sequence_parallel else reduce_from_tp(y, self.tp)
        if self.bias is not None:
            y = y + (copy_to_tp(self.bias, self.tp) if self.sequence_parallel else self.bias)
        return y if self.norm is None else self.norm(y)


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary split over the axis: weight [V / tp, D]; tokens of other shards contribute zero.

    The same rows serve as the head of a model with tied embeddings: `as_head=True`.
    """

    def __init__(self, rows: int, width: int, *, tp: Axis, sequence_parallel: bool):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.rows = tp.part(rows)
        self.weight = mark_shard(nn.Parameter(torch.empty(self.rows, width)), partition_dim=0, axis=tp)

    def forward(self, x: Tensor, *, as_head: bool = False) -> Tensor:
        """tokens int64 [B, S] -> [B, S, D] or its sequence shard [B, S / tp, D]; as head [B, S, D] -> [B, S, V / tp]."""
        return self.logits(x) if as_head else self.lookup(x)

    def lookup(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp.rank * self.rows
        outside = (local < 0) | (local >= self.rows)
        x = F.embedding(local.masked_fill(outside, 0), self.weight)
        x = x.masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_scatter_to_sequence(x, self.tp) if self.sequence_parallel else reduce_from_tp(x, self.tp)

    def logits(self, x: Tensor) -> Tensor:
        x = gather_from_sequence(x, self.tp) if self.sequence_parallel else copy_to_tp(x, self.tp)
        return F.linear(x, self.weight)


class VocabParallelHead(VocabParallelEmbedding):
    """The untied head: the same split rows, used for logits only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)
