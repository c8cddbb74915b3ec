"""What a worker does with one unit of input: read, tokenize in batches, write a shard pair per key."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_simple.data.indexed_dataset import DatasetWriter, token_dtype
from megatron_simple.data.inputs import Span
from megatron_simple.data.readers import BadRecord, SpanReader
from megatron_simple.data.tokenizer import load_tokenizer
from megatron_simple.data.tokenizer_base import Tokenizer, replace_surrogates

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True)
class UnitSettings:
    """What every unit of a run shares."""

    folder: Path
    tokenizer: dict[str, str | None]  # keyword arguments of load_tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    prepend_bos: bool
    skip_bad_records: bool


@dataclass(frozen=True)
class Unit:
    """A numbered piece of the input."""

    number: int
    spans: tuple[Span, ...]


@dataclass
class KeyCounts:
    """Totals of one key: documents and tokens written, documents dropped for having no tokens."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0

    def add(self, other: "KeyCounts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.empty += other.empty


@dataclass(frozen=True)
class BadSpot:
    """Where a bad record stands: index of the span in its unit, line in that span (from 1), reason."""

    span: int
    line: int
    reason: str


class BadRecordFound(ValueError):
    """Raised at the first bad record of a unit when bad records are not skipped."""

    def __init__(self, spot: BadSpot) -> None:
        super().__init__(spot.reason)
        self.spot = spot


@dataclass
class UnitResult:
    """What became of one unit. `lines` is the number of lines of each span; with `failure` the rest is unfinished."""

    counts: dict[str, KeyCounts]
    lines: list[int] = field(default_factory=list)
    bytes_read: int = 0
    skipped: int = 0
    replaced_surrogates: int = 0
    failure: BadSpot | None = None


def shard_prefix(folder: Path, number: int, key: str) -> Path:
    """Prefix of the pair that unit `number` writes for `key`."""
    return folder / f"{number:08d}_{key}"


def skipped_path(folder: Path, number: int) -> Path:
    """The file with one JSON object [span, line, reason] a line for each record that unit `number` dropped."""
    return folder / f"{number:08d}.skipped"


def make_unit_handler(settings: UnitSettings) -> Callable[[Unit, Callable[[int], None]], UnitResult]:
    """The function a worker calls for each unit; loads the tokenizer once."""
    tokenizer = load_tokenizer(**settings.tokenizer)

    def handle(unit: Unit, report: Callable[[int], None]) -> UnitResult:
        task = _UnitTask(settings, tokenizer, unit, report)
        try:
            task.run()
        except BadRecordFound as bad:
            task.result.failure = bad.spot
        return task.result

    return handle


class _UnitTask:
    """One unit on its way: the batch that is being filled, and the writers."""

    def __init__(self, settings: UnitSettings, tokenizer: Tokenizer, unit: Unit, report: Callable[[int], None]) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.unit = unit
        self.report = report
        self.result = UnitResult({key: KeyCounts() for key in settings.keys})
        self.batch: list[tuple[str, ...]] = []
        self.characters = 0
        self.writers: dict[str, Any] = {}
        self.reported = 0

    def run(self) -> None:
        folder, number = self.settings.folder, self.unit.number
        dtype = token_dtype(self.tokenizer.vocab_size)
        with ExitStack() as stack:
            skipped = stack.enter_context(skipped_path(folder, number).open("w", encoding="utf-8"))
            for key in self.settings.keys:
                writer = DatasetWriter(shard_prefix(folder, number, key), dtype=dtype)
                self.writers[key] = stack.enter_context(writer)
            finished = 0  # bytes on disk of the spans behind us
            for index, span in enumerate(self.unit.spans):
                reader = SpanReader(span, keys=self.settings.keys)
                for record in reader:
                    if isinstance(record, BadRecord):
                        self._drop(BadSpot(index, record.line, record.reason), skipped)
                    else:
                        self._take(record.texts, disk_bytes=finished + reader.disk_bytes)
                finished += span.size
                self.result.lines.append(reader.lines)
                self.result.bytes_read += reader.bytes_read
            self._flush(disk_bytes=finished)
            for writer in self.writers.values():
                writer.finalize()

    def _drop(self, spot: BadSpot, skipped: Any) -> None:
        if not self.settings.skip_bad_records:
            raise BadRecordFound(spot)
        self.result.skipped += 1
        skipped.write(json.dumps([spot.span, spot.line, spot.reason]) + "\n")

    def _take(self, texts: tuple[str, ...], *, disk_bytes: int) -> None:
        self.batch.append(texts)
        self.characters += sum(map(len, texts))
        if self.characters >= _BATCH_CHARACTERS or len(self.batch) >= _BATCH_DOCUMENTS:
            self._flush(disk_bytes=disk_bytes)

    def _flush(self, *, disk_bytes: int) -> None:
        """Tokenizes and writes the batch, and reports how far the unit is."""
        bos = self.tokenizer.bos if self.settings.prepend_bos else None
        eod = self.tokenizer.eod if self.settings.append_eod else None
        for column, key in enumerate(self.settings.keys):
            cleaned = [replace_surrogates(texts[column]) for texts in self.batch]
            self.result.replaced_surrogates += sum(count for _, count in cleaned)
            tokens, lengths = self.tokenizer.encode_batch([text for text, _ in cleaned])
            kept = lengths[lengths > 0]
            tokens, kept = frame_documents(tokens, kept, bos=bos, eod=eod)
            if len(kept):
                self.writers[key].add_documents(tokens, kept)
            self.result.counts[key].add(KeyCounts(len(kept), len(tokens), len(lengths) - len(kept)))
        self.batch, self.characters = [], 0
        self.report(disk_bytes - self.reported)
        self.reported = disk_bytes


def frame_documents(
    tokens: np.ndarray, lengths: np.ndarray, *, bos: int | None, eod: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` [sum of lengths] with bos in front of and eod behind each document, and the new lengths; None adds
    nothing."""
    extra = (bos is not None) + (eod is not None)
    if not extra or not len(lengths):
        return tokens, lengths
    lengths = lengths + extra
    ends = np.cumsum(lengths)
    starts = ends - lengths
    framed = np.empty(int(ends[-1]), dtype=tokens.dtype)
    is_text = np.ones(len(framed), dtype=bool)
    if bos is not None:
        framed[starts] = bos
        is_text[starts] = False
    if eod is not None:
        framed[ends - 1] = eod
        is_text[ends - 1] = False
    framed[is_text] = tokens
    return framed, lengths
