"""Writes native checkpoints: each rank its own file beside the final name, the manifest last, then the rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_simple.checkpoint.format import (
    LATEST,
    WEIGHT,
    Manifest,
    ParameterInfo,
    Run,
    complete_checkpoints,
    iteration_folder,
)
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.config import Config
from megatron_simple.model.transformer import parameter_table


def partial_folder(directory: Path, iteration: int) -> Path:
    """Where an unfinished checkpoint lies; leftovers of a dead run are removed when the name is used again."""
    return directory / f"partial-{iteration_folder(iteration)}"


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_runs(path: Path, runs: Mapping[Run, Tensor]) -> int:
    """One rank's file, flushed to disk; returns its size in bytes. OSError that names the file when it cannot be written."""
    try:
        save_file({run.key(): tensor.contiguous() for run, tensor in runs.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}); make room and start again with --resume") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def publish(directory: Path, partial: Path, manifest: Manifest) -> Path:
    """Manifest last, rename, then `latest`: a reader sees the whole checkpoint or the one before."""
    manifest.write(partial)
    fsync_folder(partial)
    final = directory / iteration_folder(manifest.iteration)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    temporary = directory / (LATEST + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(final.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / LATEST)
    fsync_folder(directory)
    return final


def remove_old(directory: Path, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` complete checkpoints."""
    found, _ = complete_checkpoints(directory)
    for folder in found[:-keep_last]:
        shutil.rmtree(folder)


def write_weights(
    folder: str | Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    iteration: int = 0,
    tokenizer: TokenizerCopy | None = None,
) -> Path:
    """A checkpoint of weights alone in the --save folder `folder`, from whole tensors by logical name.

    Returns the checkpoint's folder.
    """
    directory = Path(folder)
    partial = partial_folder(directory, iteration)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    table = parameter_table(config.model)
    parameters, files = {}, {}
    for number, (name, tensor) in enumerate(tensors):
        parameters[name] = ParameterInfo(tuple(tensor.shape), table[name][1])
        file = f"weights-{number:05d}.safetensors"
        files[file] = write_runs(partial / file, {Run(WEIGHT, name, 0, 1, 0): tensor.float().view(-1)})
    manifest = Manifest(
        iteration=iteration,
        consumed_samples=0,
        optimizer_step=0,
        config=config.to_dict(),
        layout={"pp": 1, "dp": 1, "tp": 1, "zero_stage": 0},
        parameters=parameters,
        files=files,
        tokenizer=tokenizer.write(partial) if tokenizer else None,
    )
    return publish(directory, partial, manifest)
