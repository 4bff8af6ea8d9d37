"""Models as transformers builds them: the skeleton without weights, one block at a time, the whole
model in memory.

Not here: recipes, quantization, text, and packed weights in a model. Begin with `block_runner`.
"""
