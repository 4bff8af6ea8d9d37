"""Number formats, schemes, the record of a quantized weight, and 2:4 sparsity.

Every other package builds on these types; they depend on torch alone. `formats` holds tables of code values, `scheme`
says how a weight is quantized, `quantized_tensor` is the record that algorithms produce and layouts store. Rounding
algorithms and file layouts are elsewhere. Start with `QuantizedTensor`.
"""
