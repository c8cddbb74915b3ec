"""README.md of an exported folder: what the model is, how it was trained, how it is loaded, what was checked."""

from __future__ import annotations

from typing import Any

from megatron_simple.checkpoint.huggingface import Architecture
from megatron_simple.checkpoint.tokenizer_files import ExportedTokenizer
from megatron_simple.config import Config

PAPER = "https://arxiv.org/abs/2602.01212"


def model_card(
    config: Config, architecture: Architecture, tokenizer: ExportedTokenizer, report: dict[str, Any], *, name: str
) -> str:
    """The text of README.md; `report` is the content of conversion.json."""
    tags = ["megatron_simple", architecture.model_type, *(["custom_code"] if architecture.custom else [])]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in tags]
    lines += ["---", "", f"# {name}", ""]
    lines += [_summary(config, report), "", "## Loading", "", _loading(architecture, tokenizer), ""]
    lines += ["## Model", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _table(config, architecture, report).items()]
    lines += ["", "## Checks", "", _checks(report), ""]
    return "\n".join(lines)


def _summary(config: Config, report: dict[str, Any]) -> str:
    tokens = report["consumed_samples"] * config.training.seq_length
    trained = f"trained for {report['iteration']} iterations on {tokens:,} tokens"
    sites = config.model.norm_sites
    places = f"at {', '.join(sites)}" if sites is not None else f"placed as `{config.model.norm_placement}`"
    return (
        f"A causal language model of {report['parameters']:,} parameters, {trained} with megatron_simple. Its norms are "
        f"{places} ([SimpleGPT]({PAPER}))."
    )


def _loading(architecture: Architecture, tokenizer: ExportedTokenizer) -> str:
    remote = ", trust_remote_code=True" if architecture.custom else ""
    code = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    code.append(f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{remote})')
    notes = []
    if tokenizer.fingerprint is not None and tokenizer.problem is None:
        code.append('tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=False)')
        notes.append(
            "The tokenizer adds no token of its own. In training, special tokens written in a text were plain text; "
            "`tokenizer(text, split_special_tokens=True)` does the same."
        )
    if architecture.custom:
        notes.append("After `import megatron_simple.hf` the model loads without `trust_remote_code`.")
    return "\n".join(["```python", *code, "```", *notes])


def _table(config: Config, architecture: Architecture, report: dict[str, Any]) -> dict[str, Any]:
    model = config.model
    positions = f"RoPE, theta {model.rotary_base:g}" if model.rotary else "learned"
    return {
        "class": f"`{architecture.causal_lm}`",
        "layers": model.num_layers,
        "width": model.hidden_size,
        "MLP width": model.ffn_hidden_size,
        "heads / key-value heads": f"{model.num_attention_heads} / {model.num_query_groups}",
        "positions": f"{positions}{', scaled as in Llama 3.1' if model.rope_scaling else ''}",
        "sequence length in training": config.training.seq_length,
        "vocabulary": model.vocab_size,
        "norm": f"{model.normalization}, epsilon {model.norm_epsilon:g}",
        "stored as": report["dtype"],
    }


def _checks(report: dict[str, Any]) -> str:
    check = report["logits_check"]
    if check is None:
        return "The logits were not compared with the training model's."
    return (
        "The folder was loaded with transformers and compared with the training model on fixed tokens in fp32: largest "
        f"difference of logits {check['largest_difference']:.2e}, largest logit {check['largest_logit']:.2f}."
    )
