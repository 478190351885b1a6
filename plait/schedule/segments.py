"""A group as part of one with longer rows: it gives a result for each segment of these, such as the
scale of each block of a row that a norm has made, or a byte for each pair of codes.

Comes in: a group. Goes out: the same over all points of its segments. Whether these are segments of
the other group's rows, the caller finds out by aligning both.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from plait.ir.dtypes import b1
from plait.ir.expr import Expr, Size, atom_of, free_symbols
from plait.ir.loops import Pointwise, Reduction
from plait.schedule.align import Alignment, Fresh, Index
from plait.schedule.deps import Bodies, extent, load_of, roots
from plait.schedule.group import Group, Member
from plait.schedule.plan import SEGMENTED, segment_axes

_LONGEST = 256  # points of a segment: few enough for the threads of a warp or two
_MOST_PICKED = 8  # points of one that are loaded one by one


@dataclass(frozen=True)
class Segments:
    """A group without reduced axes.

    group: over all points.
    inside: its variables inside of a segment, which has so many points.
    ties: places at which it loads what the other group makes, and at which that makes it.
    """

    group: Group
    inside: tuple[Expr, ...]
    points: int
    ties: tuple[tuple[Index, Index], ...] = ()

    def fit(self, found: Alignment) -> bool:
        """Whether they are segments of the reduced axes that were found."""
        last = segment_axes(found.space.rvars, self.points)
        if last is None:
            return False
        mine = {a for v in self.inside for a in free_symbols(found.guest.get(atom_of(v), v))}
        return mine == {*map(atom_of, last)}


def segments_of(group: Group, rows: Group, bodies: Bodies, fresh: Fresh) -> Segments | None:
    """A group as one of segments of the rows that another has, or None."""
    if group.rvars:
        return _reduced(group)
    made = {name: (m, at) for m in rows.members if m.full for name, at in m.stored}
    places: dict[str, dict[Index, None]] = {}
    whole_numbers = True
    for m in group.members:
        if m.segment or not isinstance(m.loop, Pointwise) or m.loop.index is not None:
            return None
        for n in (n for n in bodies.of(roots(m.loop)).loads if load_of(n).buf in made):
            if n.args:
                return None
            places.setdefault(load_of(n).buf, {})[m.at(load_of(n).index)] = None
            whole_numbers = whole_numbers and n.dtype.kind in "iu"
    several = {name: [*found] for name, found in places.items() if len(found) > 1}
    if not several:
        return _shared(group, {made[name][0].segment for name in places}, fresh)
    at = {name: index for name, (_, index) in made.items()}
    return _picked(group, several, at, fresh) if whole_numbers else None


def _reduced(group: Group) -> Segments | None:
    """Its reduced axes are those inside of segments."""
    points: Size = 1
    for r in group.rvars:
        points = points * extent(r)
    if not isinstance(points, int) or points > _LONGEST or points & (points - 1):
        return None
    members: list[Member] = []
    for m in group.members:
        loop = m.loop
        plain = isinstance(loop, Pointwise) and loop.index is None
        reduces = isinstance(loop, Reduction) and loop.kind in SEGMENTED and loop.body.dtype != b1
        if m.parts or m.segment or not (plain or reduces):
            return None
        members.append(m if m.full else replace(m, full=True, segment=points))
    whole = Group(group.name, group.vars + group.rvars, (), members)
    return Segments(whole, group.rvars, points)


def _shared(group: Group, segments: Set[int], fresh: Fresh) -> Segments | None:
    """What it loads is made for segments."""
    if len(segments) != 1 or 0 in segments:
        return None
    (points,) = segments
    inside = fresh(points)
    members = [replace(m, full=True, segment=points) for m in group.members]
    return Segments(Group(group.name, (*group.vars, inside), (), members), (inside,), points)


def _picked(
    group: Group, places: Mapping[str, list[Index]], made: Mapping[str, Index], fresh: Fresh
) -> Segments | None:
    """It loads some values that lie side by side at one point. places: of what the other makes."""
    counts = {len(found) for found in places.values()}
    points = max(counts)
    if len(counts) != 1 or points > _MOST_PICKED or points & (points - 1):
        return None
    within = fresh(points)
    ties = []
    for name, found in places.items():
        first = _first_of(found)
        if first is None:
            return None
        ties.append((made[name], (*first[:-1], first[-1] + within)))
    members = [replace(m, full=True, segment=points, within=within) for m in group.members]
    whole = Group(group.name, (*group.vars, within), (), members)
    return Segments(whole, (within,), points, tuple(ties))


def _first_of(places: list[Index]) -> Index | None:
    """The first of places that lie side by side along the last dimension."""
    for first in places:
        along = {(*first[:-1], first[-1] + k) for k in range(len(places))}
        if first and along == {*places}:
            return first
    return None
