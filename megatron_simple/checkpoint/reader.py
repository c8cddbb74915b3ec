"""Reads a native checkpoint one tensor at a time, whole or as one rank's shard, whatever layout wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_simple.checkpoint.format import (
    TOKENIZER_FOLDER,
    WEIGHT,
    Manifest,
    ParameterInfo,
    Run,
    find_checkpoint,
)
from megatron_simple.config import ConfigError
from megatron_simple.model.init import shard_of


class CheckpointReader:
    """An open checkpoint. `path` is a --save folder (its newest complete checkpoint, or `iteration`) or one checkpoint.

    Raises ConfigError when nothing complete is there, or a file cannot be read.
    """

    def __init__(self, path: str | Path, *, iteration: int | None = None, flag: str = "--load"):
        self.folder = find_checkpoint(path, iteration=iteration, flag=flag)
        self.manifest = Manifest.read(self.folder)
        self.config = self.manifest.settings()
        self.iteration = self.manifest.iteration
        self.consumed_samples = self.manifest.consumed_samples
        self.parameters: dict[str, ParameterInfo] = self.manifest.parameters
        self._files = ExitStack()
        self._runs: dict[tuple[str, str], list[tuple[Run, object]]] = defaultdict(list)
        for name in self.manifest.files:
            try:
                file = self._files.enter_context(safe_open(self.folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.folder / name}: cannot be read ({error})") from error
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                run = Run.parse(key)
                self._runs[run.kind, run.name].append((run, file))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    @property
    def has_moments(self) -> bool:
        return self.manifest.optimizer_step > 0

    def read(self, name: str, *, kind: str = WEIGHT) -> Tensor:
        """The whole parameter (or one of its moments), fp32, with the real vocabulary's rows only."""
        info, runs = self._info(name), self._runs[kind, name]
        if not runs:
            raise ConfigError(f"{self.folder}: holds no {kind} of {name}")
        shards = runs[0][0].shards
        flat: list[list[tuple[int, Tensor]]] = [[] for _ in range(shards)]
        for run, file in runs:
            flat[run.shard].append((run.start, file.get_tensor(run.key())))
        parts = [self._join(name, pieces) for pieces in flat]
        whole = torch.cat([self._shaped(part, info, shards) for part in parts], dim=info.partition_dim or 0)
        if info.partition_dim is not None:
            whole = whole.narrow(info.partition_dim, 0, info.shape[info.partition_dim])
        if tuple(whole.shape) != info.shape:
            raise ConfigError(f"{self.folder}: {name} has shape {tuple(whole.shape)}, the manifest says {info.shape}")
        return whole.contiguous()

    def read_shard(self, parameter: nn.Parameter, *, kind: str = WEIGHT) -> Tensor:
        """The slice that `parameter` holds on this rank, with zero rows where its vocabulary is padded."""
        return shard_of(self.read(parameter.logical_name, kind=kind), parameter)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.parameters:
            yield name, self.read(name)

    def tokenizer_arguments(self) -> dict[str, str] | None:
        """load_tokenizer's keyword arguments, with the copies that lie in the checkpoint; None when it has none."""
        if self.manifest.tokenizer is None:
            return None
        folder = self.folder / TOKENIZER_FOLDER
        return {
            key: str(folder / value) if (folder / value).exists() else value for key, value in self.manifest.tokenizer.items()
        }

    def _info(self, name: str) -> ParameterInfo:
        if name not in self.parameters:
            raise ConfigError(f"{self.folder}: has no parameter named {name}")
        return self.parameters[name]

    def _join(self, name: str, pieces: list[tuple[int, Tensor]]) -> Tensor:
        pieces.sort(key=lambda piece: piece[0])
        expected = 0
        for start, piece in pieces:
            if start != expected:
                raise ConfigError(f"{self.folder}: {name} has a gap or an overlap at element {min(start, expected)}")
            expected = start + piece.numel()
        return torch.cat([piece for _, piece in pieces])

    @staticmethod
    def _shaped(flat: Tensor, info: ParameterInfo, shards: int) -> Tensor:
        """One TP shard in its own shape; the split dim follows from the count, as the vocabulary may be padded."""
        if info.partition_dim is None or shards == 1 and flat.numel() == torch.Size(info.shape).numel():
            return flat.view(info.shape)
        shape = list(info.shape)
        shape[info.partition_dim] = -1
        return flat.view(shape)


def load_weights(model: nn.Module, reader: CheckpointReader, *, whole: bool = True) -> None:
    """Fills a model, by TP shards where it is split; ConfigError for a missing (or, if `whole`, extra) parameter."""
    check_parameters(model, reader, whole=whole)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(reader.read_shard(parameter))


def check_parameters(model: nn.Module, reader: CheckpointReader, *, whole: bool = True) -> None:
    """Refuses, by name, a checkpoint whose parameters are not the model's (`whole`: this rank holds all of them)."""
    names = {p.logical_name for p in model.parameters()}
    missing, extra = sorted(names - set(reader.parameters)), sorted(set(reader.parameters) - names)
    if missing or (extra and whole):
        wrong = f"it lacks {missing[0]}" if missing else f"it has {extra[0]}, which the model lacks"
        raise ConfigError(
            f"{reader.folder} is of another model: {wrong} (--model, --norm-placement, --num-layers and the other model "
            "flags must be those of the saved run)"
        )
