"""Where a run's numbers go: one log line on the terminal, metrics.jsonl, TensorBoard, and Weights & Biases if asked for."""

from __future__ import annotations

import datetime
import json
import os
import resource
from pathlib import Path
from typing import Any

import torch

from megatron_simple.config import Config, ConfigError

METRICS_FILE = "metrics.jsonl"


def say(text: str) -> None:
    """A line of the run's log."""
    print(text, flush=True)


def peak_memory_gib() -> float:
    """Peak of this rank [GiB]: allocated device memory with a GPU, resident memory without."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Metrics:
    """The writer rank's sinks; on other ranks (`active=False`) every method does nothing.

    A run that starts at iteration k > 0 continues the files: rows after k, left by a run that died later, are dropped.
    A run that starts at 0 moves an older metrics.jsonl aside.
    """

    def __init__(self, config: Config, *, start_iteration: int, active: bool):
        self.active, self.total = active, config.training.train_iters
        self._file = self._board = self._wandb = None
        if not active:
            return
        if config.log.wandb_project:
            self._wandb = _start_wandb(config, start_iteration)
        if config.log.log_dir:
            folder = Path(config.log.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            _keep_rows(folder / METRICS_FILE, start_iteration)
            self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - open for the run
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._board = SummaryWriter(str(folder), purge_step=start_iteration + 1)

    def training(self, row: dict[str, Any]) -> None:
        if not self.active:
            return
        left = (self.total - row["iteration"]) * row["step_seconds"]
        utilization = "" if row["mfu"] is None else f" | MFU {row['mfu']:.1%}"
        say(
            f"iteration {row['iteration']:>{len(str(self.total))}}/{self.total} | loss {row['loss']:.4f} | "
            f"lr {row['learning_rate']:.3e} | grad norm {row['grad_norm']:.3f} | "
            f"{row['tokens_per_second']:,.0f} tokens/s | {row['step_seconds']:.3f} s/step | "
            f"{row['memory_gib']:.2f} GiB{utilization} | ETA {datetime.timedelta(seconds=round(left))}"
        )
        self._write(row, prefix="train")

    def validation(self, row: dict[str, Any]) -> None:
        if not self.active:
            return
        say(
            f"validation at iteration {row['iteration']} | loss {row['validation_loss']:.4f} | "
            f"perplexity {row['validation_perplexity']:.2f}"
        )
        self._write(row, prefix="validation")

    def close(self) -> None:
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, row: dict[str, Any], *, prefix: str) -> None:
        scalars = {f"{prefix}/{key}": value for key, value in row.items() if key != "iteration" and value is not None}
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for key, value in scalars.items():
                self._board.add_scalar(key, value, row["iteration"])
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(scalars, step=row["iteration"])


def _keep_rows(path: Path, last_iteration: int) -> None:
    if not path.exists():
        return
    if last_iteration == 0:
        number = 1
        while (aside := path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        path.rename(aside)
        return
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while writing it
        if row["iteration"] <= last_iteration:
            rows.append(line)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


def _start_wandb(config: Config, start_iteration: int) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("--wandb-project needs the wandb package: pip install wandb") from error
    return wandb.init(project=config.log.wandb_project, config=config.to_dict(), resume="allow" if start_iteration else None)
