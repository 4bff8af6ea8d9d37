"""Dated tables about other programs: the folders that they open, their kernels, the linears that
they join.
"""
