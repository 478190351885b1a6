"""A kernel in linear form: what the emitters work on.

Comes in: a `Kernel`. Goes out: a `LinearKernel`, in which every load and store has one linear
element offset, data-dependent indices have symbols that are unique in the kernel, axes of size 1
are gone, adjacent axes that every access walks through as one are merged, and Welford reductions
and scans of f32 are rewritten into plain sums. Nothing here knows a language.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from plait.ir.dtypes import f32, f64, i32, i64
from plait.ir.loops import Buffer, Load, Node, cast, const, is_arg, node, rewrite, walk, with_args
from plait.ir.sizes import (
    Atom,
    Expr,
    Size,
    coefficient,
    fold,
    free_symbols,
    product,
    substitute,
    symbol,
    total,
)
from plait.schedule.plan import Kernel, Reduce, Stmt, Store


@dataclass(frozen=True)
class LinearKernel:
    """vars, rvars: loop variables, outermost first. stmts: as in Kernel, with one-element (linear)
    indices.
    indirect: symbol `@k` in an offset -> the i64 node whose value it is. buffers: by name, position
    in the argument list. hints: plausible values of size symbols."""

    vars: tuple[Atom, ...]
    rvars: tuple[Atom, ...]
    stmts: tuple[Stmt, ...]
    indirect: Mapping[Atom, Node]
    buffers: Mapping[str, Buffer]
    hints: Mapping[str, int]

    def roots(self) -> list[Node]:
        """Every node that a statement holds."""
        return [n for s in self.stmts for n in stmt_nodes(s)]


def stmt_nodes(s: Stmt) -> tuple[Node, ...]:
    """The nodes of a statement: value, indices, mask."""
    if isinstance(s, Reduce):
        return (s.value,)
    return (s.value, *s.index_args, *(() if s.mask is None else (s.mask,)))


def offset_of(n: Node) -> Size:
    """The linear offset of a load in a LinearKernel."""
    assert isinstance(n.attr, Load)
    return n.attr.index[0]


def extent(a: Atom) -> Size:
    """Number of values of a loop variable."""
    assert a.extent is not None, a
    return a.extent


def without_mod(e: Size) -> Size:
    """e with every x % n written as x - n * (x // n) where fewer divisions are left then: views of
    views often cancel."""
    if isinstance(e, int) or not any(a.kind == "mod" for mono, _ in e.terms for a in mono):
        return e
    out = _expanded(e)
    return out if _n_divisions(out) < _n_divisions(e) else e


def _expanded(e: Size) -> Size:
    out: Size = fold(e, _expanded_atom)
    return out


def _expanded_atom(a: Atom) -> Size:
    if a.kind not in ("div", "mod"):
        return a.expr
    x = _expanded(a.a)
    q = x // a.b
    return q if a.kind == "div" else x - a.b * q


def _n_divisions(e: Size) -> int:
    if isinstance(e, int):
        return 0
    atoms = [a for mono, _ in e.terms for a in mono if a.kind in ("div", "mod")]
    return sum(1 + _n_divisions(a.a) + _n_divisions(a.b) for a in atoms)


def linearised(kernel: Kernel) -> LinearKernel:
    """The linear form of a kernel."""
    linear = _linearise(kernel)
    linear = _plain_reductions(linear)
    for a in (*linear.vars, *linear.rvars):
        if extent(a) == 1:
            linear = _substituted(linear, {a: 0}, drop=a)
    if not linear.rvars:  # one point: a scan of it is a reduction
        stmts = (replace(s, running=False) if isinstance(s, Reduce) else s for s in linear.stmts)
        linear = replace(linear, stmts=tuple(stmts))
    return _merge_axes(linear)


def _atom(e: Expr) -> Atom:
    a = e.symbol
    assert a is not None
    return a


def _linearise(kernel: Kernel) -> LinearKernel:
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
                    indirect[_atom(new)] = n
                env[a] = numbers[key]
        return substitute(offset, env)

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load)
            offset = flat(n.attr.index, buffers[n.attr.buf].strides, args)
            return node("load", args, Load(n.attr.buf, (offset,), n.attr.masked), n.dtype)
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr))
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
        tuple(_atom(v) for v in kernel.vars), tuple(_atom(v) for v in kernel.rvars),
        tuple(stmts), indirect, buffers, kernel.hint_of,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- reductions
def _plain_reductions(linear: LinearKernel) -> LinearKernel:
    """Welford -> sum for the mean, then sum of squared deviations; running f32 sums and products
    carry f64; 16-bit floats and bools are compared as f32 and i32."""
    if not any(isinstance(s, Reduce) and _is_rewritten(s) for s in linear.stmts):
        return linear
    count = product(extent(r) for r in linear.rvars)
    accs: dict[str, Node] = {}  # acc name -> what it is now
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "acc":
            assert isinstance(n.attr, str)
            return accs.get(n.attr, n)
        return with_args(n, args)

    stmts: list[Stmt] = []
    for s in linear.stmts:
        s = _mapped(s, lambda n: rewrite(n, fn, memo))
        if isinstance(s, Reduce) and s.kind == "welford":
            stmts.extend(_welford(s, count, accs))
        elif (
            isinstance(s, Reduce)
            and s.running
            and s.value.dtype == f32
            and s.kind in ("sum", "prod")
        ):
            # Eager's cumsum and cumprod of float32 accumulate in double.
            stmts.append(replace(s, value=cast(s.value, f64)))
            accs[s.name] = cast(node("acc", (), s.name, f64), f32)
        elif isinstance(s, Reduce) and _is_rewritten(s) and not s.running:
            narrow, wide = s.value.dtype, f32 if s.value.dtype.is_float else i32
            stmts.append(replace(s, value=cast(s.value, wide)))
            if s.kind in ("max", "min", "sum", "prod"):
                accs[s.name] = cast(node("acc", (), s.name, wide), narrow)
        else:
            stmts.append(s)
    return _rebuilt(linear, tuple(stmts), lambda n: rewrite(n, fn, memo))


def replaced(linear: LinearKernel, name: str, value: Node) -> LinearKernel:
    """The kernel without this reduction, whose result is `value`."""
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        return value if n.op == "acc" and n.attr == name else with_args(n, args)

    def on_node(n: Node) -> Node:
        return rewrite(n, fn, memo)

    kept = (s for s in linear.stmts if not (isinstance(s, Reduce) and s.name == name))
    return _rebuilt(linear, tuple(_mapped(s, on_node) for s in kept), on_node)


def _is_rewritten(s: Reduce) -> bool:
    narrow = s.value.dtype.name in ("f16", "bf16", "b1") and s.kind not in ("any", "all")
    return s.kind == "welford" or s.running or narrow


def _welford(s: Reduce, count: Size, accs: dict[str, Node]) -> list[Stmt]:
    """A sum for the mean, then the sum of squared deviations from it. The sum of the deviations
    themselves is what rounding left out of the mean: without it, the mean of equal numbers may be
    an ulp off, which is not small beside their deviations of 0."""
    dtype = s.value.dtype
    n = (
        const(count, dtype)
        if isinstance(count, int)
        else cast(node("index", (), count, i64), dtype)
    )
    zero = const(0, dtype)

    def per_point(total: Node, divisor: Node) -> Node:
        mean = node("truediv", (total, divisor))
        if not isinstance(count, int) or count == 0:
            mean = node("where", (node("eq", (n, zero)), zero, mean))
        return mean

    accs[f"{s.name}.count"] = n
    total, rest, m2 = (node("acc", (), f"{s.name}.{part}", dtype) for part in ("sum", "rest", "m2"))
    if _is_widened(s.value):  # such means are exact enough
        mean = accs[f"{s.name}.mean"] = per_point(total, n)
        off = node("sub", (s.value, mean))
        return [
            Reduce(f"{s.name}.sum", "sum", s.value),
            Reduce(f"{s.name}.m2", "sum", node("mul", (off, off))),
        ]
    # Scaled by a power of two, which is exact, the sum does not overflow where the mean does not.
    scale = const(
        2.0 ** -(count - 1).bit_length() if isinstance(count, int) and count else 2.0**-32, dtype
    )
    mean = per_point(total, node("mul", (n, scale)))
    off = node("sub", (s.value, mean))
    more = per_point(rest, n)
    accs[f"{s.name}.mean"] = node("add", (mean, more))
    # Where squares overflow, the correction may as well: infinity less infinity would be NaN.
    overflows = node("eq", (m2, const(math.inf, dtype)))
    # Rounding may leave a little below 0.
    corrected = node("abs", (node("sub", (m2, node("mul", (rest, more)))),))
    accs[f"{s.name}.m2"] = node("where", (overflows, m2, corrected))
    return [
        Reduce(f"{s.name}.sum", "sum", node("mul", (s.value, scale))),
        Reduce(f"{s.name}.rest", "sum", off),
        Reduce(f"{s.name}.m2", "sum", node("mul", (off, off))),
    ]


def _is_widened(n: Node) -> bool:
    """Whether a number has far more room than it had where it came from."""
    return n.op == "cast" and n.dtype == f64 and n.args[0].dtype.nbytes < f64.nbytes


def _mapped(s: Stmt, fn: Callable[[Node], Node]) -> Stmt:
    """s with fn applied to each of its nodes."""
    if isinstance(s, Reduce):
        return replace(s, value=fn(s.value))
    mask = None if s.mask is None else fn(s.mask)
    return replace(s, value=fn(s.value), index_args=tuple(fn(a) for a in s.index_args), mask=mask)


def _rebuilt(
    linear: LinearKernel, stmts: tuple[Stmt, ...], fn: Callable[[Node], Node]
) -> LinearKernel:
    return replace(linear, stmts=stmts, indirect={a: fn(n) for a, n in linear.indirect.items()})


# --------------------------------------------------------------------------------------------- axes
def _offsets(linear: LinearKernel) -> list[Size]:
    """Every integer expression over loop variables in the kernel."""
    out = [s.index[0] for s in linear.stmts if isinstance(s, Store)]
    for n in walk(linear.roots()):
        if n.op == "load":
            out.append(offset_of(n))
        elif n.op == "index":
            assert isinstance(n.attr, (int, Expr))
            out.append(n.attr)
    return list(dict.fromkeys(out))


def _substituted(
    linear: LinearKernel, env: Mapping[Atom, Size], drop: Atom, put: Atom | None = None
) -> LinearKernel:
    """The kernel with loop variables replaced in every offset; axis `drop` leaves, env's other axis
    becomes `put`."""
    memo: dict[Node, Node] = {}

    def fn(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load":
            assert isinstance(n.attr, Load)
            return node(
                "load",
                args,
                Load(n.attr.buf, (substitute(offset_of(n), env),), n.attr.masked),
                n.dtype,
            )
        if n.op == "index":
            assert isinstance(n.attr, (int, Expr))
            return node("index", args, substitute(n.attr, env), n.dtype)
        return with_args(n, args)

    def on_node(n: Node) -> Node:
        return rewrite(n, fn, memo)

    stmts = []
    for s in linear.stmts:
        s = _mapped(s, on_node)
        if isinstance(s, Store):
            s = replace(s, index=(substitute(s.index[0], env),))
        stmts.append(s)

    def axes(old: tuple[Atom, ...]) -> tuple[Atom, ...]:
        kept = [a for a in old if a != drop]
        return tuple(put if put is not None and a in env else a for a in kept)

    out = _rebuilt(linear, tuple(stmts), on_node)
    return replace(out, vars=axes(linear.vars), rvars=axes(linear.rvars))


def _merge_axes(linear: LinearKernel) -> LinearKernel:
    """Merges axis pairs (a, b) that every access walks as one: stride(a) == stride(b) *
    extent(b)."""
    exprs = _offsets(linear)
    for which in ("vars", "rvars"):
        k = len(getattr(linear, which)) - 2
        while k >= 0:
            axes: tuple[Atom, ...] = getattr(linear, which)
            a, b = axes[k], axes[k + 1]
            if all(_walks_as_one(e, a, b) for e in exprs):
                both = symbol(f"{a.name}.{b.name}", extent=extent(a) * extent(b))
                linear = _substituted(linear, {a: 0, b: both}, drop=a, put=_atom(both))
                exprs = _offsets(linear)
            k -= 1
    return linear


def _walks_as_one(e: Size, a: Atom, b: Atom) -> bool:
    ca, cb = coefficient(e, a), coefficient(e, b)
    return ca is not None and cb is not None and ca == cb * extent(b)


def dependences(linear: LinearKernel) -> Callable[[Node], frozenset[object]]:
    """A function from a node to what it depends on: loop variables (Atoms) and accumulators (their
    names)."""
    loops = frozenset((*linear.vars, *linear.rvars))
    memo: dict[Node, frozenset[object]] = {}

    def of_expr(e: Size) -> frozenset[object]:
        return frozenset(a for a in free_symbols(e) if a in loops)

    def deps(root: Node) -> frozenset[object]:
        if root in memo:
            return memo[root]
        for n in walk((root,)):
            if n in memo:
                continue
            out: frozenset[object] = frozenset().union(*(memo[a] for a in n.args))
            if n.op == "load":
                out |= of_expr(offset_of(n))
            elif n.op == "index":
                assert isinstance(n.attr, (int, Expr))
                out |= of_expr(n.attr)
            elif n.op == "acc":
                out |= {n.attr}
            memo[n] = out
        return memo[root]

    return deps


def passes_of(
    linear: LinearKernel, deps: Callable[[Node], frozenset[object]]
) -> tuple[tuple[tuple[Stmt, ...], ...], tuple[Store, ...]]:
    """Cuts the full-level statements into passes by their dependence on finished reductions.

    Full stores go into the last pass and outer stores after all passes: an output may share memory
    with an input. A running reduction is part of every pass that uses it."""
    full = [s for s in linear.stmts if isinstance(s, Reduce) or (s.full and linear.rvars)]
    used = [{d for n in stmt_nodes(s) for d in deps(n) if isinstance(d, str)} for s in full]
    scans = {s.name: k for k, s in enumerate(full) if isinstance(s, Reduce) and s.running}
    ready: dict[str, int] = {}  # reduction -> the first pass whose statements may use it
    level: list[int] = []
    for s, names in zip(full, used, strict=True):
        level.append(max((ready[d] for d in names), default=0))
        if isinstance(s, Reduce):
            ready[s.name] = level[-1] + (not s.running)
    end = max(level, default=0)
    members: list[set[int]] = [set() for _ in range(end + 1)]
    for k, s in enumerate(full):
        if not (isinstance(s, Reduce) and s.running):
            members[end if isinstance(s, Store) else level[k]].add(k)
    for group in members:
        todo = sorted(group)
        while todo:
            found = {scans[d] for d in used[todo.pop()] if d in scans} - group
            group |= found
            todo.extend(sorted(found))
    passes = tuple(tuple(full[k] for k in sorted(group)) for group in members if group)
    last = tuple(s for s in linear.stmts if isinstance(s, Store) and not (s.full and linear.rvars))
    return passes, last


def trip_count(axes: tuple[Atom, ...]) -> Size:
    """Number of points over axes."""
    return product(extent(a) for a in axes)


def blocks(n: Size, size: int) -> Size:
    """How many blocks of `size` cover n points."""
    return (n + (size - 1)) // size
