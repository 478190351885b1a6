"""Loops in normal form: scatters update in place, and reductions over nothing are pointwise.

A Scatter runs on its base itself where nobody needs the old contents; otherwise the copy of its
base becomes a Pointwise of its own, which can be inlined into and fused like any other. One that
adds to zeros, of which a sum with something else is all that is needed, adds to that instead: the
gradient of an embedding whose weights are used twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeVar

from plait.ir import loops as ir
from plait.ir.calls import Extern, ListArg, TensorArg
from plait.ir.dtypes import i64
from plait.ir.effects import updates
from plait.ir.expr import Atom, Size, atom_of
from plait.ir.reductions import REDUCTIONS
from plait.schedule.deps import Bodies, extent, load_of, memory_roots, reads, roots

T = TypeVar("T")


def normalise(program: ir.LoopProgram, bodies: Bodies) -> ir.LoopProgram:
    """The program with every loop in normal form."""
    program = _without_zeros(program, bodies)
    ops: list[ir.Op] = []
    in_place = _InPlace(program, bodies)
    for k, op in enumerate(program.ops):
        op = in_place.renamed(op)
        if isinstance(op, ir.Scatter) and op.base != op.out:
            if in_place.may(k, op):
                in_place.take(op)
                ops.append(replace(op, out=op.base))
            else:
                ops += _split(op, program)
        elif isinstance(op, ir.Reduction) and all(extent(v) == 1 for v in op.rvars):
            ops += _single(op)
        elif isinstance(op, ir.Scan) and extent(op.vars[op.axis]) == 1:
            values = (_alone(op), ir.const(0, i64))
            ops += _pointwise(op, {}, values[: len(op.outs)])
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops), outputs=tuple(map(in_place.argument, program.outputs)))


def _without_zeros(program: ir.LoopProgram, bodies: Bodies) -> ir.LoopProgram:
    """The program with x + (zeros with something scattered into them) as x with that scattered into
    it."""
    scatters = {
        op.out: k
        for k, op in enumerate(program.ops)
        if isinstance(op, ir.Scatter) and op.mode == "add"
    }
    if not scatters:
        return program
    ops: list[ir.Op | None] = list(program.ops)
    zeros = {
        op.out
        for op in program.ops
        if isinstance(op, ir.Pointwise) and op.index is None and _is_zero(op.body)
    }
    uses = Counter(b for op in program.ops for b in {*reads(op, bodies)})
    uses.update(program.returned)
    for k, op in enumerate(program.ops):
        if not isinstance(op, ir.Pointwise) or op.index is not None or op.body.op != "add":
            continue
        terms = [
            load_of(n)
            for n in op.body.args
            if n.op == "load" and load_of(n).index == op.vars and not n.args
        ]
        if len(terms) < 2 or op.body.dtype.name not in (
            "f32",
            "f64",
        ):  # which rounds no more coarsely than it did
            continue
        for scattered, rest in (terms, reversed(terms)):
            at = scatters.get(scattered.buf, k)
            scatter = ops[at]
            if (
                not isinstance(scatter, ir.Scatter)
                or scatter.base not in zeros
                or scattered.buf == rest.buf
            ):
                continue
            shapes = {program.buffers[b].shape for b in (op.out, scattered.buf, rest.buf)}
            if uses[scattered.buf] > 1 or len(shapes) > 1:  # of a larger one the loop reads a part
                continue
            if not {b for p in program.ops[at:k] for b in updates(p)}.isdisjoint(
                reads(scatter, bodies)
            ):
                continue
            origin = tuple(dict.fromkeys((*scatter.origin, *op.origin)))
            ops[at], ops[k] = None, replace(scatter, out=op.out, base=rest.buf, origin=origin)
            break
    return replace(program, ops=tuple(op for op in ops if op is not None))


def _is_zero(body: ir.Node) -> bool:
    return body.op == "const" and body.attr == 0


class _InPlace:
    """Scatters that run on their base itself, because nobody needs its old contents any more.
    names: their results -> their bases."""

    def __init__(self, program: ir.LoopProgram, bodies: Bodies) -> None:
        self.program, self.bodies = program, bodies
        self.names: dict[str, str] = {}
        self.outputs = set(program.returned)
        self.shared = memory_roots(program.ops)
        self.inputs = program.given
        self.mutated = {(m.target, m.source) for m in program.ops if isinstance(m, ir.Mutate)}
        bases = {o.out: o.base for o in program.ops if isinstance(o, ir.Scatter)}
        for target, source in tuple(self.mutated):  # several scatters, one after the other
            while source := bases.get(source, ""):
                self.mutated.add((target, source))
        self.plain = {o.out for o in program.ops if isinstance(o, ir.Pointwise)}
        self.called = {n for o in program.ops if isinstance(o, Extern) for n in o.outs}
        # An op that keeps its arguments may keep its results too.
        self.held = {n for o in program.ops if isinstance(o, Extern) and o.may_keep for n in o.outs}
        self.last_read: dict[str, int] = {}
        if any(isinstance(o, ir.Scatter) for o in program.ops):
            for k, op in enumerate(program.ops):
                self.last_read.update(dict.fromkeys(reads(op, bodies), k))

    def may(self, k: int, op: ir.Scatter) -> bool:
        """Whether a scatter may write over its base. What a pointwise loop fills is better filled
        under the new name, by inlining."""
        base = op.base
        old, new = self.program.buffers[base], self.program.buffers[op.out]
        if (
            base in self.plain
            or base in self.held
            or base in self.shared
            or base in self.shared.values()
        ):
            return False
        if self.last_read[base] > k or base in self.outputs or old.strides != new.strides:
            return False
        if base in {load_of(n).buf for n in self.bodies.of(roots(op)).loads}:
            return False
        if base in self.inputs:
            return (base, op.out) in self.mutated and op.out not in self.outputs
        return op.out not in self.outputs or base in self.called

    def take(self, op: ir.Scatter) -> None:
        """Lets a scatter write over its base: who reads the result reads the base from now on."""
        self.names[op.out] = op.base
        if op.out in self.outputs:
            self.outputs.add(op.base)
        self.last_read[op.base] = max(self.last_read[op.base], self.last_read.get(op.out, -1))

    def renamed(self, op: ir.Op) -> ir.Op:
        """op, reading what was renamed by its new name."""
        if not self.names or self.names.keys().isdisjoint(reads(op, self.bodies)):
            return op
        if isinstance(op, ir.Scatter):
            args = tuple(self._node(a) for a in op.index_args)
            mask = None if op.mask is None else self._node(op.mask)
            base = self.names.get(op.base, op.base)
            return replace(op, body=self._node(op.body), index_args=args, mask=mask, base=base)
        if isinstance(op, (ir.Pointwise, ir.Reduction, ir.Scan)):
            return replace(op, body=self._node(op.body))
        if isinstance(op, Extern):
            positional = tuple(map(self.argument, op.args))
            named = tuple((k, self.argument(a)) for k, a in op.kwargs)
            mutates, held = (tuple(self.names.get(n, n) for n in b) for b in (op.mutates, op.held))
            return replace(op, args=positional, kwargs=named, mutates=mutates, held=held)
        if isinstance(op, ir.Alias):
            return replace(op, base=self.names[op.base])
        if isinstance(op, ir.Item):
            return replace(op, buf=self.names[op.buf])
        assert isinstance(op, ir.Mutate), op
        return replace(op, source=self.names[op.source])

    def _node(self, root: ir.Node) -> ir.Node:
        def fn(n: ir.Node, args: tuple[ir.Node, ...]) -> ir.Node:
            if n.op == "load" and load_of(n).buf in self.names:
                return ir.node(
                    "load", args, load_of(n)._replace(buf=self.names[load_of(n).buf]), n.dtype
                )
            return ir.with_args(n, args)

        return ir.rewrite(root, fn)

    def argument(self, a: T) -> T:
        """An operand under its new name."""
        if isinstance(a, TensorArg) and a.buf in self.names:
            return replace(a, buf=self.names[a.buf])
        if isinstance(a, ListArg):
            return replace(a, items=tuple(map(self.argument, a.items)))
        return a


def _split(op: ir.Scatter, program: ir.LoopProgram) -> list[ir.Op]:
    base = program.buffers[op.base]
    vars_ = ir.loop_vars("i", base.shape)
    value = ir.node("load", (), ir.Load(op.base, vars_), base.dtype)
    return [ir.Pointwise(op.out, vars_, value, origin=op.origin), replace(op, base=op.out)]


def _single(op: ir.Reduction) -> list[ir.Op]:
    """A reduction of one element a point."""
    env: dict[Atom, Size] = {atom_of(v): 0 for v in op.rvars}
    x = op.body
    if op.kind == "welford":
        # x - mean is 0 for numbers and NaN for NaN and infinities.
        off = x - x
        return _pointwise(op, env, (_alone(op), off * off, ir.const(1, x.dtype)))
    if REDUCTIONS[op.kind].extreme:
        return _pointwise(op, env, (ir.const(0, i64),))
    return _pointwise(op, env, (_alone(op),))


def _alone(op: ir.Reduction | ir.Scan) -> ir.Node:
    """The combination of one element: a sum begins at 0, so that of -0 is 0, and so is a mean."""
    return op.body + 0.0 if op.kind in ("sum", "welford") and op.body.dtype.is_float else op.body


def _pointwise(
    op: ir.Reduction | ir.Scan, env: dict[Atom, Size], values: tuple[ir.Node, ...]
) -> list[ir.Op]:
    return [
        ir.Pointwise(out, op.vars, ir.substitute_vars(value, env), origin=op.origin)
        for out, value in zip(op.outs, values, strict=True)
        if out is not None
    ]
