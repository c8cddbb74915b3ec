"""SimpleGPT on Llama's backbone, for Hugging Face transformers (4.57 and later; arXiv 2602.01212).

The file travels inside exported model folders, so it imports nothing but torch, transformers and its configuration.
Letters: B batch, S sequence, D width, N query heads, K key/value heads, H head dim, F MLP width, V vocabulary.
"""

import dataclasses
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple

from .configuration_simplegpt import SimpleGPTConfig

# The key/value cache is `past_key_values` up to transformers 5.20 and `cache` in later versions.
CACHE_FIELD = next(f.name for f in dataclasses.fields(BaseModelOutputWithPast) if f.name in ("cache", "past_key_values"))
MASK_ARGUMENTS = frozenset(inspect.signature(inspect.unwrap(create_causal_mask)).parameters)


class SimpleGPTRMSNorm(nn.Module):
    """weight * z / sqrt(mean(z^2) + eps) over the last dim: up to fp32 or wider, normalise, down, then the gain."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, z: Tensor) -> Tensor:
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(z.dtype)


def make_norm(config: SimpleGPTConfig, site: str, width: int) -> nn.Module:
    """The norm of `site`, or the identity where the model has none."""
    if site not in config.norm_sites:
        return nn.Identity()
    if site in ("q_proj", "k_proj") and config.qk_norm_width == "head":
        width = config.head_dim
    if config.normalization == "rmsnorm":
        return SimpleGPTRMSNorm(width, config.rms_norm_eps)
    return nn.LayerNorm(width, eps=config.rms_norm_eps, bias=config.attention_bias)


def rotary_table(config: SimpleGPTConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, S, H] of the positions [B, S], computed in fp32 or wider, rounded to `dtype`.

    Nothing is kept in buffers: transformers 5 would fill them with garbage when it loads a model.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, config.head_dim, 2, device=position_ids.device).to(wide) / config.head_dim
    frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** exponent)  # [H / 2]
    if config.rope_parameters["rope_type"] == "llama3":
        frequencies = llama3_frequencies(frequencies, config.rope_parameters)
    angles = position_ids[..., None].to(wide) * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def llama3_frequencies(frequencies: Tensor, rule: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are slowed by `factor`, short ones kept, between them a smooth blend."""
    original = rule["original_max_position_embeddings"]
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    blend = (original / wavelength - low) / (high - low)
    slowed = frequencies / rule["factor"]
    middle = (1 - blend) * slowed + blend * frequencies
    kept = torch.where(wavelength < original / high, frequencies, middle)
    return torch.where(wavelength > original / low, slowed, kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, heads, S, H]; dim i pairs with dim i + H / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """query [B, N, S, H], key and value [B, K, T, H] -> [B, S, N, H] and the attention weights [B, N, S, T]."""
    key, value = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def causal_mask(config: Any, x: Tensor, mask: Any, cache: Any, position_ids: Tensor, places: Tensor) -> Any:
    """transformers' own mask for the attention in use; the names of its arguments differ between versions."""
    values = {
        "config": config, "inputs_embeds": x, "input_embeds": x, "attention_mask": mask, "cache": cache,
        "past_key_values": cache, "position_ids": position_ids, "cache_position": places,
    }  # fmt: skip
    return create_causal_mask(**{name: value for name, value in values.items() if name in MASK_ARGUMENTS})


def cache_and_places(
    model: PreTrainedModel, x: Tensor, kwargs: dict[str, Any], past: Any, use_cache: bool | None
) -> tuple[Any, Tensor]:
    """The key/value cache or None, and the places [S] of x [B, S, D] in it; takes what belongs to them out of kwargs."""
    given, places = kwargs.pop("cache", None), kwargs.pop("cache_position", None)
    past = past if given is None else given
    if model.gradient_checkpointing and model.training and torch.is_grad_enabled():
        use_cache, past = False, None  # the second forward pass would fill the cache twice
    use_cache = model.config.use_cache if use_cache is None else use_cache
    if use_cache and past is None:
        past = DynamicCache(config=model.config)
    if places is None:
        places = torch.arange(x.shape[1], device=x.device) + (0 if past is None else past.get_seq_length())
    return past, places


