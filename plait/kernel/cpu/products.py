"""Calls of packed products become calls of kernels whose text is known, and the functions that
these texts share.

Comes in: the call of a packed `Product`. Goes out: the same call of a `UserKernel`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from plait.ir.calls import Extern, TensorArg, UserKernel, Variant
from plait.ir.expr import Expr
from plait.ir.product import Panels, Product
from plait.kernel.cpu.depthwise import DepthwiseWriter, depthwise_texts
from plait.kernel.cpu.packed import OWN, Writer
from plait.kernel.cpu.packed_shared import walk_texts
from plait.kernel.cpu.winograd import WinogradWriter, winograd_texts
from plait.runtime.toolchain import Isa
from plait.schedule.plan import UserLaunch

_WRITERS: dict[str, type[Writer]] = {
    "dense": Writer, "winograd": WinogradWriter, "depthwise": DepthwiseWriter,
}  # fmt: skip


def write_packed(call: Extern, isa: Isa) -> Extern:
    """The call, of a kernel whose text is known."""
    assert isinstance(call.kernel, Product) and isinstance(call.kernel.how, Panels), call
    (result,) = call.kernel.results
    tensors = tuple(a for a in call.args if isinstance(a, TensorArg))
    sizes = tuple(a for a in call.args if isinstance(a, (int, Expr)))
    text = _WRITERS[call.kernel.how.form](call.kernel.how, result.body, tensors, sizes, isa).text()
    pointers = ("*fp32",) * (len(tensors) + 1)
    kernel = UserKernel(call.kernel.name, text, pointers, (Variant("", (), 1),))
    return replace(call, args=(*tensors, *(a for a in sizes if isinstance(a, Expr))), kernel=kernel)


def takes(launch: UserLaunch) -> tuple[int, int]:
    """How many buffers and sizes a kernel reads."""
    return len(launch.buffers), len(launch.sizes)


def library_texts(texts: Sequence[str], isa: Isa) -> tuple[str, ...]:
    """The functions of kernels with these texts, in groups that know nothing of each other. What
    several of a group call stands there once, before them."""
    made = []
    for form, shared in (
        ("rows|image", walk_texts), ("winograd", winograd_texts), ("depthwise", depthwise_texts),
    ):  # fmt: skip
        group = [text for text in texts if re.search(rf"\bpacked_(?:{form})\(", text)]
        if group:
            parts = [text.split(OWN) for text in group]
            epilogues = dict.fromkeys(epilogue for epilogue, _ in parts)
            functions = (*shared(group, isa), *epilogues, *(own for _, own in parts))
            name = f"packed_{form.partition('|')[0]}_kernels"
            made.append(f"namespace {name} {{\n{''.join(functions)}}}\n")
    return (*made,)
