"""Batches of token ids for one rank. Where the data stands is one integer, `consumed_samples`."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset


class Samples(Protocol):
    """What a loader draws from: sample i is int64 [seq_length + 1], the same at every call and on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> np.ndarray: ...


class BatchLoader:
    """`next(loader)`: this rank's share of the next global batch, int64 [micro_batches, micro_batch_size, S + 1].

    Micro-batch m of data-parallel rank d holds the samples consumed_samples + (m * data_parallel_size + d) *
    micro_batch_size and the micro_batch_size - 1 after it, so that the global batch does not depend on the layout.
    A thread reads one batch ahead. ValueError, when a batch is asked for, at the end of the dataset and for token ids
    outside the vocabulary.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        per_step = micro_batch_size * data_parallel_size
        if per_step < 1 or global_batch_size < 1 or global_batch_size % per_step:
            raise ValueError(
                f"--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} "
                f"x {data_parallel_size} data-parallel ranks; change one of them"
            )
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"there is no data-parallel rank {data_parallel_rank} among {data_parallel_size}")
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples is {consumed_samples}; it counts from 0")
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._vocab_size = vocab_size
        micro_batches = np.arange(global_batch_size).reshape(-1, data_parallel_size, micro_batch_size)
        self._own = micro_batches[:, data_parallel_rank]  # [micro_batches, micro_batch_size], within a global batch
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-reader")
        self._ahead: Future[np.ndarray] | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        ahead = self._ahead or self._reader.submit(self._read, self.consumed_samples)
        batch = ahead.result()
        self.consumed_samples += self._global_batch_size
        self._ahead = self._reader.submit(self._read, self.consumed_samples)
        return batch

    def _read(self, consumed_samples: int) -> np.ndarray:
        end = consumed_samples + self._global_batch_size
        if end > len(self._dataset):
            raise DatasetError(
                f"the data ends after {len(self._dataset)} samples, but the next batch ends at sample {end}; "
                "the run was planned for fewer samples: train for fewer iterations"
            )
        rows = [self._dataset[consumed_samples + int(i)] for i in self._own.flat]
        batch = np.stack(rows).reshape(*self._own.shape, -1)
        self._check_vocabulary(batch)
        return batch

    def _check_vocabulary(self, batch: np.ndarray) -> None:
        if self._vocab_size is None:
            return
        for token in (int(batch.max()), int(batch.min())):
            if not 0 <= token < self._vocab_size:
                raise DatasetError(
                    f"the data holds token id {token}, but the vocabulary has ids 0 to {self._vocab_size - 1}; "
                    "train with the tokenizer (or the --vocab-size) that the data was preprocessed with"
                )


class SequentialSamples:
    """All documents of one or several datasets joined in file order; sample i is their tokens [i * S, i * S + S].

    int64 [S + 1], S the sequence length: neighbours share one token. A last sample that is not full is dropped.
    """

    def __init__(self, prefixes: str | Path | Sequence[str | Path], seq_length: int) -> None:
        if isinstance(prefixes, str | Path):
            prefixes = [prefixes]
        if seq_length < 1:
            raise ValueError(f"--seq-length {seq_length} must be at least 1")
        self._datasets = [IndexedDataset(prefix) for prefix in prefixes]
        self._ends = np.cumsum([dataset.num_tokens for dataset in self._datasets])
        self._seq_length = seq_length
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.num_tokens <= seq_length:
            raise DatasetError(
                f"{' '.join(map(str, prefixes))}: {self.num_tokens} tokens, but one sample needs {seq_length + 1}; "
                "lower --seq-length or add text"
            )

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self._seq_length

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self):
            raise IndexError(f"there are {len(self)} samples; there is no sample {i}")
        begin = i * self._seq_length
        end = begin + self._seq_length + 1
        parts = []
        for dataset, dataset_end in zip(self._datasets, self._ends.tolist(), strict=True):
            start = dataset_end - dataset.num_tokens
            parts.append(dataset.tokens[max(begin - start, 0) : max(end - start, 0)])
        return np.concatenate(parts, dtype=np.int64)
