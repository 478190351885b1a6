"""The body of one Triton kernel, written from a `Space` and a `Tile`.

A value is one Triton variable of the block's rank, broadcast only where it must be. Text grows in two levels: what does
not depend on the reduced index is written outside the loop over it, once; the rest inside the loop of its pass. A block
that holds whole rows has no loop, so nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait.ir.checks import Bound
from plait.ir.dtypes import DType, i64
from plait.ir.loops import Const, Load, Node, check_of
from plait.ir.ops import OPS
from plait.ir.sizes import Atom, Expr, Size, bounds, free_symbols, known_nonneg
from plait.kernel.space import Space, dependences, extent, offset_of, passes_of
from plait.kernel.triton_ops import TYPES, bitcast, cast, combiner, identity, literal, render
from plait.kernel.triton_tiles import Group, Tile
from plait.schedule.plan import Reduce, Store

_SIGN = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class Writer:
    """Writes one kernel. wide: indices have 64 bits. Raises Unsupported for what Triton has no atomic for."""

    def __init__(self, space: Space, tile: Tile, wide: bool, size_names: dict[str, str]) -> None:
        self.space, self.tile = space, tile
        self.index_type = "tl.int64" if wide else "tl.int32"
        self.size_names = size_names
        self.deps = dependences(space)
        self.outer_lines: list[str] = []
        self.loop_lines: list[str] = []
        self.values: dict[Node, str] = {}
        self.loop_values: dict[Node, str] = {}
        self.exprs: dict[Size, str] = {}
        self.loop_exprs: dict[Size, str] = {}
        self.accs: dict[str, str] = {}
        self.running: set[str] = set()
        self.group_of = {a: g for g in tile.groups for a in g.axes}
        self.rescaled: dict[str, Reduce] = {}
        self.lanes: dict[str, str] = {}  # reduction -> its accumulator, one value a lane
        self.n = 0
        self.checks = False

    # ------------------------------------------------------------------------------------------ levels
    def _fresh(self, prefix: str) -> str:
        self.n += 1
        return f"{prefix}{self.n}"

    def _define(self, text: str, inner: bool, prefix: str = "v") -> str:
        name = self._fresh(prefix)
        (self.loop_lines if inner else self.outer_lines).append(f"{name} = {text}")
        return name

    def _names(self, what: frozenset[object]) -> frozenset[str]:
        """The dimensions of the block that a value with these dependences varies along."""
        found = {self.group_of[a].name for a in what if isinstance(a, Atom) and a in self.group_of}
        for d in what:
            if isinstance(d, str):
                found |= {g.name for g in self.tile.outer}
                if d in self.running:
                    found.add("r")
        return frozenset(found)

    def _expr_deps(self, e: Size) -> frozenset[object]:
        out: set[object] = set()
        for a in free_symbols(e):
            if a in self.group_of:
                out.add(a)
            elif a in self.space.indirect:
                out |= self.deps(self.space.indirect[a])
        return frozenset(out)

    def shape(self, names: frozenset[str]) -> str:
        """The block's shape over these dimensions, 1 along the others."""
        return f"[{', '.join(str(g.block) if g.name in names else '1' for g in self.tile.groups)}]"

    def mask(self, names: frozenset[str]) -> list[str]:
        """Conditions under which a point lies inside the tensor."""
        return [f"{g.name}mask" for g in self.tile.groups if g.name in names and not g.full]

    # -------------------------------------------------------------------------------------- kernel body
    def write(self) -> list[str]:
        """All lines of the body."""
        lines = self._heads()
        passes, last = passes_of(self.space, self.deps)
        if self.tile.looped:
            passes, self.rescaled = online(passes)
        for p in passes:
            self._pass(p)
        for s in last:
            self._store(s, inner=False)
        return lines + self.outer_lines

    def _heads(self) -> list[str]:
        """Which block this program is, and the indices of its points."""
        lines = [f"pid = tl.program_id(0).to({self.index_type})"]
        pids = {"x": "pid"}
        if len(self.tile.outer) == 2:
            x = next(g for g in self.tile.outer if g.name == "x")
            lines.append(f"columns = {self._count(x)}")
            pids = {"x": "pid % columns", "y": "pid // columns"}
        for d, g in enumerate(self.tile.groups):
            at = ", ".join(":" if k == d else "None" for k in range(len(self.tile.groups)))
            span = f"tl.arange(0, {g.block}).to({self.index_type})[{at}]"
            if g.name == "r":
                lines.append(f"rbase = {span}")
                if not self.tile.looped:
                    lines.append("r = rbase")
            else:
                lines.append(f"{g.name} = ({pids[g.name]}) * {g.block} + {span}")
            if not g.full and not (g.name == "r" and self.tile.looped):
                lines.append(f"{g.name}mask = {g.name} < {self._points(g)}")
        return lines

    def _points(self, g: Group) -> str:
        return self.size(g.points)

    def _count(self, g: Group) -> str:
        return f"tl.cdiv({self._points(g)}, {g.block})"

    def size(self, e: Size) -> str:
        """A size expression that holds no loop variable."""
        return self._text(e, {})

    def _pass(self, stmts: Sequence[Reduce | Store]) -> None:
        looped = self.tile.looped
        started: list[tuple[Reduce, tuple[str, ...]]] = []
        if looped:
            started = [(s, self._start(s)) for s in stmts if isinstance(s, Reduce)]
        self.loop_lines, self.loop_values, self.loop_exprs = [], {}, {}
        begun = {s.name: names for s, names in started}
        pending: list[Store] = []
        for s in stmts:
            if isinstance(s, Store):
                pending.append(s)
            elif s.name in self.rescaled:
                pass  # goes with its maximum
            elif looped:
                self._step(s, begun)
            else:
                self._whole(s)
        for s in pending:  # after all loads: an output may have the memory of an input
            self._store(s, inner=True)
        if not looped:
            self.outer_lines += self.loop_lines
            # Whole rows stay in registers: later passes go on with the same values.
            self.values.update(self.loop_values)
            self.exprs.update(self.loop_exprs)
            return
        r = next(g for g in self.tile.groups if g.name == "r")
        head = [f"for offset in range(0, {self._points(r)}, {r.block}):", "r = rbase + offset"]
        if not r.full:
            head.append(f"rmask = r < {self._points(r)}")
        self.outer_lines += [head[0], *(f"    {line}" for line in (*head[1:], *self.loop_lines))]
        for s, names in started:
            self._finish(s, names)

    # --------------------------------------------------------------------------------------- reductions
    def _block(self, s: Reduce) -> str:
        """The value of a reduction over the whole block, identity outside the tensor."""
        everything = frozenset(g.name for g in self.tile.groups)
        value = f"tl.broadcast_to({self.value(s.value)}, {self.shape(everything)})"
        mask = self.mask(frozenset(("r",)))
        if mask:
            value = f"tl.where({mask[0]}, {value}, {identity(s.kind, s.value.dtype)})"
        return self._define(value, True)

    def _whole(self, s: Reduce) -> None:
        """A reduction of a block that holds whole rows."""
        if not self.space.rvars:  # over one point
            arg = s.kind.startswith("arg")
            self.accs[s.name] = literal(0, i64) if arg else self.value(s.value)
            return
        block = self._block(s)
        if s.running:
            text = f"tl.associative_scan({block}, 1, {combiner(s.kind, s.value.dtype)})"
            self.accs[s.name] = self._define(text, True)
            self.running.add(s.name)
            return
        text = self._reduced(s, block, self._position(s), inner=True)
        self.accs[s.name] = self._define(text, True, "a")

    def _position(self, s: Reduce) -> str:
        if not s.kind.startswith("arg"):
            return ""
        everything = frozenset(g.name for g in self.tile.groups)
        return self._define(f"tl.broadcast_to(r.to(tl.int64), {self.shape(everything)})", True)

    def _reduced(self, s: Reduce, block: str, position: str, inner: bool) -> str:
        """The rows' results out of a block, as a column."""
        d = s.value.dtype
        if s.kind.startswith("arg"):
            return f"tl.reduce(({block}, {position}), 1, p_{s.kind})[1][:, None]"
        if s.kind == "sum" and d.is_float:
            return f"tl.sum({block}, 1)[:, None]"
        if s.kind in ("any", "all"):
            word = self._define(f"{block}.to(tl.int32)", inner)
            return f"(tl.reduce({word}, 1, {combiner(s.kind, d)})[:, None] != 0)"
        return f"tl.reduce({block}, 1, {combiner(s.kind, d)})[:, None].to({TYPES[d.name]})"

    def _start(self, s: Reduce) -> tuple[str, ...]:
        """Accumulators before the loop."""
        d = s.value.dtype
        first = identity(s.kind, d)
        if s.running:
            rows = self.shape(frozenset(g.name for g in self.tile.outer))
            carry = self._define(f"tl.broadcast_to({first}, {rows})", False, "a")
            self.running.add(s.name)
            return (carry,)
        everything = self.shape(frozenset(g.name for g in self.tile.groups))
        acc = self._define(f"tl.broadcast_to({first}, {everything})", False, "a")
        if not s.kind.startswith("arg"):
            return (acc,)
        return acc, self._define(f"tl.full({everything}, {2**63 - 1}, tl.int64)", False, "a")

    def _step(self, s: Reduce, begun: dict[str, tuple[str, ...]]) -> None:
        """One block of a reduction inside the loop."""
        names, block = begun[s.name], self._block(s)
        if s.running:
            fn = combiner(s.kind, s.value.dtype)
            scanned = self._define(f"tl.associative_scan({block}, 1, {fn})", True)
            whole = f"tl.broadcast_to({names[0]}, {scanned}.shape)"
            self.accs[s.name] = self._define(f"{fn}({whole}, {scanned})", True)
            total = f"tl.reduce({block}, 1, {fn})[:, None]"
            self.loop_lines.append(f"{names[0]} = {fn}({names[0]}, {total})")
        elif s.kind.startswith("arg"):
            position = self._position(s)
            mask = self.mask(frozenset(("r",)))
            if mask:
                position = self._define(f"tl.where({mask[0]}, {position}, {2**63 - 1})", True)
            both = ", ".join(names)
            self.loop_lines.append(f"{both} = p_{s.kind}({both}, {block}, {position})")
        elif s.kind in ("any", "all"):
            sign = "|" if s.kind == "any" else "&"
            self.loop_lines.append(f"{names[0]} = {names[0]} {sign} {block}")
        else:
            new = f"{combiner(s.kind, s.value.dtype)}({names[0]}, {block})"
            sums = [begun[t.name][0] for t in self.rescaled.values() if t.name in begun and _peak(t) == s.name]
            if sums:
                new = self._define(new, True)
                for name in sums:
                    old = f"{name} * p_exp_below({names[0]}, {new})"
                    self.loop_lines.append(f"{name} = {old} + p_exp_below({block}, {new})")
            self.loop_lines.append(f"{names[0]} = {new}")

    def _finish(self, s: Reduce, names: tuple[str, ...]) -> None:
        self.loop_lines = []
        if s.name in self.rescaled:
            peak = self.accs[_peak(s)]
            lane = f"{names[0]} * p_exp_below({self.lanes[_peak(s)]}, {peak})"
            self.accs[s.name] = self._define(f"tl.sum({lane}, 1)[:, None]", False, "a")
        elif not s.running:
            self.lanes[s.name] = names[0]
            position = names[1] if len(names) > 1 else ""
            self.accs[s.name] = self._define(self._reduced(s, names[0], position, inner=False), False, "a")

    # ------------------------------------------------------------------------------------------- stores
    def _store(self, s: Store, inner: bool) -> None:
        level = frozenset(g.name for g in (self.tile.groups if inner else self.tile.outer))
        value, at = self.value(s.value), self._offset(s.index[0], level)
        inner = inner and bool(self.space.rvars)
        conditions = self.mask(level)
        if s.mask is not None:
            conditions.append(self.value(s.mask))
        d = self.space.buffers[s.buf].dtype
        pointer = f"{self.pointer(s.buf)} + {at}"
        mask = f", {_and(conditions)}" if conditions else ""
        if s.mode == "store":
            line = f"tl.store({pointer}, {value}{mask})"
        else:
            full = f"tl.broadcast_to({value}, {self.shape(level)}).to({TYPES[d.name]})"
            line = f"tl.atomic_{s.mode}({pointer}, {full}{mask}, sem='relaxed')"
        (self.loop_lines if inner else self.outer_lines).append(line)

    def pointer(self, buf: str) -> str:
        """The argument that holds a buffer."""
        return f"p{list(self.space.buffers).index(buf)}"

    def _offset(self, e: Size, level: frozenset[str]) -> str:
        """An offset of the shape that `level` asks for."""
        names = self._names(self._expr_deps(e))
        text = self.expr(e)
        if names == level:
            return f"({text})"
        return f"({text} + tl.full({self.shape(level)}, 0, {self.index_type}))"

    # ------------------------------------------------------------------------------------------- values
    def value(self, root: Node) -> str:
        """The variable that holds a node's value."""
        stack = [root]
        while stack:
            n = stack[-1]
            if n in self.values or n in self.loop_values:
                stack.pop()
                continue
            todo = [a for a in self._needs(n) if a not in self.values and a not in self.loop_values]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            inner = "r" in self._names(self._all_deps(n))
            name = self._define(self._node(n), inner)
            (self.loop_values if inner else self.values)[n] = name
        return self.values.get(root) or self.loop_values[root]

    def _needs(self, n: Node) -> tuple[Node, ...]:
        """Nodes whose values must exist before this one: its arguments and what its index is made of."""
        found = n.args
        e: Size = 0
        if n.op == "load":
            e = offset_of(n)
        elif n.op == "index" and isinstance(n.attr, Expr):
            e = n.attr
        extra = [self.space.indirect[a] for a in sorted(free_symbols(e), key=str) if a in self.space.indirect]
        return (*found, *extra)

    def _all_deps(self, n: Node) -> frozenset[object]:
        out = self.deps(n)
        for a in self._needs(n):
            out |= self.deps(a)
        return out

    def _node(self, n: Node) -> str:
        args = tuple(self.value(a) for a in n.args)
        if n.op in OPS:
            return render(n.op, n.args[-1].dtype, args)
        writers: dict[str, Callable[[Node, tuple[str, ...]], str]] = {
            "load": self._load, "index": self._index, "bounded": self._bounded,
            "nonzero": self._nonzero, "acc": self._acc,
        }  # fmt: skip
        if n.op in writers:
            return writers[n.op](n, args)
        if n.op == "cast":
            return cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "bitcast":
            return bitcast(args[0], n.dtype)
        assert n.op == "const" and isinstance(n.attr, (bool, int, float))
        return _constant(n.attr, n.dtype)

    def _load(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, Load)
        offset = offset_of(n)
        names = self._names(self._expr_deps(offset))
        conditions = self.mask(names)
        if n.attr.masked:
            of_mask = self._names(self._all_deps(n.args[-1]))
            conditions = self.mask(names | of_mask)
            conditions.append(args[-1])
            names |= of_mask
        at = self._offset(offset, names) if names else f"({self.expr(offset)})"
        mask = f", {_and(conditions)}, other=0" if conditions else ""
        return f"tl.load({self.pointer(n.attr.buf)} + {at}{mask})"

    def _index(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, (int, Expr))
        text = self.expr(n.attr)
        return f"({text}).to(tl.int64)" if isinstance(n.attr, Expr) else _constant(n.attr, i64)

    def _bounded(self, n: Node, args: tuple[str, ...]) -> str:
        assert isinstance(n.attr, Bound)
        held = self._held(n, f"({args[0]} >= 0) & ({args[0]} < {self.expr(n.attr.size)})", args)
        return f"tl.where({held}, {args[0]}, 0)"

    def _nonzero(self, n: Node, args: tuple[str, ...]) -> str:
        self._held(n, f"{args[0]} != 0", args)
        return args[0]

    def _held(self, n: Node, ok: str, args: tuple[str, ...]) -> str:
        """Asserts on the device that a promise holds at every point of the tensor; the variable that says where."""
        self.checks = True
        names = self._names(self._all_deps(n))
        inner = "r" in names
        held = self._define(f"({ok}) | ~{args[1]}" if len(args) > 1 else ok, inner)
        outside = self.mask(names)
        asserted = f"{held} | ~({_and(outside)})" if outside else held
        check = check_of(n)
        assert check is not None
        lines = self.loop_lines if inner else self.outer_lines
        lines.append(f"tl.device_assert({asserted}, {check.message!r})")
        return held

    def _acc(self, n: Node, args: tuple[str, ...]) -> str:
        return self.accs[str(n.attr)]

    # --------------------------------------------------------------------------------------- integers
    def expr(self, e: Size) -> str:
        """An integer expression over loop variables, sizes and values."""
        return self._text(e, {})

    def _text(self, e: Size, memo: dict[Size, str]) -> str:
        if isinstance(e, int):
            return str(e)
        for known in (self.exprs, self.loop_exprs):
            if e in known:
                return known[e]
        parts = []
        for mono, c in e.terms:
            factors = [self._atom(a) for a in mono]
            if c != 1:
                factors.insert(0, str(c) if c > 0 else f"({c})")
            parts.append(" * ".join(factors))
        if e.const:
            parts.append(str(e.const))
        text = " + ".join(parts)
        return text if len(parts) == 1 and len(e.terms[0][0]) == 1 and e.terms[0][1] == 1 else f"({text})"

    def _atom(self, a: Atom) -> str:
        key = Expr(0, (((a,), 1),))
        for known in (self.exprs, self.loop_exprs):
            if key in known:
                return known[key]
        inner = "r" in self._names(self._expr_deps(key))
        text = self._atom_text(a)
        if text.isidentifier():
            return text
        name = self._define(text, inner, "i")
        (self.loop_exprs if inner else self.exprs)[key] = name
        return name

    def _atom_text(self, a: Atom) -> str:
        if a in self.group_of:
            return self._axis(a)
        if a in self.space.indirect:
            value = self.value(self.space.indirect[a])
            return f"{value}.to({self.index_type})"
        if a.kind == "sym":
            return self.size_names[a.name]
        left, right = self.expr(a.a), self.expr(a.b)
        if a.kind in ("div", "mod"):
            if known_nonneg(a.a) and bounds(a.b)[0] > 0:
                return f"({left} {'//' if a.kind == 'div' else '%'} {right})"
            return f"p_index_{a.kind}({left}, {right})"
        if a.kind in ("min", "max"):
            return f"tl.{a.kind}imum({left}, {right})"
        return f"({left} {_SIGN[a.kind]} {right}).to({self.index_type})"

    def _axis(self, a: Atom) -> str:
        """A loop variable out of the index that walks its group."""
        g = self.group_of[a]
        if len(g.axes) == 1:
            return g.name
        k = g.axes.index(a)
        inner = self.size(_product(g.axes[k + 1 :]))
        text = g.name if k == len(g.axes) - 1 else f"({g.name} // {inner})"
        return text if k == 0 else f"{text} % {self.size(extent(a))}"


