"""What things cost: bytes and cycles from loop bodies, as numbers to decide with and as estimates of a kernel's time.

Sizes may be symbolic: decisions use `hint`, which puts what the program's hints say, or else a plausible
number, in place of every symbol; work_ns stays symbolic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeAlias

from plait.ir.loops import Buffer, Node, index_exprs
from plait.ir.sizes import Atom, Expr, Size, add, evaluate, floordiv, free_symbols, mul, numel
from plait.schedule.deps import extent, load_of, node_cost

Hints: TypeAlias = Mapping[str, int]  # LoopProgram.hints

HINT = 64  # what a size without a hint is taken to be
DRAM_BYTES_A_NS = 8.0  # one core, cold
CACHE_BYTES_A_NS = 20.0  # one core, from a shared cache
CACHE_BYTES = 1 << 20
CYCLES_A_NS = 10.0  # the op table counts for narrow vectors, wide ones do three times as much


def hint(e: Size, hints: Hints) -> int:
    """A plausible value of a size."""
    if isinstance(e, int):
        return e
    return evaluate(e, {a.name: _hint_of(a, hints) for a in free_symbols(e)})


def _hint_of(a: Atom, hints: Hints) -> int:
    if a.extent is not None:
        return max(hint(a.extent, hints) - 1, 0)
    low = a.lo if a.lo > float("-inf") else 0
    return int(min(max(low, hints.get(a.name, HINT)), a.hi))


def hint_numel(shape: Iterable[Size], hints: Hints) -> int:
    """A plausible number of elements of a shape."""
    out = 1
    for s in shape:
        out *= max(hint(s, hints), 0)
    return out


def buffer_nbytes(b: Buffer, hints: Hints) -> int:
    """A plausible size in bytes of what a buffer holds."""
    return hint_numel(b.shape, hints) * b.dtype.nbytes


def moved_ns(nbytes: float) -> float:
    """Nanoseconds that one core takes to read or write so many bytes."""
    return nbytes / (CACHE_BYTES_A_NS if nbytes <= CACHE_BYTES else DRAM_BYTES_A_NS)


def evaluations(vars_: Sequence[Expr], load: Node, hints: Hints) -> int:
    """How often the value behind a load is needed in a loop over vars: values that do not depend on inner variables are
    made once outside."""
    if load.args:
        return hint_numel(map(extent, vars_), hints)
    used = {a for e in index_exprs(load) if not isinstance(e, int) for a in free_symbols(e)}
    last = max((k for k, v in enumerate(vars_) if v.symbol in used), default=-1)
    return hint_numel(map(extent, vars_[: last + 1]), hints)


def kernel_work_ns(
    vars_: Sequence[Expr],
    rvars: Sequence[Expr],
    nodes: Sequence[Node],
    inner: Set[Node],
    args: Sequence[Buffer],
    hints: Hints,
) -> Size:
    """An estimate of a kernel's time on one core: the larger of moving its bytes and of its arithmetic. inner: nodes at
    full level."""
    outer = numel(extent(v) for v in vars_)
    full = mul(outer, numel(extent(v) for v in rvars))
    full_cycles = sum(node_cost(n) for n in nodes if n in inner or not rvars)
    outer_cycles = sum(node_cost(n) for n in nodes if n not in inner and rvars)
    outer_only = {load_of(n).buf for n in nodes if n.op == "load" and n not in inner}
    points = max(hint(full, hints), 1)
    touched = sum(min(buffer_nbytes(b, hints), points * b.dtype.nbytes) for b in args)
    speed = CACHE_BYTES_A_NS if touched <= CACHE_BYTES else DRAM_BYTES_A_NS
    moved = sum(b.dtype.nbytes for b in args if not rvars or b.name not in outer_only)
    # Thousandths of a nanosecond a point, so that the estimate stays an integer expression.
    per_point = round(1000 * max(full_cycles / CYCLES_A_NS, moved / speed))
    per_outer = round(1000 * outer_cycles / CYCLES_A_NS)
    return floordiv(add(mul(full, per_point), mul(outer, per_outer)), 1000)
