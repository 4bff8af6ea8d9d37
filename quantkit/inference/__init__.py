"""Packed weights inside a transformers model: loaded, multiplied, fused, and written with. Begin
with `load`.
"""
