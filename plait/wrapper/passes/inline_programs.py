"""Calls of subprograms as they are (regions) become the instructions of these, under names of their
own.

For programs that are recorded as CUDA graphs: a call could not be recorded. The subprogram has been
lowered, fused and built once all the same, and each call launches the same kernels. Needs programs
that nothing else has looked at: no Free, no barrier. An argument that lies otherwise than the
subprogram was traced with, or where its kernels cannot read it, is copied first, as a call would
do. A subprogram's arena becomes allocations, for the whole program has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from plait.devices import facts_of
from plait.ir.dtypes import opaque
from plait.ir.expr import Expr, Size, free_symbols, substitute, symbol
from plait.wrapper import instructions as ins
from plait.wrapper.walk import renamed

Layout = tuple[tuple[Size, ...], tuple[Size, ...]]


_ALIGNMENT = 16  # bytes, which kernels of a GPU rely on


def inline_programs(p: ins.WrapperProgram, constants: Sequence[torch.Tensor]) -> ins.WrapperProgram:
    """The program without such calls; subprograms that nothing calls any more are gone. constants:
    its table."""
    nested = tuple(inline_programs(q, constants) for q in p.programs)
    inliner = _Inliner(nested, constants)
    for given in p.inputs:
        if isinstance(given, ins.TensorInput):
            inliner.layouts[given.name] = given.shape, given.strides
    for i in p.body:
        inliner.add(i)
    called = sorted(
        {k for i in inliner.body if isinstance(i, ins.CallPrograms) for k in i.programs}
    )
    number = {k: at for at, k in enumerate(called)}
    body = [_renumbered(i, number) for i in inliner.body]
    origins = dict(o for q in (p, *nested) for o in q.origins)
    return replace(
        p,
        body=(*inliner.kernels, *body),
        origins=tuple(origins.items()),
        programs=tuple(nested[k] for k in called),
    )


def _renumbered(i: ins.Instr, number: Mapping[int, int]) -> ins.Instr:
    if not isinstance(i, ins.CallPrograms):
        return i
    return replace(i, programs=tuple(number[k] for k in i.programs))


def _is_plain(p: ins.WrapperProgram) -> bool:
    """Whether a subprogram returns tensors alone and calls no others."""
    last = p.body[-1]
    assert isinstance(last, ins.Return), f"{last} ends a subprogram"
    none = ins.Literal("none", "")
    return not p.programs and all(isinstance(v, ins.Ref) or v == none for v in last.values)


@dataclass
class _Inliner:
    """The instructions so far.

    kernels: definitions, each once. layouts: sizes and strides of tensors that are known. odd:
    views that may begin anywhere. calls: written out so far.
    """

    programs: tuple[ins.WrapperProgram, ...]
    constants: Sequence[torch.Tensor]
    kernels: dict[ins.DefineKernel, None] = field(default_factory=dict)
    body: list[ins.Instr] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    odd: set[str] = field(default_factory=set)
    calls: int = 0

    def add(self, i: ins.Instr) -> None:
        """One instruction of the caller, or of a subprogram under its new names."""
        match i:
            case ins.DefineKernel():
                self.kernels.setdefault(i)
                return
            case ins.CallPrograms(kind="call") if _is_plain(self.programs[i.programs[0]]):
                self._inline(i, self.programs[i.programs[0]])
                return
            case ins.AssertSizeStride():
                if i.copies and self._lies(i.tensor, (i.shape, i.strides)):
                    return
                self.layouts[i.tensor] = i.shape, i.strides
            case ins.Alloc() | ins.Place() | ins.Reuse() | ins.View():
                self.layouts[i.name] = i.shape, i.strides
            case ins.Constant():
                value = self.constants[i.index]
                if value.layout == torch.strided:
                    self.layouts[i.name] = tuple(value.shape), value.stride()
            case _:
                pass
        if isinstance(i, ins.View):
            apart = i.base in self.odd or not i.relative
            if apart or i.offset * i.dtype.nbytes % _ALIGNMENT != 0:
                self.odd.add(i.name)
        self.body.append(i)

    def _inline(self, call: ins.CallPrograms, p: ins.WrapperProgram) -> None:
        names: dict[str, str] = {}
        values: dict[str, Size] = {}  # of symbols that are expressions of the caller
        for given, arg in zip(p.inputs, call.args, strict=True):
            if isinstance(given, ins.SymbolInput):
                assert isinstance(arg, (int, Expr)), f"{arg} is given for {given}"
                values[given.name] = arg
            elif isinstance(arg, ins.Ref):
                names[given.name] = arg.name
        *body, last = p.body
        for i in body:
            if isinstance(i, ins.Symbol) and isinstance(i.value, ins.SizeOf):
                found = self._known(names.get(i.value.tensor, ""), i.value)
                if found is not None:
                    values[i.name] = found
        assert isinstance(last, ins.Return), f"{last} ends a subprogram"
        for out, made in zip(call.outs, last.values, strict=True):
            if isinstance(made, ins.Ref) and out is not None:
                names[made.name] = out
        stem = f"r{self.calls}_"
        self.calls += 1

        def ref(name: str) -> str:
            return names.get(name) or stem + name

        def size(e: Size) -> Size:
            if isinstance(e, int):
                return e
            atoms = free_symbols(e)
            new = {a: values.get(a.name, symbol(stem + a.name, a.lo, a.hi)) for a in atoms}
            return substitute(e, new)

        for given in p.inputs:
            if isinstance(given, ins.TensorInput) and given.name in names:
                layout = tuple(map(size, given.shape)), tuple(map(size, given.strides))
                names[given.name] = self._fitting(names[given.name], given, layout, stem)
        devices = {i.name: i.device for i in body if isinstance(i, ins.Arena)}
        for i in body:
            if isinstance(i, ins.Symbol) and i.name in values:
                continue
            if isinstance(i, ins.Place):
                i = ins.Alloc(i.name, i.dtype, i.shape, i.strides, devices[i.arena])
            if not isinstance(i, ins.Arena):
                self.add(renamed(i, ref, size))

    def _fitting(self, name: str, given: ins.TensorInput, layout: Layout, stem: str) -> str:
        """An argument, or a copy of it that lies as the input that it is given for."""
        odd = name in self.odd and not facts_of(given.device).is_host
        if given.dtype == opaque or (self._lies(name, layout) and not odd):
            return name
        self.add(ins.Alloc(stem + given.name, given.dtype, *layout, given.device))
        self.add(ins.Copy(stem + given.name, name))
        return stem + given.name

    def _lies(self, tensor: str, layout: Layout) -> bool:
        """Whether a tensor is known to lie so: nothing reads the stride of a dimension of size
        1."""
        if tensor not in self.layouts:
            return False
        shape, strides = self.layouts[tensor]
        dims = zip(shape, strides, layout[1], strict=True)
        return shape == layout[0] and all(a == b or n == 1 for n, a, b in dims)

    def _known(self, tensor: str, source: ins.SizeOf) -> Size | None:
        """A size or a stride of a tensor, where its layout is known."""
        if tensor not in self.layouts or source.kind == "offset":
            return None
        shape, strides = self.layouts[tensor]
        return (shape if source.kind == "size" else strides)[source.dim]
