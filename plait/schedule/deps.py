"""Who reads and writes what: the dependences between the ops of a LoopProgram.

Comes in: ops in program order, which gives meaning to buffers that are written more than once
(pieces, updates in place, mutated inputs). Goes out: for every op the ops that must run before it.
Buffers that share memory (Alias, results of view-like externs) count as one. `Bodies` remembers
what was found out about loop bodies; it is made once a program and handed around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from plait.ir import loops as ir
from plait.ir.calls import Extern
from plait.ir.effects import arg_sizes, defines, needs, sizes, updates
from plait.ir.expr import Expr, Size, atom_of, free_symbols
from plait.ir.ops import CHECKED, OPS

# Cycles of an element of the nodes that are no rows of OPS.
_SPECIAL_COST = {"cast": 0.5, "index": 0.5, "bounded": 1.0, "nonzero": 0.5}


def node_cost(n: ir.Node) -> float:
    """Cycles of one element of one node, loads left out."""
    row = OPS.get(n.op)
    return row.cost if row is not None else _SPECIAL_COST.get(n.op, 0.0)


class Facts(NamedTuple):
    """What a body does at one point. loads: its load nodes, each once; bufs: what they load, each
    once; indices: its index nodes. cost: cycles of its arithmetic, loads left out. checks: it holds
    a run-time check. size: number of nodes. equalities: comparisons of two floats, neither of which
    is a constant."""

    loads: tuple[ir.Node, ...]
    bufs: tuple[str, ...]
    indices: tuple[ir.Node, ...]
    cost: float
    checks: bool
    size: int
    equalities: tuple[ir.Node, ...]


class Bodies:
    """Facts of bodies, each body walked once."""

    def __init__(self) -> None:
        self._facts: dict[tuple[ir.Node, ...], Facts] = {}

    def of(self, roots: tuple[ir.Node, ...]) -> Facts:
        """Facts of the nodes below roots taken together."""
        found = self._facts.get(roots)
        if found is None:
            found = self._facts[roots] = _facts(roots)
        return found


def _facts(roots: tuple[ir.Node, ...]) -> Facts:
    loads: list[ir.Node] = []
    indices: list[ir.Node] = []
    cost = 0.0
    checks = False
    size = 0
    equalities: list[ir.Node] = []
    for n in ir.walk(roots):
        size += 1
        if n.op == "load":
            loads.append(n)
            continue
        if n.op == "index":
            indices.append(n)
        elif n.op in ("eq", "ne") and _is_of_two_floats(n):
            equalities.append(n)
        checks = checks or n.op in CHECKED
        cost += node_cost(n)
    bufs = tuple(dict.fromkeys([load_of(n).buf for n in loads]))
    return Facts(tuple(loads), bufs, tuple(indices), cost, checks, size, tuple(equalities))


def _is_of_two_floats(n: ir.Node) -> bool:
    a, b = n.args
    return a.dtype.is_float and a is not b and "const" not in (a.op, b.op)


def roots(loop: ir.Loop) -> tuple[ir.Node, ...]:
    """Every expression that a loop evaluates."""
    if isinstance(loop, ir.Scatter):
        extra = () if loop.mask is None else (loop.mask,)
        return (loop.body, *loop.index_args, *extra)
    return (loop.body,)


def load_of(n: ir.Node) -> ir.Load:
    """The attribute of a load node."""
    assert isinstance(n.attr, ir.Load), n
    return n.attr


def space(loop: ir.Loop) -> tuple[Expr, ...]:
    """All variables of a loop, reduced ones last."""
    return loop.vars + loop.rvars if isinstance(loop, ir.Reduction) else loop.vars


def extent(v: Expr) -> Size:
    """The number of values of a loop variable."""
    found = atom_of(v).extent
    assert found is not None, f"{v} is no loop variable"
    return found


def reads(op: ir.Op, bodies: Bodies) -> tuple[str, ...]:
    """The buffers whose contents an op needs, each once."""
    named = needs(op)
    if not isinstance(op, (ir.Pointwise, ir.Reduction, ir.Scan, ir.Scatter)):
        return named
    loaded = bodies.of(roots(op)).bufs
    return tuple(dict.fromkeys((*named, *loaded))) if named else loaded


def memory_roots(ops: Sequence[ir.Op]) -> dict[str, str]:
    """For every buffer that may share memory with another one, the name that stands for that
    memory."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while name in root:
            name = root[name]
        return name

    for op in ops:
        bases: tuple[str, ...] = ()
        if isinstance(op, ir.Alias):
            bases = (op.base,)
        elif isinstance(op, Extern):
            bases = op.aliases
        for out in defines(op) if bases else ():
            for base in bases:
                a, b = find(out), find(base)
                if a != b:
                    root[a] = b
    return {name: find(name) for name in root}


