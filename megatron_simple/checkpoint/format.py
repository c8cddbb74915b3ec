"""The native checkpoint: what lies in its folder, and how a complete one is found.

    DIR/latest                      name of the newest complete checkpoint
    DIR/iter_0000040/checkpoint.json    manifest: settings, position, parameters, files with sizes
    DIR/iter_0000040/pp0-dp1-tp0.safetensors    the pieces that one rank owned
    DIR/iter_0000040/tokenizer/     copies of the tokenizer's files

A tensor in a rank's file is a run of one parameter's flat TP shard, and its key says which:
`kind|name|shard/shards|start`, kind one of weight, exp_avg, exp_avg_sq, all fp32. Runs of one kind cover every parameter
once, so any TP, PP, DP and ZeRO stage can read what any other wrote. The manifest is written last, the folder is renamed
when everything lies in it, then `latest` moves: a folder named iter_* with a manifest is complete.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_simple.config import Config, ConfigError, from_dict

FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
LATEST = "latest"
TOKENIZER_FOLDER = "tokenizer"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParameterInfo:
    """Whole shape (real vocabulary rows) and the dim that tensor parallelism splits, or None."""

    shape: tuple[int, ...]
    partition_dim: int | None


@dataclass(frozen=True)
class Run:
    """A stretch of one parameter's flat TP shard: the key of a stored tensor."""

    kind: str
    name: str
    shard: int
    shards: int
    start: int

    def key(self) -> str:
        return f"{self.kind}|{self.name}|{self.shard}/{self.shards}|{self.start}"

    @staticmethod
    def parse(key: str) -> Run:
        kind, name, place, start = key.split("|")
        shard, shards = place.split("/")
        return Run(kind, name, int(shard), int(shards), int(start))


@dataclass(frozen=True)
class Manifest:
    """What checkpoint.json holds. `optimizer_step` is 0 and the moments are absent in a checkpoint of weights alone."""

    iteration: int
    consumed_samples: int
    optimizer_step: int
    config: dict[str, Any]
    layout: dict[str, int]
    parameters: dict[str, ParameterInfo]
    files: dict[str, int]
    tokenizer: dict[str, str] | None = None
    version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        path = folder / MANIFEST
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["version"] != FORMAT_VERSION:
                raise ConfigError(f"{path}: format version {values['version']}, this program reads {FORMAT_VERSION}")
            parameters = values.pop("parameters")
            shapes = {n: ParameterInfo(tuple(p["shape"]), p["partition_dim"]) for n, p in parameters.items()}
            return Manifest(parameters=shapes, **values)
        except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a readable checkpoint manifest ({error})") from error

    def settings(self) -> Config:
        return from_dict(self.config, source=MANIFEST)


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def why_incomplete(folder: Path) -> str | None:
    """None for a complete checkpoint; else the sentence that says what is wrong with it."""
    if not (folder / MANIFEST).is_file():
        return f"{folder} has no {MANIFEST}: it was not finished"
    try:
        manifest = Manifest.read(folder)
    except ConfigError as error:
        return str(error)
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
            return f"{path}: {found} where {size} bytes were saved"
    return None


def complete_checkpoints(directory: Path) -> tuple[list[Path], list[str]]:
    """The complete checkpoints in a --save folder, oldest first, and why others were passed over."""
    found, skipped = [], []
    for folder in sorted(directory.glob("iter_*")) if directory.is_dir() else []:
        reason = why_incomplete(folder)
        if reason is None:
            found.append(folder)
        else:
            skipped.append(reason)
    return found, skipped


def find_checkpoint(path: str | Path, *, iteration: int | None = None, flag: str = "--load") -> Path:
    """One complete checkpoint folder: `path` itself, or the given or newest one inside it.

    Raises ConfigError naming the flag, the path and what is there instead.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{flag} {path}: no such folder; give a --save folder of a run or one of its iter_* folders")
    if (path / MANIFEST).is_file():
        reason = why_incomplete(path)
        if reason:
            raise ConfigError(f"{flag}: {reason}")
        return path
    found, skipped = complete_checkpoints(path)
    if iteration is not None:
        found = [folder for folder in found if folder.name == iteration_folder(iteration)]
    if not found:
        wanted = f"complete checkpoint of iteration {iteration}" if iteration is not None else "complete checkpoint"
        there = "; ".join(skipped) or ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{flag} {path}: holds no {wanted}, but {there}")
    latest = path / LATEST
    if iteration is None and latest.is_file():
        named = path / latest.read_text(encoding="utf-8", errors="replace").strip()
        if named in found:
            return named
    return found[-1]
