"""Products of matrices that a program writes as an elementwise product and its sum, or mean, as
products.

`(a[:, :, None] * b[:, None]).sum(-1)` multiplies rows of a by rows of b: a varies along dimensions
where b is spread, b along others, and both along those of the sum. A loop reads both operands for
each number that it adds; the vendor's product reads them once a tile. Gradients of such programs
look the same, with `expand` in front. What is left alone: where one operand has few rows, which is
as fast as memory is; where a product is less exact than the sum (TF32); an elementwise product that
something else reads, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.compat import precision
from plait.devices import Facts, facts_of
from plait.graph.conv_cost import hint
from plait.graph.edit import aten, insert, insert_like, replace, same_size, value_of
from plait.graph.memory_format import laid_out_as
from plait.graph.streams import stream_of

_HALF = (torch.float16, torch.bfloat16)


LEAST_SIDE = 8
"""Rows and columns of a product: of fewer a loop is as fast as memory is."""
MOST_DEPTH = 4096
"""Terms of a sum in float32: a loop adds up more of them more exactly than a product does."""
MARGIN = 1.5
"""How much sooner a product must be."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """What sums of products take.

    loop: elementwise products that a loop adds up in a nanosecond
    product: that the vendor's product does
    moved: bytes that a copy reads and writes in one
    call_ns: what a product or a copy costs by being there
    """

    loop: float
    product: float
    moved: float
    call_ns: float


# The state space models of the suite: loops of one of them take 30 ms of a training step
# (benchmarks/results/suite-h200.md), on one core 0.5 to 12 products a nanosecond.
_GPU = _Rates(loop=800.0, product=12000.0, moved=2000.0, call_ns=2500.0)
_CORE = _Rates(loop=6.0, product=40.0, moved=8.0, call_ns=1500.0)


@dataclass(frozen=True, slots=True)
class _Product:
    """A sum of products of two operands, and what its dimensions are.

    node: the sum, or mean. factors: the operands. made: the elementwise product's fake value
    compute: the dtype that the product is computed in
    batch, rows, columns, depth: dimensions along which both operands vary, only the first, only the
        second; both, and the sum adds them up. The others have one element.
    """

    node: Node
    factors: tuple[Node, Node]
    made: torch.Tensor
    compute: torch.dtype
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    count: int = 1

    def sizes(self, dims: tuple[int, ...]) -> list[Any]:
        """The sizes of these dimensions."""
        return [self.made.shape[d] for d in dims]


def find_products(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many sums are products from now on."""
    targets = (aten.sum.dim_IntList, aten.mean.dim)
    sums = [n for t in targets for n in gm.graph.find_nodes(op="call_function", target=t)]
    found = [p for p in map(_product, sums) if p is not None and _pays(p)]
    found = [p for p in found if p.compute != torch.float32 or _is_exact(facts_of(p.made.device))]
    for p in found:
        _replace(p)
    return len(found)


# ----------------------------------------------------------------------------------- what it finds
def _product(node: Node) -> _Product | None:
    """What a sum is a product of; None where it is none."""
    product = _summed(node)
    if product is None or stream_of(product) != stream_of(node):
        return None
    a, b = product.args
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    made, compute = value_of(product), _compute_dtype(value_of(product), value_of(node))
    if compute is None:
        return None
    along = [_varying(x, made) for x in (a, b)]
    summed = _dims(node, made.dim())
    count = prod(made.shape[d] for d in summed) if node.target is aten.mean.dim else 1
    if not _divides(count, compute):
        return None
    if along[0] is None or along[1] is None:
        return None
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for d, n in enumerate(made.shape):
        if not (type(n) is int and n == 1):
            kinds.setdefault((d in along[0], d in along[1], d in summed), []).append(d)
    depth, batch = kinds.pop((True, True, True), []), kinds.pop((True, True, False), [])
    rows, columns = kinds.pop((True, False, False), []), kinds.pop((False, True, False), [])
    if kinds or not depth or not rows or not columns:
        return None
    if rows[-1] > columns[-1]:  # the result lies as the sum does, if it can
        a, b, rows, columns = b, a, columns, rows
    for dims in (batch + rows + columns, depth):
        if sum(type(made.shape[d]) is not int for d in dims) > 1:
            return None  # a view finds one size by itself
    parts = (tuple(batch), tuple(rows), tuple(columns), tuple(depth))
    return _Product(node, (a, b), made, compute, *parts, count)


