"""Define-by-run recording: a lowering rule runs once on a Recorder and leaves an interned body
behind.

A rule writes `def body(ops, i): return ops.exp(ops.load(x, i)) + ...`; `ops` is a Recorder, values
are Nodes. The recorder checks dtypes against the op table, folds constants that are exact, and
turns data-dependent indices into positional Arg symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.ir.checks import OUT_OF_RANGE, Bound, Check
from plait.ir.dtypes import DType, b1, i64
from plait.ir.expr import Atom, Expr, Size, atom_of, free_symbols, substitute, symbol
from plait.ir.loops import (
    Const,
    Load,
    Node,
    arg_symbol,
    cast,
    const,
    index_exprs,
    integer,
    is_arg,
    node,
    rewrite,
    walk,
)
from plait.ir.ops import CHECKED


class Recorder:
    """Records one body: loads, indices, masks and what they need. Arithmetic on their nodes is
    Python's (`ir/loops.py`, Node) and that of `ir/maths.py`."""

    def __init__(self) -> None:
        self._indirect: dict[Atom, Node] = {}
        self._masks: list[Node] = []

    def const(self, value: Const, dtype: DType) -> Node:
        return const(value, dtype)

    def cast(self, x: Node, dtype: DType) -> Node:
        return cast(x, dtype)

    def bitcast(self, x: Node, dtype: DType) -> Node:
        """The same bits as another dtype of the same size."""
        return x if x.dtype == dtype else node("bitcast", (x,), None, dtype)

    def index(self, value: Size) -> Node:
        """The value of an integer expression as i64."""
        if isinstance(value, int):
            return const(value, i64)
        exprs, args = self.take_args((value,))
        return integer(exprs[0], args)

    def load(self, buf: str, index: Sequence[Size], dtype: DType) -> Node:
        """Element index[0], index[1], ... of buffer buf (logical indices). Under `masked`, only
        where the masks hold."""
        exprs, args = self.take_args(tuple(index))
        if self._masks:
            return node("load", (*args, self._mask()), Load(buf, exprs, masked=True), dtype)
        return node("load", args, Load(buf, exprs), dtype)

    def indirect(self, value: Node, size: Size) -> Expr:
        """An index expression whose value is a computed i64, which is promised to lie in [0,
        size)."""
        name = f"%{len(self._indirect)}"
        sym = symbol(name, extent=size)
        self._indirect[atom_of(sym)] = cast(value, i64)
        return sym

    def checked(
        self, value: Node, size: Size, wrap: bool = True, check: Check = OUT_OF_RANGE
    ) -> Expr:
        """As indirect, but checked at run time: outside [-size, size) (wrap) or [0, size) the call
        fails with `check`."""
        value = cast(value, i64)
        if wrap:
            zero = const(0, i64)
            wrapped = node("add", (value, self.index(size)))
            value = node("where", (node("lt", (value, zero)), wrapped, value))
        args = (value, self._mask()) if self._masks else (value,)
        return self.indirect(node("bounded", args, Bound(size, check), i64), size)

    def kept(self, value: Node) -> Node:
        """The value of a body, with every check made on the way: of an element whose place does not
        move with the index, no load holds it."""
        return keep_checks(value, tuple(self._indirect.values()))

    def nonzero(self, value: Node, check: Check) -> Node:
        """An integer that must not be 0: the call fails with `check` where it is."""
        if value.op == "const" and value.attr:
            return value
        args = (value, self._mask()) if self._masks else (value,)
        return node("nonzero", args, check, value.dtype)

    def masked(self, mask: Node, body: Callable[[], Node], other: Const) -> Node:
        """body() where mask holds, `other` elsewhere; loads inside body touch memory only where
        mask (and masks around it) hold."""
        if mask.dtype != b1:
            raise TypeError(f"a mask must be b1, not {mask.dtype}")
        self._masks.append(mask)
        value = body()
        self._masks.pop()
        return node("where", (mask, value, const(other, value.dtype)))

    def _mask(self) -> Node:
        out = self._masks[0]
        for m in self._masks[1:]:
            out = node("and", (out, m))
        return out

    def take_args(self, exprs: tuple[Size, ...]) -> tuple[tuple[Size, ...], tuple[Node, ...]]:
        """Renumbers the indirect symbols in exprs to $0, $1, ... in order of first appearance and
        lists their nodes."""
        if not self._indirect:
            return exprs, ()
        order: list[Atom] = []
        for e in exprs:
            for a in sorted(free_symbols(e), key=lambda t: t.name):
                if a in self._indirect and a not in order:
                    order.append(a)
        if not order:
            return exprs, ()
        env: dict[Atom, Size] = {a: arg_symbol(k, a.extent) for k, a in enumerate(order)}
        return tuple(substitute(e, env) for e in exprs), tuple(self._indirect[a] for a in order)


