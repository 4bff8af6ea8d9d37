"""Benchmarks on a GPU: the kernels of packed weights beside cuBLAS, and whole models with random
weights.

Begin with `kernels`. Scripts that measure quantkit itself are in the folder benchmarks/.
"""
