"""Tokenizer files of a few hundred tokens, written by the tests that need them."""

import base64
import json
from pathlib import Path

import numpy as np

from megatron_simple.data.merges import gpt2_byte_letters

LETTERS = {byte: letter for letter, byte in gpt2_byte_letters().items()}
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("o", "r"),
    ("Ġw", "or"),
    ("Ġ", "Ġ"),
    ("<", "|"),
]
ODD_TEXTS = [
    "hello world", " hello  world\n\n\thello", "", " ", "\n", "a\0b", "\ufeffx\r\n", "😀 naïve 人人", "\ud83d lone",
    "</s><s><unk><|endoftext|><|begin_of_text|>[EOS]", "'s 'LL 12345 !!!???", "\u2028\u3000\xa0x",
]  # fmt: skip


def write_gpt2(folder: Path, merges: list[tuple[str, str]] = MERGES, *, shuffled: bool = False) -> dict[str, str]:
    """A tiny GPT-2 vocabulary of the bytes, `merges` and <|endoftext|>; shuffled: ids in no order of rank."""
    tokens = list(dict.fromkeys([*LETTERS.values(), *(left + right for left, right in merges), "<|endoftext|>"]))
    ids = np.random.default_rng(0).permutation(len(tokens)).tolist() if shuffled else range(len(tokens))
    vocabulary, merge_file = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps(dict(zip(tokens, ids, strict=True))), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    merge_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocabulary), "merge_file": str(merge_file)}


def write_ranks(path: Path, extra: tuple[bytes, ...] = (b"he", b"ll", b"hell", b"hello")) -> Path:
    tokens = [*(bytes([byte]) for byte in range(256)), *extra]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path
