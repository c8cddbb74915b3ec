"""Real text at five layouts: 40 steps on 1,000 C4 documents give the same losses, norms, exported logits and evaluation.

Needs the folder MEGATRON_SIMPLE_TEST_DATA. The figures it measures are the README's. Layouts differ by fp32 rounding alone
(against float64 a step's gradients are equally far off at TP 1 and TP 2, about 7e-7), which training magnifies with the
learning rate and at steps with outlier gradients: at 3e-4 it stays small for 40 steps.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron_simple.data.loader import SequentialSamples
from tests.data.dataset_files import write_dataset
from tests.tools.test_export import call, run
from tests.training.runs import launch, rows

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
pytestmark = pytest.mark.skipif(SHARED is None, reason="MEGATRON_SIMPLE_TEST_DATA is not set")

TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
LAYOUTS = {
    "one process": (1, []),
    "TP 2 x PP 2": (4, [*TP2, *PP2]),
    "TP 2 x DP 2, ZeRO 1": (4, [*TP2, "--zero-stage", "1"]),
    "DP 2, ZeRO 3": (2, ["--zero-stage", "3"]),
    "TP 2, sequence parallel": (2, [*TP2, "--sequence-parallel"]),
}
OTHERS = list(LAYOUTS)[1:]
SAMPLES = 24


def training(data: Path, folder: Path, *layout: str) -> list[str]:
    sizes = "--backbone llama2 --norm-placement simplenorm --num-layers 4 --hidden-size 128 --num-attention-heads 4 --fp32"
    run = "--seq-length 128 --global-batch-size 4 --train-iters 40 --lr 3e-4 --lr-warmup-iters 4 --eval-iters 0"
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{SHARED}/tokenizers/mistral-v1.model"]
    folders = ["--data-path", f"{data}_text_document", "--save", str(folder), "--log-dir", str(folder)]
    return [*sizes.split(), *run.split(), *tokenizer, *folders, *layout]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("c4") / "c4"
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{SHARED}/tokenizers/mistral-v1.model"]
    source = ["--input", f"{SHARED}/data/c4-1000.jsonl", "--output-prefix", prefix, "--append-eod", "--workers", "2"]
    done = run("preprocess_data", *source, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["documents"] == 1000
    return prefix


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Path]:
    """The --save folder of every layout, each with its exported folder `hf` beside."""
    root = tmp_path_factory.mktemp("runs")
    folders = {}
    for number, (name, (ranks, layout)) in enumerate(LAYOUTS.items()):
        folders[name] = root / f"run-{number}"
        launch(ranks, training(data, folders[name], *layout))
        done = call("checkpoint_to_hf", "--load", folders[name], "--output", folders[name] / "hf")
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("layout", OTHERS)
def test_losses_and_norms_at_every_step(runs: dict[str, Path], layout: str) -> None:
    found, wanted = rows(runs[layout]), rows(runs["one process"])
    assert len(wanted) == 40
    assert wanted[-1]["loss"] < wanted[0]["loss"] - 1  # it learns, so the steps matter
    losses = [abs(f["loss"] - w["loss"]) for f, w in zip(found, wanted, strict=True)]
    norms = [abs(f["grad_norm"] / w["grad_norm"] - 1) for f, w in zip(found, wanted, strict=True)]
    print(f"{layout}: loss {max(losses):.1e}, gradient norm {max(norms):.1e} relative")
    assert max(losses) <= 1e-5
    assert max(norms) <= 3e-5


@pytest.fixture(scope="module")
def samples(data: Path) -> torch.Tensor:
    """int64 [24, 129], the first that evaluate.py takes."""
    sequence = SequentialSamples(f"{data}_text_document", 128)
    return torch.stack([torch.as_tensor(sequence[i]) for i in range(SAMPLES)]).long()


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", trust_remote_code=True)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("layout", OTHERS)
def test_exported_logits(runs: dict[str, Path], samples: torch.Tensor, layout: str) -> None:
    found, wanted = (logits(runs[name], samples[:4, :-1]) for name in (layout, "one process"))
    assert wanted.abs().max() > 1
    difference = (found - wanted).abs().max().item()
    print(f"{layout}: logits {difference:.1e}")
    assert difference <= 1e-5


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_evaluate_equals_the_exported_models_own_loss(
    tmp_path: Path, runs: dict[str, Path], samples: torch.Tensor, layout: str
) -> None:
    joined = torch.cat([samples[0, :1], samples[:, 1:].flatten()])  # samples overlap by one token
    write_dataset(tmp_path / "held", [joined.tolist()])
    flags = ["--data-path", tmp_path / "held", "--seq-length", "128", "--micro-batch-size", "4"]
    done = call("evaluate", "--load", runs[layout], *flags)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    found = torch.cat([logits(runs[layout], part[:, :-1]) for part in samples.split(8)])
    wanted = F.cross_entropy(found.double().flatten(0, 1), samples[:, 1:].flatten()).item()
    print(f"{layout}: evaluation {abs(said['loss'] - wanted):.1e}")
    assert said["tokens"] == SAMPLES * 128
    assert said["loss"] == pytest.approx(wanted, abs=1e-5)
    assert said["perplexity"] == pytest.approx(math.exp(said["loss"]))
