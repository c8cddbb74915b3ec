"""Configuration of SimpleGPT on Llama's backbone, for Hugging Face transformers.

The file travels inside exported model folders, so it imports nothing but transformers.
"""

from typing import Any

from transformers.configuration_utils import PretrainedConfig

SITES = (
    "attention_norm", "q_proj", "k_proj", "v_proj", "o_proj", "mlp_norm", "gate_proj", "up_proj", "down_proj",
    "final_norm",
)  # fmt: skip
PLACEMENTS = {
    "prenorm": ("attention_norm", "mlp_norm", "final_norm"),
    "qknorm": ("attention_norm", "q_proj", "k_proj", "mlp_norm", "final_norm"),
    "simplenorm": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "final_norm"),
    "olmo2": ("q_proj", "k_proj", "o_proj", "down_proj", "final_norm"),
    "peri": ("attention_norm", "o_proj", "mlp_norm", "down_proj", "final_norm"),
}


class SimpleGPTConfig(PretrainedConfig):
    """A Llama whose norms stand at any set of sites: in front of a sublayer or behind a linear.

    `norm_sites` is that set; without it `norm_placement` names one (PLACEMENTS). `normalization` is "rmsnorm" or
    "layernorm"; `qk_norm_width` "full" spreads the norms of q and k over all heads, "head" over each one.
    `rope_parameters` holds rope_theta and rope_type ("default" or "llama3"); `rope_theta` and `rope_scaling` are the
    older spelling of the same. ValueError for a setting that the model does not have.
    """

    model_type = "simplegpt"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    # Norms behind the linears need whole rows, so each sharded projection is gathered before its norm.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise_rep",
        "layers.*.self_attn.k_proj": "colwise_rep",
        "layers.*.self_attn.v_proj": "colwise_rep",
        "layers.*.self_attn.o_proj": "rowwise_rep",
        "layers.*.mlp.gate_proj": "colwise_rep",
        "layers.*.mlp.up_proj": "colwise_rep",
        "layers.*.mlp.down_proj": "rowwise_rep",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 18,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 2048,
        norm_placement: str = "simplenorm",
        norm_sites: list[str] | None = None,
        normalization: str = "rmsnorm",
        qk_norm_width: str = "full",
        rms_norm_eps: float = 1e-5,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act, self.max_position_embeddings = hidden_act, max_position_embeddings
        self.norm_placement = norm_placement
        self.norm_sites = sites_of(norm_placement, norm_sites)
        self.normalization, self.qk_norm_width, self.rms_norm_eps = normalization, qk_norm_width, rms_norm_eps
        self.rope_parameters = rope_settings(rope_parameters, rope_scaling, rope_theta)
        self.rope_theta = self.rope_parameters["rope_theta"]
        self.attention_bias, self.mlp_bias = attention_bias, mlp_bias
        self.initializer_range, self.use_cache = initializer_range, use_cache
        _require("hidden_act", hidden_act, ("silu",))
        _require("normalization", normalization, ("rmsnorm", "layernorm"))
        _require("qk_norm_width", qk_norm_width, ("full", "head"))
        special = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        # transformers 4 sets these from the arguments of its base class, transformers 5 no longer knows them there.
        for name, value in {**special, "tie_word_embeddings": tie_word_embeddings}.items():
            setattr(self, name, value)
        super().__init__(**special, tie_word_embeddings=tie_word_embeddings, **kwargs)


def sites_of(placement: str, sites: list[str] | None) -> list[str]:
    """The sites with a norm, in the order of SITES."""
    if sites is None:
        _require("norm_placement", placement, tuple(PLACEMENTS))
        sites = PLACEMENTS[placement]
    for site in sites:
        _require("norm_sites", site, SITES)
    return [site for site in SITES if site in sites]


def rope_settings(parameters: dict[str, Any] | None, scaling: dict[str, Any] | None, theta: float | None) -> dict[str, Any]:
    """One dict of rotary settings out of the newer spelling (`parameters`) and the older one (`scaling`, `theta`)."""
    settings = dict(parameters or scaling or {})
    settings.setdefault("rope_type", settings.pop("type", "default"))
    settings.setdefault("rope_theta", 10000.0 if theta is None else theta)
    _require("rope_type", settings["rope_type"], ("default", "llama3"))
    return settings


def _require(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"config.json: {name} is '{value}', this model has {', '.join(choices)}")
