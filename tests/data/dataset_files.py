"""Small datasets for tests, and the format written a second time, with struct alone."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_simple.data.indexed_dataset import DatasetWriter, IndexedDataset

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], *, dtype: str = "uint16") -> IndexedDataset:
    with DatasetWriter(prefix, dtype=np.dtype(dtype)) as writer:
        tokens = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
        writer.add_documents(tokens, np.array([len(document) for document in documents]))
        writer.finalize()
    return IndexedDataset(prefix)


def numbered_dataset(prefix: Path, lengths: Sequence[int], *, start: int = 0) -> IndexedDataset:
    """Token k of the whole file is start + k, so that a sample tells where it comes from."""
    ends = np.cumsum(lengths) + start
    return write_dataset(prefix, [range(end - n, end) for end, n in zip(ends, lengths, strict=True)], dtype="int32")


def pair_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def packed_index(sizes: Sequence[int], *, dtype: str = "uint16", documents: Sequence[int] | None = None) -> bytes:
    """The .idx file of Megatron's format, version 1."""
    width = np.dtype(dtype).itemsize
    documents = range(len(sizes) + 1) if documents is None else documents
    pointers, end = [], 0
    for size in sizes:
        pointers.append(end)
        end += size * width
    return (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(documents))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def write_packed(prefix: Path, sequences: Sequence[Sequence[int]], *, dtype: str, documents: Sequence[int]) -> None:
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())
    index = packed_index([len(sequence) for sequence in sequences], dtype=dtype, documents=documents)
    Path(f"{prefix}.idx").write_bytes(index)
