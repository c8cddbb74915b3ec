"""Loss and every gradient in float64 at TP 2 against one process, for every backbone and placement."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_simple.config import BACKBONES, PLACEMENTS, ModelConfig, resolve_model
from megatron_simple.model import norm_group
from megatron_simple.model.init import shard_of
from megatron_simple.model.transformer import Transformer
from megatron_simple.parallel.collectives import all_reduce
from megatron_simple.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_simple.parallel.mesh import Axis, build_mesh, discover_process, start_distributed, stop_distributed
from tests.distributed import run_ranks

TOLERANCE = 1e-10  # relative to the gradient's norm; measured differences stay below 1e-14
EXTRAS = (
    {"normalization": "LayerNorm", "norm_placement": "simplenorm", "add_bias_linear": True},
    {"normalization": "LayerNorm", "norm_placement": "peri", "add_bias_linear": True, "backbone": "nanogpt"},
    {"norm_placement": "qknorm", "qk_norm_width": "head"},
    {"norm_sites": ("v_proj", "up_proj", "mlp_norm")},
    {"norm_sites": ()},
    {"norm_placement": "simplenorm", "tie_embeddings": True, "num_query_groups": 2},
)


def tiny(**settings) -> ModelConfig:
    """A model small enough for float64 in milliseconds; 50 rows leave the second rank's vocabulary half padding."""
    defaults = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 50}
    return resolve_model(ModelConfig(**{**defaults, "make_vocab_size_divisible_by": 64, **settings}), 12)


def cases() -> list[ModelConfig]:
    table = [
        tiny(backbone=backbone, norm_placement=placement) for backbone, placement in itertools.product(BACKBONES, PLACEMENTS)
    ]
    return table + [tiny(**extra) for extra in EXTRAS]


def tokens_for(config: ModelConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(3))


def loss_of(config: ModelConfig, model: Transformer, tp: Axis) -> torch.Tensor:
    tokens = tokens_for(config)
    return vocab_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], tp, vocab_size=config.vocab_size).mean()


def compare(config: ModelConfig, tp: Axis, sequence_parallel: bool) -> tuple[float, float, str]:
    """(difference in loss, largest relative difference of a gradient, its name) between this layout and the whole."""
    whole = Transformer(config).double()
    split = Transformer(config, tp=tp, sequence_parallel=sequence_parallel).double()
    with torch.no_grad():  # gains off 1, so that a wrong gain gradient or slice shows
        for number, parameter in enumerate(whole.parameters()):
            if parameter.ndim == 1:
                parameter += 0.3 * torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype) + number)
        values = {p.logical_name: p.detach() for p in whole.parameters()}
        for parameter in split.parameters():
            value = values[parameter.logical_name]
            real = value[: config.vocab_size] if value.shape[0] == config.padded_vocab_size(1) else value
            parameter.copy_(shard_of(real, parameter))
    expected, found = loss_of(config, whole, Axis()), loss_of(config, split, tp)
    expected.backward()
    found.backward()
    gradients = {p.logical_name: p.grad for p in whole.parameters()}
    floor = 1e-6 * max(gradient.norm() for gradient in gradients.values())  # a key's bias has no gradient but rounding
    worst, worst_name = 0.0, ""
    for parameter in split.parameters():
        gradient = gradients[parameter.logical_name]
        difference = (parameter.grad - shard_of(gradient, parameter)).norm() / torch.maximum(gradient.norm(), floor)
        if difference.item() > worst:
            worst, worst_name = difference.item(), parameter.logical_name
    return abs(expected.item() - found.item()), worst, worst_name


def _axis() -> Axis:
    from megatron_simple.config import ParallelConfig

    process = discover_process()
    device = start_distributed(process, timeout_minutes=2)
    return build_mesh(ParallelConfig(tensor_model_parallel_size=process.world_size), process, device).tp


def _compare_all() -> list[tuple[str, float, float, str]]:
    tp = _axis()
    rows = []
    for config in cases():
        for sequence_parallel in (False, True):
            label = f"{config.backbone} {config.norm_placement} {config.norm_sites} sp={sequence_parallel}"
            rows.append((label, *compare(config, tp, sequence_parallel)))
    stop_distributed()
    return rows


def test_every_gradient_at_two_ranks_equals_one_process() -> None:
    for rows in run_ranks(2, _compare_all):
        assert len(rows) == 2 * len(cases())
        for label, loss, gradient, name in rows:
            assert loss <= 1e-11, label
            assert gradient <= TOLERANCE, f"{label}: {name} off by {gradient}"


def _sabotaged(what: str) -> tuple[float, float, str]:
    tp = _axis()
    with pytest.MonkeyPatch.context() as patch:
        if what == "statistic":  # the sums of backward stay with their shard
            backward = norm_group._norms_backward
            patch.setattr(norm_group, "_norms_backward", lambda *rest: backward(*rest[:-1], Axis()))
        elif what == "local statistic":
            patch.setattr(norm_group, "sum_over_tp", lambda x, axis: x * axis.size)
        elif what == "gain":
            from megatron_simple.model import norm

            patch.setattr(norm, "copy_to_tp", lambda x, axis: x)
        result = compare(tiny(norm_placement="simplenorm"), tp, sequence_parallel=what == "gain")
    stop_distributed()
    return result


def test_parity_notices_a_statistic_that_is_not_reduced_in_backward() -> None:
    loss, gradient, _ = run_ranks(2, _sabotaged, "statistic")[0]
    assert loss <= 1e-11  # the loss stays exact: only the gradients tell
    assert gradient > 1e-2


def test_parity_notices_a_norm_per_shard() -> None:
    loss, _, _ = run_ranks(2, _sabotaged, "local statistic")[0]
    assert loss > 1e-5


def test_parity_notices_a_gain_whose_partial_gradient_is_not_summed() -> None:
    loss, gradient, name = run_ranks(2, _sabotaged, "gain")[0]
    assert loss <= 1e-11
    assert gradient > 1e-2
    assert name.endswith("norm.weight")


@pytest.mark.parametrize("granularity", ["selective", "full"])
@pytest.mark.parametrize("placement", ["simplenorm", "qknorm"])
def test_recomputation_gives_bitwise_the_same_gradients(granularity: str, placement: str) -> None:
    config = tiny(norm_placement=placement)
    kept, recomputed = Transformer(config), Transformer(config, recompute=granularity)
    for model in (kept, recomputed):
        loss_of(config, model, Axis()).backward()
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), one.logical_name


def _recompute_under_tp(granularity: str) -> bool:
    tp = _axis()
    config = tiny(norm_placement="simplenorm")
    models = [Transformer(config, tp=tp, sequence_parallel=True, recompute=r) for r in ("none", granularity)]
    for model in models:
        loss_of(config, model, tp).backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    same = bool(all_reduce(torch.tensor(float(same)), tp) == tp.size)
    stop_distributed()
    return same


def test_recomputation_is_bitwise_under_tensor_and_sequence_parallelism() -> None:
    assert all(run_ranks(2, _recompute_under_tp, "full"))
