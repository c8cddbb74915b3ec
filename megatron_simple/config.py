"""Every setting of a training run, once: frozen dataclasses from which flags and YAML are derived.

Precedence, lowest first: the defaults below, `--config FILE`, the sizes behind `--model NAME`, the other flags.
Settings that no run can have are refused in checks.py, naming the flags and the cure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from megatron_simple import zoo

BACKBONES = ("nanogpt", "llama2", "llama3")
PLACEMENTS = ("prenorm", "qknorm", "simplenorm", "olmo2", "peri")
SITES = (
    "attention_norm", "q_proj", "k_proj", "v_proj", "o_proj", "mlp_norm", "gate_proj", "up_proj", "down_proj",
    "final_norm",
)  # fmt: skip


class ConfigError(ValueError):
    """A setting, or a set of settings, that the user can mend: the message names the flags and the cure."""


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field that becomes a flag. `choices`, `many` (takes several values), `unset` (the flag that sets
    a boolean to false) and `flag` (a name other than the field's) are what the parser needs beyond the type."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and norms of one model. `None` stands for "derived": see `resolve_model`."""

    model: str | None = setting(None, "named size of zoo.py; flags beside it win", choices=tuple(zoo.MODELS))
    backbone: str = setting("llama2", "architecture around the norms", choices=BACKBONES)
    num_layers: int = setting(4, "transformer blocks")
    hidden_size: int = setting(192, "model width D")
    ffn_hidden_size: int | None = setting(None, "MLP width F (nanogpt: 4 D; llama: 8/3 D up to a multiple of 32)")
    num_attention_heads: int = setting(6, "query heads N; D / N is the head dim")
    num_query_groups: int | None = setting(None, "key/value heads K (grouped-query attention); N when not given")
    max_position_embeddings: int | None = setting(None, "positions the model can hold; --seq-length when not given")
    vocab_size: int | None = setting(None, "real vocabulary rows; the tokenizer's when not given")
    make_vocab_size_divisible_by: int = setting(128, "rows are padded to a multiple of lcm(this, TP)")
    norm_placement: str = setting("simplenorm", "row of the table of norm sites", choices=PLACEMENTS)
    norm_sites: tuple[str, ...] | None = setting(None, f"any set of sites, comma-separated: {','.join(SITES)}")
    normalization: str = setting("RMSNorm", "norm operator at every site", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = setting(1e-5, "added to the mean square inside the root")
    qk_norm_width: str = setting("full", "q and k norms over all heads, or per head", choices=("full", "head"))
    rotary_base: float | None = setting(None, "RoPE theta (llama2 1e4, llama3 5e5)")
    rope_scaling: str | None = setting(None, "RoPE scaling rule", choices=("llama3.1",))
    tie_embeddings: bool | None = setting(
        None, "one matrix for embedding and head (default: nanogpt tied, llama untied)",
        flag="tie_embeddings_and_output_weights", unset="untie_embeddings_and_output_weights",
    )  # fmt: skip
    add_bias_linear: bool | None = setting(
        None, "bias in linears and LayerNorms (default: as the size says, else none)", unset="disable_bias_linear"
    )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def gated_mlp(self) -> bool:
        """SwiGLU (gate, up, down) for Llama; GELU (up, down) for nanoGPT."""
        return self.backbone != "nanogpt"

    @property
    def rotary(self) -> bool:
        """RoPE for Llama; learned absolute positions for nanoGPT."""
        return self.backbone != "nanogpt"

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of embedding and head: `vocab_size` up to a multiple of lcm(make_vocab_size_divisible_by, TP)."""
        multiple = lcm(self.make_vocab_size_divisible_by, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ParallelConfig:
    tensor_model_parallel_size: int = setting(1, "TP: ranks that share each linear")
    pipeline_model_parallel_size: int = setting(1, "PP: stages that share the layers")
    sequence_parallel: bool = setting(False, "norms outside the linears work on sequence shards of the TP group")
    pipeline_layers: tuple[int, ...] | None = setting(None, "blocks per stage, for example 7,8,8,7")
    zero_stage: int = setting(1, "DeepSpeed ZeRO stage; with a pipeline only 1", choices=(0, 1, 2, 3))
    distributed_timeout_minutes: float = setting(10.0, "longest wait for another rank [minutes]")


@dataclass(frozen=True)
class TrainingConfig:
    micro_batch_size: int = setting(1, "samples per forward pass and data-parallel rank")
    global_batch_size: int | None = setting(None, "samples per optimiser step (default: micro-batch x DP)")
    seq_length: int = setting(512, "tokens per sample S")
    train_iters: int | None = setting(None, "optimiser steps of the whole run")
    train_tokens: int | None = setting(None, "tokens of the whole run, instead of --train-iters")
    lr: float = setting(1e-3, "peak learning rate")
    min_lr: float = setting(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = setting("cosine", "schedule after the warm-up", choices=("cosine", "linear", "constant", "wsd"))
    lr_warmup_iters: int = setting(0, "steps of linear warm-up")
    lr_wsd_decay_iters: int | None = setting(None, "steps of the final linear decay of wsd (default: a tenth)")
    weight_decay: float = setting(0.1, "decoupled weight decay")
    weight_decay_on: str = setting(
        "matrices", "decay tensors with two dimensions, or all incl. gains", choices=("matrices", "all")
    )
    adam_beta1: float = setting(0.9, "AdamW beta 1")
    adam_beta2: float = setting(0.95, "AdamW beta 2")
    adam_eps: float = setting(1e-8, "AdamW epsilon")
    clip_grad: float = setting(1.0, "largest global gradient norm; 0 switches clipping off")
    bf16: bool = setting(True, "bf16 weights and activations, fp32 masters and accumulation", unset="fp32")
    seed: int = setting(1234, "of initialisation and data order")
    recompute_granularity: str = setting(
        "none", "activations recomputed in backward: none, selective (attention), full (the block)",
        choices=("none", "selective", "full"),
    )  # fmt: skip
    compile: bool = setting(False, "torch.compile each block")
    attention_dropout: float = setting(0.0, "must be 0: there is no dropout")
    hidden_dropout: float = setting(0.0, "must be 0: there is no dropout")


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = setting(None, "dataset prefix P, or W1 P1 W2 P2 ...", many=True)
    split: str = setting("99,1,0", "train, validation and test parts of --data-path's documents")
    train_data_path: tuple[str, ...] | None = setting(None, "training prefixes, instead of a split", many=True)
    valid_data_path: tuple[str, ...] | None = setting(None, "validation prefixes, instead of a split", many=True)
    data_cache_path: str | None = setting(None, "folder for the sample indices (default: beside the data)")
    tokenizer_type: str | None = setting(None, "SentencePieceTokenizer, TikTokenizer, GPT2BPETokenizer or HuggingFaceTokenizer")
    tokenizer_model: str | None = setting(None, "tokenizer file (GPT2BPETokenizer: --vocab-file, --merge-file)")
    vocab_file: str | None = setting(None, "vocab.json of GPT2BPETokenizer")
    merge_file: str | None = setting(None, "merges.txt of GPT2BPETokenizer")
    tiktoken_pattern: str | None = setting(None, "llama3, gpt2, cl100k, or a file with the pattern")


@dataclass(frozen=True)
class SaveConfig:
    save: str | None = setting(None, "folder for checkpoints")
    save_interval: int | None = setting(None, "iterations between checkpoints (one at the end always)")
    load: str | None = setting(None, "folder to start from; fatal if it holds no checkpoint")
    resume: bool = setting(False, "continue from the newest complete checkpoint in --save, if any")
    keep_last: int | None = setting(None, "checkpoints to keep; older ones go once a newer one is complete")
    exit_interval: int | None = setting(None, "save and stop with exit 0 after an iteration divisible by this")
    exit_duration_minutes: float | None = setting(None, "save and stop with exit 0 after this time [minutes]")


@dataclass(frozen=True)
class LogConfig:
    log_dir: str | None = setting(None, "folder for metrics.jsonl, TensorBoard events and config.yaml")
    log_interval: int = setting(1, "iterations per log line")
    eval_interval: int | None = setting(None, "iterations between evaluations (one at the end always)")
    eval_iters: int = setting(10, "global batches per evaluation; 0 switches evaluation off")
    wandb_project: str | None = setting(None, "Weights & Biases project (needs the wandb package)")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain lists, numbers and strings by section, for YAML and JSON."""
        return {
            section: {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
            for section, values in dataclasses.asdict(self).items()
        }


def from_dict(values: dict[str, dict[str, Any]], *, source: str = "config") -> Config:
    """The inverse of `Config.to_dict`; an unknown section or setting is refused by name."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    built = {}
    for section, settings in values.items():
        if section not in sections:
            raise ConfigError(f"{source}: unknown section '{section}' (known: {', '.join(sections)})")
        known = {f.name for f in dataclasses.fields(sections[section])}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(f"{source}: unknown setting '{unknown[0]}' in section '{section}'")
        tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
        built[section] = sections[section](**tuples)
    return Config(**built)


def resolve_model(model: ModelConfig, seq_length: int) -> ModelConfig:
    """Fills in what the backbone decides: F, K, theta, tying, bias, positions. `vocab_size` may stay open."""
    nano = model.backbone == "nanogpt"
    ffn = 4 * model.hidden_size if nano else -(-(8 * model.hidden_size // 3) // 32) * 32
    derived = {
        "ffn_hidden_size": ffn,
        "num_query_groups": model.num_attention_heads,
        "max_position_embeddings": seq_length,
        "rotary_base": {"llama2": 10_000.0, "llama3": 500_000.0, "nanogpt": None}[model.backbone],
        "tie_embeddings": nano,
        "add_bias_linear": False,
    }
    missing = {name: value for name, value in derived.items() if getattr(model, name) is None}
    return dataclasses.replace(model, **missing)
