"""Rules that replaced calls of ATen: masked_scatter, distances, fake quantisation, with gradients;
scatter chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.ir.calls import Extern
from plait.schedule.deps import extent
from plait.schedule.plan import Kernel
from plait.wrapper.program import CompileRecord, observers
from tests.against_eager import compiled, same
from tests.lower_tools import lowered

r = torch.randn
MASK = torch.tensor([[True, False, True, True, False], [False] * 5, [True] * 5])

MASKED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "elements": (lambda x, m, s: x.masked_scatter(m, s), (r(3, 5), MASK, r(20))),
    "tokens": (lambda x, m, s: x.masked_scatter(m[..., None], s), (r(3, 5, 7), MASK, r(9, 7))),
    "expanded tokens": (
        lambda x, m, s: x.masked_scatter(m.unsqueeze(-1).expand_as(x), s) * 2,
        (r(3, 5, 7), MASK, r(15, 7)),
    ),
    "rows of a mask": (lambda x, m, s: x.masked_scatter(m[:, None], s), (r(3, 4, 5), MASK, r(40))),
    "one element, kept": (
        lambda x, m, s: x.masked_scatter(m, s),
        (r(1), torch.tensor([False]), r(1)),
    ),
    "one element, replaced": (
        lambda x, m, s: x.masked_scatter(m, s),
        (r(1), torch.tensor([True]), r(1)),
    ),
    "from one element": (
        lambda x, m, s: x.masked_scatter(m, s),
        (r(4), torch.arange(4) == 2, r(1)),
    ),
    "transposed": (lambda x, m, s: x.masked_scatter(m.t(), s), (r(3, 5).t(), MASK, r(4, 5).t())),
    "half": (lambda x, m, s: x.masked_scatter(m, s), (r(3, 5).half(), MASK, r(20).half())),
}


def given(*args: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """Fresh copies of these arguments at every call."""
    return lambda: [a.clone() for a in args]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_masked_scatter(name: str, dynamic: bool) -> None:
    fn, args = MASKED[name]
    same(fn, given(*args), grad=True, dynamic=dynamic)


def test_masked_scatter_of_too_few() -> None:
    run = compiled(lambda x, m, s: x.masked_scatter(m, s))
    with pytest.raises(RuntimeError, match="the source has too few elements"):
        run(r(3, 5), MASK, r(4))


def test_a_mask_of_tokens_is_counted_once() -> None:
    fn, args = MASKED["expanded tokens"]
    low = lowered(fn, args)
    (counts,) = [low.program.buffers[o.outs[0]] for o in low.program.ops if hasattr(o, "axis")]
    assert counts.shape == (15,)


def test_a_scatter_does_not_write_over_one_that_is_read_later() -> None:
    """The second runs in place of the first, whose memory the third may not take then."""

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        second = x.scatter(1, i, s).scatter(1, i.flip(0), s * 2)
        return second.exp() + second.scatter(1, i.flip(1), s * 3).sin()

    same(fn, given(r(8, 8), torch.randint(8, (8, 2)), r(8, 2)))


def _slices(c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    c[:, 3:5] = k
    c[1:3, 6] = k[:2, 0] * 2
    c[1:3, 1:3] = k[:2] + 1
    c[0, ::2] = 7
    return c.sum(1)


def _between(c: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    c[:, 3:5] = k
    twice = c * 2
    c[:, 4] = k[:, 0]
    return twice, c[:, 1:]


def _moved_along(c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    c[:, 1:] = c[:, :-1].clone()
    c[:, 2:4] = k
    return c + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [_slices, _between, _moved_along])
def test_parts_of_an_input_are_replaced_in_place(fn: Callable[..., Any], dynamic: bool) -> None:
    """Whatever reads the old contents, the new ones, or both."""
    run = torch.compile(fn, backend="plait", dynamic=dynamic)
    for n in (9, 12):
        mine, eager, k = r(8, n, 6), torch.empty(8, n, 6), r(8, 2, 6)
        eager.copy_(mine)
        torch.testing.assert_close(run(mine, k), fn(eager, k))
        assert torch.equal(mine, eager)


def test_of_a_cache_only_what_changes_is_written() -> None:
    def fn(c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        c[:, 3:5] = k
        c[:, 7] = k[:, 0]
        return k + 1

    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    torch.compile(fn, backend="plait")(r(8, 512, 64), r(8, 2, 64))
    observers.reset(token)
    (record,) = records
    kernels = [n for s in record.plan.steps if isinstance(s, Kernel) for n in s.nests]
    assert all(math.prod(extent(v) for v in k.vars) <= 8 * 2 * 64 for k in kernels)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_cdist(p: float) -> None:
    same(lambda a, b: torch.cdist(a, b, p), given(r(2, 5, 4), r(2, 6, 4)), grad=True)
    same(lambda a, b: torch.cdist(a, b, p), given(r(5, 4), r(2, 6, 4)), grad=True)
    assert not any(
        isinstance(op, Extern)
        for op in lowered(lambda a: torch.cdist(a, a, p), (r(5, 3),)).program.ops
    )


def test_cdist_with_equal_rows() -> None:
    for p in (1.0, 1.5, 2.0, 3.0):
        same(lambda a, p=p: torch.cdist(a, a, p), given(r(4, 3)), grad=True)


def test_large_euclidean_distances_are_a_matrix_product() -> None:
    same(lambda a, b: torch.cdist(a, b), given(r(40, 4), r(30, 4)), grad=True)
    forward = torch.ops.aten._cdist_forward.default
    (call,) = lowered(lambda a, b: forward(a, b, 2.0, None), (r(40, 4), r(30, 4))).program.ops
    assert isinstance(call, Extern) and not call.fallback


def test_fake_quantize() -> None:
    x = r(7, 9) * 3
    same(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), given(x), grad=True)
    zero = torch.tensor([128], dtype=torch.int32)
    same(
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, 0, 255),
        given(x, torch.tensor([0.05]), zero),
    )
    zeros = torch.arange(9, dtype=torch.int32)
    same(
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 1, -128, 127),
        given(x, torch.rand(9) * 0.1 + 0.01, zeros),
    )
