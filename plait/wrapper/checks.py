"""The options `nan_asserts` and `finite_asserts`: instructions that look for NaNs, or for
infinities too, put into a program for every target.

Looked at are floating arguments, what kernels and operators compute, and what is returned, as the
caller sees it. Memory of ours is looked at once everything is written that lies in it, right before
it is read: earlier, parts of it may be nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.wrapper import instructions as ins
from plait.wrapper.forms import of_one_way
from plait.wrapper.walk import defined, operands, refs, root, views_of

_BEFORE = (
    ins.DefineKernel,
    ins.Symbol,
    ins.AssertScalar,
    ins.AssertSizeStride,
    ins.AssertAlignment,
)


def check_finite(p: ins.WrapperProgram, infinities: bool) -> ins.WrapperProgram:
    """A program without Free, with the checks; every message names what computed the value, with
    its source lines."""
    return replace(p, body=tuple(_Checks(p, infinities).body()))


class _Checks:
    """bases: view -> what it views. last: memory of ours -> position of the last instruction that
    writes it.
    makers: memory -> what has written it so far. seen: memory -> tensors looked at since it was
    written. hidden: what may hold nothing yet when it is read."""

    def __init__(self, p: ins.WrapperProgram, infinities: bool) -> None:
        self.program = p
        self.infinities = infinities
        self.bases = views_of(p.body)
        self.last: dict[str, int] = {}
        self.makers: dict[str, list[str]] = {}
        self.seen: dict[str, set[str]] = {}
        self.origins = dict(p.origins)
        self.note = ""
        self.hidden = of_one_way(p.body)
        for k, i in enumerate(p.body):
            if isinstance(i, (ins.Alloc, ins.Place, ins.Reuse)):
                self.last[i.name] = k
            for name in _writes(i):
                if (memory := root(name, self.bases)) in self.last:
                    self.last[memory] = k

    def body(self) -> Iterator[ins.Instr]:
        given = [
            i.name
            for i in self.program.inputs
            if isinstance(i, ins.TensorInput) and i.dtype.is_float
        ]
        self.makers = {name: ["the caller"] for name in given}
        first = next(k for k, i in enumerate(self.program.body) if not isinstance(i, _BEFORE))
        for k, i in enumerate(self.program.body):
            # At the end only those arguments that were written are looked at again.
            names = [*_reads(i), *(given if k == first or isinstance(i, ins.Return) else ())]
            for name in dict.fromkeys(names):
                yield from self.check(k, name)
            yield i
            self.advance(i)

    def check(self, k: int, name: str) -> Iterator[ins.Instr]:
        memory = root(name, self.bases)
        seen = self.seen.setdefault(memory, set())
        known = memory in self.makers and memory not in self.hidden
        if not known or self.last.get(memory, -1) >= k or self.is_any(seen, name):
            return
        seen.add(name)
        yield ins.CheckFinite(name, ", ".join(dict.fromkeys(self.makers[memory])), self.infinities)

    def is_any(self, of: set[str], name: str) -> bool:
        """Whether the name, or one that it is a view of, is among these."""
        while name not in of and name in self.bases:
            name = self.bases[name]
        return name in of

    def advance(self, i: ins.Instr) -> None:
        """Notes what the instruction has computed."""
        if isinstance(i, ins.Note):
            self.note = i.text
        maker = self.maker(i)
        for name in (*_writes(i), *(defined(i) if isinstance(i, ins.Call) else ())):
            memory = root(name, self.bases)
            if memory in self.seen.pop(memory, ()):  # that was fine
                self.makers[memory] = []
            self.makers.setdefault(memory, []).append(maker)

    def maker(self, i: ins.Instr) -> str:
        match i:
            case ins.Launch():
                lines = self.origins.get(i.kernel, "")
                return f"{i.kernel} ({lines})" if lines else i.kernel
            case ins.CallPython():
                return i.label
            case _ if isinstance(i, ins.Call):
                return f"{i.label} ({self.note})" if self.note else i.label
            case _:
                return "a copy"


def _writes(i: ins.Instr) -> tuple[str, ...]:
    """Tensors whose memory this writes."""
    match i:
        case ins.Launch():
            return i.outs
        case ins.CallExtern():
            return i.into
        case ins.Copy():
            return (i.dst,)
        case ins.Fill():
            return (i.tensor,)
        case _:
            return ()


def _reads(i: ins.Instr) -> Iterator[str]:
    """Tensors whose values this needs. What it writes may hold nothing yet."""
    names = i.args if isinstance(i, ins.Launch) else (i.src,) if isinstance(i, ins.Copy) else ()
    yield from (n for n in names if n not in _writes(i))
    for o in operands(i):
        yield from (n for n in refs(o) if n not in _writes(i))
