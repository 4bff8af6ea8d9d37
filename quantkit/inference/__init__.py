"""Packed weights inside a transformers model."""
