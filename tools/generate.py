"""Writes text with a native checkpoint or an exported folder."""

import argparse
import json
import sys


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Each prompt is printed with the text that follows it. The last line of stdout is a JSON object: prompt, text "
        "(what follows the prompt), tokens (the new token ids, with the end of the document if it was reached); with "
        "several prompts those of the first, and all of them in a list under generations.",
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="a --save folder, one checkpoint, or an exported folder")
    parser.add_argument("--iteration", type=int, metavar="N", help="checkpoint to take from --load (default: the newest)")
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest text (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the fewest tokens that hold P of the probability")
    parser.add_argument("--seed", type=int, default=1234, metavar="S", help="of the draws (default: %(default)s)")
    return parser.parse_args()


def show(text: str) -> None:
    print(text, end="", flush=True)


def main() -> int:
    args = parse_arguments()
    from megatron_simple.checkpoint.text_model import load_text_model
    from megatron_simple.model.generation import Sampling

    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        model = load_text_model(args.load, iteration=args.iteration)
        generations = []
        for prompt in args.prompt:
            print(prompt, end="", flush=True)
            text, tokens = model.write(prompt, max_new_tokens=args.max_new_tokens, sampling=sampling, show=show)
            print(flush=True)
            generations.append({"prompt": prompt, "text": text, "tokens": tokens})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    several = {"generations": generations} if len(generations) > 1 else {}
    print(json.dumps({**generations[0], **several}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
