"""The scripts in examples/: the launcher's command, the quickstart's corpus and bigram, and the whole road in short."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.bigram_perplexity import bigram_log_probabilities
from examples.standard_library_corpus import documents
from megatron_simple.arguments import parse_config
from megatron_simple.checks import resolve
from megatron_simple.config import ConfigError
from tests.data.dataset_files import write_dataset

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "examples" / "pretrain_simplegpt_7b.sh"


def bash(script: Path, *arguments: str, timeout: int = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment})


def dry_run(*arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    """The words of the printed command before and behind the module's name."""
    done = bash(LAUNCHER, "--dry-run", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    at = words.index("megatron_simple.pretrain")
    return words[:at], words[at + 1 :]


@pytest.mark.parametrize(("nodes", "norm"), [(1, "simplenorm"), (8, "simplenorm"), (2, "qknorm"), (4, "prenorm")])
def test_the_launcher_starts_the_papers_run(nodes: int, norm: str) -> None:
    torchrun, flags = dry_run(NNODES=str(nodes), NODE_RANK="0", NORM=norm)
    assert f"--nnodes {nodes} --node-rank 0 --nproc-per-node 8" in " ".join(torchrun)
    config = resolve(parse_config(flags), world_size=8 * nodes)
    model, training = config.model, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size) == (32, 4096, 32, 11008)
    assert (model.norm_placement, training.bf16, training.clip_grad) == (norm, True, 1.0)
    assert (training.seq_length, training.global_batch_size, training.train_iters) == (2048, 192, 20_000)
    assert (training.weight_decay, training.weight_decay_on, training.lr_decay_style) == (0.05, "matrices", "cosine")
    assert training.lr == pytest.approx(1e-3 if norm == "simplenorm" else 1e-3 / 3, rel=1e-12)


def test_later_flags_win_and_the_layout_follows_the_environment() -> None:
    _, flags = dry_run("--lr", "3e-4", "--train-iters", "40000", TP="4", PP="2", MICRO="1", RECIPE="code")
    config = resolve(parse_config(flags), world_size=16)
    assert (config.training.lr, config.training.train_iters) == (3e-4, 40_000)
    assert (config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size) == (4, 2)
    assert (config.training.lr_decay_style, config.training.weight_decay_on) == ("linear", "all")


def test_words_with_spaces_stay_whole() -> None:
    _, flags = dry_run(DATA="/data/my corpus", TOKENIZER="/data/my tok.model")
    assert parse_config(flags).data.data_path == ("/data/my corpus",)


