"""Number formats, schemes, the record of a quantized weight, and 2:4 sparsity: the types that all
others build on.

They depend on torch alone. Begin with `QuantizedTensor`.
"""
