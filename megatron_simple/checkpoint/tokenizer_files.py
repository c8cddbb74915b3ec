"""The tokenizer's files of an exported folder: a tokenizer.json that gives the training tokenizer's ids, checked.

The class in tokenizer_config.json is always PreTrainedTokenizerFast: LlamaTokenizer rebuilds parts of tokenizer.json by
its own rules and gives other ids, TokenizersBackend is unknown to transformers 4.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_simple.checkpoint.sentencepiece_json import NotConvertible, to_tokenizer
from megatron_simple.data.byte_bpe import read_ranks
from megatron_simple.data.merges import gpt2_byte_letters
from megatron_simple.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_simple.data.tokenizer_base import Tokenizer

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
SETTINGS = "tokenizer_config.json"

# Whitespace, scripts, combining marks, joined emoji, literal special tokens, code, controls, digits, long runs.
ODD_TEXTS = (
    "", " ", "  ", "\n", "\n\n\n", "\t\tx", " a", "a ", " a  b   c ", "\r\n line\r\n", "Hello world", "don't CAN'T we'LL",
    "1234567890 3.14159 1,000,000", "def f(x):\n    return x  # done\n\n\nclass A:\n\tpass\n", "naïve café résumé Ångström",
    "e\u0301 vs \u00e9", "中文字符测试。日本語のテスト", "한국어 텍스트", "Привет, мир!", "العربية", "हिन्दी", "ไทย",
    "👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 😀", "\u00a0nbsp\u2003em", "zero\u200bwidth\u200d", "ﬁ ﬂ ½ ℵ ∮", "\x00\x01\x7f", "\ufeffBOM",
    "<s></s><unk>", "<|endoftext|> <|begin_of_text|><|end_of_text|>", "[INST] x [/INST]", "a" * 300, " " * 67, "\n" * 35,
    "....,,,,;;;;!!!!", "https://example.org/a?b=c&d=%20#e", "x\u0338y\u20dd", "\U00010348\U0001f9ff", "İıŞş ǅ ß ẞ",
)  # fmt: skip


@dataclass(frozen=True)
class ExportedTokenizer:
    """What was written: the files' names, the ids that end and begin a document, a hash of the training tokenizer's files.

    `problem` says why there is no tokenizer.json, None when there is one.
    """

    bos: int | None = None
    eod: int | None = None
    fingerprint: str | None = None
    files: list[str] = field(default_factory=list)
    problem: str | None = None


def write_tokenizer(folder: Path, arguments: Mapping[str, str], *, max_length: int) -> ExportedTokenizer:
    """Writes tokenizer.json, tokenizer_config.json and copies of the original files into `folder`.

    `arguments` are load_tokenizer's. A tokenizer without an exact counterpart gets its original files only.
    """
    original = load_tokenizer(**arguments)
    copies = _copy_originals(folder, original)
    try:
        engine = _convert(original, arguments)
        if engine is not None:
            engine.save(str(folder / "tokenizer.json"))
        _write_settings(folder, original, max_length=max_length)
        _check_ids(original, HuggingFaceTokenizer(folder))
        problem = None
    except NotConvertible as error:
        for name in ("tokenizer.json", SETTINGS):
            (folder / name).unlink(missing_ok=True)
        problem = str(error)
    written = [] if problem else ["tokenizer.json", SETTINGS]
    files = sorted({*written, *copies})
    return ExportedTokenizer(original.bos, original.eod, original.fingerprint, files, problem)


def _copy_originals(folder: Path, original: Tokenizer) -> list[str]:
    """Copies the training tokenizer's files under the names that other programs look for."""
    usual = {"vocab_file": "vocab.json", "merge_file": "merges.txt", "tokenizer_model": "tokenizer.model"}
    names = []
    for role, path in original.files.items():
        name = usual.get(role, path.name)
        if (folder / name).exists():
            name = f"original-{name}"
        shutil.copyfile(path, folder / name)
        names.append(name)
    return names


def _convert(original: Tokenizer, arguments: Mapping[str, str]) -> Any:
    """The `tokenizers.Tokenizer` for the training tokenizer; None where its tokenizer.json is copied as it is."""
    if original.name == "SentencePieceTokenizer":
        return to_tokenizer(original.files["tokenizer_model"])
    if original.name == "TikTokenizer":
        return _from_ranks(original, gpt2=arguments.get("tiktoken_pattern") == "gpt2")
    if original.name == "GPT2BPETokenizer":
        return _from_merges(original)
    return None


def _from_ranks(original: Tokenizer, *, gpt2: bool) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = read_ranks(original.files["tokenizer_model"])
    letters = {byte: letter for letter, byte in gpt2_byte_letters().items()}
    vocabulary = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for text in sorted(vocabulary, key=vocabulary.__getitem__):
        splits = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [split for split in splits if split[0] in vocabulary and split[1] in vocabulary]
        merges += sorted(known, key=lambda split: (vocabulary[split[0]], vocabulary[split[1]]))
    specials = _specials_beyond(original, len(ranks))
    vocabulary |= specials  # so that each keeps its id, even where ids between them are unused
    # tiktoken takes a whole piece that is a token as it is, without merging up to it
    engine = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if gpt2:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(_oniguruma(original.pattern)), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    engine.decoder = decoders.ByteLevel()
    _add_specials(engine, list(specials))
    return engine


def _specials_beyond(original: Tokenizer, first: int) -> dict[str, int]:
    """The tokens with ids from `first` on, by name; some ids may be unused."""
    names = {}
    for number in range(first, original.vocab_size):
        with contextlib.suppress(ValueError):
            names[original.decode([number])] = number
    return names


def _oniguruma(pattern: str) -> str:
    """A tiktoken pattern in the dialect of `tokenizers`, where `$` would end a line and `{n}+` would repeat."""
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern).replace("$", r"\z")


def _from_merges(original: Tokenizer) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = (str(original.files[role]) for role in ("vocab_file", "merge_file"))
    engine = Tokenizer(models.BPE.from_file(vocab, merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    _add_specials(engine, [] if original.eod is None else [original.decode([original.eod])])
    return engine


def _add_specials(engine: Any, names: list[str]) -> None:
    from tokenizers import AddedToken

    engine.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])


def _write_settings(folder: Path, original: Tokenizer, *, max_length: int) -> None:
    """tokenizer_config.json: what the original one said, if any, with the class that keeps the ids."""
    path = folder / SETTINGS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for key in ("auto_map", "tokenizer_file", "name_or_path"):
        settings.pop(key, None)
    tokens = {"bos_token": original.bos, "eos_token": original.eod}
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    settings |= {key: names[number] for key, number in tokens.items() if number in names}
    unknown = (content.get("model") or {}).get("unk_token")
    if unknown and "unk_token" not in settings:
        settings["unk_token"] = unknown
    settings.setdefault("model_max_length", max_length)
    settings |= {
        "tokenizer_class": TOKENIZER_CLASS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_ids(original: Tokenizer, exported: HuggingFaceTokenizer) -> None:
    """NotConvertible unless both give the same ids on the odd texts and the same end of document."""
    wrong = [text for text in ODD_TEXTS if original.encode(text).tolist() != exported.encode(text).tolist()]
    if wrong:
        raise NotConvertible(f"{len(wrong)} of {len(ODD_TEXTS)} probing texts get other ids, the first is {wrong[0]!r}")
    for name in ("eod", "bos"):
        if getattr(original, name) not in (None, getattr(exported, name)):
            raise NotConvertible(f"its {name} is {getattr(original, name)}, in tokenizer.json {getattr(exported, name)}")
