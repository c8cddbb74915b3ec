"""A whole run as a user sees it: SIGTERM, metrics, config.yaml, evaluation at any layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed import run_ranks
from tests.tools.test_export import call
from tests.training.runs import flags, launch, rows, tensors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_after_the_step_in_progress_and_the_run_resumes(tmp_path: Path, data: str, ranks: int) -> None:
    program = [sys.executable, "-m", "megatron_simple.pretrain"]
    if ranks > 1:
        program[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = tmp_path / "run"
    arguments = flags(data, run, "--fp32", "--train-iters", "100000", "--eval-iters", "0")
    settings = {"text": True, "cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    running = subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
    try:
        for line in running.stdout:
            if line.startswith("iteration      5/"):
                break
        running.send_signal(signal.SIGTERM)
        printed, errors = running.communicate(timeout=120)
    finally:
        running.kill()
    if ranks == 1:
        assert (running.returncode, errors) == (0, "")
    done = max(row["iteration"] for row in rows(run))
    assert f"stopping after iteration {done} as asked (saved)" in printed, errors
    assert "Traceback" not in errors.split("torch/distributed")[0]
    assert (run / "latest").read_text().strip() == f"iter_{done:07d}"
    assert len(tensors(run, done)) == ranks
    resumed = launch(ranks, flags(data, run, "--fp32", "--train-iters", str(done + 1), "--eval-iters", "0", "--resume"))
    assert f"of iteration {done} from" in resumed


def test_metrics_say_what_happened_and_the_yaml_file_runs_it_again(tmp_path: Path, data: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    launch(1, flags(data, first, "--fp32"))
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    training = [row for row in lines if "loss" in row]
    assert [row["consumed_samples"] for row in training] == [4, 8, 12, 16, 20, 24]
    for row in training:
        assert row["consumed_tokens"] == row["consumed_samples"] * 16
        assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["step_seconds"])
        assert row["memory_gib"] > 0.05
        assert row["mfu"] is None
    assert [row["learning_rate"] for row in training[:2]] == [5e-4, 1e-3]
    assert [row["iteration"] for row in lines if "validation_loss" in row] == [3, 6]
    events = EventAccumulator(str(first))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([row["loss"] for row in training])
    launch(1, ["--config", str(first / "config.yaml"), "--save", str(second), "--log-dir", str(second)])
    assert rows(second) == rows(first)
    assert tensors(second) == tensors(first)


def _evaluate(arguments: list[str]) -> tuple[int, str, str]:
    done = call("evaluate", *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (2, []),
    ],
)
def test_evaluation_is_the_same_at_every_layout(tmp_path: Path, data: str, ranks: int, layout: list[str]) -> None:
    """Ten samples over two data-parallel ranks in batches of four: the last batches are filled up."""
    launch(1, flags(data, tmp_path / "run", "--fp32"))
    arguments = ["--load", str(tmp_path / "run"), "--data-path", data, "--seq-length", "16", "--micro-batch-size", "4"]
    ((_, alone, _),) = run_ranks(1, _evaluate, arguments)
    wanted = json.loads(alone.splitlines()[-1])
    code, printed, errors = run_ranks(ranks, _evaluate, [*arguments, *layout])[0]
    assert code == 0, errors
    found = json.loads(printed.splitlines()[-1])
    assert found["tokens"] == wanted["tokens"] > 0
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
