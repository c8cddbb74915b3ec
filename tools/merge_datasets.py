"""Joins datasets into one, in the order given: the same bytes as one run of preprocess_data.py over all of the input.

All inputs must come from one tokenizer. An existing output is replaced when the new one is complete.
"""

import argparse
import sys

from tqdm import tqdm

from megatron_simple.data.indexed_dataset import IndexedDataset, join_datasets, pair_paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-prefix", nargs="+", required=True, metavar="P", help="prefixes of the datasets")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx")
    args = parser.parse_args()
    try:
        total = sum(IndexedDataset(prefix).tokens.nbytes for prefix in args.input_prefix)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
            join_datasets(args.input_prefix, args.output_prefix, progress=bar.update)
        merged = IndexedDataset(args.output_prefix)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    names = " and ".join(str(path) for path in pair_paths(args.output_prefix))
    print(f"wrote {names}: {merged.num_documents:,} documents, {merged.num_tokens:,} tokens, {merged.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
