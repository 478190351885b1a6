"""Products whose columns are mixed in pairs, or taken in parts: rotary embeddings in the forms that
models write them, and gates beside what they open. How many kernels a GPU launches for few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.layer_programs import D, rotated
from tests.product_programs import Case

Angles = tuple[Tensor, Tensor]


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the opposite angle."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((b, -a), -1) * sin


def of_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """GPT-J's: of columns that follow each other."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + turned * sin


def of_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As a product of complex numbers, each number after the other."""
    a, b = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    c, s = cos[..., ::2], sin[..., ::2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


def of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each half for itself."""
    n = x.shape[-1] // 2
    a, b, c, s = x[..., :n], x[..., n:], cos[..., :n], sin[..., :n]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def heads(x: Tensor, w: Tensor, n: int) -> Tensor:
    return F.linear(x, w).view(*x.shape[:-1], -1, n).transpose(1, 2)


def a_part(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    last = first + cos.shape[-1]
    parts = (x[..., :first], rotated(x[..., first:last], cos, sin), x[..., last:])
    return torch.cat([p for p in parts if p.shape[-1]], -1)


def one_matrix(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries, then fewer keys and values: each a part of the columns."""
    n = cos.shape[-1]
    parts = torch.split(F.linear(x, w), [4 * n, 2 * n, 2 * n], -1)
    q, k, v = (t.view(*x.shape[:-1], -1, n).transpose(1, 2) for t in parts)
    return rotated(q, cos, sin), rotated(k, cos, sin), v.contiguous()


def two_angles(
    x: Tensor, w: Tensor, c: Tensor, s: Tensor, d: Tensor, t: Tensor
) -> tuple[Tensor, ...]:
    """Pairs of one product that differ in how far they are apart."""
    q, k = heads(x, w, 2 * c.shape[-1]).chunk(2, -1)
    return rotated(q, c, s), a_part(k, d, t)


def read_otherwise(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What is rotated is a factor too."""
    y = heads(x, w, cos.shape[-1])
    return rotated(y, cos, sin), torch.mm(y.transpose(1, 2).reshape(-1, v.shape[0]), v)


def biased(x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, w, b).view(*x.shape[:-1], -1, cos.shape[-1]).transpose(1, 2)
    return (rotated(y, cos, sin) * 0.125).contiguous()


def of_columns(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of a matrix whose columns follow each other in memory."""
    return rotated((x @ w).view(*x.shape[:-1], -1, cos.shape[-1]), cos[:, None], sin[:, None])


def of_batch(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(torch.bmm(x, y), cos, sin)


def gated(x: Tensor, w: Tensor) -> Tensor:
    """Phi-3's."""
    gate, up = F.linear(x, w).chunk(2, -1)
    return up * F.silu(gate)


def gated_in_turn(x: Tensor, w: Tensor) -> Tensor:
    """GPT-OSS': a gate beside each column."""
    y = F.linear(x, w)
    return F.gelu(y[..., ::2]) * (y[..., 1::2] + 1)


def apart(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b, c = torch.split(F.linear(x, w), [128, 32, 32], -1)
    return F.silu(a), b.float().exp(), c + 1


def _of(how: object, rows: int = 10, n: int = 32, columns: int = D) -> Case:
    fn = lambda x, w, c, s: how(heads(x, w, n), c, s)  # type: ignore[operator]
    return Case(fn, ((2, rows // 2, D), (columns, D), (rows // 2, n), (rows // 2, n)), 1)


X, W, A = (2, 5, D), (D, D), (5, 32)
ROTARY = {
    "halves": _of(rotated),
    "long sums": Case(
        lambda x, w, c, s: rotated(heads(x, w, 32), c, s), ((2, 5, 2048), (D, 2048), A, A), 3
    ),
    "turned back": _of(turned_back),
    "many rows of a tile": _of(rotated, 64, 64),
    "odd halves": _of(rotated, 6, 10, 130),
    "neighbours": _of(of_neighbours),
    "complex": _of(of_complex),
    "each half": _of(of_halves),
    "half": Case(lambda x, w, c, s: rotated(heads(x, w, 32), c, s), (X, W, A, A), 1, torch.float16),
    "biased": Case(biased, (X, W, (D,), A, A), 1),
    "columns": Case(of_columns, (X, W, A, A), 1),
    "batch": Case(of_batch, ((3, 5, D), (3, D, 64), (5, 64), (5, 64)), 1),
    "first part": Case(lambda x, w, c, s: a_part(heads(x, w, 64), c, s), (X, W, A, A), 1),
    "last part": Case(lambda x, w, c, s: a_part(heads(x, w, 64), c, s, 32), (X, W, A, A), 1),
    "a part between groups": Case(
        lambda x, w, c, s: a_part(heads(x, w, 64), c, s, 24), (X, W, A, A), 4
    ),
    "pieces alike": Case(
        lambda x, w, c, s: a_part(heads(x, w, 24), c, s, 8), (X, (144, D), (5, 8), (5, 8)), 1
    ),
    "one matrix": Case(one_matrix, (X, (256, D), A, A), 1),
    "two angles": Case(two_angles, (X, W, A, A, (5, 16), (5, 16)), 3),
    "read otherwise": Case(read_otherwise, (X, W, A, A, (D, D)), 2),
    "gated": Case(gated, (X, (192, D)), 1),
    "gated in turn": Case(gated_in_turn, (X, (192, D)), 1),
    "apart": Case(apart, (X, (192, D)), 1),
}  # fmt: skip
