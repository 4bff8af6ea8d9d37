"""Benchmarks on a GPU: the kernels of packed weights beside cuBLAS, and whole models with random weights.

`kernels` times single products, `generate` times prompts and steps of a model. They use `timing` (CUDA graphs and
medians), `roofline` (floors and comparisons, pure arithmetic), `random_model` and `decode_graphs`. Not in here: the
accuracy of models (`evaluation`), and scripts that measure quantkit itself (the folder benchmarks/).
Begin with `kernels`.
"""
