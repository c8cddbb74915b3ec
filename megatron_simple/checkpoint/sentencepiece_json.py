"""A SentencePiece BPE model as a Hugging Face tokenizer: the same pieces, merges, normalisation and byte fallback.

A .model file is a protocol-buffers message; these are the fields that decide about encoding (number: meaning):
    model       1 pieces   2 trainer settings   3 normaliser settings
    piece       1 text   2 score (float)   3 type: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    trainer     3 model type: 1 unigram, 2 BPE   24 whitespace as suffix   35 byte fallback
    normaliser  2 compiled character map   3 add dummy prefix   4 remove extra whitespace   5 escape whitespace
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"


class NotConvertible(ValueError):
    """The tokenizer has no exact counterpart among Hugging Face tokenizers; the message says why."""


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[Piece]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) pairs of a protocol-buffers message; nested messages and strings stay bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = struct.unpack_from("<d" if kind == 1 else "<f", message, at)[0], at + size
        elif kind == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise NotConvertible("the SentencePiece file has a field of an unknown kind")
        yield tag >> 3, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def read_model(path: str | Path) -> SentencePieceModel:
    """Pieces and settings of a .model file."""
    pieces: list[Piece] = []
    settings: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for number, value in fields(Path(path).read_bytes()):
        if number == 1:
            piece = dict(fields(value))
            pieces.append(Piece(piece.get(1, b"").decode("utf-8"), piece.get(2, 0.0), piece.get(3, NORMAL)))
        elif number in settings:
            settings[number] = dict(fields(value))
    return SentencePieceModel(pieces, settings[2], settings[3])


def to_tokenizer(path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` of a SentencePiece BPE model. NotConvertible for other kinds."""
    from tokenizers import AddedToken, Tokenizer, models

    model = read_model(path)
    if model.trainer.get(3, UNIGRAM) != BPE:
        raise NotConvertible("only SentencePiece models of the BPE kind have a counterpart here, this one is not BPE")
    if model.trainer.get(24, 0):
        raise NotConvertible("the SentencePiece model keeps whitespace as a suffix")
    vocabulary = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.text for piece in model.pieces if piece.kind == UNKNOWN)
    engine = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(model.pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(model.trainer.get(35, 0)),
        )
    )
    engine.normalizer = _normalizer(model.normalizer)
    engine.decoder = _decoder(model.normalizer)
    engine.add_special_tokens(
        [AddedToken(p.text, normalized=False, special=True) for p in model.pieces if p.kind in (UNKNOWN, CONTROL)]
    )
    engine.add_tokens([AddedToken(p.text, normalized=False) for p in model.pieces if p.kind == USER_DEFINED])
    return engine


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Every way to make a normal piece out of two, best score first: SentencePiece merges by the result's score."""
    normal = {piece.text: number for number, piece in enumerate(pieces) if piece.kind == NORMAL}
    ordered = sorted(normal, key=lambda text: (-pieces[normal[text]].score, normal[text]))
    merges = []
    for text in ordered:
        splits = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [split for split in splits if split[0] in normal and split[1] in normal]
        merges += sorted(known, key=lambda split: (normal[split[0]], normal[split[1]]))
    return merges


def _normalizer(settings: dict[int, Any]) -> Any:
    from tokenizers import Regex, normalizers

    steps = []
    if settings.get(2):
        steps.append(normalizers.Precompiled(settings[2]))
    if settings.get(4, 1):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.get(3, 1):
        steps.append(normalizers.Prepend(SPACE if settings.get(5, 1) else " "))
    if settings.get(5, 1):
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(settings: dict[int, Any]) -> Any:
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if settings.get(3, 1):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
