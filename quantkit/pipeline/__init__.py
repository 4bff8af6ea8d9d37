"""The jobs: quantize, prune, convert and push, each to a published folder. Begin with
`quantize`.
"""
