"""Raw text to .bin/.idx pairs: the input is cut into units, workers turn units into shards, the parent joins them.

    P.partial/            everything unfinished; removed at the end, or at the start of the next run
    P_<key>_document.bin/.idx, P.skipped.jsonl
                          put in place by renaming when all of them are complete; older ones are replaced then

The order of documents is that of the input, so the output is the same, byte for byte, for any number of workers and
any cut into units.
"""

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_simple.data.indexed_dataset import join_datasets, token_dtype
from megatron_simple.data.inputs import find_inputs, plan_units
from megatron_simple.data.preprocess_unit import (
    BadSpot,
    KeyCounts,
    Unit,
    UnitResult,
    UnitSettings,
    make_unit_handler,
    shard_prefix,
    skipped_path,
)
from megatron_simple.data.progress import Progress
from megatron_simple.data.tokenizer import load_tokenizer
from megatron_simple.data.tokenizer_base import Tokenizer
from megatron_simple.data.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

_LEAST_UNIT_BYTES, _MOST_UNIT_BYTES = 1 << 20, 1 << 28
_UNITS_PER_WORKER = 4


@dataclass(frozen=True)
class PreprocessSettings:
    """One run. `tokenizer` holds the keyword arguments of load_tokenizer; `unit_bytes` None chooses by input size."""

    inputs: Sequence[str | Path]
    output_prefix: str | Path
    tokenizer: dict[str, str | None]
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    prepend_bos: bool = False
    workers: int = 1
    on_error: str = "fail"
    unit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1 is needed")
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"--on-error {self.on_error}: choose fail or skip")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError("--json-keys needs one key or several different ones")
        if any("/" in key or not key for key in self.json_keys):
            raise ValueError('--json-keys: a key becomes part of a file name and can neither be empty nor hold "/"')
        if not Path(self.output_prefix).name or str(self.output_prefix).endswith("/"):
            raise ValueError(f"--output-prefix {self.output_prefix} ends in a folder; add the beginning of a file name")


def preprocess(settings: PreprocessSettings) -> dict[str, Any]:
    """Writes the pairs and returns the summary (the JSON line of tools/preprocess_data.py).

    ValueError, naming file, line and reason, for the first bad record in input order (on_error "fail") and for
    settings or files that cannot be used; WorkerError when a worker dies. Nothing then has a final name.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(**settings.tokenizer)
    check_markers(tokenizer, append_eod=settings.append_eod, prepend_bos=settings.prepend_bos)
    skipped_name = Path(f"{settings.output_prefix}.skipped.jsonl")
    paths = [path for path in find_inputs(settings.inputs) if path != skipped_name]
    total = sum(path.stat().st_size for path in paths)
    unit_bytes = settings.unit_bytes or _unit_bytes(total, settings.workers)
    units = [Unit(i, spans) for i, spans in enumerate(plan_units(paths, unit_bytes=unit_bytes))]
    keys = tuple(settings.json_keys)
    with _stopped_by_sigterm(), _partial_folder(Path(f"{settings.output_prefix}.partial")) as folder:
        unit_settings = UnitSettings(
            folder=folder,
            tokenizer=settings.tokenizer,
            keys=keys,
            append_eod=settings.append_eod,
            prepend_bos=settings.prepend_bos,
            skip_bad_records=settings.on_error == "skip",
        )
        with (folder / "skipped.jsonl").open("w", encoding="utf-8") as skipped:
            totals = _Totals(folder, keys, skipped)
            _run_units(units, unit_settings, workers=settings.workers, total_bytes=total, totals=totals)
        outputs = {key: Path(f"{settings.output_prefix}_{key}_document") for key in keys}
        _join_shards(folder, len(units), outputs)
        _put_in_place(folder, outputs, skipped_name if settings.on_error == "skip" else None)
        if settings.on_error == "fail":
            skipped_name.unlink(missing_ok=True)  # of an older run: it would speak of records that are now here
    summary = totals.summary(seconds=time.monotonic() - started, eod=tokenizer.eod)
    _report(summary, outputs, tokenizer, settings)
    return summary


def check_markers(tokenizer: Tokenizer, *, append_eod: bool, prepend_bos: bool) -> None:
    """ValueError when a marker is asked for that the tokenizer does not have."""
    if append_eod and tokenizer.eod is None:
        raise ValueError(
            f"--append-eod: this {tokenizer.name} has no end-of-document token; leave the flag out or use a tokenizer "
            "that has one"
        )
    if prepend_bos and tokenizer.bos is None:
        raise ValueError(
            f"--prepend-bos: this {tokenizer.name} has no beginning-of-document token; leave the flag out or use a "
            "tokenizer that has one"
        )


def _unit_bytes(total: int, workers: int) -> int:
    """Small enough for every worker to have several units, large enough for few shards."""
    return min(max(total // (workers * _UNITS_PER_WORKER), _LEAST_UNIT_BYTES), _MOST_UNIT_BYTES)


def _run_units(units: list[Unit], unit_settings: UnitSettings, *, workers: int, total_bytes: int, totals: "_Totals") -> None:
    count = min(workers, len(units))
    with WorkerPool(count, make_unit_handler, unit_settings) as pool, Progress("tokenize", total=total_bytes) as bar:
        results = pool.run(
            units,
            is_last=lambda result: result.failure is not None,
            on_progress=bar.add,
            describe=lambda unit: str(unit.spans[0].path),
        )
        for unit, result in zip(units, results, strict=False):
            totals.add(unit, result)


class _Totals:
    """Sums of the units' results, taken in input order; knows how many lines of the current file lie behind."""

    def __init__(self, folder: Path, keys: tuple[str, ...], skipped: IO[str]) -> None:
        self.folder = folder
        self.counts = {key: KeyCounts() for key in keys}
        self.skipped = self.bytes_read = self.replaced_surrogates = 0
        self._lines_before = 0
        self._skipped_file = skipped

    def add(self, unit: Unit, result: UnitResult) -> None:
        """ValueError for the unit's failure, with the line counted from the start of its file."""
        offsets = []
        for index, span in enumerate(unit.spans):
            if span.start == 0:
                self._lines_before = 0
            offsets.append(self._lines_before)
            if index < len(result.lines):
                self._lines_before += result.lines[index]
        if result.failure is not None:
            path, line = _place(unit, result.failure, offsets)
            raise ValueError(f"{path}:{line}: {result.failure.reason} (--on-error skip drops and lists such records)")
        self._report_skipped(unit, offsets)
        for key, counts in result.counts.items():
            self.counts[key].add(counts)
        self.skipped += result.skipped
        self.bytes_read += result.bytes_read
        self.replaced_surrogates += result.replaced_surrogates

    def _report_skipped(self, unit: Unit, offsets: list[int]) -> None:
        source = skipped_path(self.folder, unit.number)
        with source.open(encoding="utf-8") as file:
            for row in file:
                spot = BadSpot(*json.loads(row))
                path, line = _place(unit, spot, offsets)
                print(f"{path}:{line}: {spot.reason}", file=sys.stderr)
                self._skipped_file.write(json.dumps({"path": path, "line": line, "reason": spot.reason}) + "\n")
        source.unlink()

    def summary(self, *, seconds: float, eod: int | None) -> dict[str, Any]:
        by_key = {key: vars(counts).copy() for key, counts in self.counts.items()}
        first = next(iter(by_key.values()))
        summary = {
            "documents": first["documents"],
            "tokens": first["tokens"],
            "skipped": self.skipped,
            "empty": first["empty"],
            "bytes_read": self.bytes_read,
            "seconds": round(seconds, 3),
            "replaced_surrogates": self.replaced_surrogates,
            "eod": eod,
        }
        return summary | ({"by_key": by_key} if len(by_key) > 1 else {})


