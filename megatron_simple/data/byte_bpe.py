"""Byte-level BPE: tiktoken rank files and GPT-2's vocab.json with merges.txt.

Both are run by tiktoken, which splits a text by a pattern and joins bytes by rank. A rank file's ids are its ranks,
and its special tokens follow: the first column is the id minus the number of ranks.

    pattern   special tokens
    llama3    0 <|begin_of_text|> (bos)   1 <|end_of_text|> (eod)   2 ... 255 the rest of Llama-3's 256 reserved tokens
    gpt2      0 <|endoftext|> (eod)
    cl100k    1 <|endoftext|> (eod)   2 <|fim_prefix|>   3 <|fim_middle|>   4 <|fim_suffix|>   20 <|endofprompt|>
    FILE      0 <|begin_of_text|> (bos)   1 <|end_of_text|> (eod)
"""

import base64
import binascii
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import regex
import tiktoken

from megatron_simple.data.merges import gpt2_byte_letters, merges_follow_ranks, read_merges, read_vocabulary
from megatron_simple.data.tokenizer_base import Tokenizer, require_file, wrong_content

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PATTERNS = {
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt2": GPT2_PATTERN,
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
}
_CL100K_SPECIALS = {
    "<|endoftext|>": 1, "<|fim_prefix|>": 2, "<|fim_middle|>": 3, "<|fim_suffix|>": 4, "<|endofprompt|>": 20,
}  # fmt: skip
# tiktoken's pattern engine overflows its stack near a million whitespace characters in a row.
_LONG_WHITESPACE = 1 << 17


class ByteBPE(Tokenizer):
    """Common part: `token_bytes` gives the bytes of each id, `new_ids` the id of each rank where the two differ."""

    def __init__(
        self, *, pattern: str, ranks: dict[bytes, int], new_ids: np.ndarray | None, token_bytes: dict[int, bytes]
    ) -> None:
        self.pattern = pattern
        self._bpe = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._ranks = ranks
        self._new_ids = new_ids
        self._token_bytes = token_bytes
        self.vocab_size = max(token_bytes) + 1

    @cached_property
    def _one_piece(self) -> tiktoken.Encoding:
        """Joins the bytes of a whole text without splitting it first."""
        return tiktoken.Encoding("piece", pat_str=r"(?s:.+)", mergeable_ranks=self._ranks, special_tokens={})

    def _encode(self, text: str) -> np.ndarray:
        if _has_long_whitespace(text):
            pieces = [match.group() for match in regex.finditer(self.pattern, text)]
            ids = np.concatenate([self._one_piece.encode_to_numpy(piece, disallowed_special=()) for piece in pieces])
        else:
            ids = self._bpe.encode_to_numpy(text, disallowed_special=())
        return ids if self._new_ids is None else self._new_ids[ids]

    def decode(self, ids: Iterable[int]) -> str:
        try:
            return b"".join([self._token_bytes[int(i)] for i in ids]).decode("utf-8", errors="replace")
        except KeyError as error:
            raise ValueError(f"token id {error} is not in the vocabulary of {self.name}") from None


class TikTokenizer(ByteBPE):
    """A tiktoken rank file (one base64 token and its rank a line) with a named pattern or a pattern file."""

    name = "TikTokenizer"

    def __init__(self, model: str | Path | None, *, pattern: str | None) -> None:
        path = require_file(model, flag="--tokenizer-model", tokenizer_type=self.name)
        self.files = {"tokenizer_model": path}
        if not pattern:
            raise ValueError(f"--tokenizer-type {self.name} needs --tiktoken-pattern llama3, gpt2, cl100k or a FILE")
        if pattern in PATTERNS:
            expression = PATTERNS[pattern]
        else:
            self.files["tiktoken_pattern"] = Path(pattern)
            expression = _read_pattern(Path(pattern))
        ranks = read_ranks(path)
        specials = _special_tokens(pattern, len(ranks))
        token_bytes = {rank: token for token, rank in ranks.items()}
        token_bytes |= {token_id: token.encode() for token, token_id in specials.items()}
        super().__init__(pattern=expression, ranks=ranks, new_ids=None, token_bytes=token_bytes)
        self.bos = specials.get("<|begin_of_text|>")
        self.eod = specials.get("<|end_of_text|>", specials.get("<|endoftext|>"))


