import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_simple.data import _native
from megatron_simple.data.indexed_dataset import (
    DatasetError,
    DatasetWriter,
    IndexedDataset,
    token_dtype,
)
from tests.data.dataset_files import CODES, packed_index, pair_bytes, write_dataset, write_packed

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [0, 65535]]


def test_written_bytes_are_the_format(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    tokens, index = pair_bytes(tmp_path / "a")
    assert tokens == struct.pack("<10H", 5, 6, 7, 8, 9, 10, 11, 12, 0, 65535)
    assert index == packed_index([3, 1, 4, 2])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_type_is_written_and_read(tmp_path, dtype):
    limits = np.iinfo(dtype)
    dataset = write_dataset(tmp_path / "a", [[limits.min, 1], [limits.max]], dtype=dtype)
    assert dataset.dtype == dtype
    assert [dataset[i].tolist() for i in range(2)] == [[limits.min, 1], [limits.max]]
    assert pair_bytes(tmp_path / "a")[1] == packed_index([2, 1], dtype=dtype)


def test_tables_of_types_agree():
    assert {name: code for code, name in _native.DTYPE_NAMES.items()} == CODES


@pytest.mark.parametrize("source", ["uint16", "int32", "uint32", "int64", "int16", ">i4"])
def test_tokens_of_every_integer_type_are_taken(tmp_path, source):
    tokens = np.arange(1, 13).astype(source)[::2]  # a view with gaps
    with DatasetWriter(tmp_path / "a", dtype=np.int32) as writer:
        writer.add_documents(tokens, np.array([2, 4], dtype=np.int32))
        writer.finalize()
    assert [document.tolist() for document in map(IndexedDataset(tmp_path / "a").get, range(2))] == [
        [1, 3],
        [5, 7, 9, 11],
    ]


def test_many_calls_cross_the_write_buffer(tmp_path):
    random = np.random.default_rng(0)
    tokens = random.integers(0, 70000, size=1_500_000)
    with DatasetWriter(tmp_path / "a", dtype=np.int32) as writer:
        for part in np.split(tokens, 30):
            writer.add_documents(part, np.array([len(part) - 1, 1]))
        writer.finalize()
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset) == 60
    assert (dataset.tokens == tokens).all()


def test_the_type_follows_the_vocabulary():
    assert [token_dtype(size) for size in (1, 65536, 65537, 128256)] == [np.uint16, np.uint16, np.int32, np.int32]


@pytest.mark.parametrize(
    ("dtype", "token"), [("uint16", 65536), ("uint16", -1), ("int32", 2**31), ("uint8", 256), ("int16", -32769)]
)
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_added(tmp_path, dtype, token):
    with DatasetWriter(tmp_path / "a", dtype=np.dtype(dtype)) as writer:
        writer.add_documents(np.array([1, 2]), np.array([2]))
        with pytest.raises(ValueError, match=f"{token} does not fit {dtype}"):
            writer.add_documents(np.array([3, token]), np.array([2]))
        writer.finalize()
    assert [d.tolist() for d in [IndexedDataset(tmp_path / "a")[0]]] == [[1, 2]]
    assert len(IndexedDataset(tmp_path / "a")) == 1


@pytest.mark.parametrize("lengths", [[3], [1], [2, 0], [3, -1], [2, 1, -1], [1 << 32]])
def test_lengths_that_do_not_fit_the_tokens_are_refused(tmp_path, lengths):
    with DatasetWriter(tmp_path / "a", dtype=np.uint16) as writer, pytest.raises(ValueError, match="document"):
        writer.add_documents(np.array([1, 2]), np.array(lengths))


def test_wrong_kinds_of_input_are_refused(tmp_path):
    with DatasetWriter(tmp_path / "a", dtype=np.uint16) as writer:
        with pytest.raises(ValueError, match="integers, not float64"):
            writer.add_documents(np.array([1.0]), np.array([1]))
        with pytest.raises(ValueError, match="one dimension"):
            writer.add_documents(np.array([[1]]), np.array([1]))
    with pytest.raises(ValueError, match="cannot hold token ids"):
        DatasetWriter(tmp_path / "b", dtype=np.float32)


def test_a_writer_that_is_left_early_leaves_no_files(tmp_path):
    def leave() -> None:
        with DatasetWriter(tmp_path / "a", dtype=np.uint16) as writer:
            writer.add_documents(np.array([1]), np.array([1]))
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert list(tmp_path.iterdir()) == []


