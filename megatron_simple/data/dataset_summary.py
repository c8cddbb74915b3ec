"""What a dataset pair holds, in numbers and as text."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron_simple.data.indexed_dataset import DatasetError, IndexedDataset
from megatron_simple.data.tokenizer_base import Tokenizer

_TOKENS_AT_A_TIME = 1 << 24
_IDS_SHOWN = 32


def summarise(dataset: IndexedDataset, *, progress: Callable[[int], object] | None = None) -> dict[str, Any]:
    """Counts, data type, token range and bytes; reads every token. `progress` is called with the tokens just read.

    The smallest and largest token and the lengths are None for a dataset without tokens.
    """
    smallest: int | None = None
    largest: int | None = None
    for begin in range(0, dataset.num_tokens, _TOKENS_AT_A_TIME):
        block = dataset.tokens[begin : begin + _TOKENS_AT_A_TIME]
        low, high = int(block.min()), int(block.max())
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
        if progress:
            progress(len(block))
    sizes = dataset.sizes
    return {
        "prefix": str(dataset.prefix),
        "dtype": str(dataset.dtype),
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "smallest_token": smallest,
        "largest_token": largest,
        "shortest_sequence": int(sizes.min()) if len(sizes) else None,
        "longest_sequence": int(sizes.max()) if len(sizes) else None,
        "bin_bytes": dataset.bin_path.stat().st_size,
        "idx_bytes": dataset.idx_path.stat().st_size,
    }


def documents_as_text(dataset: IndexedDataset, count: int, *, tokenizer: Tokenizer | None) -> Iterator[str]:
    """The first `count` documents, decoded; without a tokenizer their first ids."""
    ends = dataset.document_indices
    for number in range(min(count, dataset.num_documents)):
        sequences = [dataset[i] for i in range(int(ends[number]), int(ends[number + 1]))]
        tokens = np.concatenate(sequences) if sequences else np.empty(0, dtype=dataset.dtype)
        heading = f"--- document {number}: {len(tokens)} tokens"
        if tokenizer is None:
            more = " ..." if len(tokens) > _IDS_SHOWN else ""
            yield f"{heading}\n{' '.join(map(str, tokens[:_IDS_SHOWN].tolist()))}{more}"
            continue
        try:
            yield f"{heading}\n{tokenizer.decode(tokens)}"
        except ValueError as error:
            raise DatasetError(
                f"{dataset.bin_path}: document {number} cannot be decoded ({error}); give the tokenizer that the data "
                "was preprocessed with"
            ) from None
