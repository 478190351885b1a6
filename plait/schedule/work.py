"""How long a kernel takes: cycles of its arithmetic, loads and stores, each as often as it is
executed.

The constants are those of a core with AVX-512 whose data lies in its caches; the estimate decides
how many threads a launch is worth, and is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.devices import DEVICES
from plait.ir.expr import Atom, Expr, Size, coefficient, free_symbols, numel, total
from plait.ir.layouts import flat_index
from plait.ir.loops import Buffer, Node, index_exprs
from plait.ir.ops import OPS
from plait.ir.reductions import REDUCTIONS
from plait.schedule.deps import extent, load_of, node_cost
from plait.schedule.plan import Reduce, Stmt

CPU = DEVICES["cpu"].rates
# Fitted with devices._CORE to the measured times of 412 kernels of models and of
# benchmarks/kernel_cases.py, on one core with AVX-512: 85 % of estimates are within 2 x.
# Cycles of an element that is not next to its neighbour in the same vector.
INDIRECT, INDIRECT_STORE = 4.0, 15.0  # its position is data
TURNED, TURNED_STORE = 2.0, 6.0  # contiguous along another axis
STRIDED, STRIDED_STORE = 7.0, 10.0
MASKED_STRIDED = 35.0
DIVIDED = 15.0  # its position is a quotient or remainder
# Cycles of a point of a scan besides its value, and of bringing a row to one result.
RUNNING = 7.0
ROW = 100.0


def kernel_work_ns(
    vars_: Sequence[Expr],
    rvars: Sequence[Expr],
    stmts: Sequence[Stmt],
    nodes: Sequence[Node],
    buffers: Mapping[str, Buffer],
) -> Size:
    """An estimate of a kernel's time on one core. nodes: all of the statements', arguments
    first."""
    axes = [a for v in (*vars_, *rvars) if (a := v.symbol) is not None]
    place = {a: k for k, a in enumerate(axes, 1)}
    running = {s.name for s in stmts if isinstance(s, Reduce) and s.inner}
    cycles = [0.0] * (len(axes) + 1)  # by the number of axes inside of which it is spent
    depth: dict[Node, int] = {}
    known: dict[object, float] = {}  # most of what a kernel touches lies alike
    for n in nodes:
        deepest = max([depth[a] for a in n.args]) if n.args else 0
        for e in index_exprs(n):
            deepest = max((deepest, *[place.get(a, 0) for a in free_symbols(e)]))
        if n.op == "acc":
            deepest = len(axes) if n.attr in running else len(vars_)
        depth[n] = deepest
        if n.op == "load":
            load = load_of(n)
            indirect = len(n.args) > load.masked
            other = INDIRECT if indirect else MASKED_STRIDED if load.masked else STRIDED
            b = buffers[load.buf]
            key = b.dtype, b.strides, load.index, indirect, other
            if key not in known:
                known[key] = _access(b, load.index, axes, axes, indirect, (TURNED, other))
            cycles[deepest] += known[key]
        else:
            wide = max(1, n.args[0].dtype.nbytes // 4) if n.op in OPS and n.args else 1
            cycles[deepest] += wide * node_cost(n)
    for s in stmts:
        if isinstance(s, Reduce):
            cycles[-1] += RUNNING if s.inner else REDUCTIONS[s.kind].cycles
            cycles[len(vars_)] += ROW
        else:
            inside = axes if s.full else axes[: len(vars_)]
            indirect = bool(s.index_args) or s.atomic
            other = INDIRECT_STORE if indirect else STRIDED_STORE
            cycles[len(inside)] += _access(
                buffers[s.buf], s.index, inside, axes, indirect, (TURNED_STORE, other)
            )
    # Thousandths of a nanosecond, so that the estimate stays an integer expression.
    sizes = [extent(v) for v in (*vars_, *rvars)]
    spent = [numel(sizes[:k]) * round(1000 * c / CPU.cycles_a_ns) for k, c in enumerate(cycles)]
    return total(spent) // 1000


def _access(
    b: Buffer, index: tuple[Size, ...], inside: Sequence[Atom], axes: Sequence[Atom],
    indirect: bool, apart: tuple[float, float],
) -> float:  # fmt: skip
    """Cycles of one element. apart: where it is contiguous along another axis than the last of
    `inside`, or along none."""
    flat = flat_index(b, index)
    stride = coefficient(flat, inside[-1]) if inside and not indirect else 0
    if not indirect and stride in (0, 1):
        return b.dtype.nbytes * CPU.cycles_a_ns / CPU.cache_bytes_a_ns
    if stride is None:
        return DIVIDED
    turned = not indirect and any(coefficient(flat, a) == 1 for a in axes)
    return apart[0] if turned else apart[1]
