import logging
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron_simple.data import _native
from megatron_simple.data.blended_dataset import (
    BlendedDataset,
    build_split_datasets,
    parse_data_path,
    parse_split,
    split_fractions,
)
from megatron_simple.data.gpt_dataset import GPTDataset
from megatron_simple.data.indexed_dataset import DatasetError
from tests.data.dataset_files import numbered_dataset


def deadline_oracle(weights: list[str], num_samples: int) -> tuple[list[int], list[int]]:
    """Tijdeman's rule in exact fractions: of those that may be drawn, the dataset that must be drawn first."""
    shares = [Fraction(weight) for weight in weights]
    lead = Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
    taken = [0] * len(shares)
    datasets, samples = [], []
    for n in range(1, num_samples + 1):
        behind = [share * n - count for share, count in zip(shares, taken, strict=True)]
        due = [d for d in range(len(shares)) if behind[d] >= lead]
        chosen = min(due, key=lambda d: ((1 - lead - behind[d]) / shares[d], d))
        datasets.append(chosen)
        samples.append(taken[chosen])
        taken[chosen] += 1
    return datasets, samples


def build(tmp_path: Path, **changes):
    settings = {
        "data_path": None,
        "split": "99,1,0",
        "train_data_path": None,
        "valid_data_path": None,
        "seq_length": 4,
        "num_samples": (20, 5, 0),
        "seed": 1234,
        "cache_path": tmp_path / "cache",
    }
    return build_split_datasets(**{**settings, **changes})


def tokens_of(dataset) -> set[int]:
    return {token for i in range(len(dataset)) for token in dataset[i].tolist()}


@pytest.mark.parametrize(
    "weights",
    [["1"], ["1/4", "3/4"], ["1/2", "1/4", "1/4"], ["5/8", "1/8", "1/8", "1/16", "1/16"], ["1/8"] * 8],
)
def test_blend_equals_its_twin(weights):
    """Weights that doubles hold exactly, so that both decide ties alike."""
    datasets, samples = _native.build_blending_index(np.array([float(Fraction(w)) for w in weights]), 1000)
    assert (datasets.dtype, samples.dtype) == (np.int32, np.int64)
    assert (datasets.tolist(), samples.tolist()) == deadline_oracle(weights, 1000)


@pytest.mark.parametrize("weights", [[0.9, 0.05, 0.03, 0.02], [0.1] * 10, [1 / 3] * 3, [1e-9, 1 - 1e-9]])
def test_every_prefix_follows_the_weights(weights):
    assert largest_error(np.array(weights), 3000) < 1


