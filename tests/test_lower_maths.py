"""Matrix products, convolution, attention, scans and random numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.ir.calls import Extern
from tests.against_eager import same
from tests.lower_tools import check, lowered

aten = torch.ops.aten
r = torch.randn


def small(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 4, shape)


PRODUCTS = {
    "mm": (torch.mm, r(4, 5), r(5, 6)),
    "mm transposed": (lambda x, y: x @ y.T, r(400, 50), r(60, 50)),
    "mm half": (torch.mm, r(4, 5).bfloat16(), r(5, 6).bfloat16()),
    "mm of nothing": (torch.mm, r(4, 0), r(0, 6)),
    "linear": (lambda x, w, b: F.linear(x, w, b).relu(), r(4, 5), r(6, 5), r(6)),
    "large linear": (lambda x, w, b: F.linear(x, w, b).relu(), r(4, 50, 64), r(96, 64), r(96)),
    "bmm": (torch.bmm, r(3, 4, 5), r(3, 5, 6)),
    "large bmm": (lambda x, y: torch.bmm(x, y.transpose(1, 2)), r(3, 64, 50), r(3, 64, 50)),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, alpha=2, beta=0.5), r(6), r(4, 5), r(5, 6)),
    "addmm beta 0": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0),
        r(6) * float("nan"),
        r(4, 5),
        r(5, 6),
    ),
    "addmm ints": (
        lambda b, x, y: torch.addmm(b, x, y, alpha=2, beta=3),
        small(6),
        small(4, 5),
        small(5, 6),
    ),
    "baddbmm": (lambda b, x, y: torch.baddbmm(b, x, y, alpha=2), r(6), r(3, 4, 5), r(3, 5, 6)),
    "addmv": (lambda b, x, y: torch.addmv(b, x, y, alpha=2, beta=0.5), r(4), r(4, 5), r(5)),
    "mv": (torch.mv, r(4, 5), r(5)),
    "dot": (torch.dot, r(5), r(5)),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), r(2, 3, 4), r(2, 5, 4)),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), r(2, 3, 8, 8), r(4, 3, 3, 3), r(4)),
    "conv channels_last": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
        r(2, 3, 8, 8).to(memory_format=torch.channels_last),
        r(4, 3, 3, 3),
        r(4),
    ),
    "conv backward": (
        lambda g, x, w: aten.convolution_backward(
            g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
        r(2, 4, 8, 8),
        r(2, 3, 8, 8),
        r(4, 3, 3, 3),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        r(2, 4, 16, 8),
        r(2, 4, 16, 8),
        r(2, 4, 16, 8),
    ),
}


@pytest.mark.parametrize(
    ("case", "decompose"),
    [
        (c, d) for c in PRODUCTS for d in (True, False) if d or c not in ("mv", "dot")
    ],  # torch always decomposes these
)
def test_products(case: str, decompose: bool) -> None:
    fn, *args = PRODUCTS[case]
    check(fn, *args, decompose=decompose)


@pytest.mark.parametrize(
    "beta, alpha, bad", [(0, 0, math.nan), (1, 0.0, math.nan), (2.5, -0.0, math.inf)]
)
@pytest.mark.parametrize("size", [4, 64])
def test_products_times_zero_are_not_read(size: int, beta: float, alpha: float, bad: float) -> None:
    """As in BLAS. Eager's addr uses none, nor does its baddbmm of small matrices."""
    a, b, c = r(size, size), r(size, size), r(size, size)
    a[0, 0], b[1, 1] = bad, bad
    for op, args in (
        (torch.addmm, (c, a, b)),
        (torch.addmm, (c[0], a, b)),
        (torch.addmv, (c[0], a, b[0])),
        (torch.addbmm, (c, a[None], b[None])),
        (torch.baddbmm, (c[None, :4, :4], a[None, :4, :4], b[None, :4, :4])),
        (torch.addr, (c, a[0], b[1])),
    ):

        def fn(*args: torch.Tensor, op=op) -> torch.Tensor:
            return op(*args, beta=beta, alpha=alpha)

        got = torch.compile(fn, backend="plait")(*args)
        torch.testing.assert_close(got, fn(*args), equal_nan=True)


