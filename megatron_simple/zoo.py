"""Named model sizes and the paper's recipes, as data (PAPER.md's table "Models and runs"; arXiv 2602.01212, section 5).

A size is a dict of ModelConfig fields; `--model NAME` lays it under the flags, so any flag given beside it wins.
The paper does not print the 1.4B nanoGPT's shape: 48 layers of width 1536 with 24 heads fit its count by arithmetic.
"""

LLAMA2 = {"backbone": "llama2", "vocab_size": 32_000, "rotary_base": 10_000.0}
LLAMA3 = {"backbone": "llama3", "vocab_size": 128_256, "rotary_base": 500_000.0}
NANOGPT = {"backbone": "nanogpt", "vocab_size": 50_257}


def _size(family: dict, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **other: object) -> dict:
    return family | {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "ffn_hidden_size": ffn,
        **other,
    }


# The CPU sizes leave the vocabulary to the tokenizer.
MODELS: dict[str, dict] = {
    "llama2-1b": _size(LLAMA2, 18, 2048, 16, 16, 5632),
    "llama2-7b": _size(LLAMA2, 32, 4096, 32, 32, 11008),
    "llama3-8b": _size(LLAMA3, 32, 4096, 32, 8, 14336),
    "gpt2-124m": _size(NANOGPT, 12, 768, 12, 12, 3072, add_bias_linear=True),
    "gpt2-1.4b": _size(NANOGPT, 48, 1536, 24, 24, 6144, add_bias_linear=False),
    "llama2-tiny": _size(LLAMA2, 2, 64, 4, 4, 192, vocab_size=None),
    "llama2-cpu": _size(LLAMA2, 4, 192, 6, 6, 512, vocab_size=None),
    "llama3-tiny": _size(LLAMA3, 2, 64, 4, 2, 224, vocab_size=None),
    "llama3-cpu": _size(LLAMA3, 4, 192, 6, 2, 640, vocab_size=None),
    "gpt2-tiny": _size(NANOGPT, 2, 64, 4, 4, 256, vocab_size=None, add_bias_linear=False),
    "gpt2-cpu": _size(NANOGPT, 4, 192, 6, 6, 768, vocab_size=None, add_bias_linear=False),
}

# Optimiser and batch settings of the paper's runs (section 5), by model; the learning rate is SimpleGPT's. Not printed there:
# the warm-up of the Llama runs (ours: one step in a hundred), and the learning rate at 1.4B, which the user has to give.
RECIPES: dict[str, dict] = {
    "llama2-1b": {
        "seq_length": 512,
        "global_batch_size": 256,
        "train_iters": 200_000,
        "lr_warmup_iters": 2_000,
        "lr": 2e-3,
        "weight_decay": 0.1,
    },
    "llama2-7b": {
        "seq_length": 2048,
        "global_batch_size": 192,
        "train_iters": 20_000,
        "lr_warmup_iters": 200,
        "lr": 1e-3,
        "weight_decay": 0.05,
    },
    "llama3-8b": {
        "seq_length": 2048,
        "global_batch_size": 192,
        "train_iters": 20_000,
        "lr_warmup_iters": 200,
        "lr": 1e-3,
        "weight_decay": 0.05,
    },
    "gpt2-1.4b": {
        "seq_length": 1024,
        "global_batch_size": 480,
        "train_iters": 100_000,
        "lr_warmup_iters": 2_000,
        "weight_decay": 0.1,
    },
}

# Where the paper's text and its released code differ, by `--recipe`.
RECIPE_VARIANTS: dict[str, dict] = {
    "paper": {"lr_decay_style": "cosine", "weight_decay_on": "matrices"},
    "code": {"lr_decay_style": "linear", "weight_decay_on": "all"},
}
# The text trains these baselines at a third of the learning rate, the released code at the same one.
BASELINES = ("prenorm", "qknorm")


def recipe(model: str, variant: str, *, norm_placement: str) -> dict:
    """The TrainingConfig fields of the paper's run of `model`, as its text or its released code has it."""
    settings = {**RECIPES[model], **RECIPE_VARIANTS[variant]}
    if variant == "paper" and norm_placement in BASELINES and "lr" in settings:
        settings["lr"] /= 3
    return settings
