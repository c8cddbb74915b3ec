"""AdamW with weight-decay groups, the true global gradient norm, and the optimizer's tensors as named fragments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_simple.config import TrainingConfig
from megatron_simple.parallel.collectives import all_reduce
from megatron_simple.parallel.mesh import Axis


def build_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (torch's own: nothing to compile at run time); decay on matrices, or on all parameters incl. gains."""
    decayed, plain = [], []
    for parameter in module.parameters():
        (decayed if training.weight_decay_on == "all" or parameter.ndim >= 2 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=training.lr, betas=betas, eps=training.adam_eps)


def clip_gradients(module: nn.Module, max_norm: float, *, tp: Axis) -> Tensor:
    """The 2-norm over every parameter of the model counted once, before clipping; scales the gradients in place.

    Split parameters add up over the TP axis, replicated ones count on its first rank only. 0 means no clipping.
    """
    gradients = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    wide = torch.promote_types(gradients[0][1].dtype, torch.float32)
    square = torch.zeros((), dtype=wide, device=gradients[0][1].device)
    for parameter, gradient in gradients:
        if parameter.tensor_model_parallel or tp.rank == 0:
            square += gradient.to(wide).pow(2).sum()
    norm = all_reduce(square, tp).sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
    return norm


@dataclass(frozen=True)
class Piece:
    """Where the optimizer keeps `numel` elements of a parameter, from flat index `start` of this TP shard on.

    The fp32 weights are `key.view(-1)[offset : offset + numel]`; AdamW's moments lie under the same indices in `state`,
    which is empty before the first step.
    """

    parameter: nn.Parameter
    start: int
    key: Tensor
    offset: int
    numel: int
    state: dict[str, Tensor]

    def part(self, tensor: Tensor) -> Tensor:
        """A view of the piece in a tensor laid out like `key`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def pieces(engine: Any) -> Iterator[Piece]:
    """This rank's share of the optimizer's fp32 weights, for every ZeRO stage (by DeepSpeed 0.19's own tables).

    At stage 0 every data-parallel rank holds, and yields, everything.
    """
    optimizer, rank = engine.optimizer, engine.mesh.dp.rank
    state = optimizer.state if engine.zero_stage == 0 else optimizer.optimizer.state
    for parameter in engine.module.parameters():
        if engine.zero_stage == 0:
            yield Piece(parameter, 0, parameter, 0, parameter.numel(), state[parameter])
        elif engine.zero_stage == 3:
            group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, flat = rank * numel, optimizer.fp32_partitioned_groups_flat[group]
            real = min(numel, parameter.ds_numel - start)  # the last partitions end in padding
            if real > 0:
                yield Piece(parameter, start, flat, offset, real, state[flat])
        elif parameter._hp_mapping is not None:
            link = parameter._hp_mapping
            flat = _partitions(optimizer)[link.param_group_index]
            here, there = link.hp_fragment_address, link.lp_fragment_address
            yield Piece(parameter, there.start, flat, here.start, here.numel, state[flat])


def _partitions(optimizer: Any) -> list[Tensor]:
    """One flat fp32 tensor per parameter group: DeepSpeedZeroOptimizer's and BF16_Optimizer's names for it."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return optimizer.single_partition_of_fp32_groups
    return optimizer.fp32_groups_flat_partition


def set_weight(engine: Any, parameter: nn.Parameter, shard: Tensor) -> None:
    """Puts an fp32 TP shard into the parameter (in its own dtype), or into this rank's partition of it under ZeRO-3."""
    if engine.zero_stage < 3:
        parameter.data.copy_(shard)
        return
    partition = parameter.ds_tensor
    start = engine.mesh.dp.rank * partition.numel()
    mine = shard.reshape(-1)[start : start + partition.numel()]
    partition.data[: mine.numel()].copy_(mine)
    if parameter.numel() == parameter.ds_numel:  # small parameters stay gathered between steps
        parameter.data.copy_(shard)
