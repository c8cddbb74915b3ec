"""From the data flags to the training, validation and test sets: splits by document, and blends of several datasets."""

import logging
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from megatron_simple.data import _native
from megatron_simple.data.gpt_dataset import Component, GPTDataset, component_table, count_tokens, default_cache_path
from megatron_simple.data.index_cache import IndexCache
from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset

logger = logging.getLogger(__name__)

SPLIT_NAMES = ("train", "valid", "test")
# A dataset with the sequences that one split takes from it.
Part = tuple[IndexedDataset, range]


class BlendedDataset:
    """Draws from several datasets in proportion to `weights`, counted in samples: `blend[i]` is int64 [seq_length + 1].

    Every prefix of the blend follows the weights, and none of `datasets` gives more samples than it has (DatasetError
    at construction). The order of datasets is kept in `cache_path`; without one it is made anew.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        num_samples: int,
        *,
        name: str = "blend",
        cache_path: str | Path | None = None,
        build: bool = True,
    ) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} datasets and {len(weights)} weights; give one weight per dataset")
        self.datasets = list(datasets)
        self.weights = normalise_weights(weights)
        arrays = _blend_arrays(self.weights, num_samples, name=name, cache_path=cache_path, build=build)
        self._dataset_index = arrays["dataset_index"]
        self._dataset_samples = arrays["dataset_samples"]
        self.samples_per_dataset = arrays["samples_per_dataset"].tolist()
        for dataset, drawn in zip(self.datasets, self.samples_per_dataset, strict=True):
            if drawn > len(dataset):
                raise DatasetError(f"the blend draws {drawn} samples from a dataset that has {len(dataset)}")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"the blend has {len(self)} samples; there is no sample {i}")
        return self.datasets[int(self._dataset_index[i])][int(self._dataset_samples[i])]

    def describe(self) -> str:
        """A table with one row per dataset, and their sum: what a run draws from each."""
        drawn = zip(self.datasets, self.weights, self.samples_per_dataset, strict=True)
        rows = [dataset.component(weight=weight, samples=samples) for dataset, weight, samples in drawn]
        tokens = sum(row.tokens for row in rows)
        epochs = sum(row.epochs * row.tokens for row in rows) / tokens
        return component_table([*rows, Component("all", 1.0, tokens, len(self), epochs)])


def build_split_datasets(
    *,
    data_path: Sequence[str] | None,
    split: str,
    train_data_path: Sequence[str] | None,
    valid_data_path: Sequence[str] | None,
    test_data_path: Sequence[str] | None = None,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    cache_path: str | Path | None,
    build: bool = True,
) -> tuple[GPTDataset | BlendedDataset | None, ...]:
    """Training, validation and test set: either parts of `data_path` by `split`, or whole datasets for each.

    A set of which no samples are wanted, or to which no documents fall, is None; without a training set DatasetError.
    With `build=False` the sample indices must have been built by another process.
    """
    if data_path and (train_data_path or valid_data_path or test_data_path):
        raise DatasetError("give either --data-path with --split, or --train-data-path and --valid-data-path")
    if not data_path and not train_data_path:
        raise DatasetError("there is no training data; give --data-path, or --train-data-path")
    if data_path:
        sources = _split_sources(data_path, split)
    else:
        sources = [_whole_source(paths) for paths in (train_data_path, valid_data_path, test_data_path)]
    settings = {"seq_length": seq_length, "seed": seed, "cache_path": cache_path, "build": build}
    sets = tuple(
        _blend(parts, weights, wanted, name=name, **settings) if wanted and parts else None
        for name, wanted, (weights, parts) in zip(SPLIT_NAMES, num_samples, sources, strict=True)
    )
    if num_samples[0] > 0 and sets[0] is None:
        raise DatasetError(f"--split {split} leaves no document for training; make its first number larger")
    return sets


def parse_data_path(values: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Weights (None where none are given) and prefixes of `P`, `P1 P2 ...` or `W1 P1 W2 P2 ...`."""
    numbers = [_number(value) for value in values]
    if not values:
        raise DatasetError("--data-path is empty; give a dataset prefix, or weights and prefixes in turn")
    if all(number is None for number in numbers):
        return None, list(values)
    if len(values) % 2 or any((n is None) != (i % 2 == 1) for i, n in enumerate(numbers)):
        raise DatasetError(
            f"--data-path {' '.join(values)}: give only prefixes, or a weight before every prefix (0.3 A 0.7 B); "
            "write a prefix that is a number as ./1"
        )
    weights = [number for number in numbers if number is not None]
    normalise_weights(weights)
    return weights, list(values[1::2])


