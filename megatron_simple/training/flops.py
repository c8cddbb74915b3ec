"""Floating-point operations of one training step, component by component, and the peak of known GPUs.

A matrix product of m x k by k x n counts 2 m k n. Backward costs twice the forward; recomputation is not counted (it is no
useful work). Attention counts the causal half of the score matrix. Norms, rotations and activations are left out (< 1 %).
"""

from __future__ import annotations

from megatron_simple.config import ModelConfig

# Dense bf16 peak [FLOP/s] by a part of the device's name.
PEAK_FLOPS = {"A800": 312e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "H800": 989e12}


def forward_flops_per_token(model: ModelConfig, seq_length: int) -> dict[str, float]:
    """Forward FLOPs per token by component, for samples of `seq_length` tokens."""
    hidden, head_dim = model.hidden_size, model.head_dim
    query, key = model.num_attention_heads * head_dim, model.num_query_groups * head_dim
    matrices = 3 if model.gated_mlp else 2
    mean_context = (seq_length + 1) / 2  # a query attends to itself and what stands before it
    return {
        "attention_linears": model.num_layers * 2 * hidden * (query + 2 * key + query),
        "attention_scores": model.num_layers * 2 * 2 * query * mean_context,
        "mlp": model.num_layers * 2 * matrices * hidden * model.ffn_hidden_size,
        "head": 2 * hidden * model.vocab_size,
    }


def training_flops_per_token(model: ModelConfig, seq_length: int) -> float:
    return 3 * sum(forward_flops_per_token(model, seq_length).values())


def model_flops_utilization(
    model: ModelConfig, seq_length: int, *, tokens_per_second: float, device_name: str | None, devices: int
) -> float | None:
    """Achieved over peak bf16 FLOP/s; None where the device's peak is not known."""
    peak = next((peak for name, peak in PEAK_FLOPS.items() if device_name and name in device_name), None)
    if peak is None:
        return None
    return tokens_per_second * training_flops_per_token(model, seq_length) / (peak * devices)
