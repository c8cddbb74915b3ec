"""Bytes per token that one block keeps for backward, by placement: a formula, and the count by hooks it is tested against.

python benchmarks/block_memory.py        prints the table of the README
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_simple.config import PLACEMENTS, ModelConfig, resolve_model
from megatron_simple.model.init import initialize
from megatron_simple.model.norm import sites_of
from megatron_simple.model.transformer import Block
from megatron_simple.parallel.mesh import Axis
from megatron_simple.zoo import MODELS

SHAPES = ("llama2-7b", "llama3-8b")


def kept_elements(config: ModelConfig) -> tuple[int, int]:
    """(elements in the activations' dtype, fp32 scalars) per token of one block on one rank; no recomputation.

    The linears keep their input, attention q, k, v, its output and one scalar per head, a norm its input and one scalar. A
    norm in front adds its output, as the linears' input; one behind adds nothing where the product is kept anyway.
    """
    width, inner = config.hidden_size, config.ffn_hidden_size
    kv_width = config.num_query_groups * config.head_dim
    sites = sites_of(config)
    attention = width + 2 * kv_width + width  # q, k, v behind norm and rotation; the output, which is o_proj's input
    streams = 2 * width  # the inputs of both sublayers
    mlp = (3 if config.gated_mlp else 2) * inner  # the products, and down_proj's input
    behind = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width, "o_proj": width, "down_proj": width}
    front = {"attention_norm": width, "mlp_norm": width}
    norms = sum(size for site, size in (behind | front).items() if site in sites)
    return attention + streams + mlp + norms, config.num_attention_heads + len(sites - {"final_norm"})


def kept_bytes(config: ModelConfig, *, tokens: int, dtype: torch.dtype) -> int:
    """Counted: every distinct storage that a block's forward pass saves, without parameters and the rotary table."""
    block = Block(config, tp=Axis(), sequence_parallel=False, recompute="none")
    initialize(block, "layers.0", config, seed=1)
    block = block.to(dtype)
    x = torch.randn(1, tokens, config.hidden_size).to(dtype).requires_grad_()
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    sizes: dict[int, int] = {}
    kept = []  # keeps the storages alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        table = tuple(tensor.shape) == (tokens, config.head_dim)
        address = tensor.untyped_storage().data_ptr()
        if address not in own and not table:
            sizes[address] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(sizes.values())


def main() -> None:
    print("| placement | " + " | ".join(f"{shape}, KiB per token | / qknorm" for shape in SHAPES) + " |")
    print("|---|" + "---:|" * 2 * len(SHAPES))
    for placement in PLACEMENTS:
        cells = []
        for shape in SHAPES:
            kept = {}
            for name in (placement, "qknorm"):
                config = resolve_model(dataclasses.replace(ModelConfig(**MODELS[shape]), norm_placement=name), 2048)
                activations, scalars = kept_elements(config)
                kept[name] = activations * 2 + scalars * 4
            cells += [f"{kept[placement] / 1024:.1f}", f"{kept[placement] / kept['qknorm']:.3f}"]
        print(f"| {placement} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
