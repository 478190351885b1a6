"""Rows of a tensor that are written one by one are a concatenation.

`out[:, t] = x` for each t becomes, free of writes, a chain of `select_scatter`: each a choice
between x and what was there, over all of `out`. Where every row is written and nothing reads what
lies between, the last of the chain is the rows side by side, which each step writes where it is
computed.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from plait.graph.edit import (
    aten,
    base_of,
    insert,
    insert_like,
    is_contiguous,
    is_view,
    replace,
    same_sizes,
    value_of,
    written,
)

_ROW = aten.select_scatter.default


def join_rows(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many chains it replaced."""
    nodes = gm.graph.find_nodes(op="call_function", target=_ROW)
    for node in nodes:
        _drop_copy(node)
    ends = [n for n in nodes if not any(_follows(u, n) for u in n.users)]
    if not ends:
        return 0
    changed, joined = written(gm.graph), 0
    for end in ends:
        rows = _rows(end)
        if rows is None or any(base_of(row) in changed for row in rows):
            continue
        made, dim = value_of(end), _dim(end)
        pieces = [insert(end, row, aten.unsqueeze.default, dim) for row in rows]
        replace(end, insert_like(end, made, aten.cat.default, pieces, dim))
        joined += 1
    return joined


def _drop_copy(node: Node) -> None:
    """Makes the row what is copied into it: `copy` asks the row before it for its size alone."""
    copy: Any = node.args[1]
    if getattr(copy, "target", None) is not aten.copy.default or list(copy.users) != [node]:
        return
    old: Any = copy.args[0]
    row: Any = copy.args[1]
    made, value = value_of(copy), value_of(row)
    if not same_sizes(value.shape, made.shape) or value.device != made.device:
        return
    if value.dtype != made.dtype:
        row = insert(node, row, aten._to_copy.default, dtype=made.dtype)
    node.update_arg(1, row)
    node.graph.erase_node(copy)
    while not old.users and old.op == "call_function" and is_view(old):
        old, dead = old.args[0], old
        node.graph.erase_node(dead)


def _follows(node: Node, before: Node) -> bool:
    """Whether a node writes a row of the same axis into what the one before it made."""
    return node.target is _ROW and node.args[0] is before and _dim(node) == _dim(before)


def _dim(node: Node) -> int:
    dim: Any = node.args[2]
    return int(dim % value_of(node).dim())


def _rows(end: Node) -> list[Node] | None:
    """What each row is in the end, in their order; None if one is as it was before the chain, or
    something else reads what lies between, or the result does not lie as a concatenation does."""
    made, dim = value_of(end), _dim(end)
    if not is_contiguous(made) or made.shape[dim] < 2:
        return None
    size, shape = made.shape[dim], [*made.shape[:dim], *made.shape[dim + 1 :]]
    rows: dict[int, Node] = {}
    node: Any = end
    last: Node | None = None
    while isinstance(node, Node) and node.target is _ROW and _dim(node) == dim:
        if last is not None and list(node.users) != [last]:
            return None
        _, row, _, at = node.args
        if not isinstance(row, Node) or not isinstance(at, int) or not -size <= at < size:
            return None
        value = value_of(row)
        alike = same_sizes(value.shape, shape)
        if value.dtype != made.dtype or value.device != made.device or not alike:
            return None
        rows.setdefault(at % size, row)  # the last that was written stays
        node, last = node.args[0], node
        if len(rows) == size:
            return [rows[k] for k in range(size)]
    return None
