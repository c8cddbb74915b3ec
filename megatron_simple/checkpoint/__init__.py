"""Native checkpoints without a layout, and the way to Hugging Face folders and back."""
