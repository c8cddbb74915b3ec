"""The tokenizer that travels in every checkpoint: its files as they were when the run began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_simple.checkpoint.format import TOKENIZER_FOLDER
from megatron_simple.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TokenizerCopy:
    """load_tokenizer's arguments with the bare names of the files, and the files' contents by name.

    Read once, before training: a file that is moved or edited while a run goes on changes no checkpoint of it.
    """

    arguments: dict[str, str]
    contents: dict[str, bytes]
    vocab_size: int

    @staticmethod
    def read(arguments: Mapping[str, str]) -> TokenizerCopy:
        """Reads the files that this tokenizer uses, and no others of their folder; ValueError as load_tokenizer has it."""
        tokenizer = load_tokenizer(**arguments)
        named, contents = dict(arguments), {}
        for role, path in tokenizer.files.items():
            name = path.name if path.name not in contents else f"{role}-{path.name}"
            contents[name] = path.read_bytes()
            argument = "tokenizer_model" if role == "tokenizer_json" else role
            if argument in named:
                named[argument] = name
        return TokenizerCopy(named, contents, tokenizer.vocab_size)

    def write(self, checkpoint: Path) -> dict[str, str]:
        """Writes the files into the checkpoint's own folder; returns the arguments for its manifest."""
        folder = checkpoint / TOKENIZER_FOLDER
        folder.mkdir()
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)
        return self.arguments
