"""What an op names: the buffers that it needs, makes and changes, and the sizes that it must know.

What a loop's body loads is beside that: `plait/schedule/deps.py` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from plait.ir import loops as ir
from plait.ir.calls import WAIT, Extern, ExternArg, ListArg, TensorArg
from plait.ir.expr import Expr, Size


def loop_outs(loop: ir.Loop) -> tuple[str, ...]:
    """The buffers that a loop writes."""
    if isinstance(loop, (ir.Pointwise, ir.Scatter)):
        return (loop.out,)
    return tuple(o for o in loop.outs if o is not None)


def flat_args(args: Iterable[ExternArg]) -> Iterator[ExternArg]:
    """Operands, with those in lists instead of the lists."""
    for a in args:
        if isinstance(a, ListArg):
            yield from flat_args(a.items)
        else:
            yield a


def tensor_args(args: Iterable[ExternArg]) -> Iterator[TensorArg]:
    """The tensors among operands, those in lists included."""
    for a in args:
        if isinstance(a, TensorArg):
            yield a
        elif isinstance(a, ListArg):
            yield from tensor_args(a.items)


def extern_reads(op: Extern) -> tuple[str, ...]:
    """The buffers that a call is given, each once."""
    names: list[str] = []
    for a in op.operands:
        names += (a.buf,) if type(a) is TensorArg else [t.buf for t in tensor_args((a,))]
    return tuple(dict.fromkeys(names))


def needs(op: ir.Op) -> tuple[str, ...]:
    """The buffers that an op names and whose contents it needs, each once."""
    if isinstance(op, Extern):
        return tuple(dict.fromkeys((*extern_reads(op), *op.mutates, *op.held)))
    if isinstance(op, (ir.Scatter, ir.Alias)):
        return (op.base,)
    if isinstance(op, ir.Item):
        return (op.buf,)
    return (op.source,) if isinstance(op, ir.Mutate) else ()


def defines(op: ir.Op) -> tuple[str, ...]:
    """The buffers that come into being (or get a part of their contents) by an op."""
    if isinstance(op, (ir.Pointwise, ir.Reduction, ir.Scan, ir.Scatter)):
        return loop_outs(op)
    if isinstance(op, Extern):
        return op.made
    return (op.out,) if isinstance(op, ir.Alias) else ()


def unwritten(program: ir.LoopProgram) -> tuple[str, ...]:
    """The buffers without elements that no op makes: they are there from the start."""
    empty = [n for n, b in program.buffers.items() if b.is_empty]
    makers = (op for op in program.ops if not isinstance(op, ir.Scatter) or op.base != op.out)
    made = program.given.union(*map(defines, makers)) if empty else ()
    return tuple(n for n in empty if n not in made)


def updates(op: ir.Op) -> tuple[str, ...]:
    """The buffers that an op changes in place."""
    if isinstance(op, Extern):
        return op.mutates
    if isinstance(op, ir.Mutate):
        return (op.target,)
    return (op.out,) if isinstance(op, ir.Scatter) and op.base == op.out else ()


def in_flight(ops: Iterable[ir.Op]) -> dict[str, tuple[str, ...]]:
    """The buffers that collectives fill which were started and not waited for, and what each of
    these collectives was given."""
    found: dict[str, tuple[str, ...]] = {}
    for op in ops:
        if not isinstance(op, Extern):
            continue
        if op.starts:
            made = (*op.made, *op.mutates)
            given = tuple(b for b in extern_reads(op) if b not in made)
            found.update(dict.fromkeys(made, given))
        elif op.op == WAIT:
            for buf in extern_reads(op):
                found.pop(buf, None)
    return found


def sizes(op: ir.Op) -> tuple[Size, ...]:
    """The expressions on size symbols that an op evaluates outside of loops."""
    if isinstance(op, Extern):
        grids = () if op.kernel is None else op.kernel.grids
        return (*arg_sizes(op.operands), *grids)
    if isinstance(op, ir.Alias):
        return (op.offset,)
    return (op.expr, *op.values) if isinstance(op, ir.Assert) else ()


def arg_sizes(args: Iterable[ExternArg]) -> tuple[Size, ...]:
    """The expressions in operands."""
    out: list[Size] = []
    for a in flat_args(args):
        if isinstance(a, TensorArg):
            out += (*a.shape, *a.strides, a.offset)
        elif isinstance(a, (int, Expr)):
            out.append(a)
    return tuple(out)
