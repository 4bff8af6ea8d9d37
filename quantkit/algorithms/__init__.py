"""The arithmetic: from a weight and a Hessian to codes and scales, with no library but torch.

Begin with `rtn.quantize`, then `gptq.quantize`; docs/algorithms.md has the formulas.
"""
