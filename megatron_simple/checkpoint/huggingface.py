"""The one map between our parameters and the tensors of Hugging Face folders; both directions follow from it.

| model                                                       | Hugging Face class      | files of its own |
|-------------------------------------------------------------|-------------------------|------------------|
| llama, sites of prenorm, RMSNorm                            | LlamaForCausalLM        |                  |
| llama, sites of olmo2, RMSNorm, full-width q and k, no bias | Olmo2ForCausalLM        |                  |
| llama, anything else                                        | SimpleGPTForCausalLM    | simplegpt        |
| nanogpt, sites of prenorm, LayerNorm, as many kv heads      | GPT2LMHeadModel         |                  |
| nanogpt, anything else                                      | SimpleGPT2LMHeadModel   | simplegpt2       |

Our q and k rows are half-split already, as Hugging Face has them, so nothing is permuted. GPT-2 keeps q, k and v in one
tensor and its linears as [in, out]; GPT2LMHeadModel has biases everywhere, so a model without them is written with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_simple.config import ModelConfig
from megatron_simple.model.norm import PLACEMENTS, sites_of
from megatron_simple.model.transformer import parameter_table

HF_FOLDER = Path(__file__).parents[1] / "hf"


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model class: `model_type` of config.json, the class with the head, the class without it."""

    model_type: str
    causal_lm: str
    base: str
    modules: dict[str, str]
    outside: dict[str, str]
    fused_linears: bool = False
    zero_biases: bool = False
    custom: bool = False

    @property
    def code_files(self) -> list[Path]:
        """The Python files that travel with an exported folder."""
        names = (f"configuration_{self.model_type}.py", f"modeling_{self.model_type}.py") if self.custom else ()
        return [HF_FOLDER / name for name in names]


def _llama_modules(**norms: str) -> dict[str, str]:
    linears = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    same = {name: name for name in linears}
    behind = {f"{name}.norm": name.replace("_proj", "_norm") for name in linears}
    front = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return same | behind | front | {name.replace("__", "."): value for name, value in norms.items()}


LLAMA_OUTSIDE = {
    "embed_tokens": "model.embed_tokens",
    "layers": "model.layers",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
GPT2_OUTSIDE = {
    "embed_tokens": "transformer.wte",
    "position_embeddings": "transformer.wpe",
    "layers": "transformer.h",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
GPT2_MODULES = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "self_attn.q_proj.norm": "attn.q_norm",
    "self_attn.k_proj.norm": "attn.k_norm",
    "self_attn.v_proj.norm": "attn.v_norm",
    "self_attn.o_proj.norm": "attn.o_norm",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "mlp.up_proj.norm": "mlp.fc_norm",
    "mlp.down_proj.norm": "mlp.proj_norm",
}
OLMO2_MODULES = _llama_modules(
    self_attn__o_proj__norm="post_attention_layernorm", mlp__down_proj__norm="post_feedforward_layernorm"
)
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture("llama", "LlamaForCausalLM", "LlamaModel", _llama_modules(), LLAMA_OUTSIDE),
        Architecture("olmo2", "Olmo2ForCausalLM", "Olmo2Model", OLMO2_MODULES, LLAMA_OUTSIDE),
        Architecture(
            "simplegpt", "SimpleGPTForCausalLM", "SimpleGPTModel", _llama_modules(), LLAMA_OUTSIDE, custom=True
        ),
        Architecture(
            "gpt2", "GPT2LMHeadModel", "GPT2Model", GPT2_MODULES, GPT2_OUTSIDE, fused_linears=True, zero_biases=True
        ),
        Architecture(
            "simplegpt2", "SimpleGPT2LMHeadModel", "SimpleGPT2Model", GPT2_MODULES, GPT2_OUTSIDE,
            fused_linears=True, custom=True,
        ),
    )
}  # fmt: skip


def architecture_of(config: ModelConfig) -> Architecture:
    """The plainest Hugging Face class that is exactly this model (the table on top)."""
    sites = sites_of(config)
    if not config.rotary:
        plain = config.normalization == "LayerNorm" and config.num_query_groups == config.num_attention_heads
        return ARCHITECTURES["gpt2" if plain and sites == set(PLACEMENTS["prenorm"]) else "simplegpt2"]
    if config.normalization == "RMSNorm":
        if sites == set(PLACEMENTS["prenorm"]):
            return ARCHITECTURES["llama"]
        if sites == set(PLACEMENTS["olmo2"]) and config.qk_norm_width == "full" and not config.add_bias_linear:
            return ARCHITECTURES["olmo2"]
    return ARCHITECTURES["simplegpt"]


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a Hugging Face folder: `parts`, our parameters of it, joined along their first dim.

    `rows` are the parts' first dims; `transposed` says that the joined matrix lies as [in, out]. Without parts the tensor
    stands for biases that our model lacks, and is zero.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor as it lies on disk, from a function that gives our parameters by name."""
        if not self.parts:
            return torch.zeros(self.shape)
        joined = torch.cat([read(part) for part in self.parts]) if len(self.parts) > 1 else read(self.parts[0])
        return joined.T.contiguous() if self.transposed else joined

    def split(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our parameters out of the tensor as it lies on disk: the inverse of `join`."""
        if self.parts:
            rows = value.T if self.transposed else value
            yield from zip(self.parts, (part.contiguous() for part in rows.split(self.rows)), strict=True)


def disk_tensors(config: ModelConfig, architecture: Architecture | None = None) -> list[DiskTensor]:
    """Every tensor of the exported model, in the model's order; each of our parameters is part of exactly one."""
    architecture = architecture or architecture_of(config)
    grouped: dict[str, list[str]] = {}
    table = parameter_table(config)
    for name in table:
        grouped.setdefault(_disk_name(name, architecture), []).append(name)
    tensors = []
    for name, parts in grouped.items():
        shapes = [table[part][0] for part in parts]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        linear = parts[0].endswith("_proj.weight")
        transposed = architecture.fused_linears and linear
        stored = shape[::-1] if transposed else shape
        tensors.append(DiskTensor(name, stored, tuple(parts), tuple(s[0] for s in shapes), transposed))
        bias = name.removesuffix("weight") + "bias"
        biased = linear or parts[0].endswith("norm.weight")
        if architecture.zero_biases and biased and not config.add_bias_linear:
            tensors.append(DiskTensor(bias, shape[:1], (), ()))
    return tensors


def _disk_name(name: str, architecture: Architecture) -> str:
    """The Hugging Face name of the tensor that holds our parameter `name`; KeyError for a name the map lacks."""
    module, leaf = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{architecture.outside[module]}.{leaf}"
    layers, index, inside = module.split(".", 2)
    return f"{architecture.outside[layers]}.{index}.{architecture.modules[inside]}.{leaf}"


def load_model(folder: str | Path, *, dtype: torch.dtype) -> Any:
    """The folder's model as a transformers class in `dtype`, in evaluation mode; our own classes need no remote code."""
    from transformers import AutoModelForCausalLM, logging

    import megatron_simple.hf  # noqa: F401  registers our classes with the Auto classes

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    except SafetensorError as error:
        raise ValueError(f"{folder}: its .safetensors cannot be read ({error}); copy the folder again") from error
    wrong = sorted(name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind])
    if wrong:
        raise ValueError(f"{folder}: transformers finds {wrong[0]} missing, unexpected or of another shape")
    return model.eval()