class SimpleGPTAttention(nn.Module):
    """Causal attention with grouped queries; each projection is followed by the norm of its site."""

    def __init__(self, config: SimpleGPTConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = self.head_dim**-0.5, True
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_bias)
        self.q_norm = make_norm(config, "q_proj", wide)
        self.k_norm = make_norm(config, "k_proj", narrow)
        self.v_norm = make_norm(config, "v_proj", narrow)
        self.o_norm = make_norm(config, "o_proj", config.hidden_size)

    def heads(self, z: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * H] -> [B, heads, S, H], normalised over the whole row or over each head."""
        if self.config.qk_norm_width == "head" and norm is not self.v_norm:
            return norm(z.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return norm(z).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attention_mask: Any, past_key_values: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, S, D] -> [B, S, D] and the attention weights, where the attention in use gives them."""
        query = rotate(self.heads(self.q_proj(x), self.q_norm), *rotary)
        key = rotate(self.heads(self.k_proj(x), self.k_norm), *rotary)
        value = self.heads(self.v_proj(x), self.v_norm)
        if past_key_values is not None:
            places = {"cache_position": kwargs.get("cache_position")}
            key, value = past_key_values.update(key, value, self.layer_idx, places)
        attend = self.attention_function()
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_norm(self.o_proj(out.flatten(2))), weights

    def attention_function(self) -> Any:
        """What the configuration names, in the spellings of transformers 5 and 4, which search the source for them."""
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.config._attn_implementation == "eager":
            return eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]


class SimpleGPTMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), each linear followed by the norm of its site."""

    def __init__(self, config: SimpleGPTConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)
        self.gate_norm = make_norm(config, "gate_proj", inner)
        self.up_norm = make_norm(config, "up_proj", inner)
        self.down_norm = make_norm(config, "down_proj", width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate_norm(self.gate_proj(x))) * self.up_norm(self.up_proj(x))  # [B, S, F]
        return self.down_norm(self.down_proj(inner))


class SimpleGPTDecoderLayer(GradientCheckpointingLayer):
    """x + attention(x), then x + MLP(x), with a norm in front of either where the model has one."""

    def __init__(self, config: SimpleGPTConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = make_norm(config, "attention_norm", config.hidden_size)
        self.self_attn = SimpleGPTAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config, "mlp_norm", config.hidden_size)
        self.mlp = SimpleGPTMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights


class SimpleGPTPreTrainedModel(PreTrainedModel):
    config_class = SimpleGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SimpleGPTDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = _can_compile_fullgraph = True


class SimpleGPTModel(SimpleGPTPreTrainedModel):
    """Embedding, blocks and final norm: token ids [B, S] -> hidden states [B, S, D]."""

    def __init__(self, config: SimpleGPTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SimpleGPTDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config, "final_norm", config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache, places = cache_and_places(self, x, kwargs, past_key_values, use_cache)
        position_ids = places[None] if position_ids is None else position_ids
        mask = causal_mask(self.config, x, attention_mask, cache, position_ids, places)
        common = {
            "rotary": rotary_table(self.config, position_ids, x.dtype), "attention_mask": mask,
            "past_key_values": cache, "cache_position": places, "position_ids": position_ids,
        }  # fmt: skip
        states, attentions = [x], []
        for layer in self.layers:
            x, weights = layer(x, **common, **kwargs)
            states.append(x)
            attentions.append(weights)
        x = self.norm(x)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states[:-1], x) if wants_states else None,
            attentions=tuple(attentions) if wants_weights else None,
            **{CACHE_FIELD: cache},
        )


class SimpleGPTForCausalLM(SimpleGPTPreTrainedModel, GenerationMixin):
    """SimpleGPTModel with its head: token ids [B, S] -> logits [B, S, V]."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_rep"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: SimpleGPTConfig):
        super().__init__(config)
        self.model = SimpleGPTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """With labels [B, S] also the mean loss of predicting each from the tokens before it."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        inner: BaseModelOutputWithPast = self.model(**inputs, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(inner.last_hidden_state[:, keep])
        vocab = {"vocab_size": self.config.vocab_size}
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, **vocab, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=inner.hidden_states, attentions=inner.attentions,
            **{CACHE_FIELD: getattr(inner, CACHE_FIELD)},
        )  # fmt: skip