def _place(unit: Unit, spot: BadSpot, offsets: list[int]) -> tuple[str, int]:
    """Path and line of a spot, the line counted from the start of the file."""
    return str(unit.spans[spot.span].path), offsets[spot.span] + spot.line


def _join_shards(folder: Path, units: int, outputs: dict[str, Path]) -> None:
    for key, output in outputs.items():
        shards = [shard_prefix(folder, number, key) for number in range(units)]
        join_datasets(shards, folder / output.name)
        for shard in shards:  # now, so that several keys do not need the space twice
            for suffix in (".bin", ".idx"):
                Path(f"{shard}{suffix}").unlink()


def _put_in_place(folder: Path, outputs: dict[str, Path], skipped_name: Path | None) -> None:
    """Renames the complete files. An older .idx goes first: a new .bin never stands beside it under one name."""
    for output in outputs.values():
        Path(f"{output}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(folder / f"{output.name}{suffix}", f"{output}{suffix}")
    if skipped_name is not None:
        os.replace(folder / "skipped.jsonl", skipped_name)


def _report(summary: dict[str, Any], outputs: dict[str, Path], tokenizer: Tokenizer, settings: PreprocessSettings) -> None:
    marker = f"eod {tokenizer.eod} appended" if settings.append_eod else f"eod {tokenizer.eod} not appended"
    print(
        f"wrote {', '.join(f'{output}.bin/.idx' for output in outputs.values())}: "
        f"{summary['documents']} documents, {summary['tokens']} tokens of {token_dtype(tokenizer.vocab_size)}, "
        f"{marker}; "
        f"{summary['skipped']} records skipped, {summary['empty']} documents empty, "
        f"{summary['replaced_surrogates']} lone surrogates replaced, {summary['seconds']:.1f} s",
        file=sys.stderr,
    )
    if not summary["documents"]:
        logger.warning("no document with tokens was found: the output holds no documents")


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """An empty folder for unfinished work, held by a lock and removed at the end; what a dead run left is removed."""
    lock_path = folder / "lock"
    if folder.exists() and not lock_path.is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is not ours; move it away or choose another --output-prefix")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {folder}; wait for it or choose another --output-prefix") from None
        for leftover in folder.iterdir():
            if leftover != lock_path:
                leftover.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that workers are ended and unfinished files removed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
