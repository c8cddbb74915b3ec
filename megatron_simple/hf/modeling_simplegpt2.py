"""SimpleGPT on GPT-2's backbone, for Hugging Face transformers (4.57 and later; arXiv 2602.01212).

The file travels inside exported model folders, so it imports nothing but torch, transformers and its configuration.
Letters: B batch, S sequence, D width, N query heads, K key/value heads, H head dim, F MLP width, V vocabulary.
"""

import dataclasses
import inspect
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

from .configuration_simplegpt2 import SimpleGPT2Config

# The key/value cache is `past_key_values` up to transformers 5.20 and `cache` in later versions.
CACHE_FIELD = next(f.name for f in dataclasses.fields(BaseModelOutputWithPast) if f.name in ("cache", "past_key_values"))
MASK_ARGUMENTS = frozenset(inspect.signature(inspect.unwrap(create_causal_mask)).parameters)


class SimpleGPT2RMSNorm(nn.Module):
    """weight * z / sqrt(mean(z^2) + eps) over the last dim: up to fp32 or wider, normalise, down, then the gain."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, z: Tensor) -> Tensor:
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(z.dtype)


def make_norm(config: SimpleGPT2Config, site: str, width: int) -> nn.Module:
    """The norm of `site`, or the identity where the model has none."""
    if site not in config.norm_sites:
        return nn.Identity()
    if site in ("q_proj", "k_proj") and config.qk_norm_width == "head":
        width = config.head_dim
    if config.normalization == "rmsnorm":
        return SimpleGPT2RMSNorm(width, config.layer_norm_epsilon)
    return nn.LayerNorm(width, eps=config.layer_norm_epsilon, bias=config.bias)


class SimpleGPT2Conv1D(nn.Module):
    """A linear whose weight lies as [in, out], GPT-2's way."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


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


class SimpleGPT2Attention(nn.Module):
    """Causal attention with grouped queries; q, k and v come from one product, each followed by the norm of its site."""

    def __init__(self, config: SimpleGPT2Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.n_head // config.n_kv_head
        self.scaling, self.is_causal = self.head_dim**-0.5, True
        wide, narrow = config.n_head * self.head_dim, config.n_kv_head * self.head_dim
        self.widths = (wide, narrow, narrow)
        self.c_attn = SimpleGPT2Conv1D(config.n_embd, sum(self.widths), config.bias)
        self.c_proj = SimpleGPT2Conv1D(wide, config.n_embd, config.bias)
        self.q_norm = make_norm(config, "q_proj", wide)
        self.k_norm = make_norm(config, "k_proj", narrow)
        self.v_norm = make_norm(config, "v_proj", narrow)
        self.o_norm = make_norm(config, "o_proj", config.n_embd)

    def heads(self, z: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * H] -> [B, heads, S, H], normalised over the whole row or over each head."""
        if self.config.qk_norm_width == "head" and norm is not self.v_norm:
            return norm(z.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return norm(z).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, attention_mask: Any, past_key_values: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """x [B, S, D] -> [B, S, D] and the attention weights, where the attention in use gives them."""
        norms = (self.q_norm, self.k_norm, self.v_norm)
        projected = self.c_attn(x).split(self.widths, dim=-1)
        query, key, value = (self.heads(z, norm) for z, norm in zip(projected, norms, strict=True))
        if past_key_values is not None:
            places = {"cache_position": kwargs.get("cache_position")}
            key, value = past_key_values.update(key, value, self.layer_idx, places)
        attend = self.attention_function()
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_norm(self.c_proj(out.flatten(2))), weights

    def attention_function(self) -> Any:
        """What the configuration names, in the spellings of transformers 5 and 4, which search the source for them."""
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if self.config._attn_implementation == "eager":
            return eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]


class SimpleGPT2MLP(nn.Module):
    """proj(gelu(fc(x))) with the erf form of GELU, each linear followed by the norm of its site."""

    def __init__(self, config: SimpleGPT2Config):
        super().__init__()
        self.c_fc = SimpleGPT2Conv1D(config.n_embd, config.n_inner, config.bias)
        self.c_proj = SimpleGPT2Conv1D(config.n_inner, config.n_embd, config.bias)
        self.fc_norm = make_norm(config, "up_proj", config.n_inner)
        self.proj_norm = make_norm(config, "down_proj", config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_norm(self.c_proj(F.gelu(self.fc_norm(self.c_fc(x)))))


class SimpleGPT2Block(GradientCheckpointingLayer):
    """x + attention(x), then x + MLP(x), with a norm in front of either where the model has one."""

    def __init__(self, config: SimpleGPT2Config, layer_idx: int):
        super().__init__()
        self.ln_1 = make_norm(config, "attention_norm", config.n_embd)
        self.attn = SimpleGPT2Attention(config, layer_idx)
        self.ln_2 = make_norm(config, "mlp_norm", config.n_embd)
        self.mlp = SimpleGPT2MLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attn(self.ln_1(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.ln_2(hidden_states)), weights


class SimpleGPT2PreTrainedModel(PreTrainedModel):
    config_class = SimpleGPT2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SimpleGPT2Block"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = _can_compile_fullgraph = True
    _input_embed_layer = "wte"

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SimpleGPT2Conv1D):
            # torch.nn.init spares weights that were loaded; the tensor's own in-place methods would overwrite them.
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class SimpleGPT2Model(SimpleGPT2PreTrainedModel):
    """Embeddings, blocks and final norm: token ids [B, S] -> hidden states [B, S, D]."""

    def __init__(self, config: SimpleGPT2Config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(SimpleGPT2Block(config, i) for i in range(config.n_layer))
        self.ln_f = make_norm(config, "final_norm", config.n_embd)
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
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        cache, places = cache_and_places(self, x, kwargs, past_key_values, use_cache)
        position_ids = places[None] if position_ids is None else position_ids
        x = x + self.wpe(position_ids)
        mask = causal_mask(self.config, x, attention_mask, cache, position_ids, places)
        common = {
            "attention_mask": mask, "past_key_values": cache, "cache_position": places, "position_ids": position_ids,
        }  # fmt: skip
        states, attentions = [x], []
        for block in self.h:
            x, weights = block(x, **common, **kwargs)
            states.append(x)
            attentions.append(weights)
        x = self.ln_f(x)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*states[:-1], x) if wants_states else None,
            attentions=tuple(attentions) if wants_weights else None,
            **{CACHE_FIELD: cache},
        )


class SimpleGPT2LMHeadModel(SimpleGPT2PreTrainedModel, GenerationMixin):
    """SimpleGPT2Model with its head: token ids [B, S] -> logits [B, S, V]."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: SimpleGPT2Config):
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # it is told from the names of classes, and this one's does not say it
        self.transformer = SimpleGPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
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
        inner: BaseModelOutputWithPast = self.transformer(**inputs, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(inner.last_hidden_state[:, keep])
        vocab = {"vocab_size": self.config.vocab_size}
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, **vocab, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=inner.hidden_states, attentions=inner.attentions,
            **{CACHE_FIELD: getattr(inner, CACHE_FIELD)},
        )  # fmt: skip
