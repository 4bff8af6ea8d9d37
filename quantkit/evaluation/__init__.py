"""Measure the quality of checkpoints, and prove their bits. Begin with `perplexity`, or with
`verify`.
"""
