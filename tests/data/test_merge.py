import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset, join_datasets
from tests.data.dataset_files import pair_bytes, write_dataset, write_packed

TOOL = Path(__file__).parents[2] / "tools" / "merge_datasets.py"
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [0, 65535]]


def test_joining_equals_one_run(tmp_path):
    write_dataset(tmp_path / "all", DOCUMENTS)
    write_dataset(tmp_path / "1", DOCUMENTS[:2])
    write_dataset(tmp_path / "2", DOCUMENTS[2:3])
    write_dataset(tmp_path / "3", DOCUMENTS[3:])
    copied = []
    join_datasets([tmp_path / n for n in "123"], tmp_path / "joined", progress=copied.append)
    assert pair_bytes(tmp_path / "joined") == pair_bytes(tmp_path / "all")
    assert sum(copied) == 20
    assert len(list(tmp_path.iterdir())) == 2 * 5


def test_joining_moves_the_documents_of_several_sequences(tmp_path):
    write_packed(tmp_path / "1", [[1, 2], [3], [4]], dtype="uint16", documents=[0, 2, 3])
    write_packed(tmp_path / "2", [[5], [6, 7]], dtype="uint16", documents=[0, 2])
    write_packed(tmp_path / "empty", [], dtype="uint16", documents=[0])
    join_datasets([tmp_path / "1", tmp_path / "empty", tmp_path / "2"], tmp_path / "joined")
    joined = IndexedDataset(tmp_path / "joined")
    assert joined.document_indices.tolist() == [0, 2, 3, 5]
    assert [sequence.tolist() for sequence in map(joined.get, range(5))] == [[1, 2], [3], [4], [5], [6, 7]]


def test_joining_without_copy_file_range(tmp_path, monkeypatch):
    """The copy goes on from where the kernel's one gave up."""
    write_dataset(tmp_path / "1", DOCUMENTS[:2])
    write_dataset(tmp_path / "2", DOCUMENTS[2:])
    write_dataset(tmp_path / "all", DOCUMENTS)
    real = os.copy_file_range

    def gives_up(source: int, target: int, count: int) -> int:
        if os.lseek(source, 0, os.SEEK_CUR) > 0:
            raise OSError(18, "Invalid cross-device link")
        return real(source, target, min(count, 3))

    monkeypatch.setattr(os, "copy_file_range", gives_up)
    join_datasets([tmp_path / "1", tmp_path / "2"], tmp_path / "joined")
    assert pair_bytes(tmp_path / "joined") == pair_bytes(tmp_path / "all")


def test_joining_refuses_what_does_not_fit(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    write_dataset(tmp_path / "b", [[70000]], dtype="int32")
    with pytest.raises(DatasetError, match="a holds uint16 and .*b int32"):
        join_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(DatasetError, match="input and output at once"):
        join_datasets([tmp_path / "a", tmp_path / "a"], tmp_path / "x" / ".." / "a.idx")
    with pytest.raises(DatasetError, match="at least one prefix"):
        join_datasets([], tmp_path / "c")
    with pytest.raises(FileNotFoundError):
        join_datasets([tmp_path / "a"], tmp_path / "nowhere" / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def merge(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_merging_equals_one_run_and_replaces_the_output(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS[:2])
    write_dataset(tmp_path / "b", DOCUMENTS[2:])
    write_dataset(tmp_path / "all", DOCUMENTS)
    write_dataset(tmp_path / "out", [[1]])
    done = merge("--input-prefix", tmp_path / "a", f"{tmp_path}/b.bin", "--output-prefix", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert pair_bytes(tmp_path / "out") == pair_bytes(tmp_path / "all")
    assert done.stdout.endswith(": 4 documents, 10 tokens, uint16\n")


def test_a_broken_input_is_one_sentence_and_leaves_the_old_output(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    write_dataset(tmp_path / "b", DOCUMENTS)
    write_dataset(tmp_path / "out", [[1]])
    before = pair_bytes(tmp_path / "out")
    (tmp_path / "b.bin").write_bytes(b"")
    done = merge("--input-prefix", tmp_path / "a", tmp_path / "b", "--output-prefix", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/b.bin is damaged: expected 20 bytes")
    assert done.stderr.count("\n") == 1
    assert pair_bytes(tmp_path / "out") == before
    assert len(list(tmp_path.iterdir())) == 6


def test_a_missing_folder_is_one_sentence(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    done = merge("--input-prefix", tmp_path / "a", "--output-prefix", tmp_path / "nowhere" / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
