"""The loss of a saved model on a whole dataset, in file order, at any layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_simple.checkpoint.reader import CheckpointReader, load_weights
from megatron_simple.checks import check_layout
from megatron_simple.config import Config, ConfigError
from megatron_simple.data.loader import SequentialSamples
from megatron_simple.parallel.mesh import Mesh
from megatron_simple.training.engine import Evaluator


def evaluation_config(saved: Config, given: dict[str, Any], *, world_size: int) -> Config:
    """The checkpoint's model under the layout, length, batch and dtype of the command line."""
    parallel = dataclasses.replace(Config().parallel, **_of_section("parallel", given))
    training = dataclasses.replace(saved.training, **_of_section("training", given))
    config = dataclasses.replace(saved, parallel=parallel, training=training)
    check_layout(config, world_size=world_size)
    return config


def _of_section(section: str, given: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(getattr(Config(), section))}
    return {name: value for name, value in given.items() if name in names}


def evaluate(reader: CheckpointReader, config: Config, mesh: Mesh, *, prefixes: Sequence[str]) -> dict[str, Any]:
    """{"loss" [nats per token], "perplexity", "tokens"} over every full sample of the datasets joined in order."""
    length, rows = config.training.seq_length, config.training.micro_batch_size
    samples = SequentialSamples(list(prefixes), length)
    if len(samples) == 0:
        raise ConfigError(f"--data-path {' '.join(prefixes)}: too small for one sample of --seq-length {length} + 1")
    evaluator = Evaluator(config, mesh)
    load_weights(evaluator.module, reader, whole=mesh.pp.size == 1)
    evaluator.module.eval()
    total = []
    for batch in _batches(samples, rows, mesh, vocab_size=config.model.vocab_size):
        total.append(evaluator(*batch))
    tokens = len(samples) * length
    loss = math.fsum(total) / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}


def _batches(samples: SequentialSamples, rows: int, mesh: Mesh, *, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As many batches [rows, S] on every data-parallel rank; what fills up the last ones is labelled -1."""
    for first in range(0, len(samples), rows * mesh.dp.size):
        mine = range(first + mesh.dp.rank * rows, first + (mesh.dp.rank + 1) * rows)
        batch = np.stack([samples[min(i, len(samples) - 1)] for i in mine])
        if batch.max() >= vocab_size:
            raise ConfigError(
                f"--data-path holds token id {batch.max()}, the model's vocabulary ends at {vocab_size - 1}: the data was "
                "made with another tokenizer"
            )
        tokens, labels = batch[:, :-1].copy(), batch[:, 1:].copy()
        labels[[i >= len(samples) for i in mine]] = -1
        yield torch.from_numpy(tokens).to(mesh.device), torch.from_numpy(labels).to(mesh.device)
