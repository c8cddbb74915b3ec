"""The engine at every layout: losses, gradient norms and an evaluation equal one process (fp32)."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.training.layouts import Trajectory, train

TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"

# (ranks, layout, model): a covering selection; each layout of the engine appears, each backbone and placement too.
CASES = [
    (1, {"zero_stage": 0}, {}),
    (2, {TP: 2, "zero_stage": 0}, {}),
    (2, {TP: 2, SP: True}, {"norm_placement": "qknorm"}),
    (2, {"zero_stage": 2}, {"model": "gpt2-tiny", "norm_placement": "prenorm", "normalization": "LayerNorm"}),
    (2, {"zero_stage": 3, "recompute_granularity": "full"}, {}),
    (2, {PP: 2, "recompute_granularity": "selective"}, {"model": "gpt2-tiny"}),
    (4, {PP: 2, TP: 2, SP: True}, {"model": "gpt2-tiny"}),
    (4, {PP: 2, TP: 2}, {}),
    (4, {TP: 2, SP: True, "zero_stage": 3}, {"norm_placement": "peri", "tie_embeddings": True}),
    (4, {TP: 2, "zero_stage": 1}, {"norm_placement": "olmo2"}),
    (4, {PP: 2}, {}),
]
BF16 = [(2, {TP: 2, SP: True, "zero_stage": 2}), (4, {PP: 2, TP: 2})]


def close(found: Trajectory, wanted: Trajectory, *, loss: float, norm: float) -> None:
    assert found.losses == pytest.approx(wanted.losses, abs=loss)
    assert found.norms == pytest.approx(wanted.norms, rel=norm)
    assert found.evaluation == pytest.approx(wanted.evaluation, abs=loss)


@pytest.fixture(scope="module")
def whole() -> dict[str, Trajectory]:
    """One process' trajectory per model, computed once."""
    return {}


def reference(whole: dict[str, Trajectory], model: dict) -> Trajectory:
    key = repr(sorted(model.items()))
    if key not in whole:
        whole[key] = run_ranks(1, train, model)[0]
    return whole[key]


@pytest.mark.parametrize(("ranks", "layout", "model"), CASES, ids=lambda value: str(value))
def test_fp32_layout_equals_one_process(whole: dict, ranks: int, layout: dict, model: dict) -> None:
    wanted = reference(whole, model)
    for found in run_ranks(ranks, train, {**layout, **model}):
        close(found, wanted, loss=1e-5, norm=3e-5)


@pytest.mark.parametrize(("ranks", "layout"), BF16, ids=lambda value: str(value))
def test_bf16_layout_equals_one_process_within_bf16_rounding(whole: dict, ranks: int, layout: dict) -> None:
    """bf16 keeps 8 bits: partial sums over two ranks round differently, about 2^-9 of the loss."""
    wanted = reference(whole, {"bf16": True})
    found = run_ranks(ranks, train, {**layout, "bf16": True})[0]
    close(found, wanted, loss=0.03, norm=0.02)


def test_micro_batches_change_nothing(whole: dict) -> None:
    wanted = reference(whole, {})
    found = run_ranks(1, train, {"micro_batch_size": 4})[0]
    close(found, wanted, loss=1e-5, norm=3e-5)
