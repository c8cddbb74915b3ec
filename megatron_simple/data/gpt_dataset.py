"""Samples of a fixed length from one dataset: documents in a shuffled order, cut without regard to their borders.

Three arrays say which tokens sample i holds (n samples over all epochs):

| array          | shape      | content                                                                                |
|----------------|------------|----------------------------------------------------------------------------------------|
| document_index | [E x docs] | the documents of epoch 0 in shuffled order, then those of epoch 1 in another           |
| sample_index   | [n + 1, 2] | where samples start in that row of documents: position in document_index, token offset |
| shuffle_index  | [n]        | the sample of sample_index that is drawn i-th                                          |

Each epoch is shuffled for itself from (seed, epoch), so that every document is seen once before any is seen twice, and
sample i stays what it is when a run is made longer. Epoch 0 has the order of Megatron-LM for a single epoch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_simple.data import _native
from megatron_simple.data.index_cache import IndexCache
from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset

LARGEST_SEED = 2**32 - 1


class GPTDataset:
    """`dataset[i]`: the i-th sample, int64 [seq_length + 1]; neighbours in the text share one token.

    `documents` are the sequences of `indexed` that belong to this dataset. At least `num_samples` samples exist: the
    documents are repeated in whole epochs as often as that needs. The arrays are kept in `cache_path` (default:
    index-cache beside the data); with `build=False` they must be there already. ValueError where the documents do not
    hold a single sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: range | np.ndarray,
        num_samples: int,
        seq_length: int,
        seed: int,
        name: str,
        cache_path: str | Path | None = None,
        build: bool = True,
    ) -> None:
        if num_samples < 1 or seq_length < 1:
            raise ValueError(f"{name}: {num_samples} samples of {seq_length} tokens; both must be at least 1")
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"--seed {seed} is out of range; give 0 to {LARGEST_SEED}")
        self.indexed = indexed
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.num_tokens = count_tokens(indexed, documents)
        self._check_large_enough(documents, name)
        epochs = -(-(num_samples * seq_length + 1) // self.num_tokens)
        key = {
            "content": indexed.content_id,
            "documents": _identity(documents),
            "seq_length": seq_length,
            "seed": seed,
            "epochs": epochs,
        }
        cache = IndexCache(cache_path or default_cache_path(indexed.prefix), name=name, key=key)

        def build_arrays() -> dict[str, np.ndarray]:
            return build_indices(indexed.sizes, documents, epochs=epochs, seq_length=seq_length, seed=seed)

        arrays = cache.load_or_build(build_arrays) if build else cache.load()
        self._documents = arrays["document_index"]
        self._samples = arrays["sample_index"]
        self._shuffle = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.indexed.prefix} has {len(self)} samples; there is no sample {i}")
        sample = int(self._shuffle[i])
        (first, offset), (last, end) = self._samples[sample : sample + 2].tolist()
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        filled = 0
        for position in range(first, last + 1):
            begin = offset if position == first else 0
            length = end + 1 - begin if position == last else None
            part = self.indexed.get(int(self._documents[position]), begin, length)
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        if filled != len(tokens):
            raise DatasetError(f"sample {i} of {self.indexed.prefix} has {filled} tokens; delete its index-cache")
        return tokens

    def describe(self) -> str:
        """A table of one row: what a run draws from this dataset."""
        return component_table([self.component(weight=1.0, samples=self.num_samples)])

    def component(self, *, weight: float, samples: int) -> "Component":
        epochs = samples * self.seq_length / self.num_tokens
        return Component(str(self.indexed.prefix), weight, self.num_tokens, samples, epochs)

    def _check_large_enough(self, documents: range | np.ndarray, name: str) -> None:
        if self.num_tokens > self.seq_length:
            return
        shorter = f"lower --seq-length to at most {self.num_tokens - 1}, " if self.num_tokens > 1 else ""
        raise DatasetError(
            f"the {name} part of {self.indexed.prefix} is too small: {len(documents)} documents with {self.num_tokens} "
            f"tokens, but one sample needs {self.seq_length + 1}; {shorter}give this part a larger share in --split, "
            "or add text"
        )


