"""The tokenizers: markers from the vocabulary only, text that survives, one clear sentence for each wrong file."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_simple.data.tokenizer import TOKENIZER_TYPES, build_tokenizer, load_tokenizer
from megatron_simple.data.tokenizer_base import replace_surrogates
from megatron_simple.data.tokenizer_training import TrainingSettings, train_tokenizer
from tests.data.tiny_tokenizers import ODD_TEXTS, write_gpt2, write_ranks

SHARED = os.environ.get("MEGATRON_SIMPLE_TEST_DATA")
needs_shared = pytest.mark.skipif(not SHARED, reason="MEGATRON_SIMPLE_TEST_DATA is not set")


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    text = "def hello(world):\n    return world + 'hello'\n" * 5 + "the other thing there\n" * 9
    (folder / "text.txt").write_text(text, encoding="utf-8")
    train_tokenizer(TrainingSettings([folder / "text.txt"], folder / "tiny", vocab_size=300))
    return folder / "tiny.model"


@pytest.fixture
def gpt2_json(tmp_path: Path) -> Path:
    """A folder with tokenizer.json of the tiny GPT-2 vocabulary and a post-processor that would add tokens."""
    import tokenizers

    flags = write_gpt2(tmp_path)
    engine = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(flags["vocab_file"], flags["merge_file"]))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(["<|endoftext|>"])
    end = engine.token_to_id("<|endoftext|>")
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    engine.enable_truncation(4)
    folder = tmp_path / "folder"
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    return folder


class TestSentencePiece:
    def test_markers_come_from_the_model(self, sentencepiece_model):
        tokenizer = load_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model=sentencepiece_model)
        assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (300, 1, 2)
        for text in ODD_TEXTS:
            ids = tokenizer.encode(text)
            assert ids.dtype == np.int32
            assert not np.isin([1, 2], ids).any()  # "</s>" in the text is text
            assert tokenizer.decode(ids) == replace_surrogates(text)[0]
        with pytest.raises(ValueError, match="token id 300"):
            tokenizer.decode([300])

    def test_a_model_that_changes_text_is_warned_of(self, tmp_path, sentencepiece_model, caplog):
        import sentencepiece

        flags = {"tokenizer_type": "SentencePieceTokenizer"}
        load_tokenizer(**flags, tokenizer_model=sentencepiece_model)
        assert not caplog.records
        lines = iter(["the quick brown fox jumps over the lazy dog"] * 20)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_prefix=str(tmp_path / "loose"), vocab_size=60, model_type="bpe",
            minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
        load_tokenizer(**flags, tokenizer_model=tmp_path / "loose.model")
        assert len(caplog.records) == 1
        assert "changes text" in caplog.text


class TestHuggingFace:
    def test_ids_markers_and_literal_text(self, tmp_path, gpt2_json):
        same = load_tokenizer(**write_gpt2(tmp_path))
        for model in (gpt2_json, gpt2_json / "tokenizer.json"):
            tokenizer = load_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
            assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (same.vocab_size, same.eod, None)
            for text in ODD_TEXTS:
                assert tokenizer.encode(text).tolist() == same.encode(text).tolist()
                assert tokenizer.decode(tokenizer.encode(text)) == replace_surrogates(text)[0]

    def test_config_names_the_markers(self, gpt2_json):
        config = {"eos_token": {"content": "hello"}, "bos_token": "he"}
        (gpt2_json / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=gpt2_json)
        assert tokenizer.decode([tokenizer.eod]) == "hello"
        assert tokenizer.decode([tokenizer.bos]) == "he"

    def test_no_marker_is_invented(self, gpt2_json):
        path = gpt2_json / "tokenizer.json"
        path.write_text(path.read_text(encoding="utf-8").replace("<|endoftext|>", "<|other|>"), encoding="utf-8")
        tokenizer = load_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=gpt2_json)
        assert tokenizer.eod is None


def test_batches_equal_single_texts(tmp_path, sentencepiece_model, gpt2_json):
    ranks = write_ranks(tmp_path / "ranks.tiktoken")
    all_flags = [
        {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": sentencepiece_model},
        {"tokenizer_type": "TikTokenizer", "tokenizer_model": ranks, "tiktoken_pattern": "gpt2"},
        write_gpt2(tmp_path),
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": gpt2_json},
    ]
    assert tuple(flags["tokenizer_type"] for flags in all_flags) == TOKENIZER_TYPES
    for flags in all_flags:
        tokenizer = load_tokenizer(**flags)
        tokens, lengths = tokenizer.encode_batch(ODD_TEXTS)
        assert (tokens.dtype, lengths.dtype) == (np.int32, np.int64)
        singles = [tokenizer.encode(text) for text in ODD_TEXTS]
        assert lengths.tolist() == [len(ids) for ids in singles]
        assert np.array_equal(tokens, np.concatenate(singles))
        assert [len(array) for array in tokenizer.encode_batch([])] == [0, 0]


def test_the_wrong_file_is_recognised(tmp_path, sentencepiece_model, gpt2_json):
    files = {
        "SentencePieceTokenizer": sentencepiece_model,
        "TikTokenizer": write_ranks(tmp_path / "ranks.tiktoken"),
        "HuggingFaceTokenizer": gpt2_json / "tokenizer.json",
    }
    cut = tmp_path / "cut.model"
    cut.write_bytes(sentencepiece_model.read_bytes()[:1000])
    pointer = tmp_path / "pointer.model"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for asked in files:
        flags = {"tokenizer_type": asked, "tiktoken_pattern": "gpt2"}
        for real, path in files.items():
            if real != asked:
                with pytest.raises(ValueError, match=f"--tokenizer-model .*--tokenizer-type {real}") as caught:
                    load_tokenizer(**flags, tokenizer_model=path)
                assert str(path) in str(caught.value)
        for path in (cut, pointer):
            with pytest.raises(ValueError, match=r"--tokenizer-model .*(cut short|beginning|LFS)"):
                load_tokenizer(**flags, tokenizer_model=path)
        (tmp_path / "empty").write_bytes(b"")
        with pytest.raises(ValueError, match="is empty"):
            load_tokenizer(**flags, tokenizer_model=tmp_path / "empty")
        with pytest.raises(ValueError, match="no such file"):
            load_tokenizer(**flags, tokenizer_model=tmp_path / "missing")
        with pytest.raises(ValueError, match="needs --tokenizer-model"):
            load_tokenizer(**flags)
        with pytest.raises(ValueError, match="folder|holds no tokenizer.json"):
            load_tokenizer(**flags, tokenizer_model=tmp_path)
    with pytest.raises(ValueError, match="--tokenizer-type Wordy is not known; choose one of Sent"):
        build_tokenizer(SimpleNamespace(tokenizer_type="Wordy"))


def test_fingerprint_follows_content_not_name(tmp_path):
    first, second = write_ranks(tmp_path / "a"), write_ranks(tmp_path / "b")
    other = write_ranks(tmp_path / "c", (b"he",))
    flags = {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "gpt2"}
    prints = [load_tokenizer(**flags, tokenizer_model=path).fingerprint for path in (first, second, other)]
    assert prints[0] == prints[1] != prints[2]
    llama3 = load_tokenizer(**flags | {"tiktoken_pattern": "llama3"}, tokenizer_model=first)
    assert llama3.fingerprint != prints[0]


@needs_shared
class TestRealFiles:
    def test_tekken_and_mistral_keep_odd_text(self):
        import gzip

        folder = Path(SHARED, "tokenizers")
        tekken = load_tokenizer(
            tokenizer_type="TikTokenizer",
            tokenizer_model=folder / "tekken-240911.tiktoken",
            tiktoken_pattern=str(folder / "tekken-pattern.json"),
        )
        mistral = load_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model=folder / "mistral-v1.model")
        assert (tekken.vocab_size, tekken.bos, tekken.eod) == (130074, 130072, 130073)
        assert (mistral.vocab_size, mistral.bos, mistral.eod) == (32000, 1, 2)
        with gzip.open(Path(SHARED, "data", "odd.jsonl.gz")) as file:
            for line in file:
                text = replace_surrogates(json.loads(line)["text"])[0]
                assert tekken.decode(tekken.encode(text)) == text
                assert mistral.decode(mistral.encode(text)) == text
