"""Readers: which records come out of each kind of file, and how bad ones are named."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import zstandard

from megatron_simple.data.inputs import Span
from megatron_simple.data.json_values import is_json_lines, split_values
from megatron_simple.data.readers import BadRecord, Record, SpanReader

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def read(path: Path, keys: tuple[str, ...] = ("text",)) -> list[Record | BadRecord]:
    return list(SpanReader(Span(path, 0, path.stat().st_size), keys=keys))


def texts(records: list[Record | BadRecord]) -> list[str]:
    assert all(isinstance(record, Record) for record in records), records
    return [record.texts[0] for record in records]


class TestLines:
    @pytest.mark.parametrize("suffix", COMPRESS)
    @pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
    def test_what_is_not_bad(self, tmp_path, name, suffix):
        rows = [
            '\ufeff{"text": "bom"}', "", '{"text": "crlf"}\r', "  \t\r", r'{"text": "nul\u0000 \ud83d <|endoftext|>"}',
            '{"n": 1, "text": "\u2028line\u0085ends"}', '{"text": ""}', '{"text": " "}', '{"text": "end"}',
        ]  # fmt: skip
        path = write(tmp_path / (name + suffix), COMPRESS[suffix]("\n".join(rows).encode()))
        reader = SpanReader(Span(path, 0, path.stat().st_size), keys=("text",))
        records = list(reader)
        expected = ["bom", "crlf", "nul\0 \ud83d <|endoftext|>", "\u2028line\u0085ends", "", " ", "end"]
        assert texts(records) == expected
        assert [record.line for record in records] == [1, 3, 5, 6, 7, 8, 9]
        assert reader.lines == 9
        assert reader.bytes_read == len("\n".join(rows).encode())

    def test_bad_records_are_named(self, tmp_path):
        rows = [
            b'{"text": "a"', b'{"content": "x"}', b'{"text": null}', b'{"text": 5}', b'{"text": ["a"]}', b'["text"]',
            b'"text"', b'{"text": "\xff"}', b'{"text": true}', b"[" * 100_000, b'{"text": "good"}', b'{"text": "a\tb"}',
            b'{"text": "x"} {"text": "y"}', b'{"text": "' + "\ud83d".encode("utf-8", "surrogatepass") + b'"}',
        ]  # fmt: skip
        records = read(write(tmp_path / "a.jsonl", b"\n".join(rows)))
        reasons = {record.line: record.reason for record in records if isinstance(record, BadRecord)}
        assert sorted(reasons) == [line for line in range(1, 15) if line != 11]
        assert reasons[1].startswith("malformed JSON: Expecting ',' delimiter at column")
        assert reasons[2] == 'no key "text"'
        assert reasons[3] == 'the value of "text" is null, not a string'
        assert reasons[4] == 'the value of "text" is a number, not a string'
        assert reasons[5] == 'the value of "text" is an array, not a string'
        assert reasons[6] == "not a JSON object but an array"
        assert reasons[8] == "not UTF-8: byte 0xff at column 11"
        assert reasons[9] == 'the value of "text" is true, not a string'
        assert all(reasons[line].startswith("malformed JSON") for line in (10, 12, 13))
        assert reasons[14].startswith("not UTF-8")

    def test_the_asked_key_is_read(self, tmp_path):
        path = write(tmp_path / "a.jsonl", '{"text": "t", "content": "c"}\n{"text": "t"}')
        assert read(path, ("content",)) == [Record(1, ("c",)), BadRecord(2, 'no key "content"')]
        assert read(path, ("content", "text"))[0] == Record(1, ("c", "t"))

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_a_truncated_stream_is_a_bad_record(self, tmp_path, suffix):
        rng = random.Random(0)
        rows = [json.dumps({"text": f"{i} " + "".join(rng.choices("abcdefgh", k=80))}) for i in range(3000)]
        data = COMPRESS[suffix](("\n".join(rows) + "\n").encode())
        records = read(write(tmp_path / f"a.jsonl{suffix}", data[:-200]))
        assert isinstance(records[-1], BadRecord)
        assert "damaged or cut short" in records[-1].reason
        good = texts(records[:-1])
        assert good == [json.loads(row)["text"] for row in rows[: len(good)]]
        assert records[-1].line == len(good) + 1
        assert suffix != ".gz" or len(good) > 2900  # what stands before the cut is kept

    def test_a_damaged_gzip_is_a_bad_record(self, tmp_path):
        data = bytearray(gzip.compress(b'{"text": "abc"}\n' * 50))
        data[-6] ^= 1  # the checksum
        assert "damaged" in read(write(tmp_path / "a.jsonl.gz", bytes(data)))[-1].reason
        assert "damaged" in read(write(tmp_path / "b.jsonl.gz", b'{"text": "plain"}'))[0].reason

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_several_members_and_an_empty_file(self, tmp_path, suffix):
        pack = COMPRESS[suffix]
        data = pack(b'{"text": "a"}\n{"te') + pack(b"") + pack(b'xt": "b"}\n')
        assert texts(read(write(tmp_path / f"a.jsonl{suffix}", data))) == ["a", "b"]
        assert read(write(tmp_path / f"e.jsonl{suffix}", b"")) == []
        assert read(write(tmp_path / f"f.txt{suffix}", pack(b"")))[0] == Record(1, ("",))

    def test_a_long_line_takes_linear_time(self, tmp_path):
        text = "x" * 30_000_000  # quadratic joining of chunks would take minutes
        assert texts(read(write(tmp_path / "a.jsonl", json.dumps({"text": text})))) == [text]


class TestJsonFiles:
    VALUES = ({"text": 'a "quoted" \\ [{,\n'}, {"text": "b", "more": [{"x": "]"}]}, {"text": ""})

    @pytest.mark.parametrize("indent", [None, 2])
    @pytest.mark.parametrize("suffix", COMPRESS)
    def test_arrays(self, tmp_path, indent, suffix):
        data = COMPRESS[suffix](json.dumps(self.VALUES, indent=indent).encode())
        records = read(write(tmp_path / f"a.json{suffix}", data))
        assert texts(records) == [value["text"] for value in self.VALUES]
        assert [record.line for record in records] == ([1, 1, 1] if indent is None else [2, 5, 13])

    def test_objects(self, tmp_path):
        data = "\n".join(json.dumps(value, indent=1) for value in self.VALUES)
        assert texts(read(write(tmp_path / "many.json", data))) == [value["text"] for value in self.VALUES]
        assert texts(read(write(tmp_path / "one.json", '\ufeff{\n"text": "a"\n}'))) == ["a"]
        assert texts(read(write(tmp_path / "line.json", '{"text": "a"}'))) == ["a"]

    def test_bad_values(self, tmp_path):
        records = read(write(tmp_path / "a.json", '[\n{"text": "a"},\n{"text": 1},\n{"text": x},\n{"text": "b"}\n]'))
        assert [type(record) for record in records] == [Record, BadRecord, BadRecord, Record]
        assert [record.line for record in records] == [2, 3, 4, 5]
        cut = read(write(tmp_path / "b.json", '[\n{"text": "a"},\n{"text": "'))
        assert cut[0] == Record(2, ("a",))
        assert cut[1].line == 3
        assert "ends inside" in cut[1].reason
        unclosed = read(write(tmp_path / "c.json", '[\n{"text": "a"},\n'))
        assert "ends inside" in unclosed[1].reason
        assert isinstance(read(write(tmp_path / "d.json", "{"))[0], BadRecord)
        behind = read(write(tmp_path / "e.json", '[{"text": "a"}]\nmore'))
        assert (behind[1].line, behind[1].reason[:9]) == (2, "malformed")

    def test_empty_files_hold_no_record(self, tmp_path):
        for i, data in enumerate((b"", b" \n\n", b"\xef\xbb\xbf", b"[]", b"[\n]\n")):
            assert read(write(tmp_path / f"{i}.json", data)) == []
            assert i > 2 or read(write(tmp_path / f"{i}.jsonl", data)) == []

    def test_random_values_in_random_chunks(self):
        rng = random.Random(1)

        def value(depth: int) -> object:
            kind = rng.randrange(5 if depth < 3 else 3)
            if kind < 2:
                return rng.choice(["a", '"', "\\", "{", "}", "[", ",", "\n", 'é"\\\\']) * rng.randrange(3)
            if kind == 2:
                return rng.choice([None, 5, -1.5, True])
            if kind == 3:
                return {rng.choice(['"k', "\\", "]", "a"]): value(depth + 1) for _ in range(rng.randrange(3))}
            return [value(depth + 1) for _ in range(rng.randrange(3))]

        for _ in range(500):
            values = [{"text": value(0), "n": value(0)} for _ in range(rng.randrange(4))]
            indent = rng.choice([None, 1, 2])
            if rng.random() < 0.5:
                data = json.dumps(values, indent=indent).encode()
            else:
                data = rng.choice(["", "\n", " "]).join(json.dumps(v, indent=indent) for v in values).encode()
            size = rng.choice([1, 2, 3, 7, 1000])
            found = list(split_values(data[i : i + size] for i in range(0, len(data), size)))
            assert [json.loads(text) for _, text, _ in found] == values
            position = 0
            for line, text, complete in found:
                position = data.index(text, position)
                assert (line, complete) == (data.count(b"\n", 0, position) + 1, True)
                position += len(text)

    def test_how_a_file_is_told(self):
        for head, answer in ((b"", None), (b"{", None), (b" {  ", None), (b"{ \n", False), (b"\n[", False),
                             (b'{"', True), (b"\xef\xbb\xbf[", False), (b"x", True), (b"\n\n{}\n", True)):  # fmt: skip
            assert is_json_lines(head) is answer


class TestText:
    @pytest.mark.parametrize("suffix", COMPRESS)
    def test_a_file_is_a_document(self, tmp_path, suffix):
        text = "  two\r\nlines\n\n\tand <|endoftext|>\0 é\n"
        path = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](b"\xef\xbb\xbf" + text.encode()))
        assert read(path) == [Record(1, (text,))]

    def test_bad_files(self, tmp_path):
        record = read(write(tmp_path / "a.txt", b"one\ntwo\nth\xe9ee\n"))
        assert record == [BadRecord(3, "not UTF-8: byte 0xe9 at column 3")]
        assert read(write(tmp_path / "b.txt", b"x"), ("text", "title"))[0].reason.startswith('no key "title"')


class TestParquet:
    @pytest.fixture
    def write_table(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        def make(name: str, **columns: object) -> Path:
            path = tmp_path / name
            pq.write_table(pa.table(columns), path)
            return path

        return make

    @pytest.mark.parametrize("suffix", COMPRESS)
    def test_rows(self, write_table, suffix):
        import pyarrow as pa

        path = write_table("a.parquet", n=[1, 2, 3], text=["a", "é\0", ""])
        path = write(path.with_name(f"b.parquet{suffix}"), COMPRESS[suffix](path.read_bytes()))
        assert read(path) == [Record(1, ("a",)), Record(2, ("é\0",)), Record(3, ("",))]
        coded = write_table("c.parquet", text=pa.array(["x", "y", "x"]).dictionary_encode())
        assert texts(read(coded)) == ["x", "y", "x"]
        large = write_table("d.parquet", text=pa.array(["x"], pa.large_string()), raw=pa.array([b"y"]))
        assert read(large, ("raw", "text")) == [Record(1, ("y", "x"))]

    def test_bad_rows(self, write_table, tmp_path):
        import pyarrow as pa

        path = write_table("a.parquet", text=["a", None, "c"], n=[1, 2, 3], raw=pa.array([b"x", b"\xff", None]))
        assert read(path)[1] == BadRecord(2, 'the value of "text" is null, not a string')
        assert read(path, ("n",))[0] == BadRecord(1, 'the value of "n" is a number, not a string')
        assert read(path, ("raw",))[1] == BadRecord(2, "not UTF-8: byte 0xff at column 1")
        assert [record.line for record in read(path, ("missing",))] == [1, 2, 3]
        assert read(path, ("text", "missing"))[0] == BadRecord(1, 'no key "missing"')
        cut = write(tmp_path / "cut.parquet", path.read_bytes()[:-10])
        assert [record.reason[:27] for record in read(cut)] == ["the parquet file is damaged"]
        assert isinstance(read(write(tmp_path / "cut.parquet.gz", gzip.compress(b"x" * 99)[:-9]))[0], BadRecord)


@pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")
def test_the_odd_collection():
    path = Path(SHARED, "data", "odd.jsonl.gz")
    with gzip.open(path) as file:
        expected = [json.loads(line)["text"] for line in file]
    assert texts(read(path)) == expected
