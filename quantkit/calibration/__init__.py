"""Quantizing with activations: the loop over blocks, its stages, and the activations that pass
between blocks.
"""
