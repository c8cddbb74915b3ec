"""Cross-entropy over a vocabulary whose columns are split over the tensor-parallel axis, in fp32 (or wider)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_simple.parallel.collectives import all_reduce
from megatron_simple.parallel.mesh import Axis


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits in their own dtype and one log-sum-exp per token; backward rebuilds the softmax from them."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        columns = logits.shape[-1]
        first = axis.rank * columns
        real = max(0, min(columns, vocab_size - first))  # the columns behind are padding, out of the softmax
        values = logits[..., :real].to(wide)  # [B, S, real]
        largest = values.amax(-1) if real else logits.new_full(labels.shape, -torch.inf, dtype=wide)
        largest = all_reduce(largest, axis, op="max")  # [B, S]
        local = labels - first
        mine = (local >= 0) & (local < real)
        target = torch.zeros_like(largest)
        if real:
            picked = values.gather(-1, local.clamp(0, real - 1).unsqueeze(-1)).squeeze(-1)
            target = torch.where(mine, picked - largest, target)
        exp_sum = (values - largest.unsqueeze(-1)).exp_().sum(-1)
        exp_sum, target = all_reduce(torch.stack([exp_sum, target]), axis).unbind(0)  # one message for both
        log_sum = exp_sum.log()
        ctx.save_for_backward(logits, local, mine, log_sum + largest)
        ctx.real = real
        return log_sum - target

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits, local, mine, log_sum_exp = ctx.saved_tensors
        real = ctx.real
        grad_logits = torch.zeros_like(logits)
        if real:
            softmax = (logits[..., :real].to(grad.dtype) - log_sum_exp.unsqueeze(-1)).exp_()
            index = local.clamp(0, real - 1).unsqueeze(-1)
            softmax.scatter_add_(-1, index, -mine.to(softmax.dtype).unsqueeze(-1))
            grad_logits[..., :real] = softmax.mul_(grad.unsqueeze(-1)).to(logits.dtype)
        return grad_logits, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, *, vocab_size: int) -> Tensor:
    """-log softmax(logits)[label] per token [nats].

    logits [B, S, V / tp] of this shard, labels int64 [B, S] (ids below `vocab_size`), the same on every shard -> [B, S]
    in fp32 (float64 for float64 logits). Columns from `vocab_size` on are padding: they get no probability and no gradient.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, axis, vocab_size)
