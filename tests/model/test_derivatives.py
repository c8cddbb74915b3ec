"""SimpleNorm behind a linear against the closed forms of the paper's appendix (first and second derivatives, float64)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_simple.model.norm_group import NormSpec, norm_group
from tests.model.golden import GOLDEN

CASES = ("square", "tall", "wide", "square_eps")


def golden(case: str) -> dict[str, Tensor]:
    arrays = np.load(GOLDEN / "derivatives.npz")
    return {key.split("/")[1]: torch.from_numpy(arrays[key]) for key in arrays if key.startswith(f"{case}/")}


def simple_norm(z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return norm_group([z], [NormSpec(z.numel(), eps, centred=False)], [gamma], [None])[0]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_value_and_derivatives(case: str) -> None:
    """The golden loss enters by its gradient and Hessian at y: a quadratic with the same ones has the same derivatives."""
    a = golden(case)
    eps = float(a["eps"])

    def loss(y: Tensor) -> Tensor:
        step = y - a["y"]
        return a["g_y"] @ step + 0.5 * step @ a["H_yy"] @ step

    def of_x(x: Tensor) -> Tensor:
        return simple_norm(a["W"] @ x, a["gamma"], eps)

    assert_close(of_x(a["x"]), a["y"])
    assert_close(torch.autograd.functional.jacobian(of_x, a["x"]), a["J_x"])
    assert_close(torch.autograd.functional.jacobian(lambda x: loss(of_x(x)), a["x"]), a["g_x"])
    assert_close(torch.autograd.functional.hessian(lambda x: loss(of_x(x)), a["x"]), a["H_xx"])
    assert_close(a["L"] + a["C"], a["H_xx"])  # the golden parts: linear part and curvature
    z = a["W"] @ a["x"]
    functions = {
        "gamma": (a["gamma"], lambda gamma: loss(simple_norm(z, gamma, eps))),
        "W": (a["W"], lambda weight: loss(simple_norm(weight @ a["x"], a["gamma"], eps))),
        "z": (z, lambda z: loss(simple_norm(z, a["gamma"], eps))),
    }
    for name, (point, function) in functions.items():
        assert_close(torch.autograd.functional.jacobian(function, point), a[f"g_{name}"])
    assert_close(torch.autograd.functional.hessian(functions["gamma"][1], a["gamma"]), a["H_gamma"])
    assert_close(torch.autograd.functional.hessian(functions["z"][1], z), a["H_zz"])
