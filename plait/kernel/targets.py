"""The table of kernel targets: kind of device -> what makes its kernels."""

from __future__ import annotations

from plait.kernel.cpu.target import CppTarget
from plait.kernel.target import Target
from plait.kernel.triton.target import TritonTarget

TARGETS: dict[str, Target] = {"cpu": CppTarget(), "cuda": TritonTarget()}
