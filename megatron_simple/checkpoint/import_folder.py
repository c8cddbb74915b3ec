"""From a Hugging Face folder to a native checkpoint of weights: every tensor accounted for, then compared with transformers.

The native format knows no layout, so what comes out serves any tensor, pipeline and data parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_simple.checkpoint.export import unfinished_folder
from megatron_simple.checkpoint.huggingface import ARCHITECTURES, DiskTensor, disk_tensors
from megatron_simple.checkpoint.huggingface_config import model_config
from megatron_simple.checkpoint.logits_check import LogitsCheck, check_logits
from megatron_simple.checkpoint.reader import CheckpointReader
from megatron_simple.checkpoint.safetensors_stream import TensorFolder
from megatron_simple.checkpoint.tokenizer_copy import TokenizerCopy
from megatron_simple.checkpoint.writer import write_weights
from megatron_simple.checks import check_model
from megatron_simple.config import Config, ConfigError, DataConfig, ModelConfig, TrainingConfig

# Tensors that older files hold beside the weights: attention masks and rotary frequencies, which are no parameters.
NO_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class ImportSettings:
    """The parallel sizes are only checked against the model: the checkpoint itself has no layout."""

    input: str
    save: str
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    verify: bool = True


def import_folder(settings: ImportSettings, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Writes a --save folder with one checkpoint of iteration 0 and returns a summary; ValueError for the user's faults."""
    source = Path(settings.input)
    model = read_model_config(source)
    check_layout(model, settings)
    kind = ARCHITECTURES[json.loads((source / "config.json").read_text(encoding="utf-8"))["model_type"]]
    with TensorFolder(source) as folder, unfinished_folder(settings.save, flag="--save") as save:
        names = match_tensors(disk_tensors(model, kind), folder, tied=bool(model.tie_embeddings))
        dtypes = {folder.dtype(stored) for stored in names.values()}
        bf16 = dtypes == {"BF16"}
        config = Config(
            model=model,
            training=TrainingConfig(seq_length=model.max_position_embeddings, bf16=bf16),
            data=DataConfig(),
        )
        say(f"{source}: {kind.causal_lm}, {len(names)} tensors of {', '.join(sorted(dtypes))}")
        tokenizer = _tokenizer_copy(source, model, say)
        write_weights(save, config, _our_tensors(disk_tensors(model, kind), names, folder), tokenizer=tokenizer)
        check = _verify(source, save, say) if settings.verify else None
    return {
        "save": settings.save,
        "class": kind.causal_lm,
        "tensors": len(names),
        "dtype": "bfloat16" if bf16 else "float32",
        "logits_difference": check.difference if check else None,
        "tokenizer": tokenizer is not None,
    }


def read_model_config(folder: Path) -> ModelConfig:
    """Our settings for the folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"--input {folder}: no config.json there; name the folder of a Hugging Face model")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{path} is not JSON; copy the folder again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object; copy the folder again")
    model = model_config(values, source=str(path))
    check_model(model)
    return model


def check_layout(model: ModelConfig, settings: ImportSettings) -> None:
    """Refuses a layout that this model cannot be trained in."""
    tp, stages = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    shared = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_query_groups,
        "columns of the MLP": model.ffn_hidden_size,
    }
    for what, count in shared.items():
        if tp < 1 or count % tp:
            raise ConfigError(f"--tensor-model-parallel-size {tp} does not divide the model's {count} {what}")
    if not 1 <= stages <= model.num_layers:
        raise ConfigError(f"--pipeline-model-parallel-size {stages}: the model has {model.num_layers} layers")


def match_tensors(tensors: list[DiskTensor], folder: TensorFolder, *, tied: bool) -> dict[str, str]:
    """Name of each expected tensor -> its name in the folder, the same but for the prefix that older GPT-2 files lack.

    Raises ConfigError naming the first tensor that is missing, of another shape, or not expected.
    """
    stored = {name for name in folder if not name.endswith(NO_PARAMETERS)}
    names = {}
    for tensor in tensors:
        name = tensor.name if tensor.name in stored else tensor.name.removeprefix("transformer.")
        if name not in stored:
            raise ConfigError(f"{folder.folder}: tensor {tensor.name} is missing; config.json and weights do not match")
        if folder.shape(name) != tensor.shape:
            raise ConfigError(
                f"{folder.folder}: tensor {name} has shape {list(folder.shape(name))}, config.json means {list(tensor.shape)}"
            )
        names[tensor.name] = name
    extra = sorted(stored - set(names.values()))
    if tied and extra == ["lm_head.weight"]:
        embedding = folder.read(names[tensors[0].name])
        if embedding.equal(folder.read("lm_head.weight")):
            return names
        raise ConfigError(f"{folder.folder}: config.json ties the embeddings, but lm_head.weight differs from the embedding")
    if extra:
        raise ConfigError(f"{folder.folder}: tensor {extra[0]} is not part of the model that config.json describes")
    return names


def _our_tensors(tensors: list[DiskTensor], names: dict[str, str], folder: TensorFolder) -> Iterator[tuple[str, Tensor]]:
    for tensor in tensors:
        value = folder.read(names[tensor.name])
        if not tensor.parts and value.any():
            raise ConfigError(
                f"{folder.folder}: config.json says bias false, but {tensor.name} is not zero; remove the setting"
            )
        yield from tensor.split(value)


def _tokenizer_copy(source: Path, model: ModelConfig, say: Callable[[str], None]) -> TokenizerCopy | None:
    """The folder's tokenizer; None where it has no tokenizer.json."""
    if not (source / "tokenizer.json").is_file():
        say(f"{source} has no tokenizer.json, so the checkpoint gets no tokenizer")
        return None
    copy = TokenizerCopy.read({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(source)})
    if copy.vocab_size > model.vocab_size:
        say(f"the tokenizer has {copy.vocab_size} ids, the model {model.vocab_size} rows: the last ids cannot be used")
    return copy


def _verify(source: Path, save: Path, say: Callable[[str], None]) -> LogitsCheck:
    with CheckpointReader(save, flag="--save") as reader:
        check = check_logits(source, reader, dtype="float32")
    say(f"checked against transformers in fp32: {check.sentence()}")
    if not check.passed:
        raise ValueError(
            f"the converted model does not compute what transformers computes: {check.sentence()}; nothing was written "
            "(--no-verify skips this check)"
        )
    return check
