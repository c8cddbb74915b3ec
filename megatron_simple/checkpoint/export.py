"""From a native checkpoint to a Hugging Face folder: streamed, compared with the training model, then put in place."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_simple import __version__
from megatron_simple.checkpoint.format import MANIFEST
from megatron_simple.checkpoint.huggingface import Architecture, architecture_of, disk_tensors
from megatron_simple.checkpoint.huggingface_config import config_json
from megatron_simple.checkpoint.logits_check import LogitsCheck, check_logits, write_report
from megatron_simple.checkpoint.model_card import model_card
from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.checkpoint.safetensors_stream import PlannedTensor, parse_size, write_folder
from megatron_simple.checkpoint.tokenizer_files import TOKENIZER_CLASS, ExportedTokenizer, write_tokenizer
from megatron_simple.data.progress import Progress


@dataclass(frozen=True)
class ExportSettings:
    """`load` is a --save folder or one checkpoint; `dtype` None stands for the training dtype."""

    load: str
    output: str
    iteration: int | None = None
    dtype: str | None = None
    max_shard_size: str = "5GB"
    verify: bool = True


def export(settings: ExportSettings, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes the folder and returns a summary; `say` gets one line per finding. ValueError for what a user can mend.

    Until everything is written and checked it lies in OUTPUT.partial, which is removed when something fails.
    """
    max_bytes = parse_size(settings.max_shard_size)
    with (
        CheckpointReader(settings.load, iteration=settings.iteration) as reader,
        unfinished_folder(settings.output, flag="--output") as folder,
    ):
        dtype = settings.dtype or ("bfloat16" if reader.config.training.bf16 else "float32")
        architecture = architecture_of(reader.config.model)
        say(f"{reader.folder}: iteration {reader.iteration}, written as {architecture.causal_lm} in {dtype}")
        parameters = _write_weights(folder, reader, dtype=dtype, max_bytes=max_bytes)
        tokenizer = _write_tokenizer(folder, reader, say)
        _write_settings(folder, reader, architecture, tokenizer, dtype=dtype)
        check = _verify(folder, reader, dtype=dtype, say=say) if settings.verify else None
        report = _report(reader, architecture, tokenizer, check, dtype=dtype, parameters=parameters)
        write_report(folder / "conversion.json", report)
        card = model_card(reader.config, architecture, tokenizer, report, name=Path(settings.output).name)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = sorted(path.name for path in folder.iterdir())
    return {
        "output": settings.output,
        "class": architecture.causal_lm,
        "iteration": report["iteration"],
        "dtype": dtype,
        "parameters": parameters,
        "logits_difference": check.difference if check else None,
        "tokenizer": tokenizer.fingerprint is not None and tokenizer.problem is None,
        "files": files,
    }


@contextmanager
def unfinished_folder(final: str | Path, *, flag: str) -> Iterator[Path]:
    """A new folder FINAL.partial, renamed to FINAL when the block ends well and removed when it does not.

    Raises ValueError when FINAL exists and is not an empty folder.
    """
    final = Path(final)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{flag} {final} exists and is not an empty folder; remove it or name another one")
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a write to an open file does not say where
            raise OSError(f"{flag} {final} cannot be written: {error.strerror or error}") from error
        raise


def _write_weights(folder: Path, reader: CheckpointReader, *, dtype: str, max_bytes: int) -> int:
    """Streams all tensors; returns the number of parameters of our model (without zeros that stand for absent biases)."""
    tensors = {tensor.name: tensor for tensor in disk_tensors(reader.config.model)}
    planned = [PlannedTensor(tensor.name, tensor.shape) for tensor in tensors.values()]
    known = {part for tensor in tensors.values() for part in tensor.parts}
    if known != set(reader.parameters):
        name = min(known ^ set(reader.parameters))
        raise ValueError(f"{reader.folder}: {name} is not in both the checkpoint and the model of its settings")
    with Progress("writing", total=sum(tensor.nbytes(dtype) for tensor in planned)) as progress:
        write_folder(
            folder,
            planned,
            lambda name: tensors[name].join(reader.read),
            dtype=dtype,
            max_bytes=max_bytes,
            progress=progress.add,
        )
    return sum(math.prod(info.shape) for info in reader.parameters.values())


def _write_tokenizer(folder: Path, reader: CheckpointReader, say: Callable[[str], None]) -> ExportedTokenizer:
    arguments = reader.tokenizer_arguments()
    if arguments is None:
        say("the checkpoint holds no tokenizer, so the folder gets none")
        return ExportedTokenizer()
    try:
        tokenizer = write_tokenizer(folder, arguments, max_length=reader.config.model.max_position_embeddings)
    except ValueError as error:
        say(f"the folder gets no tokenizer: {error}")
        return ExportedTokenizer(problem=str(error))
    if tokenizer.problem:
        say(f"the folder gets the tokenizer's own files, but no tokenizer.json: {tokenizer.problem}")
    else:
        say(f"tokenizer: {', '.join(tokenizer.files)}; same ids as in training on all probing texts")
    return tokenizer


def _write_settings(
    folder: Path, reader: CheckpointReader, architecture: Architecture, tokenizer: ExportedTokenizer, *, dtype: str
) -> None:
    """config.json, generation_config.json and the model's Python files."""
    transformers_version = version("transformers")
    values = config_json(reader.config.model, dtype=dtype, bos=tokenizer.bos, eos=tokenizer.eod)
    if tokenizer.fingerprint is not None and tokenizer.problem is None:
        values["tokenizer_class"] = TOKENIZER_CLASS
    write_report(folder / "config.json", {**values, "transformers_version": transformers_version})
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    given = {name: value for name, value in ids.items() if value is not None}
    write_report(folder / "generation_config.json", {**given, "transformers_version": transformers_version})
    for path in architecture.code_files:
        shutil.copyfile(path, folder / path.name)


def _verify(folder: Path, reader: CheckpointReader, *, dtype: str, say: Callable[[str], None]) -> LogitsCheck:
    check = check_logits(folder, reader, dtype=dtype)
    say(f"checked against the training model in fp32: {check.sentence()}")
    if not check.passed:
        raise ValueError(
            f"the exported model does not compute what the training model computes: {check.sentence()}; nothing was "
            "written (--no-verify skips this check)"
        )
    return check


def _report(
    reader: CheckpointReader,
    architecture: Architecture,
    tokenizer: ExportedTokenizer,
    check: LogitsCheck | None,
    *,
    dtype: str,
    parameters: int,
) -> dict[str, Any]:
    """The content of conversion.json: where the folder came from and what was checked. Holds no absolute path."""
    model = reader.config.model
    manifest = (reader.folder / MANIFEST).read_bytes()
    return {
        "megatron_simple": __version__,
        "source": reader.folder.name,
        "source_manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "iteration": reader.iteration,
        "consumed_samples": reader.consumed_samples,
        "class": architecture.causal_lm,
        "dtype": dtype,
        "parameters": parameters,
        "vocabulary_rows": model.vocab_size,
        "rotary_layout": "half-split" if model.rotary else None,
        "tokenizer": {"sha256": tokenizer.fingerprint, "files": tokenizer.files, "problem": tokenizer.problem},
        "logits_check": {"largest_difference": check.difference, "largest_logit": check.scale} if check else None,
        "model": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(model).items()},
    }
