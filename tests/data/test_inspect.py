import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_simple.data.dataset_summary import documents_as_text, summarise
from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset
from tests.data.dataset_files import write_dataset, write_packed

TOOL = Path(__file__).parents[2] / "tools" / "inspect_dataset.py"
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_last_line_is_the_summary(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    done = inspect(tmp_path / "a.idx", "--documents", 2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert json.loads(lines[-1]) == {
        "prefix": str(tmp_path / "a"),
        "dtype": "uint16",
        "documents": 3,
        "sequences": 3,
        "tokens": 8,
        "smallest_token": 5,
        "largest_token": 12,
        "shortest_sequence": 1,
        "longest_sequence": 4,
        "bin_bytes": 16,
        "idx_bytes": 34 + 12 * 3 + 8 * 4,
    }
    assert lines[-5:-1] == ["--- document 0: 3 tokens", "5 6 7", "--- document 1: 1 tokens", "8"]


def test_a_broken_pair_is_one_sentence_and_a_failure(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:-4])
    done = inspect(tmp_path / "a")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {tmp_path}/a.idx is damaged")
    assert done.stderr.count("\n") == 1
    assert inspect(tmp_path / "nothing").returncode == 1


def test_the_token_range_is_that_of_all_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_simple.data.dataset_summary._TOKENS_AT_A_TIME", 3)
    dataset = write_dataset(tmp_path / "a", [[4, 4, 4], [4, 1, 4], [9, 4]])
    read = []
    summary = summarise(dataset, progress=read.append)
    assert (summary["smallest_token"], summary["largest_token"]) == (1, 9)
    assert read == [3, 3, 2]


def test_an_empty_dataset_has_no_range(tmp_path):
    write_packed(tmp_path / "a", [], dtype="uint16", documents=[0])
    summary = summarise(IndexedDataset(tmp_path / "a"))
    assert (summary["tokens"], summary["smallest_token"], summary["longest_sequence"]) == (0, None, None)


class Letters:
    """Ids 0 to 25 are letters."""

    def decode(self, ids: np.ndarray) -> str:
        if max(ids) > 25:
            raise ValueError("token id 26 is not in the vocabulary")
        return "".join(chr(97 + int(i)) for i in ids)


def test_documents_are_decoded_whole(tmp_path):
    write_packed(tmp_path / "a", [[7, 4], [11, 11, 14], [0], [26]], dtype="uint16", documents=[0, 2, 3, 4])
    dataset = IndexedDataset(tmp_path / "a")
    texts = list(documents_as_text(dataset, 2, tokenizer=Letters()))
    assert texts == ["--- document 0: 5 tokens\nhello", "--- document 1: 1 tokens\na"]
    with pytest.raises(DatasetError, match="document 2 cannot be decoded .*give the tokenizer"):
        list(documents_as_text(dataset, 9, tokenizer=Letters()))


def test_long_documents_are_cut_short_without_a_tokenizer(tmp_path):
    dataset = write_dataset(tmp_path / "a", [range(100)])
    (text,) = documents_as_text(dataset, 5, tokenizer=None)
    assert text.endswith(" 30 31 ...")
