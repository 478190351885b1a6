"""Gives every load and store one linear element offset.

Comes in: a `Kernel`. Goes out: a `LinearKernel`, in which data-dependent indices have symbols that
are unique in the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from plait.ir.expr import (
    Atom,
    Expr,
    Size,
    atom_of,
    fold,
    free_symbols,
    n_functions,
    substitute,
    symbol,
    total,
)
from plait.ir.loops import Load, Node, is_arg, node, rewrite, with_args
from plait.schedule.legalize.linear import LinearKernel, offsets_of
from plait.schedule.plan import PART, Kernel, Reduce, Stmt


def linearize(kernel: Kernel) -> LinearKernel:
    buffers = {b.name: b for b in kernel.args}
    indirect: dict[Atom, Node] = {}
    numbers: dict[tuple[Node, Size | None], Size] = {}
    memo: dict[Node, Node] = {}

    def flat(exprs: tuple[Size, ...], strides: tuple[Size, ...], args: tuple[Node, ...]) -> Size:
        offset = without_mod(total(e * s for e, s in zip(exprs, strides, strict=True)))
        env: dict[Atom, Size] = {}
        for a in sorted(free_symbols(offset), key=lambda t: t.name):
            if is_arg(a):
                n = args[int(a.name[1:])]
                key = (n, a.extent)
                if key not in numbers:
                    new = symbol(f"@{len(numbers)}", a.lo, a.hi, a.extent)
                    numbers[key] = new
                    indirect[atom_of(new)] = n
                env[a] = numbers[key]
        return substitute(offset, env)

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load), n
            offset = flat(n.attr.index, buffers[n.attr.buf].strides, args)
            return node("load", args, Load(n.attr.buf, (offset,), n.attr.masked), n.dtype)
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr)), n
            return node("index", args, flat((n.attr,), (1,), args), n.dtype)
        return with_args(n, args)

    stmts: list[Stmt] = []
    for s in kernel.stmts:
        value = rewrite(s.value, fn, memo)
        if isinstance(s, Reduce):
            stmts.append(replace(s, value=value))
            continue
        args = tuple(rewrite(a, fn, memo) for a in s.index_args)
        mask = None if s.mask is None else rewrite(s.mask, fn, memo)
        offset = flat(s.index, buffers[s.buf].strides, args)
        stmts.append(replace(s, value=value, index_args=args, mask=mask, index=(offset,)))
    return LinearKernel(
        tuple(atom_of(v) for v in kernel.vars), tuple(atom_of(v) for v in kernel.rvars),
        tuple(stmts), indirect, buffers, kernel.hint_of,
    )  # fmt: skip


def without_mod(e: Size) -> Size:
    """e with every x % n written as x - n * (x // n) where fewer divisions are left then: views of
    views often cancel."""
    if isinstance(e, int) or not any(a.kind == "mod" for mono, _ in e.terms for a in mono):
        return e
    out = _expanded(e)
    return out if n_functions(out) < n_functions(e) else e


def _expanded(e: Size) -> Size:
    out: Size = fold(e, _expanded_atom)
    return out


def _expanded_atom(a: Atom) -> Size:
    if a.kind not in ("div", "mod"):
        return a.expr
    x = _expanded(a.a)
    q = x // a.b
    return q if a.kind == "div" else x - a.b * q


def faults_of_offsets(linear: LinearKernel) -> list[str]:
    """Offsets that hold a symbol which is no axis, value or size of the kernel, or its part."""
    known = {*linear.vars, *linear.rvars, *linear.indirect}
    used = {a for e in offsets_of(linear) for a in free_symbols(e) if a.name != PART}
    return [f"has the unknown index {a.name}" for a in used - known if is_arg(a) or a.extent]
