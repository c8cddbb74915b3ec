"""Refuses, once and at start-up, what no run can have: each refusal names the flags and the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

from megatron_simple.config import SITES, Config, ConfigError, ModelConfig, resolve_model


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def resolve(config: Config, *, world_size: int) -> Config:
    """The config with everything derived filled in, checked against the number of ranks.

    Raises ConfigError. `model.vocab_size` may still be open: the tokenizer decides it later.
    """
    _check_numbers(config)
    data_parallel = _data_parallel_size(config, world_size)
    training = config.training
    batch = training.global_batch_size or training.micro_batch_size * data_parallel
    iterations = _train_iters(config, batch)
    training = replace(training, global_batch_size=batch, train_iters=iterations, train_tokens=None)
    config = replace(config, model=resolve_model(config.model, training.seq_length), training=training)
    check_layout(config, world_size=world_size)
    for check in RUN_CHECKS:
        check(config)
    require(
        batch % (training.micro_batch_size * data_parallel) == 0,
        f"--global-batch-size {batch} is no multiple of --micro-batch-size {training.micro_batch_size} x "
        f"{data_parallel} data-parallel ranks; choose a multiple of {training.micro_batch_size * data_parallel}",
    )
    return config


def check_layout(config: Config, *, world_size: int) -> None:
    """Refuses a model that cannot be, or cannot be split as the parallel flags ask."""
    _check_numbers(config)
    _data_parallel_size(config, world_size)
    for check in LAYOUT_CHECKS:
        check(config)


def _data_parallel_size(config: Config, world_size: int) -> int:
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    require(
        world_size % (tp * pp) == 0,
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does not divide the "
        f"{world_size} started processes (torchrun --nproc-per-node)",
    )
    return world_size // (tp * pp)


def _train_iters(config: Config, batch: int) -> int:
    training = config.training
    require(
        (training.train_iters is None) != (training.train_tokens is None),
        "give --train-iters or --train-tokens, exactly one of them",
    )
    if training.train_iters is not None:
        return training.train_iters
    per_step = batch * training.seq_length
    require(training.train_tokens >= per_step, f"--train-tokens is below one step of {per_step} tokens")
    return training.train_tokens // per_step


def _check_numbers(config: Config) -> None:
    for section in (config.model, config.parallel, config.training, config.save, config.log):
        for name, value in vars(section).items():
            flag = f"--{name.replace('_', '-')} {value}"
            require(not isinstance(value, float) or isfinite(value), f"{flag}: must be a finite number")
            require(name not in POSITIVE or value is None or value > 0, f"{flag}: must be above 0")
            require(name not in NOT_NEGATIVE or value is None or value >= 0, f"{flag}: must not be negative")


POSITIVE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size",
    "max_position_embeddings", "make_vocab_size_divisible_by", "norm_epsilon", "rotary_base",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_timeout_minutes", "micro_batch_size",
    "global_batch_size", "seq_length", "train_iters", "train_tokens", "adam_eps", "save_interval", "keep_last",
    "exit_interval", "exit_duration_minutes", "log_interval", "eval_interval", "lr_wsd_decay_iters",
)  # fmt: skip
NOT_NEGATIVE = ("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "eval_iters", "seed")


def check_model(model: ModelConfig) -> None:
    """What the model's own sizes must satisfy, whatever the layout."""
    heads, groups = model.num_attention_heads, model.num_query_groups
    require(
        model.hidden_size % heads == 0,
        f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {heads}",
    )
    require(heads % groups == 0, f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}")
    require(
        not model.rotary or model.head_dim % 2 == 0,
        f"--hidden-size {model.hidden_size} / --num-attention-heads {heads} = {model.head_dim}: rotary embedding "
        "needs an even head dim",
    )
    require(model.rotary or model.rope_scaling is None, "--rope-scaling: the nanogpt backbone has learned positions")
    for site in model.norm_sites or ():
        require(site in SITES, f"--norm-sites: '{site}' is no site; choose from {','.join(SITES)}")


