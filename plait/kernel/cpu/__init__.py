"""Kernels for CPUs: C++ with explicit vectors, built by the toolchain of the machine."""