def keep_checks(value: Node, others: tuple[Node, ...]) -> Node:
    """value, in which every check below `others` is made too."""
    lost = [n for n in walk(others) if n.op == "bounded"] if others else []
    if lost:
        there = set(walk((value,)))
        for n in lost:
            if n not in there:  # it is never below 0, so the other value is never taken
                other = const(int(value.op == "const" and not value.attr), value.dtype)
                value = node("where", (node("lt", (n, const(0, i64))), other, value))
    return value


def inline(root: Node, producers: dict[str, tuple[tuple[Expr, ...], Node]]) -> Node:
    """root with every load of a producer buffer replaced by the producer's body at that index.

    producers: buffer -> (its loop variables, its body). The producer's own loads inherit the mask
    of the load they replace, and its indices may meet data-dependent ones (Arg symbols), which are
    renumbered.
    """
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load), n
            if n.attr.buf in producers:
                vars_, body = producers[n.attr.buf]
                return _at(body, vars_, n.attr, args)
        return n if args == n.args else node(n.op, args, n.attr, n.dtype)

    return rewrite(root, fn, memo)


def _at(body: Node, vars_: tuple[Expr, ...], load: Load, load_args: tuple[Node, ...]) -> Node:
    """body with vars_ := load.index, under the load's mask."""
    if load.index == vars_ and not load.masked:
        return body
    mask = load_args[-1] if load.masked else None
    outer = load_args[:-1] if load.masked else load_args
    env = {atom_of(v): e for v, e in zip(vars_, load.index, strict=True)}
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op not in ("load", "index", *CHECKED):
            return n if args == n.args else node(n.op, args, n.attr, n.dtype)
        if n.op in CHECKED:
            both = (
                args if mask is None else (args[0], _and(args[1], mask) if len(args) > 1 else mask)
            )
            return node(n.op, both, n.attr, n.dtype)
        inner_mask = args[-1] if isinstance(n.attr, Load) and n.attr.masked else None
        inner = args[:-1] if inner_mask is not None else args
        exprs, new_args = _merge_args(index_exprs(n), inner, env, outer)
        if n.op == "index":
            return integer(exprs[0], new_args)
        assert isinstance(n.attr, Load), n
        m = inner_mask if mask is None else mask if inner_mask is None else _and(inner_mask, mask)
        if m is not None:
            new_args = (*new_args, m)
        return node("load", new_args, Load(n.attr.buf, exprs, m is not None), n.dtype)

    value = keep_checks(rewrite(body, fn, memo), outer)
    if mask is None:
        return value
    return node("where", (mask, value, const(0, value.dtype)))


def _and(a: Node, b: Node) -> Node:
    return a if a == b else node("and", (a, b))


def _merge_args(
    exprs: tuple[Size, ...], inner: tuple[Node, ...], env: dict[Atom, Size], outer: tuple[Node, ...]
) -> tuple[tuple[Size, ...], tuple[Node, ...]]:
    """Substitutes env into exprs whose $k mean inner[k]; the $k in env's values mean outer[k].
    Returns exprs over one new argument list."""
    # First move the inner symbols out of the way, then substitute, then renumber all that is left.
    moved: dict[Atom, Size] = {}
    names: dict[str, Node] = {}
    for e in exprs:
        for a in free_symbols(e):
            if is_arg(a):
                name = f"%{a.name}"
                moved[a] = symbol(name, a.lo, a.hi, a.extent)
                names[name] = inner[int(a.name[1:])]
    out = [substitute(substitute(e, moved), env) for e in exprs]
    order: list[tuple[Atom, Node]] = []
    for e in out:
        for a in sorted(free_symbols(e), key=lambda t: t.name):
            value = (
                names[a.name] if a.name in names else outer[int(a.name[1:])] if is_arg(a) else None
            )
            if value is not None and all(a != seen for seen, _ in order):
                order.append((a, value))
    args: list[Node] = []
    back: dict[Atom, Size] = {}
    for a, value in order:
        if value not in args:
            args.append(value)
        back[a] = symbol(f"${args.index(value)}", a.lo, a.hi, a.extent)
    return tuple(substitute(e, back) for e in out), tuple(args)
