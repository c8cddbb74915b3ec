"""The only importer of DeepSpeed: builds the model for the mesh, takes training steps, evaluates.

Without a pipeline the Transformer runs under ZeRO 0-3; with one, the same list of layers becomes a PipelineModule at
ZeRO 1. The learning rate is written into the parameter groups before every step. Combinations that DeepSpeed gets wrong
are refused in checks.py; at stage 0 the global gradient norm is computed and clipped here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_simple.config import Config
from megatron_simple.model.init import initialize
from megatron_simple.model.transformer import Block, LayerSpec, Transformer, layer_specs
from megatron_simple.parallel.collectives import all_reduce
from megatron_simple.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_simple.parallel.mesh import Mesh
from megatron_simple.training.optimizer import build_optimizer, clip_gradients
from megatron_simple.training.pipeline import blocks_per_stage, stage_bounds

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
# DeepSpeed 0.19 calls names that torch 2.13 is about to retire, and warns of its own start-up on every rank.
warnings.filterwarnings("ignore", category=FutureWarning, message=r".*(all_gather_into_tensor|reduce_scatter_tensor).*")
warnings.filterwarnings("ignore", category=FutureWarning, message=r".*_(all_gather|reduce_scatter)_base.*")
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

import deepspeed  # noqa: E402
from deepspeed.pipe import LayerSpec as DeepSpeedLayer  # noqa: E402
from deepspeed.pipe import PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: E402


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the global batch [nats per token] and the global gradient norm before clipping, not yet on the host."""

    loss: Tensor
    grad_norm: Tensor | float


class Engine:
    """One model on one mesh, with its optimizer. `module` holds this rank's parameters, each with its `logical_name`."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.zero_stage = config.parallel.zero_stage
        self.micro_batches = config.training.global_batch_size // (config.training.micro_batch_size * mesh.dp.size)
        with _quiet():
            deepspeed.init_distributed(dist_backend="nccl" if mesh.device.type == "cuda" else "gloo")
            self.module = build_module(config, mesh, loss=self.loss)
            optimizer = build_optimizer(self.module, config.training)
            self.deepspeed, self.optimizer, _, _ = deepspeed.initialize(
                model=self.module,
                optimizer=optimizer,
                config=deepspeed_config(config, self.micro_batches),
                mpu=None if mesh.pp.size > 1 else _ModelParallelUnit(mesh),
            )
        if config.training.compile:
            for module in self.module.modules():
                if isinstance(module, Block):
                    module.compile()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the tokens of one micro-batch."""
        vocab_size = self.config.model.vocab_size
        return vocab_parallel_cross_entropy(logits, labels, self.mesh.tp, vocab_size=vocab_size).mean()

    def train_step(self, batch: np.ndarray, *, lr: float) -> StepResult:
        """One optimiser step on this rank's share of the global batch, int64 [micro-batches, b, S + 1]."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.mesh.pp.size > 1:
            loss = self.deepspeed.train_batch(data_iter=self._micro_batches(batch))
            return StepResult(loss.detach(), self.deepspeed.get_global_grad_norm())
        self.deepspeed.train()
        total = torch.zeros((), device=self.mesh.device)
        for tokens, labels in self._micro_batches(batch):
            loss = self.loss(self.deepspeed(tokens), labels)
            self.deepspeed.backward(loss)
            total += loss.detach()
            if self.zero_stage == 0 and self.deepspeed.is_gradient_accumulation_boundary():
                norm = clip_gradients(self.module, self.config.training.clip_grad, tp=self.mesh.tp)
            self.deepspeed.step()
        if self.zero_stage > 0:
            norm = self.deepspeed.get_global_grad_norm()
        return StepResult(self._mean(total / len(batch)), norm)

    def evaluate(self, batch: np.ndarray) -> Tensor:
        """Mean loss over a batch like train_step's, without a step."""
        if self.mesh.pp.size > 1:
            loss = self.deepspeed.eval_batch(self._micro_batches(batch), num_micro_batches=len(batch))
            self.module.train()
            return loss.detach()
        self.deepspeed.eval()
        with torch.no_grad():
            losses = [self.loss(self.deepspeed(tokens), labels) for tokens, labels in self._micro_batches(batch)]
        self.deepspeed.train()
        return self._mean(torch.stack(losses).mean())

    def _mean(self, loss: Tensor) -> Tensor:
        return all_reduce(loss, self.mesh.dp) / self.mesh.dp.size

    def _micro_batches(self, batch: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, labels), each int64 [b, S], the labels one token ahead."""
        samples = torch.from_numpy(batch).to(self.mesh.device, non_blocking=True)
        for sample in samples:
            yield sample[:, :-1].contiguous(), sample[:, 1:].contiguous()

    def describe(self) -> str:
        """What the engine resolved to, for the log."""
        inner = type(self.optimizer).__name__
        dtype = "bf16, fp32 masters and accumulation" if self.config.training.bf16 else "fp32"
        count = sum(getattr(p, "ds_numel", p.numel()) for p in self.module.parameters())
        return f"{inner}, ZeRO {self.zero_stage}, {dtype}, {self.micro_batches} micro-batches, {count:,} parameters on rank 0"


class Evaluator:
    """A model for evaluation only: no optimizer, gradients or ZeRO. `module` is to be filled with weights."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        with _quiet():
            deepspeed.init_distributed(dist_backend="nccl" if mesh.device.type == "cuda" else "gloo")
            self.module = build_module(config, mesh, loss=self.sum_of_losses)
            if mesh.pp.size > 1:
                plain = replace(config, parallel=replace(config.parallel, zero_stage=0))
                self.deepspeed, *_ = deepspeed.initialize(model=self.module, config=deepspeed_config(plain, 1))
            elif config.training.bf16:
                self.module.to(torch.bfloat16)

    def sum_of_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Over the labels that are not negative [nats]."""
        losses = vocab_parallel_cross_entropy(logits, labels, self.mesh.tp, vocab_size=self.config.model.vocab_size)
        return (losses * (labels >= 0)).sum()

    def __call__(self, tokens: Tensor, labels: Tensor) -> float:
        """The sum over the whole data-parallel axis, each rank with its own int64 [b, S]; the same on every rank."""
        if self.mesh.pp.size > 1:
            return float(self.deepspeed.eval_batch(iter([(tokens, labels)]), num_micro_batches=1)) * self.mesh.dp.size
        with torch.no_grad():
            return float(all_reduce(self.sum_of_losses(self.module(tokens), labels), self.mesh.dp))


def build_module(config: Config, mesh: Mesh, *, loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """The Transformer of this rank, or its pipeline stage, initialised; `loss(logits, labels)` ends the last stage."""
    settings = {
        "tp": mesh.tp,
        "sequence_parallel": config.parallel.sequence_parallel,
        "recompute": config.training.recompute_granularity,
    }
    if mesh.pp.size == 1:
        return Transformer(config.model, seed=config.training.seed, **settings).to(mesh.device)
    specs = layer_specs(config.model, **settings)
    blocks = config.parallel.pipeline_layers or blocks_per_stage(config.model.num_layers, mesh.pp.size)
    topology = PipeModelDataParallelTopology(num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.dp.size)
    place = topology.get_coord(mesh.process.rank)
    if (place.pipe, place.data, place.model) != (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank):
        raise RuntimeError(f"rank {mesh.process.rank}: DeepSpeed's topology {place} disagrees with the mesh {mesh}")
    return _Pipeline(
        [_stage_layer(spec, config) for spec in specs],
        topology=topology,
        loss_fn=loss,
        partition_method=stage_bounds(specs, blocks),
    )


def deepspeed_config(config: Config, micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's settings: fp32 reduction and accumulation, no overlap (it raced in several releases)."""
    training, parallel = config.training, config.parallel
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0 if parallel.zero_stage == 0 else training.clip_grad,
        "zero_optimization": {"stage": parallel.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},  # activations may be sequence shards
        "steps_per_print": 1 << 62,
    }
    if training.bf16:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


