"""What programs may do at their borders, each case against eager: no gradients, gradients, and
dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from tests.against_eager import compiled, same

Make = Callable[[], Sequence[Any]]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def x46() -> Sequence[Any]:
    return (rand(4, 6).contiguous(),)


def two() -> Sequence[Any]:
    return rand(4, 6), rand(4, 6) + 0.5


def add_in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def mutate_two(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    y.zero_()
    return x + y


def swap(x: Tensor, y: Tensor) -> Tensor:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x + 2 * y


def old_values(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    old = x.t().clone()
    x.add_(1)
    y.copy_(old.t())
    return old, x


def mutate_view(x: Tensor) -> Tensor:
    x[1:3].mul_(2)
    return x.sum(0)


def mutate_through_alias(x: Tensor, v: Tensor) -> Tensor:
    x.mul_(2)
    return v + 1


def aliased_pair() -> Sequence[Any]:
    x = rand(4, 6)
    return x, x[:2]


def same_twice() -> Sequence[Any]:
    x = rand(4, 6)
    return x, x


def transpose_in_place(x: Tensor) -> Tensor:
    x.t_()
    return x + 1


def autocast(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ y.t()).relu()


def no_grad_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
    return x * y


def breaks(x: Tensor) -> Tensor:
    y = x.sin() + 1
    torch._dynamo.graph_break()
    return y * x.cos()


def scalar_branch(x: Tensor, k: int) -> Tensor:
    return x * k if k > 2 else x - k


def dead_and_effects(x: Tensor) -> Tensor:
    unused = x.exp().sum()
    assert unused is not None
    return x.abs()


# Works with and without gradients.
BOTH: dict[str, tuple[Callable[..., Any], Make]] = {
    "pointwise": (lambda x, y: (x + y).tanh() * 2, two),
    "matmul": (lambda x, y: F.gelu(x @ y.t()).softmax(-1), two),
    "norm": (lambda x: F.layer_norm(x, (6,)), x46),
    "reduction": (lambda x: (x.sum(), x.mean(0), x.amax(1, keepdim=True)), x46),
    "nested result": (lambda x, y: {"a": [x + y, (x * y,)], "b": Pair(x.sin(), y.cos())}, two),
    "nested argument": (
        lambda d: d["a"] * d["b"][0] + d["b"][1],
        lambda: ({"a": rand(3, 2), "b": [rand(3, 2), 2.0]},),
    ),
    "None among results": (lambda x: (x + 1, None, x * 2), x46),
    "constant results": (lambda x: (x + 1, 3, "text", True), x46),
    "argument None": (lambda x, m: x * 2 if m is None else x * m, lambda: (rand(4), None)),
    "int argument": (scalar_branch, lambda: (rand(4, 6), 3)),
    "float argument": (lambda x, k: x * k, lambda: (rand(4, 6), 2.5)),
    "bool and str arguments": (
        lambda x, f, s: x + len(s) if f else x,
        lambda: (rand(4), True, "abc"),
    ),
    "size among results": (lambda x: (x.shape[0], x.sum(0)), x46),
    "one input twice": (lambda x, y: x * y, same_twice),
    "views of one input": (lambda x, v: x.sum() + v.sum(), aliased_pair),
    "transposed input": (lambda x: x.exp() + 1, lambda: (rand(6, 4).t(),)),
    "sliced input": (lambda x: x.exp() + 1, lambda: (rand(8, 6)[::2, 1:4],)),
    "expanded input": (lambda x: x * 3, lambda: (rand(4, 1).expand(4, 6),)),
    "offset input": (lambda x: x.cos(), lambda: (rand(50)[7:31].view(4, 6),)),
    "channels last": (
        lambda x: F.relu(x) + 1,
        lambda: (rand(2, 3, 4, 5).to(memory_format=torch.channels_last),),
    ),
    "zero elements": (lambda x: (x + 1, x.sum(), x.sum(1)), lambda: (rand(0, 6),)),
    "zero dimensions": (lambda x: x.exp() * 2, lambda: (torch.tensor(0.5),)),
    "float64": (lambda x: F.softmax(x, -1), lambda: (rand(4, 6, dtype=torch.float64),)),
    "bfloat16": (lambda x: x * 2 + 1, lambda: (rand(4, 6).bfloat16(),)),
    "integers": (lambda i: (i * 3 // 2, i % 4, i > 3), lambda: (torch.arange(-6, 6),)),
    "mixed types": (lambda x, i: x + i, lambda: (rand(6), torch.arange(6))),
    "constant tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), lambda: (rand(4, 3),)),
    "cloned input": (lambda x: x.clone(), x46),
    "detached": (lambda x: x * x.detach(), x46),
    "no_grad inside": (no_grad_inside, x46),
    "autocast inside": (autocast, two),
    "graph break": (breaks, x46),
    "dead code": (dead_and_effects, x46),
    "equal results": (lambda x: (x + 1, x + 1), x46),
    "result and its clone": (lambda x: (y := x + 1, y.clone()), x46),
    "view of a result": (lambda x: (y := x + 1, y.t()), x46),
    "two views of an intermediate": (lambda x: (x.exp().view(-1), x.exp()[1]), x46),
    "input view": (lambda x: x.t(), x46),
    "input slice and more": (lambda x: (x[1:], x * 2), x46),
    "where": (lambda x, y: torch.where(x > 0, x, y), two),
    "index": (lambda x, i: x[i], lambda: (rand(5, 3), torch.tensor([4, 0, 0]))),
    "complex inside": (lambda x: torch.fft.rfft(x).abs(), x46),
    "as_strided": (lambda x: x.as_strided((3, 3), (6, 2), 1) * 2, x46),
}

# Mutation of arguments: leaves that require gradients may not be mutated in eager either.
NO_GRAD: dict[str, tuple[Callable[..., Any], Make]] = {
    "input mutated": (add_in_place, x46),
    "two inputs mutated": (mutate_two, two),
    "two inputs swapped": (swap, two),
    "old values of a mutated input": (old_values, two),
    "part of an input mutated": (mutate_view, x46),
    "mutated and aliased inputs": (mutate_through_alias, aliased_pair),
    "one input twice, mutated": (mutate_through_alias, same_twice),
    "mutated input returned": (lambda x: x.add_(1), x46),
    "metadata mutated": (transpose_in_place, lambda: (rand(4, 6),)),
    "copied into": (lambda x, y: x.copy_(y) + 1, two),
    "input returned": (lambda x: x, x46),
    "input and result": (lambda x: (x, x + 1), x46),
    "complex argument": (lambda z: (z * 2, z.abs()), lambda: (torch.complex(rand(4), rand(4)),)),
    "conjugated view": (
        lambda z: z.conj().t() * 2,
        lambda: (torch.complex(rand(4, 6), rand(4, 6)),),
    ),
    "conjugated argument": (
        lambda z: z.view(-1) * 2,
        lambda: (torch.complex(rand(4), rand(4)).conj(),),
    ),
    "negated argument": (
        lambda x: x.sin() + 1,
        lambda: (torch.complex(rand(4), rand(4)).conj().imag,),
    ),
    "bool to the power of a bool": (lambda x: (x**True, x**False, x**2), lambda: (rand(4) > 0.5,)),
    "one_hot, which asserts": (lambda i: F.one_hot(i, 3) + 1, lambda: (torch.tensor([0, 2]),)),
    "complex result": (lambda x: torch.complex(x, x), lambda: (rand(4),)),
    "transposed input mutated": (add_in_place, lambda: (rand(6, 4).t(),)),
}


@pytest.mark.parametrize("name", [*BOTH, *NO_GRAD])
def test_inference(name: str) -> None:
    fn, make = {**BOTH, **NO_GRAD}[name]
    same(fn, make)


@pytest.mark.parametrize("name", BOTH)
def test_training(name: str) -> None:
    fn, make = BOTH[name]
    same(fn, make, grad=True)


@pytest.mark.parametrize("name", [*BOTH, *NO_GRAD])
def test_dynamic(name: str) -> None:
    fn, make = {**BOTH, **NO_GRAD}[name]
    same(fn, make, dynamic=True)


@pytest.mark.parametrize("name", BOTH)
def test_dynamic_training(name: str) -> None:
    fn, make = BOTH[name]
    same(fn, make, dynamic=True, grad=True)


def test_overlapping_input() -> None:
    base = rand(10)
    same(lambda x: x * 2 + 1, lambda: (base.as_strided((4, 4), (2, 1)),))


def test_inference_mode() -> None:
    fn = compiled(lambda x: (x * 2).exp())
    with torch.inference_mode():
        x = rand(4)
        out = fn(x)
    assert out.is_inference()
    torch.testing.assert_close(out, (x * 2).exp())


def test_no_grad_result_requires_no_grad() -> None:
    fn = compiled(lambda x: x * 2)
    x = rand(4).requires_grad_()
    with torch.no_grad():
        assert not fn(x).requires_grad
    assert fn(x).requires_grad


@pytest.mark.filterwarnings("error:Dynamo")
def test_a_backward_pass_inside_the_function() -> None:
    """Dynamo breaks the graph at autograd.grad and must not trace the compiler that the backward
    pass runs."""
    net = torch.nn.Linear(1, 3)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = net((x[:, None] - x)[..., None]).sin().sum((1, 2))
            return energy, *torch.autograd.grad(energy.sum(), x)

    same(fn, lambda: (torch.linspace(-1, 1, 7),))


def test_grad_mode_survives_a_call() -> None:
    fn = compiled(lambda x: x * 2)
    with torch.no_grad():
        fn(rand(4))
        assert not torch.is_grad_enabled()
    fn(rand(4))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call(dtype: torch.dtype) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    fn = compiled(layer)
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        got, want = fn(rand(4, 6)), layer(rand(4, 6))
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_autocast_training() -> None:
    layer = torch.nn.Linear(6, 5)
    grads = []
    for fn in (layer, compiled(layer)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = fn(rand(4, 6)).float().pow(2).sum()
        loss.backward()
        grads.append(layer.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2)


def test_tied_weights() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 8)
            self.head = torch.nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.embed(i).tanh())

    model = Tied()
    fn = compiled(model)
    tokens = torch.tensor([[1, 2, 3], [3, 3, 9]])
    model(tokens).square().sum().backward()
    want, model.embed.weight.grad = model.embed.weight.grad, None
    fn(tokens).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad, want)


def test_buffers_are_updated_in_training() -> None:
    eager = torch.nn.BatchNorm1d(6)
    model = torch.nn.BatchNorm1d(6)
    fn = compiled(model)
    for _ in range(3):
        x = torch.randn(5, 6)
        torch.testing.assert_close(fn(x), eager(x))
    torch.testing.assert_close(model.running_mean, eager.running_mean)
    torch.testing.assert_close(model.running_var, eager.running_var)
    assert int(model.num_batches_tracked) == 3


def test_optimizer_updates_are_seen() -> None:
    model = torch.nn.Linear(6, 3)
    fn = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = fn(rand(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(fn(rand(4, 6)), model(rand(4, 6)))


def test_tensor_subclass() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    fn = compiled(lambda x, y: (x * y).sin() + 1)
    x, y = TwoTensor(rand(4), rand(4) + 1), TwoTensor(rand(4) + 2, rand(4) + 3)
    out, want = fn(x, y), (x * y).sin() + 1
    assert type(out) is TwoTensor
    torch.testing.assert_close(out.a, want.a)
    torch.testing.assert_close(out.b, want.b)


def test_tensor_subclass_training() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    grads = []
    for fn in (lambda x: (x * x).cos(), compiled(lambda x: (x * x).cos())):
        x = TwoTensor(rand(4), rand(4) + 1).requires_grad_()
        fn(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1].a, grads[0].a)
    torch.testing.assert_close(grads[1].b, grads[0].b)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_rows_of_transposed_tensors_of_varying_sizes(order: tuple[int, ...]) -> None:
    """What is made in the order of memory is read row by row."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x > 0.5
        return y, y.reshape(y.shape[0], -1).any(1)

    run = torch.compile(fn, backend="plait", dynamic=True, options={"strict": True})
    for sizes in ((5, 3, 7), (4, 4, 2), (1, 6, 3)):
        x = rand(*sizes).permute(order)
        for got, want in zip(run(x), fn(x), strict=True):
            assert torch.equal(got, want)