def _check_dropout(config: Config) -> None:
    for name in ("attention_dropout", "hidden_dropout"):
        require(
            getattr(config.training, name) == 0,
            f"--{name.replace('_', '-')}: there is no dropout here (pretraining on one pass of the data needs none); "
            "leave the flag out",
        )


def _check_tensor_parallel(config: Config) -> None:
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    for flag, value in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
    ):
        require(
            value % tp == 0,
            f"{flag} {value} is no multiple of --tensor-model-parallel-size {tp}: every rank needs the same share; "
            f"choose a TP that divides {value}",
        )
    if config.parallel.sequence_parallel:
        length = config.training.seq_length
        require(
            length % tp == 0,
            f"--sequence-parallel: --seq-length {length} is no multiple of --tensor-model-parallel-size {tp}",
        )


def _check_pipeline(config: Config) -> None:
    stages, layers = config.parallel.pipeline_model_parallel_size, config.model.num_layers
    require(
        stages <= layers,
        f"--pipeline-model-parallel-size {stages} is more than --num-layers {layers}: a stage would be empty",
    )
    explicit = config.parallel.pipeline_layers
    if explicit is not None:
        require(
            len(explicit) == stages and sum(explicit) == layers and min(explicit) > 0,
            f"--pipeline-layers {','.join(map(str, explicit))}: needs {stages} positive numbers "
            f"(--pipeline-model-parallel-size) that add up to --num-layers {layers}",
        )


def _check_zero(config: Config) -> None:
    stage, training = config.parallel.zero_stage, config.training
    if config.parallel.pipeline_model_parallel_size > 1:
        require(
            stage == 1,
            f"--zero-stage {stage} with --pipeline-model-parallel-size: the pipeline engine runs at stage 1 only "
            "(2 and 3 would break its gradient accumulation, 0 counts tied embeddings twice); use --zero-stage 1",
        )
    require(
        not (stage == 0 and training.bf16),
        "--zero-stage 0 with --bf16: DeepSpeed's unpartitioned bf16 optimizer gets the gradient norm wrong under tensor "
        "parallelism and accumulates in bf16; use --zero-stage 1 (also on one rank), or --fp32",
    )


def _check_schedule(config: Config) -> None:
    training = config.training
    require(
        training.lr_warmup_iters <= training.train_iters,
        f"--lr-warmup-iters {training.lr_warmup_iters} is more than the run's {training.train_iters} iterations",
    )
    require(training.min_lr <= training.lr, f"--min-lr {training.min_lr} is above --lr {training.lr}")
    for name in ("adam_beta1", "adam_beta2"):
        require(0 <= getattr(training, name) < 1, f"--{name.replace('_', '-')} must be in [0, 1)")


def _check_positions(config: Config) -> None:
    training = config.training
    require(
        config.model.rotary or config.model.max_position_embeddings >= training.seq_length,
        f"--seq-length {training.seq_length} is longer than the {config.model.max_position_embeddings} learned "
        "positions (--max-position-embeddings)",
    )


def _check_paths(config: Config) -> None:
    data, save = config.data, config.save
    require(
        (data.data_path is None) != (data.train_data_path is None),
        "give --data-path PREFIX (with --split), or --train-data-path, exactly one of them",
    )
    require(
        data.valid_data_path is None or data.train_data_path is not None,
        "--valid-data-path goes with --train-data-path; with --data-path the --split makes the validation set",
    )
    require(not save.resume or save.save is not None, "--resume continues from --save DIR: give --save too")
    require(
        save.save is not None or (save.save_interval is None and save.keep_last is None),
        "--save-interval and --keep-last need --save DIR",
    )


LAYOUT_CHECKS: tuple[Callable[[Config], None], ...] = (
    lambda config: check_model(config.model),
    _check_tensor_parallel,
    _check_pipeline,
    _check_positions,
)
RUN_CHECKS: tuple[Callable[[Config], None], ...] = (_check_dropout, _check_zero, _check_schedule, _check_paths)
