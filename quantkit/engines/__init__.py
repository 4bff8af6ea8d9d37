"""Dated tables about other programs: which folders they open, which kernels they choose, which
linears they join.
"""
