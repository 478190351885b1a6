"""Values of nodes as C++: a rule an op.

Loads have a file of their own (`loads.py`). Every rule is given a node whose arguments are known,
and says what defines its variables.
"""

from __future__ import annotations

from plait.ir.checks import Bound
from plait.ir.dtypes import i32, i64
from plait.ir.expr import Expr
from plait.ir.loops import Node, check_of, const, node
from plait.kernel.cpu.expr import (
    Parts,
    ctype,
    literal,
    mask_from,
    mask_part,
    scalar_cast,
    scalar_op,
    vector_bitcast,
    vector_cast,
    vector_node,
    vtype,
)
from plait.kernel.cpu.lanes import lane_values
from plait.kernel.cpu.loads import keep, load, read_kept
from plait.kernel.cpu.values import Compute, Values


def compute(v: Values, n: Node) -> Parts:
    """The value of a node whose arguments are known, as new variables."""
    if v.is_kept(n):
        return read_kept(v, n)
    parts = RULES.get(n.op, _elementwise)(v, n)
    if n in v.nest.kept and v.nest.kept[n].by == v.pass_number:
        keep(v, n, parts)
    return parts


def _elementwise(v: Values, n: Node) -> Parts:
    """An op of the table."""
    if not v.is_vector(n):
        return (v.define(ctype(n.dtype), _scalar(v, n), v.depth(n)),)
    return v.define_parts(n.dtype, _vector(v, n), v.depth(n))


def _const(v: Values, n: Node) -> Parts:
    assert isinstance(n.attr, (bool, int, float)), n
    return (literal(n.attr, n.dtype),)


def _acc(v: Values, n: Node) -> Parts:
    """The present value of an accumulator; a running one is copied, because it goes on
    changing."""
    assert isinstance(n.attr, str), n
    vector = v.is_vector(n)
    parts = v.acc_values[n.attr, v.rep if vector else 0]
    type_ = vtype(n.dtype) if vector else ctype(n.dtype)
    return tuple(v.define(type_, p, v.depth(n)) for p in parts)


def _scalar(v: Values, n: Node) -> str:
    args = tuple(v.get(a)[0] for a in n.args)
    if n.op == "cast":
        return scalar_cast(args[0], n.args[0].dtype, n.dtype)
    if n.op == "bitcast":
        return f"__builtin_bit_cast({ctype(n.dtype)}, {args[0]})"
    return scalar_op(n.op, n.args[-1].dtype, args, n.dtype)


def _vector(v: Values, n: Node) -> Parts:
    mask = _lanes_below(v, n)
    if mask is not None:
        return (mask,)
    if n.op == "philox" and isinstance(n.args[2].attr, int):
        return _philox(v, n, n.args[2].attr)
    args = tuple(v.vector(a) for a in n.args)
    if n.op == "cast":
        return vector_cast(args[0], n.args[0].dtype, n.dtype)
    if n.op == "bitcast":
        return vector_bitcast(args[0], n.dtype)
    return vector_node(n, args)


def _lanes_below(v: Values, n: Node) -> str | None:
    """A comparison of positions that is true for the first lanes only or for the last only."""
    found = v.facts.first_lanes(n)
    if found is None:
        return None
    first, step = found
    if step == -1:
        return f"lanes_below({v.integer(first)}{v.rep_offset(-1)})"
    return f"~lanes_below(1 - ({v.integer(first)}{v.rep_offset(1)}))"


def _philox(v: Values, n: Node, word: int) -> Parts:
    """One word of a block of four, which other words of the same block share."""
    seed, counter, depth = n.args[0], n.args[1], v.depth(n)
    block = word >> 2
    memo, key = v.chain[depth].memo, ("philox", seed, counter, block, v.rep)
    if key not in memo:
        pairs = zip(v.vector(seed), v.vector(counter), strict=True)
        memo[key] = tuple(
            v.define("vphilox", f"v_philox4({s}, {c}, splat_i64({block}l))", depth)
            for s, c in pairs
        )
    return tuple(f"{p}.word[{word & 3}]" for p in memo[key])


