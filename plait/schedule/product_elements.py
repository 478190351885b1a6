"""Which elements of a product a loop goes over, and whether it loads the other elements of pairs of
columns too: a rotary embedding is x * cos + (x of the other half of a head) * sin.

Comes in: the indices that a loop loads a result of a product by. Goes out: the loop's variables
over those of the product, the columns that it goes over, and the loads of partners.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.expr import Atom, Expr, Size, atom_of, coefficient, substitute, symbol, total
from plait.ir.loops import Load, Node, Pointwise, node, rewrite, substitute_vars, with_args
from plait.ir.product import PARTNER, PRODUCT, Cut, Part, Product
from plait.ir.rules import Simplifier
from plait.schedule.deps import extent, load_of

_SWAPPED = {PRODUCT: PARTNER, PARTNER: PRODUCT}
_Digits = list[tuple[Expr, Size]]
"""Variables with what one step of each is in a number."""


# ------------------------------------------------------------------------------- what it goes over
def inverted(
    vars_: Sequence[Expr], index: Sequence[Size], to: Sequence[Size], shape: Sequence[Size],
    column: Expr | None = None,
) -> tuple[dict[Atom, Size], Part | None] | None:  # fmt: skip
    """Variables over those of `to`, where index, over the variables, is the same element of a
    tensor of this shape: each number in it has some of them as digits. None where it has not.
    column: where it is one of `to`, the variables may go over a part of the columns."""
    found: dict[Atom, Size] = {atom_of(v): 0 for v in vars_ if extent(v) == 1}
    vars_ = [v for v in vars_ if extent(v) != 1]
    part = None
    for e, t, n in zip((substitute(e, found) for e in index), to, shape, strict=True):
        weights = [(v, coefficient(e, atom_of(v))) for v in vars_]
        digits = [(v, w) for v, w in weights if w != 0 and w is not None]
        if None in [w for _, w in weights] or any(atom_of(v) in found for v, _ in digits):
            return None
        first = e - total(v * w for v, w in digits)
        step = _read_off(digits, t, found) if first == 0 else None
        if step != n:
            part = _part(digits, first, t, n, found) if t is column else None
            if part is None:
                return None
    return (found, part) if all(atom_of(v) in found for v in vars_) else None


def _read_off(digits: _Digits, t: Size, found: dict[Atom, Size]) -> Size | None:
    """Adds the digits of a number; returns how many numbers they write. None where they write
    none."""
    step: Size = 1
    left = digits
    while left:
        v = next((v for v, w in left if w == step), None)
        if v is None:
            return None
        left = [(x, w) for x, w in left if x is not v]
        digit = t // step
        found[atom_of(v)] = digit % extent(v) if left else digit
        step = step * extent(v)
    return step


def _part(
    digits: _Digits, first: Size, t: Expr, n: Size, found: dict[Atom, Size]
) -> Part | None:  # fmt: skip
    """A part of n columns t, from `first` on. Adds the digits of its columns: those inside of a
    group of columns, then those that count the groups."""
    known = [(v, w) for v, w in digits if isinstance(w, int) and isinstance(extent(v), int)]
    if len(known) < len(digits) or not (isinstance(first, int) and isinstance(n, int)):
        return None
    length, inner, outer = 1, _Digits(), dict[Expr, int]()
    for v, w in sorted(known, key=lambda d: d[1]):
        if w == length and not outer:
            inner.append((v, w))
            length *= _n_of(v)
        else:
            outer[v] = w
    period = min(outer.values(), default=n)
    if period <= 0 or any(w % period for w in outer.values()):
        return None
    _read_off(inner, t % period - first, found)
    groups = _read_off([(v, w // period) for v, w in outer.items()], t // period, found)
    part = Part(first, length, period)
    covers = isinstance(groups, int) and groups * period >= n
    return part if covers and not part.fault(n) else None


def _n_of(v: Expr) -> int:
    """How many values a variable of known extent takes."""
    n = extent(v)
    assert isinstance(n, int), v
    return n


# --------------------------------------------------------------------------------- what it loads
def pairs_of(
    kernel: Product, own: Pointwise, part: Part | None, loads: Sequence[Node], simplify: Simplifier
) -> tuple[int, frozenset[Node]] | None:
    """How far the columns of a pair are apart (0: there are no pairs), and which loads of a result
    are of the partner of the element that a loop computes. The others are of the element itself.
    None where some are of neither."""
    if len({load_of(n).index for n in loads}) == 1:
        return 0, frozenset()
    columns = extent(own.vars[-1])
    small = isinstance(kernel.how, Cut) and not kernel.how.is_large
    if not small or not isinstance(columns, int):
        return None
    for half in [kernel.half] if kernel.half else _distances(loads):
        if columns % (2 * half) == 0:
            sides = _sides(half, own.vars[-1], part or Part(0, columns, columns))
            partners = _partners(half, own, sides, loads, simplify)
            if partners is not None:
                return half, partners
    return None


def of_partner(own: Pointwise, half: int) -> Node:
    """What a result holds where the partner of an element is."""
    j = own.vars[-1]
    body = substitute_vars(own.body, {atom_of(j): j + half - j // half % 2 * (2 * half)})

    def swapped(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op == "load" and load_of(n).buf in _SWAPPED:
            return node("load", args, Load(_SWAPPED[load_of(n).buf], ()), n.dtype)
        return with_args(n, args)

    return rewrite(body, swapped)


def _distances(loads: Sequence[Node]) -> list[int]:
    """How far columns of a pair may be apart, by what is loaded."""
    first, *others = dict.fromkeys(load_of(n).index for n in loads)
    found: dict[int, None] = {}
    for index in others:
        moved = [a - b for a, b in zip(index, first, strict=True) if a != b]
        if len(moved) == 1:
            found[abs(moved[0]) if isinstance(moved[0], int) else 1] = None
    return list(found)


def _sides(half: int, j: Expr, part: Part) -> list[tuple[Size, Size]]:
    """The columns of a part that are the first of pairs, and the others, each with its partner,
    over new variables; a part may have one of the two alone. Nothing where it has some of
    either."""

    def some(name: str, n: int) -> Size:
        return symbol(name, extent=n) if n > 1 else 0

    def columns(side: int) -> Size:
        return at + side * half

    pair = 2 * half
    if part.period % pair or part.first % half:
        return []
    within = some("within", half)
    block = some("block", _n_of(j) // part.period) * part.period
    if part.first % pair == 0 and part.length % pair == 0:
        at = block + part.first + some("group", part.length // pair) * pair + within
        return [(columns(0), columns(1)), (columns(1), columns(0))]
    if part.length == half:
        at, side = block + part.first // pair * pair + within, part.first // half % 2
        return [(columns(side), columns(1 - side))]
    return []


def _partners(
    half: int, own: Pointwise, sides: Sequence[tuple[Size, Size]], loads: Sequence[Node],
    simplify: Simplifier,
) -> frozenset[Node] | None:  # fmt: skip
    """The loads of partners; None where one is of neither, under the condition it is loaded by."""
    j = atom_of(own.vars[-1])
    found = set()
    for n in loads:
        kinds = set()
        for itself, partner in sides:
            masked = load_of(n).masked
            if masked and _is_false(simplify(substitute_vars(n.args[-1], {j: itself}))):
                continue
            index = _at(load_of(n).index, j, itself)
            if index == _at(own.index or (), j, itself):
                kinds.add(False)
            elif index == _at(own.index or (), j, partner):
                kinds.add(True)
            else:
                return None
        if len(kinds) > 1:
            return None
        if True in kinds:
            found.add(n)
    return frozenset(found) if sides else None


def _at(index: Sequence[Size], j: Atom, column: Size) -> tuple[Size, ...]:
    return tuple(substitute(e, {j: column}) for e in index)


def _is_false(n: Node) -> bool:
    return n.op == "const" and not n.attr
