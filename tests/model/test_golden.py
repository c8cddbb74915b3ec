"""Loss, logits, every gradient and five AdamW steps in float64 against the released code's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_simple.arguments import config_from
from megatron_simple.checks import resolve
from megatron_simple.model.transformer import Transformer
from megatron_simple.parallel.collectives import gather_from_tp
from megatron_simple.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_simple.parallel.mesh import Axis, build_mesh, discover_process, start_distributed, stop_distributed
from megatron_simple.training.optimizer import build_optimizer, clip_gradients
from tests.distributed import run_ranks
from tests.model.golden import CASES, disk_name, fill, golden_arrays, golden_config, gpt2_disk_name, probe


def run_case(case: str, tp: Axis, sequence_parallel: bool) -> dict:
    """What the golden file holds, computed by our model: logits, loss, gradients by disk name, losses over 5 steps."""
    config, arrays = golden_config(case), golden_arrays(case)
    model = Transformer(config, tp=tp, sequence_parallel=sequence_parallel).double()
    fill(model, case, config)
    settings = {"train_iters": 5, "data_path": ("unused",), "bf16": False, "lr": 1e-3, "weight_decay": 0.1}
    training = resolve(config_from(settings), world_size=1).training
    optimizer = build_optimizer(model, training)
    tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
    result: dict = {"losses": []}

    def step_loss() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        loss = vocab_parallel_cross_entropy(logits, tokens[:, 1:], tp, vocab_size=config.vocab_size).mean()
        result.setdefault("logits", gather_from_tp(logits.detach(), tp).numpy())
        return loss

    for _ in range(5):
        optimizer.zero_grad()
        loss = step_loss()
        loss.backward()
        norm = clip_gradients(model, 0.0, tp=tp)
        if "gradients" not in result:
            result["grad_norm"] = float(norm)
            result["gradients"] = whole_gradients(model, tp)
        clip_gradients(model, 1.0, tp=tp)
        optimizer.step()
        result["losses"].append(loss.item())
    result["losses"].append(step_loss().item())
    return result


def whole_gradients(model: torch.nn.Module, tp: Axis) -> dict[str, torch.Tensor]:
    whole = {}
    for parameter in model.parameters():
        gradient = parameter.grad.clone()
        if parameter.tensor_model_parallel:
            moved = gradient.movedim(parameter.partition_dim, -1)
            gradient = gather_from_tp(moved, tp).movedim(-1, parameter.partition_dim)
        whole[parameter.logical_name] = gradient
    return whole


def on_disk(gradients: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """Gradients under the golden names: GPT-2's q, k, v fused and linears transposed."""
    if case.startswith("llama"):
        return {disk_name(name): gradient for name, gradient in gradients.items()}
    fused: dict[str, list] = {}
    for name, gradient in gradients.items():
        linear = name.endswith("_proj.weight")
        fused.setdefault(gpt2_disk_name(name), []).append(gradient.T if linear else gradient)
    return {name: torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0] for name, parts in fused.items()}


def check(case: str, result: dict) -> None:
    golden = golden_arrays(case)
    assert np.abs(result["logits"] - golden["f64/logits"]).max() <= 1e-10
    assert abs(result["losses"][0] - golden["f64/loss"]) <= 1e-11
    assert result["grad_norm"] == pytest.approx(float(golden["f64/grad_norm"]), rel=1e-10)
    gradients = on_disk(result["gradients"], case)
    names = [str(name) for name in golden["names"]]
    assert set(names) == set(gradients)
    for name, norm, wanted in zip(names, golden["f64/param_grad_norms"], golden["f64/param_grad_probes"], strict=True):
        assert gradients[name].norm().item() == pytest.approx(float(norm), rel=1e-10), name
        assert abs(probe(gradients[name]).item() - wanted) <= 1e-10 * max(1.0, float(norm)), name
    assert np.abs(np.array(result["losses"]) - golden["f64/step_losses_wdmat"]).max() <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_one_process_equals_the_released_code(case: str) -> None:
    check(case, run_case(case, Axis(), sequence_parallel=False))


def _all_cases(sequence_parallel: bool) -> dict[str, dict]:
    process = discover_process()
    device = start_distributed(process, timeout_minutes=2)
    settings = {"tensor_model_parallel_size": 2, "train_iters": 1, "data_path": ("unused",), "bf16": False}
    mesh = build_mesh(resolve(config_from(settings), world_size=2).parallel, process, device)
    results = {case: run_case(case, mesh.tp, sequence_parallel) for case in CASES}
    stop_distributed()
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_ranks_equal_the_released_code(sequence_parallel: bool) -> None:
    for results in run_ranks(2, _all_cases, sequence_parallel):
        for case in CASES:
            check(case, results[case])
