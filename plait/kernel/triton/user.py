"""Kernels that the user wrote, as modules like those of our own kernels: the user's functions, and
one of ours that takes pointers and 64-bit sizes and calls the user's.

So a launch of theirs is one of ours to all that compiles, stores, tunes and launches kernels. They
are compiled with Triton's own defaults, as eager compiles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.ir.calls import TensorArg, Variant
from plait.ir.dtypes import DType
from plait.ir.expr import Size
from plait.runtime.cubin import Gpu, Job
from plait.runtime.store import key_of
from plait.runtime.tune import Contest, Rival, Scratch, Strided
from plait.schedule.cost import hint
from plait.schedule.plan import UserLaunch


@dataclass(frozen=True)
class TritonKernel(Job):
    """One kernel of a GPU program. Its signature: pointers in the order of a launch's arguments,
    then one i64 a size.

    grid: number of programs, an expression over the size symbols.
    """

    grid: Size = 1


_EVEN = 8
"""Columns of a product of the vendor's are a multiple of it (lower/align_rows.py)."""
_DEFAULTS = (("enable_reflect_ftz", True), ("sanitize_overflow", True))
"""Options that Triton has by default, and our own kernels otherwise."""


def unit_of(launch: UserLaunch, variant: Variant, gpu: Gpu, symbol: str = "") -> TritonKernel:
    """The module of a launch. symbol: its function; "": a name made of its content."""
    pointers = {f"p{k}": t for k, t in enumerate(launch.kernel.pointers)}
    sizes = [f"s{k}" for k in range(len(launch.sizes))]
    plain = f"(do_not_specialize={sizes})" if sizes else ""
    body = f"({', '.join((*pointers, *sizes))}):\n    {variant.call}\n"
    given = dict(variant.options)
    warps, stages = (int(given.pop(k) or 0) for k in ("num_warps", "num_stages"))
    options = (*_DEFAULTS, *given.items())
    if not symbol:
        parts = (launch.kernel.text, body, launch.kernel.pointers, launch.aligned, gpu, options)
        content = key_of(map(repr, (*parts, warps, stages)))[:10]
        symbol = f"{launch.kernel.name.partition('.')[0]}_{content}"
    text = f"{launch.kernel.text}\n\n@triton.jit{plain}\ndef {symbol}{body}"
    signature = {**pointers, **dict.fromkeys(sizes, "i64")}
    return TritonKernel(
        symbol, text, signature, gpu, warps, stages, launch.aligned, options=options,
        grid=variant.grid,
    )  # fmt: skip


def contest_of(launch: UserLaunch, gpu: Gpu) -> Contest:
    """The variants of a kernel, to be measured on memory that is nobody's: what they write, and how
    often, does not matter."""
    hints, variants = launch.hints, launch.kernel.variants

    def version(k: int) -> tuple[Job, int]:
        return unit_of(launch, variants[k], gpu, "kernel"), hint(variants[k].grid, hints)

    buffers = []
    for a, dtype in zip(launch.buffers, launch.dtypes, strict=True):
        pairs = zip(a.shape, a.strides, strict=True)
        span = 1 + sum(max(hint(n, hints) - 1, 0) * hint(s, hints) for n, s in pairs)
        buffers.append(Scratch(dtype.name, span * dtype.nbytes))
    sizes = tuple(hint(e, hints) for e in launch.sizes)
    labels = tuple(f"{v.call} with {dict(v.options)}" for v in variants)
    other, rival, cold = launch.kernel.rival, None, launch.kernel.cold
    if other is not None:
        left, right = (_seen(launch.buffers[k], launch.dtypes[k], hints) for k in range(2))
        *outer, columns = right.shape
        even = -(-columns // _EVEN) * _EVEN
        op, right = other.operator, replace(right, shape=(*outer, even))
        called = (op.name, left, right, op.dims, op.gelu)
        rival = Rival(*called, other.nbytes, other.more_us, op.is_planned)
    return Contest(labels, version, tuple(buffers), sizes, launch.device, rival, cold)


def _seen(a: TensorArg, dtype: DType, hints: Mapping[str, int]) -> Strided:
    shape, strides = (tuple(hint(e, hints) for e in es) for es in (a.shape, a.strides))
    return Strided(dtype.name, shape, strides)