class Uses:
    """Who touches the buffers of a program, by the places of its ops.

    readers, makers: of each buffer. changed: updates in place, by what stands for the memory.
    aliased: buffers that share memory with others. shared: these, and what the caller gets.
    """

    def __init__(self, program: ir.LoopProgram, bodies: Bodies) -> None:
        self.readers: dict[str, list[int]] = {}
        self.makers: dict[str, list[int]] = {}
        self.changed: dict[str, list[int]] = {}
        self._memory, self._fences = memory_roots(program.ops), ir.fences(program.ops)
        self.aliased = {*self._memory, *self._memory.values()}
        self.shared = {*program.returned, *self.aliased}
        for k, op in enumerate(program.ops):
            for name in reads(op, bodies):
                self.readers.setdefault(name, []).append(k)
            for name in defines(op):
                self.makers.setdefault(name, []).append(k)
            for name in updates(op):
                self.changed.setdefault(self._memory.get(name, name), []).append(k)

    def may_move(self, names: Iterable[str], after: int, before: int) -> bool:
        """Whether what reads these buffers may go from one place to the other: no fence parts the
        two, and nothing updates a buffer between them."""
        if any(after < at < before for at in self._fences):
            return False
        found = (self.changed.get(self._memory.get(n, n), ()) for n in names)
        return not any(after < at < before for places in found for at in places)


def op_symbols(op: ir.Op, buffers: Mapping[str, ir.Buffer]) -> set[str]:
    """The size symbols that must be known before an op can run."""
    exprs: list[Size] = []
    for name in defines(op):
        exprs += (*buffers[name].shape, *buffers[name].strides)
    if isinstance(op, (ir.Pointwise, ir.Reduction, ir.Scan, ir.Scatter)):
        exprs += (extent(v) for v in space(op))
        for n in ir.walk(roots(op)):
            exprs += ir.exprs_of(n)
        if isinstance(op, (ir.Pointwise, ir.Scatter)):
            exprs += op.index or ()
    exprs += sizes(op)
    return {a.name for e in exprs for a in free_symbols(e) if a.extent is None and not ir.is_arg(a)}


def preds(program: ir.LoopProgram, bodies: Bodies) -> list[set[int]]:
    """For every op the ops that must run before it (not all of the indirect ones)."""
    ops = program.ops
    memory = memory_roots(ops)
    definer: dict[str, int] = {}
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    out: list[set[int]] = []
    effect = fence = -1
    for k, op in enumerate(ops):
        need: set[int] = {fence} if fence >= 0 else set()
        if isinstance(op, Extern) and op.fence:
            need.update(range(fence + 1, k))
            fence = k
        for name in reads(op, bodies):
            root = memory.get(name, name)
            need.update(writers.get(root, ()))
            if name in definer:
                need.add(definer[name])
            readers.setdefault(root, []).append(k)
        changed = updates(op)
        for name in changed:
            root = memory.get(name, name)
            need.update(writers.get(root, ()))
            need.update(readers.get(root, ()))
            writers[root] = [k]
            readers[root] = []
        for name in defines(op):
            if name not in changed:
                definer[name] = k
                writers.setdefault(memory.get(name, name), []).append(k)
        if isinstance(op, Extern) and op.effectful:
            if effect >= 0:
                need.add(effect)
            effect = k
        need.discard(k)
        out.append(need)
    _add_symbol_preds(program, bodies, out)
    _add_assert_preds(program, bodies, out)
    return out


def _add_symbol_preds(program: ir.LoopProgram, bodies: Bodies, out: list[set[int]]) -> None:
    """Adds what comes from integers that are found at run time, and from assertions on them: what
    depends on such an integer, or on the op that brings it, waits for all that the program asserts
    of it before."""
    brings = _integers(program)
    if not brings:
        return
    at = {name: k for k, names in brings.items() for name in names}
    behind: list[frozenset[str]] = []  # for every op the integers that it depends on
    asserts: list[tuple[int, frozenset[str]]] = []
    for k, op in enumerate(program.ops):
        used = op_symbols(op, program.buffers) & at.keys()
        out[k].update(at[name] for name in used if at[name] < k)
        names = brings.get(k, frozenset()).union(used, *(behind[p] for p in out[k]))
        behind.append(names)
        out[k].update(p for p, asserted in asserts if not names.isdisjoint(asserted))
        if isinstance(op, ir.Assert):
            asserts.append((k, frozenset(used)))


