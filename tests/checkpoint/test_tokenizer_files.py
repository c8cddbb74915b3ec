"""tokenizer.json gives the training tokenizer's ids, for every kind of tokenizer, or is not written."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megatron_simple.checkpoint import tokenizer_files
from megatron_simple.checkpoint.sentencepiece_json import NotConvertible, read_model, to_tokenizer
from megatron_simple.checkpoint.tokenizer_files import ODD_TEXTS, _oniguruma, write_tokenizer
from megatron_simple.data.tokenizer import load_tokenizer
from tests.data.tiny_tokenizers import write_gpt2, write_ranks

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
needs_shared = pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")
TEXT = "def hello(world):\n    return world + 'hello'  # 12 345\n" * 6 + "the other thing there, naïve\n" * 9
LLAMA2_STYLE = {
    "model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}  # fmt: skip


def train(folder: Path, **settings: object) -> Path:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tiny"), minloglevel=2,
        **{"vocab_size": 330, **LLAMA2_STYLE, **settings},
    )  # fmt: skip
    return folder / "tiny.model"


def arguments(kind: str, folder: Path) -> dict[str, str]:
    folder.mkdir()
    if kind.startswith("sentencepiece"):
        settings = {"plain": {}, "no-prefix": {"add_dummy_prefix": False}, "squeezing": {"remove_extra_whitespaces": True},
                    "no-bytes": {"byte_fallback": False, "vocab_size": 90}}[kind.split("-", 1)[1]]  # fmt: skip
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(train(folder, **settings))}
    if kind.startswith("gpt2"):
        return write_gpt2(folder, shuffled=kind == "gpt2-shuffled")
    # 1234 is longer than the patterns' groups of digits; qzx has no two parts, so that merging never makes it
    ranks = write_ranks(folder / "ranks.tiktoken", (b"he", b"ll", b"hell", b"12", b"123", b"1234", b"qzx"))
    return {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(ranks), "tiktoken_pattern": kind.split("-")[1]}


def assert_same(folder: Path, given: dict[str, str], texts: list[str]) -> None:
    """Ids and decoded texts of what transformers loads from `folder` against the training tokenizer."""
    exported, original = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), load_tokenizer(**given)
    for text in texts:
        ids = original.encode(text).tolist()
        assert exported.encode(text, add_special_tokens=False, split_special_tokens=True) == ids, text
        assert exported.decode(ids) == original.decode(ids), text
    assert exported.eos_token_id == original.eod
    assert exported.bos_token_id == original.bos


@pytest.mark.parametrize(
    "kind",
    ["sentencepiece-plain", "sentencepiece-no-prefix", "sentencepiece-squeezing", "gpt2", "gpt2-shuffled",
     "tiktoken-llama3", "tiktoken-gpt2", "tiktoken-cl100k"],
)  # fmt: skip
def test_same_ids_and_texts(tmp_path: Path, kind: str) -> None:
    given = arguments(kind, tmp_path / "source")
    (tmp_path / "out").mkdir()
    written = write_tokenizer(tmp_path / "out", given, max_length=99)
    assert written.problem is None
    assert set(written.files) == {path.name for path in (tmp_path / "out").iterdir()}
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == 99
    assert settings["clean_up_tokenization_spaces"] is False
    assert_same(tmp_path / "out", given, [*ODD_TEXTS, "qzx", "hell12345"])


def test_the_dialect_of_patterns() -> None:
    assert _oniguruma(r"\p{N}{1,3}+|\s++$|a{2}") == r"\p{N}{1,3}|\s++\z|a{2}"


def test_without_byte_pieces_the_ids_are_the_same(tmp_path: Path) -> None:
    given = arguments("sentencepiece-no-bytes", tmp_path / "source")
    (tmp_path / "out").mkdir()
    assert write_tokenizer(tmp_path / "out", given, max_length=99).problem is None


def test_a_tokenizer_json_is_kept_with_another_class(tmp_path: Path) -> None:
    given = arguments("gpt2", tmp_path / "source")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    write_tokenizer(tmp_path / "first", given, max_length=99)
    path = tmp_path / "first/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer", "padding_side": "left"}))
    again = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "first")}
    assert write_tokenizer(tmp_path / "second", again, max_length=5).problem is None
    assert (tmp_path / "second/tokenizer.json").read_bytes() == (tmp_path / "first/tokenizer.json").read_bytes()
    settings = json.loads((tmp_path / "second/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["padding_side"] == "left"
    assert settings["model_max_length"] == 99
    assert_same(tmp_path / "second", given, list(ODD_TEXTS))


def test_a_unigram_model_is_not_converted(tmp_path: Path) -> None:
    model = train(tmp_path, model_type="unigram", vocab_size=290)
    with pytest.raises(NotConvertible, match="not BPE"):
        to_tokenizer(model)
    out = tmp_path / "out"
    out.mkdir()
    given = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    written = write_tokenizer(out, given, max_length=99)
    assert "not BPE" in written.problem
    assert [path.name for path in out.iterdir()] == written.files == ["tokenizer.model"]
    assert (out / "tokenizer.model").read_bytes() == model.read_bytes()


def test_other_ids_mean_no_tokenizer_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments("sentencepiece-plain", tmp_path / "source")
    right = tokenizer_files.to_tokenizer

    def wrong(path: Path) -> object:
        from tokenizers import normalizers

        engine = right(path)
        engine.normalizer = normalizers.Replace(" ", "\u2581")  # without the dummy prefix
        return engine

    monkeypatch.setattr(tokenizer_files, "to_tokenizer", wrong)
    (tmp_path / "out").mkdir()
    written = write_tokenizer(tmp_path / "out", given, max_length=99)
    assert "probing texts get other ids" in written.problem
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_the_wire_parser_reads_what_sentencepiece_reads(tmp_path: Path) -> None:
    path = train(tmp_path, user_defined_symbols=["<sep>"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    model = read_model(path)
    assert [piece.text for piece in model.pieces] == [library.id_to_piece(i) for i in range(library.vocab_size())]
    assert [piece.score for piece in model.pieces] == [library.get_score(i) for i in range(library.vocab_size())]
    kinds = {"is_unknown": 2, "is_control": 3, "is_byte": 6}
    for name, kind in kinds.items():
        ids = [i for i in range(library.vocab_size()) if getattr(library, name)(i)]
        assert ids == [i for i, piece in enumerate(model.pieces) if piece.kind == kind], name


@needs_shared
@pytest.mark.parametrize("kind", ["mistral", "owt"])
def test_real_tokenizers_on_strange_texts(tmp_path: Path, kind: str) -> None:
    shared = Path(SHARED)
    given = {
        "mistral": {
            "tokenizer_type": "SentencePieceTokenizer",
            "tokenizer_model": str(shared / "tokenizers/mistral-v1.model"),
        },
        "owt": {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(shared / "data/owt-megatron/gpt2-tiny-vocab.json"),
            "merge_file": str(shared / "data/owt-megatron/gpt2-tiny-merges.txt"),
        },
    }[kind]
    written = write_tokenizer(tmp_path, given, max_length=99)
    assert written.problem is None
    with gzip.open(shared / "data/odd.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    assert_same(tmp_path, given, [text for text in texts if len(text) < 20_000])
