"""The nouns: number formats, schemes, the record of a quantized weight, and 2:4 sparsity."""
