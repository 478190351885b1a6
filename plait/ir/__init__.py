"""The loop IR: torch-free, immutable, interned data that describes what to compute and never
how."""