def _add_assert_preds(program: ir.LoopProgram, bodies: Bodies, out: list[set[int]]) -> None:
    """Adds that all ops wait for what the program asserts before them of numbers that are known
    when it starts: the memory that they touch may depend on it, and what they are fused with may
    stand before it."""
    brought = {name for names in _integers(program).values() for name in names}
    last = -1
    for k, op in enumerate(program.ops):
        if last >= 0:
            out[k].add(last)
        if isinstance(op, ir.Assert) and brought.isdisjoint(op_symbols(op, program.buffers)):
            last = k


def _integers(program: ir.LoopProgram) -> dict[int, frozenset[str]]:
    """The symbols whose values ops bring: of the ops that bring some, by place. A symbol that is
    computed comes with the last of its own symbols."""
    definer: dict[str, int] = {}  # the first: others write into what it made
    for k, op in enumerate(program.ops):
        for name in defines(op):
            definer.setdefault(name, k)
    at: dict[str, int] = {}
    for k, op in enumerate(program.ops):
        if isinstance(op, ir.Item):
            at[op.name] = k
        elif isinstance(op, Extern):
            at.update((name, k) for _, name in op.symbols)
    for name, source in program.symbols.items():
        if isinstance(source, tuple):
            if source[0] in definer:
                at[name] = definer[source[0]]
        elif source is not None:
            places = [at[a.name] for a in free_symbols(source) if a.name in at]
            if places:
                at[name] = max(places)
    out: dict[int, frozenset[str]] = {}
    for name, k in at.items():
        out[k] = out.get(k, frozenset()) | {name}
    return out


def read_for_symbols(program: ir.LoopProgram) -> dict[str, frozenset[str]]:
    """For every symbol the buffers whose sizes tell its value."""
    out: dict[str, frozenset[str]] = {}
    for name, source in program.symbols.items():
        if isinstance(source, tuple):
            out[name] = frozenset((source[0],))
        elif source is not None:
            out[name] = frozenset().union(*(out.get(a.name, ()) for a in free_symbols(source)))
    return out


def drop_dead(program: ir.LoopProgram, bodies: Bodies) -> ir.LoopProgram:
    """The program without loops, views and effect-free calls whose results nobody uses, and without
    loops that run for no point and make what is empty; unused results of other ops become None."""
    empty = {n for n, b in program.buffers.items() if b.is_empty}
    needed = set(program.returned)
    sources = read_for_symbols(program)
    for e in arg_sizes(program.outputs) if sources else ():
        needed.update(b for a in free_symbols(e) for b in sources.get(a.name, ()))
    kept: list[ir.Op] = []
    for op in reversed(program.ops):
        if isinstance(op, (ir.Item, ir.Assert, ir.Mutate)):
            live = True
        elif isinstance(op, Extern):
            live = op.effectful or bool(op.mutates) or bool(op.symbols)
        else:
            live = False
        if not live and (needed.isdisjoint(defines(op)) or (empty and _is_idle(op, empty))):
            continue
        if isinstance(op, ir.Mutate) and op.source in empty:
            op = replace(op, source=op.target)
        if isinstance(op, (Extern, ir.Reduction, ir.Scan)):
            whole = isinstance(op, Extern) and op.kernel is not None  # it wants memory for all
            outs = tuple(o if whole or o in needed else None for o in op.outs)
            op = op if outs == op.outs else replace(op, outs=outs)
        needed.update(reads(op, bodies))
        for name in op_symbols(op, program.buffers) if sources else ():
            needed.update(sources.get(name, ()))
        if isinstance(op, ir.Mutate):
            needed.add(op.target)
        kept.append(op)
    made = {*needed, *program.given}
    symbols = {n: source for n, source in program.symbols.items() if sources.get(n, made) <= made}
    return replace(program, ops=tuple(reversed(kept)), symbols=symbols)


def _is_idle(op: ir.Op, empty: set[str]) -> bool:
    """Whether an op is a loop that runs for no point and has nothing to make."""
    if not isinstance(op, (ir.Pointwise, ir.Reduction, ir.Scan, ir.Scatter)):
        return False
    return empty.issuperset(defines(op)) and any(extent(v) == 0 for v in op.vars)
