"""Trains a tiny model on random tokens at one layout and returns what must not depend on the layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_simple.arguments import config_from
from megatron_simple.checks import resolve
from megatron_simple.parallel.mesh import build_mesh, discover_process, start_distributed, stop_distributed

TINY = {
    "model": "llama2-tiny", "vocab_size": 250, "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4,
    "train_iters": 4, "bf16": False, "lr": 1e-3, "clip_grad": 0.5, "data_path": ("unused",),
    "make_vocab_size_divisible_by": 8, "distributed_timeout_minutes": 2,
}  # fmt: skip


@dataclass
class Trajectory:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluation: float = 0.0


def global_batch(iteration: int, *, samples: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(iteration).integers(0, vocab_size, (samples, length + 1), dtype=np.int64)


def share(batch: np.ndarray, *, micro_batch: int, rank: int, size: int) -> np.ndarray:
    """[micro-batches, b, S + 1] of one data-parallel rank, laid out as the loader does it."""
    return batch.reshape(-1, size, micro_batch, batch.shape[-1])[:, rank]


def build(settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    from megatron_simple.training.engine import Engine

    process = discover_process()
    config = resolve(config_from({**TINY, **settings}), world_size=process.world_size)
    device = start_distributed(process, timeout_minutes=config.parallel.distributed_timeout_minutes)
    mesh = build_mesh(config.parallel, process, device)
    return config, mesh, Engine(config, mesh)


def my_batch(config: Any, mesh: Any, iteration: int) -> np.ndarray:
    training = config.training
    batch = global_batch(
        iteration,
        samples=training.global_batch_size,
        length=training.seq_length,
        vocab_size=config.model.vocab_size,
    )
    return share(batch, micro_batch=training.micro_batch_size, rank=mesh.dp.rank, size=mesh.dp.size)


def train(settings: dict[str, Any], steps: int = 4) -> Trajectory:
    config, mesh, engine = build(settings)
    result = Trajectory()
    for iteration in range(steps):
        step = engine.train_step(my_batch(config, mesh, iteration), lr=config.training.lr)
        result.losses.append(float(step.loss))
        result.norms.append(float(step.grad_norm))
    result.evaluation = float(engine.evaluate(my_batch(config, mesh, 99)))
    stop_distributed()
    return result
