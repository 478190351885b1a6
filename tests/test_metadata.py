"""Results lie in memory as eager's do: element type, strides, offset, what they share with
inputs and with each other, what autograd knows of them; on every road, at sizes and positions
that vary."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import plait
from plait.graph.strides import _index as index_in_eagers_order
from tests.metadata import facts, versions


def floats(rows: int = 8, columns: int = 6) -> Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns) / 7


def behind(x: Tensor) -> Tensor:
    """x as part of a larger tensor, which it does not begin."""
    return torch.cat([x[:3], x])[3:]


def same_twice(x: Tensor, k: int) -> Any:
    y = x[k:] + 1
    return y, y


def in_place_on_a_view(x: Tensor, k: int) -> Any:
    v = x[k:]
    v.mul_(2)
    return v, x, x[:, k]


def moved_view(x: Tensor, k: int) -> Any:
    y = x * 2
    y[k].add_(1)
    return y[k:], y


def then_changed(x: Tensor, old: Any) -> Any:
    x.add_(1)
    return old


VIEWS: dict[str, Callable[[Tensor, int], Any]] = {
    "one row": lambda x, k: x[k].view(torch.int32),
    "rows": lambda x, k: x[k:].view(torch.int32),
    "smaller elements": lambda x, k: x[k:].view(torch.int16),
    "bytes": lambda x, k: x[k].view(torch.uint8),
    "larger elements": lambda x, k: x[:, 2 * k :].view(torch.float64),
    "half": lambda x, k: x[k:, 2:4].view(torch.bfloat16),
    "complex": lambda x, k: torch.view_as_complex(x[k:].view(-1, 3, 2)),
    "as_strided": lambda x, k: x.as_strided((3, 2), (6, 2), 2 * k),
    "unfold": lambda x, k: x[k:].unfold(0, 3, 2),
    "chain": lambda x, k: x[k:].t()[1:].unsqueeze(1).view(torch.int32),
    "two of one": lambda x, k: (x[k:], x[k].view(torch.int32), x),
    "views of a value": lambda x, k: (lambda y: (y, y[k:].view(torch.int32), y[k]))(x + 1),
    "no value but views": lambda x, k: (lambda y: (y[k:].view(torch.int32), y[k]))(x + 1),
    "unfold of a value": lambda x, k: (lambda y: (y[k:].unfold(1, 2, 1), y))(x + 1),
    "expand": lambda x, k: (lambda y: (y.expand(4, *y.shape), y))(x[k:] * 2),
    "split": lambda x, k: torch.split(x * 2, 2, 1),
    "chunk of an input": lambda x, k: x[k:].chunk(2, 1),
    "unbind": lambda x, k: (x[:, k:] + 1).unbind(0),
    "copies": lambda x, k: (x[k:].clone(), x[k:].contiguous(), x[k:].t().contiguous()),
    "copies of another type": lambda x, k: (
        x[k:].view(torch.int32).clone(),
        x[k].view(torch.int32).clone(),
    ),
    "a copy, and a view of what was copied": lambda x, k: (
        lambda y: (y.narrow_copy(1, 0, 6), y[k:])
    )(x.cumsum(1)),
    "views of a repeated value": lambda x, k: (lambda y: (y.expand(2, *y.shape), y[k:]))(
        x.repeat_interleave(2, 1)
    ),
    "views of a copied input": lambda x, k: (lambda y: (y.t(), y[k:], x[k:]))(x.clone()),
    "copies of a value": lambda x, k: (
        lambda y: (y[k:].clone(), y[k].view(torch.int32).clone(), y)
    )(x + 1),
    "only a copy of a value": lambda x, k: (x.cumsum(0) + 1)[k].clone(),
    "views of a copy of a part": lambda x, k: (lambda y: (y.t(), y[1:], y))((x + 1)[:, 1:].clone()),
    "views of what was copied on the way": lambda x, k: (lambda y: (y, y[k:], y.view(-1)))(
        (x + 1).clone()
    ),
    "one row of a value": lambda x, k: torch.logaddexp(x.t().bfloat16(), torch.zeros(()))[k],
    "views of a value of rows": lambda x, k: (lambda y: (y, y.view(2, 2, 3, 1)))(
        torch.tril(x.as_strided((2, 6, 1), (1, 1, 1)).clone())
    ),
    "same twice": same_twice,
    "input twice": lambda x, k: (x, x[k:], x),
    "changed, a view of it": lambda x, k: x.mul_(2)[k:],
    "changed, another type": lambda x, k: (x.add_(1), x[k:].view(torch.int32))[1],
    "changed through a view": in_place_on_a_view,
    "changed between": moved_view,
    "copied before a change": lambda x, k: then_changed(
        x, (lambda y: (y[k:], y.t(), y))(x.clone())
    ),
    "copied as another type, then changed": lambda x, k: then_changed(
        x, x[k:].view(torch.int16).clone()
    ),
    "a part copied, then changed": lambda x, k: then_changed(
        x, x.as_strided((3, 2), (6, 2), 2 * k).clone()
    ),
    "a part of a copy": lambda x, k: then_changed(
        x, (lambda y: (y.as_strided((3, 2), (6, 2), 2 * k), y))(x.clone())
    ),
    "detached": lambda x, k: (x[k:].detach(), x.detach()),
    "real and imaginary": lambda x, k: torch.view_as_real(
        torch.view_as_complex(x[k:].view(-1, 3, 2)) * 2
    ),
}
POSITIONS = (3, 1, 2, 0, 2)
Call = tuple[Callable[[], Tensor], int]
CALLS: list[Call] = [(floats, k) for k in POSITIONS[:3]] + [
    (lambda: behind(floats()), k) for k in POSITIONS[3:]
]
# What torch.compile's own tracing (backend="aot_eager") loses: that a view at a varying position
# was detached.
TRACING_DIFFERS = {"detached"}


def check(
    name: str, compiled: Callable[..., Any], calls: Sequence[Call], autograd: bool = True
) -> None:
    fn = VIEWS[name]
    for make, k in calls:
        x, twin = make(), make()
        before = versions([x])[0]
        got, want = compiled(x, k), fn(twin, k)
        for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert torch.equal(g, w), (name, k)
        assert facts(got, [x], autograd) == facts(want, [twin], autograd), (name, k)
        assert torch.equal(x, twin)
        assert (x._version - before > 0) == (twin._version - versions([make()])[0] > 0)


slow = pytest.mark.slow  # every target is met every day, on one road


@pytest.mark.parametrize("wrapper", ["native", "python", pytest.param("cpp", marks=slow), "fx"])
@pytest.mark.parametrize("name", VIEWS)
def test_of_compiled_functions(name: str, wrapper: str) -> None:
    compiled = torch.compile(
        VIEWS[name], backend="plait", options={"wrapper": wrapper}, fullgraph=True
    )
    check(name, compiled, CALLS, autograd=name not in TRACING_DIFFERS)


@pytest.mark.parametrize(
    "wrapper", ["native", pytest.param("python", marks=slow), "cpp", pytest.param("fx", marks=slow)]
)
@pytest.mark.parametrize("name", VIEWS)
def test_of_programs_without_dynamo(name: str, wrapper: str) -> None:
    compiled = plait.compile(VIEWS[name], (floats(), 2), options={"wrapper": wrapper})
    check(
        name,
        compiled,
        [(floats, 2), (lambda: behind(floats()), 2)],
        autograd=name not in TRACING_DIFFERS,
    )


@pytest.mark.parametrize("name", VIEWS)
def test_of_packages(name: str, tmp_path: Path) -> None:
    plait.package(VIEWS[name], tmp_path / "a.plait", (floats(), 2), machines=["portable"])
    loaded = plait.load(tmp_path / "a.plait")
    check(
        name,
        loaded,
        [(floats, 2), (lambda: behind(floats()), 2)],
        autograd=name not in TRACING_DIFFERS,
    )


@pytest.mark.parametrize("name", VIEWS)
def test_of_training(name: str) -> None:
    """A result beside the views wants a gradient."""
    fn = VIEWS[name]
    compiled = torch.compile(
        lambda x, w, k: (fn(x, k), (w * 2).sum()), backend="plait", fullgraph=True
    )
    for make, k in CALLS:
        x, twin, w = make(), make(), torch.ones(3, requires_grad=True)
        got, loss = compiled(x, w, k)
        want = fn(twin, k)
        for g, e in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert torch.equal(g, e)
        assert facts(got, [x], name not in TRACING_DIFFERS) == facts(
            want, [twin], name not in TRACING_DIFFERS
        )
        loss.backward()
        assert w.grad is not None and w.grad.eq(2).all()


@torch.library.custom_op("plait_metadata::add_one_", mutates_args=("x",))
def add_one_(x: Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("of_input", [True, False])
def test_operators_do_not_write_what_is_read_as_another_type(of_input: bool, wrapper: str) -> None:
    def fn(x: Tensor) -> Any:
        x = x if of_input else x * 2
        bits = x.view(torch.int16).clone()
        add_one_(x)
        return bits + 1, bits, x.view(torch.int16) + 1

    compiled = torch.compile(
        fn, backend="plait", options={"wrapper": wrapper, "strict": True}, fullgraph=True
    )
    for got, want in zip(compiled(floats()), fn(floats()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_a_value_written_at_a_found_place_has_memory_of_its_own(wrapper: str) -> None:
    """`slice_scatter` and its like copy all of an operand's storage, which must not be an arena
    that other values lie in."""

    def fn(x: Tensor, at: Tensor) -> Any:
        y = x.half()
        y.index_put_((at + 1,), x[0].half(), accumulate=True)
        row = y.narrow(0, at.item(), 1)
        row[..., ::2] = 1
        return y, row

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="plait", options={"wrapper": wrapper}, fullgraph=True)
        for k in (1, 0):
            x, at = floats(), torch.tensor(k)
            got, want = compiled(x, at), fn(x, at)
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g, w)
                assert g.storage_offset() == w.storage_offset()
                assert g.untyped_storage().nbytes() == w.untyped_storage().nbytes()


def larger_elements(x: Tensor, k: int) -> Any:
    y = x[k:].view(torch.int64)
    return y, y + 1, y[1:]


def complex_elements(x: Tensor, k: int) -> Any:
    y = torch.view_as_complex(x[k:].view(-1, 2))
    return y, torch.view_as_real(y) + 1, y[1:]


def larger_and_larger(x: Tensor, k: int) -> Any:
    y = x.view(torch.int16)[2 * k :].view(torch.int32)[2:].view(torch.int64)
    return y, y + 1, x


def one_and_nothing(x: Tensor, k: int) -> Any:
    y = x[k : k + 2].view(torch.int64)
    return y, y + 1, y[:0], y[:, None].expand(1, 3)


def nothing_left(x: Tensor, k: int) -> Any:
    return x[12 + k :].view(torch.int64) + 1, x[12 + k :].view(torch.int64)


LARGER = [larger_elements, complex_elements, larger_and_larger, one_and_nothing, nothing_left]


def numbers(first: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(20, dtype=dtype)[first : first + 13]


def _place(t: Tensor, x: Tensor) -> tuple[int, bool]:
    own = t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    return t.storage_offset(), own


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("way", ["static", "dynamic", "direct"])
@pytest.mark.parametrize("fn", LARGER, ids=lambda fn: str(fn.__name__))
def test_larger_elements_of_an_input_that_begins_between_two(
    fn: Callable[[Tensor, int], Any], way: str, wrapper: str
) -> None:
    """An odd number in its storage begins x, and the view at an even one. Where both are odd
    PyTorch refuses the view: no guard of Dynamo looks at where x begins."""
    options = {"wrapper": wrapper}
    dtype = torch.float32 if fn is complex_elements else torch.int32
    if way == "direct":
        compiled: Any = plait.compile(fn, (numbers(1, dtype), 1), options=options)
    else:
        compiled = torch.compile(
            fn, backend="plait", dynamic=way == "dynamic", options=options, fullgraph=True
        )
    for first in (1, 3, 5):
        x = numbers(first, dtype)
        got, want = compiled(x, 1), fn(x, 1)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
            assert _place(g, x) == _place(w, x)
    for run in (fn, compiled):
        with pytest.raises(RuntimeError, match=r"storage.offset.* divisible by"):
            run(numbers(2, dtype), 1)


def places_of_nothing(at: int) -> Callable[[Tensor], Any]:
    return lambda x: (x[2:].view(torch.int32)[at:at].view(torch.int64), x + 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_larger_elements_of_nothing_where_an_input_begins_elsewhere(at: int, dynamic: bool) -> None:
    """Each view counts its place from the input, once; eager refuses those between two elements."""
    fn = places_of_nothing(at)
    compiled = torch.compile(fn, backend="plait", dynamic=dynamic, fullgraph=True)
    numbers = torch.arange(60).short()
    refused = []
    for first in (4, 2, 0, 6, 8):
        x = numbers[first : first + 20]
        try:
            want = fn(x)
        except RuntimeError:
            refused.append(first)
            with pytest.raises(RuntimeError, match=r"offset.* divisible by"):
                compiled(x)
            continue
        got = compiled(x)
        assert torch.equal(got[1], want[1]) and got[0].shape == want[0].shape
        assert got[0].storage_offset() == want[0].storage_offset()
    assert 0 < len(refused) < 5


FOUND: dict[str, Callable[[Tensor], Any]] = {
    "distinct values": lambda x: (lambda y: (y, y.view(2, -1), y[1:]))(torch.unique(x)),
    "chosen values": lambda x: (lambda y: (y.view(4, -1), y))(torch.masked_select(x, x > 1)),
    "of two results": lambda x: (lambda y: (y[0], y[1].t(), y[0].view(2, -1)))(
        torch.unique(x, return_inverse=True)
    ),
}
"""Views of results whose sizes depend on data."""
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda x: x.narrow_copy(1, 1, 3),
    "a part that is cloned": lambda x: x[1:].clone(),
    "a row-major copy": lambda x: x.t().contiguous(),
    "an exchange of dimensions": lambda x: torch.transpose_copy(x, 0, 1),
    "one of several": lambda x: torch.unbind_copy(x.view(2, 4, 6), 2)[1],
    "repeated": lambda x: x.repeat(1, 2),
    "broadcast": lambda x: torch.expand_copy(x[:1], (4, 6)),
    "a part of a value": lambda x: x.cumsum(1)[:, :3].t().contiguous(),
}
"""What eager makes in memory of its own, and kernels may read where it comes from."""


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", COPIES)
def test_views_of_copies_that_begin_at_a_found_number(name: str, wrapper: str) -> None:
    copy = COPIES[name]

    def fn(x: Tensor, at: Tensor) -> Any:
        y = copy(x)
        row = y.select(0, at.item())
        return row, row[1:], y

    options = {"wrapper": wrapper, "strict": True}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="plait", options=options, fullgraph=True)
        for k in (1, 0):
            x, at = floats(), torch.tensor(k)
            got, want = compiled(x, at), fn(x, at)
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g, w)
            assert facts(got, [x]) == facts(want, [x])


PARTS: dict[str, tuple[Callable[[Tensor, int], Any], list[int]]] = {
    "a float of a size": (
        lambda x, k: (lambda y: (y, y.tensor_split(2)[1]))(x * x.shape[0] ** -k),
        [1, 2],
    ),
    "a size that may be 0": (
        lambda x, k: (lambda y: (y, y.split(1, 0)[-1]))(x[..., k:].contiguous()),
        [2, 3, 6],
    ),
    "nothing, behind the end": (lambda x, k: x.gather(0, x[:k].long()).split(5, 1)[-1], [0, 0]),
    "a pad that may be 0": (lambda x, k: F.pad(x.t(), (0, k)), [1, 0, 2, -1, -2]),
    "a pad at both ends": (lambda x, k: F.pad(x.t(), (k, -1, -1, k)), [-1, 0, 1]),
}
"""What a number decides about the place or the order of a result."""


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("name", PARTS)
def test_numbers_that_decide_where_results_lie(
    name: str, dynamic: bool | None, wrapper: str
) -> None:
    fn, numbers = PARTS[name]
    compiled = torch.compile(fn, backend="plait", dynamic=dynamic, options={"wrapper": wrapper})
    for k in numbers:
        x = floats()
        got, want = compiled(x, k), fn(x, k)
        for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert torch.equal(g, w)
        assert facts(got, [x]) == facts(want, [x])


def with_a_view(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y.mT


FACTORS: dict[str, tuple[Callable[[Tensor, int], Any], Sequence[tuple[int, ...]]]] = {
    "one larger element": (
        lambda x, k: with_a_view(x.view(torch.int64)[k:].clone()),
        [(3, 2, 2), (5, 4, 2)],
    ),
    "larger elements": (
        lambda x, k: with_a_view(x.view(torch.int64)[k:].clone()),
        [(3, 2, 8), (5, 4, 6)],
    ),
    "one, indexed": (
        lambda x, k: with_a_view(x.view(torch.int64)[torch.eye(2).long()]),
        [(3, 2, 2), (5, 4, 2)],
    ),
    "half a size": (
        lambda x, k: with_a_view(torch.cat([x[..., : x.shape[2] // 2], x[..., :1]])),
        [(3, 2, 3), (5, 4, 3)],
    ),
}
"""Strides with factors that tracing knows more of than it says."""


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", FACTORS)
def test_views_of_values_with_known_factors_in_their_strides(name: str, wrapper: str) -> None:
    fn, shapes = FACTORS[name]
    options, dim = {"wrapper": wrapper}, torch.export.Dim.AUTO
    direct = plait.compile(
        fn, (torch.rand(shapes[0]), 1), (dict.fromkeys(range(3), dim), dim), options=options
    )
    for compiled in (direct, torch.compile(fn, backend="plait", dynamic=True, options=options)):
        for shape in shapes:
            x = torch.rand(shape)
            got, want = compiled(x, 1), fn(x, 1)
            assert all(map(torch.equal, got, want)) and facts(got, [x]) == facts(want, [x])


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_views_of_a_copy_that_the_example_alone_packs(wrapper: str) -> None:
    """PyTorch guards that the copy has no gaps: its strides do not say so."""

    def fn(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        y = x[k:].clone().squeeze()
        return y, y.unsqueeze(0)

    compiled = torch.compile(
        fn, backend="plait", dynamic=True, options={"wrapper": wrapper}, fullgraph=True
    )
    for k in (0, 2, 0):
        x = floats().t()
        got, want = compiled(x, k), fn(x, k)
        assert all(map(torch.equal, got, want)) and facts(got, [x]) == facts(want, [x])


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", FOUND)
def test_views_of_found_sizes_share_memory(name: str, wrapper: str) -> None:
    fn = FOUND[name]
    compiled = plait.compile(fn, (floats(),), options={"wrapper": wrapper})
    for x in (floats(), floats().flip(0)):
        got, want = compiled(x), fn(x)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w)
        assert facts(got, [x]) == facts(want, [x])


def laid(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return (torch.arange(-40.0, 260.0) / 7).as_strided(shape, strides)


def places(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.arange(200).remainder(5).as_strided(shape, strides)


ORDERS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "power of a number": (lambda x: 2**x, (laid((7, 3), (1, 7)),)),
    "sign of a transposed one": (
        lambda x, y: torch.copysign(x, y),
        (laid((7, 3), (3, 1)), laid((7, 3), (1, 7))),
    ),
    "signs of windows": (
        lambda x, y: torch.copysign(x, y),
        (laid((1, 3, 5), (15, 5, 1)), laid((5, 3, 5), (1, 1, 1))),
    ),
    "signs of one row": (
        lambda x, y: torch.copysign(x, y),
        (laid((7, 3), (1, 7)), laid((3,), (1,))),
    ),
    "index of windows": (lambda x, i: x[i], (laid((5,), (1,)), places((4, 5), (1, 1)))),
    "transposed index": (
        lambda x, i: x[:, i],
        (laid((6, 5, 7), (1, 6, 30)), places((2, 3), (1, 2))),
    ),
    "index of three dimensions": (
        lambda x, i: x[i],
        (laid((5, 6), (6, 1)), places((2, 3, 4), (3, 1, 6))),
    ),
    "rows of size 1": (
        lambda x, i: x[i],
        (laid((1, 2, 1, 3), (6, 3, 3, 1)), torch.zeros(34).long().view(2, 17).t()),
    ),
    "columns of size 1": (lambda x, i: x[:, i], (laid((1, 5, 3), (1, 3, 1)), places((4,), (1,)))),
    "spread indices of int32": (
        lambda x, i, j: x[i, j],
        (
            laid((3, 1, 2), (2, 2, 1)),
            torch.zeros(1, 2).int(),
            torch.zeros(4).int().as_strided((2, 1, 2), (1, 2, 2)),
        ),
    ),
    "signs of rows of size 1": (
        lambda x, y: torch.copysign(x, y),
        (laid((1, 1, 3), (1, 1, 1)), laid((3, 1, 1), (1, 3, 1))),
    ),
    "indices apart": (
        lambda x, i, j: x[i, :, j],
        (laid((5, 2, 5), (1, 5, 10)), places((4, 3), (1, 4)), places((3,), (1,))),
    ),
    **{
        f"{name} of transposed ones": (fn, (laid((4, 3), (1, 4)), laid((2, 4, 3), (1, 2, 8))))
        for name, fn in {
            "floor division": lambda x, y: x // (y.abs() + 1),
            "truncated division": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
            "heaviside": lambda x, y: torch.heaviside(x, y),
            "ldexp": lambda x, y: torch.ldexp(x, y),
            "logaddexp": lambda x, y: torch.logaddexp(x, y),
            "logical and": lambda x, y: torch.logical_and(x, y).float(),
            "xlogy": lambda x, y: torch.xlogy(y, x.abs() + 1),
            "xlog1py": lambda x, y: torch.special.xlog1py(y, x.abs()),
        }.items()
    },
    "batch norm of transposed rows": (
        lambda x: F.batch_norm(x, None, None, training=True),
        (laid((3, 2, 4), (1, 3, 6)),),
    ),
    "batch norm by given statistics": (
        lambda x, m: F.batch_norm(x, m, m.abs() + 1),
        (laid((3, 2, 4), (8, 1, 2)), laid((2,), (1,))),
    ),
    "batch norm of channels last": (
        lambda x: F.batch_norm(x, None, None, training=True),
        (laid((2, 3, 2, 4), (24, 1, 12, 3)),),
    ),
    "reflected channels last": (
        lambda x: F.pad(x, (1, 1, 1, 0, 0, 1), mode="reflect"),
        (laid((1, 2, 3, 3, 3), (54, 1, 18, 6, 2)),),
    ),
    "shuffled channels": (lambda x: F.channel_shuffle(x, 2), (laid((2, 4, 2, 3), (24, 1, 12, 4)),)),
    "rolled channels last": (lambda x: x.roll(1, 2), (laid((2, 3, 4, 5), (60, 1, 15, 3)),)),
    "channels last, rolled not at all and back": (
        lambda x: x.roll((3, 1), (1, 3)),
        (laid((2, 3, 4, 5), (60, 1, 15, 3)),),
    ),
    "index_fill of what has gaps": (
        lambda x, i: x.index_fill(0, i, 3),
        (laid((6, 4), (2, 12)), torch.tensor([1, 2])),
    ),
}
"""Results that PyTorch's own shape functions lay out otherwise than its kernels."""


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("fn", [torch.unique, torch.unique_consecutive])
def test_different_parts_along_a_dimension(fn: Callable[..., Any], dim: int) -> None:
    """In PyTorch's shape functions a dimension that is counted from the end is another one."""
    x = torch.randint(0, 2, (4, 3, 2), generator=torch.Generator().manual_seed(0))

    def parts(x: Tensor) -> Any:
        return fn(x, dim=dim, return_inverse=True, return_counts=True)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for compiled in (torch.compile(parts, backend="plait"), plait.compile(parts, (x,))):
            got, want = compiled(x), parts(x)
            torch.testing.assert_close(got, want)
            assert facts(got, (x,)) == facts(want, (x,))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_results_lie_in_the_order_of_eagers_kernels(name: str, dynamic: bool) -> None:
    fn, args = ORDERS[name]
    want = fn(*args)
    shapes = (
        tuple(dict.fromkeys(range(x.ndim), torch.export.Dim.AUTO) for x in args)
        if dynamic
        else None
    )
    direct = plait.compile(fn, args, shapes)
    for compiled in (torch.compile(fn, backend="plait", dynamic=dynamic), direct):
        got = compiled(*args)
        torch.testing.assert_close(got, want)
        assert facts(got, args) == facts(want, args)


