"""tools/generate.py: the same text from a checkpoint and from its export; refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatron_simple.hf  # noqa: F401
from megatron_simple.checkpoint.export import ExportSettings, export
from megatron_simple.checkpoint.text_model import load_text_model
from megatron_simple.model.generation import Sampling
from tests.checkpoint.models import GPT2, native_checkpoint, small_config
from tests.data.tiny_tokenizers import write_gpt2
from tests.tools.test_export import assert_one_sentence, call, run


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    model = GPT2 if request.param == "gpt2" else {}
    tokenizer = write_gpt2(root)
    # as many rows as ids, so that every id of a random model is one of the tokenizer's
    ids = len(json.loads((root / "vocab.json").read_text()))
    native_checkpoint(root / "save", small_config(bf16=True, vocab_size=ids, **model), tokenizer=tokenizer)
    export(ExportSettings(str(root / "save"), str(root / "hf"), verify=False), say=lambda text: None)
    return root / "save", root / "hf"


def test_checkpoint_export_and_transformers_write_the_same(folders: tuple[Path, Path]) -> None:
    native, exported = (load_text_model(folder) for folder in folders)
    greedy = {"max_new_tokens": 12, "sampling": Sampling()}
    text, ids = native.write("hello world", **greedy)
    pieces: list[str] = []
    assert exported.write("hello world", **greedy, show=pieces.append) == (text, ids)
    assert "".join(pieces) == text
    assert native.tokenizer.decode(native.tokenizer.encode("hello world").tolist() + ids).startswith("hello world" + text)
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32, trust_remote_code=False)
    prompt = torch.tensor([native.tokenizer.encode("hello world").tolist()])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert output[0, prompt.shape[1] :].tolist() == ids
    drawn = {"max_new_tokens": 12, "sampling": Sampling(1.0, top_k=20, top_p=0.95)}
    assert native.write("he", **drawn) == exported.write("he", **drawn)
    assert len(native.write("", **greedy)[1]) > 0  # an empty prompt begins a document


def test_positions_are_a_limit_only_where_they_are_learned(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        model = load_text_model(folder)
        if model.limit is None:
            assert len(model.write("hello" * 10, max_new_tokens=45, sampling=Sampling())[1]) > 0
        else:
            assert model.limit == 48
            with pytest.raises(ValueError, match="1 tokens of --prompt .* 48 learned positions; ask for at most 47"):
                model.write("hello", max_new_tokens=48, sampling=Sampling())


def test_the_program(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for start, folder in ((run, folders[0]), (call, folders[1])):
        done = start("generate", "--load", folder, "--prompt", "hello", "--prompt", "he", "--max-new-tokens", 4)
        assert done.returncode == 0, done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert last["prompt"] == "hello"
        assert [one["prompt"] for one in last["generations"]] == ["hello", "he"]
        assert last["generations"][0] == {name: last[name] for name in ("prompt", "text", "tokens")}
        assert 1 <= len(last["tokens"]) <= 4
        assert "hello" + last["text"] in done.stdout
    assert_one_sentence(call("generate", "--load", tmp_path / "nothing", "--prompt", "x"), "--load", "no such folder")
    assert_one_sentence(call("generate", "--load", folders[0], "--prompt", "x", "--temperature", -1), "--temperature")
    assert_one_sentence(call("generate", "--load", folders[0], "--prompt", "x", "--max-new-tokens", 0), "--max-new-tokens")


def test_a_truncated_folder_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[1], tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    done = call("generate", "--load", tmp_path / "cut", "--prompt", "x")
    assert_one_sentence(done, str(tmp_path / "cut"), "copy the folder again")


def test_without_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    native_checkpoint(tmp_path / "save", small_config())
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_text_model(tmp_path / "save")
    export(ExportSettings(str(tmp_path / "save"), str(tmp_path / "hf"), verify=False), say=lambda text: None)
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_text_model(tmp_path / "hf")
