"""Norm operators, the sites where a norm can stand, and the placements: named sets of sites.

A site is in front of a sublayer (attention_norm, mlp_norm, final_norm) or behind a linear. A placement is a row of
PLACEMENTS; a new one is one row. Sites that a backbone lacks (gate_proj without a gated MLP) are left out.

Order of casts, the same in training, in the exported model and in Hugging Face's Llama: up to fp32 (or wider), normalise,
down to the input's dtype, then times the gain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_simple.config import SITES, ConfigError, ModelConfig
from megatron_simple.model.norm_group import NormSpec, norm_group
from megatron_simple.parallel.collectives import copy_to_tp
from megatron_simple.parallel.layers import mark_shard
from megatron_simple.parallel.mesh import Axis

LINEAR_SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PLACEMENTS: dict[str, tuple[str, ...]] = {
    "prenorm": ("attention_norm", "mlp_norm", "final_norm"),
    "qknorm": ("attention_norm", "q_proj", "k_proj", "mlp_norm", "final_norm"),
    "simplenorm": (*LINEAR_SITES, "final_norm"),
    "olmo2": ("q_proj", "k_proj", "o_proj", "down_proj", "final_norm"),
    "peri": ("attention_norm", "o_proj", "mlp_norm", "down_proj", "final_norm"),
}


def sites_of(config: ModelConfig) -> frozenset[str]:
    """The sites of this model that carry a norm; ConfigError for a name that is no site."""
    sites = config.norm_sites if config.norm_sites is not None else PLACEMENTS[config.norm_placement]
    unknown = [site for site in sites if site not in SITES]
    if unknown:
        raise ConfigError(f"--norm-sites: '{unknown[0]}' is no site; choose from {','.join(SITES)}")
    return frozenset(sites) - (frozenset() if config.gated_mlp else {"gate_proj"})


class RMSNorm(nn.Module):
    """gain * z / sqrt(mean(z^2) + eps) over the last dim, of full width `width` (PAPER.md, arXiv 2602.01212 section 3).

    axis: the axis over which z's width (and so the gain) is split, None where it never is. A norm with an axis is applied
        by `normalize_group`, together with those of the projections that share its input.
    shared: the axis whose ranks use one whole gain on different data (sequence shards, heads): the gain's gradient is
        then a partial sum, and copy_to_tp sums it exactly once, inside the graph.
    """

    centred = False

    def __init__(self, width: int, *, eps: float, axis: Axis | None = None, shared: Axis = Axis(), bias: bool = False):
        super().__init__()
        self.spec, self.shared = NormSpec(width, eps, self.centred), shared
        self.axis = axis or Axis()
        self.split_dim = None if axis is None else 0
        self.weight = self.vector(1.0)
        self.bias = self.vector(0.0) if bias and self.centred else None

    def vector(self, value: float) -> nn.Parameter:
        """This shard's part of a [width] parameter."""
        part = torch.full((self.axis.part(self.spec.width),), value)
        return mark_shard(nn.Parameter(part), partition_dim=self.split_dim, axis=self.axis)

    def gain_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return copy_to_tp(self.weight, self.shared), None if self.bias is None else copy_to_tp(self.bias, self.shared)

    def forward(self, z: Tensor) -> Tensor:
        return normalize_group([z], [self], axis=self.axis)[0]


class LayerNorm(RMSNorm):
    """gain * (z - mean) / sqrt(var + eps) + bias over the last dim; axis and shared as in RMSNorm."""

    centred = True

    def forward(self, z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], *self.gain_and_bias(), self.spec.eps)


class PerHead(nn.Module):
    """A norm over each head of [..., heads * H], with one gain [H] for all heads. No message: heads are never split."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._operator = (norm,)  # in a tuple: its parameters are registered here, under the names of a plain norm

    def forward(self, z: Tensor) -> Tensor:
        norm = self._operator[0]
        return norm(z.unflatten(-1, (-1, norm.spec.width))).flatten(-2)


def normalize_group(
    zs: Sequence[Tensor], norms: Sequence[nn.Module | None], *, axis: Axis, activation: str | None = None
) -> tuple[Tensor, ...]:
    """Each projection [..., width / axis] through its norm (None: as it is), then through the activation of norm_group.

    The norms' sums over the axis travel in one message per direction; none is sent where no norm needs it.
    """
    zs = [norm(z) if isinstance(norm, PerHead) else z for z, norm in zip(zs, norms, strict=True)]
    norms = [None if isinstance(norm, PerHead) else norm for norm in norms]
    if activation is None and not any(norms):
        return tuple(zs)
    parts = [(None, None) if norm is None else norm.gain_and_bias() for norm in norms]
    gains, biases = zip(*parts, strict=True)
    specs = [None if norm is None else norm.spec for norm in norms]
    return norm_group(zs, specs, gains, biases, axis=axis, activation=activation)


OPERATORS = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


def make_norm(
    config: ModelConfig, site: str, width: int, *, axis: Axis | None = None, shared: Axis = Axis()
) -> nn.Module | None:
    """The norm of `site`, or None where the model has none. Behind a column-parallel linear `axis` is the TP axis."""
    if site not in sites_of(config):
        return None
    operator = OPERATORS[config.normalization]
    settings = {"eps": config.norm_epsilon, "bias": config.add_bias_linear}
    if site in ("q_proj", "k_proj") and config.qk_norm_width == "head":
        return PerHead(operator(config.head_dim, shared=axis or Axis(), **settings))
    return operator(width, axis=axis, shared=shared, **settings)
