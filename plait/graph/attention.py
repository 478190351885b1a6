"""What FlexAttention is in ATen operators, for `write_out.py`, where no kernel holds it
(`attention_kernels.py`).

`flex_attention` and its backward carry graphs of scalars: score_mod, mask_mod and the gradient of
score_mod. Mapped over batch, head, query and key they are ordinary pointwise operators, to which
all passes, rules and fusion apply. A head of keys serves a group of heads of queries: the queries
of a group are rows of one product, so keys and values are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from plait.devices import facts_of
from plait.graph.edit import aten, output_of, same_size, value_of

_LN2 = math.log(2)  # the operator gives logarithms to base 2
_MOST_SCORES = 1 << 26  # held at a time: 256 MiB of float32. A bound on memory, as is the next
_MOST_BLOCKS = 32  # each has operators, and kernels, of its own
Mod = Callable[..., Any]


def is_regular(node: Node) -> bool:
    """Whether eager takes the operands: it refuses rows without keys, no heads of keys, and batches
    that differ."""
    q, k = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
    empty = any(isinstance(n, int) and n == 0 for n in k.shape[1:3])
    return not empty and (same_size(q.shape[0], k.shape[0]) or same_size(k.shape[0], 1))


@dataclass(frozen=True)
class _Mods:
    """What changes scores.

    score, joint: score_mod, and its gradient in a backward.
    mask: mask_mod.
    captured, masking: the tensors and numbers that they capture.
    """

    score: Mod
    joint: Mod | None
    mask: Mod
    captured: Sequence[Any]
    masking: Sequence[Any]


class _Rows:
    """The scores of some queries and all keys, before (`plain`) and after score_mod and mask_mod.

    first: the position of the first query. whole: they are all there are.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, mods: _Mods, first: int, whole: bool
    ) -> None:
        self.q, self.k, self.v, self.scale, self.mods, self.whole = q, k, v, scale, mods, whole
        self.wide = _wide(q)
        rows = _wide_product(self.grouped(q), k.transpose(-2, -1), self.wide)
        self.plain = rows.reshape(*q.shape[:3], k.shape[2]) * scale
        firsts = (0, 0, first, 0)
        self.places = [
            torch.arange(at, at + n, device=q.device)
            for at, n in zip(firsts, self.plain.shape, strict=True)
        ]
        none = (None,) * len(mods.masking)
        self.mask: Tensor = _mapped(mods.mask, (), none, 0)(*self.places, *mods.masking)
        self.none = (None,) * len(mods.captured)
        scores = _mapped(mods.score, (0,), self.none, 0)
        found: Tensor = scores(self.plain, *self.places, *mods.captured)
        self.scores = torch.where(self.mask, found.to(self.wide), -math.inf)

    def grouped(self, x: Tensor) -> Tensor:
        """A tensor of the queries' heads with the queries of each group in its rows."""
        heads = self.k.shape[1]
        return x.reshape(x.shape[0], heads, x.shape[1] // heads * x.shape[2], x.shape[3])

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The result, log2 of the sums of exponentials, and the greatest scores by ln(2)."""
        top = self.scores.amax(-1, keepdim=True)
        # A row without keys, or with an infinite score, has its exponentials themselves.
        base = torch.where(top.abs() == math.inf, 0.0, top)
        weights = (self.scores - base).exp()
        total = weights.sum(-1, keepdim=True)
        shares = (weights / torch.where(total == 0, 1.0, total)).to(self.q.dtype)
        out = _product(self.grouped(shares), self.v.to(self.q.dtype))
        sums = (base + total.log()) / _LN2
        return (
            out.reshape(*self.q.shape[:3], self.v.shape[-1]),
            sums.squeeze(-1),
            (top / _LN2).squeeze(-1),
        )

    def backward(
        self, out: Tensor, logsumexp: Tensor, grad_out: Tensor, grad_logsumexp: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and of what score_mod captures."""
        sums = logsumexp.unsqueeze(-1) * _LN2
        # A kernel's are no nearer than float32.
        by_kernel = self.q.dtype == self.wide and not facts_of(self.q.device.type).is_host
        if sums.dtype != self.wide or by_kernel:
            sums = self.scores.logsumexp(-1, keepdim=True)
        shares = torch.where(sums == -math.inf, 0.0, (self.scores - sums).exp())
        along = (out.to(self.wide) * grad_out.to(self.wide)).sum(-1, keepdim=True)
        if grad_logsumexp is not None:
            along = along - grad_logsumexp.to(self.wide).unsqueeze(-1) / _LN2
        rows = _wide_product(self.grouped(grad_out), self.v.transpose(-2, -1), self.wide)
        grad = shares * (rows.reshape(self.scores.shape) - along)
        assert self.mods.joint is not None, "a backward without the gradient of score_mod"
        results = [0, None, None, None, None, *self.none]
        joint = _mapped(self.mods.joint, (0,), (0, *self.none), results)
        grad, _, _, _, _, *captured = joint(self.plain, *self.places, grad, *self.mods.captured)
        grad = self.grouped(torch.where(self.mask, grad * self.scale, 0.0).to(self.q.dtype))
        shares = self.grouped(shares.to(self.q.dtype))
        grad_q = _product(grad, self.k).reshape(self.q.shape)
        grad_k = self._sum_over_rows(grad, self.grouped(self.q))
        grad_v = self._sum_over_rows(shares, self.grouped(grad_out))
        return grad_q, grad_k, grad_v, *captured

    def _sum_over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """The gradient of keys or values; more is added to one of some queries."""
        a = a.transpose(-2, -1)
        return _product(a, b) if self.whole else _wide_product(a, b, self.wide)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _mapped(mod: Mod, before: tuple[Any, ...], after: tuple[Any, ...], out: Any) -> Mod:
    """A function of scalars (..., batch, head, query, key, ...) as one of tensors. before, after:
    which of its other arguments have the four dimensions; out: which of its results."""
    for place in reversed(range(4)):
        dims = tuple(0 if d == place else None for d in range(4))
        mod = torch.vmap(mod, in_dims=(*before, *dims, *after), out_dims=out)
    return mod


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of four dimensions, of which b's first may be 1."""
    return torch.matmul(a, b.expand(a.shape[0], *b.shape[1:]))


def _wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b, not rounded to their dtype. The vendors' libraries of GPUs do that in one product."""
    if a.dtype == b.dtype and a.dtype.itemsize == 2 and facts_of(a.device.type).streams:
        b = b.expand(a.shape[0], *b.shape[1:])
        found = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=wide)
        return found.reshape(*a.shape[:3], b.shape[-1])
    return _product(a.to(wide), b.to(wide))


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    """Blocks of queries, as many as keep the memory of their scores in bounds."""
    rows, sizes = q.shape[2], (*q.shape[:3], k.shape[2])
    if not all(isinstance(n, int) for n in sizes):
        return [slice(0, rows)]
    count = min(_MOST_BLOCKS, -(-math.prod(sizes) // _MOST_SCORES))
    step = max(16, -(-rows // max(count, 1)))
    return [slice(at, min(at + step, rows)) for at in range(0, max(rows, 1), step)]


def _rows_of(x: Tensor, rows: slice, whole: bool) -> Tensor:
    return x if whole else x[:, :, rows]


# ------------------------------------------------------------------- scores as they are: a library
def is_causal(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any, scale: Any) -> bool | None:
    """Whether the mask is causal, or there is none. None where PyTorch's kernels of attention on a
    CPU do not hold: for other masks, scores that are changed, and operands that they refuse. What
    is masked they set to -inf before they scale it: only a positive scale leaves it so."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    equal = [
        (q.shape[0], k.shape[0]),
        (q.shape[1], k.shape[1]),
        (q.shape[3], v.shape[3]),
        *((x.stride(3), 1) for x in (q, k, v)),
    ]
    width: Any = q.shape[3]
    if not facts_of(q.device.type).is_host or len(dtypes) > 1:
        return None
    if not (isinstance(width, int) and width % 8 == 0 and 0 < width <= 256):
        return None
    if dtypes - {torch.float16, torch.bfloat16, torch.float32}:
        return None
    # The library's kernels divide by the number of keys.
    if not all(same_size(x, y) for x, y in equal) or not all(
        statically_known_true(n > 0) for n in (*q.shape, k.shape[2])
    ):
        return None
    if output_of(score.graph).args[0] is not next(iter(score.graph.nodes)):
        return None
    _, _, i, j, *_ = mask.graph.find_nodes(op="placeholder")
    made: Any = output_of(mask.graph).args[0]
    if not isinstance(made, Node):
        return None
    is_full = (made.target, made.args[1:]) == (aten.full.default, (True,))
    if is_full or made.target is aten.new_ones.default:
        return False
    causal = (made.target, made.args) in ((aten.ge.Tensor, (i, j)), (aten.le.Tensor, (j, i)))
    positive = isinstance(scale, (int, float)) and scale > 0
    return True if causal and positive and same_size(q.shape[2], k.shape[2]) else None


def attention(
    q: Tensor, k: Tensor, v: Tensor, score: Mod, block_mask: Sequence[Any], scale: float,
    options: Any, captured: Sequence[Any] = (), masking: Sequence[Any] = (), *, wanted: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    causal = is_causal(q, k, v, score, block_mask[-1], scale)
    if causal is not None and wanted[2] is None:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = flash(q, k, v, 0.0, causal, scale=scale)
        return out, sums / _LN2, None
    mods = _Mods(score, None, block_mask[-1], captured, masking)
    blocks = _blocks(q, k)
    whole = len(blocks) == 1
    found = [
        _Rows(_rows_of(q, b, whole), k, v, scale, mods, b.start, whole).forward() for b in blocks
    ]
    joined = found[0] if whole else map(partial(torch.cat, dim=2), zip(*found, strict=True))
    return tuple(joined)


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor | None,
    grad_logsumexp: Tensor | None, score: Mod, joint: Mod, block_mask: Sequence[Any],
    scale: float, options: Any, captured: Sequence[Any] = (), masking: Sequence[Any] = (), *,
    wanted: Any,
) -> tuple[Any, ...]:  # fmt: skip
    mods = _Mods(score, joint, block_mask[-1], captured, masking)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    causal = is_causal(q, k, v, score, block_mask[-1], scale)
    if causal is not None and grad_logsumexp is None:
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = flash(grad_out, q, k, v, out, logsumexp * _LN2, 0.0, causal, scale=scale)
        return *grads, (None,) * len(captured)
    blocks = _blocks(q, k)
    whole = len(blocks) == 1
    parts: list[Tensor] = []
    sums: tuple[Any, ...] = ()
    for b in blocks:
        of = partial(_rows_of, rows=b, whole=whole)
        more = None if grad_logsumexp is None else of(grad_logsumexp)
        rows = _Rows(of(q), k, v, scale, mods, b.start, whole)
        part, *added = rows.backward(of(out), of(logsumexp), of(grad_out), more)
        parts.append(part)
        sums = tuple(map(_added, sums, added)) if sums else tuple(added)
    grad_k, grad_v, *of_captured = sums
    if k.shape[0] != q.shape[0]:
        grad_k, grad_v = grad_k.sum(0, keepdim=True), grad_v.sum(0, keepdim=True)
    grad_q = parts[0] if whole else torch.cat(parts, 2)
    gradients = zip(of_captured, wanted[3] or [None] * len(captured), strict=True)
    return grad_q, grad_k, grad_v, [None if w is None else x for x, w in gradients]


def _added(a: Any, b: Any) -> Any:
    return None if a is None else a + b
