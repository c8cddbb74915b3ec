"""Flags and YAML: every flag of the documented interface lands in its field; what is given wins over what is derived."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_simple.arguments import parse_config, read_yaml, write_yaml
from megatron_simple.config import Config, ConfigError, resolve_model


def parse(flags: str) -> Config:
    return parse_config(flags.split())


# (flags, section, field, value): the interface that launchers and outside checks rely on.
FLAGS: list[tuple[str, str, str, Any]] = [
    ("--backbone llama3", "model", "backbone", "llama3"),
    ("--num-layers 7", "model", "num_layers", 7),
    ("--hidden-size 96", "model", "hidden_size", 96),
    ("--ffn-hidden-size 160", "model", "ffn_hidden_size", 160),
    ("--num-attention-heads 8", "model", "num_attention_heads", 8),
    ("--num-query-groups 2", "model", "num_query_groups", 2),
    ("--max-position-embeddings 64", "model", "max_position_embeddings", 64),
    ("--vocab-size 500", "model", "vocab_size", 500),
    ("--make-vocab-size-divisible-by 64", "model", "make_vocab_size_divisible_by", 64),
    ("--norm-placement peri", "model", "norm_placement", "peri"),
    ("--norm-sites q_proj,final_norm", "model", "norm_sites", ("q_proj", "final_norm")),
    ("--normalization LayerNorm", "model", "normalization", "LayerNorm"),
    ("--norm-epsilon 1e-6", "model", "norm_epsilon", 1e-6),
    ("--qk-norm-width head", "model", "qk_norm_width", "head"),
    ("--rotary-base 20000", "model", "rotary_base", 20000.0),
    ("--rope-scaling llama3.1", "model", "rope_scaling", "llama3.1"),
    ("--tie-embeddings-and-output-weights", "model", "tie_embeddings", True),
    ("--untie-embeddings-and-output-weights", "model", "tie_embeddings", False),
    ("--add-bias-linear", "model", "add_bias_linear", True),
    ("--disable-bias-linear", "model", "add_bias_linear", False),
    ("--tensor-model-parallel-size 2", "parallel", "tensor_model_parallel_size", 2),
    ("--pipeline-model-parallel-size 2", "parallel", "pipeline_model_parallel_size", 2),
    ("--pipeline-layers 7,8,8,7", "parallel", "pipeline_layers", (7, 8, 8, 7)),
    ("--sequence-parallel", "parallel", "sequence_parallel", True),
    ("--zero-stage 3", "parallel", "zero_stage", 3),
    ("--distributed-timeout-minutes 3", "parallel", "distributed_timeout_minutes", 3.0),
    ("--micro-batch-size 2", "training", "micro_batch_size", 2),
    ("--global-batch-size 8", "training", "global_batch_size", 8),
    ("--seq-length 128", "training", "seq_length", 128),
    ("--train-iters 9", "training", "train_iters", 9),
    ("--train-tokens 9000", "training", "train_tokens", 9000),
    ("--lr 2e-3", "training", "lr", 2e-3),
    ("--min-lr 1e-5", "training", "min_lr", 1e-5),
    ("--lr-decay-style wsd", "training", "lr_decay_style", "wsd"),
    ("--lr-warmup-iters 4", "training", "lr_warmup_iters", 4),
    ("--weight-decay 0.05", "training", "weight_decay", 0.05),
    ("--weight-decay-on all", "training", "weight_decay_on", "all"),
    ("--adam-beta1 0.8", "training", "adam_beta1", 0.8),
    ("--adam-beta2 0.99", "training", "adam_beta2", 0.99),
    ("--adam-eps 1e-7", "training", "adam_eps", 1e-7),
    ("--clip-grad 0.5", "training", "clip_grad", 0.5),
    ("--bf16", "training", "bf16", True),
    ("--fp32", "training", "bf16", False),
    ("--seed 7", "training", "seed", 7),
    ("--recompute-granularity full", "training", "recompute_granularity", "full"),
    ("--compile", "training", "compile", True),
    ("--data-path 1 a 2 b", "data", "data_path", ("1", "a", "2", "b")),
    ("--split 90,5,5", "data", "split", "90,5,5"),
    ("--train-data-path a b", "data", "train_data_path", ("a", "b")),
    ("--valid-data-path c", "data", "valid_data_path", ("c",)),
    ("--data-cache-path d", "data", "data_cache_path", "d"),
    ("--tokenizer-type TikTokenizer", "data", "tokenizer_type", "TikTokenizer"),
    ("--tokenizer-model m", "data", "tokenizer_model", "m"),
    ("--vocab-file v", "data", "vocab_file", "v"),
    ("--merge-file m", "data", "merge_file", "m"),
    ("--tiktoken-pattern llama3", "data", "tiktoken_pattern", "llama3"),
    ("--save s", "save", "save", "s"),
    ("--save-interval 5", "save", "save_interval", 5),
    ("--load l", "save", "load", "l"),
    ("--resume", "save", "resume", True),
    ("--keep-last 2", "save", "keep_last", 2),
    ("--exit-interval 3", "save", "exit_interval", 3),
    ("--exit-duration-minutes 1.5", "save", "exit_duration_minutes", 1.5),
    ("--log-dir g", "log", "log_dir", "g"),
    ("--log-interval 10", "log", "log_interval", 10),
    ("--eval-interval 20", "log", "eval_interval", 20),
    ("--eval-iters 3", "log", "eval_iters", 3),
    ("--wandb-project w", "log", "wandb_project", "w"),
]
DEFAULTS = {
    ("model", "norm_placement"): "simplenorm", ("model", "normalization"): "RMSNorm", ("model", "norm_epsilon"): 1e-5,
    ("model", "qk_norm_width"): "full", ("model", "make_vocab_size_divisible_by"): 128, ("parallel", "zero_stage"): 1,
    ("training", "adam_beta1"): 0.9, ("training", "adam_beta2"): 0.95, ("training", "adam_eps"): 1e-8,
    ("training", "clip_grad"): 1.0, ("training", "bf16"): True, ("training", "weight_decay_on"): "matrices",
    ("data", "split"): "99,1,0", ("training", "recompute_granularity"): "none", ("training", "lr_decay_style"): "cosine",
}  # fmt: skip


@pytest.mark.parametrize(("flags", "section", "name", "value"), FLAGS, ids=lambda value: str(value))
def test_each_flag_lands_in_its_field_and_changes_nothing_else(flags: str, section: str, name: str, value: Any) -> None:
    config = parse_config(flags.split())
    assert getattr(getattr(config, section), name) == value
    untouched = dataclasses.replace(getattr(config, section), **{name: getattr(getattr(Config(), section), name)})
    assert dataclasses.replace(config, **{section: untouched}) == Config()


def test_defaults_of_the_interface() -> None:
    for (section, name), value in DEFAULTS.items():
        assert getattr(getattr(parse_config([]), section), name) == value, name


def test_a_named_size_lies_under_the_flags() -> None:
    config = parse_config(["--model", "llama2-7b"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.ffn_hidden_size) == (32, 4096, 11008)
    config = parse_config(["--num-layers", "3", "--model", "llama2-7b"])
    assert (config.model.num_layers, config.model.hidden_size) == (3, 4096)


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        ("nanogpt", {"ffn_hidden_size": 768, "tie_embeddings": True, "rotary_base": None}),
        ("llama2", {"ffn_hidden_size": 512, "tie_embeddings": False, "rotary_base": 1e4}),
        ("llama3", {"ffn_hidden_size": 512, "tie_embeddings": False, "rotary_base": 5e5}),
    ],
)
def test_the_backbone_decides_what_no_flag_does(backbone: str, expected: dict[str, Any]) -> None:
    model = resolve_model(parse_config(["--backbone", backbone]).model, 64)
    assert {name: getattr(model, name) for name in expected} == expected
    assert (model.num_query_groups, model.max_position_embeddings, model.add_bias_linear) == (6, 64, False)


def test_a_yaml_file_brings_the_same_config_back(tmp_path: Path) -> None:
    config = parse("--model llama3-cpu --norm-sites q_proj --data-path 1 ä --pipeline-layers 2,2 --fp32")
    write_yaml(config, tmp_path / "config.yaml")
    assert read_yaml(tmp_path / "config.yaml") == config
    assert parse_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_flags_override_a_yaml_file_and_one_of_a_pair_takes_the_other_out(tmp_path: Path) -> None:
    write_yaml(parse("--train-iters 9 --lr 0.5 --data-path a --hidden-size 384"), tmp_path / "c.yaml")
    config = parse_config(
        ["--config", str(tmp_path / "c.yaml"), "--train-tokens", "800", "--train-data-path", "b", "--lr", "1"]
    )
    assert (config.training.train_iters, config.training.train_tokens, config.training.lr) == (None, 800, 1.0)
    assert (config.data.data_path, config.data.train_data_path, config.model.hidden_size) == (None, ("b",), 384)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {hidden_sise: 3}", ["unknown setting 'hidden_sise'", "section 'model'"]),
        ("modle: {}", ["unknown section 'modle'"]),
        ("- 1", ["expected sections"]),
        ("a: [", ["cannot be read"]),
    ],
)
def test_a_wrong_yaml_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_config(["--config", str(path)])
    assert all(word in str(caught.value) for word in [str(path), *words])


@pytest.mark.parametrize("flags", ["--foo", "--hidden-size x", "--zero-stage 4", "--model gpt5", "--lr", "--hidden 3"])
def test_wrong_flags_raise_config_error(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.split()[0]):
        parse_config(flags.split())