def strided(shape: Sequence[int], rng: random.Random) -> Tensor:
    """Zeros of a shape, in a random order of dimensions, some with gaps or spread from one row."""
    order = rng.sample(range(len(shape)), len(shape))
    room = [n + rng.choice([0, 0, 0, 1]) for n in shape]
    x = torch.zeros([room[d] for d in order], dtype=torch.int64).permute(
        [order.index(d) for d in range(len(shape))]
    )
    for d, n in enumerate(shape):
        x = x.narrow(d, 0, n)
    if shape and rng.random() < 0.2:
        x = x.narrow(d := rng.randrange(len(shape)), 0, 1).expand(shape)
    return x.contiguous() if rng.random() < 0.3 else x


def test_orders_of_indices_of_any_layout() -> None:
    """What is traced for an index lies as eager's result, dimensions of size 1 and spread ones
    among its operands."""
    rng, seen = random.Random(0), 0
    for _ in range(600):
        x = strided([rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 4))], rng)
        whole = [rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 3))]
        spread = [[rng.choice([1, n, n, n]) for n in whole] for _ in range(x.ndim)]
        given = [strided(n, rng) if rng.random() < 0.6 else None for n in spread]
        given = given if any(i is not None for i in given) else [strided(whole, rng)]
        given = [None if i is None else i.int() for i in given] if rng.random() < 0.2 else given
        want = torch.ops.aten.index.Tensor(x, given)
        with FakeTensorMode() as mode:
            fake = index_in_eagers_order(
                mode.from_tensor(x), [None if i is None else mode.from_tensor(i) for i in given]
            )
        seen += fake is not NotImplemented
        assert fake is NotImplemented or facts([fake], []) == facts([want], []), (
            x.shape,
            x.stride(),
            given,
        )
    assert seen > 100


