"""Numbers that are found when the program runs (sizes of `nonzero`, values of `item`), against what
tracing takes them for.

Tracing equates such a number with others (in `x[x > 0] * y` with as many as y has), gives it a
range and takes conditions for granted, and the graph that it leaves says none of it. Here each
becomes an assertion right behind the node that makes the number: a symbol has the value that is
found, and all else that kernels rely on is checked against it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch.fx

from plait.errors import Unsupported
from plait.graph.edit import aten, is_view, shape_env_of
from plait.ir import expr
from plait.ir.dtypes import i64
from plait.ir.expr import INF, Atom, Expr, Size, atom_of
from plait.lower.bindings import Binding, bindings, deferred_asserts, is_found, is_found_float
from plait.lower.core import Lowering, Value, View
from plait.lower.float_nodes import to_truth
from plait.lower.integers import define_functions, is_found_size, item
from plait.lower.memory import copy
from plait.lower.symbols import to_size, to_sizes, with_values


class FoundNumbers:
    """What is known of such numbers so far.

    values: what the program finds, by the names that tracing has for it.
    waiting: numbers whose traced expressions have several unknown symbols: see `_relate`.
    asserted: conditions that the program tests by now.
    conditions: those of tracing that are done with.
    """

    def __init__(self, ctx: Lowering) -> None:
        self.ctx = ctx
        self.values: dict[str, Size] = {}
        self.waiting: list[tuple[Size, Size, float, str]] = []
        self.asserted: set[Size] = set()
        self.conditions: set[sympy.Basic] = set()

    def bind(self, node: torch.fx.Node, value: Value, where: str) -> None:
        """The numbers that a node has made, if it makes any. where: the node's source line.

        Raises Unsupported for one that cannot be read from its value."""
        made = bindings(node)
        define_functions(self.ctx)
        origin = f"{where} {node.target}".strip()
        for b in made:
            if atom_of(b.found).name in self.ctx.floats:
                continue
            found = self._read(node, value, b)
            if found is not None:
                self._learn(b, found, f"{_place(b)} of {origin}")
        if made:
            self._check_conditions(shape_env_of(node.meta["val"]), origin)

    def in_own_memory(self, node: torch.fx.Node, value: Value) -> Value:
        """The value of a node, copied where a view of it begins at a number that the program finds.
        Such a number counts in the memory that eager makes here, and rules may show that of
        something else."""
        if is_view(node):
            return value
        if isinstance(value, tuple):
            parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
            return tuple(
                self._copied(parts[k], x) if k in parts else x for k, x in enumerate(value)
            )
        return self._copied(node, value)

    def _copied(self, node: torch.fx.Node, value: Value) -> Value:
        if not isinstance(value, View) or self.ctx.is_whole(value) or not _begins_at_found(node):
            return value
        return copy(self.ctx, value, to_sizes(node.meta["val"].stride()))

    def check_shape(self, made: Sequence[Size], traced: Sequence[Size]) -> None:
        """Asserts that a rule's result has the sizes that were traced, where these depend on
        numbers found at run time; guards look at all others."""
        define_functions(self.ctx)
        for a, b in zip(made, traced, strict=True):
            if a != b and is_found_size(self.ctx, a, b):
                origin = "; ".join(self.ctx.origin)
                self._assert(
                    expr.compare("eq", a, b),
                    f"found {{}} where {{}} was traced: a size of {origin}",
                    (a, b),
                )

    def _read(self, node: torch.fx.Node, value: Value, b: Binding) -> Size | None:
        """What the program finds for a number; None for the offset of a copy, which nobody
        reads."""
        symbols, name = self.ctx.symbols, atom_of(b.found).name
        if name in self.ctx.computed:
            return self.ctx.computed[name]
        if name in symbols:
            return b.found
        for kind, k in b.path:
            if kind == "offset":
                return self._offset(node, value)
            if kind == "item":
                value = value[k]
            elif kind == "divided":
                symbols[f"{name}_whole"] = symbols.pop(name)
                symbols[name] = expr.symbol(f"{name}_whole") // k
            elif isinstance(value, View):
                self.ctx.fix_layout(value.buf)
                symbols[name] = (value.buf, kind, k)
        if name not in symbols:
            raise Unsupported(f"the unknown number {name} that an operator makes")
        return b.found

    def _offset(self, node: torch.fx.Node, value: Value) -> Size | None:
        """Where a view begins in eager's storage; None where it is a copy. The tensor that it is a
        part of is the nearest source that is all of its buffer: a source further up may be another
        buffer's (`view(torch.int32)`)."""
        source = node
        while is_view(source) and isinstance(source.args[0], torch.fx.Node):
            source = source.args[0]
            whole: Any = self.ctx.env.get(source)
            if not isinstance(value, View) or not isinstance(whole, View) or whole.buf != value.buf:
                continue
            if self.ctx.is_whole(whole):
                like = source.meta["val"]
                first = zip(
                    value.at((0,) * len(value.shape)), map(to_size, like.stride()), strict=True
                )
                return to_size(like.storage_offset()) + expr.total(
                    i * stride for i, stride in first
                )
        return None

    def _learn(self, b: Binding, found: Size, what: str) -> None:
        self.values.update(dict.fromkeys(b.names, found))
        self.ctx.found.add(atom_of(b.found).name)
        natural = 0 if b.path and b.path[-1][0] in ("size", "stride") else -INF
        self.waiting.append((found, b.traced, natural, what))
        todo, self.waiting = self.waiting, []
        self.waiting = [t for t in todo if not self._relate(*t)]

    def _relate(self, found: Size, traced: Size, natural: float, what: str) -> bool:
        """Defines a symbol of what tracing has for a number, or asserts that the two are equal;
        False where too little is known yet. natural: the least that the number can be."""
        symbols = self.ctx.symbols
        whole, own = (e.symbol if isinstance(e, Expr) else None for e in (traced, found))
        if whole is not None and own is not None and own.name == whole.name:
            self._check_range(found, whole, natural, what)
            return True
        if whole is not None and whole.name not in symbols:
            self.ctx.found.add(whole.name)
            symbols[whole.name] = found
            self._check_range(found, whole, natural, what)
            return True
        unknown = [a for a in expr.free_symbols(traced) if a.name not in symbols]
        if len(unknown) > 1:
            return False
        for atom in unknown:
            k = expr.coefficient(traced, atom)
            if k is None or expr.bounds(k)[0] <= 0:
                return False
            self.ctx.found.add(atom.name)
            value = symbols[atom.name] = (found - expr.substitute(traced, {atom: 0})) // k
            self._check_range(value, atom, -INF, what)
        self._assert(
            expr.compare("eq", found, traced),
            f"found {{}} where {{}} was traced: {what}",
            (found, traced),
        )
        return True

    def _check_range(self, found: Size, atom: Atom, natural: float, what: str) -> None:
        """Asserts that a number is in the range that is relied on."""
        lo, hi = expr.bounds(found)
        if atom.lo > max(lo, natural):
            least = int(atom.lo)
            said = f"found {{}} where at least {{}} was traced: {what}"
            self._assert(expr.compare("le", least, found), said, (found, least))
        if atom.hi < hi:
            most = int(atom.hi)
            said = f"found {{}} where at most {{}} was traced: {what}"
            self._assert(expr.compare("le", found, most), said, (found, most))

    def _check_conditions(self, env: Any, origin: str) -> None:
        """Asserts what tracing takes for granted of numbers that are all known by now."""
        for e in deferred_asserts(env):
            if e in self.conditions:
                continue
            floats = [s for s in e.free_symbols if is_found_float(s)]
            if any(str(s) not in self.ctx.floats for s in floats):
                continue
            known = self._known(e.free_symbols.difference(floats), env)
            if known is None:
                continue
            self.conditions.add(e)
            if floats:
                said = f"the condition {e} that was traced does not hold, behind {origin}"
                self._assert(truth(self.ctx, e, env), said, ())
                continue
            listed = ", ".join(f"{s} is {{}}" for s in known)
            said = f"{listed}, which breaks the condition {e} that was traced, behind {origin}"
            self._assert(with_values(e, known), said, tuple(known.values()))

    def _known(self, symbols: Iterable[sympy.Basic], env: Any) -> dict[sympy.Basic, Size] | None:
        """What these symbols of a condition are, None if that is not known yet."""
        known: dict[sympy.Basic, Size] = {}
        for s in sorted(symbols, key=str):
            if is_found(s):
                found = self.values.get(s.name)
                if found is None and s.name in self.ctx.symbols:
                    found = expr.symbol(s.name, lo=-INF)
            else:
                found = to_size(env.replace(s), env)
                define_functions(self.ctx)
            if found is None or any(
                a.name not in self.ctx.symbols for a in expr.free_symbols(found)
            ):
                return None
            known[s] = found
        return known

    def _assert(self, condition: Size, message: str, values: tuple[Size, ...]) -> None:
        if condition not in self.asserted:
            self.asserted.add(condition)
            self.ctx.assert_true(condition, message, values)


