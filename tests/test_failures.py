"""What a user can get wrong ends the whole launch with one sentence that names the flag or file, and a non-zero code."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_simple import pretrain
from megatron_simple.data.tokenizer_training import TrainingSettings, train_tokenizer
from tests.data.dataset_files import write_dataset
from tests.data.tiny_tokenizers import write_gpt2, write_ranks
from tests.tools.test_export import assert_one_sentence, run

ROOT = Path(__file__).parents[1]
GUARD_SECONDS = 120  # against a hang; nothing here takes a tenth of it on an idle machine


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 600 tokens below 250, and one file of each tokenizer format."""
    folder = tmp_path_factory.mktemp("files")
    write_dataset(folder / "data", [[(i * 31 + j * 7) % 250 for j in range(60)] for i in range(10)])
    write_gpt2(folder)
    write_ranks(folder / "ranks.tiktoken")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog 0123456789\n" * 50)
    train_tokenizer(TrainingSettings([text], folder / "tok", 300))
    return folder


def launch(files: Path, *flags: str, ranks: int = 2, wait: bool = True) -> subprocess.Popen | subprocess.CompletedProcess:
    """pretrain under torchrun with a tiny model; the last of equal flags wins."""
    base = ["--model", "llama2-tiny", "--vocab-size", "250", "--train-data-path", str(files / "data"), "--seq-length", "16"]
    base += ["--train-iters", "2", "--fp32", "--eval-iters", "0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "megatron_simple.pretrain", *base, *flags]
    settings = {"text": True, "cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    if wait:
        return subprocess.run(command, capture_output=True, timeout=GUARD_SECONDS, **settings)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)


def own_lines(stderr: str) -> list[str]:
    """What our processes said: all of stderr before torchrun's report of the failure."""
    lines = stderr.split("Traceback (most recent call last)")[0].splitlines()
    return [line for line in lines if line and "torch/distributed/" not in line]


def failing(files: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    """The one sentence of a single-process run that is refused."""
    base = ["--model", "llama2-tiny", "--vocab-size", "250", "--train-data-path", str(files / "data"), "--seq-length", "16"]
    assert pretrain.main([*base, "--train-iters", "2", "--fp32", "--eval-iters", "0", *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


Damage = Callable[[Path], None]


def truncate(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 9)


def other_pair(folder: Path) -> None:
    write_dataset(folder / "other", [[1, 2, 3]])
    os.replace(folder / "other.bin", folder / "data.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate("data.idx"), ["data.idx"]),
        (truncate("data.bin"), ["data.bin"]),
        (other_pair, ["data.bin"]),
        (lambda folder: (folder / "data.bin").unlink(), ["data.bin", "no such file"]),
        (lambda folder: (folder / "data.idx").write_bytes(b"MMIDIDX"), ["data.idx"]),
        (lambda folder: (folder / "data.idx").write_bytes(b""), ["data.idx"]),
    ],
)
def test_a_broken_dataset(tmp_path: Path, capsys: pytest.CaptureFixture, damage: Damage, words: list[str]) -> None:
    write_dataset(tmp_path / "data", [[(i * 31 + j * 7) % 250 for j in range(60)] for i in range(10)])
    damage(tmp_path)
    said = failing(tmp_path, capsys)
    assert all(word in said for word in words), said


SINGLE = [
    (["--train-data-path", "nowhere/data"], ["nowhere/data.idx", "no such file"]),
    (["--valid-data-path", "nowhere/data"], ["nowhere/data.idx", "no such file"]),
    (["--seq-length", "1000"], ["600 tokens", "--seq-length"]),
    (["--vocab-size", "50"], ["token id", "--vocab-size"]),
    (["--load", "nowhere"], ["--load nowhere", "no such folder"]),
    (["--save", "FILES/data.bin/x"], ["--save", "cannot be written"]),
    (["--log-dir", "FILES/data.bin/x"], ["--log-dir", "cannot be written"]),
    (["--data-cache-path", "FILES/data.bin/x"], ["--data-cache-path"]),
    (["--config", "nowhere.yaml"], ["--config nowhere.yaml"]),
    (["--tokenizer-model", "FILES/tok.model"], ["--tokenizer-model needs --tokenizer-type"]),
    (["--tokenizer-type", "Llama", "--tokenizer-model", "x"], ["--tokenizer-type Llama", "SentencePieceTokenizer"]),
    (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "nowhere"], ["--tokenizer-model nowhere"]),
    (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "FILES/tok.model"],
     ["300 ids", "250 rows", "--vocab-size 300"]),
    (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "FILES/ranks.tiktoken"],
     ["ranks.tiktoken", "--tokenizer-type TikTokenizer"]),
    (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "FILES/vocab.json"],
     ["vocab.json", "--tokenizer-type GPT2BPETokenizer"]),
    (["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "gpt2", "--tokenizer-model", "FILES/tok.model"],
     ["tok.model", "--tokenizer-type SentencePieceTokenizer"]),
    (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "FILES/tok.model"],
     ["tok.model", "--tokenizer-type SentencePieceTokenizer"]),
    (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "FILES/tok.model", "--merge-file", "FILES/merges.txt"],
     ["tok.model", "--tokenizer-type SentencePieceTokenizer"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "words"), SINGLE, ids=lambda value: " ".join(value))
