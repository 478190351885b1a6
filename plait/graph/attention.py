"""FlexAttention written out: the operator becomes ATen operators, by its definition.

`flex_attention` and its backward carry graphs of scalars: score_mod, mask_mod and the gradient of
score_mod. Mapped over batch, head, query and key they are ordinary pointwise operators, to which
all passes, rules and fusion apply. A head of keys serves a group of heads of queries: the queries
of a group are rows of one product, so keys and values are not repeated.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.edit import aten, output_of, replace, same_size, source_meta, value_of

hop = torch.ops.higher_order
_LN2 = math.log(2)  # the operator gives logarithms to base 2
Mod = Callable[..., Any]


def expand_attention(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many operators it wrote out."""
    nodes = [n for n in gm.graph.nodes if n.target in _DEFINITIONS and _is_regular(n)]
    for node in nodes:
        write_out(gm, node, _DEFINITIONS[node.target])
    return len(nodes)


def _is_regular(node: Node) -> bool:
    """Whether eager takes the operands: it refuses rows without keys, and batches that differ."""
    q, k = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
    empty = isinstance(k.shape[2], int) and k.shape[2] == 0
    return not empty and (same_size(q.shape[0], k.shape[0]) or same_size(k.shape[0], 1))


def write_out(gm: GraphModule, node: Node, definition: Mod) -> None:
    """Puts operators in the place of one on graphs: those that its definition calls. It is given
    the operator's arguments, and the fake results that are wanted; it returns results."""
    given = [n for n in node.all_input_nodes if n.op != "get_attr" or "val" in n.meta]

    def run(*values: Any) -> Any:
        known = dict(zip(given, values, strict=True))
        args = torch.fx.node.map_arg(
            node.args, lambda n: known[n] if n in known else getattr(gm, str(n.target))
        )
        return definition(*args, wanted=value_of(node))

    inner = compat.tracing.trace_values(run, [value_of(n) for n in given], _spelled())
    env = dict(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    with gm.graph.inserting_before(node):
        for n in inner.graph.nodes:
            if n.op in ("placeholder", "output"):
                continue
            if n.target is aten._to_copy.default and not isinstance(n.args[0], Node):
                n.target = aten.scalar_tensor.default  # vmap makes tensors of numbers
            env[n] = gm.graph.node_copy(n, env.__getitem__)
            env[n].meta = {**source_meta(node), "val": value_of(n)}
    (results,) = output_of(inner.graph).args
    replace_items(node, torch.fx.node.map_arg(results, env.__getitem__))


def _spelled() -> dict[Any, Mod]:
    """PyTorch's operator for the gradient of an indexed tensor, where there is one."""
    scatter = getattr(torch.ops.flex_lib, "zeros_and_scatter", None)
    return {} if scatter is None else {scatter.default: _zeros_and_scatter}


def _zeros_and_scatter(shape: Sequence[int], indices: Sequence[Tensor], x: Tensor) -> Tensor:
    """The sums of x by place in a tensor of zeros: first over dimensions that move no index."""
    still = [d for d in range(x.dim()) if all(same_size(i.stride(d), 0) for i in indices)]
    for d in reversed(still):
        indices = [i.select(d, 0) for i in indices]
    x = x.sum(still) if still else x
    return x.new_zeros(shape).index_put(list(indices), x, accumulate=True)


def replace_items(node: Node, values: Any) -> None:
    """The items of node become values, a tree of nodes; node is erased."""
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.format_node()} takes all results"
        value = values[user.args[1]]
        if isinstance(value, Node):
            replace(user, value)
        else:
            replace_items(user, value)
    node.graph.erase_node(node)


# -------------------------------------------------------------------------------------- definitions
class _Scores:
    """The scores of all queries and keys, before and after score_mod and mask_mod."""

    def __init__(self, q: Tensor, k: Tensor, scale: float) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.heads, self.wide = k.shape[1], wide
        rows = product(self.grouped(q.to(wide)), k.to(wide).transpose(-2, -1))
        self.plain = rows.reshape(*q.shape[:3], k.shape[2]) * scale
        sizes = self.plain.shape
        self.places = [torch.arange(n, device=q.device) for n in sizes]

    def grouped(self, x: Tensor) -> Tensor:
        """A tensor of the queries' heads with the queries of each group in its rows."""
        return x.reshape(x.shape[0], self.heads, -1, x.shape[-1])

    def mask(self, mask_mod: Mod, buffers: Sequence[Any]) -> Tensor:
        mapped = _mapped(mask_mod, (), (None,) * len(buffers), 0)
        found: Tensor = mapped(*self.places, *buffers)
        return found

    def modified(self, score_mod: Mod, mask: Tensor, buffers: Sequence[Any]) -> Tensor:
        mapped = _mapped(score_mod, (0,), (None,) * len(buffers), 0)
        scores = mapped(self.plain, *self.places, *buffers)
        return torch.where(mask, scores.to(self.wide), -math.inf)