def test_nothing_can_be_added_to_a_finished_writer(tmp_path):
    with DatasetWriter(tmp_path / "a", dtype=np.uint16) as writer:
        writer.finalize()
        with pytest.raises(ValueError, match="finished"):
            writer.add_documents(np.array([1]), np.array([1]))
    assert len(IndexedDataset(tmp_path / "a")) == 0


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.bin"):
        DatasetWriter(tmp_path / "nowhere" / "a", dtype=np.uint16)


def test_a_full_disk_is_reported_with_file_and_cause(tmp_path):
    """A limit on the file's size stands in for the disk; the signal that comes with it is ignored by Python."""
    code = (
        "import numpy as np, sys\n"
        "from megatron_simple.data.indexed_dataset import DatasetWriter\n"
        "with DatasetWriter(sys.argv[1], dtype=np.int32) as writer:\n"
        "    writer.add_documents(np.zeros(2_000_000, dtype=np.int32), np.array([2_000_000]))\n"
        "    writer.finalize()\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"File too large: '{tmp_path}/a.bin'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_pointers_pass_2_gib(tmp_path):
    """The pointers of a .bin far above 2^31 bytes, without writing it."""
    sizes = np.full(5, 2**30, dtype=np.int32)
    _native.write_index(str(tmp_path / "a.idx"), CODES["int32"], sizes, np.array([0, 5]))
    index = (tmp_path / "a.idx").read_bytes()
    assert index == packed_index(sizes.tolist(), dtype="int32", documents=[0, 5])
    pointers = np.frombuffer(index, np.int64, 5, 34 + 4 * 5)
    assert pointers.tolist() == [0, 2**32, 2**33, 3 * 2**32, 2**34]


def test_a_large_pair_is_read_past_2_gib(tmp_path):
    """The same through the reader; the .bin file has holes in place of tokens."""
    write_packed(tmp_path / "a", [], dtype="int32", documents=[0])
    (tmp_path / "a.idx").write_bytes(packed_index([2**30, 2**30, 3], dtype="int32"))
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(4 * (2**31 + 3))
        file.seek(4 * 2**31)
        file.write(struct.pack("<3i", 7, 8, 9))
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.num_tokens == 2**31 + 3
    assert dataset[2].tolist() == [7, 8, 9]


def test_parts_of_sequences_and_their_borders(tmp_path):
    dataset = write_dataset(tmp_path / "a", DOCUMENTS)
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (4, 4, 10)
    assert dataset.sizes.tolist() == [3, 1, 4, 2]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert dataset.get(2, 1, 2).tolist() == [10, 11]
    assert dataset.get(2, 1).tolist() == [10, 11, 12]
    for wrong in [(2, 1, 4), (2, -1, 1), (4,), (-1,), (0, 0, -1)]:
        with pytest.raises(IndexError):
            dataset.get(*wrong)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_the_prefix_may_carry_a_suffix(tmp_path, suffix):
    write_dataset(tmp_path / "v1.5_text", DOCUMENTS)
    dataset = IndexedDataset(f"{tmp_path}/v1.5_text{suffix}")
    assert dataset.prefix == tmp_path / "v1.5_text"
    assert dataset[1].tolist() == [8]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write_dataset(tmp_path / "a", DOCUMENTS)
    (tmp_path / f"a.{suffix}").unlink()
    with pytest.raises(DatasetError, match=rf"a\.{suffix}: no such file"):
        IndexedDataset(tmp_path / "a")


def _patched(index: bytes, at: int, data: bytes) -> bytes:
    return index[:at] + data + index[at + len(data) :]


_I64 = struct.Struct("<q").pack
_I32 = struct.Struct("<i").pack
DAMAGES = {
    "magic": (lambda i: b"TNTIDX" + i[6:], r"a\.idx is damaged: expected b'MMIDIDX.*found b'TNTIDX"),
    "short header": (lambda i: i[:20], r"a\.idx is damaged: expected a header of 34 bytes, found 20 bytes"),
    "empty": (lambda i: b"", r"a\.idx is damaged: .*found 0 bytes"),
    "version": (lambda i: _patched(i, 9, _I64(2)), "expected version 1, found version 2"),
    "float type": (lambda i: _patched(i, 17, b"\6"), "found code 6"),
    "unknown type": (lambda i: _patched(i, 17, b"\x63"), "found code 99"),
    "truncated": (lambda i: i[:-1], "expected 122 bytes for 4 sequences and 5 document indices, found 121"),
    "extended": (lambda i: i + b"\0", "found 123 bytes"),
    "huge count": (lambda i: _patched(i, 18, b"\xff" * 8), r"sequences and 5 document indices, found 122 bytes"),
    "negative size": (lambda i: _patched(i, 34 + 4, _I32(-1)), "size -1 of sequence 1"),
    "size too large": (lambda i: _patched(i, 34 + 12, _I32(3)), r"a\.bin is damaged: expected 22 bytes.*found 20"),
    "inner size": (lambda i: _patched(i, 34, _I32(2)), "expected sequence 1 at byte 4, found byte 6"),
    "pointer": (lambda i: _patched(i, 50 + 16, _I64(-8)), "expected sequence 2 at byte 8, found byte -8"),
    "first document": (lambda i: _patched(i, 82, _I64(1)), "document indices from 0 to 4, found 1 to 4"),
    "last document": (lambda i: _patched(i, 114, _I64(3)), "document indices from 0 to 4, found 0 to 3"),
    "falling documents": (lambda i: _patched(i, 98, _I64(4)), "never fall, found 4 before 3"),
    "type of another width": (lambda i: _patched(i, 17, b"\4"), "expected sequence 1 at byte 12, found byte 6"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_of_the_index_is_found_and_named(tmp_path, kind):
    write_dataset(tmp_path / "a", DOCUMENTS)
    damage, message = DAMAGES[kind]
    path = tmp_path / "a.idx"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=message) as caught:
        IndexedDataset(tmp_path / "a")
    assert "build it again with tools/preprocess_data.py" in str(caught.value)


@pytest.mark.parametrize("size", [0, 19, 21])
def test_a_bin_of_another_size_is_found(tmp_path, size):
    write_dataset(tmp_path / "a", DOCUMENTS)
    os.truncate(tmp_path / "a.bin", size)
    with pytest.raises(DatasetError, match=rf"a\.bin is damaged: expected 20 bytes, as a\.idx says, found {size} bytes"):
        IndexedDataset(tmp_path / "a")


def test_long_indices_are_checked_to_the_end(tmp_path, monkeypatch):
    """Pairs longer than one block of the check: good ones pass, and faults behind a block's border are seen."""
    monkeypatch.setattr("megatron_simple.data.indexed_dataset._CHECKED_AT_A_TIME", 3)
    sizes = [3, 1, 4, 1, 5, 9, 2]
    write_packed(tmp_path / "a", [[1] * n for n in sizes], dtype="int32", documents=[0, 2, 2, 3, 7])
    assert IndexedDataset(tmp_path / "a").num_tokens == 25
    good = (tmp_path / "a.idx").read_bytes()
    documents_at = len(good) - 5 * 8
    for at, data in [(34 + 4 * 3, _I32(-1)), (62 + 8 * 3, _I64(33)), (documents_at + 8 * 3, _I64(1))]:
        (tmp_path / "a.idx").write_bytes(_patched(good, at, data))
        with pytest.raises(DatasetError, match="damaged"):
            IndexedDataset(tmp_path / "a")


def test_content_id_follows_the_content_and_not_the_place(tmp_path):
    a = write_dataset(tmp_path / "a", DOCUMENTS)
    b = write_dataset(tmp_path / "b", DOCUMENTS)
    c = write_dataset(tmp_path / "c", DOCUMENTS[::-1])
    assert a.content_id == b.content_id != c.content_id


@pytest.fixture
def genuine() -> Path:
    folder = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
    if not folder:
        pytest.skip("MEGATRON_SIMPLE_TEST_DATA is not set")
    return Path(folder) / "data" / "owt-megatron" / "meg-gpt2-openwebtext_text_document"


def test_megatrons_own_dataset_is_read_and_written_again(tmp_path, genuine):
    dataset = IndexedDataset(genuine)
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (1000, 1000, 1361845)
    assert all(dataset[i][-1] == 4999 for i in range(1000))
    write_dataset(tmp_path / "a", [dataset[i] for i in range(1000)])
    assert pair_bytes(tmp_path / "a") == pair_bytes(genuine)
