"""Initial values: one table by the parameter's role, one generator per parameter name, made whole and then sliced.

So every layout starts from the same model. Sources: the released Llama code's table (PAPER.md) and nanoGPT's.

| role                            | llama2, llama3                        | nanogpt                  |
|---------------------------------|---------------------------------------|--------------------------|
| embedding                       | N(0, 1); tied: as the head            | N(0, 0.02)               |
| positions                       | -                                     | N(0, 0.02)               |
| q, k, v, gate (nanogpt: up)     | trunc-normal 0.02                     | N(0, 0.02)               |
| o, up, down of layer l          | trunc-normal 0.02 / sqrt(2 (l + 1))   | o, down: N(0, 0.02 / sqrt(2 L)) |
| head                            | trunc-normal D^-0.5, cut at 3 std     | N(0, 0.02)               |
| gains, biases, padding rows     | 1, 0, 0                               | 1, 0, 0                  |
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megatron_simple.config import ModelConfig

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def initialize(module: nn.Module, prefix: str, config: ModelConfig, *, seed: int) -> None:
    """Names every parameter of `module` (`prefix` + its path) and fills it with this rank's slice of its value."""
    for path, parameter in module.named_parameters():
        name = f"{prefix}.{path}"
        parameter.logical_name = name
        with torch.no_grad():
            parameter.copy_(shard_of(whole_value(name, whole_shape(parameter, config), config, seed=seed), parameter))


def whole_shape(parameter: nn.Parameter, config: ModelConfig) -> tuple[int, ...]:
    """The parameter's shape over all shards, without the vocabulary's padding rows."""
    shape = list(parameter.local_shape)
    if parameter.partition_dim is not None:
        shape[parameter.partition_dim] *= parameter.shards
    if parameter.logical_name in VOCABULARY:
        shape[0] = config.vocab_size
    return tuple(shape)


def shard_of(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's slice of `whole`; rows that the vocabulary lacks are zero."""
    if parameter.partition_dim is None:
        return whole
    dim, size = parameter.partition_dim, parameter.local_shape[parameter.partition_dim]
    start = parameter.shard * size
    part = whole.narrow(dim, min(start, whole.shape[dim]), max(0, min(size, whole.shape[dim] - start)))
    if part.shape[dim] == size:
        return part
    padded = whole.new_zeros(parameter.local_shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def whole_value(name: str, shape: tuple[int, ...], config: ModelConfig, *, seed: int) -> Tensor:
    """The initial fp32 value of the whole parameter: a pure function of its name, shape, the settings and the seed."""
    value = torch.empty(shape, dtype=torch.float32)
    if name.endswith(".bias"):
        return value.zero_()
    if name.endswith("norm.weight"):
        return value.fill_(1.0)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std, cut = _spread(name, config)
    if cut is None:
        return value.normal_(0.0, std, generator=generator)
    return nn.init.trunc_normal_(value, 0.0, std, -cut, cut, generator=generator)


def _spread(name: str, config: ModelConfig) -> tuple[float, float | None]:
    """Standard deviation, and the cut of a truncated normal or None."""
    kind = name.split(".")[-2]
    if config.backbone == "nanogpt":
        behind = kind in ("o_proj", "down_proj")
        return 0.02 / math.sqrt(2 * config.num_layers) if behind else 0.02, None
    head_std = config.hidden_size**-0.5
    if kind == "lm_head" or (kind == "embed_tokens" and config.tie_embeddings):
        return head_std, 3 * head_std
    if kind == "embed_tokens":
        return 1.0, None
    if kind in ("o_proj", "up_proj", "down_proj"):
        layer = int(name.split(".")[1])
        return 0.02 / math.sqrt(2 * (layer + 1)), 2.0
    return 0.02, 2.0
