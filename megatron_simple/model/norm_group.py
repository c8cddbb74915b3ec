"""Several norms and the activation behind them as one step, with its backward written by hand (PAPER.md, arXiv 2602.01212).

The norms of projections that share an input exchange their sums in one message per direction. Kept for backward: the
projections as they are, and one or two fp32 scalars per token and norm; what else backward needs it computes again.

With z this shard's part of a projection, d its whole width, m the mean (0 for RMSNorm) and r = rsqrt(variance + eps):

    forward    n = (z - m) r                      y = gain n (+ bias)
    backward   h = gain g   a = sum(h)  c = sum(h n)      dz = r (h - n c / d - a / d)     dgain = sum over tokens of g n

The sums run over the whole width, so over all shards; a is there with a mean only. Sums are taken in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_simple.parallel.collectives import sum_over_tp
from megatron_simple.parallel.mesh import Axis


@dataclass(frozen=True)
class NormSpec:
    """One norm of a group: its whole width, eps, and whether the mean is taken off (LayerNorm)."""

    width: int
    eps: float
    centred: bool


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _partial_sums(z: Tensor, spec: NormSpec) -> Tensor:
    """z [..., part of the width] -> [..., 1 or 2]: (the sum and) the sum of squares of this shard."""
    wide = widen(z)
    squares = wide.pow(2).sum(-1, keepdim=True)
    return torch.cat([wide.sum(-1, keepdim=True), squares], dim=-1) if spec.centred else squares


def _scales(total: Tensor, spec: NormSpec) -> Tensor:
    """The sums over the whole width -> r [..., 1], or (m, r) [..., 2] with a mean."""
    mean_square = total / spec.width
    if not spec.centred:
        return torch.rsqrt(mean_square + spec.eps)
    mean, mean_square = mean_square.split(1, dim=-1)
    variance = (mean_square - mean.pow(2)).clamp_min(0.0)
    return torch.cat([mean, torch.rsqrt(variance + spec.eps)], dim=-1)


def _normalized(z: Tensor, scales: Tensor, spec: NormSpec) -> Tensor:
    """n in fp32 or wider."""
    if not spec.centred:
        return widen(z) * scales
    mean, rsqrt = scales.split(1, dim=-1)
    return (widen(z) - mean) * rsqrt


def _over_shards(parts: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """Each of `parts` [..., k] summed over the axis, in one message."""
    if axis.size == 1 or not parts:
        return parts
    return sum_over_tp(torch.cat(list(parts), dim=-1), axis).split([part.shape[-1] for part in parts], dim=-1)


def _all_scales(zs: Sequence[Tensor], specs: Sequence[NormSpec], axis: Axis) -> list[Tensor]:
    totals = _over_shards([_partial_sums(z, spec) for z, spec in zip(zs, specs, strict=True)], axis)
    return [_scales(total, spec) for total, spec in zip(totals, specs, strict=True)]


def _gained(z: Tensor, gain: Tensor, bias: Tensor | None, scales: Tensor, spec: NormSpec) -> Tensor:
    y = gain * _normalized(z, scales, spec).to(z.dtype)
    return y if bias is None else y + bias


def _activate(inner: Sequence[Tensor], activation: str | None) -> tuple[Tensor, ...]:
    match activation:
        case "swiglu":
            return (F.silu(inner[0]) * inner[1],)
        case "gelu":
            return (F.gelu(inner[0]),)
    return tuple(inner)


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(grad, x)
    sigmoid = x.sigmoid()  # torch has no derivative of its own silu_backward
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def _activate_backward(grads: Sequence[Tensor], inner: Sequence[Tensor], activation: str | None) -> Sequence[Tensor]:
    """Gradients of the activation's inputs from those of its outputs."""
    match activation:
        case "swiglu":
            (grad,), (gate, up) = grads, inner
            return [_silu_backward(grad * up, gate), grad * F.silu(gate)]
        case "gelu":
            return [torch.ops.aten.gelu_backward(grads[0], inner[0])]
    return grads


def _over_tokens(x: Tensor) -> Tensor:
    """The sum of [..., width] over all leading dims: [width]."""
    return x.reshape(-1, x.shape[-1]).sum(0)


