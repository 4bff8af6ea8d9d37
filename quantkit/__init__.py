"""Low-bit checkpoints from Hugging Face causal LMs."""

__version__ = "0.1.0"
