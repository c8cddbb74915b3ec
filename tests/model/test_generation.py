from __future__ import annotations

import pytest
import torch

from megatron_simple.model.generation import Sampling, generate, next_token

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(sampling: Sampling, count: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sampling.seed)
    return torch.bincount(torch.tensor([next_token(LOGITS, sampling, generator) for _ in range(count)]), minlength=4) / count


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(Sampling(), 10).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    assert (draws(Sampling(temperature)) - (LOGITS / temperature).softmax(-1)).abs().max() < 0.03


def test_top_k_and_top_p_cut_the_tail() -> None:
    two = torch.tensor([0.0, 3.0, float("-inf"), 2.0]).softmax(-1) * torch.tensor([0, 1, 0, 1])
    assert (draws(Sampling(1.0, top_k=2)) - two / two.sum()).abs().max() < 0.03
    assert LOGITS.softmax(-1)[1] > 0.6
    assert draws(Sampling(1.0, top_p=0.6), 50).tolist() == [0, 1, 0, 0]
    assert draws(Sampling(1.0, top_p=0.7), 500)[[0, 2]].sum() == 0
    assert draws(Sampling(1.0, top_p=1.0)).min() > 0
    assert draws(Sampling(1.0, top_k=1, top_p=1.0), 50).tolist() == [0, 1, 0, 0]


def test_the_loop_feeds_back_what_it_chose_and_stops() -> None:
    seen = []

    def counting(tokens: torch.Tensor) -> torch.Tensor:
        """The likeliest next id is the last one + 1."""
        seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens + 1, 10).float()

    assert list(generate(counting, [3], max_new_tokens=3)) == [4, 5, 6]
    assert seen == [[3], [3, 4], [3, 4, 5]]
    assert list(generate(counting, [1, 3], max_new_tokens=9, stop=5)) == [4, 5]
    with pytest.raises(ValueError, match="no tokens"):
        list(generate(counting, [], max_new_tokens=1))


def test_the_same_seed_draws_the_same_text() -> None:
    def flat(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, tokens.shape[1], 50)

    texts = [list(generate(flat, [0], max_new_tokens=20, sampling=Sampling(1.0, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("settings", "flag"), [({"temperature": -1}, "--temperature"), ({"top_k": 0}, "--top-k"), ({"top_p": 1.5}, "--top-p")]
)
def test_values_out_of_range(settings: dict, flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        Sampling(**settings)
