"""What every tokenizer offers, and how a tokenizer file is recognised by its content."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SURROGATE = re.compile("[\ud800-\udfff]")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\n")


class Tokenizer(ABC):
    """Text to token ids and back, from local files only.

    `vocab_size` is the largest id + 1. `eod` and `bos` are the ids that end and begin a document, None where the
    vocabulary has none. Special tokens are never read from text: a literal "</s>" or "<|endoftext|>" is plain text.
    Lone surrogates, which have no UTF-8 form, are encoded as U+FFFD.
    """

    name: str
    vocab_size: int
    eod: int | None
    bos: int | None
    files: dict[str, Path]
    pattern: str = ""  # the expression that cuts a text into words, where it is not part of the files

    @abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """Ids of one text that holds no lone surrogate, 1-D, any integer type."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. ValueError for an id without a token."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of one text, int32 [tokens]; no bos, no eod."""
        return self._encode(replace_surrogates(text)[0]).astype(np.int32, copy=False)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All ids of `texts` one after another, int32 [tokens], and the ids of each text, int64 [texts]."""
        arrays = [self.encode(text) for text in texts]
        lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
        tokens = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
        return tokens, lengths

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 over type, pattern and the content of the files; the files' names do not count."""
        digest = hashlib.sha256(f"{self.name} {self.pattern}".encode())
        for role, path in sorted(self.files.items()):
            digest.update(f"\n{role} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for chunk in iter(lambda: file.read(1 << 20), b""):
                    digest.update(chunk)
        return digest.hexdigest()


def replace_surrogates(text: str) -> tuple[str, int]:
    """`text` with each lone surrogate replaced by U+FFFD, and how many there were."""
    try:
        text.encode("utf-8")  # far faster than a search, and nearly every text passes
    except UnicodeEncodeError:
        return _SURROGATE.subn("\ufffd", text)
    return text, 0


def require_file(value: str | Path | None, *, flag: str, tokenizer_type: str) -> Path:
    """The path behind `flag`; ValueError when it was not given, is missing, is a folder, or is empty."""
    if not value:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {flag} FILE")
    path = Path(value)
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; --tokenizer-type {tokenizer_type} needs the file itself")
    if not path.is_file():
        raise ValueError(f"{flag} {path}: no such file (tokenizers are read from local files, never downloaded)")
    if path.stat().st_size == 0:
        raise ValueError(f"{flag} {path} is empty; copy the tokenizer file again")
    return path


def wrong_content(path: Path, *, flag: str, tokenizer_type: str, wanted: str) -> ValueError:
    """The error for a file that is not what `tokenizer_type` reads: says what the file looks like and the cure."""
    kind, cure = _recognise(path)
    if cure is None or f"--tokenizer-type {tokenizer_type}" in cure:
        cure = "name the right file, or copy it again if it is damaged"
    return ValueError(f"{flag} {path} is not {wanted} but {kind}; {cure}")


def _recognise(path: Path) -> tuple[str, str | None]:
    """What the file at `path` is, told from its content, and what to do about it (None where nothing is known)."""
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer", "fetch the real file with `git lfs pull`"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page", "download the file itself, not the page that shows it"
    if _RANK_LINE.match(head):
        return "a tiktoken rank file", "use --tokenizer-type TikTokenizer with --tiktoken-pattern"
    if head.startswith(b"#version"):
        return "a GPT-2 merges file", "use --tokenizer-type GPT2BPETokenizer with --vocab-file and --merge-file"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return _recognise_json(path)
    if head.startswith(b"\n") and b"\0" in head:
        return "a SentencePiece model (or the beginning of one)", "use --tokenizer-type SentencePieceTokenizer"
    return "a file of unknown format or cut short", None


def _recognise_json(path: Path) -> tuple[str, str | None]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return "JSON that is damaged or cut short", None
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        return "a Hugging Face tokenizer.json", "use --tokenizer-type HuggingFaceTokenizer"
    if isinstance(content, dict) and content and all(isinstance(value, int) for value in content.values()):
        return "a GPT-2 vocabulary", "use --tokenizer-type GPT2BPETokenizer with --vocab-file and --merge-file"
    return "JSON of another kind", None
