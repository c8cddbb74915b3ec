"""config.json from our settings, and our settings from config.json.

transformers 4 and 5 spell some settings differently (rope_theta and rope_parameters, torch_dtype and dtype); a file with
only the newer spelling is silently read wrong by the older version, so both are written.
"""

from __future__ import annotations

from typing import Any

from megatron_simple.checkpoint.huggingface import ARCHITECTURES, Architecture, architecture_of
from megatron_simple.config import SITES, ConfigError, ModelConfig
from megatron_simple.model.norm import PLACEMENTS, sites_of
from megatron_simple.model.rotary import LLAMA31_SCALING

OPERATORS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}


def config_json(config: ModelConfig, *, dtype: str, bos: int | None, eos: int | None) -> dict[str, Any]:
    """The content of config.json. Every value is explicit, also those that equal a default of today's transformers.

    There is no pad_token_id: transformers' Llama would stop training that row of the embedding.
    """
    architecture = architecture_of(config)
    values = {
        "architectures": [architecture.causal_lm],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        **(_llama_sizes(config, architecture) if config.rotary else _gpt2_sizes(config)),
        "tie_word_embeddings": bool(config.tie_embeddings),
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if architecture.custom:
        values |= _norm_settings(config)
        classes = {"AutoModel": architecture.base, "AutoModelForCausalLM": architecture.causal_lm}
        configuration = architecture.causal_lm.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        values["auto_map"] = {
            "AutoConfig": f"configuration_{architecture.model_type}.{configuration}",
            **{auto: f"modeling_{architecture.model_type}.{name}" for auto, name in classes.items()},
        }
    return values


def _llama_sizes(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **LLAMA31_SCALING} if config.rope_scaling == "llama3.1" else None
    bias = {} if architecture.model_type == "olmo2" else {"mlp_bias": bool(config.add_bias_linear)}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": config.rotary_base},
        "attention_bias": bool(config.add_bias_linear),
        **bias,
        "attention_dropout": 0.0,
    }