def truth(ctx: Lowering, condition: sympy.Basic, env: Any) -> Size:
    """A condition of floats that are found at run time, as 0 or 1: a loop compares them."""
    floats = ctx.float_readers()
    holds = ctx.pointwise(
        (), i64, lambda ops, i: ops.cast(to_truth(ops, condition, env, floats), i64)
    )
    return item(ctx, holds, expr.symbol(f"{holds.buf}_holds", lo=0, hi=1))


def _begins_at_found(node: torch.fx.Node) -> bool:
    """Whether a view of a node's value begins at a number found at run time, and its memory shows:
    as a result, or in what `as_strided` makes of it."""
    for u in node.users:
        if u.op != "call_function" or not is_view(u) or u.args[0] is not node:
            continue
        found = any(kind == "offset" for b in bindings(u) for kind, _ in b.path)
        if (found and _shows(u)) or _begins_at_found(u):
            return True
    return False


def _shows(view: torch.fx.Node) -> bool:
    return any(
        u.op == "output"
        or u.target is aten.as_strided.default
        or (u.op == "call_function" and is_view(u) and u.args[0] is view and _shows(u))
        for u in view.users
    )


def _place(b: Binding) -> str:
    """The words for what a number is."""
    if not b.path:
        return "the value"
    kind, k = next(step for step in reversed(b.path) if step[0] != "divided")
    return {"item": f"result {k}", "offset": "the offset"}.get(kind, f"{kind} {k}")
