"""Kernels run in numpy, by the reference meaning of every op.

Comes in: kernels, and the memory of their buffers. What is read, is read before anything is
written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from plait.ir import interp
from plait.ir.expr import Size, atom_of, evaluate, substitute
from plait.ir.interp import Array, Evaluation, Memory
from plait.ir.loops import Buffer, check_of
from plait.schedule.dedup import part_operands
from plait.schedule.deps import extent
from plait.schedule.plan import Kernel, Reduce, column_programs, part_of

_NONE: Mapping[str, int] = {}


def launch(
    kernel: Kernel, tid: int, nthreads: int, bufs: Sequence[int | None], syms: Sequence[int]
) -> int:
    """Called as a kernel of machine code is: the first thread runs all of it."""
    if tid:
        return 0
    sizes = {str(s): syms[k] for k, s in enumerate(kernel.sizes)}
    arrays = {b.name: _elements(b, bufs[k], sizes) for k, b in enumerate(kernel.args)}
    return run_kernel(kernel, arrays, sizes)


def _elements(b: Buffer, address: int | None, sizes: Mapping[str, int]) -> Array:
    """A buffer's memory, from its first element to its last."""
    shape, strides = ([evaluate(e, sizes) for e in es] for es in (b.shape, b.strides))
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    raw = (ctypes.c_byte * (count * b.dtype.nbytes)).from_address(address or 0)
    return np.ndarray((count,), interp.memory_type(b.dtype), memoryview(raw))


def run_kernel(
    kernel: Kernel,
    arrays: interp.Memory,
    sizes: Mapping[str, int] | None = None,
    wide: bool = False,
) -> int:
    """Runs a kernel on flat arrays, by name of buffer. Returns k where kernel.checks[k - 1] failed,
    else 0."""
    checked = 0
    values = [(sizes or {})[str(s)] for s in kernel.sizes]
    for number, nest in enumerate(kernel.nests):
        places = part_operands(kernel, number)[1] if kernel.parts else range(len(values))
        given = {str(s): values[k] for s, k in zip(nest.sizes, places, strict=True)}
        if failed := _run_nest(nest, arrays, given, wide):
            return checked + failed
        checked += len(nest.checks)
    return 0


def _run_nest(k: Kernel, arrays: Memory, sizes: Mapping[str, int], wide: bool) -> int:
    strides = {b.name: b.strides for b in k.args}
    dtypes = {b.name: b.dtype for b in k.args}
    axes = tuple(map(atom_of, (*k.vars, *k.rvars)))
    space = Evaluation(axes, sizes, arrays, strides, wide)
    n_inner = len(k.rvars)
    todo = []
    for s in k.stmts:
        x = space.whole(s.value)
        if isinstance(s, Reduce):
            if s.segment:
                cut = x.reshape(*x.shape[: len(k.vars)], -1, s.segment)
                whole = interp.reduce_array(s.kind, cut, s.value.dtype, 1)[""]
                space.accs[s.name] = np.broadcast_to(whole, cut.shape).reshape(x.shape)
            elif s.running:
                space.accs[s.name] = interp.running_array(s.kind, x, s.value.dtype)
            else:
                found = interp.reduce_array(s.kind, x, s.value.dtype, n_inner)
                space.accs.update({s.name + suffix: value for suffix, value in found.items()})
            continue
        args = [space.value(a) for a in s.index_args]
        offset = space.offset(s.buf, dealt(k, s.index), args)
        shape = space.shape() if s.full else (*space.shape()[: len(k.vars)], *([1] * n_inner))
        mask = None if s.mask is None else np.broadcast_to(space.value(s.mask), shape)
        x = x if s.full else space.value(s.value)
        todo.append((s, (np.broadcast_to(offset, shape), np.broadcast_to(x, shape), mask)))
    for s, (offset, x, mask) in todo:
        interp.write(arrays[s.buf], dtypes[s.buf], offset, x, mask, s.mode)
    failed = {check_of(n) for n in space.failed}
    return next((at for at, check in enumerate(k.checks, 1) if check in failed), 0)


def dealt(kernel: Kernel, index: tuple[Size, ...]) -> tuple[Size, ...]:
    """An index with the part that a point belongs to as the remainder of its position, as Triton
    kernels deal."""
    n = column_programs(kernel.stmts)
    if n is None:
        return index
    position: Size = 0
    for v in kernel.vars:
        position = position * extent(v) + v
    part = {atom_of(part_of(n)): position % n}
    return tuple(substitute(e, part) for e in index)
