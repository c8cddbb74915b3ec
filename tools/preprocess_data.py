"""Turns raw text into a tokenized dataset: P_<key>_document.bin and .idx for each key."""

import argparse
import json
import os
import sys


def parse_arguments() -> argparse.Namespace:
    from megatron_simple.data.tokenizer import add_tokenizer_arguments

    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The last line of stdout is a JSON object: documents and tokens written, records skipped, documents "
        "empty (without tokens, dropped), bytes_read (decompressed), seconds, replaced_surrogates, eod; with several "
        "keys also by_key. Unfinished work lies in P.partial; existing outputs are replaced when the new ones are "
        "complete. Exit status 0 only then.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (walked) or globs of .jsonl .json .txt .parquet, each plain or with .gz or .zst",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="beginning of the output files' names")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to tokenize (default: text)"
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the tokenizer's eod token")
    parser.add_argument("--prepend-bos", action="store_true", help="begin each document with the tokenizer's bos token")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="worker processes; the output is the same for any number (default: the cores this process may use, %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="at a bad record stop and name it, or drop it and list it in P.skipped.jsonl (default: fail)",
    )
    add_tokenizer_arguments(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    from megatron_simple.data.preprocess import PreprocessSettings, preprocess
    from megatron_simple.data.tokenizer import tokenizer_settings

    try:
        settings = PreprocessSettings(
            inputs=args.input,
            output_prefix=args.output_prefix,
            tokenizer=tokenizer_settings(args),
            json_keys=args.json_keys,
            append_eod=args.append_eod,
            prepend_bos=args.prepend_bos,
            workers=args.workers,
            on_error=args.on_error,
        )
        summary = preprocess(settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
