"""Documents out of .jsonl, .json, .txt and .parquet files, plain or compressed, in memory that does not grow.

    format     a record is                                                   its line number
    .jsonl     a line                                                        the line, from 1
    .json      a line; or, where the first line is "{" alone or begins       the line on which it starts
               with "[", a value of the array or of the objects in the file
    .txt       the whole file, under the key "text"                          1
    .parquet   a row                                                         the row, from 1

Lines end with "\\n" only, a "\\r" before it belongs to the ending, blank lines are no records, a byte order mark at
the start of a file is dropped. Line numbers count in the decompressed file.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron_simple.data.byte_streams import DAMAGED, read_chunks, split_lines
from megatron_simple.data.inputs import Span, file_format
from megatron_simple.data.json_values import is_json_lines, split_values

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """The texts of one document in the order of the keys asked for."""

    line: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, and why."""

    line: int
    reason: str


class SpanReader:
    """Iterates over the records of one span. `lines` and `bytes_read` (decompressed) are right once it is exhausted;
    line numbers count from 1 at the start of the span."""

    def __init__(self, span: Span, *, keys: Sequence[str]) -> None:
        self.span = span
        self.keys = tuple(keys)
        self.lines = 0
        self.bytes_read = 0
        self._file: IO[bytes] | None = None

    def __iter__(self) -> Iterator[Record | BadRecord]:
        kind, compression = file_format(self.span.path)
        with self.span.path.open("rb") as file:
            self._file = file if kind != ".parquet" else None
            chunks = read_chunks(file, start=self.span.start, size=self.span.size, compression=compression)
            chunks = self._counted(chunks)
            read = {".jsonl": self._read_lines, ".json": self._read_json, ".txt": self._read_text}.get(kind)
            yield from read(chunks) if read else self._read_parquet(file, chunks, compression)

    @property
    def disk_bytes(self) -> int:
        """How far into the span the file was read, for a progress display; 0 where the file is not read in order."""
        return self._file.tell() - self.span.start if self._file is not None and not self._file.closed else 0

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """`chunks` without the byte order mark of the file."""
        head = b""
        at_start = self.span.start == 0
        for chunk in chunks:
            self.bytes_read += len(chunk)
            if at_start:
                head += chunk
                if len(head) < len(_BOM):
                    continue
                chunk, at_start = head.removeprefix(_BOM), False
            yield chunk
        if at_start and head:
            yield head

    def _read_lines(self, chunks: Iterator[bytes]) -> Iterator[Record | BadRecord]:
        try:
            for line in split_lines(chunks):
                self.lines += 1
                if line and not line.isspace():
                    yield parse_record(line, line=self.lines, keys=self.keys)
        except DAMAGED as error:
            self.lines += 1
            yield BadRecord(self.lines, _damage(error))

    def _read_json(self, chunks: Iterator[bytes]) -> Iterator[Record | BadRecord]:
        head, damage = b"", None
        by_line = True if self.span.start else None  # only a file of lines is cut
        try:
            while by_line is None and (chunk := next(chunks, None)) is not None:
                head += chunk
                by_line = is_json_lines(head)
        except DAMAGED as error:
            damage = error
        chunks = _resumed(head, chunks, damage)
        if by_line is not False:
            yield from self._read_lines(chunks)
            return
        line = 1
        try:
            for line, value, complete in split_values(chunks):
                if complete:
                    yield parse_record(value, line=line, keys=self.keys)
                else:
                    yield BadRecord(line, "malformed JSON: the file ends inside this value or array")
        except DAMAGED as error:
            yield BadRecord(line + 1, _damage(error))

    def _read_text(self, chunks: Iterator[bytes]) -> Iterator[Record | BadRecord]:
        data = bytearray()
        try:
            for chunk in chunks:
                data += chunk
            if self.keys != ("text",):
                missing = next(key for key in self.keys if key != "text")
                yield BadRecord(1, f'no key "{missing}": a .txt file has the key "text" only')
            else:
                yield Record(1, (data.decode("utf-8"),))
        except DAMAGED as error:
            yield BadRecord(data.count(b"\n") + 1, _damage(error))
        except UnicodeDecodeError as error:
            yield BadRecord(data.count(b"\n", 0, error.start) + 1, _not_utf8(error))

    def _read_parquet(self, file: IO[bytes], chunks: Iterator[bytes], compression: str) -> Iterator[Record | BadRecord]:
        if not compression:
            self.bytes_read = self.span.size
            yield from _parquet_rows(file, self.keys)
            return
        with tempfile.TemporaryFile() as plain:  # its table of contents is at the end, so it needs the whole file
            try:
                for chunk in chunks:
                    plain.write(chunk)
            except DAMAGED as error:
                yield BadRecord(1, _damage(error))
                return
            yield from _parquet_rows(plain, self.keys)


