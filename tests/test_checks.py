"""What no run can have is refused at the start, by a message that names the flags and the cure."""

from __future__ import annotations

import pytest

from megatron_simple.arguments import parse_config
from megatron_simple.checks import resolve
from megatron_simple.config import Config, ConfigError

BASE = "--model llama2-cpu --vocab-size 100 --data-path p --train-iters 10 --seq-length 64"

# (ranks, flags, words of the message)
REFUSALS = [
    (1, "--hidden-size 100", ["--hidden-size 100", "--num-attention-heads 6"]),
    (1, "--num-query-groups 4", ["--num-attention-heads 6", "--num-query-groups 4"]),
    (1, "--hidden-size 18", ["rotary", "even"]),
    (1, "--norm-sites q_proj,qproj", ["--norm-sites", "'qproj'", "o_proj"]),
    (1, "--backbone nanogpt --rope-scaling llama3.1", ["--rope-scaling", "nanogpt"]),
    (3, "--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2", "3 started processes"]),
    (4, "--tensor-model-parallel-size 4", ["--num-attention-heads 6", "--tensor-model-parallel-size 4"]),
    (3, "--tensor-model-parallel-size 3 --num-query-groups 2", ["--num-query-groups 2", "--tensor-model-parallel-size 3"]),
    (3, "--tensor-model-parallel-size 3", ["--ffn-hidden-size 512", "--tensor-model-parallel-size 3"]),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63", ["--sequence-parallel", "--seq-length 63"]),
    (5, "--pipeline-model-parallel-size 5", ["--pipeline-model-parallel-size 5", "--num-layers 4"]),
    (2, "--pipeline-model-parallel-size 2 --pipeline-layers 1,2", ["--pipeline-layers 1,2", "--num-layers 4"]),
    (2, "--pipeline-model-parallel-size 2 --pipeline-layers 4", ["--pipeline-layers 4", "2 positive numbers"]),
    (2, "--pipeline-model-parallel-size 2 --pipeline-layers 4,0", ["--pipeline-layers 4,0"]),
    (2, "--pipeline-model-parallel-size 2 --zero-stage 0", ["--zero-stage 0", "--pipeline-model-parallel-size"]),
    (2, "--pipeline-model-parallel-size 2 --zero-stage 2", ["use --zero-stage 1"]),
    (2, "--pipeline-model-parallel-size 2 --zero-stage 3", ["use --zero-stage 1"]),
    (1, "--zero-stage 0", ["--zero-stage 0 with --bf16", "--fp32"]),
    (2, "--global-batch-size 3", ["--global-batch-size 3", "--micro-batch-size 1", "2 data-parallel ranks"]),
    (1, "--backbone nanogpt --max-position-embeddings 32", ["--seq-length 64", "--max-position-embeddings"]),
    (1, "--lr-warmup-iters 11", ["--lr-warmup-iters 11", "10 iterations"]),
    (1, "--min-lr 1", ["--min-lr 1.0", "--lr 0.001"]),
    (1, "--adam-beta1 1", ["--adam-beta1"]),
    (1, "--adam-beta2 -0.1", ["--adam-beta2"]),
    (1, "--train-tokens 1000", ["--train-iters", "--train-tokens"]),
    (1, "--train-data-path q", ["--data-path", "--train-data-path"]),
    (1, "--valid-data-path q", ["--valid-data-path", "--train-data-path"]),
    (1, "--resume", ["--resume", "--save"]),
    (1, "--save-interval 5", ["--save-interval", "--save"]),
    (1, "--keep-last 5", ["--keep-last", "--save"]),
    (1, "--attention-dropout 0.1", ["--attention-dropout", "no dropout"]),
    (1, "--hidden-dropout 0.1", ["--hidden-dropout", "no dropout"]),
    *((1, f"--{flag} 0", [f"--{flag} 0", "above 0"]) for flag in (
        "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "vocab-size",
        "make-vocab-size-divisible-by", "norm-epsilon", "tensor-model-parallel-size", "pipeline-model-parallel-size",
        "micro-batch-size", "global-batch-size", "seq-length", "train-iters", "adam-eps", "log-interval", "eval-interval",
        "exit-interval", "exit-duration-minutes", "distributed-timeout-minutes",
    )),
    *((1, f"--{flag} -1", [f"--{flag} -1", "negative"]) for flag in ("lr", "weight-decay", "clip-grad", "seed", "eval-iters")),
    *((1, f"--{flag} {value}", [f"--{flag} {value}", "finite"])
      for flag in ("lr", "norm-epsilon", "clip-grad", "weight-decay") for value in ("nan", "inf")),
]  # fmt: skip


def resolved(flags: str, ranks: int = 1) -> Config:
    return resolve(parse_config([*BASE.split(), *flags.split()]), world_size=ranks)


@pytest.mark.parametrize(("ranks", "flags", "words"), REFUSALS, ids=lambda value: str(value))
def test_refusals_name_the_flags(ranks: int, flags: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(flags, ranks)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_iterations_or_tokens_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--train-iters or --train-tokens"):
        resolve(parse_config(["--vocab-size", "10", "--data-path", "p"]), world_size=1)


def test_what_is_derived() -> None:
    config = resolved("--micro-batch-size 3 --tensor-model-parallel-size 2", 8)
    assert config.training.global_batch_size == 12
    tokens = "--vocab-size 10 --data-path p --train-tokens 10000 --seq-length 64 --global-batch-size 4"
    assert resolve(parse_config(tokens.split()), world_size=1).training.train_iters == 10000 // (4 * 64)


@pytest.mark.parametrize(("vocabulary", "tp", "rows"), [(100, 1, 128), (128, 2, 128), (129, 2, 256), (100, 3, 384)])
def test_vocabulary_rows_are_a_multiple_of_both(vocabulary: int, tp: int, rows: int) -> None:
    assert resolved(f"--vocab-size {vocabulary}").model.padded_vocab_size(tp) == rows