class _ModelParallelUnit:
    """What DeepSpeed asks of a mesh without a pipeline."""

    def __init__(self, mesh: Mesh):
        self._dp, self._tp = mesh.dp, mesh.tp

    def get_data_parallel_group(self) -> Any:
        return self._dp.group

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_model_parallel_group(self) -> Any:
        return self._tp.group

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


class _Pipeline(PipelineModule):
    """A PipelineModule whose stages begin where we say: `partition_method` is the list of bounds itself."""

    def _partition_layers(self, method: list[int]) -> None:
        self.parts = list(method)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _synchronize_tied_weights(self) -> None:
        """Nothing to do: both copies were initialised from the same name."""


class _Built:
    """Mixed into DeepSpeed's specs: builds one of our layers and initialises it by name."""

    spec: LayerSpec
    config: Config

    def build(self, log: bool = False) -> nn.Module:
        module = self.spec.make()
        initialize(module, self.spec.name, self.config.model, seed=self.config.training.seed)
        return module


class _PlainLayer(_Built, DeepSpeedLayer):
    pass


class _TiedLayer(_Built, TiedLayerSpec):
    pass


def _as_head(embedding: nn.Module, x: Tensor) -> Tensor:
    return embedding(x) if not x.is_floating_point() else embedding(x, as_head=True)


def _stage_layer(spec: LayerSpec, config: Config) -> DeepSpeedLayer:
    layer = _TiedLayer(spec.name, nn.Module, forward_fn=_as_head) if spec.tied else _PlainLayer(nn.Module)
    layer.spec, layer.config = spec, config
    return layer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints its set-up on every rank; the run's own log says what it resolved to."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
