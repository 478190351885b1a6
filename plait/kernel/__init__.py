"""Kernel targets: a `Kernel` of the plan becomes source text and a symbol. One target a family of
files."""
