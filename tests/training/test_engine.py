"""What the engine keeps true besides the numbers: equal replicas, equal starts, bounded waiting, recomputation, compiling."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch

from megatron_simple.parallel.mesh import stop_distributed
from tests.distributed import run_ranks
from tests.training.layouts import build, my_batch, train

TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"


def _weights(settings: dict, steps: int) -> tuple[tuple[int, int, int], dict[str, tuple[bool, str]]]:
    """This rank's place (pp, dp, tp), and by name whether a parameter is split and a digest of its bytes."""
    config, mesh, engine = build(settings)
    for iteration in range(steps):
        engine.train_step(my_batch(config, mesh, iteration), lr=config.training.lr)
    digests = {}
    for parameter in engine.module.parameters():
        data = parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
        digests[parameter.logical_name] = (parameter.tensor_model_parallel, hashlib.sha256(data).hexdigest())
    stop_distributed()
    return (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank), digests


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {TP: 2, SP: True, "zero_stage": 1, "bf16": True}),
        (4, {TP: 2, PP: 2, "model": "gpt2-tiny"}),
        (4, {TP: 2, "zero_stage": 2, "bf16": True, "norm_placement": "qknorm", "qk_norm_width": "head"}),
        (2, {TP: 2, SP: True, "zero_stage": 0}),
    ],
    ids=str,
)
def test_replicas_stay_bitwise_equal(ranks: int, settings: dict) -> None:
    """Weights that several ranks hold, over TP (replicated), DP (all) and PP (tied), after three steps."""
    seen: dict[tuple, set[str]] = {}
    for (_, _, tp), digests in run_ranks(ranks, _weights, settings, 3):
        for name, (split, digest) in digests.items():
            seen.setdefault((name, tp if split else None), set()).add(digest)
    assert len(seen) > 20
    assert {key for key, digests in seen.items() if len(digests) > 1} == set()


def _waiting(settings: dict) -> tuple[float, str]:
    config, mesh, engine = build({**settings, "distributed_timeout_minutes": 0.05})
    began, error = time.monotonic(), ""
    if mesh.process.rank == 1:
        time.sleep(8)  # a rank that does not come
    else:
        try:
            engine.train_step(my_batch(config, mesh, 0), lr=1e-3)
        except RuntimeError as caught:
            error = str(caught)
    return time.monotonic() - began, error


@pytest.mark.parametrize("settings", [{TP: 2, "zero_stage": 1}, {PP: 2}], ids=str)
def test_a_rank_that_does_not_come_is_given_up_after_the_timeout(settings: dict) -> None:
    seconds, error = run_ranks(2, _waiting, settings)[0]
    assert "Timed out" in error or "timed out" in error, error
    assert 2 < seconds < 7.5


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputation_in_a_pipeline_is_bitwise_the_same(granularity: str) -> None:
    layout = {PP: 2, "bf16": True}
    kept, recomputed = (run_ranks(2, train, {**layout, "recompute_granularity": g})[0] for g in ("none", granularity))
    assert recomputed == kept


def test_compiled_blocks_train_alike() -> None:
    plain, compiled = (run_ranks(1, train, {"compile": flag, "num_layers": 1})[0] for flag in (False, True))
    assert compiled.losses == pytest.approx(plain.losses, abs=1e-5)
    assert compiled.norms == pytest.approx(plain.norms, rel=3e-5)
