"""Configuration of SimpleGPT on GPT-2's backbone, for Hugging Face transformers.

The file travels inside exported model folders, so it imports nothing but transformers.
"""

from typing import Any

from transformers.configuration_utils import PretrainedConfig

SITES = (
    "attention_norm", "q_proj", "k_proj", "v_proj", "o_proj", "mlp_norm", "up_proj", "down_proj", "final_norm",
)  # fmt: skip
PLACEMENTS = {
    "prenorm": ("attention_norm", "mlp_norm", "final_norm"),
    "qknorm": ("attention_norm", "q_proj", "k_proj", "mlp_norm", "final_norm"),
    "simplenorm": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "final_norm"),
    "olmo2": ("q_proj", "k_proj", "o_proj", "down_proj", "final_norm"),
    "peri": ("attention_norm", "o_proj", "mlp_norm", "down_proj", "final_norm"),
}


class SimpleGPT2Config(PretrainedConfig):
    """A GPT-2 whose norms stand at any set of sites: in front of a sublayer or behind a linear.

    `norm_sites` is that set; without it `norm_placement` names one (PLACEMENTS). `normalization` is "rmsnorm" or
    "layernorm"; `qk_norm_width` "full" spreads the norms of q and k over all heads, "head" over each one.
    `bias` stands for the biases of all linears and LayerNorms. ValueError for a setting that the model does not have.
    """

    model_type = "simplegpt2"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "num_hidden_layers": "n_layer",
    }

    def __init__(
        self,
        vocab_size: int = 50257,
        n_positions: int = 1024,
        n_embd: int = 768,
        n_layer: int = 12,
        n_head: int = 12,
        n_kv_head: int | None = None,
        n_inner: int | None = None,
        activation_function: str = "gelu",
        norm_placement: str = "simplenorm",
        norm_sites: list[str] | None = None,
        normalization: str = "rmsnorm",
        qk_norm_width: str = "full",
        layer_norm_epsilon: float = 1e-5,
        bias: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.n_positions, self.n_embd = vocab_size, n_positions, n_embd
        self.n_layer, self.n_head, self.n_kv_head = n_layer, n_head, n_kv_head or n_head
        self.n_inner = n_inner or 4 * n_embd
        self.head_dim = n_embd // n_head
        self.activation_function = activation_function
        self.norm_placement = norm_placement
        self.norm_sites = sites_of(norm_placement, norm_sites)
        self.normalization, self.qk_norm_width = normalization, qk_norm_width
        self.layer_norm_epsilon, self.bias = layer_norm_epsilon, bias
        self.initializer_range, self.use_cache = initializer_range, use_cache
        _require("activation_function", activation_function, ("gelu",))
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


def _require(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"config.json: {name} is '{value}', this model has {', '.join(choices)}")
