"""Preprocessing: the same bytes for every number of workers, the right bytes, and clean failure."""

import gzip
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_simple.data.preprocess import PreprocessSettings, preprocess
from megatron_simple.data.preprocess_unit import frame_documents
from megatron_simple.data.tokenizer import load_tokenizer
from tests.data.tiny_tokenizers import write_gpt2, write_ranks

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")


def pair_bytes(documents: list[list[int]], dtype: str) -> tuple[bytes, bytes]:
    """.bin and .idx of `documents` by the format's definition, written out here a second time."""
    sizes = [len(document) for document in documents]
    item = np.dtype(dtype).itemsize
    pointers = [sum(sizes[:i]) * item for i in range(len(sizes))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {"uint16": 8, "int32": 4}[dtype], len(sizes), len(sizes) + 1)
    index = np.array(sizes, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    return np.concatenate([np.array(d, dtype) for d in documents]).tobytes(), header + index


def outputs(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_lines(path: Path, rows: list[Any]) -> Path:
    """A row that is not bytes is written as JSON; .gz by the name."""
    data = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return write_gpt2(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "P"


def test_equal_bytes_for_every_number_of_workers_and_cut(tmp_path, flags, out):
    rng = random.Random(0)
    words = ["hello", " world", " ", "\n", "é", "<|endoftext|>", "  x", "\ud83d", "\0", ""]
    rows = [{"text": "".join(rng.choices(words, k=rng.randrange(6)))} for _ in range(300)]
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", rows[:120])
    write_lines(folder / "b.jsonl.gz", rows[120:200])
    write_lines(folder / "c.jsonl", rows[200:299])
    (folder / "d.txt").write_text(rows[299]["text"] + "the end", encoding="utf-8", errors="replace")
    tokenizer = load_tokenizer(**flags)
    documents = [tokenizer.encode(row["text"]).tolist() for row in rows[:299]]
    documents.append(tokenizer.encode((folder / "d.txt").read_text(encoding="utf-8")).tolist())
    expected = pair_bytes([[*d, tokenizer.eod] for d in documents if d], "uint16")
    for workers, unit_bytes in ((1, None), (2, 900), (3, 100)):
        settings = PreprocessSettings([folder], out, flags, append_eod=True, workers=workers, unit_bytes=unit_bytes)
        summary = preprocess(settings)
        assert outputs(out) == expected
        assert summary["documents"] == sum(map(bool, documents))
        assert summary["empty"] == documents.count([]) > 0
        assert summary["tokens"] == len(expected[0]) // 2
        assert summary["replaced_surrogates"] == sum(row["text"].count("\ud83d") for row in rows[:299]) > 0
        assert summary["bytes_read"] == sum(
            len(gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()) for p in folder.iterdir()
        )
        assert (summary["skipped"], summary["eod"]) == (0, tokenizer.eod)
        assert names_in(out.parent) == ["P_text_document.bin", "P_text_document.idx"]


def test_several_keys_bos_and_int32(tmp_path, out):
    extra = tuple(f"{i:05d}".encode() for i in range(66_000))
    ranks = write_ranks(tmp_path / "ranks", extra)
    flags = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(ranks), "tiktoken_pattern": "gpt2"}
    tokenizer = load_tokenizer(**flags)
    settings = PreprocessSettings(
        [write_lines(tmp_path / "a.jsonl", [{"text": "a65999", "title": ""}, {"text": "", "title": "65998"}])],
        out, flags, json_keys=["title", "text"], append_eod=True,
    )  # fmt: skip
    summary = preprocess(settings)
    eod = tokenizer.eod
    assert outputs(out, "text") == pair_bytes([[*tokenizer.encode("a65999"), eod]], "int32")
    assert outputs(out, "title") == pair_bytes([[256 + 65_998, eod]], "int32")
    each = {"documents": 1, "empty": 1}
    assert {key: summary[key] for key in each} == each
    assert summary["by_key"]["title"] == each | {"tokens": 2}
    assert summary["tokens"] == 2
    with pytest.raises(ValueError, match="--prepend-bos: this TikTokenizer has no"):
        preprocess(PreprocessSettings(settings.inputs, out, flags, prepend_bos=True))


def test_a_missing_marker_is_refused_at_the_start(tmp_path, out, flags):
    vocabulary = Path(flags["vocab_file"])
    vocabulary.write_text(vocabulary.read_text(encoding="utf-8").replace("<|endoftext|>", "<|x|>"), encoding="utf-8")
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="--append-eod: this GPT2BPETokenizer has no end-of-document token"):
        preprocess(PreprocessSettings([path], out, flags, append_eod=True))
    assert preprocess(PreprocessSettings([path], out, flags))["eod"] is None
    assert outputs(out) == pair_bytes([load_tokenizer(**flags).encode("a").tolist()], "uint16")


BAD_ROWS = {7: b'{"text": "a', 20: {"content": "x"}, 21: {"text": None}, 40: b'{"text": "\xff"}'}


class TestBadRecords:
    @pytest.fixture
    def files(self, tmp_path):
        rows: list[Any] = [{"text": f"number {i}"} for i in range(1, 51)]
        for line, row in BAD_ROWS.items():
            rows[line - 1] = row
        rows[2] = b""
        first = write_lines(tmp_path / "first.jsonl", [{"text": "fine"}] * 30)
        return [first, write_lines(tmp_path / "bad.jsonl", rows), write_lines(tmp_path / "later.jsonl.gz", [b"{"])]

    @pytest.mark.parametrize(("workers", "unit_bytes"), [(1, None), (2, 60), (3, 150)])
    def test_the_first_in_input_order_is_named(self, out, flags, files, workers, unit_bytes):
        Path(f"{out}_text_document.bin").write_bytes(b"old")
        settings = PreprocessSettings(files, out, flags, workers=workers, unit_bytes=unit_bytes)
        with pytest.raises(ValueError, match=r"bad.jsonl:7: malformed JSON: .* \(--on-error skip"):
            preprocess(settings)
        assert names_in(out.parent) == ["P_text_document.bin"]
        assert Path(f"{out}_text_document.bin").read_bytes() == b"old"

    @pytest.mark.parametrize(("workers", "unit_bytes"), [(1, None), (2, 60), (3, 150)])
    def test_skipping_lists_them_in_order(self, out, flags, files, workers, unit_bytes, capfd):
        settings = PreprocessSettings(files, out, flags, workers=workers, unit_bytes=unit_bytes, on_error="skip")
        summary = preprocess(settings)
        expected = [(str(files[1]), line) for line in BAD_ROWS] + [(str(files[2]), 1)]
        with Path(f"{out}.skipped.jsonl").open() as file:
            listed = [json.loads(line) for line in file]
        assert [(row["path"], row["line"]) for row in listed] == expected
        assert listed[1]["reason"] == 'no key "text"'
        printed = capfd.readouterr().err.splitlines()
        assert printed[: len(listed)] == ["{path}:{line}: {reason}".format(**row) for row in listed]
        tokenizer = load_tokenizer(**flags)
        kept = ["fine"] * 30 + [f"number {i}" for i in range(1, 51) if i not in BAD_ROWS and i != 3]
        assert outputs(out) == pair_bytes([tokenizer.encode(text).tolist() for text in kept], "uint16")
        assert (summary["documents"], summary["skipped"], summary["empty"]) == (len(kept), 5, 0)

    def test_a_clean_run_removes_an_older_list(self, out, flags, files):
        Path(f"{out}.skipped.jsonl").write_text("old")
        preprocess(PreprocessSettings(files[:1], out, flags))
        assert names_in(out.parent) == ["P_text_document.bin", "P_text_document.idx"]

    def test_nothing_but_empty_documents(self, tmp_path, out, flags, caplog):
        path = write_lines(tmp_path / "a.jsonl", [{"text": ""}, b""])
        summary = preprocess(PreprocessSettings([path], out, flags, append_eod=True))
        assert (summary["documents"], summary["tokens"], summary["empty"]) == (0, 0, 1)
        assert "no document" in caplog.text
        assert outputs(out)[0] == b""


class TestFolderOfUnfinishedWork:
    def test_leftovers_are_removed_and_strangers_are_not(self, tmp_path, out, flags):
        path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
        partial = Path(f"{out}.partial")
        partial.mkdir()
        (partial / "precious").write_text("x")
        with pytest.raises(ValueError, match="is not ours"):
            preprocess(PreprocessSettings([path], out, flags))
        assert (partial / "precious").exists()
        (partial / "lock").touch()  # now it looks like what a dead run left
        preprocess(PreprocessSettings([path], out, flags))
        assert not partial.exists()

    def test_two_runs_at_once(self, tmp_path, out, flags):
        import fcntl

        path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
        partial = Path(f"{out}.partial")
        partial.mkdir()
        with (partial / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(ValueError, match="another run is writing"):
                preprocess(PreprocessSettings([path], out, flags))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"json_keys": []}, "--json-keys"),
        ({"json_keys": ["a", "a"]}, "--json-keys"),
        ({"json_keys": ["a/b"]}, "--json-keys"),
        ({"on_error": "ignore"}, "--on-error ignore"),
        ({"output_prefix": "out/"}, "--output-prefix out/"),
        ({"inputs": ["nothing/*.jsonl"]}, r"--input nothing/\*.jsonl"),
    ],
)
def test_settings_that_cannot_be(tmp_path, flags, change, message):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    settings = {"inputs": [path], "output_prefix": tmp_path / "P", "tokenizer": flags}
    with pytest.raises(ValueError, match=message):
        preprocess(PreprocessSettings(**settings | change))


