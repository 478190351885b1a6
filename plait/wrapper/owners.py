"""Facts have an owner: what stands behind the sizes and strides that a program relies on.

A tensor's layout is owned if it was checked before the program ran (inputs, constants), was decided
by the program (Alloc, Place, Reuse, View) or was looked at since (AssertSizeStride). The result of
a call is not owned: that tracing said so is no proof. That of a subprogram which is called as it is
belongs to the subprogram, as far as its layout is numbers. A symbol that comes from such a result,
or is the value of a tensor, may be any number until an AssertScalar bounds it; the ranges that
expressions rely on must follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.expr import INF, Atom, Expr, Size, bounds, free_symbols, substitute, symbol
from plait.wrapper import instructions as ins
from plait.wrapper.walk import defined, sizes, used

_ANY = (-INF, INF)
Range = tuple[float, float]

# These look at a tensor or an integer as it is.
_LOOKS = (
    ins.Symbol,
    ins.AssertScalar,
    ins.AssertSizeStride,
    ins.AssertAlignment,
    ins.CheckFinite,
    ins.Hook,
    ins.Free,
)


class Owners:
    """The facts that are owned so far, in one walk over a program."""

    def __init__(self, programs: Sequence[ins.WrapperProgram] = ()) -> None:
        self.programs = programs
        self.unowned: set[str] = set()  # results of calls that nothing has looked at
        self.results: set[str] = set()
        self.found: dict[
            str, Range | Size
        ] = {}  # symbols found at run time: the least and most, or how it is computed
        self.bounded: dict[Size, Range] = {}  # what asserts say of expressions

    def missing(self, i: ins.Instr) -> str:
        """What an instruction relies on without an owner, in words. "" if there is nothing: then it
        is noted."""
        if not isinstance(i, _LOOKS):
            for name in used(i):
                if name in self.unowned:
                    return (
                        f"nothing stands behind the sizes of {name}, the result of a call: no "
                        "require_layout"
                    )
            for atom in sorted((a for e in sizes(i) for a in free_symbols(e)), key=lambda a: a.key):
                lo, hi = self._range(atom.name)
                if atom.name in self.found and not (atom.lo <= lo and hi <= atom.hi):
                    relied, known = (_text(r) for r in ((atom.lo, atom.hi), (lo, hi)))
                    return (
                        f"nothing stands behind {atom.name} being {relied}: it is found at run "
                        f"time, {known}"
                    )
        self._learn(i)
        return ""

    def _learn(self, i: ins.Instr) -> None:
        match i:
            case _ if isinstance(i, ins.Call):
                names = set(defined(i))
                self.unowned |= names - self._promised(i)
                self.results |= names
                self.found.update(dict.fromkeys(names, _ANY))  # an integer, if it is one
            case ins.AssertSizeStride():
                self.unowned.discard(i.tensor)
            case ins.View() if i.base in self.results:
                self.results.add(i.name)
            case ins.Symbol(name, ins.SizeOf(tensor)) if tensor in self.results:
                self.found[name] = (0, INF)
            case ins.Symbol(name, ins.ItemOf()):
                self.found[name] = _ANY
            case ins.Symbol(name, int() | Expr() as value):
                if any(a.name in self.found for a in free_symbols(value)):
                    self.found[name] = value
            case ins.AssertScalar():
                self._bound(i.expr)
            case _:
                pass

    def _promised(self, i: ins.Instr) -> set[str]:
        """The results of a call whose layouts a subprogram has decided."""
        if not isinstance(i, ins.CallPrograms) or i.kind != "call":
            return set()
        body = self.programs[i.programs[0]].body
        made = (ins.Alloc, ins.Reuse, ins.View, ins.AssertSizeStride)
        known: set[str] = set()
        for j in body:
            own = not isinstance(j, ins.View) or j.base in known
            if own and isinstance(j, made) and all(type(n) is int for n in (*j.shape, *j.strides)):
                known.add(j.tensor if isinstance(j, ins.AssertSizeStride) else j.name)
        returned = body[-1]
        assert isinstance(returned, ins.Return), f"{returned} ends a subprogram"
        pairs = zip(i.outs, returned.values, strict=True)
        return {n for n, o in pairs if n and isinstance(o, ins.Ref) and o.name in known}

    def _range(self, name: str) -> Range:
        """The least and the most that a symbol found at run time can be, by all that is known."""
        known = self.found.get(name, _ANY)
        if isinstance(known, tuple):
            return _both(known, self.bounded.get(_free(symbol(name)), _ANY))
        atoms = [a for a in free_symbols(known) if a.name in self.found]
        exact = substitute(known, {a: symbol(a.name, *self._range(a.name)) for a in atoms})
        said = _both(*(self.bounded.get(_free(e), _ANY) for e in (known, symbol(name))))
        return _both(bounds(exact), said)

    def _bound(self, condition: Size) -> None:
        """Notes what an assert says: comparisons with constants, one or a product of several."""
        if not isinstance(condition, Expr) or condition.const or len(condition.terms) != 1:
            return
        ((atoms, coefficient),) = condition.terms
        for a in atoms if coefficient == 1 else ():
            shared = self.found.get(a.name) if a.kind == "sym" else None
            if isinstance(shared, Expr):
                self._bound(shared)
            for e, (lo, hi) in _bounds_of(a):
                key = _free(e)
                self.bounded[key] = _both(self.bounded.get(key, _ANY), (lo, hi))


def _bounds_of(a: Atom) -> list[tuple[Size, Range]]:
    """What a comparison that holds says of its sides, where one is a constant."""
    step = 1 if a.kind == "lt" else 0
    if a.kind in ("le", "lt") and isinstance(a.a, int):
        return [(a.b, (a.a + step, INF))]
    if a.kind in ("le", "lt") and isinstance(a.b, int):
        return [(a.a, (-INF, a.b - step))]
    if a.kind == "eq":
        return [(e, (c, c)) for e, c in ((a.a, a.b), (a.b, a.a)) if isinstance(c, int)]
    return []


def _free(e: Size) -> Size:
    """The expression on symbols of which nothing is known, so that equal ones are equal."""
    return substitute(e, {a: symbol(a.name, lo=-INF) for a in free_symbols(e)})


def _both(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def _text(r: Range) -> str:
    if r == _ANY:
        return "any number"
    return (
        f"at least {r[0]:g}"
        if r[1] == INF
        else f"at most {r[1]:g}"
        if r[0] == -INF
        else f"{r[0]:g} to {r[1]:g}"
    )
