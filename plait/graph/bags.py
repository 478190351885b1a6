"""Bags of embeddings that are all equally long, written out: rows that are gathered, and sums of
them.

PyTorch's own kernel takes bags that begin anywhere. `F.embedding_bag` of a matrix of indices hands
it multiples of the row's length, and what it computes then is an ordinary sum: a loop that fuses,
several tables in one kernel, where the operator is a launch a table that no CUDA graph may record,
and its gradient sorts the indices. Sums of half precision are float32 until they are whole, as
those of the operator. Runs on joint graphs before they are split, so that both halves agree, and on
every graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import aten, insert, replace, same_size, value_of

SUM, MEAN = 0, 1
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


class _Bags(NamedTuple):
    """A call of the operator on bags of the same length.

    length: the indices of a bag
    scales: a factor an index, or None
    padding: the index that counts for nothing, or -1
    """

    weight: Node
    indices: Node
    length: int
    mode: int
    scales: Node | None
    padding: int


def write_out_bags(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many results it has written out."""
    made = 0
    for node in [n for n in gm.graph.nodes if n.target in _BAGS]:
        bags = _equal_bags(node)
        if bags is None:
            continue
        for result in list(node.users):
            if result.args[1] == 0:
                replace(result, _sums(result, bags))
                made += 1
            elif result.args[1] == 1:  # which bag an index is in
                made += _write_out_gradients(result, bags)
    return made


def _arguments(node: Node) -> dict[str, Any]:
    """Those of a call by name, with what it leaves out."""
    formals: Any = node.target._schema.arguments  # type: ignore[union-attr]
    given = {f.name: f.default_value for f in formals if f.has_default_value()}
    given |= {f.name: a for f, a in zip(formals, node.args, strict=False)}
    return given | node.kwargs


def _equal_bags(node: Node) -> _Bags | None:
    """None: the bags may differ in length, or they have a kind of sum that has no rule here."""
    a = _arguments(node)
    weight, indices, offsets = a["weight"], a["indices"], a["offsets"]
    if facts_of(value_of(weight).device).eager_cpu or offsets.target is not aten.arange.start_step:
        return None
    if a["mode"] not in (SUM, MEAN) or a["scale_grad_by_freq"] or a["sparse"]:
        return None
    if torch.are_deterministic_algorithms_enabled():  # the gradient's sums have any order
        return None
    first, end, length = offsets.args
    n, count = value_of(indices).shape[0], value_of(offsets).shape[0]
    if first != 0 or type(length) is not int or a["include_last_offset"]:
        return None
    last = value_of(end) if isinstance(end, Node) else end
    if length < 1 or not same_size(last, n) or not same_size(count * length, n):
        return None
    if same_size(n, 0):
        return None
    scales = a["per_sample_weights"]
    return _Bags(weight, indices, length, a["mode"], scales, a["padding_idx"])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of this type are computed in."""
    return torch.promote_types(dtype, torch.float32)


def _cast(before: Node, x: Node, dtype: torch.dtype) -> Node:
    return (
        x if value_of(x).dtype == dtype else insert(before, x, aten._to_copy.default, dtype=dtype)
    )


def _rows(before: Node, b: _Bags, x: Node) -> Node:
    """A value an index as a matrix with a row a bag."""
    return insert(before, x, aten.view.default, [-1, b.length])


def _counts(before: Node, b: _Bags, dtype: torch.dtype) -> Node | int:
    """What the sum of each bag is divided by: how many of its indices count."""
    if b.padding < 0:
        return b.length
    counted = insert(before, _rows(before, b, b.indices), aten.ne.Scalar, b.padding)
    counts = insert(before, counted, aten.sum.dim_IntList, [1], True)
    return _cast(before, insert(before, counts, aten.clamp.default, 1), dtype)


def _divided(before: Node, x: Node, by: Node | int) -> Node:
    target = aten.div.Tensor if isinstance(by, Node) else aten.div.Scalar
    return insert(before, x, target, by)


def _gathered(before: Node, b: _Bags) -> Node:
    """The rows of all indices, bag by bag; zeros for those that count for nothing."""
    at = _rows(before, b, b.indices)
    rows = insert(before, b.weight, aten.embedding.default, at)
    if b.padding < 0:
        return rows
    ignored = insert(before, at, aten.eq.Scalar, b.padding)
    ignored = insert(before, ignored, aten.unsqueeze.default, 2)
    return insert(before, rows, aten.masked_fill.Scalar, ignored, 0)


def _scaled(before: Node, b: _Bags, x: Node) -> Node:
    """x (bag, place in it, element), times the factors of the indices."""
    if b.scales is None:
        return x
    wide = _wide(value_of(x).dtype)
    factors = insert(before, _rows(before, b, b.scales), aten.unsqueeze.default, 2)
    factors = _cast(before, factors, wide)
    return insert(before, _cast(before, x, wide), aten.mul.Tensor, factors)


def _sums(before: Node, b: _Bags) -> Node:
    dtype = value_of(b.weight).dtype
    rows = _scaled(before, b, _gathered(before, b))
    made = insert(before, rows, aten.sum.dim_IntList, [1], dtype=_wide(dtype))
    if b.mode == MEAN:
        made = _divided(before, made, _counts(before, b, _wide(dtype)))
    return _cast(before, made, dtype)


# ---------------------------------------------------------------------------------------- gradients
def _write_out_gradients(bag_of: Node, b: _Bags) -> int:
    """bag_of: the operator's result that its gradients are known by."""
    made = 0
    for node in list(bag_of.users):
        write = _GRADIENTS.get(node.target)
        if write is not None and bag_of is _arguments(node)["offset2bag"]:
            replace(node, write(node, b))
            made += 1
    return made


def _of_each(before: Node, b: _Bags, grad: Node) -> Node:
    """The gradient of each place in a bag."""
    each = insert(before, grad, aten.unsqueeze.default, 1)
    return insert(before, each, aten.expand.default, [-1, b.length, -1])


def _of_weight(node: Node, b: _Bags) -> Node:
    a = _arguments(node)
    dtype = value_of(a["grad"]).dtype
    grad: Node = a["grad"]
    if b.mode == MEAN:
        wide = _wide(dtype)
        grad = _divided(node, _cast(node, grad, wide), _counts(node, b, wide))
    each, at = _scaled(node, b, _of_each(node, b, grad)), _rows(node, b, b.indices)
    target = aten.embedding_dense_backward.default
    return _cast(node, insert(node, each, target, at, a["num_weights"], b.padding, False), dtype)


def _of_scales(node: Node, b: _Bags) -> Node:
    """The product of a row and the gradient of its bag."""
    grad: Node = _arguments(node)["grad"]
    wide = _wide(value_of(grad).dtype)
    each = _cast(node, insert(node, grad, aten.unsqueeze.default, 1), wide)
    rows = _cast(node, _gathered(node, b), wide)
    sums = insert(node, insert(node, rows, aten.mul.Tensor, each), aten.sum.dim_IntList, [2])
    return _cast(node, insert(node, sums, aten.view.default, [-1]), value_of(node).dtype)


_GRADIENTS: dict[Any, Callable[[Node, _Bags], Node]] = {
    aten._embedding_bag_backward.default: _of_weight,
    aten._embedding_bag_dense_backward.default: _of_weight,
    aten._embedding_bag_per_sample_weights_backward.default: _of_scales,
}
