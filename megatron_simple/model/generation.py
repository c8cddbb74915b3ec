"""Text token by token: the choice of the next token, and the loop around any model that gives logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the likeliest token; otherwise one is drawn among the `top_k` likeliest and among the fewest
    that hold `top_p` of the probability. ValueError for values outside their range."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"--temperature {self.temperature}: must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id out of the logits [V]; ties of the likeliest go to the lowest id."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[sampling.top_k :] = False
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        keep &= before < sampling.top_p
    chosen = torch.multinomial(probabilities * keep, 1, generator=generator)
    return int(order[chosen])


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `max_new_tokens` new ids after `prompt` (at least one id), each as soon as chosen, ending with `stop`.

    `logits_of` gives the logits [1, S, V] of token ids [1, S]; each step runs the whole sequence again.
    """
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(next_token(logits_of(torch.tensor([ids]))[0, -1].cpu(), sampling, generator))
        yield ids[-1]
        if ids[-1] == stop:
            break
