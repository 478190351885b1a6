"""Floats of 8 bits: casts, moves, comparisons and products, bit for bit as eager's, in loops of
ours, in every target and in packages; what eager refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.tools.explain import explain

F8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TARGETS = ("native", "python", "cpp", "fx")

formats = pytest.mark.parametrize("kind", F8, ids=str)
wides = pytest.mark.parametrize("wide", WIDE, ids=str)


def codes(kind: torch.dtype) -> torch.Tensor:
    """Every value of a format."""
    return torch.arange(256, dtype=torch.uint8).view(kind)


def numbers(kind: torch.dtype) -> torch.Tensor:
    """In float32: all values of a format, what lies between two of them and next to that, what is
    too large or too small, and random bits."""
    values = codes(kind).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat(
        [
            values,
            middles,
            values * 0.499,
            values.abs().max() * torch.tensor([1.01, 1.04, 1.07, 1.2, 2.0]),
        ]
    )
    ends = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3e38, -3e38]
    )
    around = torch.cat(
        [near, near.nextafter(torch.tensor(9e9)), near.nextafter(torch.tensor(-9e9)), -near, ends]
    )
    chance = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([around, chance.int().view(torch.float32)])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal codes; of wider results equal numbers, signs of zero and NaNs."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype in F8:
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    else:
        assert torch.equal(got.isnan(), want.isnan())
        kept = ~want.isnan()
        assert torch.equal(got[kept], want[kept])
        assert torch.equal(got[kept].signbit(), want[kept].signbit())


@formats
@wides
def test_every_code_is_read_as_eager_reads_it(kind: torch.dtype, wide: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.to(wide)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait")
    same(compiled(codes(kind)), fn(codes(kind)))
    same(compiled(codes(kind).view(16, 16).t()), fn(codes(kind).view(16, 16).t()))


@formats
@wides
def test_numbers_are_rounded_as_eager_rounds_them(kind: torch.dtype, wide: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.to(kind)

    x = numbers(kind).to(wide)
    if wide.itemsize == 2:
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(wide)
    torch._dynamo.reset()
    same(torch.compile(fn, backend="plait")(x), fn(x))


@formats
def test_casts_are_loops_that_fuse(kind: torch.dtype) -> None:
    """There and back is one kernel and no call of ATen; the codes that leave are those that eager
    gives."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = (x * 2).to(kind)
        return q, q.float() + 1

    x = torch.randn(64, 33)
    torch._dynamo.reset()
    for got, want in zip(torch.compile(fn, backend="plait")(x), fn(x), strict=True):
        same(got, want)
    torch._dynamo.reset()
    report = str(explain(fn, x, quiet=True))
    assert "aten::_to_copy" not in report


Two = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mask(q: torch.Tensor) -> torch.Tensor:
    return torch.arange(65536, device=q.device).view(256, 256) % 3 == 0


def rows(q: torch.Tensor) -> torch.Tensor:
    return torch.tensor([3, 0, -1], device=q.device)


OPERATORS: dict[str, Two] = {
    "eq": lambda q, r: q == r,
    "ne": lambda q, r: q != r.t(),
    "isnan": lambda q, r: q.isnan(),
    "mul": lambda q, r: q * r,
    "equals_number": lambda q, r: q == 1.01,
    "int": lambda q, r: q != 2,
    "equals_tensor": lambda q, r: q == torch.tensor(1.01),
    "row": lambda q, r: q == r[3],
    "too_large": lambda q, r: q == 1e9,
    "where": lambda q, r: torch.where(mask(q), q, r.t()),
    "where_number": lambda q, r: torch.where(mask(q), q, 1.01),
    "cat": lambda q, r: torch.cat([q, r]),
    "stack": lambda q, r: torch.stack([q, r], 1),
    "index": lambda q, r: q[rows(q), :, None],
    "pick": lambda q, r: q[mask(q)],
    "select": lambda q, r: q.index_select(1, rows(q).abs()),
    "rows": lambda q, r: F.embedding(rows(q).abs(), q),
    "flip": lambda q, r: q.flip(0),
    "roll": lambda q, r: q.roll(3, 1),
    "repeat": lambda q, r: q.repeat(2, 1),
    "pad": lambda q, r: F.pad(q, (1, 2), value=1.01),
    "full": lambda q, r: torch.full_like(q, -3.3),
    "zeros": lambda q, r: torch.zeros_like(q),
    "ones": lambda q, r: q.new_ones(3, 4),
    "rest": lambda q, r: q.t().contiguous(),
    "put": lambda q, r: q.index_put((rows(q),), r[:3]),
    "copy": lambda q, r: q.clone().copy_(r.float()),
    "put_ones": lambda q, r: torch.slice_scatter(q, r[:2].t().contiguous().t(), 0, 1, 3),
    "assign": lambda q, r: torch.select_scatter(q, r[0], 1, 4),
    "all": lambda q, r: q.all(1),
    "any": lambda q, r: q.any(),
    "copy_int": lambda q, r: q.clone().copy_(mask(q)),
    "arithmetic": lambda q, r: (q.float() * 1.5 - r.t().float()).relu().to(q.dtype),
    "sum": lambda q, r: q.float().nan_to_num(0, 1, -1).sum(1),
    "triple": lambda q, r: q.view(-1)[::3],
}
REFUSED: dict[str, Two] = {
    "no_flip": lambda q, r: q.flip(1),
    "no_add": lambda q, r: q + r,
    "no_neg": lambda q, r: -q,
    "no_lt": lambda q, r: q < r,
    "no_times_number": lambda q, r: q * 2,
    "no_sort": lambda q, r: q.sort()[0],
    "no_sum": lambda q, r: q.sum(),
    "no_mean": lambda q, r: q.mean(),
    "no_tril": lambda q, r: q.tril(),
    "no_clean": lambda q, r: q.nan_to_num(),
    "no_posinf": lambda q, r: q.isposinf(),
    "no_count": lambda q, r: q.count_nonzero(),
    "no_wide": lambda q, r: q == r.float(),
    "no_not": lambda q, r: q.logical_not(),
    "no_add_wide": lambda q, r: q + r.float(),
    "no_mixed": lambda q, r: torch.cat([q, r.half()]),
    "no_put": lambda q, r: q.index_put((rows(q),), r[:3], True),
    "no_put_wide": lambda q, r: q.index_put((rows(q),), r[:3].float()),
    "no_exp": lambda q, r: q.exp(),
    "no_gather": lambda q, r: q.gather(0, rows(q)[:, None].abs()),
    "no_fill": lambda q, r: q.masked_fill(mask(q), 0),
}


