"""Pretraining of normalised transformers (SimpleGPT and its baselines) with tensor, pipeline and data parallelism."""

__version__ = "0.1.0"