def _divides(count: Any, compute: torch.dtype) -> bool:
    """Whether a sum of this dtype is divided by a count as exactly as a mean is, which rounds once:
    by powers of two in half precision."""
    return type(count) is int and (compute not in _HALF or count & (count - 1) == 0)


def _summed(node: Node) -> Node | None:
    """The elementwise product that a sum alone reads, perhaps in a wider type."""
    x = node.args[0]
    if isinstance(x, Node) and x.target is aten._to_copy.default and len(x.users) == 1:
        source, made = x.args[0], value_of(x)
        if isinstance(source, Node) and _is_wider(made, value_of(source)):
            x = source
    found = isinstance(x, Node) and x.target is aten.mul.Tensor and len(x.users) == 1
    return x if found else None  # type: ignore[return-value]


def _is_wider(made: torch.Tensor, source: torch.Tensor) -> bool:
    floats = made.dtype.is_floating_point and source.dtype.is_floating_point
    return floats and made.device == source.device and made.dtype.itemsize > source.dtype.itemsize


def _compute_dtype(made: torch.Tensor, result: torch.Tensor) -> torch.dtype | None:
    """The dtype in which a product gives the sum of `made` as `result` no less exactly, in float32
    if `_is_exact`; None where there is none."""
    if made.layout != torch.strided or not made.dtype.is_floating_point:
        return None
    wide = made.dtype in (torch.float32, torch.float64) or made.dtype in _HALF
    narrows = result.dtype != made.dtype and not _is_wider(result, made)
    if not wide or narrows or not (result.dtype in _HALF or result.dtype.itemsize >= 4):
        return None
    facts = facts_of(made.device)
    if facts.streams and torch.are_deterministic_algorithms_enabled():
        return None  # eager's sum needs no workspace of a fixed size
    # Of bfloat16 the library of a GPU has the range; elsewhere and of float16 it may round within.
    if result.dtype == torch.bfloat16 and facts.streams:
        return torch.bfloat16
    return torch.float32 if result.dtype in _HALF else result.dtype


def _is_exact(facts: Facts) -> bool:
    """Whether products of float32 are computed in float32: flags, off by default, let libraries
    round factors, which no sum does."""
    of_gpu: Any = torch.backends.cuda.matmul
    how = of_gpu.fp32_precision if facts.streams else precision.of_host("matmul")
    return how in ("ieee", "none")


def _varying(x: Node, made: torch.Tensor) -> set[int] | None:
    """Along which of a product's dimensions an operand varies; None where it cannot be told."""
    value, found = value_of(x), set()
    if not isinstance(value, torch.Tensor) or value.device != made.device:
        return None
    first = made.dim() - value.dim()
    for d, (n, step) in enumerate(zip(value.shape, value.stride(), strict=True), first):
        if (type(n) is int and n == 1) or (type(step) is int and step == 0):
            continue
        if not same_size(n, made.shape[d]):
            return None
        found.add(d)
    return found


def _dims(node: Node, rank: int) -> set[int]:
    """The dimensions that a sum adds up."""
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return {d % rank for d in dims} if dims else set(range(rank))


