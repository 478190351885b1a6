"""What a model's numbers depend on: `python -m benchmarks.numerics`."""
