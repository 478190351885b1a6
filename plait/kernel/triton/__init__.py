"""Kernels for GPUs: Triton source, compiled to cubins by worker processes."""
