"""Whether a kernel of ours computes a large product on a GPU sooner than the vendor's library and
the kernels that this needs beside it: one that reads the product and finishes it, or one that
copies rows that start at multiples of 16 bytes to where eager has them.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from plait.graph.edit import base_of, is_view, value_of
from plait.ir.dtypes import DType
from plait.lower.align_rows import ROW_NBYTES, leaves
from plait.lower.core import Lowering

# Measured on an H100 (benchmarks/products_gpu.py vocabulary, benchmarks/quantised_gpu.py).
_FLOPS_A_US = {1: (9e8, 6.7e8), 2: (5.2e8, 6.5e8)}
"""Ours and the vendor's, by bytes of a factor's element."""
_KERNEL_US = 1.5  # of one in a CUDA graph
_MOST_OPS = 24  # that are followed

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def pays(ctx: Lowering, dtype: DType, m: int, n: int, k: int) -> bool:
    """Whether a product of (m, k) and (k, n) is better computed by a kernel of ours, which finishes
    it. dtype: of factors."""
    ours, vendors = _FLOPS_A_US[dtype.nbytes]
    later_us = 2 * m * n * k * (1 / ours - 1 / vendors)
    return later_us < _beside_us(ctx, m, n)


def _beside_us(ctx: Lowering, m: int, n: int) -> float:
    """How long kernels take that the vendor's product needs beside it."""
    nbytes = m * n * ctx.out_dtype().nbytes
    rates = ctx.facts().rates
    if leaves(ctx, lambda x: x is ctx.node):
        odd = n * ctx.out_dtype().nbytes % ROW_NBYTES
        return rates.moved_ns(2 * nbytes) / 1e3 + _KERNEL_US if odd else 0.0
    made = _finished(ctx.node)
    return rates.moved_ns(nbytes + made) / 1e3 + _KERNEL_US if made else 0.0


def _finished(product: Node) -> int:
    """Bytes of what pointwise operators make of a product, if nothing else reads it, and nothing
    but the caller and other products read what they make; else 0."""
    size = value_of(product).numel()
    todo, seen, nbytes = [product], {product}, 0
    while todo:
        node = todo.pop()
        if any(u.op == "output" or u.target in _PRODUCTS for u in node.users):
            if base_of(node) is product:
                return 0
            nbytes += size * value_of(node).element_size()
        for user in node.users.keys() - seen:
            if user.op == "output" or user.target in _PRODUCTS:
                continue
            value = user.meta.get("val")
            if (
                not _is_pointwise(user)
                or not isinstance(value, torch.Tensor)
                or value.numel() != size
            ):
                return 0
            seen.add(user)
            todo.append(user)
        if len(seen) > _MOST_OPS:
            return 0
    return nbytes


def _is_pointwise(node: Node) -> bool:
    """Whether an element of a node is made of one of each operand."""
    tags = getattr(node.target, "tags", ())
    return is_view(node) or node.target is aten._to_copy.default or torch.Tag.pointwise in tags
