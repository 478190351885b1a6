"""Sizes that a trace leaves out for nothing: a part of a cache that may be all of it, in
`plait.compile` and in packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import plait
from plait.errors import InputError
from tests.against_eager import sharing, tree_equal

FULL = 16
Fn = Callable[[Tensor, Tensor, int], Any]


def written(k: Tensor, x: Tensor, t: int) -> Tensor:
    k = k.clone()
    k[:, :t] = x
    return k * 2


def written_in_place(k: Tensor, x: Tensor, t: int) -> Tensor:
    k[:, :t] = x
    return k.sum(1)


def filled(k: Tensor, x: Tensor, t: int) -> Tensor:
    k[:, :t].fill_(2.0)
    return k + 1


def in_two(k: Tensor, x: Tensor, t: int) -> Tensor:
    a, b = k.split([t, FULL - t], 1)
    return torch.cat([a * 2, b * 3], 1)


def asked(k: Tensor, x: Tensor, t: int) -> Tensor:
    mask = torch.ones(FULL, FULL).triu()
    if t != FULL:
        mask = mask[:t, :t]
    return x[:, :, 0, None] * mask


LEFT_OUT: dict[str, Fn] = {
    "written": written,
    "written in place": written_in_place,
    "filled": filled,
    "narrowed": lambda k, x, t: (k.narrow(1, 0, t).copy_(x), k * 2)[1],
    "slice_scatter": lambda k, x, t: torch.slice_scatter(k, x, 1, 0, t),
    "product": lambda k, x, t: k[:, :t] * x,
    "rows by a matrix": lambda k, x, t: k[:, :t] @ torch.arange(12.0).view(4, 3),
    "linear": lambda k, x, t: F.linear(k[:, :t], torch.arange(12.0).view(3, 4), torch.ones(3)),
    "batches": lambda k, x, t: (x @ k[:, :t].mT).softmax(-1) @ k[:, :t],
    "attention": lambda k, x, t: F.scaled_dot_product_attention(x, k[:, :t], k[:, :t]),
    "sum": lambda k, x, t: k[:, :t].sum(1),
    "a view of it": lambda k, x, t: k[:, :t].transpose(1, 2),
    "copied": lambda k, x, t: k[:, :t].clone(),
    "other elements": lambda k, x, t: k[:, :t].double(),
    "one element less and less": lambda k, x, t: k[:, t - 1 :] + 1,
    "reshaped inside": lambda k, x, t: F.cross_entropy(k[:, :t].reshape(-1, 4), x.flatten(0, 1)),
    "causal": lambda k, x, t: (x @ x.mT).masked_fill(torch.ones(FULL, FULL).triu()[:t, :t] > 0, 0),
    "in two": in_two,
    "asked": asked,
}


def args(t: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(t)
    return torch.randn(2, FULL, 4), torch.randn(2, t, 4).softmax(-1)


def agrees(run: Callable[..., Any], fn: Fn, sizes: tuple[int, ...]) -> None:
    for t in sizes:
        given, eagers = args(t), args(t)
        out, want = run(*given), fn(*eagers, t)
        torch.testing.assert_close(out, want)
        assert out.stride() == want.stride()
        assert sharing(given, out) == sharing(eagers, want)
        torch.testing.assert_close(given, eagers)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_part_may_be_all(name: str) -> None:
    fn = LEFT_OUT[name]
    t = Dim("t", min=2, max=FULL)
    run = plait.compile(lambda k, x: fn(k, x, x.shape[1]), args(5), ({}, {1: t}))
    agrees(run, fn, (2, 5, FULL - 1, FULL))
    with pytest.raises(InputError, match="at most 16"):
        run(*args(FULL + 1))


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", ["written in place", "batches", "causal"])
def test_in_every_target(name: str, wrapper: str) -> None:
    fn = LEFT_OUT[name]
    shapes = ({}, {1: Dim.AUTO})
    run = plait.compile(
        lambda k, x: fn(k, x, x.shape[1]), args(5), shapes, options={"wrapper": wrapper}
    )
    agrees(run, fn, (2, 5, FULL))


@pytest.mark.parametrize("name", ["written in place", "batches", "in two"])
def test_in_a_package(name: str, tmp_path: Path) -> None:
    fn, path = LEFT_OUT[name], tmp_path / "model.plait"
    shapes = ({}, {1: Dim.DYNAMIC})
    plait.package(lambda k, x: fn(k, x, x.shape[1]), path, args(5), shapes, machines="portable")
    agrees(plait.load(path), fn, (2, 5, FULL))


OTHERS: dict[str, Fn] = {
    "a copy that is the argument then": lambda k, x, t: k[:, :t].contiguous(),
    "what is written then": lambda k, x, t: (k[:, :t].reshape(-1).mul_(2), k.sum())[1],
    "another answer": lambda k, x, t: k[:, :t].sin() if t != FULL else k.cos(),
    "asked of memory": lambda k, x, t: k[:, :t] + k[:, :t].is_contiguous(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_where_it_makes_a_difference_it_is_left_out(name: str) -> None:
    fn = OTHERS[name]
    run = plait.compile(lambda k, x: fn(k, x, x.shape[1]), args(5), ({}, {1: Dim.AUTO}))
    agrees(run, fn, (2, 5, FULL - 1))
    with pytest.raises(InputError, match="sizes break a condition of the program"):
        run(*args(FULL))


def two(k: Tensor, x: Tensor, both: bool) -> Tensor:
    a, b = x.shape[:2]
    part = k[:a, :b]
    if a == 8 and b == FULL:
        part = k * 2 if both else k
    return part * x


@pytest.mark.parametrize("both", [False, True])
def test_two_sizes_at_once(both: bool) -> None:
    """Each of them makes no difference; both of them may."""
    k = torch.randn(8, FULL)
    shapes = ({}, {0: Dim("a", max=8), 1: Dim("b", max=FULL)})
    run = plait.compile(lambda k, x: two(k, x, both), (k, torch.randn(3, 5)), shapes)
    for sizes in ((8, 5), (3, FULL), (2, 2), (8, FULL)):
        x = torch.randn(sizes)
        if both and sizes == (8, FULL):
            with pytest.raises(InputError, match="sizes break a condition"):
                run(k, x)
        else:
            torch.testing.assert_close(run(k, x), two(k, x, both))


def test_bits_of_eager_where_its_products_are_others() -> None:
    """With numerics of eager a product of rows is not one of a batch."""
    fn = LEFT_OUT["linear"]
    run = plait.compile(
        lambda k, x: fn(k, x, x.shape[1]),
        args(5),
        ({}, {1: Dim.AUTO}),
        options={"numerics": "eager"},
    )
    for t in (2, 5, FULL):
        try:
            out = run(*args(t))
        except InputError:
            assert t == FULL
        else:
            tree_equal(out, fn(*args(t), t), "result")
