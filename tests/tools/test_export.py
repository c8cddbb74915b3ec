"""tools/checkpoint_to_hf.py and tools/hf_to_checkpoint.py as programs: folders, last lines, one-sentence errors."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.checkpoint.models import native_checkpoint, small_config
from tests.data.tiny_tokenizers import write_gpt2

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The tool as a program of its own."""
    command = [sys.executable, str(TOOLS / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def call(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The tool's main in this process: the same result without seconds of imports."""
    path = TOOLS / f"{tool}.py"
    spec = importlib.util.spec_from_file_location(f"tool_{tool}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        code = module.main()
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tokenizer").mkdir()
    tokenizer = write_gpt2(folder / "tokenizer")
    return native_checkpoint(folder / "save", small_config(bf16=True, vocab_size=300), tokenizer=tokenizer)


def test_there_and_back(tmp_path: Path, checkpoint: Path) -> None:
    moved = tmp_path / "moved"
    checkpoint.rename(moved)  # a checkpoint may lie anywhere
    try:
        done = run("checkpoint_to_hf", "--load", moved, "--output", tmp_path / "hf", "--max-shard-size", "40KB")
    finally:
        moved.rename(checkpoint)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["class"] == "SimpleGPTForCausalLM"
    assert summary["dtype"] == "bfloat16"
    assert summary["tokenizer"] is True
    assert summary["files"] == sorted(path.name for path in (tmp_path / "hf").iterdir())
    needed = {
        "config.json", "generation_config.json", "configuration_simplegpt.py", "modeling_simplegpt.py", "tokenizer.json",
        "tokenizer_config.json", "vocab.json", "merges.txt", "README.md", "conversion.json", "model.safetensors.index.json",
    }  # fmt: skip
    assert needed <= set(summary["files"])
    assert "largest difference of logits" in done.stdout

    config = AutoConfig.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    generation = GenerationConfig.from_pretrained(tmp_path / "hf")
    assert config.eos_token_id == tokenizer.eos_token_id == generation.eos_token_id == generation.pad_token_id
    assert config.pad_token_id is None
    assert (tmp_path / "hf/README.md").read_text().startswith("---\nlibrary_name: transformers\n")

    done = run("hf_to_checkpoint", "--input", tmp_path / "hf", "--save", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["tokenizer"] is True
    assert summary["dtype"] == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf"]


def test_a_checkpoint_without_tokenizer_says_so(tmp_path: Path) -> None:
    native_checkpoint(tmp_path / "save", small_config())
    done = call("checkpoint_to_hf", "--load", tmp_path / "save", "--output", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert "holds no tokenizer" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["tokenizer"] is False
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["eos_token_id"] is None
    assert "tokenizer_class" not in config


def test_errors_are_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    out = ("--output", tmp_path / "out")
    assert_one_sentence(call("checkpoint_to_hf", "--load", checkpoint, *out, "--iteration", 3), "iteration 3")
    assert_one_sentence(call("checkpoint_to_hf", "--load", checkpoint, *out, "--max-shard-size", "big"), "--max-shard-size big")
    assert_one_sentence(call("checkpoint_to_hf", "--load", checkpoint, "--output", tmp_path / "full"), "--output")
    save = ("--save", tmp_path / "out")
    assert_one_sentence(call("hf_to_checkpoint", "--input", tmp_path / "full", *save), "--input", "no config.json")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert_one_sentence(run("checkpoint_to_hf", "--load", tmp_path / "nothing", *out), "--load", "no such folder")


def test_a_full_disk_is_told_with_the_path_and_leaves_nothing(tmp_path: Path, checkpoint: Path) -> None:
    tool = [sys.executable, str(TOOLS / "checkpoint_to_hf.py"), "--load", str(checkpoint), "--output", str(tmp_path / "hf")]
    done = subprocess.run(["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *tool], capture_output=True, text=True, timeout=120)
    assert_one_sentence(done, f"--output {tmp_path / 'hf'} cannot be written", "File too large")
    assert list(tmp_path.iterdir()) == []
