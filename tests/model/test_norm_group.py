"""The hand-written backward of norms and activation, against autograd over the plain formulas, first and second order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_simple.model.norm_group import NormSpec, norm_group

RMS, LAYER = NormSpec(6, 1e-3, centred=False), NormSpec(6, 1e-3, centred=True)
CASES = [
    ((RMS, RMS, RMS), None), ((RMS, None, RMS), None), ((LAYER, RMS), None),
    ((RMS, RMS), "swiglu"), ((LAYER, LAYER), "swiglu"), ((None, RMS), "swiglu"), ((None, None), "swiglu"),
    ((RMS,), "gelu"), ((LAYER,), "gelu"), ((None,), "gelu"),
]  # fmt: skip


def plain(zs: list[Tensor], specs: tuple, gains: list, biases: list, activation: str | None) -> tuple[Tensor, ...]:
    """The same by torch's own operators."""
    inner = []
    for z, spec, gain, bias in zip(zs, specs, gains, biases, strict=True):
        if spec is None:
            inner.append(z)
        elif spec.centred:
            inner.append(F.layer_norm(z, z.shape[-1:], gain, bias, spec.eps))
        else:
            inner.append(F.rms_norm(z, z.shape[-1:], gain, spec.eps))
    if activation == "swiglu":
        return (F.silu(inner[0]) * inner[1],)
    return (F.gelu(inner[0]),) if activation == "gelu" else tuple(inner)


def inputs(specs: tuple, dtype: torch.dtype) -> tuple[list[Tensor], list, list]:
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    zs = [random(2, 3, 6) for _ in specs]
    gains = [None if spec is None else random(6) for spec in specs]
    biases = [random(6) if spec is not None and spec.centred else None for spec in specs]
    return zs, gains, biases


@pytest.mark.parametrize(("specs", "activation"), CASES)
def test_values_and_gradients_equal_the_plain_formulas(specs: tuple, activation: str | None) -> None:
    zs, gains, biases = inputs(specs, torch.float64)
    leaves = [t for t in (*zs, *gains, *biases) if t is not None]
    ours = norm_group(zs, specs, gains, biases, activation=activation)
    theirs = plain(zs, specs, gains, biases, activation)
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y) for y in ours]
    found = torch.autograd.grad([(y * w).sum() for y, w in zip(ours, weights, strict=True)], leaves)
    expected = torch.autograd.grad([(y * w).sum() for y, w in zip(theirs, weights, strict=True)], leaves)
    for one, other in zip((*ours, *found), (*theirs, *expected), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("specs", "activation"), CASES)
def test_second_derivatives_are_right(specs: tuple, activation: str | None) -> None:
    zs, gains, biases = inputs(specs, torch.float64)
    present = [t is not None for t in (*zs, *gains, *biases)]

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        rest = iter(leaves)
        filled = [next(rest) if there else None for there in present]
        count = len(specs)
        return norm_group(filled[:count], specs, filled[count : 2 * count], filled[2 * count :], activation=activation)

    leaves = [t for t in (*zs, *gains, *biases) if t is not None]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_constant_row_of_a_layer_norm_is_finite() -> None:
    """The variance of a constant, as the difference of two rounded numbers, may come out below zero."""
    z = torch.full((1, 1, 6), 1e4, requires_grad=True)
    (y,) = norm_group([z], [NormSpec(6, 1e-12, centred=True)], [torch.ones(6)], [None])
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(z.grad).all()


def test_bf16_sums_in_fp32_and_rounds_before_the_gain() -> None:
    """The order of casts of Hugging Face's Llama, bit for bit."""
    z = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    gain = torch.linspace(0.5, 1.5, 512).bfloat16()
    (y,) = norm_group([z], [NormSpec(512, 1e-5, centred=False)], [gain], [None])
    wide = z.float()
    expected = gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(y, expected)
