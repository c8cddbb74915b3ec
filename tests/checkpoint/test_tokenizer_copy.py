"""The tokenizer inside a checkpoint: the files it reads, as they were at the start, and nothing else of their folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.data.tokenizer import load_tokenizer
from tests.checkpoint.models import native_checkpoint, small_config
from tests.data.tiny_tokenizers import write_gpt2, write_ranks

TEXT = "the lazy dog  123\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def arguments_of(kind: str, source: Path) -> dict[str, str]:
    if kind == "GPT2BPETokenizer":
        return write_gpt2(source)
    if kind == "same names":
        plain = write_gpt2(source)
        for part, key in (("a", "vocab_file"), ("b", "merge_file")):
            (source / part).mkdir()
            plain[key] = str(shutil.move(plain[key], source / part / "table"))
        return plain
    if kind == "pattern file":
        write_ranks(source / "ranks.tiktoken")
        (source / "pattern.txt").write_text(r"\S+|\s+")
        files = {"tokenizer_model": str(source / "ranks.tiktoken"), "tiktoken_pattern": str(source / "pattern.txt")}
        return {"tokenizer_type": "TikTokenizer", **files}
    from tokenizers import Tokenizer, models, pre_tokenizers

    gpt2 = write_gpt2(source)
    engine = Tokenizer(models.BPE.from_file(gpt2["vocab_file"], gpt2["merge_file"]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    model = source if kind == "folder" else source / "tokenizer.json"
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "same names", "pattern file", "folder", "tokenizer.json"])
def test_the_copy_is_the_same_tokenizer(tmp_path: Path, source: Path, kind: str) -> None:
    arguments = arguments_of(kind, source)
    (source / "model.safetensors").write_bytes(b"weights of somebody")
    original = load_tokenizer(**arguments)
    ids, eod, fingerprint = original.encode(TEXT).tolist(), original.eod, original.fingerprint
    folder = native_checkpoint(tmp_path / "save", small_config(vocab_size=600), tokenizer=arguments)
    shutil.rmtree(source)
    with CheckpointReader(folder) as reader:
        copy = load_tokenizer(**reader.tokenizer_arguments())
        assert copy.encode(TEXT).tolist() == ids
        assert (copy.eod, copy.fingerprint) == (eod, fingerprint)
        assert sorted(path.name for path in (reader.folder / "tokenizer").iterdir()) == sorted(
            path.name for path in copy.files.values()
        )


def test_files_changed_after_the_start_change_no_checkpoint(tmp_path: Path, source: Path) -> None:
    arguments = write_gpt2(source)
    copy = TokenizerCopy.read(arguments)
    before = Path(arguments["vocab_file"]).read_bytes()
    Path(arguments["vocab_file"]).write_text("{}")
    copy.write(tmp_path)
    assert (tmp_path / "tokenizer" / Path(arguments["vocab_file"]).name).read_bytes() == before
