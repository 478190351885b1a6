"""Groups: kernels in the making.

A group is one iteration space and the loops that run in it, each with a map from its own variables
to the group's. Fusing two groups joins their members and composes the maps; bodies are rewritten
once, when `statements` turns the finished group into the statements of a Kernel. Members stay in
program order, so a value is always there before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from plait.ir.dtypes import i64
from plait.ir.effects import loop_outs
from plait.ir.expr import Atom, Expr, Size, atom_of, substitute
from plait.ir.loops import (
    LOOSE,
    Load,
    Loop,
    Node,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    cast,
    const,
    index_exprs,
    integer,
    node,
    rewrite,
    with_args,
)
from plait.ir.reductions import REDUCTIONS
from plait.ir.rules import preserves
from plait.schedule.deps import load_of, space
from plait.schedule.plan import Reduce, Stmt, Store, part_of

Index = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A loop in a group. op: its place in the program. env: its variables in terms of the group's
    (those that keep their name are left out). full: it runs at every point of vars x rvars,
    otherwise once a point of vars. parts: a Reduction runs across the group, at full level: what it
    reduces are the outer variables, in so many parts. segment: it gives a result for each segment
    of so many points of rvars, at full level; a Reduction reduces segments. within: of a Pointwise
    that has one, the position in a segment: what the group has made is loaded at fixed ones."""

    op: int
    loop: Loop
    env: Mapping[Atom, Size] = field(default_factory=dict)
    full: bool = False
    parts: Size = 0
    segment: int = 0
    within: Expr | None = None

    def at(self, index: Iterable[Size]) -> Index:
        """An index of the loop in terms of the group's variables."""
        return tuple(substitute(e, self.env) for e in index)

    @property
    def stored(self) -> list[tuple[str, Index]]:
        """The buffers that it stores to, and where."""
        first = (part_of(self.parts),) if self.parts else ()
        return [(b, (*first, *self.at(index))) for b, index in stored(self.loop)]


@dataclass(slots=True)
class Group:
    """One kernel in the making. name: of its first result, for messages. reads, writes: buffers, in
    order of first use."""

    name: str
    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]
    members: list[Member]

    @property
    def ops(self) -> list[int]:
        """The ops in it, in program order."""
        return [m.op for m in self.members]


def new_group(op: int, loop: Loop) -> Group:
    """A loop by itself."""
    outs = loop_outs(loop)
    name = outs[0]
    if isinstance(loop, Reduction):
        return Group(name, loop.vars, loop.rvars, [Member(op, loop)])
    if isinstance(loop, Scan):
        outer = loop.vars[: loop.axis] + loop.vars[loop.axis + 1 :]
        return Group(name, outer, (loop.vars[loop.axis],), [Member(op, loop, full=True)])
    return Group(name, loop.vars, (), [Member(op, loop)])


def moved(m: Member, env: Mapping[Atom, Size], full: bool) -> Member:
    """A member after its group's variables became env. full: what is pointwise is at full level
    now."""
    full = m.full or (full and not isinstance(m.loop, Reduction))
    if not env:
        return m if full == m.full else replace(m, full=full)
    own = dict(m.env)
    for v in (*space(m.loop), *([] if m.within is None else [m.within])):
        a = atom_of(v)
        now = substitute(own.get(a, v), env)
        if now == v:
            own.pop(a, None)
        else:
            own[a] = now
    return replace(m, env=own, full=full)


def is_ordered(m: Member) -> bool:
    """Whether a loop depends on the order of its reduced axes."""
    loop = m.loop
    if m.segment > 0 or isinstance(loop, Scan) or is_settled(loop):
        return True
    return isinstance(loop, Reduction) and REDUCTIONS[loop.kind].extreme != ""


def is_settled(loop: Loop) -> bool:
    """Whether the reduced axes of a loop stay as they are, see `settle_rows`."""
    return isinstance(loop, (Reduction, Scan)) and loop.down is not None


def stored(loop: Loop) -> list[tuple[str, Index]]:
    """The buffers that a loop stores to, and where."""
    if isinstance(loop, (Pointwise, Scatter)):
        return [(loop.out, store_index(loop))]
    return [(o, loop.vars) for o in loop_outs(loop)]


def store_index(loop: Pointwise | Scatter) -> Index:
    """Where a loop writes, over its own variables."""
    return loop.vars if loop.index is None else loop.index


def place_in_segment(m: Member, at: Index, made: Index) -> int | None:
    """Where in a segment the element lies that a member loads at `at`, of what is made at `made`;
    None if it is in no fixed place of the member's own segment."""
    if m.within is None:
        return None
    (within,) = m.at((m.within,))
    if not isinstance(within, Expr) or within.symbol is None:
        return None
    places = range(m.segment)
    return next((k for k in places if _at_place(made, within.symbol, k) == at), None)


def _at_place(index: Index, within: Atom, k: int) -> Index:
    return tuple(substitute(e, {within: k}) for e in index)


def _is_loose(x: Node) -> bool:
    return x.op == "cast" and x.attr == LOOSE


