"""Sums of elementwise products that are products of matrices (`graph/hidden_products.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.devices import facts_of
from plait.graph import hidden_products
from plait.graph.dead import drop_dead
from tests.against_eager import compiled, same

aten = torch.ops.aten
PRODUCTS = {aten.bmm.default, aten.mm.default}


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any size pay."""
    monkeypatch.setattr(hidden_products, "LEAST_SIDE", 2)
    monkeypatch.setattr(hidden_products, "MARGIN", -1.0)


def traced(
    fn: Callable[..., Any], *args: Any, mode: Literal["fake", "symbolic"] = "fake"
) -> tuple[Any, int]:
    """fn's graph after the pass, and how many sums it replaced."""
    table = compat.decompositions.decomposition_table()
    gm = make_fx(torch.func.functionalize(fn), table, mode)(*args)
    n = hidden_products.find_products(gm)
    drop_dead(gm)
    gm.graph.lint()
    gm.recompile()
    return gm, n


def check(fn: Callable[..., Tensor], *args: Any) -> Any:
    """Compares the graph with fn, by the distance from float64; returns the graph."""
    gm, n = traced(fn, *args)
    assert n == 1
    assert sum(node.target in PRODUCTS for node in gm.graph.nodes) == 1
    got, want = gm(*args), fn(*args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    truth = fn(*wide).double()
    off, eager = ((x.double() - truth).norm() for x in (got, want))
    eps = torch.finfo(want.dtype).eps
    assert off <= 2 * eager + 8 * eps * truth.norm() or not truth.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    return gm


def rows(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, :, None] * y[:, None]).sum(-1)


X, Y = torch.randn(3, 9, 20), torch.randn(3, 11, 20)

