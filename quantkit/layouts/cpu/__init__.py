"""Packing loops for a CPU."""
