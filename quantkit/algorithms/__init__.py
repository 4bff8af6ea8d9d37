"""The arithmetic: Hessians, rounding, scale search, GPTQ, coordinate descent."""
