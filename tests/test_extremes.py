"""Elementwise functions, forward and gradient, at the ends of every dtype: zeros, infinities, NaN,
subnormals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from plait.ir.dtypes import DTYPES
from plait.kernel.cpu.expr import literal
from tests import extremes
from tests.extremes import FLOATS, INTS, ONE, TWO
from tests.kernel_tools import isas

ALL = (*FLOATS, *INTS)
slow = pytest.mark.slow
APART = {"logaddexp2": "terms that cancel", "addcdiv": "Dynamo takes it apart"}

ZEROS = ("softshrink", "lerp")
"""Where torch's decomposition has another sign of zero: of -0.0 * 0, and of what rounds to 0."""

CANCELS = ("special.i0e", "special.i1e", "tanh", "gelu_tanh")
"""Whose gradients are differences of numbers up to 1 that are nearly equal."""
SHORT = {"digamma": math.pi**2 / 6, "hardsigmoid": 1 / 6}
"""Whose float64 gradients eager has with fewer digits -> ours, at 1 and at 0."""


def fmods(a: torch.Tensor, b: torch.Tensor, remainder: bool) -> torch.Tensor:
    """Exact ones: eager's of vectors are NaN where a quotient is large."""
    found = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        bad = math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0
        r = math.nan if bad else math.fmod(x, y)
        found.append(r + y if remainder and r != 0 and (r < 0) != (y < 0) else r)
    return torch.tensor(found, dtype=torch.float64)


def exact(name: str, fn: extremes.Fn, args: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    wide = tuple(a.double() for a in args)
    if name in ("fmod", "remainder"):
        return fmods(*wide, name == "remainder")
    return fn(*wide).double() if args[0].dtype != torch.float64 else None


def check(table: dict[str, extremes.Fn], args: tuple[torch.Tensor, ...]) -> None:
    """One program of all functions of a table that eager has for these arguments."""
    fns = {name: fn for name, fn in table.items() if extremes.accepts(fn, args)}
    fns = {name: fn for name, fn in fns.items() if name not in APART}
    compiled = torch.compile(lambda *a: tuple(fn(*a) for fn in fns.values()), backend="plait")
    wrong = []
    for (name, fn), got in zip(fns.items(), compiled(*args), strict=True):
        want = fn(*args)
        assert got.dtype == want.dtype, name
        truth = exact(name, fn, args) if got.dtype.is_floating_point else None
        ok = extremes.right(got, want, truth)
        ok |= (got == 0) & (want == 0) if name in ZEROS else False
        for k in (~ok).nonzero().flatten().tolist()[:3]:
            given = [a[k].item() for a in args]
            wrong.append(f"{name}{given} is {got[k].item()}, eager's {want[k].item()}")
    assert fns and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [
    pytest.param(d, marks=() if d in (torch.float32, torch.int32) else slow) for d in ALL
], ids=str)  # fmt: skip
def test_one_argument(dtype: torch.dtype) -> None:
    check(dict(ONE), (extremes.special(dtype).repeat_interleave(16),))


@pytest.mark.parametrize("dtype", [
    pytest.param(d, marks=() if d in (torch.float32, torch.int32) else slow) for d in ALL
], ids=str)  # fmt: skip
def test_two_arguments(dtype: torch.dtype) -> None:
    a, b = extremes.pairs(dtype)
    if not dtype.is_floating_point:  # eager itself dies of the least number divided by -1
        kept = (b != 0) & ~((a == extremes.ends(dtype)[0]) & (b + 1 == 0))
        a, b = a[kept], b[kept]
    check(dict(TWO), (a, b))


QUICK = (
    "hardtanh",
    "relu6",
    "hardshrink",
    "softshrink",
    "hardswish",
    "hardsigmoid",
    "elu",
    "threshold",
    "clamp",
)


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d == torch.float32 else slow) for d in FLOATS]
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in ONE])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    args = (extremes.special(dtype).repeat_interleave(16),)
    fn = ONE[name]
    if not extremes.accepts(fn, args) or not fn(args[0].clone().requires_grad_()).requires_grad:
        pytest.skip("eager has no gradient")
    try:
        (want,) = extremes.gradients(fn, args)
    except NotImplementedError:
        pytest.skip("eager has no gradient")
    (got,) = extremes.gradients(torch.compile(fn, backend="plait"), args)
    assert got is not None and want is not None
    truth = extremes.gradients(fn, (args[0].double(),))[0] if dtype != torch.float64 else None
    if name in SHORT and dtype == torch.float64:
        at = args[0] == (1 if name == "digamma" else 0)
        torch.testing.assert_close(
            got[at], torch.full_like(got[at], SHORT[name]), rtol=1e-15, atol=0
        )
        torch.testing.assert_close(got, want, rtol=1e-7, atol=0, equal_nan=True)
        return
    ok = extremes.right(got, want, truth)
    if name in CANCELS:
        ok |= (got - want).abs() <= torch.finfo(dtype).eps
    bad = (~ok).nonzero().flatten().tolist()
    # Eager's vectors and what is left over may differ: hardshrink at NaN, which torch takes apart
    # before any table.
    alone = {k: extremes.gradients(fn, (args[0][k : k + 1],))[0] for k in bad}
    bad = [
        k for k, one in alone.items() if one is None or not extremes.near(got[k : k + 1], one).all()
    ]
    assert not bad, [(args[0][k].item(), got[k].item(), want[k].item()) for k in bad]


