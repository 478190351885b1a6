"""The table of kernel targets: kind of device -> what makes its kernels."""

from __future__ import annotations

from collections.abc import Mapping

from plait.kernel.cpu.target import CppTarget
from plait.kernel.target import Target
from plait.kernel.triton.target import TritonTarget

TARGETS: Mapping[str, Target] = {"cpu": CppTarget(), "cuda": TritonTarget()}
