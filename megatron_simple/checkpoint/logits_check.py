"""Does a Hugging Face folder compute what the training model computes? Both run on the same tokens in fp32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_simple.checkpoint.huggingface import load_model
from megatron_simple.checkpoint.reader import CheckpointReader, load_weights
from megatron_simple.config import ModelConfig
from megatron_simple.model.transformer import Transformer

# Largest accepted difference of a logit, relative to the largest logit. Two fp32 runs of one model that sum in another
# order differ by 5e-7 (2 layers) to 2.5e-6 (48 layers); the smallest mistake known to matter, eps 1e-6 for 1e-5, makes
# 1.8e-5 and more.
LIMIT = 1e-5
SAMPLES, LENGTH, SEED = 2, 64, 20260201


@dataclass(frozen=True)
class LogitsCheck:
    """Largest difference between the two models' logits, and the largest logit."""

    difference: float
    scale: float

    @property
    def passed(self) -> bool:
        return self.difference <= LIMIT * self.scale  # false for NaN, too

    def sentence(self) -> str:
        limit = LIMIT * self.scale
        return f"largest difference of logits {self.difference:.2e} (largest logit {self.scale:.2f}, limit {limit:.1e})"


def probe_tokens(config: ModelConfig) -> Tensor:
    """The fixed token ids [2, S] on which models are compared: spread over the whole vocabulary, S at most 64."""
    length = min(LENGTH, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, config.vocab_size, (SAMPLES, length), generator=generator)


def check_logits(folder: Path, reader: CheckpointReader, *, dtype: str) -> LogitsCheck:
    """Compares the folder's model with the training model filled from the checkpoint, its weights rounded to `dtype`.

    One model is in memory at a time.
    """
    config = reader.config.model
    tokens = probe_tokens(config)
    exported = _exported_logits(folder, tokens)
    ours = native_logits(reader, tokens, round_to=getattr(torch, dtype))
    if exported.shape != ours.shape:
        raise ValueError(f"{folder}: logits have shape {tuple(exported.shape)}, the training model's {tuple(ours.shape)}")
    return LogitsCheck((exported - ours).abs().max().item(), ours.abs().max().item())


def _exported_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def native_logits(reader: CheckpointReader, tokens: Tensor, *, round_to: torch.dtype = torch.float32) -> Tensor:
    """Logits [B, S, V] of the checkpoint's model, without the padding of its vocabulary."""
    model = load_native(reader, round_to=round_to)
    with torch.no_grad():
        return model(tokens)[..., : reader.config.model.vocab_size]


def load_native(reader: CheckpointReader, *, round_to: torch.dtype = torch.float32) -> Transformer:
    """The training model of a checkpoint, whole, in fp32 with its weights rounded to `round_to`, in evaluation mode."""
    model = Transformer(reader.config.model)
    load_weights(model, reader)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(round_to))
    return model.eval()


def write_report(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
