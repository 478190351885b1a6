"""What a compiled program needs to run, and nothing of the compiler: loading, toolchain, caches."""
