from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_simple.checkpoint.safetensors_stream import (
    INDEX,
    PlannedTensor,
    TensorFolder,
    parse_size,
    plan_shards,
    write_folder,
)

VALUES = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3.5), "c": torch.randn(7), "d": torch.zeros(0, 4)}
PLAN = [PlannedTensor(name, tuple(value.shape)) for name, value in VALUES.items()]


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("2 gib", 2 * 2**30), ("123", 123), ("1.5MB", 1_500_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "5 GBs", "0", "5PB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--max-shard-size"):
        parse_size(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_bytes", [10**9, 16])
def test_the_safetensors_library_reads_what_is_written(tmp_path: Path, dtype: str, max_bytes: int) -> None:
    total = write_folder(tmp_path, PLAN, VALUES.__getitem__, dtype=dtype, max_bytes=max_bytes)
    wanted = {name: value.to(getattr(torch, dtype)) for name, value in VALUES.items()}
    assert total == sum(value.nbytes for value in wanted.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    merged = {name: value for path in files for name, value in load_file(path).items()}
    assert set(merged) == set(wanted)
    assert all(merged[name].equal(wanted[name]) and merged[name].dtype == wanted[name].dtype for name in wanted)
    if max_bytes == 16:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_parameters": 14, "total_size": total}
        assert set(index["weight_map"].values()) == {path.name for path in files}
    else:
        assert [path.name for path in files] == ["model.safetensors"]
    with TensorFolder(tmp_path) as folder:
        assert all(folder.read(name).equal(wanted[name]) and folder.shape(name) == VALUES[name].shape for name in folder)


def test_shards_are_consecutive_and_a_large_tensor_has_its_own() -> None:
    plan = [PlannedTensor("small", (2,)), PlannedTensor("large", (100,)), PlannedTensor("last", (1,))]
    shards = plan_shards(plan, dtype="float32", max_bytes=40)
    assert [[tensor.name for tensor in shard] for shard in shards] == [["small"], ["large"], ["last"]]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref] = []

    def make(name: str) -> torch.Tensor:
        assert sum(reference() is not None for reference in made) <= 1  # the one before is dropped with its variable
        value = torch.ones(1000)
        made.append(weakref.ref(value))
        return value

    plan = [PlannedTensor(str(i), (1000,)) for i in range(5)]
    write_folder(tmp_path, plan, make, dtype="bfloat16", max_bytes=10**9)
    assert len(made) == 5


def test_a_wrong_shape_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planned was"):
        write_folder(tmp_path, [PlannedTensor("a", (3,))], lambda name: torch.ones(2), dtype="float32", max_bytes=100)


def test_missing_and_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither"):
        TensorFolder(tmp_path)
    write_folder(tmp_path, PLAN, VALUES.__getitem__, dtype="float32", max_bytes=16)
    next(tmp_path.glob("model-00001-of-*")).write_bytes(b"\x10")
    with pytest.raises(ValueError, match="cannot be read"):
        TensorFolder(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match="not a readable index"):
        TensorFolder(tmp_path)
