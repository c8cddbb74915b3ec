"""Arrays that are expensive to build and depend on little: built once, kept as .npy files, mapped when read."""

import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_simple.data.indexed_dataset import DatasetError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


class IndexCache:
    """The files <folder>/<name>-<hash of key>.<array>.npy, and .json beside them, which is written last.

    `key` is all that the arrays depend on, as JSON values. The .json file holds it, and the length and checksum of
    each array, so that a file that is missing, cut short or altered is noticed.
    """

    def __init__(self, folder: str | Path, *, name: str, key: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self._key = {**key, "format_version": FORMAT_VERSION}
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._stem = f"{name}-{digest[:16]}"
        self._description = self.folder / f"{self._stem}.json"

    def load_or_build(self, build: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The arrays, mapped. What is absent is built; what is unusable too, with one line that says which and why."""
        reason = self._unusable(verify=True)
        if reason is None:
            return self._load()
        if any(self.folder.glob(f"{self._stem}.*")):
            logger.warning("%s: building this index again", reason)
        else:
            logger.info("building %s", self._description)
        try:
            self._store(build())
        except OSError as error:
            raise DatasetError(
                f"cannot write the sample index to {self.folder}: {error.strerror}; give --data-cache-path a folder "
                "with room that can be written"
            ) from error
        return self._load()

    def load(self) -> dict[str, np.ndarray]:
        """The arrays, mapped, that another process has built; DatasetError where it has not."""
        reason = self._unusable(verify=False)
        if reason is not None:
            raise DatasetError(
                f"{reason}: one process per node builds this index for the others; give --data-cache-path a folder "
                "that all processes of a node share"
            )
        return self._load()

    def _array_path(self, array: str) -> Path:
        return self.folder / f"{self._stem}.{array}.npy"

    def _unusable(self, *, verify: bool) -> str | None:
        """Why the files cannot be used, with the path of the first that is to blame; None where they can."""
        if not self._description.is_file():
            return f"{self._description} is missing"
        try:
            described = json.loads(self._description.read_bytes())
            if described["key"] != self._key:
                return f"{self._description} describes another index"
            for name, facts in described["arrays"].items():
                path = self._array_path(name)
                if not path.is_file():
                    return f"{path} is missing"
                if path.stat().st_size != facts["bytes"]:
                    return f"{path} has {path.stat().st_size} bytes instead of {facts['bytes']}"
                if verify and _checksum(path) != facts["crc32"]:
                    return f"{path} has been altered"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{self._description} is damaged"
        return None

    def _load(self) -> dict[str, np.ndarray]:
        names = json.loads(self._description.read_bytes())["arrays"]
        return {name: np.load(self._array_path(name), mmap_mode="r").view(np.ndarray) for name in names}

    def _store(self, arrays: dict[str, np.ndarray]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {}
        for name, array in arrays.items():
            path = self._array_path(name)
            _write_complete(path, lambda file, array=array: np.save(file, array))
            facts[name] = {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        text = json.dumps({"key": self._key, "arrays": facts}, indent=2) + "\n"
        _write_complete(self._description, lambda file: file.write(text.encode()))


def _write_complete(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes under a name of its own and renames, so that readers and other writers never meet half a file."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