def build_indices(
    sizes: np.ndarray, documents: range | np.ndarray, *, epochs: int, seq_length: int, seed: int
) -> dict[str, np.ndarray]:
    """The three arrays of this file's table, for whole epochs of `documents`; `sizes` int32 [sequences] in tokens."""
    documents = np.asarray(documents, dtype=document_dtype(len(sizes)))
    tokens = int(sizes[documents].sum(dtype=np.int64))
    num_samples = (epochs * tokens - 1) // seq_length
    document_index = np.empty(epochs * len(documents), dtype=documents.dtype)
    shuffle_index = np.empty(num_samples, dtype=np.uint32 if num_samples < 2**32 else np.int64)
    begin = 0
    for epoch in range(epochs):
        random = np.random.RandomState(seed if epoch == 0 else [seed, epoch])
        order = document_index[epoch * len(documents) : (epoch + 1) * len(documents)]
        order[:] = documents
        random.shuffle(order)
        # The samples that end in this epoch; one that began in the epoch before is among them.
        end = ((epoch + 1) * tokens - 1) // seq_length
        drawn = shuffle_index[begin:end]
        drawn[:] = np.arange(begin, end)
        random.shuffle(drawn)
        begin = end
    sample_index = _native.build_sample_index(
        np.array(sizes, dtype=np.int32), document_index, seq_length=seq_length, num_samples=num_samples
    )
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def document_dtype(num_sequences: int) -> np.dtype:
    """The type that holds every sequence number: int32 as long as it does, else int64."""
    return np.dtype(np.int32) if num_sequences <= 1 << 31 else np.dtype(np.int64)


def count_tokens(indexed: IndexedDataset, documents: range | np.ndarray) -> int:
    """The tokens of `documents`; DatasetError where one of them is not in the dataset."""
    if len(documents) == 0:
        return 0
    lowest, highest = (documents[0], documents[-1]) if isinstance(documents, range) else _bounds(documents)
    if lowest < 0 or highest >= len(indexed):
        raise DatasetError(f"{indexed.prefix} has {len(indexed)} documents; {lowest} to {highest} were asked for")
    if isinstance(documents, range):
        documents = slice(documents.start, documents.stop, documents.step)
    return int(indexed.sizes[documents].sum(dtype=np.int64))


def default_cache_path(prefix: str | Path) -> Path:
    """The folder index-cache beside the data."""
    return Path(prefix).parent / "index-cache"


@dataclass(frozen=True)
class Component:
    """What a run draws from one dataset. `epochs` counts passes over its tokens."""

    dataset: str
    weight: float
    tokens: int
    samples: int
    epochs: float


def component_table(components: Sequence[Component]) -> str:
    """One line per dataset; those that a run reads more than once say so."""
    rows = [("dataset", "weight", "tokens", "samples", "epochs", "")]
    for c in components:
        repeated = "repeats" if c.epochs > 1 else ""
        rows.append((c.dataset, f"{c.weight:.4f}", f"{c.tokens:,}", f"{c.samples:,}", f"{c.epochs:.2f}", repeated))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, note in rows:
        cells = [name.ljust(widths[0])] + [n.rjust(w) for n, w in zip(numbers, widths[1:], strict=False)]
        lines.append("  ".join([*cells, note]).rstrip())
    return "\n".join(lines)


def _identity(documents: range | np.ndarray) -> list[int] | str:
    if isinstance(documents, range):
        return [documents.start, documents.stop, documents.step]
    return hashlib.sha256(np.ascontiguousarray(documents, dtype=np.int64).tobytes()).hexdigest()


def _bounds(documents: np.ndarray) -> tuple[int, int]:
    return int(documents.min()), int(documents.max())
