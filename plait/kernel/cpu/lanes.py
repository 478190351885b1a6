"""Vectors lane by lane: indices as text, values in memory, loops over lanes.

A lane's number is LANE in the text of an index, and k in a loop.
"""

from __future__ import annotations

from plait.ir.dtypes import b1, i64
from plait.ir.expr import Atom, Size
from plait.ir.loops import Load, Node
from plait.kernel.cpu.expr import Parts, memory
from plait.kernel.cpu.values import Values, atom_text
from plait.schedule.legalize.linear import offset_of


def lane_values(v: Values, e: Size) -> Parts:
    """An integer expression that is no affine function of the lane, as i64 lanes."""
    depth = v.place.level(e)
    array = v.name("g")
    text = _lane_text(v, e)
    v.line(f"alignas(64) i64 {array}[{v.lanes}];", depth)
    v.line(f"for (i64 k = 0; k < {v.lanes}; ++k) {array}[k] = {text.replace('LANE', 'k')};", depth)
    return v.define_parts(
        i64, tuple(f"ld_i64({array} + {k * v.lanes // 2})" for k in range(2)), depth
    )


def lane_loop(v: Values, unrolled: bool = False) -> str:
    """A loop over the lanes of the present vector. unrolled: what it does is short."""
    unroll = f'_Pragma("GCC unroll {v.lanes}") ' if unrolled and not v.tail else ""
    return f"{unroll}for (i64 k = 0; k < {'n' if v.tail else v.lanes}; ++k) "


def lane_guard(v: Values, mask: Node | None, depth: int) -> str:
    """The test of a mask at lane k."""
    if mask is None:
        return ""
    if not v.is_vector(mask):
        return f"if ({v.get(mask)[0]}) "
    return f"if ({lane_array(v, mask, depth)}[k]) "


def lane_array(v: Values, n: Node, depth: int) -> str:
    """A vector value in memory, to be read lane by lane: spilled into an array, unless it was
    loaded as it is."""
    memo = v.chain[depth].memo
    key = ("lanes", n, v.rep)
    if key not in memo and (found := _as_loaded(v, n)):
        memo[key] = (found,)
    elif key not in memo:
        parts = v.vector(n)
        t = "i32" if n.dtype == b1 else memory(n.dtype)
        array = v.name("g")
        v.line(f"alignas(64) {t} {array}[{v.lanes}];", depth)
        for k, p in enumerate(parts):
            v.line(f"st_{t}({array} + {k * v.lanes // 2}, {p});", depth)
        v.line(f"in_memory({array});", depth)
        memo[key] = (array,)
    return memo[key][0]


def _as_loaded(v: Values, n: Node) -> str | None:
    """Where memory holds the lanes of a value as they are."""
    x = v.facts.source(n)
    if x is None:
        return None
    assert isinstance(x.attr, Load), x
    v.get(n)  # its check comes first
    return f"({v.pointer(x.attr.buf, offset_of(x))}{v.rep_offset(1)})"


def lane_address(v: Values, buf: str, offset: Size) -> tuple[str, str]:
    """A pointer and the index from it of lane LANE."""
    fixed, moving = v.facts.parted(offset)
    return v.pointer(buf, fixed), _lane_text(v, moving)


def _lane_text(v: Values, e: Size) -> str:
    """e at lane LANE of the present vector, as C++ text."""
    if not v.facts.moves(e) or isinstance(e, int):
        return v.integer(e)
    parts = [f"{e.const}l"] if e.const else []
    for mono, c in e.terms:
        factors = [_lane_factor(v, a) for a in mono]
        parts.append("*".join((*factors, *((f"({c}l)",) if c != 1 else ()))))
    return f"({' + '.join(parts)})"


def _lane_factor(v: Values, a: Atom) -> str:
    e = a.expr
    if not v.facts.moves(e):
        return v.integer(e)
    if a == v.facts.axis:
        return f"({v.names[a]}{v.rep_offset(1)} + LANE)"
    if a.kind == "sym":
        node = v.nest.linear.indirect[a]
        return f"{lane_array(v, node, v.depth(node))}[LANE]"
    return f"({atom_text(a, _lane_text(v, a.a), _lane_text(v, a.b))})"
