"""The model as a list of layers: PP = 1 loops over it, PP > 1 hands the same list to DeepSpeed's PipelineModule.

Every layer takes one tensor and gives one: tokens [B, S] -> activations [B, S, D] (sequence shards [B, S / tp, D] under
sequence parallelism) -> this shard's logits [B, S, V / tp].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_simple.config import ModelConfig
from megatron_simple.model.attention import SelfAttention
from megatron_simple.model.init import initialize, whole_shape
from megatron_simple.model.mlp import MLP
from megatron_simple.model.norm import make_norm, sites_of
from megatron_simple.parallel.collectives import copy_to_tp
from megatron_simple.parallel.layers import VocabParallelEmbedding, VocabParallelHead, mark_shard
from megatron_simple.parallel.mesh import Axis


class PositionEmbedding(nn.Module):
    """x + learned positions [P, D]; under sequence parallelism each rank adds its own slice of positions."""

    def __init__(self, positions: int, width: int, *, tp: Axis, sequence_parallel: bool):
        super().__init__()
        self.shared = tp if sequence_parallel else Axis()
        self.weight = mark_shard(nn.Parameter(torch.empty(positions, width)), partition_dim=None, axis=tp)

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tp(self.weight, self.shared)
        start = self.shared.rank * x.shape[1]
        return x + weight[start : start + x.shape[1]]


class Block(nn.Module):
    """x + attention(x), then x + MLP(x), with a norm in front of either where the placement has one."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool, recompute: str):
        super().__init__()
        shared = tp if sequence_parallel else Axis()
        self.recompute = recompute
        self.attention_norm = make_norm(config, "attention_norm", config.hidden_size, shared=shared)
        self.self_attn = SelfAttention(config, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute == "selective")
        self.mlp_norm = make_norm(config, "mlp_norm", config.hidden_size, shared=shared)
        self.mlp = MLP(config, tp=tp, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "full" and torch.is_grad_enabled():
            return checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x if self.attention_norm is None else self.attention_norm(x))
        return x + self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))


@dataclass(frozen=True)
class LayerSpec:
    """One layer, not built yet: the prefix of its parameters' names and how to make it.

    `tied` marks the two layers that share the embedding's rows; the second gives logits.
    """

    name: str
    make: Callable[[], nn.Module]
    tied: bool = False


def layer_specs(
    config: ModelConfig, *, tp: Axis = Axis(), sequence_parallel: bool = False, recompute: str = "none"
) -> list[LayerSpec]:
    """Embedding, (positions,) blocks, (final norm,) head, in the order in which data passes them."""
    split = {"tp": tp, "sequence_parallel": sequence_parallel}
    rows, width, tied = config.padded_vocab_size(tp.size), config.hidden_size, bool(config.tie_embeddings)
    embedding = partial(VocabParallelEmbedding, rows, width, **split)
    specs = [LayerSpec("embed_tokens", embedding, tied)]
    if not config.rotary:
        positions = partial(PositionEmbedding, config.max_position_embeddings, width, **split)
        specs.append(LayerSpec("position_embeddings", positions))
    block = partial(Block, config, recompute=recompute, **split)
    specs += [LayerSpec(f"layers.{i}", block) for i in range(config.num_layers)]
    if "final_norm" in sites_of(config):
        shared = tp if sequence_parallel else Axis()
        specs.append(LayerSpec("final_norm", partial(make_norm, config, "final_norm", width, shared=shared)))
    if tied:
        specs.append(LayerSpec("embed_tokens", embedding, tied))
    else:
        specs.append(LayerSpec("lm_head", partial(VocabParallelHead, rows, width, **split)))
    return specs


class Transformer(nn.Module):
    """The whole list of layers in one process group line: tokens int64 [B, S] -> logits [B, S, V / tp]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Axis = Axis(),
        sequence_parallel: bool = False,
        recompute: str = "none",
        seed: int = 1234,
    ):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList()
        self.embed_tokens = self.position_embeddings = self.final_norm = self.lm_head = None
        specs = layer_specs(config, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute)
        for index, spec in enumerate(specs):
            if spec.tied and index > 0:
                continue
            layer = spec.make()
            initialize(layer, spec.name, config, seed=seed)
            if spec.name.startswith("layers."):
                self.layers.append(layer)
            else:
                setattr(self, spec.name, layer)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.position_embeddings is not None:
            x = self.position_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.lm_head(x) if self.lm_head is not None else self.embed_tokens(x, as_head=True)


def parameter_table(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Whole shape (real vocabulary rows) and split dim of every parameter by logical name; allocates nothing."""
    table = {}
    for spec in layer_specs(config):
        with torch.device("meta"):
            layer = spec.make()
        for path, parameter in layer.named_parameters():
            parameter.logical_name = f"{spec.name}.{path}"
            table[parameter.logical_name] = (whole_shape(parameter, config), parameter.partition_dim)
    return table
