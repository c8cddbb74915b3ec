"""The bytes of plain, gzip and zstd files as chunks, and chunks as lines; memory does not grow with the file."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import zstandard

_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 15  # a few bytes can decompress to thousands of times as many
DAMAGED = (EOFError, zlib.error, zstandard.ZstdError)


def read_chunks(file: IO[bytes], *, start: int, size: int, compression: str) -> Iterator[bytes]:
    """Bytes [start, start + size) of a plain file, or all decompressed bytes of a ".gz" or ".zst" one; what stands
    before a place where the compressed data breaks off is still given, and then one of DAMAGED is raised."""
    if compression == ".gz":
        return _decompressed(file, lambda: zlib.decompressobj(wbits=31))
    if compression == ".zst":
        return _decompressed(file, lambda: zstandard.ZstdDecompressor().decompressobj())
    return _plain(file, start, size)


def _plain(file: IO[bytes], start: int, left: int) -> Iterator[bytes]:
    file.seek(start)
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        left -= len(chunk)
        yield chunk


def _decompressed(file: IO[bytes], new_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Members (gzip) or frames (zstd) one after another; zero bytes between and behind them are padding."""
    decompressor = None
    while data := file.read(_COMPRESSED_CHUNK):
        while data:
            if decompressor is None:
                data = data.lstrip(b"\0")
                if not data:
                    break
                decompressor = new_decompressor()
            yield decompressor.decompress(data)
            data = decompressor.unused_data if decompressor.eof else b""
            if decompressor.eof:
                decompressor = None
    if decompressor is not None:
        raise EOFError("it ends before its end marker")


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their "\\n"; linear time for a line of any length."""
    pending: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending = [others[-1]]
    if last := b"".join(pending):
        yield last
