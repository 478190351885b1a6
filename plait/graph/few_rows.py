"""Gradients of large tables of half precision, of which few rows are anything but zero: their sums
are kept for these rows alone.

PyTorch adds rows into a table of float32 as large as the result and converts it: of an embedding of
32000 x 2048 a backward pass writes, reads and converts 262 MB, though 1024 rows change. Here each
index is given the number of one of the rows that have it, those are added by that number, and go to
a table of zeros. What a row is the sum of, and in which type, stays as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import aten, insert, insert_like, replace, same_sizes, value_of

FEWER = 4
"""Rows of a table for each that is added, at least: 12 bytes an element of the table become 4, and
those that are added are read and written four times more."""
_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
LEAST_NBYTES = 8 << 20  # of the sums; less is written sooner than three more kernels start


def add_few_rows(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many tables it changed."""
    copies = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    found = list(filter(_is_sparse, copies))
    for node in found:
        _replace(node)
    return len(found)


def _is_sparse(copy: Node) -> bool:
    """Whether a node is the sums of few rows, which nobody needs in float32."""
    total = copy.args[0]
    if not isinstance(total, Node) or copy.kwargs.keys() != {"dtype"} or len(total.users) != 1:
        return False
    if total.target not in _PUTS or total.args[3:] != (True,):
        return False
    zeros, indices, added = total.args[:3]
    assert isinstance(zeros, Node) and isinstance(added, Node), "tensors are nodes"
    if zeros.target is not aten.full.default or zeros.args[1] != 0:
        return False
    if not (isinstance(indices, list | tuple) and len(indices) == 1):
        return False
    rows: Any = indices[0]
    return _is_worth_it(value_of(rows), value_of(added), value_of(total), value_of(copy))


def _is_worth_it(at: Any, added: Any, total: Any, result: Any) -> bool:
    if not facts_of(total.device).streams or at.dtype not in (torch.int64, torch.int32):
        return False
    if total.dtype != torch.float32 or result.dtype.itemsize != 2 or not result.is_contiguous():
        return False
    if not all(type(n) is int for n in (*total.shape, *at.shape)):
        return False
    if not same_sizes(added.shape, (*at.shape, *total.shape[1:])) or at.numel() == 0:
        return False
    return bool(FEWER * at.numel() <= total.shape[0] and total.numel() * 4 >= LEAST_NBYTES)


def _replace(copy: Node) -> None:
    total: Any = copy.args[0]
    _, (at,), added, *_ = total.args
    rows, result = value_of(at), value_of(copy)
    n, rest = rows.numel(), list(result.shape[1:])
    numbers = _made(copy, aten.arange.start_step, 0, n, dtype=torch.int32)
    numbers = insert(copy, numbers, aten.view.default, list(rows.shape))
    chosen = _made(copy, aten.full.default, result.shape[:1], 0, dtype=torch.int32)
    chosen = insert(copy, chosen, aten.index_put.default, [at], numbers)
    row = insert(copy, chosen, aten.index.Tensor, [at])
    row = insert(copy, row, aten._to_copy.default, dtype=torch.int64)
    sums = _made(copy, aten.full.default, [n, *rest], 0, dtype=torch.float32)
    sums = insert(copy, sums, aten.index_put.default, [row], added, True)
    # Rows of one index are written with the same bits.
    each = insert(copy, sums, aten.index.Tensor, [row])
    each = insert(copy, each, aten._to_copy.default, dtype=result.dtype)
    made = _made(copy, aten.full.default, list(result.shape), 0, dtype=result.dtype)
    replace(copy, insert(copy, made, aten.index_put.default, [at], each))


def _made(before: Node, target: Any, *args: Any, dtype: torch.dtype) -> Node:
    """A new tensor where the value of a node is."""
    val = value_of(before)
    with val.fake_mode:
        made = target(*args, dtype=dtype, device=val.device)
    return insert_like(before, made, target, *args, dtype=dtype, device=val.device)
