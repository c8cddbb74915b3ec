"""Trains a SentencePiece tokenizer with Llama-2's settings: BPE, byte fallback, single digits, nothing normalised."""

import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_simple.data.inputs import Span, find_inputs
from megatron_simple.data.progress import Progress
from megatron_simple.data.readers import BadRecord, SpanReader
from megatron_simple.data.tokenizer_base import replace_surrogates

logger = logging.getLogger(__name__)

# The trainer counts characters of a sentence in 16 bits and drops longer ones without a word: cut them before.
_SENTENCE_CHARACTERS = 16384
_SETTINGS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "add_dummy_prefix": True,
    "character_coverage": 0.99995,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "max_sentence_length": _SENTENCE_CHARACTERS * 4,  # bytes, so none of ours is dropped
    "num_threads": 1,  # recorded in the model: a fixed number keeps the file the same on every machine
    "minloglevel": 2,
}
_FEWEST_PIECES = 3 + 256  # unk, bos, eos and the bytes


@dataclass(frozen=True)
class TrainingSettings:
    """One run; None for `max_documents` or `sample_bytes` (of UTF-8 text) reads everything."""

    inputs: Sequence[str | Path]
    output_prefix: str | Path
    vocab_size: int
    json_keys: Sequence[str] = ("text",)
    max_documents: int | None = None
    sample_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.vocab_size <= _FEWEST_PIECES:
            raise ValueError(
                f"--vocab-size {self.vocab_size} is too small: 3 special tokens and 256 bytes come before the first "
                "piece of text"
            )
        for flag, value in (("--max-documents", self.max_documents), ("--sample-bytes", self.sample_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{flag} {value}: at least 1 is needed")
        if not Path(self.output_prefix).name or str(self.output_prefix).endswith("/"):
            raise ValueError(f"--output {self.output_prefix} ends in a folder; add the beginning of a file name")


def train_tokenizer(settings: TrainingSettings) -> dict[str, Any]:
    """Writes P.model and P.vocab (piece and score a line) and returns the summary.

    The same text gives the same file. Documents are fed line by line, so that a newline is the byte piece <0x0A> and
    indentation is learned; decode(encode(x)) == x for every text. ValueError for a bad record, for no text, and for a
    vocabulary that the text is too small or too varied for.
    """
    import sentencepiece

    sample = _Sample(settings)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, vocab_size=settings.vocab_size, **_SETTINGS
        )
    except RuntimeError as error:
        if sample.error is not None:
            raise sample.error from None
        raise _explained(error, settings, sample) from None
    if sample.error is not None:
        raise sample.error
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(processor.vocab_size())
    vocabulary = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in pieces)
    prefix = settings.output_prefix
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    _write(Path(f"{prefix}.vocab"), vocabulary.encode())
    _write(Path(f"{prefix}.model"), model.getvalue())
    return {"vocab_size": len(pieces), "documents": sample.documents, "bytes_read": sample.bytes_used}


class _Sample:
    """The training text line by line. What goes wrong in the iteration is kept in `error`: the trainer that iterates
    would turn it into a message of its own."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.paths = find_inputs(settings.inputs)
        self.documents = 0
        self.bytes_used = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts():
                for line in text.split("\n"):
                    yield from _cut(line)
        except (ValueError, OSError) as error:
            self.error = error

    def _texts(self) -> Iterator[str]:
        total = sum(path.stat().st_size for path in self.paths)
        with Progress("read", total=total) as progress:
            for path in self.paths:
                size = path.stat().st_size
                for record in SpanReader(Span(path, 0, size), keys=self.settings.json_keys):
                    if isinstance(record, BadRecord):
                        raise ValueError(f"{path}:{record.line}: {record.reason}")
                    for text in record.texts:
                        text, _ = replace_surrogates(text)
                        self.bytes_used += len(text.encode())
                        yield text
                    self.documents += 1
                    if self._enough():
                        return
                progress.add(size)

    def _enough(self) -> bool:
        most_documents, most_bytes = self.settings.max_documents, self.settings.sample_bytes
        return (most_documents is not None and self.documents >= most_documents) or (
            most_bytes is not None and self.bytes_used >= most_bytes
        )


def _cut(line: str) -> Iterator[str]:
    """`line` in pieces that the trainer takes, cut in front of a space where there is one."""
    start = 0
    while len(line) - start > _SENTENCE_CHARACTERS:
        end = line.rfind(" ", start + 1, start + _SENTENCE_CHARACTERS)
        end = end if end > 0 else start + _SENTENCE_CHARACTERS
        yield line[start:end]
        start = end
    if start < len(line):
        yield line[start:]


def _explained(error: RuntimeError, settings: TrainingSettings, sample: _Sample) -> ValueError:
    message = str(error)
    asked = f"--vocab-size {settings.vocab_size}"
    if match := re.search(r"set it to a value <= (\d+)", message):
        return ValueError(
            f"{asked} is too large for {sample.bytes_used} bytes of text, which give at most {match[1]}; lower it or add text"
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ValueError(f"{asked} is too small for the characters of the text; {match[1]} or more are needed")
    if not sample.bytes_used:
        return ValueError(f"--input {' '.join(map(str, settings.inputs))}: no text in it")
    return ValueError(f"SentencePiece could not train on this text: {message}")


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