def test_orders_of_all_operands_of_copysign() -> None:
    strides = [(1, 7), (1, 1), (3, 1), (0, 1), (1, 0), (20, 2)]
    for a, b in itertools.product(strides, strides):
        x, y = laid((7, 3), a), laid((7, 3), b)
        got, want = (
            torch.compile(torch.copysign, backend="plait", dynamic=False)(x, y),
            torch.copysign(x, y),
        )
        assert torch.equal(got, want) and got.stride() == want.stride(), (a, b)
        torch._dynamo.reset()


STEPS = ("floor division", "heaviside", "logical and")


@pytest.mark.parametrize("name", [name for name in ORDERS if not name.startswith(STEPS)])
def test_results_in_the_order_of_eagers_kernels_have_gradients(name: str) -> None:
    fn, (x, *rest) = ORDERS[name]
    grads = []
    for run in (fn, torch.compile(fn, backend="plait")):
        leaf = x.detach().requires_grad_()
        out = run(leaf, *rest)
        out.backward(torch.arange(float(out.numel())).view(out.shape))
        grads.append((leaf.grad, out.stride()))
    torch.testing.assert_close(grads[1][0], grads[0][0])
    assert grads[1][1] == grads[0][1]


CONJUGATED: dict[str, Callable[[Tensor, int], Any]] = {
    "of inputs": lambda x, k: (lambda z: (z.conj(), z[k:].conj(), z))(
        torch.view_as_complex(x.view(-1, 3, 2))
    ),
    "negated": lambda x, k: torch.view_as_complex(x[k:].view(-1, 3, 2)).conj().imag,
    "of a value": lambda x, k: (torch.view_as_complex(x[k:].view(-1, 3, 2)) * 2).conj(),
    "inside": lambda x, k: torch.view_as_complex(x[k:].view(-1, 3, 2)).conj().imag + 1,
}


