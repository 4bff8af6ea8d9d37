"""Models as transformers builds them, and the text that calibrates and evaluates them.

Here: the skeleton without weights (`meta_model`), one block at a time (`block_runner`), the whole model in memory
(`whole_model`), tokens and calibration sequences. Not here: recipes, quantization, and packed weights in a model.
Begin with `block_runner`.
"""
