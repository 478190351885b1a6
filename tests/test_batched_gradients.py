"""Backward passes whose incoming gradients are no plain tensors: batched ones, tensor subclasses,
ones with forward-mode tangents. Operators take them, by PyTorch's own rules; kernels take the next
plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import plait
from plait.errors import GradientError, InputError, Unsupported, warn_once

WRAPPERS = ("native", "cpp", "python", "fx")
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PLAIT_STRICT", raising=False)
    warn_once.cache_clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(fn: Call, wrapper: str = "native", **options: Any) -> Call:
    return torch.compile(fn, backend="plait", options={"wrapper": wrapper, **options})


def told(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(), [str(w.message) for w in caught if "plait" in str(w.message)]


def batched(y: Tensor, wanted: Any, v: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, wanted, v, is_grads_batched=True, **kwargs)


def one_by_one(y: Tensor, wanted: Any, v: Tensor) -> tuple[Tensor, ...]:
    rows = [torch.autograd.grad(y, wanted, row, retain_graph=True) for row in v]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def twice_sin(x: Tensor) -> Tensor:
    return x.sin() * 2


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# ---------------------------------------------------------------------- batched
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_batched(wrapper: str, dynamic: bool) -> None:
    options = {"wrapper": wrapper}
    call = torch.compile(twice_sin, backend="plait", options=options, dynamic=dynamic)
    x = leaf(3)
    for _ in range(2):
        (got,) = batched(call(x), x, torch.eye(3))
        torch.testing.assert_close(got, torch.diag(2 * x.detach().cos()))
    torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x)[0], 2 * x.detach().cos())


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("plain_first", [False, True])
def test_retained_graphs(wrapper: str, plain_first: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    x, v = leaf(5, 3), torch.randn(6, 5, 2)
    wanted = [x, *net.parameters()]
    y = compiled(net, wrapper)(x)
    if plain_first:
        expected = one_by_one(y, wanted, v)
        got = batched(y, wanted, v, retain_graph=True)
    else:
        got = batched(y, wanted, v, retain_graph=True)
        expected = one_by_one(y, wanted, v)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batched(y, wanted, v), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="second time"):
        batched(y, wanted, v)


def several(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = F.softmax(x @ w, -1)
    return y, y.detach() * x.sum(), torch.cat([x, w]).exp()[1:].t()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_several_results(wrapper: str) -> None:
    x, w, v, native = leaf(4, 4), leaf(4, 4), torch.randn(3, 4, 4), wrapper in ("native", "cpp")
    # Torch's own wrapper has no batched copy to other strides.
    strided = ((2, torch.randn(3, 4, 7)),) if native else ()
    zero = torch.zeros(3, 4, 4)
    for k, u in ((0, v), (1, v), *strided):
        outs, wants = compiled(several, wrapper)(x, w), several(x, w)
        got = batched(outs[k], (x, w), u, allow_unused=True)
        want = batched(wants[k], (x, w), u, allow_unused=True)
        if native:  # torch's own wrapper gives zeros in place of None
            assert [g is None for g in got] == [g is None for g in want]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(zero if a is None else a, zero if b is None else b)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_random_operators(wrapper: str) -> None:
    call = compiled(lambda x: F.dropout(x * 2, 0.5), wrapper)
    x = torch.ones(64, requires_grad=True)
    y = call(x)
    torch.testing.assert_close(batched(y, x, torch.eye(64))[0].diag(), y.detach())


def permuted(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1).relu().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("wrapper", ["native", "cpp"])  # torch's own wrapper asks for a format
@pytest.mark.parametrize("expanded", [False, True])
def test_convolutions_and_layouts(wrapper: str, expanded: bool) -> None:
    x, w = leaf(2, 3, 5, 5), leaf(4, 3, 3, 3)
    y = compiled(permuted, wrapper)(x, w)
    v = torch.randn(3, 1, 1, 1, 1).expand(3, *y.shape) if expanded else torch.randn(3, *y.shape)
    want = one_by_one(permuted(x, w), (x, w), v)
    torch.testing.assert_close(batched(y, (x, w), v), want, rtol=1e-4, atol=1e-4)


def test_flattened_results_take_any_strides() -> None:
    x = leaf(4, 6)
    y = compiled(lambda x: x.exp().reshape(2, 2, 6).transpose(0, 2).contiguous())(x)
    v = torch.randn(3, 2, 2, 6).transpose(1, 3)
    want = one_by_one(x.exp().reshape(2, 2, 6).transpose(0, 2), x, v)
    torch.testing.assert_close(batched(y, x, v), want)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_mutated_inputs(wrapper: str) -> None:
    def fn(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x.sin() * count

    x, count = leaf(3), torch.ones(3)
    y = compiled(fn, wrapper)(x, count)
    torch.testing.assert_close(batched(y, x, torch.eye(3))[0], torch.diag(2 * x.detach().cos()))
    torch.testing.assert_close(count, torch.full((3,), 2.0))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_subclass_inputs(wrapper: str) -> None:
    x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    call = compiled(twice_sin, wrapper)
    for _ in range(2):  # inner tensors are plain
        (got,) = torch.autograd.grad(call(x), x, TwoTensor(torch.ones(3), torch.ones(3)))
        torch.testing.assert_close(got.a, 2 * x.a.cos())
        torch.testing.assert_close(got.b, 2 * x.b.cos())


# ---------------------------------------------------------------------- its users
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_jacobian(wrapper: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() @ x.t()

    x, call = torch.randn(2, 3), compiled(fn, wrapper)
    expected = torch.autograd.functional.jacobian(fn, x)
    got = torch.autograd.functional.jacobian(call, x, vectorize=True)
    torch.testing.assert_close(got, expected)


def test_hessian_of_compiled_gradients() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().prod()

    x, grad = torch.randn(3), compiled(torch.func.grad(fn))
    got = torch.autograd.functional.jacobian(grad, x, vectorize=True)
    torch.testing.assert_close(got, torch.autograd.functional.hessian(fn, x, vectorize=True))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradcheck(wrapper: str) -> None:
    x = torch.randn(4, dtype=torch.double, requires_grad=True)
    call = compiled(twice_sin, wrapper)
    assert torch.autograd.gradcheck(call, (x,), check_batched_grad=True)


@pytest.mark.parametrize("wrapper", ["native", "cpp"])  # torch's own wrapper refuses
@pytest.mark.parametrize("levels", [1, 2])
def test_vmap_over_a_backward_pass(wrapper: str, levels: int) -> None:
    x, v = leaf(3), torch.randn(*(2, 4)[:levels], 3)
    y = compiled(twice_sin, wrapper)(x)

    def vjp(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    for _ in range(levels):
        vjp = torch.func.vmap(vjp)
    torch.testing.assert_close(vjp(v), v * 2 * x.detach().cos())


# ---------------------------------------------------------------------- other tensors
@pytest.mark.parametrize("wrapper", ["native", "cpp"])  # torch's own wrapper refuses
def test_a_subclass_as_gradient(wrapper: str) -> None:
    x, v = leaf(3), TwoTensor(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    (got,) = torch.autograd.grad(compiled(twice_sin, wrapper)(x), x, v)
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close(got.a, v.a * 2 * x.detach().cos())
    torch.testing.assert_close(got.b, 2 * x.detach().cos())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_forward_mode_over_a_backward_pass(wrapper: str) -> None:
    x, v, t = leaf(3), torch.randn(3), torch.randn(3)
    y = compiled(twice_sin, wrapper)(x)
    with fw.dual_level():
        (got,) = torch.autograd.grad(y, x, fw.make_dual(v, t), retain_graph=True)
        primal, tangent = fw.unpack_dual(got)
        torch.testing.assert_close(primal, v * 2 * x.detach().cos())
        torch.testing.assert_close(tangent, t * 2 * x.detach().cos())
        (got,) = torch.autograd.grad(y, x, v, retain_graph=True)
        assert fw.unpack_dual(got).tangent is None


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: f])
def test_a_second_backward_pass_is_refused(transform: Call) -> None:
    x, v = leaf(3), torch.eye(3)
    y = compiled(lambda x: x.sin() * x)(x)
    vmap = transform is torch.func.vmap

    def vjp(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, create_graph=True, is_grads_batched=not vmap)[0]

    got = transform(vjp)(v)
    torch.testing.assert_close(got.detach(), torch.diag((x.cos() * x + x.sin()).detach()))
    with pytest.raises(GradientError, match="double backward"):
        got.sum().backward()


def test_programs_say_what_they_cannot_take() -> None:
    program = plait.compile(twice_sin, torch.randn(3))
    with pytest.raises(InputError, match=r"one of a transform of torch\.func"):
        torch.func.vmap(program)(torch.randn(2, 3))
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: TwoTensor(t, t)):
        y = compiled(twice_sin)(x)
    with pytest.raises(RuntimeError, match="device cpu, got a tensor of a subclass"):
        y.sum().backward()
    batch = torch._add_batch_dim(torch.randn(2, 3), 0, 1)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"one of a transform of torch\.func"):
        program(batch)


# ---------------------------------------------------------------------- told
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_told_once_and_recorded(wrapper: str) -> None:
    x = leaf(3)
    y = compiled(twice_sin, wrapper)(x)
    _, first = told(lambda: batched(y, x, torch.eye(3), retain_graph=True))
    _, second = told(lambda: batched(y, x, torch.eye(3), retain_graph=True))
    assert len(first) == 1 and "an incoming gradient is batched" in first[0]
    assert not second


def test_explain_shows_it() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.compile(twice_sin, backend="plait")(x)

    x = leaf(3)

    def whole(x: Tensor) -> Tensor:
        y = step(x)
        torch._dynamo.graph_break()
        return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)[0]

    report = plait.explain(whole, x, quiet=True)
    assert any("incoming gradient" in s.reason for s in report.ladder)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_strict_refuses(wrapper: str) -> None:
    x = leaf(3)
    y = compiled(twice_sin, wrapper, strict=True)(x)
    with pytest.raises(Unsupported, match="an incoming gradient is batched"):
        batched(y, x, torch.eye(3))