@pytest.mark.parametrize(("missing", "given"), [("DATA", {}), ("TOKENIZER", {"DATA": "x"})])
def test_the_launcher_names_what_is_missing(missing: str, given: dict[str, str]) -> None:
    done = bash(LAUNCHER, **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: set {missing} (see --help)\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--recipe", "paper"], ["--model", "llama2-7b"]),
        (["--recipe", "paper", "--model", "llama2-cpu"], ["--model", "llama2-7b"]),
        (["--recipe", "paper", "--model", "gpt2-1.4b"], ["no learning rate", "give --lr"]),
    ],
)
def test_a_recipe_that_is_not_there(flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(flags)
    assert all(word in str(caught.value) for word in words)


def test_a_recipe_by_tokens_and_over_a_file_is_the_users() -> None:
    config = parse_config(["--recipe", "paper", "--model", "gpt2-1.4b", "--lr", "1e-3", "--train-tokens", "5000000000"])
    assert (config.training.train_iters, config.training.train_tokens) == (None, 5_000_000_000)
    assert (config.training.lr, config.training.lr_warmup_iters, config.training.global_batch_size) == (1e-3, 2000, 480)


def test_the_bigram_model_by_hand() -> None:
    """a b a b a c: pairs ab 2, ba 2, ac 1, so n1 = 1, n2 = 2, D = 1 / 5; endings a 1, b 1, c 1, one added to each of 4."""
    a, b, c, d = range(4)
    train = np.array([a, b, a, b, a, c])
    before, after = np.array([a, a, a, b, c]), np.array([b, c, d, a, a])
    q = np.array([2, 2, 2, 1]) / 7
    wanted = [
        (2 - 0.2) / 3 + 0.2 * 2 / 3 * q[b],
        (1 - 0.2) / 3 + 0.2 * 2 / 3 * q[c],
        0.2 * 2 / 3 * q[d],
        (2 - 0.2) / 2 + 0.2 * 1 / 2 * q[a],
        q[a],  # nothing was seen behind c
    ]
    assert np.exp(bigram_log_probabilities(train, before, after, 4)) == pytest.approx(wanted, rel=1e-12)
    for first in range(4):
        whole = np.exp(bigram_log_probabilities(train, np.full(4, first), np.arange(4), 4)).sum()
        assert whole == pytest.approx(1.0, rel=1e-12)


def test_the_bigram_program_measures_what_evaluate_measures(tmp_path: Path) -> None:
    tokens = [(i * i) % 7 for i in range(100)]
    write_dataset(tmp_path / "train", [tokens])
    write_dataset(tmp_path / "held", [tokens[:31], tokens[31:50]])
    program = [sys.executable, str(ROOT / "examples" / "bigram_perplexity.py")]
    done = subprocess.run(
        [*program, str(tmp_path / "train"), str(tmp_path / "held"), "--seq-length", "8", "--vocab-size", "7"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    before, after = np.array(tokens[:48]), np.array(tokens[1:49])  # six whole samples of the fifty tokens
    loss = -bigram_log_probabilities(np.array(tokens), before, after, 7).mean()
    assert said == {"loss": pytest.approx(loss), "perplexity": pytest.approx(math.exp(loss)), "tokens": 48}


def test_the_corpus_is_the_modules_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "b.py": "x = 1\n",
        "a/c.py": '"""é"""\n',
        "a/tests/t.py": "y",
        "site-packages/p.py": "z",
        "empty.py": " \n",
        "n.txt": "n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert documents(tmp_path) == [("a/c.py", files["a/c.py"]), ("b.py", files["b.py"])]


@pytest.mark.parametrize("flags", [["--nothing"], ["--iterations"], ["--iterations", "0"], ["--iterations", "many"]])
def test_quickstart_refuses_wrong_options(tmp_path: Path, flags: list[str]) -> None:
    done = bash(ROOT / "examples" / "quickstart.sh", *flags, OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_the_quickstart_in_short(tmp_path: Path) -> None:
    """The real script with 20 steps instead of 300, twice: the second time everything but the closing steps is kept."""
    out = tmp_path / "out"
    script = ROOT / "examples" / "quickstart.sh"
    done = bash(script, "--iterations", "20", timeout=400, OUT=str(out))
    assert done.returncode == 0, done.stderr
    for name in ("SimpleGPT (simplenorm)", "baseline (prenorm + QKNorm)", "bigram (Kneser-Ney)"):
        assert f"| {name}" in done.stdout
    for norm in ("simplenorm", "qknorm"):
        rows = [json.loads(line) for line in (out / norm / "metrics.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        assert len(losses) == 20
        assert losses[-1] < losses[0] - 1
        assert (out / norm / "iter_0000020" / "checkpoint.json").is_file()
    assert {"config.json", "model.safetensors", "tokenizer.json", "modeling_simplegpt.py"} <= {
        path.name for path in (out / "simplegpt-hf").iterdir()
    }
    assert (
        json.loads((out / "bigram.json").read_text())["tokens"]
        == json.loads((out / "simplenorm" / "evaluation.json").read_text())["tokens"]
    )
    again = bash(script, "--iterations", "30", OUT=str(out))
    assert again.returncode == 1
    assert "holds a run of 20 iterations, not 30" in again.stderr
