"""Small models with weights that make every mistake visible: no gain is 1, no bias 0, logits of order 10."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_simple.checkpoint.format import WEIGHT, Manifest, ParameterInfo, Run
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.checkpoint.writer import partial_folder, publish, write_runs, write_weights
from megatron_simple.config import Config, ModelConfig, TrainingConfig, resolve_model
from megatron_simple.model.transformer import parameter_table

SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96,
    "vocab_size": 250, "max_position_embeddings": 48, "make_vocab_size_divisible_by": 32,
}  # fmt: skip
GPT2 = {"backbone": "nanogpt", "norm_placement": "prenorm", "normalization": "LayerNorm", "num_query_groups": 4}


def small_config(*, bf16: bool = False, **model: Any) -> Config:
    resolved = resolve_model(ModelConfig(**{**SIZES, **model}), 48)
    return Config(model=resolved, training=TrainingConfig(seq_length=48, bf16=bf16))


def random_weights(config: ModelConfig, *, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, (shape, _) in parameter_table(config).items():
        vocabulary = name.startswith(("embed", "lm_head"))
        std = 0.5 if vocabulary else shape[-1] ** -0.5 if name.endswith("proj.weight") else 0.2
        value = torch.randn(shape, generator=generator) * std
        yield name, value + 1 if name.endswith("norm.weight") else value


def native_checkpoint(folder: Path, config: Config, *, tokenizer: dict[str, str] | None = None) -> Path:
    copy = TokenizerCopy.read(tokenizer) if tokenizer else None
    write_weights(folder, config, random_weights(config.model), iteration=7, tokenizer=copy)
    return folder


def sharded_checkpoint(folder: Path, config: Config, *, shards: int) -> Path:
    """The same checkpoint as a TP run writes it: split parameters, a vocabulary padded with rows of junk."""
    partial = partial_folder(folder, 7)
    partial.mkdir(parents=True)
    table = parameter_table(config.model)
    rows = config.model.padded_vocab_size(shards)
    files = {}
    runs: dict[int, dict[Run, Tensor]] = {shard: {} for shard in range(shards)}
    for name, value in random_weights(config.model):
        if name in ("embed_tokens.weight", "lm_head.weight"):
            value = torch.cat([value, torch.full((rows - len(value), value.shape[1]), 77.0)])
        dim = table[name][1]
        for shard, part in enumerate([value] if dim is None else value.chunk(shards, dim)):
            runs[shard][Run(WEIGHT, name, shard, 1 if dim is None else shards, 0)] = part.reshape(-1)
    for shard, part in runs.items():
        files[f"tp{shard}.safetensors"] = write_runs(partial / f"tp{shard}.safetensors", part)
    manifest = Manifest(
        iteration=7, consumed_samples=0, optimizer_step=0, config=config.to_dict(), layout={"tp": shards},
        parameters={name: ParameterInfo(*info) for name, info in table.items()}, files=files,
    )  # fmt: skip
    publish(folder, partial, manifest)
    return folder
