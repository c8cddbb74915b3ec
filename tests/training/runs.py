"""Short pretraining runs by the program's own entry, in this process or on several ranks, and what they left."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

from megatron_simple import pretrain
from tests.distributed import free_port, run_ranks

TIMING = ("tokens_per_second", "step_seconds", "memory_gib", "mfu")
BASE = [
    "--model", "llama2-tiny", "--vocab-size", "250", "--seq-length", "16", "--train-iters", "6", "--global-batch-size", "4",
    "--make-vocab-size-divisible-by", "8", "--lr-warmup-iters", "2", "--eval-interval", "3", "--eval-iters", "1",
    "--lr", "1e-3", "--distributed-timeout-minutes", "2",
]  # fmt: skip


def flags(data: str, folder: Path, *more: str) -> list[str]:
    paths = ["--train-data-path", data, "--valid-data-path", data, "--data-cache-path", str(folder.parent / "cache")]
    return [*BASE, *paths, "--save", str(folder), "--log-dir", str(folder), *more]


def run_all(runs: list[list[str]], ports: list[int]) -> tuple[list[int], str]:
    """On one rank: each run in turn, each with its own meeting port; exit codes and what was printed."""
    output, codes = io.StringIO(), []
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for arguments, port in zip(runs, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            codes.append(pretrain.main(arguments))
    return codes, output.getvalue()


def launch(ranks: int, *runs: list[str]) -> str:
    """All runs in turn in one set of processes; what rank 0 printed."""
    results = run_ranks(ranks, run_all, list(runs), [free_port() for _ in runs])
    assert all(codes == [0] * len(runs) for codes, _ in results), results
    return results[0][1]


def rows(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in lines]


def tensors(folder: Path, iteration: int = 6) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / f"iter_{iteration:07d}").glob("*.safetensors")}
