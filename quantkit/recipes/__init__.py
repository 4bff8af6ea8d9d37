"""The recipe: every choice that decides the bytes of an output, the goal of each linear, and the
identity of a run.
"""
