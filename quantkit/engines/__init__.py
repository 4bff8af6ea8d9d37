"""Dated tables about other programs: which folders they open, and which kernels they choose."""
