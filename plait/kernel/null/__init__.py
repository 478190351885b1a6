"""Kernels without a compiler, for tests: their text as data, run by the interpreter of the IR."""