def test_framing():
    tokens, lengths = np.arange(5, dtype=np.int32), np.array([2, 3])
    framed = {
        (None, None): [0, 1, 2, 3, 4],
        (None, 9): [0, 1, 9, 2, 3, 4, 9],
        (8, None): [8, 0, 1, 8, 2, 3, 4],
        (8, 9): [8, 0, 1, 9, 8, 2, 3, 4, 9],
    }
    for (bos, eod), expected in framed.items():
        result, new_lengths = frame_documents(tokens, lengths, bos=bos, eod=eod)
        assert result.tolist() == expected
        assert new_lengths.tolist() == (lengths + (bos is not None) + (eod is not None)).tolist()


@pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_genuine_megatron_dataset_is_reproduced(out, workers):
    folder = Path(SHARED, "data", "owt-megatron")
    flags = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(folder / "gpt2-tiny-vocab.json"),
        "merge_file": str(folder / "gpt2-tiny-merges.txt"),
    }
    settings = PreprocessSettings([folder / "documents.jsonl"], out, flags, append_eod=True, workers=workers)
    assert preprocess(settings)["eod"] == 4999
    genuine = tuple((folder / f"meg-gpt2-openwebtext_text_document{s}").read_bytes() for s in (".bin", ".idx"))
    assert outputs(out) == genuine