def pairs(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code against every other."""
    q = codes(kind).repeat(256, 1)
    return q, q.view(torch.uint8).t().contiguous().view(kind)


def check_operator(name: str, kind: torch.dtype, device: str) -> None:
    """Eager's result, or a refusal where eager refuses."""
    fn = (OPERATORS | REFUSED)[name]
    torch._dynamo.reset()
    q, r = (x.to(device) for x in pairs(kind))
    try:
        want = fn(q, r)
    except (RuntimeError, NotImplementedError):
        with pytest.raises(Exception):  # noqa: B017  (tracing has classes of its own)
            torch.compile(fn, backend="plait")(q, r)
        return
    got = torch.compile(fn, backend="plait")(q, r)
    assert got.stride() == want.stride(), f"{got.stride()}, eager {want.stride()}"
    if name == "mul":  # eager gives NaNs either sign
        got, want = got.float(), want.float()
    same(got, want)


@formats
@pytest.mark.parametrize("name", [*OPERATORS, *REFUSED])
def test_operators(name: str, kind: torch.dtype) -> None:
    check_operator(name, kind, "cpu")


def check_products(device: str) -> None:
    """Products with scales, by PyTorch's operator, of operands that casts made."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
        scale = x.abs().amax()
        return torch._scaled_mm(a, b.t(), scale, scale.square(), out_dtype=torch.bfloat16) + 1

    x, y = torch.randn(16, 64, device=device), torch.randn(32, 64, device=device)
    torch._dynamo.reset()
    same(torch.compile(fn, backend="plait")(x, y), fn(x, y))


def test_products() -> None:
    check_products("cpu")


def test_moves_and_comparisons_are_loops() -> None:
    """One kernel from f32 to bool, through a choice, a concatenation and indices."""

    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q = x.to(torch.float8_e5m2)
        both = torch.cat([q, torch.where(x > 0, q, q.roll(1, 0))])
        return both[at] == 1.5

    x, at = torch.randn(64, 33), torch.tensor([0, 63, 64, 127])
    torch._dynamo.reset()
    same(torch.compile(fn, backend="plait")(x, at), fn(x, at))
    torch._dynamo.reset()
    report = explain(fn, x, at, quiet=True)
    assert not report.extern_calls, report.extern_calls


def test_varying_sizes() -> None:
    """A cache of float8 that grows, read at other rows each time."""

    def fn(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_put_((at,), x.to(cache.dtype))
        return torch.cat([cache, cache[:2]])[at].float() * 2

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", dynamic=True)
    for rows in (5, 9, 64):
        a = torch.randn(rows, 16).to(torch.float8_e4m3fn)
        b, x, at = a.clone(), torch.randn(3, 16), torch.tensor([4, 0, 2])
        same(compiled(a, x, at), fn(b, x, at))
        same(a, b)


def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views, copies, choices and concatenations of float8 tensors."""
    q = x.to(torch.float8_e4m3fn)
    part = q[1:, ::2].t().contiguous()
    both = torch.cat([q, q.flip(0)])
    return (
        q,
        part,
        both,
        part.float() * 2,
        q.to(torch.float8_e5m2),
        q.view(torch.uint8) + 1,
        q.expand(2, 4, 8).float(),
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_target(target: str) -> None:
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    got = torch.compile(program, backend="plait", options={"wrapper": target})(x)
    for g, w in zip(got, program(x), strict=True):
        same(g, w)


def test_compile_and_package(tmp_path: Path) -> None:
    x, q = torch.randn(4, 8), torch.randn(4, 8).to(torch.float8_e5m2)

    def fn(x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *program(x), q.to(torch.float32) * x, q

    path = tmp_path / "float8.plait"
    plait.package(fn, path, (x, q))
    for made in (plait.compile(fn, (x, q)), plait.load(path)):
        for g, w in zip(made(x, q), fn(x, q), strict=True):
            same(g, w)
        with pytest.raises((plait.InputError, RuntimeError)):
            made(x, q.float())  # another element type is noticed


def test_training_through_a_cast() -> None:
    """Gradients pass the cast as eager's do."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float8_e4m3fn).to(torch.float32) * 3).sum()

    a = torch.randn(16, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    fn(a).backward()
    torch._dynamo.reset()
    torch.compile(fn, backend="plait")(b).backward()
    assert a.grad is not None and b.grad is not None
    same(b.grad, a.grad)