def _bounded(v: Values, n: Node) -> Parts:
    """The run-time check of an index: outside [0, size) the kernel fails and the value is 0."""
    assert isinstance(n.attr, Bound), n
    depth, size = v.depth(n), v.integer(n.attr.size)
    if not v.is_vector(n):
        x = v.get(n.args[0])[0]
        bad = v.define("bool", f"(u64){x} >= (u64)({size})", depth)
        _fail_if(v, n, bad)
        return (v.define("i64", f"{bad} ? 0 : {x}", depth),)
    if v.facts.is_short(n):
        assert isinstance(n.attr.size, int), n
        return _bounded_short(v, n, n.attr.size)
    lanes = v.vector(n.args[0])
    limit = v.define("vu64", f"splat_u64((u64)({size}))", depth)
    bads = tuple(f"((vu64){p} >= {limit})" for p in lanes)
    bad_lanes = v.define("vi32", mask_from(bads, n.dtype), depth)
    _fail_if(v, n, bad_lanes)
    zero = "(vi64){}"
    return v.define_parts(
        n.dtype,
        tuple(f"{mask_part(bad_lanes, n.dtype, k)} ? {zero} : {p}" for k, p in enumerate(lanes)),
        depth,
    )


def _bounded_short(v: Values, n: Node, size: int) -> Parts:
    """The check in 32 bits: narrowing saturates, so what is outside stays outside."""
    depth = v.depth(n)
    x = _unwrapped(n.args[0], size)
    low, high = v.vector(n.args[0] if x is None else x)
    at = v.define("vi32", f"sat_i32({low}, {high})", depth)
    if x is not None:
        at = v.define("vi32", f"{at} < 0 ? {at} + {size} : {at}", depth)
    bad = v.define("vi32", f"(vi32)((vu32){at} >= {size}u)", depth)
    _fail_if(v, n, bad)
    good = v.define("vi32", f"{at} & ~{bad}", depth)
    v.chain[depth].memo["short", n, v.rep] = (good,)
    return v.define_parts(n.dtype, vector_cast((good,), i32, i64), depth)


def _nonzero(v: Values, n: Node) -> Parts:
    """The run-time check of a divisor; the value stays what it is, since dividing by 0 gives 0
    here."""
    parts = v.get(n.args[0])
    if not v.is_vector(n):
        _fail_if(v, n, f"{parts[0]} == 0")
        return parts
    parts = v.vector(n.args[0])
    zeros = mask_from(tuple(f"({p} == 0)" for p in parts), n.dtype)
    _fail_if(v, n, zeros)
    return parts


def _fail_if(v: Values, n: Node, bad: str) -> None:
    """Reports n's check where `bad` holds: a bool, or a vi32 mask of lanes if n is a vector."""
    check = check_of(n)
    assert check is not None, n
    depth, report = v.depth(n), f"return {v.checks[check]};"
    if not v.is_vector(n):
        also = f" && {v.get(n.args[1])[0]}" if len(n.args) > 1 else ""
        v.line(f"if ({bad}{also}) {report}", depth)
        return
    also = f" & {v.vector(n.args[1])[0]}" if len(n.args) > 1 else ""
    v.line(f"if (any({bad}{also}{' & lm' if v.tail else ''})) {report}", depth)


def _index(v: Values, n: Node) -> Parts:
    e = n.attr
    assert isinstance(e, (int, Expr)), e
    depth = v.depth(n)
    if not v.is_vector(n):
        return (v.define("i64", v.integer(e), depth),)
    step = v.facts.step(e)
    if step is None:
        return lane_values(v, e)
    first = v.define("i64", f"{v.integer(e)}{v.rep_offset(step)}", depth)
    c = v.integer(step)
    return v.define_parts(n.dtype, (f"iota_lo({first}, {c})", f"iota_hi({first}, {c})"), depth)


def _unwrapped(w: Node, size: int) -> Node | None:
    """x where w is `x + size if x < 0 else x`: an index that may count from the end."""
    if w.op != "where":
        return None
    x, end = w.args[2], const(size, i64)
    sums = (node("add", (x, end)), node("add", (end, x)))
    return x if w.args[0] == node("lt", (x, const(0, i64))) and w.args[1] in sums else None


RULES: dict[str, Compute] = {
    "const": _const, "acc": _acc, "load": load, "index": _index, "bounded": _bounded,
    "nonzero": _nonzero,
}  # fmt: skip
