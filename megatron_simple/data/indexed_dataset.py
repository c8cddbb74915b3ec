"""Datasets of token ids on disk: a pair of files, <prefix>.bin and <prefix>.idx, in Megatron-LM's format, version 1.

The .bin file holds the ids of all sequences one after another. The .idx file holds, little-endian:

| bytes    | content                                                                     |
|----------|-----------------------------------------------------------------------------|
| 9        | magic "MMIDIDX\\0\\0"                                                         |
| 8        | uint64 version, 1                                                           |
| 1        | uint8 code of the data type: `DTYPE_OF_CODE`                                |
| 8        | uint64 number of sequences N                                                |
| 8        | uint64 number of document indices M (documents + 1)                         |
| 4 N      | int32 tokens of each sequence                                               |
| 8 N      | int64 byte offset of each sequence in the .bin file                         |
| 8 M      | int64 document indices: 0, then one past the last sequence of each document |

The writer here makes each document one sequence; other writers may put several sequences in a document.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron_simple.data import _native

DTYPE_OF_CODE = {code: np.dtype(name) for code, name in _native.DTYPE_NAMES.items()}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_TOKEN_TYPES = (np.uint16, np.int32, np.uint32, np.int64)  # what the native writer takes as it is
_CHECKED_AT_A_TIME = 1 << 20
_COPIED_AT_A_TIME = 1 << 28
_READ_AT_A_TIME = 1 << 22
_CURE = "build it again with tools/preprocess_data.py, or copy both files again"


class DatasetError(ValueError):
    """A dataset pair that is missing, damaged, or does not fit its use; the message names the file and the cure."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of this project's datasets that holds the ids 0 to vocab_size - 1: uint16 or int32."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32)


def pair_paths(prefix: str | Path) -> tuple[Path, Path]:
    """<prefix>.bin and <prefix>.idx; a prefix that is given with one of the suffixes is taken without it."""
    text = str(prefix)
    if text.endswith((".bin", ".idx")):
        text = text[:-4]
    return Path(text + ".bin"), Path(text + ".idx")


class DatasetWriter:
    """Writes <prefix>.bin as documents come and <prefix>.idx in `finalize`. A context manager.

    Leaving the context without `finalize` removes both files. Callers that replace a dataset write under a temporary
    prefix and rename. OSError, with the file's name, where the disk is full or the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype | type) -> None:
        self._bin, self._idx = pair_paths(prefix)
        self._finished = False
        self._native = _native.DatasetWriter(str(self._bin), CODE_OF_DTYPE[np.dtype(dtype)])

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends documents whose ids lie one after another in `tokens` [T]; `lengths` [documents] adds up to T.

        ValueError, with nothing appended, for an id that the data type does not hold, and for an empty document.
        """
        if self._finished:
            raise ValueError(f"{self._bin} is finished; documents cannot be added to it")
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, not {tokens.dtype}")
        if tokens.dtype not in _TOKEN_TYPES:
            tokens = tokens.astype(np.int64)
        self._native.add_documents(_plain(tokens), _plain(np.asarray(lengths, dtype=np.int64)))

    def finalize(self) -> None:
        """Writes the .idx file and waits until the disk holds both files. Nothing can be added afterwards."""
        self._native.finish(str(self._idx))
        self._finished = True

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._native.close()
        if not self._finished:
            _remove(self._bin, self._idx)


