"""Number formats, schemes, the record of a quantized weight, and 2:4 sparsity: the types that all
others build on.

They depend on nothing but torch. Begin with `QuantizedTensor`.
"""
