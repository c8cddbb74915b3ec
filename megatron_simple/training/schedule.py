"""The learning rate as a pure function of the iteration: nothing to save, and new flags take effect on resume."""

from __future__ import annotations

import math

from megatron_simple.config import TrainingConfig


def learning_rate(iteration: int, training: TrainingConfig) -> float:
    """The rate of optimiser step `iteration` (from 1 to train_iters).

    Linear warm-up over lr_warmup_iters steps reaches `lr` at its last step; then cosine or linear decay reaches `min_lr`
    at the last iteration; `constant` stays; `wsd` stays and decays linearly over its last lr_wsd_decay_iters steps.
    """
    peak, low, total = training.lr, training.min_lr, training.train_iters
    warmup = training.lr_warmup_iters
    if iteration <= warmup:
        return peak * iteration / warmup
    done = min(1.0, (iteration - warmup) / max(1, total - warmup))
    match training.lr_decay_style:
        case "constant":
            return peak
        case "linear":
            return peak + (low - peak) * done
        case "cosine":
            return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))
        case "wsd":
            decay = min(training.lr_wsd_decay_iters or max(1, total // 10), max(1, total - warmup))
            return peak + (low - peak) * max(0.0, (iteration - (total - decay)) / decay)
    raise ValueError(f"unknown --lr-decay-style {training.lr_decay_style}")
