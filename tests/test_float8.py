"""Casts from and to floats of 8 bits: bit for bit as eager's, in loops of ours, in every target and
in packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plait
from plait.tools.explain import explain

F8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
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
