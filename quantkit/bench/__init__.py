"""Speed of kernels and of whole models."""
