"""A corpus that every Python installation has: its standard library, one document (docstrings and source) per module.

    python examples/standard_library_corpus.py OUT      writes OUT/train.jsonl and OUT/validation.jsonl

Tests, tables of characters and installed packages are left out; every 20th module is held out for validation.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test", "idlelib", "lib2to3",
    "encodings", "pydoc_data", "turtledemo", "ensurepip",
}  # fmt: skip
HELD_OUT = 20


def documents(root: Path) -> list[tuple[str, str]]:
    """(path below `root`, text) of every module, sorted by path; files that are not UTF-8 or empty are left out."""
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            found.append((name.as_posix(), text))
    return found


def write(path: Path, records: list[tuple[str, str]]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for name, text in records:
            file.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    found = documents(Path(sysconfig.get_paths()["stdlib"]))
    held_out = found[HELD_OUT - 1 :: HELD_OUT]
    train = [record for i, record in enumerate(found) if i % HELD_OUT != HELD_OUT - 1]
    if not held_out:
        print(f"error: {len(found)} modules in the standard library: too few for a corpus", file=sys.stderr)
        return 1
    write(out / "train.jsonl", train)
    write(out / "validation.jsonl", held_out)
    size = sum(len(text.encode()) for _, text in found) / 1e6
    print(f"{len(train)} modules for training, {len(held_out)} for validation, {size:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