@pytest.mark.filterwarnings("ignore:plait")
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", CONJUGATED)
def test_lazily_conjugated_results_have_their_values(name: str, wrapper: str) -> None:
    """Eager runs a graph with such views of inputs; without Dynamo they are copies."""
    fn, options = CONJUGATED[name], {"wrapper": wrapper, "strict": False}
    compiled = torch.compile(fn, backend="plait", options=options)
    for k in (3, 1, 2):
        for g, w in zip(
            pytree.tree_leaves(compiled(floats(), k)),
            pytree.tree_leaves(fn(floats(), k)),
            strict=True,
        ):
            assert torch.equal(g, w)
    made = plait.compile(fn, (floats(), 2), options={"wrapper": wrapper})
    for g, w in zip(
        pytree.tree_leaves(made(floats(), 2)), pytree.tree_leaves(fn(floats(), 2)), strict=True
    ):
        assert torch.equal(g, w)


@pytest.mark.filterwarnings("ignore:plait")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["a view", "a view and a sum"])
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_gradients_of_views_of_elements_that_share_memory(
    wrapper: str, beside: bool, dynamic: bool
) -> None:
    """Each element has a gradient of its own. Made from sizes and strides, the view would spread
    gradients evenly over what shares a place. Eager runs a graph whose view is at a place that
    varies."""

    def fn(x: Tensor, w: Tensor, k: int) -> tuple[Tensor, ...]:
        return (x[k:], x[:, 2], (w * 3).sum()) if beside else (x[k:], x[:, 2])

    options: dict[str, Any] = {"wrapper": wrapper, "strict": False}
    compiled = torch.compile(fn, backend="plait", dynamic=dynamic, options=options)
    for size, k in ((3, 1), (5, 2), (6, 3)):
        grads: list[Tensor] = []
        for run in (fn, compiled):
            x, w = (
                torch.arange(20.0).as_strided((size, 6), (2, 1)).requires_grad_(),
                torch.ones(2, requires_grad=True),
            )
            grads += torch.autograd.grad([y.sum() for y in run(x, w, k)], [x])
        assert torch.equal(grads[0], grads[1]), (size, k, grads)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_gradients_of_views_at_one_place_of_varying_sizes(wrapper: str) -> None:
    compiled = torch.compile(
        lambda x: x[-1:], backend="plait", dynamic=True, options={"wrapper": wrapper}
    )
    for size in (3, 5):
        x = torch.arange(20.0).as_strided((size, 6), (2, 1)).requires_grad_()
        (grad,) = torch.autograd.grad(compiled(x).sum(), [x])
        assert torch.equal(grad, torch.tensor([0.0] * (size - 1) + [1.0])[:, None].expand(size, 6))


