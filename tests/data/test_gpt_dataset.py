import json
import logging
from pathlib import Path

import numpy as np
import pytest

from megatron_simple.data import _native
from megatron_simple.data.gpt_dataset import GPTDataset, build_indices, document_dtype
from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset
from tests.data.dataset_files import numbered_dataset, write_dataset, write_packed


def sample_index_oracle(sizes: np.ndarray, order: np.ndarray, *, seq_length: int, num_samples: int) -> np.ndarray:
    """Sample k starts at token k * S of the documents in order: where that is, by search in their ends."""
    lengths = sizes[order].astype(np.int64)
    ends = np.cumsum(lengths)
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, starts, side="right")
    return np.stack([positions, starts - (ends - lengths)[positions]], axis=1)


def make(prefix_or_dataset, tmp_path: Path, **changes) -> GPTDataset:
    settings = {"num_samples": 10, "seq_length": 4, "seed": 1234, "name": "train", "cache_path": tmp_path / "cache"}
    indexed = prefix_or_dataset
    return GPTDataset(indexed, **{"documents": range(len(indexed)), **settings, **changes})


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seq_length", [1, 2, 7, 64])
def test_sample_index_equals_its_twin(dtype, seq_length):
    random = np.random.default_rng(seq_length)
    sizes = random.integers(0, 20, size=200).astype(np.int32)
    sizes[:3] = 1
    order = random.permutation(200).astype(dtype)
    order = order[np.argmax(sizes[order] > 0) :]  # the twin puts the first sample behind leading empty documents
    num_samples = (int(sizes[order].sum()) - 1) // seq_length
    rows = _native.build_sample_index(sizes, order, seq_length=seq_length, num_samples=num_samples)
    assert rows.dtype == np.int64
    assert (rows == sample_index_oracle(sizes, order, seq_length=seq_length, num_samples=num_samples)).all()


def test_sample_index_passes_2_to_the_31():
    """Token counts, offsets and sums that do not fit 32 bits, with sizes that stand for files of 40 GB."""
    sizes = np.array([2**31 - 1, 5, 2**31 - 7, 2**30 + 3], dtype=np.int32)
    order = np.tile(np.array([2, 0, 3, 1], dtype=np.int32), 4)
    for seq_length in (2**20 + 1, 2**31 + 11, 2**33):
        num_samples = (int(sizes[order].sum(dtype=np.int64)) - 1) // seq_length
        rows = _native.build_sample_index(sizes, order, seq_length=seq_length, num_samples=num_samples)
        assert (rows == sample_index_oracle(sizes, order, seq_length=seq_length, num_samples=num_samples)).all()
        assert rows.min() >= 0


def test_sample_index_ends_exactly_with_the_tokens():
    sizes = np.array([3, 2, 4], dtype=np.int32)
    order = np.arange(3, dtype=np.int32)
    assert _native.build_sample_index(sizes, order, seq_length=4, num_samples=2).tolist() == [[0, 0], [1, 1], [2, 3]]
    with pytest.raises(ValueError, match="too few tokens for 3 samples of 4"):
        _native.build_sample_index(sizes, order, seq_length=4, num_samples=3)


