"""Forward and backward of every row of the table of collectives, at two ranks, against sums written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_simple.config import ParallelConfig
from megatron_simple.parallel import collectives
from megatron_simple.parallel.mesh import Axis, build_mesh, discover_process, start_distributed, stop_distributed
from tests.distributed import run_ranks

NAMES = (
    "copy_to_tp", "reduce_from_tp", "sum_over_tp", "gather_from_tp", "gather_from_sequence",
    "reduce_scatter_to_sequence",
)  # fmt: skip


def value(rank: int) -> torch.Tensor:
    return (torch.arange(2 * 4 * 6, dtype=torch.float64).view(2, 4, 6) + 1) * (rank + 1)


def weight(rank: int, shape: torch.Size) -> torch.Tensor:
    return torch.cos(torch.arange(shape.numel(), dtype=torch.float64)).view(shape) * (3 - rank)


def _apply() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    process = discover_process()
    device = start_distributed(process, timeout_minutes=2)
    tp = build_mesh(ParallelConfig(tensor_model_parallel_size=2), process, device).tp
    results = {}
    for name in NAMES:
        function: Callable = getattr(collectives, name)
        x = value(tp.rank).requires_grad_()
        y = function(x, tp)
        (y * weight(tp.rank, y.shape)).sum().backward()
        results[name] = (y.detach(), x.grad)
    stop_distributed()
    return results


def expected(name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = [value(0), value(1)]
    half = slice(2 * rank, 2 * rank + 2)
    match name:
        case "copy_to_tp":
            y = x[rank]
            return y, weight(0, y.shape) + weight(1, y.shape)
        case "reduce_from_tp":
            y = x[0] + x[1]
            return y, weight(rank, y.shape)
        case "sum_over_tp":
            y = x[0] + x[1]
            return y, weight(0, y.shape) + weight(1, y.shape)
        case "gather_from_tp":
            y = torch.cat(x, dim=-1)
            return y, weight(rank, y.shape)[..., 6 * rank : 6 * rank + 6]
        case "gather_from_sequence":
            y = torch.cat(x, dim=1)
            total = weight(0, y.shape) + weight(1, y.shape)
            return y, total[:, 4 * rank : 4 * rank + 4]
    y = (x[0] + x[1])[:, half]
    return y, torch.cat([weight(0, y.shape), weight(1, y.shape)], dim=1)


def test_table_at_two_ranks() -> None:
    for rank, results in enumerate(run_ranks(2, _apply)):
        for name in NAMES:
            for found, wanted in zip(results[name], expected(name, rank), strict=True):
                assert torch.equal(found, wanted), f"{name} on rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_axis_of_size_one_is_the_input_itself(name: str) -> None:
    x = torch.ones(1, 2, 3)
    assert getattr(collectives, name)(x, Axis()) is x