class IndexedDataset:
    """Reads a dataset pair through memory maps; `dataset[i]` is the i-th sequence, a read-only array of `dtype`.

    Opening checks the pair as a whole, so that a truncated or mixed-up file is refused at once (DatasetError).
    The pages that reading touches count as resident memory, but they are the page cache's: the system takes them back.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.prefix = self.bin_path.with_name(self.bin_path.name[:-4])
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DatasetError(f"{path}: no such file; a dataset is the pair {self.prefix.name}.bin and .idx")
        self._index = _map_bytes(self.idx_path)
        self.dtype, num_sequences, num_document_indices = self._read_header()
        # Views of the map: the header's 34 bytes leave them unaligned, which NumPy handles and C++ does not.
        begin = _native.HEADER_BYTES
        self.sizes = np.frombuffer(self._index, np.int32, num_sequences, begin)
        begin += self.sizes.nbytes
        self._pointers = np.frombuffer(self._index, np.int64, num_sequences, begin)
        begin += self._pointers.nbytes
        self.document_indices = np.frombuffer(self._index, np.int64, num_document_indices, begin)
        self.num_tokens = self._check_sequences()
        self._check_documents()
        self._tokens = _map_bytes(self.bin_path).view(self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of sequence `i` from `offset` on (default: to its end); IndexError outside the sequence."""
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"{self.prefix} has {len(self.sizes)} sequences; there is no sequence {i}")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{self.prefix}: sequence {i} has {size} tokens, not {length} from {offset} on")
        begin = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[begin : begin + length]

    @property
    def tokens(self) -> np.ndarray:
        """The ids of all sequences in file order, [num_tokens]."""
        return self._tokens

    @cached_property
    def content_id(self) -> str:
        """Names what a sample index depends on: the .idx file's bytes and the .bin file's size, not their dates."""
        digest = hashlib.sha256(self._index)
        digest.update(str(self._tokens.nbytes).encode())
        return digest.hexdigest()

    def _read_header(self) -> tuple[np.dtype, int, int]:
        """The data type and the two counts; DatasetError where the header or the file's length contradicts them."""
        header = self._index[: _native.HEADER_BYTES].tobytes()
        magic = _native.MAGIC
        if len(header) < _native.HEADER_BYTES:
            raise self._broken(self.idx_path, f"a header of {_native.HEADER_BYTES} bytes", f"{len(header)} bytes")
        if not header.startswith(magic):
            raise self._broken(self.idx_path, f"{magic!r} at its start", repr(header[: len(magic)]))
        version = int.from_bytes(header[9:17], "little")
        if version != _native.VERSION:
            raise self._broken(self.idx_path, f"version {_native.VERSION}", f"version {version}")
        dtype = DTYPE_OF_CODE.get(header[17])
        if dtype is None or dtype.kind not in "iu":
            known = ", ".join(f"{code} {name}" for code, name in DTYPE_OF_CODE.items() if name.kind in "iu")
            raise self._broken(self.idx_path, f"the data type code of token ids ({known})", f"code {header[17]}")
        sequences, documents = (int.from_bytes(header[at : at + 8], "little") for at in (18, 26))
        wanted = _native.HEADER_BYTES + 12 * sequences + 8 * documents
        if wanted != len(self._index):
            counts = f"{wanted} bytes for {sequences} sequences and {documents} document indices"
            raise self._broken(self.idx_path, counts, f"{len(self._index)} bytes")
        return dtype, sequences, documents

    def _check_sequences(self) -> int:
        """Sizes, pointers and the .bin file agree; returns the number of tokens."""
        total = 0
        for begin in range(0, len(self.sizes), _CHECKED_AT_A_TIME):
            part = slice(begin, begin + _CHECKED_AT_A_TIME)
            sizes = self.sizes[part].astype(np.int64)
            if sizes.min() < 0:
                at = begin + int(np.argmax(sizes < 0))
                raise self._broken(self.idx_path, "sizes of 0 and more", f"size {self.sizes[at]} of sequence {at}")
            ends = np.cumsum(sizes) + total
            wrong = (ends - sizes) * self.dtype.itemsize != self._pointers[part]
            if wrong.any():
                at = int(np.argmax(wrong))
                wanted = int(ends[at] - sizes[at]) * self.dtype.itemsize
                found = f"{self._pointers[begin + at]}"
                raise self._broken(self.idx_path, f"sequence {begin + at} at byte {wanted}", f"byte {found}")
            total = int(ends[-1])
        wanted, found = total * self.dtype.itemsize, self.bin_path.stat().st_size
        if wanted != found:
            raise self._broken(self.bin_path, f"{wanted} bytes, as {self.idx_path.name} says", f"{found} bytes")
        return total

    def _check_documents(self) -> None:
        """Document indices start at 0, never fall, and end at the number of sequences."""
        indices = self.document_indices
        if len(indices) == 0 or indices[0] != 0 or indices[-1] != len(self.sizes):
            ends = f"{indices[0]} to {indices[-1]}" if len(indices) else "none"
            raise self._broken(self.idx_path, f"document indices from 0 to {len(self.sizes)}", ends)
        for begin in range(0, len(indices) - 1, _CHECKED_AT_A_TIME):
            steps = np.diff(indices[begin : begin + _CHECKED_AT_A_TIME + 1])
            if steps.min() < 0:
                at = begin + int(np.argmax(steps < 0))
                found = f"{indices[at]} before {indices[at + 1]}"
                raise self._broken(self.idx_path, "document indices that never fall", found)

    @staticmethod
    def _broken(path: Path, expected: str, found: str) -> DatasetError:
        return DatasetError(f"{path} is damaged: expected {expected}, found {found}; {_CURE}")


