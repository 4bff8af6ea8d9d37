"""The jobs: quantize, prune and convert, each to a published folder. Begin with
`quantize`.
"""