def split_fractions(split: str) -> tuple[float, float, float]:
    """The shares of training, validation and test in `split` ("99,1,0"), adding up to 1; missing ones are 0."""
    values = [_number(text) for text in split.split(",")]
    if len(values) > 3 or any(value is None or not math.isfinite(value) or value < 0 for value in values):
        raise DatasetError(f"--split {split}: give one to three numbers of 0 and more, such as 99,1,0")
    shares = [value for value in values if value is not None] + [0.0] * (3 - len(values))
    total = sum(shares)
    if total == 0:
        raise DatasetError(f"--split {split}: at least one number must be positive")
    return shares[0] / total, shares[1] / total, shares[2] / total


def parse_split(split: str, num_documents: int) -> tuple[range, range, range]:
    """The documents of training, validation and test, in file order: the borders are rounded to whole documents."""
    borders = [0] + [round(end * num_documents) for end in accumulate(split_fractions(split))]
    train, valid, test = (range(begin, end) for begin, end in zip(borders, borders[1:], strict=False))
    return train, valid, test


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum; DatasetError for one that is not a positive number."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise DatasetError(f"blend weight {weight} is not a positive number; leave out a dataset of weight 0")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _split_sources(data_path: Sequence[str], split: str) -> list[tuple[list[float], list[Part]]]:
    """Weights and parts of training, validation and test; a dataset without documents for a split is left out of it."""
    weights, prefixes = parse_data_path(data_path)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    ranges = [parse_split(split, len(dataset)) for dataset in datasets]
    fractions = split_fractions(split)
    sources = []
    for which, name in enumerate(SPLIT_NAMES):
        kept = [i for i, parts in enumerate(ranges) if len(parts[which])]
        for i in set(range(len(datasets))) - set(kept):
            if fractions[which] > 0:
                count = len(datasets[i])
                logger.warning("--split %s: no document of %s (it has %d) falls to %s", split, prefixes[i], count, name)
        parts = [(datasets[i], ranges[i][which]) for i in kept]
        sources.append(([weights[i] for i in kept] if weights else _by_tokens(parts), parts))
    return sources


def _whole_source(paths: Sequence[str] | None) -> tuple[list[float], list[Part]]:
    if not paths:
        return [], []
    weights, prefixes = parse_data_path(paths)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    parts = [(dataset, range(len(dataset))) for dataset in datasets]
    return weights or _by_tokens(parts), parts


def _by_tokens(parts: Sequence[Part]) -> list[float]:
    """Without weights every token is drawn equally often."""
    return [float(max(count_tokens(dataset, documents), 1)) for dataset, documents in parts]


def _blend(
    parts: Sequence[Part],
    weights: Sequence[float],
    num_samples: int,
    *,
    name: str,
    seq_length: int,
    seed: int,
    cache_path: str | Path | None,
    build: bool,
) -> GPTDataset | BlendedDataset:
    """One dataset as it is, several blended, each with as many samples as the blend can ask of it."""

    def make(part: Part, samples: int) -> GPTDataset:
        indexed, documents = part
        settings = {"seq_length": seq_length, "seed": seed, "name": name, "cache_path": cache_path, "build": build}
        return GPTDataset(indexed, documents=documents, num_samples=samples, **settings)

    if len(parts) == 1:
        return make(parts[0], num_samples)
    shares = normalise_weights(weights)
    # The blend keeps every dataset within one sample of its share.
    datasets = [make(part, int(share * num_samples) + 1) for part, share in zip(parts, shares, strict=True)]
    cache_path = cache_path or default_cache_path(parts[0][0].prefix)
    return BlendedDataset(datasets, shares, num_samples, name=f"{name}-blend", cache_path=cache_path, build=build)


def _blend_arrays(
    weights: list[float], num_samples: int, *, name: str, cache_path: str | Path | None, build: bool
) -> dict[str, np.ndarray]:
    def build_arrays() -> dict[str, np.ndarray]:
        dataset_index, dataset_samples = _native.build_blending_index(np.array(weights), num_samples)
        counts = np.bincount(dataset_index, minlength=len(weights))
        return {"dataset_index": dataset_index, "dataset_samples": dataset_samples, "samples_per_dataset": counts}

    if cache_path is None:
        return build_arrays()
    cache = IndexCache(cache_path, name=name, key={"weights": weights, "num_samples": num_samples})
    return cache.load_or_build(build_arrays) if build else cache.load()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