SHAPES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "batch": (rows, (X, Y)),
    "no batch": (lambda x, y: (x[:, None] * y).sum(-1), (X[0], Y[0])),
    "one operand has fewer dimensions": (lambda x, y: (x[:, :, None] * y).sum(-1), (X, Y[0])),
    "depth first": (
        lambda x, y: (x[:, :, :, None] * y[:, :, None]).sum(1), (X.mT.clone(), Y.mT.clone()),
    ),
    "columns first": (lambda x, y: (x[:, None] * y[:, :, None]).sum(-1), (X, Y)),
    "batch innermost": (
        lambda x, y: (x[:, None] * y[None]).sum(2),
        (torch.randn(9, 20, 3), torch.randn(11, 20, 3)),
    ),
    "batch between": (
        lambda x, y: (x[:, :, None, :, :] * y[:, None]).sum(-1),
        (torch.randn(2, 9, 3, 20), torch.randn(2, 11, 3, 20)),
    ),
    "keepdim": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1, keepdim=True), (X, Y)),
    "several sums, apart": (
        lambda x, y: (x[:, :, :, None] * y[:, :, None]).sum((1, -1)),
        (torch.randn(4, 5, 9, 6), torch.randn(4, 5, 11, 6).mT.clone().mT),
    ),
    "expanded": (
        lambda x, y: (x.unsqueeze(2).expand(-1, -1, 11, -1) * y[:, None]).sum(-1), (X, Y),
    ),
    "expanded and turned": (
        lambda x, y: (x.unsqueeze(3).expand(-1, -1, -1, 11).mT * y[:, None]).sum(-1), (X, Y),
    ),
    "odd strides": (rows, (torch.randn(20, 9, 6)[:, :, ::2].permute(2, 1, 0), Y.flip(1)[:, ::1])),
    "spread input": (rows, (X[:1].expand(3, 9, 20), Y)),
    "a factor": (
        lambda x, y, z: ((x * z)[:, :, None] * y[:, None]).sum(-1), (X, Y, torch.rand(3, 1, 20)),
    ),
    "a type": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1), (X, Y.double())),
    "whole numbers": (rows, (X, torch.randint(-3, 3, (3, 11, 20)))),
    "wider": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1, dtype=torch.float64), (X, Y)),
    "float64": (rows, (X.double(), Y.double())),
    "mean": (lambda x, y: (x[:, :, None] * y[:, None]).mean(-1), (X, Y)),
    "mean of two dimensions": (
        lambda x, y: (x[:, :, :, None] * y[:, :, None]).mean((1, -1), keepdim=True),
        (torch.randn(4, 5, 9, 6), torch.randn(4, 5, 11, 6).mT.clone().mT),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(any_size: None, name: str) -> None:
    fn, args = SHAPES[name]
    # A row of the table is float32 or wider, so nothing is rounded to 16 bits.
    check(fn, *args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(any_size: None, dtype: torch.dtype) -> None:
    x, y = X.to(dtype), Y.to(dtype)
    for fn in (
        rows,
        lambda x, y: (x[:, :, None] * y[:, None]).float().sum(-1),
        lambda x, y: (x[:, :, None] * y[:, None]).sum(-1, dtype=torch.float32),
    ):
        gm, n = traced(fn, x, y)
        assert n == 1
        got, want = gm(x, y), fn(x, y)
        truth = rows(x.double(), y.double())
        assert got.dtype == want.dtype
        assert (got.double() - truth).norm() <= (want.double() - truth).norm()
    narrowed = lambda x, y: (x[:, :, None] * y[:, None]).to(dtype).sum(-1)  # it rounds products
    assert traced(narrowed, X, Y)[1] == 0


def test_infinities_and_nothing(any_size: None) -> None:
    x, y = X.clone(), Y.clone()
    x[0, 0, 0], x[1, 2, 3], y[0, 0, 0], y[2, 5, 1] = torch.inf, -torch.inf, 0.0, torch.nan
    check(rows, x, y)
    nothing = check(rows, X[:, :, :0], Y[:, :, :0])
    assert not nothing(X[:, :, :0], Y[:, :, :0]).any()
    check(SHAPES["mean"][0], X[:, :, :0], Y[:, :, :0])  # no numbers


LEFT_ALONE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "both vary": (lambda x, y: (x * y).sum(-1), (X, X)),
    "a vector": (lambda x, y: (x * y).sum(-1), (X, Y[0, 0])),
    "no sum of both": (lambda x, y: (x[:, :, :, None] * y[:, None, None]).sum(1), (X, Y[:, 0])),
    "one sum of one": (lambda x, y: (x[:, :, None] * y[:, None]).sum((1, 3)), (X, Y)),
    "whole numbers": (rows, (X.int(), Y.int())),
    "bools": (rows, (X > 0, Y > 0)),
    "complex numbers": (rows, (X.to(torch.complex64), Y.to(torch.complex64))),
    "rounded results": (
        lambda x, y: (x[:, :, None] * y[:, None]).sum(-1, dtype=torch.bfloat16), (X, Y),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(any_size: None, name: str) -> None:
    fn, args = LEFT_ALONE[name]
    assert traced(fn, *args)[1] == 0


def test_a_product_with_other_readers_stays(any_size: None) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        each = x[:, :, None] * y[:, None]
        return each.sum(-1), each.amax(-1)

    assert traced(fn, X, Y)[1] == 0


def test_sizes_may_vary(any_size: None) -> None:
    """One of those that a view is told; of two none could be found."""
    assert traced(rows, X, Y, mode="symbolic")[1] == 0
    fn = compiled(rows, dynamic=True)
    torch._dynamo.mark_dynamic(X, 0)
    for batch in (3, 5):
        x, y = torch.randn(batch, 9, 20), torch.randn(batch, 11, 20)
        torch.testing.assert_close(fn(x, y), rows(x, y))


def test_few_rows_and_long_sums_are_left_alone() -> None:
    """Loops over them are as fast as memory is, and more exact."""
    for m, n, k, found in ((64, 64, 64, 1), (4, 512, 512, 0), (64, 64, 8192, 0), (8, 8, 8, 0)):
        x, y = torch.empty(4, m, k), torch.empty(4, n, k)
        assert traced(rows, x, y)[1] == found, (m, n, k)


def test_flags_that_round_factors(any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 obey them, sums do not. Factors of 64 bits are not rounded."""
    torch.set_float32_matmul_precision("medium")
    try:
        for device in ("cpu", "cuda"):
            with monkeypatch.context() as patched:
                patched.setattr(hidden_products, "facts_of", lambda _, d=device: facts_of(d))
                assert traced(rows, X, Y)[1] == 0
                assert traced(rows, X.double(), Y.double())[1] == 1
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_products, "facts_of", lambda device: facts_of("cuda"))


def test_a_gpu(any_size: None, as_on_a_gpu: None) -> None:
    """Products of bfloat16 stay in it; where a user wants the same bits at each run, eager's sum
    has them and the library may not."""
    gm, _ = traced(rows, X.bfloat16(), Y.bfloat16())
    (product,) = (n for n in gm.graph.nodes if n.target in PRODUCTS)
    assert product.meta["val"].dtype == torch.bfloat16
    assert traced(rows, X, Y)[1] == 1
    # A mean rounds once: what is divided by a power of two does, too.
    mean = lambda x, y: (x[:, :, None] * y[:, None]).mean(-1)
    for depth, found in ((20, 0), (16, 1)):
        x, y = (t[..., :depth].bfloat16() for t in (X, Y))
        assert traced(mean, x, y)[1] == found
    torch.use_deterministic_algorithms(True)
    try:
        assert traced(rows, X.double(), Y.double())[1] == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients() -> None:
    """Those of a product are products, too."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made, gradients = torch.func.vjp(rows, x, y)  # type: ignore[misc]
        return (made, *gradients(made.cos()))

    x, y = torch.randn(4, 64, 48), torch.randn(4, 80, 48)
    gm, n = traced(fn, x, y)
    assert n == 3
    for a, b in zip(gm(x, y), fn(x, y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
        assert a.stride() == b.stride()


def test_views_of_the_sum() -> None:
    """They lie in memory as views of eager's sum do."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = rows(x, y)
        return made, made.diagonal(4), made[1, 3:, 2:]

    args = torch.randn(4, 64, 48), torch.randn(4, 80, 48)
    assert traced(rows, *args)[1] == 1
    run = same(fn, lambda: [x.clone() for x in args])
    got, want = run(*args), fn(*args)
    assert [x.storage_offset() for x in got] == [x.storage_offset() for x in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_program(dtype: torch.dtype) -> None:
    """Chunks of a state space model: scores, what they weigh, and the gradients of both."""

    def fn(c: Tensor, b: Tensor, decay: Tensor, x: Tensor) -> Tensor:
        scores = (c[:, :, None] * b[:, None]).sum(-1) * decay
        return (scores[..., None].float() * x[:, None].float()).sum(2)

    shape = (2, 48, 3, 32)
    args = [torch.randn(*s).to(dtype) for s in (shape, shape, (2, 48, 48, 3), (2, 48, 3, 40))]
    wide = [a.double() for a in args]
    results: list[list[Any]] = []
    for f, values in ((fn, args), (compiled(fn, dynamic=False), args), (fn, wide)):
        given = [a.detach().clone().requires_grad_() for a in values]
        made = f(*given)
        torch.autograd.backward(made.square().sum())
        results.append([made.detach(), *(a.grad for a in given)])
    for k, truth in enumerate(results[2]):
        eager, got = results[0][k], results[1][k]
        off, eagers = ((t.double() - truth).norm() / truth.norm() for t in (got, eager))
        assert off <= 2 * eagers + 1e-6
