"""A run that stops and resumes equals one that never stopped, to the last bit; any layout goes on from any other's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.runs import flags, launch, rows, tensors

TP2, PP2, SP = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"], ["--sequence-parallel"]
FP32 = ["--fp32"]

CASES = [
    (1, FP32), (1, []), (1, [*FP32, "--zero-stage", "0"]),
    (2, [*FP32, "--zero-stage", "0"]), (2, FP32), (2, []), (2, ["--zero-stage", "2"]),
    (2, [*FP32, "--zero-stage", "3"]), (2, ["--zero-stage", "3"]),
    (2, [*FP32, *TP2]), (2, [*TP2, *SP]), (2, [*FP32, *PP2]), (2, PP2), (4, [*TP2, *PP2, *SP]),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "layout"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else value)
def test_resume_equals_not_stopping(tmp_path: Path, data: str, ranks: int, layout: list[str]) -> None:
    """Stopped after iteration 3 (10 samples are an epoch, so in the middle of one), with micro-batches accumulated."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    launch(ranks, flags(data, whole, *layout), flags(data, stopped, *layout, "--exit-interval", "3"))
    assert [row["iteration"] for row in rows(stopped) if "loss" in row] == [1, 2, 3]
    launch(ranks, flags(data, stopped, *layout, "--resume"))  # several ranks: in new processes
    assert rows(stopped) == rows(whole)
    assert [row["iteration"] for row in rows(whole) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert tensors(stopped) == tensors(whole)
    assert len(tensors(whole)) == ranks if "0" not in layout else tensors(whole)


def test_resume_goes_on_from_the_last_save_and_drops_later_rows(tmp_path: Path, data: str) -> None:
    """As after a crash: rows of iterations that were never saved are written again."""
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    launch(1, flags(data, whole, *FP32), flags(data, crashed, *FP32, "--save-interval", "2"))
    shutil.rmtree(crashed / "iter_0000006")
    printed = launch(1, flags(data, crashed, *FP32, "--resume", "--save-interval", "2"))
    assert "loaded weights and optimizer of iteration 4" in printed
    assert rows(crashed) == rows(whole)
    assert tensors(crashed) == tensors(whole)


def test_resume_without_a_checkpoint_begins_and_a_finished_run_has_nothing_to_do(tmp_path: Path, data: str) -> None:
    printed = launch(1, flags(data, tmp_path / "run", *FP32, "--resume"), flags(data, tmp_path / "run", *FP32, "--resume"))
    assert "nothing to do: iteration 6 of 6 is already done" in printed
    assert len([row for row in rows(tmp_path / "run") if "loss" in row]) == 6


ANY = [
    (4, [*TP2, *PP2]), (1, []), (2, ["--zero-stage", "3"]), (4, [*TP2, "--zero-stage", "2"]), (2, PP2), (2, [*TP2, *SP]),
]  # fmt: skip


def test_any_layout_goes_on_from_any_other(tmp_path: Path, data: str) -> None:
    """Each of six layouts takes one step from the checkpoint of the one before; all of them together are one fp32 run."""
    whole, moving = tmp_path / "whole", tmp_path / "moving"
    launch(1, flags(data, whole, *FP32))
    for ranks, layout in ANY:
        launch(ranks, flags(data, moving, *FP32, *layout, "--resume", "--exit-interval", "1"))
    for found, wanted in zip(rows(moving), rows(whole), strict=True):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert found[key] == pytest.approx(wanted[key], rel=3e-5 if key == "grad_norm" else 1e-5), (key, found, wanted)


def test_a_new_learning_rate_takes_effect_on_resume(tmp_path: Path, data: str) -> None:
    run = tmp_path / "run"
    launch(1, flags(data, run, *FP32, "--exit-interval", "3"))
    launch(1, flags(data, run, *FP32, "--resume", "--lr", "5e-4", "--lr-decay-style", "constant"))
    assert [row["learning_rate"] for row in rows(run) if "loss" in row][3:] == [5e-4] * 3


def test_keep_last_removes_the_oldest(tmp_path: Path, data: str) -> None:
    run = tmp_path / "run"
    launch(1, flags(data, run, *FP32, "--save-interval", "1", "--keep-last", "2"))
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000005", "iter_0000006"]
    assert (run / "latest").read_text().strip() == "iter_0000006"


def test_exit_duration_saves_and_stops(tmp_path: Path, data: str) -> None:
    run = tmp_path / "run"
    printed = launch(1, flags(data, run, *FP32, "--train-iters", "100000", "--exit-duration-minutes", "0.001"))
    done = len([row for row in rows(run) if "loss" in row])
    assert 1 <= done < 100000
    assert f"stopping after iteration {done} as asked (saved)" in printed
    assert (run / f"iter_{done:07d}" / "checkpoint.json").is_file()