Passes = tuple[tuple[Reduce | Store, ...], ...]


def online(passes: Passes) -> tuple[Passes, dict[str, Reduce]]:
    """Moves sums of exp(x - max x) into the pass of their maximum, where each lane rescales its sum as its maximum
    grows, so that rows too long for a block are read once less. Also gives the moved sums, by name.

    Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    level = {s.name: (k, s) for k, p in enumerate(passes) for s in p if isinstance(s, Reduce) and s.kind == "max"}
    moved: dict[str, Reduce] = {}
    out: list[list[Reduce | Store]] = [list(p) for p in passes]
    for k, p in enumerate(passes):
        for s in p:
            if not isinstance(s, Reduce) or s.kind != "sum" or s.running or not _peak(s):
                continue
            at, peak = level.get(_peak(s), (k, s))
            if at < k and not peak.running and s.value.args[0].args[0] is peak.value:
                moved[s.name] = s
                out[k].remove(s)
                out[at].append(s)
    return tuple(tuple(p) for p in out if p), moved


def _peak(s: Reduce) -> str:
    """The reduction m of a sum of exp(x - m), or ""."""
    n = s.value
    if n.op != "exp" or n.args[0].op != "sub" or n.args[0].args[1].op != "acc":
        return ""
    return str(n.args[0].args[1].attr)


def _product(axes: Sequence[Atom]) -> Size:
    out: Size = 1
    for a in axes:
        out = out * extent(a)
    return out


def _and(conditions: Sequence[str]) -> str:
    return " & ".join(conditions)


def _constant(value: Const, d: DType) -> str:
    return literal(value, d)