class Held(torch.Tensor):
    """A tensor around one other, as a distributed one is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Held:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Held:
        return Held(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Held, lambda x: x.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Held, op(*args, **kwargs))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_tensor_subclass_of_one_tensor(wrapper: str, grad: bool) -> None:
    """Its graph has as many inputs and results as one of plain tensors."""

    def compiled_so(fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend="plait", options={"wrapper": wrapper})

    inner = rand(4)
    with torch.set_grad_enabled(grad):
        taken = compiled_so(lambda x: x * 2 + 1)(Held(inner).requires_grad_(grad))
        given = compiled_so(lambda x: Held(x * 3))(inner.clone().requires_grad_(grad))
    for out, want in ((taken, inner * 2 + 1), (given, inner * 3)):
        assert type(out) is Held
        torch.testing.assert_close(out.inner, want)


def test_second_backward_through_a_retained_graph() -> None:
    x = rand(4).requires_grad_()
    out = compiled(lambda x: (x.exp() * x).sum())(x)
    out.backward(retain_graph=True)
    first, x.grad = x.grad, None
    out.backward()
    torch.testing.assert_close(x.grad, first)


@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_again_through_the_callable_of_autograd(dynamic: bool) -> None:
    fn = lambda x: ((x @ x.t()).tanh().softmax(-1), x.t())  # a view of an input: no native callable
    run = compiled(fn, dynamic)
    for keep in (False, True, False):  # the first one tells nothing of later ones
        x, other = (rand(4, 6).requires_grad_() for _ in range(2))
        with torch.no_grad():
            other.copy_(x)
        (y, _), (want, _) = run(x), fn(other)
        g = rand(4, 4)
        for retain in (True, False) if keep else (False,):
            y.backward(g, retain_graph=retain)
            want.backward(g, retain_graph=retain)
        torch.testing.assert_close(x.grad, other.grad)


def test_saved_tensor_mutated_before_backward_is_an_error() -> None:
    x = rand(4).requires_grad_()
    w = rand(4)
    out = compiled(lambda x, w: x * w)(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_mutation_under_no_grad_bumps_the_version() -> None:
    x = rand(4)
    before = x._version
    fn = compiled(add_in_place)
    with torch.no_grad():
        fn(x)
    assert x._version > before


def test_a_call_without_arguments() -> None:
    fn = compiled(lambda: torch.ones(3) * 2)
    assert fn().tolist() == [2.0, 2.0, 2.0]


def test_data_dependent_sizes_break_the_graph_and_go_on() -> None:
    same(lambda x: x[x > 0].sum() * 2, x46)


def test_default_dtype_and_requires_grad_flip_recompile() -> None:
    fn = compiled(lambda x: x * 2)
    x = rand(4)
    assert not fn(x).requires_grad
    x.requires_grad_()
    assert fn(x).requires_grad
