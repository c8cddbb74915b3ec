"""The closing table of examples/quickstart.sh, from the files that its steps left in OUT.

    python examples/quickstart_table.py OUT --seconds N [--demand]

With --demand it exits 1 unless SimpleGPT's validation perplexity is below the bigram model's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

NAMES = {"simplenorm": "SimpleGPT (simplenorm)", "qknorm": "baseline (prenorm + QKNorm)"}


def training_rows(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "loss" in row]


def row(out: Path, placement: str) -> list[str]:
    rows = training_rows(out / placement)
    evaluation = json.loads((out / placement / "evaluation.json").read_text())
    speed = statistics.median(entry["tokens_per_second"] for entry in rows)
    numbers = [rows[0]["loss"], rows[-1]["loss"], evaluation["loss"], evaluation["perplexity"]]
    return [NAMES[placement], *(f"{number:.3f}" for number in numbers), f"{speed:,.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the quickstart's folder")
    parser.add_argument("--seconds", type=int, required=True, help="time since the set-up was done")
    parser.add_argument("--demand", action="store_true", help="exit 1 unless SimpleGPT beats the bigram model")
    args = parser.parse_args()
    bigram = json.loads((args.out / "bigram.json").read_text())
    first = training_rows(args.out / "simplenorm")[0]["iteration"]
    table = [
        ["model", f"loss at step {first}", "loss at the end", "validation loss", "validation perplexity", "tokens/s"],
        *(row(args.out, placement) for placement in NAMES),
        ["bigram (Kneser-Ney)", "", "", f"{bigram['loss']:.3f}", f"{bigram['perplexity']:.3f}", ""],
    ]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for number, line in enumerate(table):
        print(
            "| "
            + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            + " |"
        )
        if number == 0:
            print("|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|")
    print(f"\n{args.seconds} seconds after the set-up. The files:")
    for name, what in FILES:
        print(f"  {args.out / name}  {what}")
    perplexity = json.loads((args.out / "simplenorm" / "evaluation.json").read_text())["perplexity"]
    if args.demand and perplexity >= bigram["perplexity"]:
        print(
            f"error: SimpleGPT's perplexity {perplexity:.3f} is not below the bigram's {bigram['perplexity']:.3f}",
            file=sys.stderr,
        )
        return 1
    return 0


FILES = (
    ("corpus", "the documents"),
    ("data", "the datasets (.bin, .idx)"),
    ("simplenorm, qknorm", "checkpoints, metrics.jsonl, TensorBoard events, config.yaml"),
    ("simplegpt-hf", "the exported model, for transformers"),
)

if __name__ == "__main__":
    sys.exit(main())