def _gpt2_sizes(config: ModelConfig) -> dict[str, Any]:
    grouped = config.num_query_groups != config.num_attention_heads
    return {
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        **({"n_kv_head": config.num_query_groups} if grouped else {}),
        "n_inner": config.ffn_hidden_size,
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_epsilon,
        "bias": bool(config.add_bias_linear),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _norm_settings(config: ModelConfig) -> dict[str, Any]:
    sites = sites_of(config)
    return {
        "norm_placement": _row_of(sites, gated=config.gated_mlp),
        "norm_sites": [site for site in SITES if site in sites],
        "normalization": OPERATORS[config.normalization],
        "qk_norm_width": config.qk_norm_width,
    }


def _row_of(sites: frozenset[str], *, gated: bool) -> str | None:
    """The placement with exactly these sites, or None."""
    absent = set() if gated else {"gate_proj"}
    return next((name for name, row in PLACEMENTS.items() if set(row) - absent == sites), None)


def model_config(values: dict[str, Any], *, source: str) -> ModelConfig:
    """Our settings for the model of a config.json, all sizes filled in.

    Raises ConfigError naming `source` and the setting for an architecture, or a variant of one, that we do not have.
    """
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{source}: model_type '{kind}' is not known here; {', '.join(ARCHITECTURES)} can be converted")
    if values.get("quantization_config"):
        raise ConfigError(f"{source}: the model is quantised; convert the unquantised one")
    try:
        settings = _from_gpt2(values, source) if ARCHITECTURES[kind].fused_linears else _from_llama(values, source)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{source}: the setting {error} is missing or of a wrong kind; copy the folder again") from None
    return ModelConfig(vocab_size=values["vocab_size"], make_vocab_size_divisible_by=128, **settings)


def _from_llama(values: dict[str, Any], source: str) -> dict[str, Any]:
    kind, heads = values["model_type"], values["num_attention_heads"]
    bias = bool(values.get("attention_bias", False))
    head_dim = values["hidden_size"] // heads
    expected = {"hidden_act": "silu", "head_dim": head_dim, "mlp_bias": bias, "attention_dropout": 0.0}
    _expect(values, expected if kind != "olmo2" else {**expected, "attention_bias": False, "mlp_bias": False}, source)
    theta, scaling = _rope(values, source)
    return {
        "backbone": "llama3" if theta == 500_000.0 else "llama2",
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "ffn_hidden_size": values["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": values.get("num_key_value_heads") or heads,
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
        "norm_epsilon": float(values.get("rms_norm_eps", 1e-5 if kind != "llama" else 1e-6)),
        "rotary_base": theta,
        "rope_scaling": scaling,
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "add_bias_linear": bias,
        **_norms(values, {"llama": "prenorm", "olmo2": "olmo2"}.get(kind), "rmsnorm", gated=True),
    }


def _from_gpt2(values: dict[str, Any], source: str) -> dict[str, Any]:
    kind, width, heads = values["model_type"], values["n_embd"], values["n_head"]
    if values.get("activation_function", "gelu_new") != "gelu":
        raise ConfigError(
            f"{source}: activation_function is '{values.get('activation_function', 'gelu_new')}', and training here has "
            "the exact (erf) GELU; to go on from these weights all the same (logits differ by about 1e-3) set it to "
            "'gelu' in config.json"
        )
    plain = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _expect(values, plain, source)
    return {
        "backbone": "nanogpt",
        "num_layers": values["n_layer"],
        "hidden_size": width,
        "ffn_hidden_size": values.get("n_inner") or 4 * width,
        "num_attention_heads": heads,
        "num_query_groups": values.get("n_kv_head") or heads,
        "max_position_embeddings": values.get("n_positions", 1024),
        "norm_epsilon": float(values.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
        "add_bias_linear": bool(values.get("bias", kind == "gpt2")),
        **_norms(values, "prenorm" if kind == "gpt2" else None, "layernorm" if kind == "gpt2" else "rmsnorm", gated=False),
    }


def _norms(values: dict[str, Any], fixed: str | None, operator: str, *, gated: bool) -> dict[str, Any]:
    """Placement or sites, operator and width of the norms; a stock architecture has a `fixed` placement."""
    if fixed is None:
        operator = values.get("normalization", operator)
    settings: dict[str, Any] = {"normalization": {v: k for k, v in OPERATORS.items()}[operator]}
    if fixed is not None:
        return settings | {"norm_placement": fixed}
    settings["qk_norm_width"] = values.get("qk_norm_width", "full")
    sites = values.get("norm_sites")
    if sites is None:
        return settings | {"norm_placement": values.get("norm_placement", "simplenorm")}
    row = _row_of(frozenset(sites), gated=gated)
    return settings | ({"norm_placement": row} if row else {"norm_sites": tuple(sites)})


def _rope(values: dict[str, Any], source: str) -> tuple[float, str | None]:
    """theta and our name of the scaling rule, from either spelling."""
    parameters = values.get("rope_parameters") or {}
    rule = {**(values.get("rope_scaling") or {}), **parameters}
    theta = float(parameters.get("rope_theta", values.get("rope_theta", 10_000.0)))
    if float(values.get("rope_theta", theta)) != theta:
        raise ConfigError(f"{source}: rope_theta {values['rope_theta']} and rope_parameters' {theta} contradict each other")
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rule.get(name) == value for name, value in LLAMA31_SCALING.items()):
        return theta, "llama3.1"
    raise ConfigError(
        f"{source}: RoPE scaling of type '{kind}' with these numbers is not known here; there is no scaling and Llama 3.1's "
        f"({', '.join(f'{name} {value}' for name, value in LLAMA31_SCALING.items())})"
    )


def _expect(values: dict[str, Any], expected: dict[str, Any], source: str) -> None:
    for name, value in expected.items():
        found = values.get(name)
        if found is not None and found != value:
            raise ConfigError(f"{source}: {name} is {found}; this program has models with {value} only")
