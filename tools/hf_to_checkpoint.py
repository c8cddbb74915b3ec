"""Turns a Hugging Face folder (Llama, GPT-2, OLMo 2, or an export of ours) into a native checkpoint of weights."""

import argparse
import json
import sys


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The checkpoint has no layout: it can be trained (--load) in any tensor, pipeline and data parallelism. The "
        "parallel sizes are only checked against the model's heads and layers. The last line of stdout is a JSON object: "
        "save, class, tensors, dtype (which checkpoint_to_hf will take by default), logits_difference (null without the "
        "check), tokenizer. Exit status 0 only when the checkpoint is there.",
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with config.json and .safetensors files")
    parser.add_argument("--save", required=True, metavar="DIR", help="folder to make; must not exist or be empty")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, metavar="TP", help="checked against the model (default: 1)"
    )
    parser.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, metavar="PP", help="checked against the model (default: 1)"
    )
    parser.add_argument(
        "--no-verify", dest="verify", action="store_false", help="skip the comparison of logits with transformers"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    from megatron_simple.checkpoint.import_folder import ImportSettings, import_folder

    try:
        summary = import_folder(ImportSettings(**vars(args)), say=lambda text: print(text, flush=True))
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