# -------------------------------------------------------------------------------------------- cost
def _pays(p: _Product) -> bool:
    """Whether a product takes less time than a loop, with the copies that it needs."""
    rates = _GPU if facts_of(p.made.device).streams else _CORE
    batch, rows, columns, depth = (
        prod(map(hint, p.sizes(dims))) for dims in (p.batch, p.rows, p.columns, p.depth)
    )
    if min(rows, columns) < LEAST_SIDE:
        return False
    if depth > MOST_DEPTH and p.compute != torch.float64:
        return False
    products = batch * rows * columns * depth
    copies = [
        batch * depth * n
        for x, n, dims in zip(p.factors, (rows, columns), (p.rows, p.columns), strict=True)
        if not _lies_as_matrix(p, x, dims)
    ]
    if sorted(dims := (*p.batch, *p.rows, *p.columns)) != [*dims]:
        copies.append(batch * rows * columns)
    moved = 2 * sum(copies) * p.compute.itemsize
    called = rates.call_ns * (1 + len(copies)) + products / rates.product + moved / rates.moved
    return products / rates.loop > MARGIN * called


def _lies_as_matrix(p: _Product, x: Node, own: tuple[int, ...]) -> bool:
    """Whether an operand can be seen as matrices with rows or columns of neighbours."""
    value = value_of(x)
    first = p.made.dim() - value.dim()
    step = {d: hint(value.stride(d - first)) for d in (*p.batch, *own, *p.depth)}
    nested = all(
        step[outer] == step[inner] * hint(p.made.shape[inner])
        for dims in (p.batch, own, p.depth)
        for outer, inner in pairwise(dims)
    )
    return nested and 1 in (step[own[-1]], step[p.depth[-1]]) and value.dtype == p.compute


# ---------------------------------------------------------------------------------- what it writes
def _replace(p: _Product) -> None:
    node, (a, b) = p.node, p.factors
    left, right = _matrix(p, a, p.rows, p.depth), _matrix(p, b, p.depth, p.columns)
    made = insert(node, left, aten.bmm.default if p.batch else aten.mm.default, right)
    if p.count != 1:
        made = insert(node, made, aten.div.Tensor, p.count)
    if p.compute != value_of(node).dtype:
        made = insert(node, made, aten._to_copy.default, dtype=value_of(node).dtype)
    dims = (*p.batch, *p.rows, *p.columns)
    made = _reshaped(node, made, p.sizes(dims))
    made = _as_summed(p, made, dims)
    replace(node, laid_out_as(node, made, value_of(node)))


def _matrix(p: _Product, x: Node, rows: tuple[int, ...], columns: tuple[int, ...]) -> Node:
    """An operand as one matrix, or a batch of them."""
    before, value = p.node, value_of(x)
    first = p.made.dim() - value.dim()
    dims = [d - first for d in (*p.batch, *rows, *columns)]
    for d in set(range(value.dim())) - set(dims):  # spread, or of one element
        if value.shape[d] != 1:
            x = insert(before, x, aten.slice.Tensor, d, 0, 1)
    rest = sorted(set(range(value.dim())) - set(dims))
    x = insert(before, x, aten.permute.default, [*dims, *rest])
    if value.dtype != p.compute:
        x = insert(before, x, aten._to_copy.default, dtype=p.compute)
    batch = [prod(p.sizes(p.batch))] if p.batch else []
    return _reshaped(before, x, [*batch, prod(p.sizes(rows)), prod(p.sizes(columns))])


def _as_summed(p: _Product, made: Node, dims: tuple[int, ...]) -> Node:
    """The result's dimensions in the order of the sum's."""
    node = p.node
    kept = value_of(node).dim() == p.made.dim()
    gone = set() if kept else _dims(node, p.made.dim())
    order = [d for d in range(p.made.dim()) if d not in gone]
    made = insert(node, made, aten.permute.default, sorted(range(len(dims)), key=lambda k: dims[k]))
    for k, d in enumerate(order):
        if d not in dims:
            made = insert(node, made, aten.unsqueeze.default, k)
    return made


def _reshaped(before: Node, x: Node, sizes: list[Any]) -> Node:
    """x in other sizes, of which one may be symbolic."""
    given = [n if type(n) is int else -1 for n in sizes]
    if given == sizes:
        return insert(before, x, aten.reshape.default, given)
    return insert_like(before, value_of(x).new_empty(sizes), aten.reshape.default, x, given)
