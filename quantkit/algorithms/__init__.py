"""The arithmetic: from a weight and a Hessian to codes and scales, with no library but torch.

Here: round to nearest (`rtn`), GPTQ (`gptq`), 2:4 pruning (`sparsegpt`), refinement (`coordinate_descent`), and their
shared parts. Not here: files, models, recipes and the choice of method, which are in `pipeline`. Begin with
`rtn.quantize`, then `gptq.quantize`. docs/algorithms.md has the formulas.
"""
