"""How good a checkpoint is, and whether it holds what was quantized.

`perplexity` scores one model, `divergence` compares two; both read a text in `windows`. `verify` proves a checkpoint
bit by bit: it checks files and hashes, calls `weight_check` for each packed weight, and returns a `verification`.
`tasks`, `programs` and `rouge` judge what a model answers and writes; `sandbox` contains the programs.
Models are opened in `quantkit.inference`; kernels are timed in `quantkit.bench`. Begin with `perplexity`.
"""