def join_datasets(
    prefixes: Sequence[str | Path], output_prefix: str | Path, *, progress: Callable[[int], object] | None = None
) -> None:
    """Writes the datasets behind `prefixes`, one after another, as one: the bytes that a single run would write.

    The outputs get their names when both are complete. `progress` is called with the bytes just copied. DatasetError
    where an input is damaged, where data types differ, or where the output is one of the inputs.
    """
    if not prefixes:
        raise DatasetError("there is no dataset to join; name at least one prefix")
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    first = parts[0]
    bin_path, idx_path = pair_paths(output_prefix)
    for part in parts:
        if part.dtype != first.dtype:
            raise DatasetError(
                f"{first.prefix} holds {first.dtype} and {part.prefix} {part.dtype}; datasets of one tokenizer have "
                "one type, so preprocess both with the same tokenizer"
            )
        if part.bin_path.resolve() == bin_path.resolve():
            raise DatasetError(f"{part.prefix} is input and output at once; choose another output prefix")
    unfinished = pair_paths(f"{bin_path.with_suffix('')}.unfinished")
    try:
        _join_tokens(parts, unfinished[0], progress or (lambda _: None))
        sizes = np.concatenate([part.sizes for part in parts])
        _native.write_index(str(unfinished[1]), CODE_OF_DTYPE[first.dtype], sizes, _join_documents(parts))
        unfinished[0].rename(bin_path)
        unfinished[1].rename(idx_path)
    finally:
        _remove(*unfinished)


def _join_documents(parts: Sequence[IndexedDataset]) -> np.ndarray:
    """Document indices of the whole: those of each part, moved by the sequences before it, the inner zeros left out."""
    moved = [np.zeros(1, dtype=np.int64)]
    sequences = 0
    for part in parts:
        moved.append(part.document_indices[1:] + sequences)
        sequences += len(part)
    return np.concatenate(moved)


def _join_tokens(parts: Sequence[IndexedDataset], path: Path, progress: Callable[[int], object]) -> None:
    with path.open("wb") as output:
        for part in parts:
            with part.bin_path.open("rb") as source:
                _copy_all(source.fileno(), output.fileno(), progress)
        os.fsync(output.fileno())


def _copy_all(source: int, target: int, progress: Callable[[int], object]) -> None:
    """Appends a file to another inside the kernel, or through memory where the file systems do not offer that."""
    try:
        while copied := os.copy_file_range(source, target, _COPIED_AT_A_TIME):
            progress(copied)
    except (AttributeError, OSError):
        # What was copied already has moved both positions. A full disk fails here again, and is reported.
        while block := os.read(source, _READ_AT_A_TIME):
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(target, rest) :]
            progress(len(block))


def _map_bytes(path: Path) -> np.ndarray:
    """The file as a read-only array of bytes; a map cannot be empty, so an empty file is an empty array."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)
    # As a plain array: slices of the memmap class are several times slower to make.
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _plain(array: np.ndarray) -> np.ndarray:
    """The array as native code takes it: C order, aligned, this machine's byte order."""
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "A"])


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