def test_every_prefix_follows_the_weights_for_any_number_of_datasets():
    """This is what the lengths of a blend's datasets rest on."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        weights = random.pareto(0.5, size=random.integers(2, 60)) + 1e-9
        weights /= weights.sum()
        assert largest_error(weights, 2000) <= 1 - 1 / (2 * len(weights) - 2) + 1e-6


def largest_error(weights: np.ndarray, num_samples: int) -> float:
    datasets, _ = _native.build_blending_index(weights, num_samples)
    counts = np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)  # [samples, datasets]
    return float(np.abs(counts - np.arange(1, num_samples + 1)[:, None] * weights).max())


@pytest.mark.parametrize(
    ("weights", "num_samples"),
    [([1.0, 0.0], 3), ([1.5, -0.5], 3), ([], 3), ([1.0], -1), ([0.5, 0.4], 3), ([np.nan, 1.0], 3)],
)
def test_blend_refuses_nonsense(weights, num_samples):
    with pytest.raises(ValueError, match="blend|num_samples"):
        _native.build_blending_index(np.array(weights, dtype=np.float64), num_samples)


def test_data_paths_with_and_without_weights():
    assert parse_data_path(["A"]) == (None, ["A"])
    assert parse_data_path(["A", "B"]) == (None, ["A", "B"])
    assert parse_data_path(["0.3", "A", "7", "B"]) == ([0.3, 7.0], ["A", "B"])
    assert parse_data_path(["1", "./2"]) == ([1.0], ["./2"])


@pytest.mark.parametrize("values", [["0.3", "A", "B"], ["1"], ["A", "1"], ["1", "2"], ["0.3", "A", "B", "0.7"]])
def test_mixed_data_paths_are_refused(values):
    with pytest.raises(DatasetError, match="weight before every prefix"):
        parse_data_path(values)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf"])
def test_weights_that_are_not_positive_are_refused(weight):
    with pytest.raises(DatasetError, match="not a positive number"):
        parse_data_path([weight, "A", "1", "B"])


def test_splits_round_to_documents():
    assert parse_split("99,1,0", 1000) == (range(990), range(990, 1000), range(1000, 1000))
    assert parse_split("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    assert parse_split("100", 7) == (range(7), range(7, 7), range(7, 7))
    assert parse_split("1,1", 5) == (range(2), range(2, 5), range(5, 5))
    assert parse_split("0,1,1", 4) == (range(0), range(2), range(2, 4))
    assert split_fractions("9, 1") == (0.9, 0.1, 0.0)


def test_splits_lose_no_document():
    random = np.random.default_rng(0)
    for _ in range(500):
        shares = ",".join(f"{share:.3g}" for share in random.random(3))
        count = int(random.integers(0, 10**7))
        train, valid, test = parse_split(shares, count)
        assert (train.start, train.stop, valid.stop, test.stop) == (0, valid.start, test.start, count)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "1,nan", "inf,1", "99;1"])
def test_splits_that_are_no_shares_are_refused(split):
    with pytest.raises(DatasetError, match="--split"):
        parse_split(split, 10)


def test_one_dataset_is_split_by_documents(tmp_path):
    numbered_dataset(tmp_path / "a", [10] * 10)
    train, valid, test = build(tmp_path, data_path=[str(tmp_path / "a")], split="8,2,0")
    assert isinstance(train, GPTDataset)
    assert tokens_of(train) <= set(range(80))
    assert tokens_of(valid) <= set(range(80, 100))
    assert test is None
    assert len(train) >= 20
    assert len(valid) >= 5


def test_sets_that_are_not_wanted_or_empty_are_none(tmp_path, caplog):
    numbered_dataset(tmp_path / "a", [10] * 10)
    with caplog.at_level(logging.WARNING):
        train, valid, test = build(tmp_path, data_path=[str(tmp_path / "a")], num_samples=(20, 0, 5))
        assert (train is None, valid, test) == (False, None, None)
        assert "falls to valid" in caplog.text  # 1 % of 10 documents
        assert build(tmp_path, data_path=[str(tmp_path / "a")])[1] is None
    assert "falls to test" not in caplog.text  # its share is 0


def test_own_paths_for_each_set(tmp_path):
    numbered_dataset(tmp_path / "a", [50])
    numbered_dataset(tmp_path / "b", [50], start=1000)
    train, valid, test = build(tmp_path, train_data_path=[f"{tmp_path}/a"], valid_data_path=[f"{tmp_path}/b"])
    assert max(tokens_of(train)) < 50
    assert min(tokens_of(valid)) >= 1000
    assert test is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no training data; give --data-path, or --train-data-path"),
        ({"valid_data_path": ["a"]}, "no training data"),
        ({"data_path": ["a"], "valid_data_path": ["a"]}, "either --data-path with --split, or"),
        ({"data_path": ["a"], "split": "0,1"}, "leaves no document for training"),
        ({"data_path": ["a"], "split": "1,99"}, "leaves no document for training"),
        ({"data_path": ["missing"]}, r"missing\.idx: no such file"),
        ({"data_path": ["a"], "split": "98,2", "seq_length": 30}, "the valid part of a is too small"),
    ],
)
def test_wrong_combinations_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    numbered_dataset(Path("a"), [10] * 25)
    with pytest.raises(DatasetError, match=message):
        build(tmp_path, **changes)


def test_a_blend_draws_by_weight(tmp_path):
    for number, name in enumerate("abc"):
        numbered_dataset(tmp_path / name, [300], start=1000 * number)
    path = [word for name, weight in zip("abc", ("1", "2", "5"), strict=True) for word in (weight, f"{tmp_path}/{name}")]
    train, _, _ = build(tmp_path, data_path=path, num_samples=(80, 0, 0), split="1")
    assert isinstance(train, BlendedDataset)
    assert len(train) == 80
    assert Counter(int(train[i][0]) // 1000 for i in range(80)) == {0: 10, 1: 20, 2: 50}
    samples = {tuple(train[i].tolist()) for i in range(80)}
    assert len(samples) == 80  # below one epoch no sample comes twice
    with pytest.raises(IndexError, match="80 samples"):
        train[80]


def test_without_weights_every_token_is_drawn_equally_often(tmp_path):
    numbered_dataset(tmp_path / "a", [100])
    numbered_dataset(tmp_path / "b", [300], start=1000)
    train, _, _ = build(tmp_path, data_path=[f"{tmp_path}/a", f"{tmp_path}/b"], split="1", num_samples=(80, 0, 0))
    assert train.samples_per_dataset == [20, 60]


def test_extreme_weights_never_exceed_a_dataset(tmp_path):
    """Two small datasets at 0.999 and 0.001: the first repeats, and every sample can be read."""
    numbered_dataset(tmp_path / "a", [401])
    numbered_dataset(tmp_path / "b", [401], start=1000)
    path = ["0.999", f"{tmp_path}/a", "0.001", f"{tmp_path}/b"]
    train, _, _ = build(tmp_path, data_path=path, split="1", num_samples=(2000, 0, 0))
    assert train.samples_per_dataset == [1998, 2]
    assert all(len(train[i]) == 5 for i in range(2000))
    header, first, second, total = train.describe().splitlines()
    assert first.split()[1:] == ["0.9990", "401", "1,998", "19.93", "repeats"]
    assert second.split()[1:] == ["0.0010", "401", "2", "0.02"]
    assert total.split() == ["all", "1.0000", "802", "2,000", "9.98", "repeats"]
    assert header.split() == ["dataset", "weight", "tokens", "samples", "epochs"]


def test_a_dataset_of_a_blend_holds_what_the_blend_draws(tmp_path):
    """One epoch of each has 10 samples; the blend draws 11."""
    for name in "ab":
        numbered_dataset(tmp_path / name, [41])
    train, _, _ = build(tmp_path, data_path=[f"{tmp_path}/a", f"{tmp_path}/b"], split="1", num_samples=(22, 0, 0))
    assert train.samples_per_dataset == [11, 11]


def test_a_dataset_that_is_too_short_for_its_weight_is_refused(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [41])
    settings = {"documents": range(1), "seq_length": 4, "seed": 1, "name": "train", "cache_path": tmp_path / "cache"}
    short = GPTDataset(indexed, num_samples=10, **settings)
    assert len(short) == 10
    with pytest.raises(DatasetError, match="draws 11 samples from a dataset that has 10"):
        BlendedDataset([short, short], [11.0, 1.0], 12)
    with pytest.raises(ValueError, match="one weight per dataset"):
        BlendedDataset([short], [1.0, 1.0], 5)
    assert len(BlendedDataset([short, short], [1.0, 1.0], 20)) == 20


def test_a_dataset_without_validation_documents_is_left_out_of_that_blend(tmp_path, caplog):
    numbered_dataset(tmp_path / "small", [50] * 2)
    numbered_dataset(tmp_path / "large", [10] * 50, start=1000)
    path = ["1", f"{tmp_path}/small", "1", f"{tmp_path}/large"]
    with caplog.at_level(logging.WARNING):
        train, valid, _ = build(tmp_path, data_path=path, split="90,10,0")
    assert train.samples_per_dataset == [10, 10]
    assert isinstance(valid, GPTDataset)
    assert min(tokens_of(valid)) >= 1000
    assert f"no document of {tmp_path}/small (it has 2) falls to valid" in caplog.text


def test_a_blend_is_built_by_one_process_and_loaded_by_the_others(tmp_path):
    for name in "ab":
        numbered_dataset(tmp_path / name, [100])
    path = ["0.5", f"{tmp_path}/a", "0.5", f"{tmp_path}/b"]
    with pytest.raises(DatasetError, match="is missing: one process per node"):
        build(tmp_path, data_path=path, split="1", build=False)
    built, _, _ = build(tmp_path, data_path=path, split="1")
    loaded, _, _ = build(tmp_path, data_path=path, split="1", build=False)
    assert all((built[i] == loaded[i]).all() for i in range(20))
    build(tmp_path, data_path=path, split="1", cache_path=None)
    assert any(file.name.startswith("train-blend-") for file in (tmp_path / "index-cache").iterdir())


def test_megatrons_own_dataset_at_two_lengths(tmp_path):
    folder = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
    if not folder:
        pytest.skip("MEGATRON_SIMPLE_TEST_DATA is not set")
    prefix = f"{folder}/data/owt-megatron/meg-gpt2-openwebtext_text_document"
    for seq_length in (64, 1024):
        train, valid, _ = build(tmp_path, data_path=[prefix], seq_length=seq_length, num_samples=(3000, 20, 0))
        assert len(train) >= 3000
        assert all(len(train[i]) == seq_length + 1 for i in range(0, 3000, 17))
        assert max(tokens_of(valid)) <= 4999
