"""The loss of a native checkpoint on a dataset: mean over all tokens, samples in file order, nothing shuffled.

    python tools/evaluate.py --load DIR --data-path P --seq-length S      (under torchrun with the parallel flags too)

Sample i is tokens [i*S, i*S + S] of all documents joined in file order; the last partial sample is dropped. The last line
of stdout is a JSON object: {"loss" [nats per token], "perplexity", "tokens"}.
"""

from __future__ import annotations

import argparse
import json
import sys

from megatron_simple.arguments import add_settings
from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.parallel.mesh import build_mesh, discover_process, start_distributed, stop_distributed
from megatron_simple.pretrain import report


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, metavar="DIR", help="--save folder of a run, or one checkpoint in it")
    parser.add_argument("--iteration", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument("--data-path", required=True, nargs="+", metavar="PREFIX", help="dataset prefixes, in this order")
    parser.add_argument("--seq-length", type=int, help="tokens per sample S (default: the run's)")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples per forward pass (default: 8)")
    dtype = parser.add_mutually_exclusive_group()
    dtype.add_argument("--bf16", action="store_const", const=True, dest="bf16", help="evaluate in bf16")
    dtype.add_argument("--fp32", action="store_const", const=False, dest="bf16", help="in fp32 (default: as trained)")
    add_settings(parser, ["parallel"])
    return parser.parse_args(arguments)


def main() -> int:
    process = discover_process()
    given = {name: value for name, value in vars(parse()).items() if value is not None}
    try:
        from megatron_simple.training.evaluation import evaluate, evaluation_config

        with CheckpointReader(given["load"], iteration=given.get("iteration")) as reader:
            config = evaluation_config(reader.config, given, world_size=process.world_size)
            device = start_distributed(process, timeout_minutes=config.parallel.distributed_timeout_minutes)
            mesh = build_mesh(config.parallel, process, device)
            result = evaluate(reader, config, mesh, prefixes=given["data_path"])
        if mesh.is_writer:
            print(json.dumps(result), flush=True)
        return 0
    except (ValueError, OSError) as error:
        report(process, f"error: {error}")
        return 1
    finally:
        stop_distributed()


if __name__ == "__main__":
    sys.exit(main())
