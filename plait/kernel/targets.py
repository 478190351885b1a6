"""The table of kernel targets: kind of device -> what makes its kernels."""

from __future__ import annotations

from plait.devices import DEVICES
from plait.kernel.cpu.target import CppTarget
from plait.kernel.target import Target
from plait.kernel.triton.target import TritonTarget

_BY_NAME: dict[str, Target] = {t.name: t for t in (CppTarget(), TritonTarget())}
TARGETS = {kind: _BY_NAME[facts.target] for kind, facts in DEVICES.items()}
