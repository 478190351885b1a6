"""Which kernels have eager's bits by construction, and what gives others other bits; and which
calls may give a row other bits where there are other rows beside it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.devices import facts_of
from plait.ir.calls import Extern, all_programs
from plait.lower.exact import other_bits
from plait.lower.row_products import keeps_rows
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


def rows_line(g: CompileRecord) -> str:
    """What `batch_invariant` leaves out, and what it does not hold for: such as "batch_invariant:
    no split sums, no tuning; not promised for calls of aten.fft_r2c (model.py:3)"."""
    found = [
        f"calls of {_operator(s)}{_place(s.origin)}"
        for p in all_programs(g.plan)
        for s in p.steps
        if isinstance(s, Extern) and not keeps_rows(s)
    ]
    line = (
        "batch_invariant: no sum is split by how many rows there are, no tile, form or kernel is "
        "chosen or measured by that"
    )
    told = ", ".join(dict.fromkeys(found))
    return f"{line}; not promised for {told}" if told else line


def _place(origin: Sequence[str]) -> str:
    return f" ({origin[0].split()[0]})" if origin else ""


def _operator(call: Extern) -> str:
    return call.op.replace("::", ".")