def test_a_view_of_an_input_that_begins_anywhere() -> None:
    """Where a slice begins stands behind where its input does, of which tracing makes a
    condition."""

    def fn(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return x[-k:], x[-k:] * 2

    auto = torch.export.Dim.AUTO
    compiled = plait.compile(fn, (torch.randn(9, 3)[2:6], 3), ({0: auto, 1: auto}, auto))
    for whole in (torch.randn(9, 3), torch.randn(40, 5)):
        for start, k in ((0, 2), (2, 3), (4, 4)):
            x = whole[start : start + 5]
            got, want = compiled(x, k), fn(x, k)
            assert torch.equal(got[1], want[1]) and facts(got, [x]) == facts(want, [x])


def _checked(k: int, end: int) -> int:
    torch._check(k >= 0)
    torch._check(k < end)
    return k


AT_FOUND: dict[str, Callable[[Tensor, int], Any]] = {
    "rest": lambda x, k: x[:, k:],
    "rest, told where": lambda x, k: x[:, _checked(k, 3) :],
    "two rows, moved": lambda x, k: x.narrow(1, k, 2).transpose(1, 2)[1:],
    "one": lambda x, k: x.select(1, k),
}


@pytest.mark.parametrize(("packed", "wrapper"), [(True, "native"), (False, "python")])
def test_views_at_a_found_number_of_an_input_that_is_written(packed: bool, wrapper: str) -> None:
    """The graph has them as views of a new value, which lies otherwise than the input does."""

    def fn(x: Tensor, at: Tensor) -> Any:
        views = [view(x, at.item()) for view in AT_FOUND.values()]
        x.cumsum_(0)
        return views

    def inputs(k: int) -> list[Tensor]:
        x = behind(floats(12, 70)).view(-1)[: 3 * 7 * 20 + 70][70:].view(3, 7, 4, 5)
        return [x if packed else x.to(memory_format=torch.channels_last), torch.tensor(k)]

    options = {"wrapper": wrapper, "strict": True}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        direct = plait.compile(fn, tuple(inputs(1)), options={"wrapper": wrapper})
        jit = torch.compile(fn, backend="plait", options=options, dynamic=False)
        for compiled, k in itertools.product((direct, jit), (2, 0)):
            given, again = inputs(k), inputs(k)
            got, want = compiled(*given), fn(*again)
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
            assert torch.equal(given[0], again[0])
            autograd = compiled is jit
            assert facts(got, given, autograd) == facts(want, again, autograd)