def parse_record(data: bytes, *, line: int, keys: Sequence[str]) -> Record | BadRecord:
    """The record of one JSON object in UTF-8."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord(line, _not_utf8(error))
    except json.JSONDecodeError as error:
        return BadRecord(line, f"malformed JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return BadRecord(line, f"malformed JSON: {error}")
    if not isinstance(value, dict):
        return BadRecord(line, f"not a JSON object but {_json_kind(value)}")
    for key in keys:
        if key not in value:
            return BadRecord(line, f'no key "{key}"')
        if not isinstance(value[key], str):
            return BadRecord(line, f'the value of "{key}" is {_json_kind(value[key])}, not a string')
    return Record(line, tuple([value[key] for key in keys]))


def _json_kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte {error.object[error.start]:#04x} at column {_column(error)}"


def _column(error: UnicodeDecodeError) -> int:
    return error.start - error.object.rfind(b"\n", 0, error.start)


def _damage(error: Exception) -> str:
    return f"the compressed file is damaged or cut short: {error}"


def _resumed(head: bytes, chunks: Iterator[bytes], damage: Exception | None) -> Iterator[bytes]:
    """`head` and then the rest of `chunks`, with the error that reading the head met."""
    if head:
        yield head
    if damage is not None:
        raise damage
    yield from chunks


def _parquet_rows(file: IO[bytes], keys: Sequence[str]) -> Iterator[Record | BadRecord]:
    import pyarrow as pa  # imported for these files only: it costs start-up time
    import pyarrow.parquet as pq

    row = 0
    try:
        table = pq.ParquetFile(file)
        names = [key for key in keys if key in table.schema_arrow.names]
        if not names:
            for row in range(1, table.metadata.num_rows + 1):
                yield BadRecord(row, f'no key "{keys[0]}": the columns are {", ".join(table.schema_arrow.names)}')
            return
        for batch in table.iter_batches(batch_size=1024, columns=names):
            columns = dict(zip(names, map(_column_values, batch.columns), strict=True))
            for i in range(batch.num_rows):
                row += 1
                yield _parquet_record(row, {name: values[i] for name, values in columns.items()}, keys)
    except (pa.ArrowException, OSError) as error:
        yield BadRecord(row + 1, f"the parquet file is damaged or cut short: {str(error).splitlines()[0]}")


def _column_values(column: Any) -> list[Any]:
    """Values of a pyarrow array; text comes as bytes, so that text that is not UTF-8 reaches us whole."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def _parquet_record(row: int, values: dict[str, Any], keys: Sequence[str]) -> Record | BadRecord:
    texts = []
    for key in keys:
        if key not in values:
            return BadRecord(row, f'no key "{key}"')
        if not isinstance(values[key], bytes):
            return BadRecord(row, f'the value of "{key}" is {_json_kind(values[key])}, not a string')
        try:
            texts.append(values[key].decode("utf-8"))
        except UnicodeDecodeError as error:
            return BadRecord(row, _not_utf8(error))
    return Record(row, tuple(texts))
