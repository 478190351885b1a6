"""Bits that only a device shows, against eager: subnormal numbers, quotients by numbers, zeros of
both signs, and what eager refuses there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait

TINY = (1e-45, -1e-45, 3e-39, -3e-39, 1.1754944e-38)
VALUES = (*TINY, 0.0, -0.0, 0.5, -0.5, 3.0, -7.0, 34.0, 3e30, -3e38, math.inf, -math.inf, math.nan)


def compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(
        lambda *xs: fn(*xs), backend="plait", fullgraph=True, options={"strict": True}
    )


def same(fn: Callable[..., Tensor], *given: Tensor) -> None:
    """The same bits as eager, but for those of NaN."""
    got, want = compiled(fn)(*given), fn(*given)
    equal = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    assert got.dtype == want.dtype and bool(equal.all()), (got[~equal], want[~equal])


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float64, device="cuda").to(dtype)


@pytest.mark.parametrize(
    "fn", [torch.floor, torch.ceil, torch.trunc, torch.round, torch.sign], ids=lambda f: f.__name__
)
def test_subnormal_numbers_are_no_zeros(fn: Callable[[Tensor], Tensor]) -> None:
    same(fn, numbers())


@pytest.mark.parametrize(
    "fn", [torch.remainder, torch.fmod, torch.floor_divide], ids=lambda f: f.__name__
)
def test_subnormal_numbers_of_two_operands_are_no_zeros(fn: Callable[..., Tensor]) -> None:
    small = numbers()[: len(TINY) + 2]  # and zeros: of far larger numbers remainders are no one's
    same(fn, small[:, None], numbers()[None, :])


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsqrt": torch.rsqrt,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "log": torch.log,
    "sin": torch.sin,
    "atan2": lambda x: torch.atan2(x[:, None], x[None, :]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_subnormal_numbers_are_near(name: str) -> None:
    """0 in place of 3e-39 would be far."""
    fn = FUNCTIONS[name]
    got, want = compiled(fn)(numbers()).double(), fn(numbers()).double()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=3e-45, equal_nan=True)


QUOTIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nine": lambda x: x / 9,
    "a float": lambda x: x / 0.3,
    "a float whose reciprocal depends on the precision": lambda x: x / 2.1,
    "a small float": lambda x: x / -1e-30,
    "infinity": lambda x: x / math.inf,
    "zero": lambda x: x / 0,
    "floor": lambda x: x // 3,
    "floor of a negative": lambda x: x // -0.3,
    "floor of a float": lambda x: x // 2.1,
    "trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "trunc of a float": lambda x: torch.div(x, 2.1, rounding_mode="trunc"),
    "a size": lambda x: x / x.shape[0],
    "a number on the host": lambda x: x / torch.tensor(9.0),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_by_numbers(name: str, dtype: torch.dtype) -> None:
    same(QUOTIENTS[name], numbers(dtype))
    same(QUOTIENTS[name], torch.arange(-1000, 1000, device="cuda").to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quotients_by_numbers_that_sizes_make(dtype: torch.dtype) -> None:
    """Dynamo makes a float32 tensor of such a number, whose reciprocal is rounded once more."""

    def fn(x: Tensor) -> Tensor:
        return x / (x.shape[0] * 0.37 + 1)

    def numbers_of(n: int) -> Tensor:
        return torch.arange(-1000, 1000, device="cuda").to(dtype).repeat(n, 1)

    exact = plait.compile(fn, (numbers_of(2),), dynamic_shapes=({0: torch.export.Dim("n")},))
    behind_dynamo = torch.compile(fn, backend="plait", dynamic=True)
    for n in (2, 3, 7):
        x = numbers_of(n)
        assert torch.equal(exact(x), fn(x))
        torch.testing.assert_close(behind_dynamo(x), fn(x), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_quotients_of_integers_by_numbers() -> None:
    same(lambda x: x / 9, torch.arange(-1000, 1000, device="cuda"))


@pytest.mark.parametrize("fn", [torch.cummin, torch.cummax], ids=lambda f: f.__name__)
def test_running_extremes_of_both_zeros(fn: Callable[..., tuple[Tensor, Tensor]]) -> None:
    rows = torch.tensor(
        [*itertools.product([0.0, -0.0, 1.0, -1.0, math.nan], repeat=4)], device="cuda"
    )
    same(lambda x: fn(x, 1)[0], rows)
    long = torch.zeros(3, 30_000, device="cuda")
    long[0, ::2] = -0.0
    long[1, :20_001] = -0.0
    long[2, 15_000:] = 5.0 if fn is torch.cummin else -5.0
    same(lambda x: fn(x, 1)[0], long)


def test_floats_of_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.full((2,), float(round(x.shape[0] * 0.37, 1)), device=x.device)

    dynamic = torch.compile(fn, backend="plait", dynamic=True, options={"strict": True})
    for n in (4, 5, 7):
        x = torch.ones(n, device="cuda")
        assert torch.equal(dynamic(x), fn(x))


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((3, 4), (4, 5))),
    "addmm": (torch.addmm, ((5,), (3, 4), (4, 5))),
    "addbmm": (torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "mv": (torch.mv, ((3, 4), (4,))),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,))),
    "dot": (torch.dot, ((4,), (4,))),
    "vdot": (torch.vdot, ((4,), (4,))),
    "dot of nothing": (torch.dot, ((0,), (0,))),
    "mv of nothing": (torch.mv, ((3, 0), (0,))),
    "no rows": (torch.mm, ((0, 4), (4, 5))),
    "nothing to add": (torch.mm, ((3, 0), (0, 5))),
    "addmm of nothing": (torch.addmm, ((5,), (3, 0), (0, 5))),
}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_integers_are_refused_as_eager_refuses_them(
    name: str, dtype: torch.dtype
) -> None:
    fn, shapes = PRODUCTS[name]
    given = [torch.ones(s, dtype=dtype, device="cuda") for s in shapes]
    try:
        want = fn(*given)
    except Exception as error:  # noqa: BLE001 - whatever eager raises
        with pytest.raises(type(error)) as caught:
            compiled(fn)(*given)
        assert str(error).splitlines()[0] in str(caught.value)
    else:
        assert torch.equal(compiled(fn)(*given), want)


WRAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "minus": lambda x: -x,
    "from nothing": lambda x: 0 - x,
    "times -1": lambda x: x * -1,
    "abs": torch.abs,
    "where": lambda x: torch.where(x < 0, -x, x),
    "sum of two": lambda x: x + x.flip(0),
    "product": lambda x: x * x.flip(0),
    "quotient": lambda x: torch.div(
        x, torch.where(x == 0, 1, -1).to(x.dtype), rounding_mode="floor"
    ),
    "shift": lambda x: x << 3,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("name", WRAPS)
def test_integers_wrap_around_before_they_are_widened(name: str, dtype: torch.dtype) -> None:
    fn, limits = WRAPS[name], torch.iinfo(dtype)
    table = torch.tensor(
        (limits.min, limits.max, limits.min + 1, 0, 1, 2, 3, limits.max // 2), device="cuda"
    )
    x = table.to(dtype).repeat(3, 5)
    for widened in (
        Tensor.long,
        lambda y: y.sum(-1),
        Tensor.double,
        lambda y: y.to(torch.int32) // 2,
    ):
        got, want = compiled(lambda x, widened=widened: widened(fn(x)))(x), widened(fn(x))
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "pool", [lambda x: F.max_pool2d(x, 3, 1, 1), lambda x: F.adaptive_max_pool2d(x, (3, 5))]
)
def test_of_zeros_the_first_is_the_greatest(
    pool: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    table = torch.tensor((0.0, -0.0, -1.0), device="cuda").to(dtype)
    same(pool, table[torch.randint(3, (2, 3, 9, 11), generator=gen, device="cuda")])


@pytest.mark.parametrize("base", [2, 2.0, 3, 0.5, 10])
def test_powers_of_numbers(base: float) -> None:
    """In float32, eager's power is that of a newer CUDA library than Triton's: both are near
    float64's."""
    x = torch.arange(-40, 41, device="cuda") / 4
    same(lambda x: base**x, x.double())
    truth = base ** x.double()
    got = compiled(lambda x: base**x)(x).double()
    assert bool(((got - truth).abs() <= 2 * torch.finfo(torch.float32).eps * truth).all())
