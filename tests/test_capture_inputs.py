"""What a call does to its inputs and what it returns of them, where that is not plain: lazily
negated and conjugated tensors, memory that two inputs share, changes that autograd does not see,
views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import InputError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


TARGETS = ["native", "python"]


def compiled(fn: Callable[..., Any], *args: Tensor, road: str, target: str) -> Callable[..., Any]:
    """fn by one of the two front ends, with one of the wrapper's targets."""
    options = {"wrapper": target}
    if road == "export":
        return plait.compile(fn, args, options=options)
    return torch.compile(fn, backend="plait", options=options)


# ---------------------------------------------------------------------------------------- lazy bits
def change(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(3).add_(y)
    return x + y


def negated() -> Tensor:
    return torch.randn(4, 6, dtype=torch.complex64).conj().imag


def like(x: Tensor) -> Tensor:
    """A plain tensor with x's layout."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


@pytest.mark.parametrize("road", ["compile", "export"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_lazy_input_is_changed_in_place(road: str, target: str) -> None:
    x, y = negated(), negated()
    want_x, want_y = x.clone(), y.clone()
    assert x.is_neg()
    fn = compiled(change, like(x), like(y), road=road, target=target)
    with torch.no_grad():
        want = change(want_x, want_y)
        before = x._version
        got = fn(x, y)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x, want_x)
    torch.testing.assert_close(y, want_y)
    assert x.is_neg()
    assert x._version > before


def complex_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


LAZY: dict[str, Callable[[], Tensor]] = {
    "plain complex": lambda: complex_rows(3, 4),
    "conjugated": lambda: complex_rows(3, 4).conj(),
    "negated": lambda: torch._neg_view(torch.randn(3, 4)),
    "negated and conjugated": lambda: torch._neg_view(complex_rows(3, 4).conj()),
    "columns of a conjugated": lambda: complex_rows(3, 8).conj()[:, ::2],
    "rows of a conjugated, transposed": lambda: complex_rows(5, 3).conj()[1:].t(),
}


def scale(x: Tensor) -> None:
    x.mul_(3)


def scale_and_return(x: Tensor) -> Tensor:
    return x.mul_(3)


def scale_rows(x: Tensor) -> Tensor:
    x[1:].mul_(3)
    return x.sum()


def scale_and_train(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(3)
    return x * w


@pytest.mark.parametrize("road", ["compile", "export"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(LAZY))
@pytest.mark.parametrize("fn", [scale, scale_and_return, scale_rows, scale_and_train])
def test_a_change_reaches_a_lazy_input_once(
    fn: Callable[..., Any], name: str, target: str, road: str
) -> None:
    seen: list[Any] = []
    for plait_runs in (False, True):
        torch.manual_seed(1)
        inputs = [LAZY[name]()]
        if fn is scale_and_train:
            inputs.append(torch.ones_like(inputs[0]).requires_grad_())
        run = compiled(fn, *inputs, road=road, target=target) if plait_runs else fn
        before = inputs[0]._version
        result = run(*inputs)
        assert inputs[0]._version == before + 1
        gradient = ()
        if fn is scale_and_train and road == "compile":
            gradient = torch.autograd.grad(result.abs().sum(), inputs[1])
        seen.append((inputs[0], result, gradient))
    torch.testing.assert_close(*seen)


def views(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x[1:], x[1:].t(), x


def facts(results: tuple[Tensor, ...], x: Tensor) -> list[Any]:
    start = x.untyped_storage().data_ptr()
    return [
        (
            r.stride(),
            r.storage_offset(),
            r.is_conj(),
            r.is_neg(),
            r.untyped_storage().data_ptr() == start,
        )
        for r in results
    ]


@pytest.mark.parametrize("road", ["compile", "export"])
@pytest.mark.parametrize("target", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", ["plain complex", "negated", "rows of a conjugated, transposed"])
def test_views_of_a_lazy_input_lie_in_it(name: str, target: str, road: str) -> None:
    """Kernels work on a copy of its values, what is returned are views of the input itself."""
    seen: list[Any] = []
    for plait_runs in (False, True):
        torch.manual_seed(1)
        x = LAZY[name]()
        results = (
            compiled(views, LAZY[name](), road=road, target=target) if plait_runs else views
        )(x)
        told = facts(results, x)
        version = x._version
        results[1].mul_(2)
        assert x._version == version + 1
        seen.append((results, told, x))
    (want, told, x), (got, told_of_plait, y) = seen
    torch.testing.assert_close((got, y), (want, x))
    assert told_of_plait == told


# ------------------------------------------------------------------------------------ shared memory
def first_changes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_share_memory_with_a_changed_one(target: str) -> None:
    fn = compiled(first_changes, torch.zeros(8), torch.zeros(8), road="export", target=target)
    x = torch.zeros(16)
    for a, b in ((x[:8], x[:8]), (x[:8], x[4:12]), (x[3:11], x[:8])):
        before = x.clone()
        with pytest.raises(
            InputError, match="'x' and 'y' share memory and 'x' is changed in place"
        ):
            fn(a, b)
        torch.testing.assert_close(x, before)
    torch.testing.assert_close(fn(x[:8], x[8:]), torch.zeros(8))
    assert x[:8].eq(1).all() and x[8:].eq(0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_interleaved_inputs_do_not_share_memory(target: str) -> None:
    x = torch.zeros(4, 6)
    fn = compiled(first_changes, like(x[:, ::2]), like(x[:, ::2]), road="export", target=target)
    torch.testing.assert_close(fn(x[:, ::2], x[:, 1::2]), torch.zeros(4, 3))
    assert x[:, ::2].eq(1).all() and x[:, 1::2].eq(0).all()
    with pytest.raises(InputError, match="share memory"):
        fn(x[:, ::2], x[:, ::2])


def test_inputs_may_share_memory_that_nobody_changes() -> None:
    x = torch.randn(8)
    fn = plait.compile(lambda a, b: a * b, (torch.zeros(8), torch.zeros(8)))
    torch.testing.assert_close(fn(x, x), x * x)


def test_a_parameter_that_is_given_as_a_changed_input() -> None:
    lin = nn.Linear(4, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return self.lin(x)

    fn = plait.compile(Net(), (torch.zeros(4, 4),))
    with pytest.raises(InputError, match=r"'x' and parameter or buffer 'lin\.weight' share memory"):
        fn(lin.weight.detach())


# -------------------------------------------------------------------------------------------- views
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "with result": lambda x: (x[:, 1:3].t(), x.sum()),
    "two": lambda x: (x[0], x.view(-1)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(VIEWS))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_plait_compile_returns_views_of_inputs(
    name: str, dynamic: bool, target: str, mode: Callable[[], Any]
) -> None:
    fn = VIEWS[name]
    shapes = {"x": {0: torch.export.Dim("n", min=3)}} if dynamic else None
    run = plait.compile(
        fn,
        (torch.zeros(4, 6),),
        dynamic_shapes=(shapes["x"],) if shapes else None,
        options={"wrapper": target},
    )
    big = torch.arange(60.0)
    for x in (big[12:36].view(4, 6), *((torch.randn(7, 6),) if dynamic else ())):
        with mode():
            want, got = fn(x), run(x)
        pairs = zip(want, got, strict=True) if isinstance(want, tuple) else ((want, got),)
        for w, g in pairs:
            torch.testing.assert_close(g, w, check_stride=True)
            assert g.is_inference() == w.is_inference()
            assert g._is_view() == w._is_view() and g._base is w._base
            if w._is_view():
                assert g.data_ptr() == w.data_ptr()
                before = g._version
                x.add_(1)
                assert g._version == before + 1


def test_plait_compile_returns_a_view_of_a_parameter() -> None:
    lin = nn.Linear(4, 6)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = lin

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.lin.weight.t(), self.lin(x)

    view, _ = plait.compile(Net(), (torch.zeros(2, 4),))(torch.zeros(2, 4))
    with torch.no_grad():
        want = lin.weight.t()
    assert view._base is lin.weight and view.grad_fn is None
    assert view.requires_grad == want.requires_grad
