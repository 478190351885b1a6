"""Which kernels are the same but for names, and the symbols that they get: equal ones are written
and built once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.ir.expr import Expr, atom_of, substitute
from plait.ir.loops import Load, Node, walk
from plait.schedule.legalize.linear import stmt_nodes
from plait.schedule.plan import Kernel, Reduce


def symbol_for(name: str, taken: set[str]) -> str:
    """A C identifier made of a kernel's name that is not taken yet; it is now."""
    base = re.sub(r"\W", "_", name)
    symbol, k = base, 1
    while symbol in taken:
        symbol, k = f"{base}_{k}", k + 1
    taken.add(symbol)
    return symbol


LENGTH = "length"
"""The symbol of a length that is an argument, see `share_lengths.py`."""
OFFSET = "offset"
"""Begins the symbol of a place in a buffer that is an argument, see `share_offsets.py`."""


def offset(number: int) -> str:
    """The symbol of the place with this number."""
    return f"{OFFSET}{number}_"


def part_size(name: str, number: int) -> str:
    """The symbol of a length or a place of a kernel's part."""
    return f"{name}{number}"


@dataclass(frozen=True, slots=True)
class Shared:
    """A kernel that is written in the place of one of the plan.

    kernel: whose last sizes are lengths, or places in buffers.
    lengths: their values.
    """

    kernel: Kernel
    lengths: tuple[int, ...]

    def given(self, k: Kernel) -> tuple[Expr, ...]:
        """The symbols of what launches give this one besides the sizes of the plan's kernel."""
        return self.kernel.sizes[len(k.sizes) :]

    def launched(self, k: Kernel) -> Kernel:
        """The kernel of the plan, which is known by now, with what launches give this one."""
        values = dict(zip(map(atom_of, self.given(k)), self.lengths, strict=True))
        return replace(k, lengths=self.lengths, grid=substitute(k.grid, values))


def part_end(number: int) -> str:
    """The symbol of how many shares a kernel's parts have together, up to the one of this number,
    if they are alike."""
    return f"end{number}"


def part_operands(kernel: Kernel, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which buffers and which sizes of a kernel are those of its part of this number."""
    part = kernel.parts[number]
    return _operands(part, number, *_places(kernel))


def _places(kernel: Kernel) -> tuple[dict[str, int], dict[str, int]]:
    """The places of a kernel's buffers and sizes, by name."""
    names = {b.name: k for k, b in enumerate(kernel.args)}
    return names, {str(s): k for k, s in enumerate(kernel.sizes)}


def _operands(
    part: Kernel, number: int, names: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own = (_own(str(s), number) for s in part.sizes)
    return tuple([names[b.name] for b in part.args]), tuple([sizes[s] for s in own])


def _own(name: str, number: int) -> str:
    is_given = name == LENGTH or name.startswith(OFFSET)
    return part_size(name, number) if is_given else name


def structure(kernel: Kernel) -> object:
    """A hashable value that is equal for kernels that differ only in the names of kernel, buffers
    and reductions."""
    if kernel.parts:
        places = _places(kernel)
        operands = tuple([_operands(p, k, *places) for k, p in enumerate(kernel.parts)])
        if kernel.alike:
            return structure(kernel.parts[0]), operands
        return tuple(zip(map(structure, kernel.parts), operands, strict=True))
    buffers = {b.name: k for k, b in enumerate(kernel.args)}
    accs = {s.name: k for k, s in enumerate(s for s in kernel.stmts if isinstance(s, Reduce))}
    numbers: dict[Node, int] = {}
    rows: list[object] = []
    for n in walk([n for s in kernel.stmts for n in stmt_nodes(s)]):
        attr: object = n.attr
        if isinstance(n.attr, Load):
            attr = (buffers[n.attr.buf], n.attr.index, n.attr.masked)
        elif n.op == "acc":
            name, _, part = str(n.attr).rpartition(".")
            attr = (accs[str(n.attr)], "") if n.attr in accs else (accs[name], part)
        elif isinstance(n.attr, (bool, int, float)):
            attr = repr(n.attr)
        numbers[n] = len(numbers)
        rows.append((n.op, n.dtype.name, attr, tuple(numbers[a] for a in n.args)))
    stmts: list[object] = []
    for s in kernel.stmts:
        nodes = tuple(numbers[n] for n in stmt_nodes(s))
        if isinstance(s, Reduce):
            stmts.append((accs[s.name], s.kind, nodes, s.running, s.segment))
        else:
            stmts.append(
                (
                    buffers[s.buf],
                    s.index,
                    nodes,
                    s.full,
                    s.mode,
                    s.mask is not None,
                    s.atomic,
                    s.segment,
                )
            )
    layout = tuple((b.dtype.name, b.strides) for b in kernel.args)
    return (
        kernel.vars,
        kernel.rvars,
        tuple(rows),
        tuple(stmts),
        layout,
        kernel.sizes,
        kernel.sequential,
    )
