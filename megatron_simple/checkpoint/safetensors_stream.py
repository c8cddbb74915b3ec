"""Safetensors folders without the whole model in memory: written tensor by tensor, read tensor by tensor.

bytes 0-7      length N of the header, little-endian
N bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with spaces to a multiple of 8
the rest       the tensors, little-endian, C order; offsets count from here
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: only its name and shape are known yet."""

    name: str
    shape: tuple[int, ...]

    def nbytes(self, dtype: str) -> int:
        return math.prod(self.shape) * DTYPES[dtype][0].itemsize


def parse_size(text: str) -> int:
    """Bytes of '5GB', '800 MB', '2GiB' or '123'; ValueError naming --max-shard-size for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|)\s*", text, flags=re.IGNORECASE)
    size = int(float(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0
    if size <= 0:
        raise ValueError(f"--max-shard-size {text}: expected a size such as 5GB, 800MB or 2GiB")
    return size


def plan_shards(tensors: Sequence[PlannedTensor], *, dtype: str, max_bytes: int) -> list[list[PlannedTensor]]:
    """Consecutive tensors per file, none above `max_bytes` unless one tensor is."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes(dtype) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes(dtype)
    return shards


def write_folder(
    folder: Path,
    tensors: Sequence[PlannedTensor],
    make: Callable[[str], Tensor],
    *,
    dtype: str,
    max_bytes: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Writes all tensors, each made by `make(name)` when its turn comes, with an index if there are several files.

    Returns the size of the tensors in bytes.
    """
    shards = plan_shards(tensors, dtype=dtype, max_bytes=max_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, make, dtype=dtype, progress=progress)
    total = sum(tensor.nbytes(dtype) for tensor in tensors)
    if len(shards) > 1:
        parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return total


def _write_file(
    path: Path,
    tensors: Sequence[PlannedTensor],
    make: Callable[[str], Tensor],
    *,
    dtype: str,
    progress: Callable[[int], None],
) -> None:
    torch_dtype, code = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes(dtype)
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            value = make(tensor.name)
            if tuple(value.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {tuple(value.shape)}, planned was {tensor.shape}")
            raw = value.to(torch_dtype).contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(raw.numpy()))
            progress(tensor.nbytes(dtype))
        file.flush()
        os.fsync(file.fileno())


class TensorFolder:
    """The tensors of a Hugging Face folder, read one at a time. ValueError when files are missing or damaged."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._stack = ExitStack()
        for name in self._file_names():
            try:
                file = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / name} cannot be read ({error}); copy the folder again") from None
            self._files[name] = file
            self._where |= dict.fromkeys(file.keys(), name)

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            try:
                return sorted(set(json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError):
                raise ValueError(f"{self.folder / INDEX} is not a readable index; copy the folder again") from None
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        raise ValueError(
            f"{self.folder} holds neither {SINGLE} nor {INDEX}; weights in another format have to be saved as "
            "safetensors first (transformers' save_pretrained does it)"
        )

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The safetensors code of the tensor's type, such as F32 or BF16."""
        return self._files[self._where[name]].get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        return self._files[self._where[name]].get_tensor(name)
