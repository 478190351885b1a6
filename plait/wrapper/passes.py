"""Passes over wrapper programs: each a pure function WrapperProgram -> WrapperProgram, listed in order as data.

They merge views, drop what nobody uses, compute a size once, find the launches that need no barrier and put the ends of
lives where they belong. No pass may drop an assert or a call: `run_passes` checks that, and the program, after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from plait.ir import sizes as sz
from plait.ir.sizes import Expr, Size, free_symbols
from plait.wrapper import instructions as ins
from plait.wrapper import walk
from plait.wrapper.verify import verify, verify_kept
from plait.wrapper.walk import defined, rewrite, root, symbols, used

Pass = Callable[[ins.WrapperProgram], ins.WrapperProgram]
Show = Callable[[str, ins.WrapperProgram], None]


def run_passes(program: ins.WrapperProgram, check: bool = False, show: Show | None = None) -> ins.WrapperProgram:
    """The program after all passes.

    check: verify before the first and after each, and that none dropped an effect. show: called with each result.
    """
    if check:
        verify(program)
    for name, step in PASSES:
        now = step(program)
        if check:
            verify(now, after=name)
            verify_kept(program, now, after=name)
        if show is not None:
            show(name, now)
        program = now
    return program


# ---------------------------------------------------------------------------------------------- views, dead code
def merge_views(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """Equal views of one tensor become one, and a view of a view is taken from the tensor itself.

    Views that are returned stay: results of different names are different objects to the caller."""
    returned = {n for i in p.body if isinstance(i, ins.Return) for n in used(i)}
    first: dict[ins.View, str] = {}
    made: dict[str, ins.View] = {}
    names: dict[str, str] = {}
    out: list[ins.Instr] = []
    for i in p.body:
        now = rewrite(i, lambda n: names.get(n, n), lambda e: e) if names else i
        if isinstance(now, ins.View):
            now = _through(now, made.get(now.base))
            known = first.setdefault(replace(now, name=""), now.name)
            if known != now.name and now.name not in returned:
                names[now.name] = known
                continue
            made[now.name] = now
        out.append(now)
    return replace(p, body=tuple(out))


def _through(v: ins.View, base: ins.View | None) -> ins.View:
    if base is None or base.dtype != v.dtype or not v.relative:
        return v
    return replace(v, base=base.base, offset=sz.add(base.offset, v.offset), relative=base.relative)


def drop_dead(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """Drops what only defines names that nobody needs; unused results of calls lose their names."""
    needed: set[str] = set()
    out: list[ins.Instr] = []
    for i in reversed(p.body):
        if (
            isinstance(
                i, (ins.Symbol, ins.Arena, ins.Place, ins.Alloc, ins.Reuse, ins.View, ins.Constant, ins.DefineKernel)
            )
            and i.name not in needed
        ):
            continue
        if isinstance(i, (ins.CallExtern, ins.CallPython)):
            i = replace(i, outs=tuple(n if n in needed else None for n in i.outs))
        if isinstance(i, ins.Launch):
            needed.add(i.kernel)
        needed.update(used(i), symbols(i))
        out.append(i)
    return replace(p, body=tuple(reversed(out)))


# ---------------------------------------------------------------------------------------------- sizes
def share_sizes(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """An expression with a division, minimum or product of symbols that several instructions evaluate becomes a symbol,
    defined as soon as its own symbols are."""
    counts: dict[Expr, int] = {}
    for i in p.body:
        for e in dict.fromkeys(walk.sizes(i)):
            if isinstance(e, Expr) and _is_costly(e):
                counts[e] = counts.get(e, 0) + 1
    repeated = [e for e, n in counts.items() if n > 1]
    if not repeated:
        return p
    taken = _all_names(p)
    shared: dict[Expr, Expr] = {}
    for e in repeated:
        lo, hi = sz.bounds(e)
        shared[e] = sz.symbol(_fresh("n", taken), lo, hi)
    ready = {i.name for i in p.inputs if isinstance(i, ins.SymbolInput)}
    waiting = dict(shared)
    out = _define_ready(waiting, ready)
    for i in p.body:
        out.append(i if isinstance(i, ins.Symbol) else rewrite(i, lambda n: n, lambda e: _swap(e, shared)))
        ready.update(defined(i))
        out += _define_ready(waiting, ready)
    return replace(p, body=tuple(out))


def _is_costly(e: Expr) -> bool:
    return any(len(mono) > 1 or mono[0].kind != "sym" for mono, _ in e.terms)


def _swap(e: Size, shared: dict[Expr, Expr]) -> Size:
    return shared.get(e, e) if isinstance(e, Expr) else e


def _define_ready(waiting: dict[Expr, Expr], ready: set[str]) -> list[ins.Instr]:
    """Definitions of those symbols whose expressions can be evaluated by now; they wait no more."""
    now = [e for e in waiting if all(a.name in ready for a in free_symbols(e))]
    out: list[ins.Instr] = []
    for e in now:
        atom = waiting.pop(e).symbol
        assert atom is not None
        out.append(ins.Symbol(atom.name, e))
    return out


def _all_names(p: ins.WrapperProgram) -> set[str]:
    names = {i.name for i in p.inputs}
    for i in p.body:
        names.update(defined(i))
    return names


def _fresh(stem: str, taken: set[str]) -> str:
    k = 0
    while f"{stem}{k}" in taken:
        k += 1
    taken.add(f"{stem}{k}")
    return f"{stem}{k}"


# ---------------------------------------------------------------------------------------------- barriers
@dataclass
class _Memory:
    """Which names may share memory. root: through views and takeovers. kind of a root: 'own' (an allocation of ours),
    'place', or 'given' (inputs, constants, results of calls: these may share memory among each other)."""

    places: dict[str, ins.Place] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    bases: dict[str, str] = field(default_factory=dict)

    def define(self, i: ins.Instr) -> None:
        match i:
            case ins.Place():
                self.places[i.name] = i
            case ins.Alloc():
                self.own.add(i.name)
            case ins.Reuse():
                self.bases[i.name] = i.old
            case ins.View():
                self.bases[i.name] = i.base
            case ins.CallExtern(may_keep=True) | ins.CallPython():
                # A result may be the memory of an argument, which is no longer ours alone.
                self.own.difference_update([root(n, self.bases) for n in used(i)])
            case _:
                pass

    def may_share(self, a: str, b: str) -> bool:
        """Whether two roots may have a byte in common."""
        if a == b:
            return True
        if a in self.places and b in self.places:
            return not _apart(self.places[a], self.places[b])
        known = self.own | self.places.keys()
        return a not in known and b not in known


def _apart(a: ins.Place, b: ins.Place) -> bool:
    """Whether two places certainly do not overlap."""
    return sz.known_le(_end(a), b.offset) or sz.known_le(_end(b), a.offset)


def _end(p: ins.Place) -> Size:
    reach = sz.total(sz.mul(sz.add(s, -1), t) for s, t in zip(p.shape, p.strides, strict=True))
    return sz.add(p.offset, sz.mul(sz.add(reach, 1), p.dtype.nbytes))


def find_barriers(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """A launch waits for earlier ones only if data flows between them: it reads what one wrote, or writes what one
    reads or wrote, since the last barrier or other end of a parallel region."""
    memory = _Memory()
    read: set[str] = set()
    written: set[str] = set()
    out: list[ins.Instr] = []
    for i in p.body:
        memory.define(i)
        if isinstance(i, ins.Launch):
            outs = {root(n, memory.bases) for n in i.outs}
            args = {root(n, memory.bases) for n in i.args}
            barrier = _meet(memory, args, written) or _meet(memory, outs, read)
            if barrier:
                read, written = set(), set()
            read |= args
            written |= outs
            i = replace(i, barrier=barrier)
        elif isinstance(i, _ENDS_A_REGION) or _reads_item(i):
            read, written = set(), set()
        out.append(i)
    return replace(p, body=tuple(out))


_ENDS_A_REGION = (ins.CallExtern, ins.CallPython, ins.Hook, ins.Copy, ins.Fill, ins.CheckFinite)


def _reads_item(i: ins.Instr) -> bool:
    return isinstance(i, ins.Symbol) and isinstance(i.value, ins.ItemOf)


def _meet(memory: _Memory, a: set[str], b: set[str]) -> bool:
    return bool(a & b) or any(memory.may_share(x, y) for x in a for y in b)


# ---------------------------------------------------------------------------------------------- ends of lives
def drop_frees(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """Every tensor lives to the end, until `place_frees`: other passes need not think of it."""
    return replace(p, body=tuple(i for i in p.body if not isinstance(i, ins.Free)))


def place_frees(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """Ends every tensor's life right after its last use; a view counts as a use of its base.

    What is returned, the bases of returned views, constants and arenas stay to the end.
    """
    body = [i for i in p.body if not isinstance(i, ins.Free)]
    last = _last_uses(p, body)
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    out: list[ins.Instr] = []
    for k, i in enumerate(body):
        out.append(i)
        if k != len(body) - 1:
            out.extend(ins.Free(name) for name in ends.get(k, ()))
    return replace(p, body=tuple(out))


def _last_uses(p: ins.WrapperProgram, body: Sequence[ins.Instr]) -> dict[str, int]:
    """Tensor -> position of the instruction after which nothing needs it, in order of definition."""
    integers = frozenset().union(*(symbols(i) for i in body))
    last: dict[str, int] = {i.name: -1 for i in p.inputs if isinstance(i, ins.TensorInput)}
    base: dict[str, str] = {}
    for k, i in enumerate(body):
        if isinstance(i, (ins.CallExtern, ins.CallPython)):
            last.update((n, k) for n in defined(i) if n not in integers)
        elif not isinstance(i, (ins.Symbol, ins.Constant, ins.Arena)):
            last.update((n, k) for n in defined(i))
        for name in used(i):
            if name in last:
                last[name] = k
        if isinstance(i, ins.View):
            base[i.name] = i.base
    for view, of in reversed(base.items()):  # views of views come after their bases
        if of in last:
            last[of] = max(last[of], last[view])
    return {name: k for name, k in last.items() if k >= 0}


PASSES: tuple[tuple[str, Pass], ...] = (
    ("drop frees", drop_frees),
    ("merge views", merge_views),
    ("drop dead", drop_dead),  # after merging: a view's view may have lost its only use
    ("share sizes", share_sizes),
    ("find barriers", find_barriers),
    ("place frees", place_frees),  # last: only now are the last uses known
)
