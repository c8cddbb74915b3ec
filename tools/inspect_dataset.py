"""Verifies a dataset pair and prints what it holds; exits non-zero where the pair is broken.

The last line of standard output is a JSON object with the numbers.
"""

import argparse
import json
import sys

from tqdm import tqdm

from megatron_simple.data.dataset_summary import documents_as_text, summarise
from megatron_simple.data.indexed_dataset import IndexedDataset
from megatron_simple.data.tokenizer import add_tokenizer_arguments, build_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", help="dataset prefix: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--documents", type=int, default=0, metavar="N", help="show the first N documents (default 0)")
    add_tokenizer_arguments(parser)
    args = parser.parse_args()
    try:
        dataset = IndexedDataset(args.prefix)
        tokenizer = build_tokenizer(args) if args.tokenizer_type else None
        with tqdm(total=dataset.num_tokens, unit="token", unit_scale=True, disable=None) as bar:
            summary = summarise(dataset, progress=bar.update)
        for name, value in summary.items():
            print(f"{name:18} {value:,}" if isinstance(value, int) else f"{name:18} {value}")
        for text in documents_as_text(dataset, args.documents, tokenizer=tokenizer):
            print(text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
