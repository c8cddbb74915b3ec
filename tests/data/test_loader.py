import numpy as np
import pytest

from megatron_simple.data.indexed_dataset import DatasetError
from megatron_simple.data.loader import BatchLoader, SequentialSamples
from tests.data.dataset_files import numbered_dataset, write_packed


class Numbered:
    """Sample i is i, i, i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        return np.full(3, i, dtype=np.int64)


def loader(dataset=None, **changes) -> BatchLoader:
    settings = {"micro_batch_size": 2, "global_batch_size": 12, "data_parallel_rank": 0, "data_parallel_size": 2}
    return BatchLoader(dataset or Numbered(100), **{**settings, **changes})


def test_a_batch_is_this_ranks_share():
    for rank, wanted in [(0, [[0, 1], [4, 5], [8, 9]]), (1, [[2, 3], [6, 7], [10, 11]])]:
        batches = loader(data_parallel_rank=rank)
        for step in range(3):
            batch = next(batches)
            assert (batch.shape, batch.dtype) == ((3, 2, 3), np.int64)
            assert (batch == (np.array(wanted) + 12 * step)[:, :, None]).all()


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)])
def test_the_global_batch_does_not_depend_on_the_layout(size, micro):
    ranks = [loader(data_parallel_rank=r, data_parallel_size=size, micro_batch_size=micro) for r in range(size)]
    for step in range(2):
        shares = [next(rank)[:, :, 0] for rank in ranks]
        in_order = np.stack(shares, axis=1).ravel()  # micro-batch, rank, sample
        assert in_order.tolist() == list(range(12 * step, 12 * step + 12))


def test_the_position_is_one_integer_also_across_layouts():
    first = loader()
    next(first)
    next(first)
    assert first.consumed_samples == 24
    resumed = loader(consumed_samples=24, data_parallel_size=1, micro_batch_size=4)
    assert sorted(next(resumed)[:, :, 0].ravel()) == list(range(24, 36))
    assert (next(loader(consumed_samples=24)) == next(first)).all()


def test_the_end_of_the_data_is_an_error_when_it_is_reached():
    batches = loader(Numbered(25))
    next(batches)
    next(batches)  # the read ahead fails in the background, and is not heard of before it is needed
    for _ in range(2):
        with pytest.raises(ValueError, match="ends after 25 samples, but the next batch ends at sample 36"):
            next(batches)
    assert batches.consumed_samples == 24


def test_ids_outside_the_vocabulary_are_named():
    batches = loader(vocab_size=15)
    assert next(batches).max() == 9
    with pytest.raises(ValueError, match=r"holds token id 21, but the vocabulary has ids 0 to 14; .*--vocab-size"):
        next(batches)
    negative = type("Negative", (Numbered,), {"__getitem__": lambda self, i: np.full(3, 4 - i)})
    with pytest.raises(ValueError, match="token id -5"):
        next(loader(negative(100), vocab_size=15))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 10}, "--global-batch-size 10 is not a multiple of --micro-batch-size 2 x 2"),
        ({"global_batch_size": 0}, "--global-batch-size 0"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
        ({"data_parallel_rank": 2}, "no data-parallel rank 2"),
        ({"consumed_samples": -1}, "counts from 0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loader(**changes)


def test_sequential_samples_are_the_text_in_file_order(tmp_path):
    numbered_dataset(tmp_path / "a", [3, 7, 1])
    numbered_dataset(tmp_path / "b", [2], start=11)
    write_packed(tmp_path / "empty", [], dtype="int32", documents=[0])
    numbered_dataset(tmp_path / "c", [9], start=13)
    samples = SequentialSamples([tmp_path / name for name in ("a", "b", "empty", "c")], 5)
    assert (len(samples), samples.num_tokens) == (4, 22)
    for i in range(4):
        assert samples[i].dtype == np.int64
        assert samples[i].tolist() == list(range(5 * i, 5 * i + 6))
    for i in (-1, 4):
        with pytest.raises(IndexError):
            samples[i]


def test_the_last_partial_sample_is_dropped(tmp_path):
    for count, wanted in [(11, 2), (12, 2), (15, 2), (16, 3)]:
        numbered_dataset(tmp_path / str(count), [count])
        assert len(SequentialSamples(tmp_path / str(count), 5)) == wanted
    numbered_dataset(tmp_path / "short", [5])
    with pytest.raises(DatasetError, match="short: 5 tokens, but one sample needs 6; lower --seq-length"):
        SequentialSamples(tmp_path / "short", 5)


def test_sequential_samples_through_a_loader(tmp_path):
    numbered_dataset(tmp_path / "a", [41])
    batch = next(loader(SequentialSamples(tmp_path / "a", 3)))
    assert batch.shape == (3, 2, 4)
    assert batch[0, 1].tolist() == [3, 4, 5, 6]
