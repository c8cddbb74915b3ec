"""The training loop: batch, step, log, evaluate, save, stop. A feature is a line in `train`."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_simple.config import Config
from megatron_simple.data.loader import BatchLoader
from megatron_simple.parallel.mesh import Mesh
from megatron_simple.training.engine import Engine, StepResult
from megatron_simple.training.flops import model_flops_utilization
from megatron_simple.training.metrics import Metrics, peak_memory_gib, say
from megatron_simple.training.schedule import learning_rate


@dataclass
class TrainState:
    """All that changes from step to step besides the model: where the run is."""

    iteration: int = 0
    consumed_samples: int = 0


class StopSignal:
    """Remembers that SIGTERM came while it is entered, so that the loop can save after the step in progress."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _remember(self, number: int, frame: Any) -> None:
        self.received = True


def train(
    config: Config,
    *,
    mesh: Mesh,
    engine: Engine,
    loader: BatchLoader,
    make_validation: Callable[[], BatchLoader] | None,
    state: TrainState,
    metrics: Metrics,
    save: Callable[[TrainState], None] | None,
    stop: StopSignal,
) -> None:
    """Runs from `state` to --train-iters, or until it is told to stop; the last state is saved."""
    training, log = config.training, config.log
    clock, started = Clock(), time.monotonic()
    saved = state.iteration
    while state.iteration < training.train_iters:
        lr = learning_rate(state.iteration + 1, training)
        result = engine.train_step(next(loader), lr=lr)
        state.iteration += 1
        state.consumed_samples += training.global_batch_size
        clock.step()
        last = state.iteration == training.train_iters
        if state.iteration % log.log_interval == 0 or last:
            metrics.training(training_row(config, mesh, state, result, lr=lr, step_seconds=clock.read()))
        if make_validation and (_due(state, log.eval_interval) or last):
            with clock.paused():
                metrics.validation(validation_row(config, engine, make_validation(), state))
        minutes = (time.monotonic() - started) / 60
        late = config.save.exit_duration_minutes is not None and minutes >= config.save.exit_duration_minutes
        leave = mesh.any_rank(stop.received or late) or _due(state, config.save.exit_interval)
        if save and (_due(state, config.save.save_interval) or last or leave):
            with clock.paused():
                finite_loss(config, state, result, lr=lr)
                save(state)
                saved = state.iteration
        if leave and not last:
            if mesh.is_writer:
                kept = "saved" if saved == state.iteration else "not saved: no --save"
                say(f"stopping after iteration {state.iteration} as asked ({kept})")
            return


def _due(state: TrainState, interval: int | None) -> bool:
    return interval is not None and state.iteration % interval == 0


def finite_loss(config: Config, state: TrainState, result: StepResult, *, lr: float) -> float:
    """The step's loss. ValueError when it is no number: the weights are lost, and must not be logged or saved as good."""
    loss = float(result.loss)
    if not math.isfinite(loss):
        first = state.consumed_samples - config.training.global_batch_size
        raise ValueError(
            f"iteration {state.iteration} (samples {first} to {state.consumed_samples - 1}): the loss is {loss}; "
            f"lower --lr ({lr:.3e} here) or lengthen --lr-warmup-iters, and resume from the last checkpoint"
        )
    return loss


def training_row(
    config: Config, mesh: Mesh, state: TrainState, result: StepResult, *, lr: float, step_seconds: float
) -> dict[str, Any]:
    """A row of metrics.jsonl; ValueError when the loss is no number."""
    training = config.training
    tokens_per_second = training.global_batch_size * training.seq_length / step_seconds
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else None
    return {
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "consumed_tokens": state.consumed_samples * training.seq_length,
        "loss": finite_loss(config, state, result, lr=lr),
        "learning_rate": lr,
        "grad_norm": float(result.grad_norm),
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "memory_gib": peak_memory_gib(),
        "mfu": model_flops_utilization(
            config.model,
            training.seq_length,
            tokens_per_second=tokens_per_second,
            device_name=device,
            devices=mesh.process.world_size,
        ),
    }


def validation_row(config: Config, engine: Engine, loader: BatchLoader, state: TrainState) -> dict[str, Any]:
    """Mean loss over --eval-iters global batches, the same samples at every evaluation."""
    losses = [float(engine.evaluate(next(loader))) for _ in range(config.log.eval_iters)]
    loss = math.fsum(losses) / len(losses)
    return {
        "iteration": state.iteration,
        "validation_loss": loss,
        "validation_perplexity": math.exp(min(loss, 700.0)),
    }


class Clock:
    """Mean seconds per step since the last reading, without evaluation and saving."""

    def __init__(self) -> None:
        self._since, self._steps = time.perf_counter(), 0

    def step(self) -> None:
        self._steps += 1

    def read(self) -> float:
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, self._steps)
        self._since, self._steps = now, 0
        return seconds

    def paused(self) -> _Pause:
        return _Pause(self)

    def shift(self, seconds: float) -> None:
        self._since += seconds


class _Pause:
    def __init__(self, clock: Clock):
        self._clock = clock

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._clock.shift(time.perf_counter() - self._begin)
