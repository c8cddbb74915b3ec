"""Saves and restores a training run: fp32 weights, AdamW's moments and the position, free of the layout.

A piece says which stretch of a parameter's flat TP shard this rank's optimizer owns (training/optimizer.py); every stretch
is written by exactly one rank: replicated parameters by the first TP rank, a tied head's copy by nobody.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_simple.checkpoint.format import MOMENTS, WEIGHT, Manifest, ParameterInfo, Run
from megatron_simple.checkpoint.reader import CheckpointReader, check_parameters
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.checkpoint.writer import partial_folder, publish, remove_old, write_runs
from megatron_simple.config import Config, ConfigError
from megatron_simple.model.transformer import parameter_table
from megatron_simple.parallel.mesh import Mesh


class Piece(Protocol):
    """`numel` elements of `parameter` from flat index `start` on; `part` views them in a tensor laid out like `key`."""

    parameter: nn.Parameter
    start: int
    numel: int
    key: Tensor
    state: dict[str, Tensor]

    def part(self, tensor: Tensor) -> Tensor: ...


def save_checkpoint(
    directory: str | Path,
    pieces: Iterable[Piece],
    *,
    mesh: Mesh,
    config: Config,
    iteration: int,
    consumed_samples: int,
    tokenizer: TokenizerCopy | None = None,
) -> Path:
    """Writes one complete checkpoint, together with all other ranks, and removes those beyond --keep-last."""
    directory = Path(directory)
    partial = partial_folder(directory, iteration)
    if mesh.is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    mesh.barrier()
    pieces = list(pieces)
    runs = dict(_owned_runs(pieces, mesh, config.parallel.zero_stage))
    if runs:
        write_runs(partial / f"pp{mesh.pp.rank}-dp{mesh.dp.rank}-tp{mesh.tp.rank}.safetensors", runs)
    mesh.barrier()
    if mesh.is_writer:
        manifest = Manifest(
            iteration=iteration,
            consumed_samples=consumed_samples,
            optimizer_step=next((int(piece.state["step"]) for piece in pieces if piece.state), 0),
            config=config.to_dict(),
            layout={
                "pp": mesh.pp.size,
                "dp": mesh.dp.size,
                "tp": mesh.tp.size,
                "zero_stage": config.parallel.zero_stage,
            },
            parameters={name: ParameterInfo(*info) for name, info in parameter_table(config.model).items()},
            files={path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))},
            tokenizer=tokenizer.write(partial) if tokenizer else None,
        )
        final = publish(directory, partial, manifest)
        if config.save.keep_last:
            remove_old(directory, config.save.keep_last)
    mesh.barrier()
    return final if mesh.is_writer else directory


def _owned_runs(pieces: Iterable[Piece], mesh: Mesh, zero_stage: int) -> Iterator[tuple[Run, Tensor]]:
    if zero_stage == 0 and mesh.dp.rank > 0:
        return  # every data-parallel rank holds the same
    for piece in pieces:
        parameter = piece.parameter
        replica = not parameter.tensor_model_parallel and mesh.tp.rank > 0
        tied_copy = parameter.logical_name.startswith("embed_tokens.") and mesh.pp.rank > 0
        if replica or tied_copy:
            continue
        for kind, tensor in {WEIGHT: piece.key, **piece.state}.items():
            if kind in (WEIGHT, *MOMENTS):
                run = Run(kind, parameter.logical_name, parameter.shard, parameter.shards, piece.start)
                yield run, piece.part(tensor).cpu()


def load_checkpoint(
    reader: CheckpointReader,
    module: nn.Module,
    pieces: Iterable[Piece],
    *,
    set_weight: Callable[[nn.Parameter, Tensor], None],
    whole: bool,
) -> None:
    """Restores weights everywhere, fp32 masters and moments where this rank owns them (any layout to any layout).

    `set_weight(parameter, shard)` puts an fp32 TP shard into the parameter that the forward pass uses. A checkpoint of
    weights alone leaves the optimizer fresh, with masters equal to the weights. `whole`: no pipeline.
    """
    check_parameters(module, reader, whole=whole)
    by_parameter: dict[nn.Parameter, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    kinds = (WEIGHT, *(MOMENTS if reader.has_moments else ()))
    with torch.no_grad():
        for parameter in module.parameters():
            for kind in kinds:
                shard = reader.read_shard(parameter, kind=kind)
                _expect_shape(parameter, shard, reader)
                if kind == WEIGHT:
                    set_weight(parameter, shard)
                for piece in by_parameter.get(parameter, ()):
                    if kind != WEIGHT:
                        _fresh_moments(piece.key, piece.state, reader.manifest.optimizer_step)
                    target = piece.key if kind == WEIGHT else piece.state[kind]
                    piece.part(target).copy_(shard.reshape(-1)[piece.start : piece.start + piece.numel])


def _expect_shape(parameter: nn.Parameter, shard: Tensor, reader: CheckpointReader) -> None:
    shape = parameter.local_shape
    if tuple(shard.shape) != shape:
        raise ConfigError(
            f"{reader.folder}: {parameter.logical_name} has shape {tuple(shard.shape)}, the model needs {shape}; the model "
            "flags must be those of the saved run"
        )


def _fresh_moments(key: Tensor, state: dict[str, Any], step: int) -> None:
    """AdamW's state as it is after `step` steps, zero until the pieces fill it."""
    if not state:
        state["step"] = torch.tensor(float(step))
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(key, requires_grad=False)