class GPT2BPETokenizer(ByteBPE):
    """GPT-2's byte-level BPE from vocab.json and merges.txt; eod is <|endoftext|>, there is no bos."""

    name = "GPT2BPETokenizer"
    bos = None

    def __init__(self, vocab_file: str | Path | None, merge_file: str | Path | None) -> None:
        vocab_path = require_file(vocab_file, flag="--vocab-file", tokenizer_type=self.name)
        merge_path = require_file(merge_file, flag="--merge-file", tokenizer_type=self.name)
        self.files = {"vocab_file": vocab_path, "merge_file": merge_path}
        vocabulary = read_vocabulary(vocab_path)
        merges = read_merges(merge_path, vocabulary=vocabulary)
        letters = gpt2_byte_letters()
        missing = [byte for letter, byte in letters.items() if letter not in vocabulary]
        if missing:
            raise ValueError(f"--vocab-file {vocab_path} has no token for byte {missing[0]:#04x}; all 256 are needed")
        by_rank = [*letters, *(left + right for left, right in merges)]
        ranks = {bytes([letters[letter] for letter in token]): rank for rank, token in enumerate(by_rank)}
        new_ids = np.array([vocabulary[token] for token in by_rank], dtype=np.int32)
        same = np.array_equal(new_ids, np.arange(len(new_ids)))
        token_bytes = {token_id: _spelled(token, letters) for token, token_id in vocabulary.items()}
        super().__init__(pattern=GPT2_PATTERN, ranks=ranks, new_ids=None if same else new_ids, token_bytes=token_bytes)
        self.eod = vocabulary.get("<|endoftext|>")
        self._general = None if merges_follow_ranks(merges) else _general_bpe(vocabulary, merges)

    def _encode(self, text: str) -> np.ndarray:
        if self._general is None:
            return super()._encode(text)
        return np.array(self._general.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def _general_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """The slower engine for lists of merges whose order alone does not define the tokens."""
    import tokenizers  # rarely needed, so not at the top

    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return engine


def read_ranks(path: Path) -> dict[bytes, int]:
    """token bytes -> rank of a tiktoken rank file; ValueError unless the ranks are 0 ... n - 1 and hold every byte."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            if not ranks:
                raise wrong_content(
                    path, flag="--tokenizer-model", tokenizer_type="TikTokenizer", wanted="a tiktoken rank file"
                ) from None
            raise ValueError(
                f"--tokenizer-model {path}:{number}: not a base64 token and its rank; copy the file again"
            ) from None
    complete = sorted(ranks.values()) == list(range(len(ranks)))
    if not complete or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(
            f"--tokenizer-model {path}: the ranks are not 0 to {len(ranks) - 1} with all 256 single bytes among the "
            "tokens; the file is damaged or cut short, copy it again"
        )
    return ranks


def _special_tokens(pattern: str, ranks: int) -> dict[str, int]:
    """Special token -> id for a rank file of `ranks` ranks (the table on top of this file)."""
    if pattern == "gpt2":
        offsets = {"<|endoftext|>": 0}
    elif pattern == "cl100k":
        offsets = _CL100K_SPECIALS
    elif pattern == "llama3":
        named = ["<|begin_of_text|>", "<|end_of_text|>"]
        named += [f"<|reserved_special_token_{i}|>" for i in range(4)]
        named += ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
        named += [f"<|reserved_special_token_{i}|>" for i in range(5, 251)]
        offsets = {token: offset for offset, token in enumerate(named)}
    else:
        offsets = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1}
    return {token: ranks + offset for token, offset in offsets.items()}


def _read_pattern(path: Path) -> str:
    """The pattern in a file: JSON {"pattern": "..."}, or the bare expression as text."""
    names = ", ".join(PATTERNS)
    if not path.is_file():
        raise ValueError(f"--tiktoken-pattern {path} is neither a file nor one of {names}")
    text = path.read_text(encoding="utf-8").strip()
    if text.startswith("{"):
        try:
            text = json.loads(text)["pattern"]
        except (ValueError, KeyError):
            raise ValueError(f'--tiktoken-pattern {path} is not JSON of the form {{"pattern": "..."}}') from None
    try:
        tiktoken.Encoding("check", pat_str=text, mergeable_ranks={b"a": 0}, special_tokens={})
    except (ValueError, TypeError) as error:
        raise ValueError(f"--tiktoken-pattern {path} holds no valid regular expression: {error}") from None
    return text


def _spelled(token: str, letters: dict[str, int]) -> bytes:
    """Bytes of a vocabulary entry; a special token is not spelled in byte letters and stands for its own name."""
    try:
        return bytes([letters[letter] for letter in token])
    except KeyError:
        return token.encode()


def _has_long_whitespace(text: str) -> bool:
    """Whether a run of whitespace may be too long for tiktoken; looks at a few places only, never misses one."""
    step = _LONG_WHITESPACE // 2
    return len(text) > _LONG_WHITESPACE and any(text[start : start + 64].isspace() for start in range(0, len(text), step))
