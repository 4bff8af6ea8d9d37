"""The jobs: quantize, prune, convert and push, each to a published folder.

Not here: the loop over blocks (`calibration`), the plan (`planning`), the arithmetic (`algorithms`), bit layouts
(`layouts`) and files (`checkpoint`, `io`). Begin with `quantize`; `convert` is for checkpoints that are quantized.
"""
