"""Forward-mode differentiation over what was compiled, and the transforms of torch.func: eager's
tangents, or an error where there is no eager to turn to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor, nn

import plait
from plait.errors import InputError, Unsupported, warn_once

WRAPPERS = ("native", "python", "cpp", "fx")
X, T = torch.arange(6.0).reshape(2, 3) / 4 - 0.7, torch.arange(6.0, 0, -1).reshape(2, 3) / 5


def fn(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos() @ x.t()


def view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[1:], x.exp()


def writes(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(x)
    return y.sum(0)


def grows(x: Tensor) -> Any:
    return x.sum().item(), x * 2


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PLAIT_STRICT")
    warn_once.cache_clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tangents(call: Callable[..., Any], x: Tensor = X) -> list[Tensor | None]:
    with fw.dual_level():
        out = call(fw.make_dual(x, T))
        outs = out if isinstance(out, tuple) else (out,)
        return [fw.unpack_dual(o).tangent for o in outs if isinstance(o, Tensor)]


def told(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(), [str(w.message) for w in caught if "plait" in str(w.message)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_tangents_go_through(wrapper: str, grad: bool, warm: bool) -> None:
    call = torch.compile(fn, backend="plait", options={"wrapper": wrapper})
    x = X.clone().requires_grad_(grad)
    expected = call(x).detach() if warm else fn(X)
    torch.testing.assert_close(tangents(call, x), tangents(fn))
    torch.testing.assert_close(call(x).detach(), expected)  # kernels again
    with fw.dual_level():  # no argument has a tangent
        torch.testing.assert_close(call(x).detach(), expected)


@pytest.mark.parametrize("function", [view, writes, grows])
@pytest.mark.parametrize("warm", [False, True])
def test_graphs_with_views_writes_and_breaks(function: Callable[..., Any], warm: bool) -> None:
    call = torch.compile(function, backend="plait")
    if warm:
        call(X)
    torch.testing.assert_close(tangents(call), tangents(function))


@pytest.mark.parametrize("grad", [False, True])
def test_views_of_what_has_a_tangent(grad: bool) -> None:
    call = torch.compile(fn, backend="plait")
    expected = fn(X[1:])
    call(X[1:].clone().requires_grad_(grad))

    def sliced(f: Callable[..., Any]) -> Tensor | None:
        base = X.clone()
        part = base[1:]
        with fw.dual_level():
            base.mul_(fw.make_dual(torch.ones(2, 3), T))  # part learns of it when it is asked
            out = f(part.requires_grad_(grad) if grad and part.is_leaf else part)
            torch.testing.assert_close(fw.unpack_dual(out).primal.detach(), expected)
            return fw.unpack_dual(out).tangent

    torch.testing.assert_close(sliced(call), sliced(fn))


def test_tangents_and_gradients_together() -> None:
    call = torch.compile(fn, backend="plait")

    def second(f: Callable[..., Any]) -> Tensor:
        x = X.clone().requires_grad_()
        with fw.dual_level():
            tangent = fw.unpack_dual(f(fw.make_dual(x, T))).tangent
            assert tangent is not None
            (grad,) = torch.autograd.grad(tangent.sum(), x)
        return grad

    torch.testing.assert_close(second(call), second(fn))


@pytest.mark.parametrize("which", ["weight", "bias", "input"])
def test_modules_with_dual_parameters(which: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    call = torch.compile(module, backend="plait")
    call(X)

    def run(f: Callable[..., Any]) -> Tensor | None:
        with fw.dual_level():
            parameters = dict(module.named_parameters())
            x = X
            for name, p in parameters.items():
                if name.endswith(which):
                    parameters[name] = fw.make_dual(p.detach(), torch.ones_like(p))  # type: ignore[assignment]
            if which == "input":
                x = fw.make_dual(X, T)
            saved = dict(module[0]._parameters)
            try:
                for name in saved:
                    module[0]._parameters[name] = parameters[f"0.{name}"]
                return fw.unpack_dual(f(x)).tangent
            finally:
                module[0]._parameters.update(saved)

    torch.testing.assert_close(run(call), run(module))


@pytest.mark.parametrize("warm", [False, True])
def test_transforms_over_what_was_compiled(warm: bool) -> None:
    call = torch.compile(fn, backend="plait")
    if warm:
        call(X)
    many = torch.stack([X, X + 1, X * 2])
    torch.testing.assert_close(torch.func.jvp(call, (X,), (T,)), torch.func.jvp(fn, (X,), (T,)))
    torch.testing.assert_close(torch.func.vmap(call)(many), torch.func.vmap(fn)(many))
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        got, want = transform(lambda x: call(x).sum())(X), transform(lambda x: fn(x).sum())(X)
        torch.testing.assert_close(got, want)
    nested = [
        torch.func.jvp(lambda x, f=f: torch.func.jvp(f, (x,), (T,))[1], (X,), (T,))
        for f in (call, fn)
    ]
    torch.testing.assert_close(*nested)


def test_transforms_inside_are_compiled() -> None:
    def inside(x: Tensor, t: Tensor) -> Any:
        return torch.func.jvp(fn, (x,), (t,))

    torch.testing.assert_close(
        torch.compile(inside, backend="plait", fullgraph=True)(X, T), inside(X, T)
    )


def test_transforms_of_transforms_inside_are_compiled() -> None:
    """Their graphs write to tensors that stand for no memory."""

    def squares(x: Tensor) -> Tensor:
        return (x.sin() * x.sum()).sum()

    for transform in (torch.func.hessian, torch.func.jacrev, torch.func.jacfwd):
        run = torch.compile(transform(squares), backend="plait", options={"strict": True})
        torch.testing.assert_close(run(X), transform(squares)(X))


def test_the_step_to_eager_is_told_once() -> None:
    call = torch.compile(fn, backend="plait")
    _, warned = told(lambda: (tangents(call), tangents(call)))
    assert len([w for w in warned if "eager runs a graph: an argument carries a tangent" in w]) == 1


def test_explain_shows_the_step() -> None:
    with fw.dual_level():
        report = plait.explain(fn, fw.make_dual(X, T))
    steps = [s for s in report.ladder if s.rung == "eager"]
    assert [s.reason for s in steps] == [
        "an argument carries a tangent of forward-mode differentiation"
    ]


def test_strict_raises() -> None:
    call = torch.compile(fn, backend="plait", options={"strict": True})
    torch.testing.assert_close(call(X), fn(X))
    with pytest.raises(
        Unsupported, match=r"tangent of forward-mode(.|\n)*jvp inside the compiled function"
    ):
        tangents(call)


# ------------------------------------------------------------------------------------ plait.compile
@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_without_dynamo_a_tangent_is_an_error(wrapper: str) -> None:
    call = plait.compile(fn, (X,), options={"wrapper": wrapper})
    with pytest.raises(
        InputError, match="input 'x' carries a tangent of forward-mode differentiation"
    ):
        tangents(call)
    with fw.dual_level():
        torch.testing.assert_close(call(X), fn(X))


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_a_parameter_with_a_tangent_is_an_error(wrapper: str) -> None:
    module = nn.Linear(3, 2)
    call = plait.compile(module, (X,), options={"wrapper": wrapper})
    weight = module.weight
    with fw.dual_level():
        del module.weight
        module.weight = fw.make_dual(weight.detach(), torch.ones(2, 3))  # type: ignore[assignment]
        with pytest.raises(InputError, match="parameter or buffer 'weight' carries a tangent"):
            call(X)
        del module.weight
        module.weight = weight
        torch.testing.assert_close(call(X), module(X).detach())


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_without_dynamo_transforms_are_an_error(transform: str, wrapper: str) -> None:
    call = plait.compile(fn, (X,), options={"wrapper": wrapper})
    runs = {
        "vmap": lambda: torch.func.vmap(call)(torch.stack([X, X])),
        "grad": lambda: torch.func.grad(lambda x: call(x).sum())(X),
        "jvp": lambda: torch.func.jvp(call, (X,), (T,)),
        "functionalize": lambda: torch.func.functionalize(call)(X),
    }
    with pytest.raises(
        InputError, match=r"input 'x'.*(transform of torch\.func|carries a tangent)"
    ):
        runs[transform]()
    torch.testing.assert_close(call(X), fn(X))


def test_packages_refuse_tangents(tmp_path: Any) -> None:
    plait.package(fn, tmp_path / "fn.plait", (X,), machines=["portable"])
    call = plait.load(tmp_path / "fn.plait")
    with pytest.raises(InputError, match="input 'x' carries a tangent"):
        tangents(call)