def _norms_backward(
    grads: Sequence[Tensor],
    zs: Sequence[Tensor],
    gains: Sequence[Tensor],
    scales: Sequence[Tensor],
    specs: Sequence[NormSpec],
    axis: Axis,
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the projections and of the gains, from those of the normalised outputs."""
    ns = [_normalized(z, scale, spec) for z, scale, spec in zip(zs, scales, specs, strict=True)]
    hs = [widen(grad * gain) for grad, gain in zip(grads, gains, strict=True)]
    sums = []
    for h, n, spec in zip(hs, ns, specs, strict=True):
        product = (h * n).sum(-1, keepdim=True)
        sums.append(torch.cat([h.sum(-1, keepdim=True), product], dim=-1) if spec.centred else product)
    grad_zs, grad_gains = [], []
    for i, total in enumerate(_over_shards(sums, axis)):
        mean = total / specs[i].width
        h = hs[i] - mean[..., :1] if specs[i].centred else hs[i]
        grad_zs.append((scales[i][..., -1:] * (h - ns[i] * mean[..., -1:])).to(zs[i].dtype))
        grad_gains.append(_over_tokens(grads[i] * ns[i]).to(gains[i].dtype))
    return grad_zs, grad_gains


class _NormGroup(torch.autograd.Function):
    """tensors = zs, gains, biases, of the same number each; None for the spec, gain and bias that a projection lacks."""

    @staticmethod
    def forward(ctx, specs: tuple[NormSpec | None, ...], axis: Axis, activation: str | None, *tensors: Tensor | None):
        count = len(specs)
        zs, gains, biases = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        normed = [i for i in range(count) if specs[i] is not None]
        scales = _all_scales([zs[i] for i in normed], [specs[i] for i in normed], axis)
        inner = list(zs)
        for i, scale in zip(normed, scales, strict=True):
            inner[i] = _gained(zs[i], gains[i], biases[i], scale, specs[i])
        ctx.specs, ctx.axis, ctx.activation = specs, axis, activation
        ctx.save_for_backward(*tensors, *scales)
        return _activate(inner, activation)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        count, axis = len(ctx.specs), ctx.axis
        saved = ctx.saved_tensors  # once: recomputed activations are handed out a single time
        zs, gains, biases, scales = (saved[part * count : (part + 1) * count] for part in range(4))
        normed = [i for i in range(count) if ctx.specs[i] is not None]
        specs = [ctx.specs[i] for i in normed]
        if torch.is_grad_enabled():  # a second derivative goes through the scales too
            scales = _all_scales([zs[i] for i in normed], specs, axis)
        if ctx.activation is not None:
            inner = list(zs)
            for i, scale, spec in zip(normed, scales, specs, strict=True):
                inner[i] = _gained(zs[i], gains[i], biases[i], scale, spec)
            grads = _activate_backward(grads, inner, ctx.activation)
        grad_zs, grad_gains = list(grads), [None] * count
        grad_biases = [None if bias is None else _over_tokens(grad) for grad, bias in zip(grads, biases, strict=True)]
        of_normed = [[values[i] for i in normed] for values in (grads, zs, gains)]
        for i, grad_z, grad_gain in zip(normed, *_norms_backward(*of_normed, scales, specs, axis), strict=True):
            grad_zs[i], grad_gains[i] = grad_z, grad_gain
        return None, None, None, *grad_zs, *grad_gains, *grad_biases


def norm_group(
    zs: Sequence[Tensor],
    specs: Sequence[NormSpec | None],
    gains: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    *,
    axis: Axis = Axis(),
    activation: str | None = None,
) -> tuple[Tensor, ...]:
    """The norms of `zs`, and the activation of all of them if one is named.

    Each z [..., part of its width over `axis`]; without a spec it passes as it is. `activation`: "swiglu" makes one tensor of
    two (silu(first) * second), "gelu" (erf form) one of one; with None as many come back as went in.
    """
    return _NormGroup.apply(tuple(specs), axis, activation, *zs, *gains, *biases)
