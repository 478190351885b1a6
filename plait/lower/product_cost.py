"""Whether a kernel of ours computes a product on a GPU sooner than the vendor's library and the
kernel that this needs beside it.

A large one needs it where rows of the result start anywhere: the vendor writes others, which start
at multiples of 16 bytes, and that kernel copies them, or reads and finishes them. A product of few
operations takes as long as a kernel, so that one to finish it counts.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Node

from plait.graph.edit import base_of, is_view, value_of
from plait.ir.dtypes import DType, i8
from plait.lower.align_rows import ROW_NBYTES, leaves
from plait.lower.core import Lowering

# Measured on an H100 (benchmarks/products_gpu.py vocabulary).
_OUR_FLOPS_A_US, _VENDORS_FLOPS_A_US = 5.6e8, 6.8e8
_KERNEL_US = 1.5  # of one in a CUDA graph
_FEW_FLOPS, _MOST_DEPTH = 7e8, 4096
"""Up to which ours is about as fast as the vendor's alone: 128 x 3072 x 768 with gelu takes 5.2 us
instead of 6.7 (H200)."""
_FEW_CHEAP_FLOPS = 1.3e9
"""The same where it finishes by sums: 1024 x 768 x 768 with a residual takes 4.8 us instead of 6.6.
Programs are too few to hide much more: 256 x 3072 x 768 with gelu is the vendor's."""
_SHORT_FLOPS, _SHORT_DEPTH = 5e9, 1024
"""The same of short sums: 4096 x 768 x 768 takes 12.0 us instead of 13.6."""
_BRIEF_FLOPS, _BRIEF_ROWS = 2e10, 128
"""Up to which the device keeps its clock. Kernels of ours that take longer measure well and are
slow in a program, where it must spare power: 4096 x 6144 x 4096 takes 287 us instead of 270."""
_MOST_OPS = 24  # that are followed

aten = torch.ops.aten

_CHEAP = frozenset((
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.relu.default, aten._to_copy.default,
))  # fmt: skip
_PRODUCTS = frozenset((
    aten.mm.default, aten.addmm.default, aten._addmm_activation.default, aten.bmm.default,
    aten.baddbmm.default,
))  # fmt: skip
"""Operators that read what a kernel stored."""
_NORMS = frozenset((
    aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.var.correction,
    aten.native_layer_norm.default, aten._softmax.default, aten._log_softmax.default,
    aten.amax.default, aten.amin.default,
))  # fmt: skip
"""Operators whose kernels take in what is done to rows before."""


def pays(ctx: Lowering, dtype: DType, sizes: tuple[int, int, int], tunes: bool) -> bool:
    """Whether a product of (m, k) and (k, n) is better computed by a kernel of ours, which finishes
    it. dtype: of factors. sizes: m, n and k. tunes: the two are measured; whether ours may be
    better."""
    if dtype == i8:  # 1024 x 4096 x 4096: 31 us against 54
        return True
    m, n, _ = sizes
    if tunes and not is_uneven(ctx, n):
        return may_pay(ctx, sizes)
    return _later_us(sizes) < _beside_us(ctx, m, n)


def may_pay(ctx: Lowering, sizes: tuple[int, int, int]) -> bool:
    """Whether the two are to be measured: where nothing finishes a product of many rows, the
    vendor's is better."""
    m, n, k = sizes
    if is_uneven(ctx, n) or m <= _BRIEF_ROWS:
        return True
    if not _finished(ctx.node, _PRODUCTS)[0]:
        return False
    if 2 * m * n * k <= _BRIEF_FLOPS:
        return True
    # What the vendor's stores, another kernel loads.
    nbytes = 2 * m * n * ctx.out_dtype().nbytes
    return _later_us(sizes) < ctx.facts().rates.moved_ns(nbytes) / 1e3 + _KERNEL_US


def _later_us(sizes: tuple[int, int, int]) -> float:
    """How much longer a long product takes by a kernel of ours."""
    m, n, k = sizes
    return 2 * m * n * k * (1 / _OUR_FLOPS_A_US - 1 / _VENDORS_FLOPS_A_US)


def _beside_us(ctx: Lowering, m: int, n: int) -> float:
    """How long kernels take that the vendor's product needs beside it. Where rows are aligned, and
    need no copy, a kernel that finishes it costs no more than finishing in ours does."""
    nbytes, rates = m * n * ctx.out_dtype().nbytes, ctx.facts().rates
    if not is_uneven(ctx, n):
        return 0.0
    made = nbytes if leaves(ctx, lambda x: x is ctx.node) else _finished(ctx.node)[0]
    return rates.moved_ns(nbytes + made) / 1e3 + _KERNEL_US if made else 0.0


def finishes_sooner(ctx: Lowering, sizes: tuple[int, int, int]) -> bool:
    """Whether a product of (m, k) and (k, n), of few operations, is better computed by a kernel of
    ours since that finishes it: else it takes a kernel more, for operators that the vendor's does
    not compute."""
    m, n, k = sizes
    if k > _MOST_DEPTH or is_uneven(ctx, n):
        return False
    flops = 2 * m * n * k
    if flops > (_FEW_CHEAP_FLOPS if k > _SHORT_DEPTH else _SHORT_FLOPS):
        return False
    nbytes, ops = _finished(ctx.node, _PRODUCTS)
    return nbytes > 0 and (flops <= _FEW_FLOPS or all(op.target in _CHEAP for op in ops))


def is_uneven(ctx: Lowering, n: int) -> bool:
    """Whether rows of so many columns start anywhere."""
    return n * ctx.out_dtype().nbytes % ROW_NBYTES != 0


def _finished(product: Node, others: Set[object] = frozenset()) -> tuple[int, list[Node]]:
    """Bytes of what pointwise operators make of a product, and these, if nothing else reads it, and
    nothing but the caller, and operators among others, reads what they make; else 0."""
    size = value_of(product).numel()
    todo, seen, nbytes = [product], {product}, 0
    while todo:
        node = todo.pop()
        if any(u.op == "output" or u.target in others for u in node.users):
            if base_of(node) is product:
                return 0, []
            nbytes += size * value_of(node).element_size()
        for user in node.users.keys() - seen:
            if user.op == "output" or user.target in others:
                continue
            value = user.meta.get("val")
            if (
                not _is_pointwise(user)
                or not isinstance(value, torch.Tensor)
                or not value.is_floating_point()
                or value.numel() != size
            ):
                return 0, []
            seen.add(user)
            todo.append(user)
        if len(seen) > _MOST_OPS:
            return 0, []
    return nbytes, [n for n in seen if n is not product and not is_view(n)]


def is_followed(product: Node) -> bool:
    """Whether kernels of norms read what is made of a product: they make it themselves."""
    todo, seen = [product], {product}
    while todo and len(seen) <= _MOST_OPS:
        for user in todo.pop().users.keys() - seen:
            if user.target in _NORMS:
                return True
            if _is_pointwise(user):
                seen.add(user)
                todo.append(user)
    return False


def _is_pointwise(node: Node) -> bool:
    """Whether an element of a node is made of one of each operand."""
    tags = getattr(node.target, "tags", ())
    return is_view(node) or node.target is aten._to_copy.default or torch.Tag.pointwise in tags
