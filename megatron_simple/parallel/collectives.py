"""Collectives named by their effect, differentiable, for one parallel axis.

| function                   | forward                  | backward       | used for                                  |
|----------------------------|--------------------------|----------------|-------------------------------------------|
| copy_to_tp                 | identity                 | all-reduce     | a replicated input (or gain) for shards   |
| reduce_from_tp             | all-reduce               | identity       | partial outputs of a row-parallel linear  |
| sum_over_tp                | all-reduce               | all-reduce     | a statistic that every shard goes on with |
| gather_from_tp             | all-gather, last dim     | own slice      | whole logits for a reader                 |
| gather_from_sequence       | all-gather, sequence dim | reduce-scatter | shards into column-parallel linears       |
| reduce_scatter_to_sequence | reduce-scatter           | all-gather     | row-parallel outputs into shards          |

`sum_over_tp` is what a norm over a split width needs (PAPER.md): each shard's loss depends on the whole statistic, so the
statistic's gradient is the sum of all shards' gradients. With reduce_from_tp in its place the loss stays exact and the
gradients are wrong. Each function returns its input for an axis of size one. The sequence is dim 1 of [B, S, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_simple.parallel.mesh import Axis

SEQUENCE_DIM = 1
FUNCTIONAL = torch.ops._c10d_functional  # these can be traced, so a compiled block holds its messages


def all_reduce(x: Tensor, axis: Axis, *, op: str = "sum") -> Tensor:
    """The sum (or `op="max"`) over the axis, outside autograd; returns a new tensor."""
    if axis.size == 1:
        return x
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x.contiguous(), op, axis.group.group_name))


def _all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    stacked = FUNCTIONAL.all_gather_into_tensor(x.contiguous(), axis.size, axis.group.group_name)  # along dim 0
    return torch.cat(FUNCTIONAL.wait_tensor(stacked).chunk(axis.size), dim=dim)


def _reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    stacked = torch.cat(x.chunk(axis.size, dim=dim))
    return FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(stacked, "sum", axis.size, axis.group.group_name))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_reduce(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather(x, axis, -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.chunk(ctx.axis.size, dim=-1)[ctx.axis.rank].contiguous(), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather(x, axis, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _reduce_scatter(grad, ctx.axis, SEQUENCE_DIM), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter(x, axis, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather(grad, ctx.axis, SEQUENCE_DIM), None


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def sum_over_tp(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _Sum.apply(x, axis)


def gather_from_tp(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _Gather.apply(x, axis)


def gather_from_sequence(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def reduce_scatter_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else _ReduceScatterSequence.apply(x, axis)
