"""What the vendor's library computes of a product of half precision before it stores it, as one
call on a GPU: relu, and gelu by tanh (also written out), after a bias, or the sum with a residual.

Eager rounds to 16 bits in between. Of relu that makes no difference, of the others the result is
nearer to the exact one. A product that another operator reads, such as a gradient, stays. What the
lowering rule computes with kernels of plait is rounded as ever. A residual is better added by a
kernel that reads the sum, such as a norm (benchmarks/products_gpu.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from plait.devices import facts_of
from plait.graph.edit import aten, base_of, insert, is_contiguous, replace, same_layout, value_of

_MOVES = (
    aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default,
)  # fmt: skip
"""Views with each element once."""
_ALIGNED = 16
"""Bytes of a row: of others the executor cuts a product into parts, which have no activation."""
_FEW_ROWS = 64  # up to which kernels of plait take in what follows (lower/product.py)


def join_epilogues(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many operators it joined."""
    layers = [n for n in gm.graph.nodes if n.target is aten.addmm.default and _is_layer(n)]
    products = [n for n in gm.graph.nodes if n.target is aten.mm.default and _is_long(n)]
    return sum(map(_join_activation, layers)) + sum(map(_join_residual, products))


def _is_layer(node: Node) -> bool:
    """Whether a product has a bias for each column, and may have an activation."""
    bias, made = value_of(node.args[0]), value_of(node)  # type: ignore[arg-type]
    if node.kwargs or not _is_short(made) or bias.dim() != 1:
        return False
    aligned = type(bias.shape[0]) is int and bias.shape[0] * bias.itemsize % _ALIGNED == 0
    return facts_of(made.device).streams and bias.dtype == made.dtype and aligned


def _is_short(x: torch.Tensor) -> bool:
    """Of float32 relu loses NaNs (lower/matmul.py), and gelu is not that exact."""
    return x.dtype in (torch.float16, torch.bfloat16)


def _join_activation(node: Node) -> bool:
    """Whether all that reads a layer, behind views, is an activation, which it then has."""
    last = _behind_views(node)
    gelu = _gelu_of(last)
    relu = _only_reader(last, aten.relu.default)
    end = gelu or relu
    if end is None or not same_layout(value_of(end), value_of(last)):
        return False
    bias, *factors = node.args
    assert isinstance(bias, Node), "tensors are nodes"
    replace(end, last)
    made = insert(node, bias, aten._addmm_activation.default, *factors, use_gelu=gelu is not None)
    replace(node, made)
    return True


def _behind_views(node: Node) -> Node:
    """The last of the views of a node, each of which alone reads the one before."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in _MOVES:
        node = user
    return node


def _only_reader(x: Node, op: OpOverload, other: Any = None) -> Node | None:
    """The operator that alone reads a value, with another operand, in any order; else None."""
    if len(x.users) != 1:
        return None
    (user,) = x.users
    rest = [a for a in user.args if a is not x]
    if user.target is not op or len(rest) != len(user.args) - 1:
        return None
    if other is None:
        return user if not rest else None
    if isinstance(other, Node):
        same = rest == [other]
    else:
        same = isinstance(rest[0], (int, float)) and math.isclose(rest[0], other, rel_tol=1e-6)
    return user if same and not user.kwargs else None


def _gelu_of(x: Node) -> Node | None:
    """gelu of a value, by tanh, where nothing else reads that."""
    gelu = _only_reader(x, aten.gelu.default)
    if gelu is not None:
        return gelu if gelu.kwargs.get("approximate") == "tanh" else None
    by_op = {user.target: user for user in x.users}
    at, half = by_op.get(aten.pow.Tensor_Scalar), by_op.get(aten.mul.Tensor)
    if len(x.users) != 3 or at is None or at.args != (x, 3) or half is None:
        return None
    if half.args not in ((x, 0.5), (0.5, x)):
        return None
    steps: tuple[tuple[OpOverload, Any], ...] = (
        (aten.mul.Tensor, 0.044715), (aten.add.Tensor, x),
        (aten.mul.Tensor, math.sqrt(2 / math.pi)), (aten.tanh.default, None),
        (aten.add.Tensor, 1), (aten.mul.Tensor, half),
    )  # fmt: skip
    for op, other in steps:
        at = _only_reader(at, op, other)
        if at is None:
            return None
    return at if len(half.users) == 1 else None


# ---------------------------------------------------------------------------------------- residuals
def _is_long(node: Node) -> bool:
    """Whether a product is the vendor's to compute."""
    made = value_of(node)
    if not _is_short(made) or not facts_of(made.device).streams:
        return False
    return type(made.shape[0]) is int and made.shape[0] > _FEW_ROWS and is_contiguous(made)


def _join_residual(node: Node) -> bool:
    """Whether all that reads a product is a sum with another tensor, to which it is added then.
    Kernels add for nothing where they read the sum: it must be a result, or a factor. They also do
    where they make the other tensor after the product, which then waits for nothing: the factors of
    GPT-2's embedding, 200 MB of gradients, would live as long as the backward pass."""
    last = _behind_views(node)
    if len(last.users) != 1:
        return False
    (end,) = last.users
    rest = next((a for a in end.args if a is not last), None)
    if end.target is not aten.add.Tensor or end.kwargs or not isinstance(rest, Node):
        return False
    value = value_of(last)
    if not (is_contiguous(value) and same_layout(value_of(end), value)):
        return False
    if not same_layout(value_of(rest), value) or not _goes_unread(end):
        return False
    if node < base_of(rest):
        return False
    addend = insert(end, rest, aten.view.default, [*value_of(node).shape])
    made = insert(end, addend, aten.addmm.default, *node.args)
    replace(end, insert(end, made, aten.view.default, [*value.shape]))
    return True


def _goes_unread(x: Node) -> bool:
    """Whether nothing reads a value but the caller and calls of products."""
    return all(
        u.op == "output"
        or u.target in (aten.mm.default, aten.addmm.default, aten.bmm.default)
        or (u.target in (*_MOVES, aten.t.default) and _goes_unread(u))
        for u in x.users
    )
