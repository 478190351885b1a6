"""Operators of PyTorch made of Triton kernels: README.md says which."""
