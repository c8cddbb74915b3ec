"""A model with its tokenizer, from a native checkpoint or an exported folder, for writing text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_simple.checkpoint.huggingface import load_model
from megatron_simple.checkpoint.logits_check import load_native
from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.data.tokenizer import load_tokenizer
from megatron_simple.data.tokenizer_base import Tokenizer
from megatron_simple.model.generation import Sampling, generate

UNFINISHED = "\ufffd"  # what a decoder makes of the first bytes of a character


@dataclass(frozen=True)
class TextModel:
    """`logits_of`: token ids [1, S] -> logits [1, S, V]; `limit` is the longest sequence, None where there is none."""

    logits_of: Callable[[Tensor], Tensor]
    tokenizer: Tokenizer
    limit: int | None

    def write(
        self, prompt: str, *, max_new_tokens: int, sampling: Sampling, show: Callable[[str], None] = lambda text: None
    ) -> tuple[str, list[int]]:
        """The text that follows `prompt`, and its token ids; ends early at the end of a document.

        `show` gets the text piece by piece as it comes; a character of several tokens waits until it is whole.

        An empty prompt stands for the beginning of a document. ValueError for a sequence beyond the learned positions.
        """
        if max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
        ids = self.tokenizer.encode(prompt).tolist()
        if not ids:
            first = self.tokenizer.eod if self.tokenizer.bos is None else self.tokenizer.bos
            if first is None:
                raise ValueError("--prompt has no tokens, and the tokenizer has none that begins a document; give a text")
            ids = [first]
        if self.limit is not None and len(ids) + max_new_tokens > self.limit:
            raise ValueError(
                f"{len(ids)} tokens of --prompt and --max-new-tokens {max_new_tokens} are more than the model's "
                f"{self.limit} learned positions; ask for at most {max(0, self.limit - len(ids))}"
            )
        new, text, shown = [], "", 0
        eod = self.tokenizer.eod
        for token in generate(self.logits_of, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=eod):
            new.append(token)
            if token != eod:
                text = self._continuation(ids, new)
            if not text.endswith(UNFINISHED):
                show(text[shown:])
                shown = len(text)
        show(text[shown:])
        return text, new

    def _continuation(self, prompt: list[int], new: list[int]) -> str:
        """The text of `new` behind `prompt`: some tokenizers drop a leading space of a text of its own."""
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode(prompt + new)
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)


def load_text_model(path: str | Path, *, iteration: int | None = None) -> TextModel:
    """The model at `path`, computing in fp32, on a GPU if there is one. ValueError when there is no model or no tokenizer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (Path(path) / "config.json").is_file():
        return _exported(Path(path), device)
    with CheckpointReader(path, iteration=iteration) as reader:
        arguments = reader.tokenizer_arguments()
        if arguments is None:
            raise ValueError(f"--load {path}: the checkpoint holds no tokenizer, so there is no text; train with one")
        tokenizer = load_tokenizer(**arguments)
        config = reader.config.model
        # the weights that the forward pass of training had, and that an export has
        weights = torch.bfloat16 if reader.config.training.bf16 else torch.float32
        model = load_native(reader, round_to=weights).to(device)
    limit = None if config.rotary else config.max_position_embeddings
    return TextModel(lambda tokens: model(tokens.to(device))[..., : config.vocab_size], tokenizer, limit)


def _exported(folder: Path, device: torch.device) -> TextModel:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--load {folder}: there is no tokenizer.json, so there is no text; export with the tokenizer")
    tokenizer = load_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    model: nn.Module = load_model(folder, dtype=torch.float32).to(device)
    limit = model.config.max_position_embeddings if hasattr(model.config, "n_positions") else None
    return TextModel(lambda tokens: model(tokens.to(device), use_cache=False).logits, tokenizer, limit)