class _Body:
    """Rewrites bodies of members into the group's variables, with loads of values that the group
    itself made replaced by their nodes.

    picked: values at fixed places of segments, as reductions of these, which nothing has done yet.
    """

    def __init__(self) -> None:
        self.made: dict[str, tuple[Index, Node]] = {}
        self.picked: dict[str, Reduce] = {}
        self._memo: dict[int, dict[Node, Node]] = {}

    def start(self, member: Member) -> None:
        """Later calls rewrite bodies of this member."""
        self.member = member
        self.memo: dict[Node, Node] = {}
        self.at: dict[Index, Index] = {}  # many loads have one index

    def __call__(self, root: Node) -> Node:
        return rewrite(root, self._node, self.memo)

    def _node(self, n: Node, args: tuple[Node, ...]) -> Node:
        env = self.member.env
        if n.op == "load":
            load = load_of(n)
            index = load.index
            if env:
                if index not in self.at:
                    self.at[index] = self.member.at(index)
                index = self.at[index]
            made = self.made.get(load.buf)
            if made is None:
                if index == load.index:
                    return with_args(n, args)
                return node("load", args, Load(load.buf, index, load.masked), n.dtype)
            value = made[1] if made[0] == index else self._pick(load.buf, index, *made)
            if load.masked:
                return node("where", (args[-1], value, const(0, value.dtype)))
            return value
        if n.op == "index" and env:
            (value_at,) = self.member.at(index_exprs(n))
            return integer(value_at, args)
        if n.op == "cast" and _is_loose(args[0]) and preserves(args[0].args[0].dtype, n.dtype):
            return cast(args[0].args[0], n.dtype)  # another loop made it: nothing is rounded
        return with_args(n, args)

    def _pick(self, buf: str, index: Index, made: Index, value: Node) -> Node:
        """A value of another point of the member's segment."""
        m = self.member
        k = place_in_segment(m, index, made)
        assert k is not None, f"{buf} is stored at {made} and loaded at {index}"
        name = f"{buf}.{m.segment}.{k}"
        (within,) = m.at((m.within,)) if m.within is not None else ()
        here = node("eq", (integer(within), integer(k)))
        picked = node("where", (here, value, const(0, value.dtype)))
        self.picked.setdefault(name, Reduce(name, "xor", picked, segment=m.segment))
        return node("acc", (), name, value.dtype)


def statements(group: Group) -> list[Stmt]:
    """The statements of all members, in program order."""
    out: list[Stmt] = []
    body = _Body()
    for m in group.members:
        body.start(m)
        loop = m.loop
        if isinstance(loop, Pointwise):
            value = body(loop.body)
            index = m.at(store_index(loop))
            out += (r for r in body.picked.values() if r not in out)
            out.append(Store(loop.out, index, value, m.full, segment=m.segment))
            if loop.index is None:
                body.made[loop.out] = (index, value)
        elif isinstance(loop, Reduction):
            out += _reduction(m, loop, body)
        elif isinstance(loop, Scan):
            out += _scan(m, loop, body)
        else:
            mask = None if loop.mask is None else body(loop.mask)
            args = tuple(body(a) for a in loop.index_args)
            index = m.at(loop.index)
            out.append(Store(loop.out, index, body(loop.body), m.full, loop.mode, args, mask))
    return out


def _reduction(m: Member, loop: Reduction, body: _Body) -> list[Stmt]:
    value = body(loop.body)
    name, index = m.stored[0]
    if m.parts:
        return [Store(name, index, value, True, "sum")]
    out: list[Stmt] = [Reduce(name, loop.kind, value, segment=m.segment, down=loop.down)]
    row = REDUCTIONS[loop.kind]
    dtype = row.gives(value.dtype)
    for buf, part in zip(loop.outs, row.parts, strict=True):
        if buf is not None:
            acc = node("acc", (), name + part, dtype)
            out.append(Store(buf, index, acc, m.full, segment=m.segment))
            body.made[buf] = (index, acc)
    return out


def _scan(m: Member, loop: Scan, body: _Body) -> list[Stmt]:
    value = body(loop.body)
    index = m.at(loop.vars)
    name = loop_outs(loop)[0]
    acc = node("acc", (), name, value.dtype)
    out: list[Stmt] = [Reduce(name, loop.kind, value, running=True, down=loop.down)]
    results = [acc]
    if len(loop.outs) == 2:
        # The position of the last element that equals the running extreme: the greatest one so far.
        beats = node("ge" if loop.kind == "max" else "le", (value, acc))
        if value.dtype.is_float:
            beats = node("or", (beats, node("isnan", (value,))))
        here = integer(index[loop.axis])
        position = node("where", (beats, here, const(-1, i64)))
        out.append(Reduce(name + ".at", "max", position, running=True, down=loop.down))
        results.append(node("acc", (), name + ".at", i64))
    for buf, result in zip(loop.outs, results, strict=True):
        if buf is not None:
            out.append(Store(buf, index, result, True))
            body.made[buf] = (index, result)
    return out
