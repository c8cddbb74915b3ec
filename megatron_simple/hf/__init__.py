"""The models as Hugging Face classes. Importing the package registers them, so that the Auto classes load exported
folders without trust_remote_code."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_simplegpt import SimpleGPTConfig
from .configuration_simplegpt2 import SimpleGPT2Config
from .modeling_simplegpt import SimpleGPTForCausalLM, SimpleGPTModel
from .modeling_simplegpt2 import SimpleGPT2LMHeadModel, SimpleGPT2Model

__all__ = [
    "SimpleGPT2Config",
    "SimpleGPT2LMHeadModel",
    "SimpleGPT2Model",
    "SimpleGPTConfig",
    "SimpleGPTForCausalLM",
    "SimpleGPTModel",
]

for _config, _base, _model in (
    (SimpleGPTConfig, SimpleGPTModel, SimpleGPTForCausalLM),
    (SimpleGPT2Config, SimpleGPT2Model, SimpleGPT2LMHeadModel),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)
