"""The perplexity of a bigram model: what a language model must beat to have learned more than pairs of neighbours.

    python examples/bigram_perplexity.py TRAIN_PREFIX VALIDATION_PREFIX --seq-length S [--vocab-size V]

Interpolated Kneser-Ney (Ney, Essen and Kneser, 1994) with one discount, counted on every training token and measured on the
tokens that tools/evaluate.py measures. The last line of stdout is JSON: loss [nats per token], perplexity, tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

import numpy as np

from megatron_simple.data.indexed_dataset import IndexedDataset
from megatron_simple.data.loader import SequentialSamples


def bigram_log_probabilities(train: np.ndarray, before: np.ndarray, after: np.ndarray, vocab_size: int) -> np.ndarray:
    """log p(after[i] | before[i]) [nats] by a model of the neighbours in `train`; all are token ids below `vocab_size`.

    p(w | v) = max(c(v w) - D, 0) / c(v) + D n(v) / c(v) q(w), with c the counts, n(v) the number of different tokens behind
    v, q(w) the share of different pairs that end in w (one added to each, so that none is impossible), D = n1 / (n1 + 2 n2)
    of the pairs seen once and twice. Behind a token that was never seen, q alone decides.
    """
    pairs, counts = np.unique(train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True)
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once else 0.0
    first, second = pairs // vocab_size, pairs % vocab_size
    total = np.bincount(first, weights=counts, minlength=vocab_size)  # c(v)
    different = np.bincount(first, minlength=vocab_size)  # n(v)
    endings = np.bincount(second, minlength=vocab_size) + 1.0
    ending = endings / endings.sum()  # q(w)

    wanted = before.astype(np.int64) * vocab_size + after
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    count = np.where(pairs[place] == wanted, counts[place], 0)
    seen = total[before] > 0
    denominator = np.where(seen, total[before], 1.0)
    direct = np.maximum(count - discount, 0.0) / denominator
    left_over = np.where(seen, discount * different[before] / denominator, 1.0)
    return np.log(direct + left_over * ending[after])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("train", help="dataset prefix to count on")
    parser.add_argument("validation", help="dataset prefix to measure on")
    parser.add_argument("--seq-length", type=int, required=True, help="tokens per sample, as evaluate.py has it")
    parser.add_argument("--vocab-size", type=int, help="ids there are (default: the largest in the data, and one)")
    args = parser.parse_args()
    try:
        train = np.asarray(IndexedDataset(args.train).tokens)
        samples = SequentialSamples(args.validation, args.seq_length)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    held_out = np.stack([samples[i] for i in range(len(samples))])
    vocab_size = args.vocab_size or int(max(train.max(), held_out.max())) + 1
    before, after = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    loss = -float(bigram_log_probabilities(train, before, after, vocab_size).mean())
    print(json.dumps({"loss": loss, "perplexity": math.exp(loss), "tokens": len(after)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
