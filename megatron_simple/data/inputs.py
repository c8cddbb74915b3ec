"""Which files --input names, and how they are cut into pieces of work."""

import glob
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_simple.data.json_values import is_json_lines

logger = logging.getLogger(__name__)

FORMATS = (".jsonl", ".json", ".txt", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_KNOWN = "known are " + " ".join(FORMATS) + ", each plain or with .gz or .zst"


@dataclass(frozen=True)
class Span:
    """The bytes [start, end) of one input file, whole lines; a compressed or indivisible file is one span.

    `size` is how many bytes of the file on disk it stands for.
    """

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def file_format(path: Path) -> tuple[str, str]:
    """(format, compression) by the suffixes, such as (".jsonl", ".gz") or (".txt", ""); ValueError if unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ValueError(f"--input {path}: unknown suffix; {_KNOWN}")
    return suffixes[-1], compression


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """The files behind files, folders and globs: in the order given, each folder and glob sorted by path.

    A folder is walked; hidden files and files with an unknown suffix in it are passed over with a warning. ValueError
    for a pattern that finds nothing and for a named file with an unknown suffix.
    """
    found: list[Path] = []
    for pattern in patterns:
        named = [str(pattern)] if os.path.lexists(pattern) else sorted(glob.glob(str(pattern), recursive=True))
        if not named:
            raise ValueError(f"--input {pattern}: no file, folder or glob match of that name")
        files: list[Path] = []
        for path in map(Path, named):
            if path.is_dir():
                files += _walk(path)
            else:
                file_format(path)
                files.append(path)
        if not files:
            raise ValueError(f"--input {pattern}: no input file in it; {_KNOWN}")
        found += files
    repeated = [path for path, count in Counter(path.resolve() for path in found).items() if count > 1]
    if repeated:
        logger.warning("%d input files are named more than once and will be read as often: %s", len(repeated), repeated[0])
    return found


def _walk(folder: Path) -> list[Path]:
    """The input files under `folder`, sorted by path."""
    files, unknown = [], []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.startswith("."):
                continue
            path = Path(parent, name)
            try:
                file_format(path)
                files.append(path)
            except ValueError:
                unknown.append(path)
    if unknown:
        logger.warning("%s: %d files passed over for their suffix, such as %s", folder, len(unknown), min(unknown))
    return sorted(files)


def plan_units(paths: Sequence[Path], *, unit_bytes: int) -> list[tuple[Span, ...]]:
    """Pieces of work in input order, each about `unit_bytes` on disk: plain files of JSON lines are cut at line ends,
    small files go together, and a file that cannot be cut (compressed, a JSON array, .txt, .parquet) stays whole."""
    units: list[tuple[Span, ...]] = []
    unit: list[Span] = []
    for path in paths:
        for span in _spans(path, unit_bytes):
            if unit and sum(s.size for s in unit) + span.size > unit_bytes:
                units.append(tuple(unit))
                unit = []
            unit.append(span)
    if unit:
        units.append(tuple(unit))
    return units


def _spans(path: Path, unit_bytes: int) -> Iterator[Span]:
    """The spans of one file, in order; their union is the file."""
    size = path.stat().st_size
    kind = file_format(path)
    with path.open("rb") as file:
        by_line = kind == (".jsonl", "") or (kind == (".json", "") and is_json_lines(file.read(1 << 16)))
        if not by_line or size <= unit_bytes:
            yield Span(path, 0, size)
            return
        start = 0
        while start < size:
            file.seek(min(start + unit_bytes, size) - 1)  # a line that ends right at the cut stays before it
            file.readline()
            end = min(file.tell(), size)
            yield Span(path, start, end)
            start = end
