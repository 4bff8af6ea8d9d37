"""Packed weights inside a transformers model.

`load` opens a checkpoint as an ordinary transformers model, `generate` writes text with it. `packed_linear` multiplies
with one packed weight, `fused_linear` with several at once (QKV, gate and up). `swap_linears` puts both into a model,
and `transformers_plugin` registers all of it with transformers. The kernels are in `quantkit.kernels`, scores in
`quantkit.evaluation`. Begin with `load`.
"""