def _mapped(mod: Mod, before: tuple[Any, ...], after: tuple[Any, ...], out: Any) -> Mod:
    """A function of scalars (..., batch, head, query, key, ...) as one of tensors. before, after:
    which of its other arguments have the four dimensions; out: which of its results."""
    for place in reversed(range(4)):
        dims = tuple(0 if d == place else None for d in range(4))
        mod = torch.vmap(mod, in_dims=(*before, *dims, *after), out_dims=out)
    return mod


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of four dimensions, of which b's first may be 1."""
    return torch.matmul(a, b.expand(a.shape[0], *b.shape[1:]))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod, block_mask: Sequence[Any], scale: float,
    options: Any, score_buffers: Sequence[Any] = (), mask_buffers: Sequence[Any] = (), *,
    wanted: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(result, log2 of the sums of exponentials, greatest scores), as many as are wanted."""
    s = _Scores(q, k, scale)
    mask = s.mask(block_mask[-1], mask_buffers)
    scores = s.modified(score_mod, mask, score_buffers)
    top = scores.amax(-1, keepdim=True)
    # A row without keys, or with an infinite score, has its exponentials themselves.
    weights = (scores - torch.where(top.abs() == math.inf, 0.0, top)).exp()
    total = weights.sum(-1, keepdim=True)
    logsumexp = torch.where(top.abs() == math.inf, 0.0, top) + total.log()
    shares = (weights / torch.where(total == 0, 1.0, total)).to(q.dtype)
    out = product(s.grouped(shares), v.to(q.dtype)).reshape(*q.shape[:3], v.shape[-1])
    found = out, (logsumexp / _LN2).squeeze(-1), (top / _LN2).squeeze(-1)
    return tuple(map(_laid_out, found, wanted))


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor | None,
    grad_logsumexp: Tensor | None, score_mod: Mod, joint: Mod, block_mask: Sequence[Any],
    scale: float, options: Any, score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (), *, wanted: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of q, k, v and of each of score_buffers."""
    s = _Scores(q, k, scale)
    mask = s.mask(block_mask[-1], mask_buffers)
    scores = s.modified(score_mod, mask, score_buffers)
    row = logsumexp.unsqueeze(-1) * _LN2
    if row.dtype != s.wide:  # the operator has it in float32 always
        row = scores.logsumexp(-1, keepdim=True)
    shares = torch.where(row == -math.inf, 0.0, (scores - row).exp())
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    along = (out.to(s.wide) * grad_out.to(s.wide)).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        along = along - grad_logsumexp.to(s.wide).unsqueeze(-1) / _LN2
    rows = product(s.grouped(grad_out.to(s.wide)), v.to(s.wide).transpose(-2, -1))
    grad = shares * (rows.reshape(scores.shape) - along)
    none = (None,) * len(score_buffers)
    mapped = _mapped(joint, (0,), (0, *none), [0, None, None, None, None, *none])
    grad, _, _, _, _, *captured = mapped(s.plain, *s.places, grad, *score_buffers)
    grad = s.grouped(torch.where(mask, grad * scale, 0.0).to(q.dtype))
    grad_q = product(grad, k).reshape(q.shape)
    grad_k = product(grad.transpose(-2, -1), s.grouped(q))
    grad_v = product(s.grouped(shares.to(q.dtype)).transpose(-2, -1), s.grouped(grad_out))
    if k.shape[0] != q.shape[0]:
        grad_k, grad_v = grad_k.sum(0, keepdim=True), grad_v.sum(0, keepdim=True)
    found = map(_laid_out, (grad_q, grad_k, grad_v), wanted[:3])
    return *found, [None if w is None else x for x, w in zip(captured, wanted[3], strict=True)]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of like, in its order of dimensions."""
    if like.numel() == 0:
        return x.new_empty_strided(like.shape, like.stride(), dtype=like.dtype)
    x = x.to(like.dtype)
    order = sorted(range(x.dim()), key=lambda d: -compat.tracing.hint_of(like.stride(d)))
    x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
    if all(map(same_size, x.stride(), like.stride())):
        return x
    return x.as_strided(like.shape, like.stride())


_DEFINITIONS: dict[Any, Mod] = {
    hop.flex_attention: _attention,
    hop.flex_attention_backward: _attention_backward,
}
