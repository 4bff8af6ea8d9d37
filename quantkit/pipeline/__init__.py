"""The jobs: plan, quantize, prune and convert, from a recipe to a published folder.

Here: recipes, the plan, the loop over blocks (`calibrate`), the solver of one group of linears (`layer_solver`), and
publishing. Not here: the arithmetic (`algorithms`), bit layouts (`layouts`) and files (`checkpoint`, `io`).
Begin with `quantize`; `convert` is the job for checkpoints that are quantized already.
"""
