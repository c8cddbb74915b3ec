"""Vocab-parallel cross-entropy against torch's own, padding included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_simple.config import ParallelConfig
from megatron_simple.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_simple.parallel.mesh import Axis, build_mesh, discover_process, start_distributed, stop_distributed
from tests.distributed import run_ranks

REAL, PADDED = 21, 32  # at four ranks the last one holds padding only


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(3, 5, PADDED, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, REAL, (3, 5), generator=generator)


def reference(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = sample(dtype)
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide[..., :REAL].reshape(-1, REAL), labels.reshape(-1), reduction="none").view(3, 5)
    losses.square().sum().backward()
    return losses.detach(), wide.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_one_rank(dtype: torch.dtype, tolerance: float) -> None:
    logits, labels = sample(dtype)
    logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, labels, Axis(), vocab_size=REAL)
    losses.square().sum().backward()
    wanted, gradient = reference(dtype)
    assert losses.dtype == dtype
    assert (losses.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert (logits.grad.double() - gradient).abs().max() <= tolerance * gradient.abs().max()
    assert torch.count_nonzero(logits.grad[..., REAL:]) == 0


def test_bf16_logits_give_an_fp32_loss() -> None:
    logits, labels = sample(torch.bfloat16)
    losses = vocab_parallel_cross_entropy(logits, labels, Axis(), vocab_size=REAL)
    wanted, _ = reference(torch.bfloat16)
    assert losses.dtype == torch.float32
    assert (losses.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def _split() -> tuple[torch.Tensor, torch.Tensor]:
    process = discover_process()
    device = start_distributed(process, timeout_minutes=2)
    tp = build_mesh(ParallelConfig(tensor_model_parallel_size=process.world_size), process, device).tp
    logits, labels = sample(torch.float64)
    mine = logits.chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(mine, labels, tp, vocab_size=REAL)
    losses.square().sum().backward()
    stop_distributed()
    return losses.detach(), mine.grad


@pytest.mark.parametrize("ranks", [2, 4])
def test_split_columns(ranks: int) -> None:
    wanted, gradient = reference(torch.float64)
    results = run_ranks(ranks, _split)
    assert (torch.cat([grad for _, grad in results], dim=-1) - gradient).abs().max() <= 1e-12
    for losses, _ in results:
        assert (losses - wanted).abs().max() <= 1e-12
