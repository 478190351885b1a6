"""Triton kernels launched from C++, C and other languages: README.md says how.

Python's side: `worker` compiles what a program lacks; `specialization` reads and writes how calls
are specialized.
"""

from pathlib import Path

OPERATORS = Path(__file__).parent / "ops" / "kernels.py"
"""The file of the kernels of `plait.ops`."""
