"""What --load and --resume refuse, pass over, and accept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_simple.checkpoint.format import complete_checkpoints, find_checkpoint
from megatron_simple.pretrain import main as train
from tests.training.runs import flags, rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """Checkpoints of iterations 2, 4 and 6 of a simplenorm run."""
    folder = tmp_path_factory.mktemp("run") / "saved"
    assert train(flags(data, folder, "--fp32", "--save-interval", "2")) == 0
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--hidden-size", "32"], ["--hidden-size is 32", "was trained with 64"]),
        (["--num-layers", "3"], ["--num-layers is 3", "was trained with 2"]),
        (["--norm-epsilon", "1e-6"], ["--norm-epsilon is 1e-06"]),
        (["--rotary-base", "1e6"], ["--rotary-base"]),
        (["--tie-embeddings-and-output-weights"], ["--tie-embeddings-and-output-weights is True"]),
        (["--vocab-size", "251"], ["--vocab-size is 251"]),
        (["--norm-placement", "prenorm"], ["it lacks layers.0.attention_norm.weight", "--norm-placement"]),
        (["--norm-sites", "q_proj,k_proj"], ["final_norm.weight, which the model lacks", "--norm-placement"]),
    ],
    ids=lambda value: value[0],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path,
    data: str,
    saved: Path,
    capsys: pytest.CaptureFixture,
    change: list[str],
    words: list[str],
) -> None:
    assert train([*flags(data, tmp_path / "new", "--fp32"), *change, "--load", str(saved)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert all(word in said for word in words), said
    assert not list((tmp_path / "new").glob("iter_*"))


def one_file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


DAMAGE: list[tuple[Callable[[Path], object], list[str]]] = [
    (lambda f: os.truncate(one_file(f), one_file(f).stat().st_size - 9), [".safetensors", "bytes were saved"]),
    (lambda f: one_file(f).unlink(), [".safetensors", "nothing where"]),
    (lambda f: (f / "checkpoint.json").unlink(), ["no checkpoint.json"]),
    (lambda f: os.truncate(f / "checkpoint.json", 100), ["checkpoint.json", "not a readable"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=["cut file", "no file", "no manifest", "cut manifest"])
def test_a_damaged_checkpoint(
    tmp_path: Path,
    data: str,
    saved: Path,
    capsys: pytest.CaptureFixture,
    damage: Callable[[Path], object],
    words: list[str],
) -> None:
    """--resume passes over it with the reason and goes on from the one before; --load of it alone is fatal."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    damage(run / "iter_0000006")
    assert train([*flags(data, tmp_path / "new", "--fp32"), "--load", str(run / "iter_0000006")]) == 1
    assert capsys.readouterr().err.startswith("error: --load")
    assert train(flags(data, run, "--fp32", "--resume")) == 0
    streams = capsys.readouterr()
    assert "passes over" in streams.err
    assert all(word in streams.err for word in words), streams.err
    assert "loaded weights and optimizer of iteration 4" in streams.out
    assert rows(run) == rows(saved)
    assert one_file(run / "iter_0000006").read_bytes() == one_file(saved / "iter_0000006").read_bytes()


def test_load_takes_the_newest_or_the_one_named_from_a_copied_folder(
    tmp_path: Path,
    data: str,
    saved: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(saved, moved)
    assert train([*flags(data, tmp_path / "a", "--fp32"), "--load", str(moved)]) == 0
    assert "loaded weights and optimizer of iteration 6" in capsys.readouterr().out
    assert train([*flags(data, tmp_path / "b", "--fp32"), "--load", str(moved / "iter_0000004")]) == 0
    assert "loaded weights and optimizer of iteration 4" in capsys.readouterr().out
    assert rows(tmp_path / "b") == [row for row in rows(saved) if row["iteration"] > 4]


def test_lost_weights_are_never_saved(
    tmp_path: Path,
    data: str,
    capsys: pytest.CaptureFixture,
) -> None:
    """The learning rate is absurd, the log sparse: the save of iteration 4 must notice by itself."""
    run = tmp_path / "run"
    sparse = ["--log-interval", "100", "--save-interval", "4", "--eval-iters", "0", "--lr", "1e30", "--clip-grad", "0"]
    assert train(flags(data, run, "--fp32", *sparse)) == 1
    assert "the loss is nan" in capsys.readouterr().err
    assert not list(run.glob("iter_*"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"../../etc", b"iter_0000099", b"\0"])
def test_an_unreadable_latest_gives_way_to_the_newest(tmp_path: Path, saved: Path, content: bytes) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "copy" / "latest").write_bytes(content)
    assert find_checkpoint(tmp_path / "copy").name == "iter_0000006"


@pytest.mark.parametrize("content", [b"\xff", b"{}", b"[]", b'{"version": 1, "parameters": []}', b"3"])
def test_a_manifest_of_another_kind_is_passed_over_by_name(tmp_path: Path, saved: Path, content: bytes) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "copy" / "iter_0000006" / "checkpoint.json").write_bytes(content)
    found, (reason,) = complete_checkpoints(tmp_path / "copy")
    assert [folder.name for folder in found] == ["iter_0000002", "iter_0000004"]
    assert "iter_0000006/checkpoint.json: not a readable checkpoint manifest" in reason


def test_a_full_disk_at_a_save_is_told_with_the_path_and_leaves_no_checkpoint(tmp_path: Path, data: str) -> None:
    run = tmp_path / "run"
    program = [sys.executable, "-m", "megatron_simple.pretrain", *flags(data, run, "--fp32", "--eval-iters", "0")]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 500; exec "$@"', "-", *program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {run / 'partial-iter_0000006'}/pp0-dp0-tp0.safetensors cannot be written")
    assert done.stderr.count("\n") == 1
    assert list(run.glob("iter_*")) == []
    assert train(flags(data, run, "--fp32", "--resume")) == 0  # with room again
    assert (run / "iter_0000006" / "checkpoint.json").is_file()
    assert list(run.glob("partial*")) == []
