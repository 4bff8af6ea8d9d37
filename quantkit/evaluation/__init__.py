"""How good a checkpoint is, and whether it holds what was quantized. Begin with `perplexity`, or
with `verify`.
"""
