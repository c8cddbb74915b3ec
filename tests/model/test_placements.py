"""The table of placements: which norms a model has, of what width, and how many parameters that makes."""

from __future__ import annotations

import pytest
import torch

from megatron_simple.config import BACKBONES, ConfigError, ModelConfig, resolve_model
from megatron_simple.config import PLACEMENTS as NAMES
from megatron_simple.model.init import shard_of, whole_value
from megatron_simple.model.norm import PLACEMENTS
from megatron_simple.model.transformer import Transformer, parameter_table

# Written out again: the paper's placement and baselines, and the two others as their own papers draw them.
NORMS = {
    "prenorm": {"attention_norm", "mlp_norm"},
    "qknorm": {"attention_norm", "mlp_norm", "self_attn.q_proj.norm", "self_attn.k_proj.norm"},
    "simplenorm": {
        "self_attn.q_proj.norm", "self_attn.k_proj.norm", "self_attn.v_proj.norm", "self_attn.o_proj.norm",
        "mlp.gate_proj.norm", "mlp.up_proj.norm", "mlp.down_proj.norm",
    },
    "olmo2": {"self_attn.q_proj.norm", "self_attn.k_proj.norm", "self_attn.o_proj.norm", "mlp.down_proj.norm"},
    "peri": {"attention_norm", "self_attn.o_proj.norm", "mlp_norm", "mlp.down_proj.norm"},
}  # fmt: skip


def config_of(**settings) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    return resolve_model(ModelConfig(**{**sizes, **settings}), 16)


def test_every_placement_is_written_out_here() -> None:
    assert set(NORMS) == set(PLACEMENTS) == set(NAMES)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("placement", list(NORMS))
def test_norms_of_a_block_by_name(backbone: str, placement: str) -> None:
    table = parameter_table(config_of(backbone=backbone, norm_placement=placement))
    wanted = NORMS[placement] - (set() if backbone != "nanogpt" else {"mlp.gate_proj.norm"})
    for layer in range(2):
        prefix = f"layers.{layer}."
        norms = {name.removeprefix(prefix).rsplit(".", 1)[0] for name in table if name.startswith(prefix) and "norm" in name}
        assert norms == wanted
    assert ("final_norm.weight" in table) is True


def test_norms_are_as_wide_as_the_whole_output() -> None:
    settings = {"backbone": "llama3", "num_query_groups": 2, "ffn_hidden_size": 80}
    full = parameter_table(config_of(**settings))
    shapes = {name: full[f"layers.0.{name}.norm.weight"][0] for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")}
    assert shapes == {"self_attn.q_proj": (32,), "self_attn.k_proj": (16,), "mlp.up_proj": (80,)}
    head = parameter_table(config_of(**settings, norm_placement="qknorm", qk_norm_width="head"))
    widths = {head[name][0] for name in head if "self_attn" in name and "norm" in name}
    assert widths == {(8,)}


def test_any_set_of_sites_replaces_the_placement() -> None:
    table = parameter_table(config_of(norm_sites=("v_proj", "mlp_norm"), norm_placement="qknorm"))
    assert {name.rsplit(".", 1)[0] for name in table if "norm" in name} == {
        f"layers.{layer}.{site}" for layer in range(2) for site in ("self_attn.v_proj.norm", "mlp_norm")
    }


def test_an_unknown_site_is_named() -> None:
    with pytest.raises(ConfigError, match="'w_proj' is no site; choose from attention_norm"):
        Transformer(config_of(norm_sites=("w_proj",)))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_initial_values_have_the_tables_spread(backbone: str) -> None:
    """Standard deviations as the released code (Llama) and nanoGPT have them, layer by layer."""
    config = config_of(backbone=backbone, hidden_size=256, vocab_size=300, norm_placement="simplenorm")
    for name, (shape, _) in parameter_table(config).items():
        value = whole_value(name, shape, config, seed=3)
        if name.endswith("norm.weight"):
            assert torch.all(value == 1)
            continue
        kind, layer = name.split(".")[-2], int(name.split(".")[1]) if name.startswith("layers") else 0
        if backbone == "nanogpt":
            wanted = 0.02 / 2 if kind in ("o_proj", "down_proj") else 0.02  # sqrt(2 * 2 layers) = 2
        else:
            deep = 0.02 / (2 * (layer + 1)) ** 0.5
            table = {"embed_tokens": 1.0, "lm_head": 256**-0.5 * 0.9866, "o_proj": deep, "up_proj": deep, "down_proj": deep}
            wanted = table.get(kind, 0.02)  # 0.9866: a normal cut at three standard deviations
        assert value.std().item() == pytest.approx(wanted, rel=0.02), name
        assert abs(value.mean().item()) < 5 * wanted / value.numel() ** 0.5, name


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    config = config_of()

    def value(name: str, seed: int) -> torch.Tensor:
        return whole_value(name, (32, 32), config, seed=seed)

    first = value("layers.0.self_attn.q_proj.weight", 1)
    torch.manual_seed(99)
    assert torch.equal(first, value("layers.0.self_attn.q_proj.weight", 1))
    assert not torch.equal(first, value("layers.0.self_attn.q_proj.weight", 2))
    assert not torch.equal(first, value("layers.1.self_attn.q_proj.weight", 1))
    assert not torch.equal(first, value("layers.0.self_attn.k_proj.weight", 1))


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_of_every_layout_join_to_the_whole(shards: int) -> None:
    """The slices that TP ranks would hold, without starting them; rows above the vocabulary are zero."""
    from megatron_simple.parallel.mesh import Axis

    config = config_of(norm_placement="simplenorm", make_vocab_size_divisible_by=64)
    models = [Transformer(config, tp=Axis(shards, rank)) for rank in range(shards)]
    table = parameter_table(config)
    for parts in zip(*(model.parameters() for model in models), strict=True):
        name, dim = parts[0].logical_name, parts[0].partition_dim
        shape, table_dim = table[name]
        assert dim == table_dim
        whole = whole_value(name, shape, config, seed=1234)
        if dim is None:
            assert all(torch.equal(part, whole) for part in parts)
            continue
        joined = torch.cat([part.detach() for part in parts], dim=dim)
        assert torch.equal(joined[: shape[0]], whole), name
        assert torch.count_nonzero(joined[shape[0] :]) == 0
        assert all(torch.equal(shard_of(whole, part), part) for part in parts)
