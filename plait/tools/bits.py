"""Which kernels have eager's bits by construction, and what gives others other bits."""

from __future__ import annotations

from plait.devices import facts_of
from plait.lower.exact import other_bits
from plait.schedule.plan import Kernel, kernels_of
from plait.wrapper.program import CompileRecord


def bits_of(kernel: Kernel, g: CompileRecord) -> str:
    """Such as "eager's bits" or "may have other bits than eager: exp, sum"."""
    host = facts_of(kernel.device).is_host
    found = other_bits(kernel.origin, joins=not host and g.numerics != "eager")
    if g.numerics == "precise" and any(b.dtype.name in ("bf16", "f16") for b in kernel.args):
        found.append("no rounding between operators")
    return f"may have other bits than eager: {', '.join(found)}" if found else "eager's bits"


def bits_line(g: CompileRecord) -> str:
    """How many kernels of a graph have eager's bits."""
    kernels = kernels_of(g.plan)
    same = sum(bits_of(k, g) == "eager's bits" for k in kernels)
    return f"{same} of {len(kernels)} kernels have eager's bits by construction"
