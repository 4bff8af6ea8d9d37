"""What a checkpoint is worth: perplexity, divergence, verification."""