def test_only_large_products_are_calls() -> None:
    for n, calls in ((8, 0), (128, 1)):
        ops = lowered(torch.mm, (r(n, n), r(n, n))).program.ops
        found = [op for op in ops if isinstance(op, Extern)]
        assert len(found) == calls
        assert all(
            op.out_op == "aten::mm.out" and not op.fallback and op.flops == 2 * n**3 for op in found
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_scans(dtype: torch.dtype) -> None:
    x = (r(5, 7) * 4).to(dtype)
    check(lambda a: a.cumsum(1), x)
    check(lambda a: a.cumsum(0) + 1, x)
    check(lambda a: a.cumprod(-1), x)
    check(lambda a: a.cummax(1), x)
    check(lambda a: a.cummin(0), x)
    check(lambda a: a.cumsum(0), x[0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool])
def test_running_extremes_of_small_types(dtype: torch.dtype) -> None:
    same(
        lambda a: (a.cummax(1), a.cummin(0)),
        lambda: ((torch.arange(91) * 5 % 7 - 3).view(7, 13).to(dtype),),
        calls=1,
    )


@pytest.mark.parametrize("shape", [(400, 2), (37, 21), (3, 400), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_of_equal_running_extremes_the_last_counts(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])[
        torch.randint(4, shape, generator=torch.Generator().manual_seed(0))
    ]
    for dim in range(len(shape)):
        same(
            lambda a, d=dim: [torch.signbit(f(a, d)[0]) for f in (torch.cummin, torch.cummax)],
            lambda: (x.to(dtype),),
        )


inf, nan = float("inf"), float("nan")
EXTREME = {
    "asinh": (torch.asinh, torch.tensor([1e30, -2e25, 3.0, inf, -inf, nan, -0.0, 1e13]).repeat(9)),
    "acosh": (torch.acosh, torch.tensor([1e30, 2e25, 3.0, inf, -inf, nan, -1e30, 1e13]).repeat(9)),
    "asinh of f64": (torch.asinh, torch.full((64,), -1e200, dtype=torch.float64)),
    "floor division": (
        lambda x: x // 0.3,
        torch.tensor([3e38, -3e38, inf, 1.0, nan, -0.1]).repeat(9),
    ),
    "a NaN's variance": (lambda x: torch.var(x, correction=0), torch.tensor(nan)),
    "variance": (lambda x: x.var(1), torch.full((4, 31), 2e37)),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), torch.full((4, 31), 2e37)),
    "mean of an infinity": (
        lambda x: torch.var_mean(x, 1)[1],
        torch.tensor([[inf, 1.0, 2.0], [3.0, 4.0, 5.0]]),
    ),
    "no elements": (
        lambda x: ((x + 1)[66:], (x + 1).flip(0).narrow(0, 66, 51)),
        torch.ones(127, 0),
    ),
}


@pytest.mark.parametrize("case", EXTREME)
def test_extreme_inputs(case: str) -> None:
    fn, x = EXTREME[case]
    same(fn, lambda: (x.clone(),), calls=1)


@pytest.mark.parametrize("beta", [0.5, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_smooth_l1_loss(reduction: str, beta: float) -> None:
    def fn(x, y):
        return F.smooth_l1_loss(x, y, reduction=reduction, beta=beta)

    x, y = (
        torch.tensor([inf, nan, 1.0, 0.2, -3.0, 0.0]),
        torch.tensor([0.0, 0.0, nan, 0.4, 2.0, 0.0]),
    )
    same(fn, lambda: (x.clone(), y.clone()), grad=True, calls=1)
    same(fn, lambda: (x[3:].clone(), y[3:].clone()), grad=True, calls=1)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.logcumsumexp(1),
        lambda x: x.topk(2, 1),
        lambda x: x.median(1),
        lambda x: x.sort(0),
        lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    ],
)
def test_sorting_is_a_call_by_choice(fn) -> None:
    check(fn, r(4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_random_floats(dtype: torch.dtype) -> None:
    key = torch.tensor(123456789012345)
    check(
        lambda s, x: torch.ops.plait.philox_uniform(s, 3, x.shape, dtype), key, r(4, 9), exact=True
    )
    check(lambda s, x: torch.ops.plait.philox_normal(s, 3, x.shape, dtype), key, r(4, 9))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_random_integers(dtype: torch.dtype) -> None:
    key = torch.tensor(-987654321)
    check(
        lambda s, x: torch.ops.plait.philox_randint(s, 7, -3, 12, x.shape, dtype),
        key,
        r(4, 9),
        exact=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward(dtype: torch.dtype, dim: int) -> None:
    v, g = (
        r(4, 3, 5, dtype=dtype),
        r([4, 5][dim // 2], dtype=dtype).reshape((-1, 1, 1) if dim == 0 else (1, 1, -1)),
    )
    w, norms = aten._weight_norm_interface(v, g, dim)
    check(
        lambda *a: aten._weight_norm_interface_backward(*a, dim), torch.randn_like(w), v, g, norms
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_over_one_are_kernels(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of any size, with eager's zeros: some begin at 0, others have the sign of the product."""
    a = torch.linspace(-2, 2, 300).to(dtype).view(300, 1).expand(*batch, -1, -1)
    b = torch.linspace(0, 1, 200).to(dtype).view(1, 200).expand(*batch, -1, -1)
    report = plait.explain(torch.matmul, a, b, quiet=True)
    assert report.kernels == 1 and not report.extern_calls, report.extern_calls
    got, want = torch.compile(torch.matmul, backend="plait")(a, b), a @ b
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
