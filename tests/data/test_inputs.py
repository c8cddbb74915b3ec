"""Inputs: which files are found, in which order, and how they are cut into units."""

import gzip
from pathlib import Path

import pytest

from megatron_simple.data.inputs import find_inputs, plan_units


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


class TestInputs:
    def test_files_folders_and_globs_in_order(self, tmp_path):
        names = [
            "b.jsonl",
            "a.txt",
            "sub/c.jsonl.gz",
            "sub/deep/d.parquet",
            "z/e.json.zst",
            ".hidden.jsonl",
            "sub/README.md",
        ]
        files = {name: write(tmp_path / name, "") for name in names}
        found = find_inputs([tmp_path / "z" / "e.json.zst", tmp_path / "sub", tmp_path / "*.*"])
        expected = ["z/e.json.zst", "sub/c.jsonl.gz", "sub/deep/d.parquet", "a.txt", "b.jsonl"]
        assert found == [files[name] for name in expected]
        assert find_inputs([tmp_path / "**" / "*.jsonl.gz"]) == [files["sub/c.jsonl.gz"]]

    def test_a_name_with_glob_characters_is_taken_as_it_is(self, tmp_path):
        path = write(tmp_path / "x[1].jsonl", "")
        write(tmp_path / "x1.jsonl", "")
        assert find_inputs([path]) == [path]

    @pytest.mark.parametrize("pattern", ["data/*.jsonl", "missing.jsonl", "missing/"])
    def test_what_matches_nothing_is_repeated(self, tmp_path, pattern):
        with pytest.raises(ValueError, match="no file, folder or glob match") as caught:
            find_inputs([tmp_path / pattern])
        assert str(tmp_path / pattern) in str(caught.value)

    def test_a_folder_without_input_files(self, tmp_path, caplog):
        write(tmp_path / "README.md", "x")
        with pytest.raises(ValueError, match="no input file in it"):
            find_inputs([tmp_path])
        assert "README.md" in caplog.text

    @pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "a.jsonl.bz2", "a.jsonl.gz.gz"])
    def test_unknown_suffix(self, tmp_path, name):
        with pytest.raises(ValueError, match=r"unknown suffix; known are \.jsonl") as caught:
            find_inputs([write(tmp_path / name, "")])
        assert name in str(caught.value)

    def test_a_file_named_twice_is_said(self, tmp_path, caplog):
        path = write(tmp_path / "a.txt", "x")
        assert find_inputs([path, tmp_path]) == [path, path]
        assert "more than once" in caplog.text

    @pytest.mark.parametrize("unit_bytes", [1, 5, 6, 7, 11, 40, 10_000])
    def test_units_cover_every_line_once(self, tmp_path, unit_bytes):
        lines = [b"%d" % i * (i % 7) for i in range(30)]
        plain = write(tmp_path / "a.jsonl", b"\n".join(lines))  # no newline at the end
        packed = write(tmp_path / "b.jsonl.gz", gzip.compress(b"x"))
        json_lines = write(tmp_path / "c.json", b'{"a": 1}\n' * 9)
        array = write(tmp_path / "d.json", b"[\n" + b"1,\n" * 90 + b"1]")
        empty = write(tmp_path / "e.jsonl", b"")
        paths = [plain, packed, json_lines, array, empty]
        spans = [span for unit in plan_units(paths, unit_bytes=unit_bytes) for span in unit]
        assert list(dict.fromkeys(span.path for span in spans)) == paths
        for path in paths:
            data, own = path.read_bytes(), [span for span in spans if span.path == path]
            assert b"".join(data[span.start : span.end] for span in own) == data
            if path in (packed, array, empty):
                assert len(own) == 1
            assert all(data[span.start - 1 : span.start] == b"\n" for span in own[1:])
        if unit_bytes == 5:
            assert len([span for span in spans if span.path == plain]) > 10

    def test_small_files_share_a_unit(self, tmp_path):
        paths = [write(tmp_path / f"{i}.txt", "12345") for i in range(10)]
        assert [len(unit) for unit in plan_units(paths, unit_bytes=20)] == [4, 4, 2]
