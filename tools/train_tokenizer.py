"""Trains a SentencePiece tokenizer with Llama-2's settings on raw text and writes P.model and P.vocab."""

import argparse
import json
import sys
import time


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The last line of stdout is a JSON object: vocab_size, documents, bytes_read (UTF-8 bytes of text), "
        "seconds. The same text gives the same model. The trainer holds the text it reads in memory (several times "
        "its size): limit it with --sample-bytes for a large corpus.",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders (walked) or globs of .jsonl .json .txt .parquet, each plain or with .gz or .zst",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="V", help="tokens, special ones included")
    parser.add_argument("--output", dest="output_prefix", required=True, metavar="P", help="writes P.model and P.vocab")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read (default: text)"
    )
    parser.add_argument("--max-documents", type=int, metavar="N", help="read the first N documents only")
    parser.add_argument(
        "--sample-bytes", type=int, metavar="B", help="stop reading at the document that reaches B bytes of text"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    from megatron_simple.data.tokenizer_training import TrainingSettings, train_tokenizer

    started = time.monotonic()
    try:
        summary = train_tokenizer(TrainingSettings(**vars(args)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(json.dumps(summary | {"seconds": round(time.monotonic() - started, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