@pytest.mark.parametrize("shape", [(3,), (5, 3), (64, 40)])
def test_deviations_whose_squares_overflow(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) * 1e30
    y = torch.rand(shape) * 1e19

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        found = [x.std(), x.std(-1), *torch.std_mean(x, -1), x.std(0, correction=0)]
        return [*found, y.var(), y.var(-1), *torch.var_mean(y, 0)]

    torch.testing.assert_close(torch.compile(fn, backend="plait")(x, y), fn(x, y))


def test_batch_norm_of_numbers_whose_squares_overflow() -> None:
    x = torch.tensor([[1e30], [3e30], [0.0], [-2e30], [1e30]]).expand(5, 2)
    one = torch.ones(2)
    got = torch.compile(F.batch_norm, backend="plait")(x, None, None, one, one, training=True)
    want = F.batch_norm(x.double(), None, None, one.double(), one.double(), training=True)
    torch.testing.assert_close(got, want.float())


LITERALS = [
    (t, v)
    for t in ("int64", "int32", "int16", "int8", "uint8")
    for v in extremes.ends(getattr(torch, t))
    if v
]  # fmt: skip


@pytest.mark.parametrize("name, value", LITERALS)
def test_numbers_at_the_ends(name: str, value: int) -> None:
    """As operands of everything that takes a number."""
    x = extremes.special(getattr(torch, name)).repeat(3)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            x % value,
            x // value,
            torch.fmod(x, value),
            torch.div(x, value, rounding_mode="trunc"),
        ]
        found += [
            x + value,
            x - value,
            value - x,
            x * value,
            x & value,
            x | value,
            x ^ value,
            x == value,
        ]
        found += [
            x < value,
            x >= value,
            x.clamp(min=value),
            x.clamp(max=value),
            x.clamp(value, value),
        ]
        found += [
            torch.full_like(x, value),
            torch.where(x > 1, x, value),
            x.masked_fill(x > 1, value),
        ]
        return [*found, F.pad(x, (1, 1), value=value), x.maximum(torch.full_like(x, value))]

    torch.testing.assert_close(torch.compile(fn, backend="plait")(x), fn(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", INTS[:4], ids=str)
def test_the_least_number_divided_by_minus_one(dtype: torch.dtype) -> None:
    """It wraps around; the division of the processor ends the process."""
    low = extremes.ends(dtype)[0]
    for n in (1, 40):
        x, by = torch.full((n,), low, dtype=dtype), torch.full((n,), -1, dtype=dtype)

        def fn(x: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
            return [
                x // by,
                torch.div(x, by, rounding_mode="trunc"),
                x % by,
                torch.fmod(x, by),
                x % -1,
            ]

        found = torch.compile(fn, backend="plait")(x, by)
        for k, t in enumerate(found):
            torch.testing.assert_close(t, torch.full_like(x, low if k < 2 else 0))


def test_literals_have_their_type() -> None:
    """C++ negates a number that it read without its sign, in a wider type."""
    for d in DTYPES.values():
        if d.kind == "i":
            assert (
                str(2 ** (8 * d.nbytes - 1)) not in literal(-(2 ** (8 * d.nbytes - 1)), d)
                or d.nbytes < 4
            )


DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "by a number": lambda a, b: a // 0,
    "modulo a number": lambda a, b: a % 0,
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_division_of_integers_by_zero_is_eagers_error(name: str) -> None:
    fn = DIVISIONS[name]
    compiled = torch.compile(fn, backend="plait")
    for dtype, n in itertools.product((torch.int64, torch.int32, torch.uint8), (1, 40)):
        a, b = torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype)
        b[-1] = 0
        with pytest.raises(Exception) as want:
            fn(a, b)
        with pytest.raises(want.type, match="ZeroDivisionError"):
            compiled(a, b)


SUMS: dict[str, extremes.Fn] = {
    "sum": lambda x: x.sum(-1),
    "sum of columns": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "nansum": lambda x: x.nansum(-1),
    "cumsum": lambda x: x.cumsum(1),
    "einsum": lambda x: torch.einsum("ij->i", x),
    "mm": lambda x: x @ x.new_ones(x.shape[1], 3),
    "mv": lambda x: x @ x.new_ones(x.shape[1]),
    "bmm": lambda x: x[None] @ x.new_ones(1, x.shape[1], 3),
    "dot": lambda x: x[0].dot(x.new_ones(x.shape[1])),
    "avg_pool1d": lambda x: F.avg_pool1d(x.mT[None], 2),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[None], 1),
    "sum in another dtype": lambda x: x.sum(1, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 3])
def test_sums_of_negative_zeros(columns: int, dtype: torch.dtype) -> None:
    """A sum begins at 0, also one of a single element."""
    x = torch.full((30, columns), -0.0, dtype=dtype)
    for name, fn in SUMS.items():
        if dtype == torch.bfloat16 and name in ("mm", "mv", "bmm", "dot"):
            continue  # by libraries, as eager's
        got, want = torch.compile(fn, backend="plait")(x), fn(x)
        assert torch.equal(got.signbit(), want.signbit()), name


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers_of_the_ends(dtype: torch.dtype) -> None:
    """Of -0 and -infinity, eager's square roots are no powers, but in half precision on a CPU."""
    x = torch.tensor([-math.inf, -0.0, 0.0, math.inf, math.nan, -1.0, 4.0] * 3).to(dtype)
    powers = (0.5, -0.5, -1, -2, 2, 3, 1.5, -1.5)
    got = torch.compile(lambda x: [x**p for p in powers], backend="plait")(x)
    for p, have in zip(powers, got, strict=True):
        want = x**p
        assert torch.equal(have.isnan(), want.isnan()), p
        assert torch.equal(have.signbit()[~want.isnan()], want.signbit()[~want.isnan()]), p
        torch.testing.assert_close(have, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_two_that_overflow_beside_products_that_do_not(dtype: torch.dtype) -> None:
    x = torch.tensor([0.9, -1.1e-5, 0.0, -0.0, float("inf"), float("nan"), 3e4, 1e-7], dtype=dtype)[
        :, None
    ]
    exponents = torch.tensor(
        [-3000, -1100, -1074, -277, -150, -149, -1, 0, 3, 127, 128, 200, 277, 1023, 1100, 3000]
    )
    x, exponents = (t.contiguous() for t in torch.broadcast_tensors(x, exponents))
    run = torch.compile(torch.ldexp, backend="plait")
    torch.testing.assert_close(
        run(x, exponents), torch.ldexp(x, exponents), rtol=0, atol=0, equal_nan=True
    )


TO_INTEGERS = [
    -3e38,
    -1e10,
    -40000.0,
    -300.0,
    -2.5,
    -0.5,
    -0.0,
    0.5,
    1.7,
    255.0,
    256.0,
    40000.0,
    70000.0,
]
TO_INTEGERS += [
    2.0**31,
    3e9,
    2.0**32,
    5e9,
    2.0**62,
    2.0**63,
    1.8e19,
    2.0**64,
    1e25,
    -(2.0**31),
    -9.3e18,
]
TO_INTEGERS += [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize("src", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_casts_to_integers_wrap_at_every_size(src: torch.dtype, name: str, isa: str) -> None:
    """One number is cast by scalar code, many by vectors. Eager's two ways differ in places."""
    dtype = getattr(torch, name)
    run = torch.compile(lambda x: x.to(dtype), backend="plait", options={"isa": isa})
    x = torch.tensor(TO_INTEGERS, dtype=torch.float64).to(src)
    alone = [run(x[k : k + 1]).item() for k in range(len(x))]
    many = x.repeat_interleave(16)
    assert run(many)[::16].tolist() == alone
    want = [x[k : k + 1].to(dtype).item() for k in range(len(x))]
    for value, have, a, b in zip(
        x.tolist(), alone, want, many.to(dtype)[::16].tolist(), strict=True
    ):
        assert a != b or have == a, value


@pytest.mark.parametrize("src", [torch.float32, torch.float64, torch.bfloat16])
def test_casts_of_constants_to_integers_are_those_of_numbers(src: torch.dtype) -> None:
    """C++ compilers make other integers of constants that are out of range than processors do."""
    names = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
    dtypes = [getattr(torch, name) for name in names]
    numbers = torch.tensor(TO_INTEGERS, dtype=torch.float64).to(src)

    def of_constants(x: torch.Tensor) -> list[torch.Tensor]:
        held = [torch.full((), n, dtype=src) for n in numbers.tolist()]
        return [torch.stack([n.to(dtype) for n in held]) for dtype in dtypes]

    def of_numbers(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([n.to(dtype) for n in x.unbind()]) for dtype in dtypes]

    found, want = (torch.compile(f, backend="plait")(numbers) for f in (of_constants, of_numbers))
    for name, a, b in zip(names, found, want, strict=True):
        assert a.tolist() == b.tolist(), name


def softmax_rows(x: torch.Tensor) -> torch.Tensor:
    """Five rows of numbers, four with a part, or all, that is no number or infinite."""
    x[1, : x.shape[1] // 2] = -math.inf
    x[2], x[3, 7], x[4, -7] = -math.inf, math.nan, math.inf
    return x


@pytest.mark.parametrize("length", [1 << 18, 300007])
def test_softmax_of_rows_in_parts(length: int) -> None:
    """Few rows are cut; a part of minus infinities adds nothing, a row of them is NaN."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.softmax(x, 1), F.log_softmax(x * 2, 1), torch.logsumexp(x - 1, 1)

    x = softmax_rows(torch.randn(5, length))
    exact = fn(x.double())
    for got, want, true in zip(torch.compile(fn, backend="plait")(x), fn(x), exact, strict=True):
        assert extremes.right(got, want, true).all()
