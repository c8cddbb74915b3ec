"""The tokenizers by name, and the two that have a library of their own: SentencePiece and Hugging Face tokenizers."""

import argparse
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_simple.data.tokenizer_base import Tokenizer, replace_surrogates, require_file, wrong_content

logger = logging.getLogger(__name__)

TOKENIZER_TYPES = ("SentencePieceTokenizer", "TikTokenizer", "GPT2BPETokenizer", "HuggingFaceTokenizer")
# Indentation, blank lines, repeated spaces, a ligature and a rare character: what normalisation would change.
_ROUND_TRIP_PROBE = "a  b\n\n    def f():\t# \ufb01 \u2603  ."


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file; eod is its eos piece, bos its bos piece."""

    name = "SentencePieceTokenizer"

    def __init__(self, model: str | Path | None) -> None:
        import sentencepiece

        path = require_file(model, flag="--tokenizer-model", tokenizer_type=self.name)
        self.files = {"tokenizer_model": path}
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            self.vocab_size = self._processor.vocab_size()
        except (RuntimeError, ValueError):
            self.vocab_size = 0
        if self.vocab_size <= 0:
            raise wrong_content(path, flag="--tokenizer-model", tokenizer_type=self.name, wanted="a SentencePiece model")
        self.eod = _id_or_none(self._processor.eos_id())
        self.bos = _id_or_none(self._processor.bos_id())
        if self.decode(self.encode(_ROUND_TRIP_PROBE)) != _ROUND_TRIP_PROBE:
            logger.warning(
                "%s changes text: its normalisation or its lack of byte pieces loses characters or whitespace, so that "
                "decode(encode(x)) differs from x (tools/train_tokenizer.py makes models that keep the text)",
                path,
            )

    def _encode(self, text: str) -> np.ndarray:
        return self._processor.encode(text, return_type="numpy")

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        clean = [replace_surrogates(text)[0] for text in texts]
        arrays = self._processor.encode(clean, return_type="numpy", num_threads=1) if clean else []
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        return (np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)), lengths

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        _check_ids(ids, self)
        return self._processor.decode(ids)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, or the folder that holds it, run by the `tokenizers` library; never downloaded.

    eod and bos are eos_token and bos_token of tokenizer_config.json or special_tokens_map.json beside it. Without
    those files eod is the one special token with a usual name for it, None where there is no such or more than one.
    """

    name = "HuggingFaceTokenizer"
    _usual_eod = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

    def __init__(self, model: str | Path | None) -> None:
        import tokenizers

        path = _tokenizer_json(model, self.name)
        self.files = {"tokenizer_json": path}
        names = self._special_names(path.parent)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for token in content.get("added_tokens") or []:
                # Only tokens marked special can be kept from matching a literal marker in the text.
                token["special"] = token["special"] or token["content"] in names.values()
            self._engine = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception:  # noqa: BLE001  the library raises plain Exception for what it cannot read
            raise wrong_content(
                path, flag="--tokenizer-model", tokenizer_type=self.name, wanted="a Hugging Face tokenizer.json"
            ) from None
        self._engine.encode_special_tokens = True
        self._engine.no_truncation()
        self._engine.no_padding()
        self.vocab_size = max(self._engine.get_vocab(with_added_tokens=True).values()) + 1
        special = [token["content"] for token in content.get("added_tokens") or [] if token["special"]]
        guesses = [token for token in self._usual_eod if token in special]
        eos = names.get("eos_token", guesses[0] if len(guesses) == 1 else None)
        self.eod = self._engine.token_to_id(eos) if eos else None
        self.bos = self._engine.token_to_id(names["bos_token"]) if "bos_token" in names else None

    def _special_names(self, folder: Path) -> dict[str, str]:
        """eos_token and bos_token as the files beside tokenizer.json name them; remembers the files that were read."""
        names: dict[str, str] = {}
        for file_name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second has the last word
            path = folder / file_name
            if not path.is_file():
                continue
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
                for key in ("eos_token", "bos_token"):
                    token = settings.get(key)
                    token = token.get("content") if isinstance(token, dict) else token
                    if isinstance(token, str):
                        names[key] = token
            except (ValueError, AttributeError):
                raise ValueError(f"{path} is not a JSON object; copy the tokenizer's folder again") from None
            self.files[path.stem] = path
        return names

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        _check_ids(ids, self)
        return self._engine.decode(ids, skip_special_tokens=False)


def load_tokenizer(
    *,
    tokenizer_type: str | None,
    tokenizer_model: str | Path | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tiktoken_pattern: str | None = None,
) -> Tokenizer:
    """The tokenizer of these flags; ValueError in one sentence for a missing flag or file and for a wrong format."""
    if tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(tokenizer_model)
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(tokenizer_model)
    # Imported when asked for: each library costs start-up time, and a run needs one.
    from megatron_simple.data.byte_bpe import GPT2BPETokenizer, TikTokenizer

    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(tokenizer_model, pattern=tiktoken_pattern)
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(vocab_file, merge_file)
    given = f"--tokenizer-type {tokenizer_type} is not known" if tokenizer_type else "--tokenizer-type is missing"
    raise ValueError(f"{given}; choose one of {', '.join(TOKENIZER_TYPES)}")


def build_tokenizer(args: Any) -> Tokenizer:
    """`load_tokenizer` with the attributes of `args` named as the flags of `add_tokenizer_arguments` are."""
    return load_tokenizer(**tokenizer_settings(args))


def tokenizer_settings(args: Any) -> dict[str, str | None]:
    """The keyword arguments of `load_tokenizer` out of parsed flags."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    return {name: getattr(args, name, None) for name in names}


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a tokenizer, as every tool and the training command spell them."""
    group = parser.add_argument_group("tokenizer", "read from local files; nothing is downloaded")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, metavar="T", help=", ".join(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model",
        metavar="FILE",
        help="SentencePiece .model, tiktoken rank file, or tokenizer.json (or its folder)",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--tiktoken-pattern",
        metavar="P",
        help="how TikTokenizer splits text: llama3, gpt2, cl100k, or a FILE with the regular expression",
    )


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _check_ids(ids: list[int], tokenizer: Tokenizer) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise ValueError(f"token id {token_id} is not in the vocabulary of {tokenizer.name}")


def _tokenizer_json(model: str | Path | None, tokenizer_type: str) -> Path:
    if model and Path(model).is_dir():
        path = Path(model) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"--tokenizer-model {model} holds no tokenizer.json; name a tokenizer.model in it with "
                "--tokenizer-type SentencePieceTokenizer or TikTokenizer"
            )
        return path
    return require_file(model, flag="--tokenizer-model", tokenizer_type=tokenizer_type)
