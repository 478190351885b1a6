"""Calls of packed products become calls of kernels whose text is known, and the functions that
these texts share.

Comes in: the call of a packed `Product`. Goes out: the same call of a `UserKernel`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from plait.ir.attention import HostAttention
from plait.ir.calls import DeviceKernel, Extern, TensorArg, UserKernel, Variant
from plait.ir.dtypes import DType, bf16, f16, f32
from plait.ir.expr import Expr, Size
from plait.ir.product import Pair, Panels, Product
from plait.kernel.cpu.depthwise import DepthwiseWriter, depthwise_texts, depthwise_unit
from plait.kernel.cpu.heads import heads_text, heads_texts
from plait.kernel.cpu.loose import LooseWriter, loose_texts
from plait.kernel.cpu.packed import OWN, Writer, pair_text
from plait.kernel.cpu.packed_shared import dense_unit, walk_texts
from plait.kernel.cpu.prelude import definitions
from plait.kernel.cpu.winograd import WinogradWriter, winograd_texts
from plait.runtime.toolchain import SHARED, Isa
from plait.schedule.plan import UserLaunch

_POINTERS = {f32: "*fp32", bf16: "*bf16", f16: "*fp16"}
_WRITERS: dict[str, type[Writer]] = {
    "dense": Writer, "winograd": WinogradWriter, "depthwise": DepthwiseWriter,
}  # fmt: skip


def write_packed(call: Extern, dtypes: Sequence[DType], isa: Isa) -> Extern:
    """The call, of a kernel whose text is known. dtypes: of operands."""
    tensors = tuple(a for a in call.args if isinstance(a, TensorArg))
    sizes = tuple(a for a in call.args if isinstance(a, (int, Expr)))
    if isinstance(call.kernel, HostAttention):
        text = heads_text(call.kernel, tensors, sizes, isa)
    else:
        text = _text(call.kernel, tensors, sizes, dtypes, isa)
    assert call.kernel is not None, call
    made = [r.body.dtype for r in call.kernel.results] if isinstance(call.kernel, Product) else []
    made += [f32] * (len(call.outs) - len(made))
    pointers = tuple(_POINTERS[d] for d in (*dtypes, *made))
    kernel = UserKernel(call.kernel.name, text, pointers, (Variant("", (), 1),))
    return replace(call, args=(*tensors, *(a for a in sizes if isinstance(a, Expr))), kernel=kernel)


def _text(
    kernel: DeviceKernel | None, tensors: Sequence[TensorArg], sizes: Sequence[Size],
    dtypes: Sequence[DType], isa: Isa,
) -> str:  # fmt: skip
    if isinstance(kernel, Pair):
        (rows,) = sizes
        assert isinstance(rows, int), kernel
        return pair_text(kernel, tensors, rows, isa)
    assert isinstance(kernel, Product) and isinstance(kernel.how, Panels), kernel
    (result,) = kernel.results
    if kernel.how.form == "loose":
        return LooseWriter(kernel.how, result.body, tensors, sizes, isa, factors=dtypes[0]).text()
    return _WRITERS[kernel.how.form](kernel.how, result.body, tensors, sizes, isa).text()


def takes(launch: UserLaunch) -> tuple[int, int]:
    """How many buffers and sizes a kernel reads."""
    return len(launch.buffers), len(launch.sizes)


def library_texts(texts: Sequence[str], isa: Isa) -> tuple[str, ...]:
    """The functions of kernels with these texts, in groups that know nothing of each other, and
    the units that they need besides. What several of a group call stands there once, before
    them."""
    made, units = [], []
    for form, (walks, shared) in _FORMS.items():
        group = [text for text in texts if re.search(rf"\bpacked_(?:{walks})\(", text)]
        if group:
            parts = [text.split(OWN) for text in group]
            epilogues = dict.fromkeys(epilogue for part in parts for epilogue in part[:-1])
            functions = (*shared(group, isa), *epilogues, *(part[-1] for part in parts))
            made.append(f"namespace packed_{form} {{\n{''.join(functions)}}}\n")
            units.append(shared_unit(_UNIT_OF.get(form, "dense"), isa))
    return (*made, *dict.fromkeys(units))


_FORMS: dict[str, tuple[str, Callable[[Sequence[str], Isa], list[str]]]] = {
    "dense": ("rows|image", walk_texts), "winograd": ("winograd", winograd_texts),
    "depthwise": ("depthwise", depthwise_texts), "heads": ("heads", heads_texts),
    "loose": (r"loose_\w+", loose_texts),
}  # fmt: skip
_UNIT_OF = {"depthwise": "depthwise"}


@lru_cache
def shared_unit(form: str, isa: Isa) -> str:
    """A translation unit that is the same for all libraries."""
    text = {"dense": dense_unit, "depthwise": depthwise_unit}[form](isa)
    return f"{SHARED}{definitions(text, isa)}\n{text}"