@pytest.mark.parametrize(
    ("sizes", "order", "message"),
    [([3, 3], [0, 2], "document 2 does not exist"), ([3, 3], [-1], "-1 does not exist"), ([-3], [0], "negative size")],
)
def test_sample_index_refuses_nonsense(sizes, order, message):
    sizes, order = np.array(sizes, dtype=np.int32), np.array(order, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        _native.build_sample_index(sizes, order, seq_length=4, num_samples=1)


def test_one_epoch_has_megatrons_order():
    """RandomState(seed) shuffles the documents, then goes on to shuffle the samples."""
    sizes = np.random.default_rng(0).integers(1, 50, size=100).astype(np.int32)
    arrays = build_indices(sizes, range(10, 90), epochs=1, seq_length=16, seed=7)
    random = np.random.RandomState(7)
    documents = np.arange(10, 90, dtype=np.int32)
    random.shuffle(documents)
    num_samples = (int(sizes[10:90].sum()) - 1) // 16
    shuffled = np.arange(num_samples, dtype=np.int64)
    random.shuffle(shuffled)
    assert (arrays["document_index"] == documents).all()
    assert (arrays["shuffle_index"] == shuffled).all()
    rows = sample_index_oracle(sizes, documents, seq_length=16, num_samples=num_samples)
    assert (arrays["sample_index"] == rows).all()


def test_every_epoch_is_whole_and_in_its_own_order():
    sizes = np.random.default_rng(0).integers(1, 50, size=100).astype(np.int32)
    tokens = int(sizes.sum())
    arrays = build_indices(sizes, range(100), epochs=5, seq_length=16, seed=7)
    epochs = arrays["document_index"].reshape(5, 100)
    assert (np.sort(epochs) == np.arange(100)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 5
    borders = [(epoch * tokens - 1) // 16 if epoch else 0 for epoch in range(6)]
    for begin, end in zip(borders, borders[1:], strict=False):
        drawn = arrays["shuffle_index"][begin:end]
        assert (np.sort(drawn) == np.arange(begin, end)).all()
        assert not (drawn == np.arange(begin, end)).all()


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [9, 4, 13, 6, 8])
    short, long = make(indexed, tmp_path, num_samples=9), make(indexed, tmp_path, num_samples=60)
    assert len(long) >= 60 > len(short) >= 9
    assert all((short[i] == long[i]).all() for i in range(len(short)))


def test_samples_are_the_documents_tokens(tmp_path):
    """Undoing the shuffle gives back the documents in their shuffled order, with one shared token at each border."""
    lengths = [5, 1, 1, 17, 2, 30, 3, 1, 8]
    indexed = numbered_dataset(tmp_path / "a", lengths)
    dataset = make(indexed, tmp_path, documents=range(1, 9), num_samples=40)
    arrays = build_indices(indexed.sizes, range(1, 9), epochs=3, seq_length=4, seed=1234)
    stream = np.concatenate([indexed[i] for i in arrays["document_index"]])
    samples = np.stack([dataset[i] for i in range(len(dataset))])
    assert samples.dtype == np.int64
    in_text_order = samples[np.argsort(arrays["shuffle_index"])]
    assert (in_text_order[1:, 0] == in_text_order[:-1, -1]).all()
    count = len(dataset)
    assert count == (3 * 63 - 1) // 4
    assert (in_text_order[:, :4].ravel() == stream[: 4 * count]).all()
    assert (in_text_order[-1, -1]) == stream[4 * count]
    assert 0 not in samples  # document 0 belongs to another split


def test_empty_sequences_are_passed_over(tmp_path):
    write_packed(tmp_path / "a", [[], [1, 2, 3], [], [], [4, 5]], dtype="uint16", documents=[0, 1, 2, 3, 4, 5])
    dataset = make(IndexedDataset(tmp_path / "a"), tmp_path, num_samples=20, seq_length=2)
    assert {token for i in range(len(dataset)) for token in dataset[i].tolist()} == {1, 2, 3, 4, 5}


def test_chosen_documents_may_be_an_array(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [6] * 8)
    dataset = make(indexed, tmp_path, documents=np.array([6, 1, 3]), num_samples=4)
    assert {token // 6 for i in range(len(dataset)) for token in dataset[i].tolist()} <= {6, 1, 3}


def test_seeds_differ_and_repeat(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [9] * 20)

    def samples(seed: int) -> list[list[int]]:
        dataset = make(indexed, tmp_path, seed=seed, cache_path=tmp_path / f"cache{seed}")
        return [dataset[i].tolist() for i in range(len(dataset))]

    assert samples(1) == samples(1) != samples(2)


def test_indices_outside_the_samples_are_refused(tmp_path):
    dataset = make(numbered_dataset(tmp_path / "a", [50]), tmp_path)
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError, match="12 samples"):
            dataset[i]


def test_a_corpus_too_small_for_a_sample_is_explained(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [3, 4, 5])
    with pytest.raises(DatasetError, match=r"valid part of .*a is too small: 1 documents with 4 tokens.* needs 5"):
        make(indexed, tmp_path, documents=range(1, 2), name="valid")
    with pytest.raises(DatasetError, match="lower --seq-length to at most 3, give this part a larger share in --split"):
        make(indexed, tmp_path, documents=range(1, 2))
    assert make(indexed, tmp_path, documents=range(1, 2), seq_length=3)[0].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": range(4)}, "has 3 documents; 0 to 3"),
        ({"num_samples": 0}, "at least 1"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**32}, "--seed 4294967296"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make(numbered_dataset(tmp_path / "a", [9, 9, 9]), tmp_path, **changes)


def test_document_numbers_grow_to_64_bits():
    assert document_dtype(2**31) == np.int32  # the largest number is 2^31 - 1
    assert document_dtype(2**31 + 1) == np.int64


def test_describe_counts_samples_and_epochs(tmp_path):
    indexed = numbered_dataset(tmp_path / "a", [50, 51])
    header, row = make(indexed, tmp_path, num_samples=50).describe().splitlines()
    assert header.split() == ["dataset", "weight", "tokens", "samples", "epochs"]
    assert row.split() == [str(tmp_path / "a"), "1.0000", "101", "50", "1.98", "repeats"]
    assert "repeats" not in make(indexed, tmp_path, num_samples=25).describe()


class TestCache:
    @pytest.fixture
    def indexed(self, tmp_path):
        return numbered_dataset(tmp_path / "a", [9, 4, 13, 6])

    @staticmethod
    def files(tmp_path: Path) -> dict[str, Path]:
        return {path.name.split(".", 1)[1]: path for path in (tmp_path / "cache").iterdir()}

    def test_is_reused(self, tmp_path, indexed, monkeypatch):
        first = make(indexed, tmp_path)
        monkeypatch.setattr("megatron_simple.data.gpt_dataset.build_indices", None)
        again = make(indexed, tmp_path)
        assert all((first[i] == again[i]).all() for i in range(len(first)))
        assert all((make(indexed, tmp_path, build=False)[i] == first[i]).all() for i in range(len(first)))
        names = ["document_index.npy", "json", "sample_index.npy", "shuffle_index.npy"]
        assert sorted(self.files(tmp_path)) == names

    def test_lies_beside_the_data_by_default(self, tmp_path, indexed):
        make(indexed, tmp_path, cache_path=None)
        assert len(list((tmp_path / "index-cache").iterdir())) == 4

    @pytest.mark.parametrize(
        "changes", [{"seq_length": 5}, {"seed": 1}, {"documents": range(3)}, {"num_samples": 100}, {"name": "valid"}]
    )
    def test_other_settings_have_other_files(self, tmp_path, indexed, changes):
        make(indexed, tmp_path)
        make(indexed, tmp_path, **changes)
        assert len(list((tmp_path / "cache").iterdir())) == 8

    def test_other_content_has_other_files(self, tmp_path, indexed):
        make(indexed, tmp_path)
        make(numbered_dataset(tmp_path / "a", [9, 4, 14, 5]), tmp_path)
        assert len(list((tmp_path / "cache").iterdir())) == 8

    def test_a_copy_of_the_data_finds_the_same_files(self, tmp_path, indexed):
        make(indexed, tmp_path)
        make(numbered_dataset(tmp_path / "copy", [9, 4, 13, 6]), tmp_path, build=False)

    @pytest.mark.parametrize("file", ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "json"])
    @pytest.mark.parametrize("damage", ["missing", "cut", "altered"])
    def test_an_unusable_file_is_built_again_and_named(self, tmp_path, indexed, caplog, file, damage):
        first = make(indexed, tmp_path)
        wanted = [first[i].tolist() for i in range(len(first))]
        path = self.files(tmp_path)[file]
        content = path.read_bytes()
        path.unlink()  # the maps of `first` keep the old file
        if damage == "cut":
            path.write_bytes(content[:-1] if file != "json" else content[:-4])
        elif damage == "altered":
            path.write_bytes(content[:-8] + bytes(byte ^ 1 for byte in content[-8:]))
        with caplog.at_level(logging.WARNING):
            again = make(indexed, tmp_path)
        assert [again[i].tolist() for i in range(len(again))] == wanted
        assert len(caplog.records) == 1
        assert str(path) in caplog.text
        assert "building this index again" in caplog.text
        assert path.read_bytes() == content

    def test_the_first_build_is_no_warning(self, tmp_path, indexed, caplog):
        with caplog.at_level(logging.WARNING):
            make(indexed, tmp_path)
        assert caplog.records == []

    def test_a_description_of_something_else_is_not_believed(self, tmp_path, indexed, caplog):
        make(indexed, tmp_path)
        path = self.files(tmp_path)["json"]
        described = json.loads(path.read_text())
        described["key"]["seed"] = 99
        path.write_text(json.dumps(described))
        with caplog.at_level(logging.WARNING):
            make(indexed, tmp_path)
        assert "describes another index" in caplog.text

    def test_a_process_that_does_not_build_says_what_is_missing(self, tmp_path, indexed):
        with pytest.raises(DatasetError, match=r"cache/train-\w+\.json is missing: one process per node .*cache-path"):
            make(indexed, tmp_path, build=False)
        make(indexed, tmp_path)
        self.files(tmp_path)["sample_index.npy"].unlink()
        with pytest.raises(DatasetError, match=r"sample_index\.npy is missing"):
            make(indexed, tmp_path, build=False)

    def test_a_folder_that_cannot_be_written_is_explained(self, tmp_path, indexed):
        (tmp_path / "file").write_text("")
        with pytest.raises(DatasetError, match="cannot write the sample index to .*file.*--data-cache-path"):
            make(indexed, tmp_path, cache_path=tmp_path / "file")

    def test_a_broken_build_leaves_nothing(self, tmp_path, indexed, monkeypatch):
        def fails(file, array):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "save", fails)
        with pytest.raises(DatasetError, match="No space left on device; give --data-cache-path"):
            make(indexed, tmp_path)
        assert list((tmp_path / "cache").iterdir()) == []


def test_uint16_and_int32_data_give_the_same_samples(tmp_path):
    documents = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    narrow = make(write_dataset(tmp_path / "a", documents), tmp_path, cache_path=tmp_path / "c1")
    wide = make(write_dataset(tmp_path / "b", documents, dtype="int32"), tmp_path, cache_path=tmp_path / "c2")
    assert all((narrow[i] == wide[i]).all() for i in range(len(narrow)))
