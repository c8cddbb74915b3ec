"""Turns a native checkpoint of any layout into a Hugging Face folder and compares the two before it is put in place."""

import argparse
import json
import sys


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The weights are streamed tensor by tensor; the check holds one model in fp32 in memory (4 bytes a parameter) "
        "at a time. The last line of stdout is a JSON object: output, class, iteration, dtype, parameters, "
        "logits_difference (null without the check), tokenizer (whether there is a tokenizer.json), files. Until all is "
        "written and checked it lies in OUTPUT.partial. Exit status 0 only when the folder is there.",
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="a run's --save folder, or one checkpoint in it")
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint to take from --load (default: the newest)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; must not exist or be empty")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="type of the stored weights (default: the training dtype)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file, as 5GB or 2GiB (default: %(default)s)"
    )
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false", help="skip the comparison with the training model's logits"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    from megatron_simple.checkpoint.export import ExportSettings, export

    try:
        summary = export(ExportSettings(**vars(args)), say=lambda text: print(text, flush=True))
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