def test_one_process(files: Path, capsys: pytest.CaptureFixture, flags: list[str], words: list[str]) -> None:
    said = failing(files, capsys, *(flag.replace("FILES", str(files)) for flag in flags))
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train-data-path", "nowhere"], ["nowhere.idx"]),  # found by rank 0, while the others wait for it
        (
            ["--tensor-model-parallel-size", "2", "--ffn-hidden-size", "191"],
            ["--ffn-hidden-size 191", "--tensor-model-parallel-size 2"],
        ),  # by all
        (["--vocab-size", "50", "--pipeline-model-parallel-size", "2"], ["token id"]),  # at the first batch
    ],
    ids=["rank 0", "all ranks", "first batch"],
)
def test_a_whole_launch_ends_with_one_sentence(files: Path, flags: list[str], words: list[str]) -> None:
    done = launch(files, *flags)
    assert done.returncode != 0
    (said,) = own_lines(done.stderr)
    assert said.startswith("error: ")
    assert all(word in said for word in words), said
    assert f"traceback : {said}" in done.stderr  # torchrun's own report names the reason too


def test_a_rank_that_dies_ends_the_launch(files: Path) -> None:
    running = launch(files, "--train-iters", "100000", wait=False)
    try:
        seen = ""
        while "iteration      5/" not in seen:
            line = running.stdout.readline()
            assert line, running.stderr.read()
            seen += line
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        begun = time.monotonic()
        _, errors = running.communicate(timeout=GUARD_SECONDS)
        assert time.monotonic() - begun < 60
        assert running.returncode != 0
        assert "SIGKILL" in errors
    finally:
        running.kill()


TOOLS = [
    ("preprocess_data", ["--input", "nowhere/*.jsonl", "--output-prefix", "OUT/x", "--tokenizer-type", "GPT2BPETokenizer",
                         "--vocab-file", "FILES/vocab.json", "--merge-file", "FILES/merges.txt"], ["nowhere/*.jsonl"]),
    ("preprocess_data", ["--input", "FILES/cut.jsonl.gz", "--output-prefix", "OUT/x", "--tokenizer-type", "GPT2BPETokenizer",
                         "--vocab-file", "FILES/vocab.json", "--merge-file", "FILES/merges.txt"], ["cut.jsonl.gz"]),
    ("train_tokenizer", ["--input", "nowhere", "--vocab-size", "300", "--output", "OUT/x"], ["nowhere"]),
    ("train_tokenizer", ["--input", "FILES/text.txt", "--vocab-size", "90000", "--output", "OUT/x"], ["--vocab-size 90000"]),
    ("merge_datasets", ["--input-prefix", "nowhere", "--output-prefix", "OUT/x"], ["nowhere.idx"]),
    ("inspect_dataset", ["nowhere"], ["nowhere.idx"]),
    ("evaluate", ["--load", "nowhere", "--data-path", "x"], ["--load nowhere"]),
    ("generate", ["--load", "nowhere", "--prompt", "x"], ["--load nowhere"]),
    ("checkpoint_to_hf", ["--load", "nowhere", "--output", "OUT/x"], ["--load nowhere"]),
    ("hf_to_checkpoint", ["--input", "nowhere", "--save", "OUT/x"], ["nowhere"]),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "flags", "words"), TOOLS, ids=lambda value: value if isinstance(value, str) else "")
def test_tools(files: Path, tmp_path: Path, tool: str, flags: list[str], words: list[str]) -> None:
    whole = gzip.compress(b'{"text": "hello world"}\n' * 2000)
    (files / "cut.jsonl.gz").write_bytes(whole[:-20])
    done = run(tool, *(flag.replace("FILES", str(files)).replace("OUT", str(tmp_path)) for flag in flags))
    assert_one_sentence(done, *words)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".partial")]
