"""Dynamic sizes: one compile for many sizes, symbolic strides, sizes that are expressions, symbols
in any order.

Sizes of a first call differ wherever they are not meant to be equal: torch gives equal ones one
symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.wrapper.program import CompileRecord, observers
from tests.against_eager import same


def rand(*shape: int) -> Tensor:
    return torch.linspace(-20, 20, torch.Size(shape).numel()).sin().reshape(shape)


def noise(*shape: int) -> Tensor:
    """No element near its neighbours, so that a norm's quotient loses nothing."""
    return torch.arange(float(torch.Size(shape).numel())).mul(13).sin().reshape(shape)


def counted(fn: Callable[..., Any], **kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """fn compiled by plait, and the counter whose frame_count says how often."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("plait")
    return torch.compile(fn, backend=counter, **kwargs), counter


def serves(
    fn: Callable[..., Any],
    calls: Sequence[Callable[[], Sequence[Any]]],
    grad: bool = False,
    compiles: int = 1,
) -> None:
    """One dynamic compile agrees with eager on every call."""
    run, counter = counted(fn, dynamic=True)
    for make in calls:
        same(fn, make, grad=grad, calls=1, other=run)
    assert counter.frame_count == compiles


def attend(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Twice, so that buffers of several unknown sizes lie above each other in the arena."""
    b, t, d = x.shape
    for _ in range(2):
        q, k, v = (F.layer_norm(x, (d,)) @ w).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + F.gelu(F.layer_norm(x, (d,)) @ u) @ u.t()
    return x


CASES: dict[str, tuple[Callable[..., Any], list[Callable[[], Sequence[Any]]]]] = {
    "batch and length": (
        attend,
        [
            lambda n=n, t=t: (noise(n, t, 32), rand(32, 96) / 32, rand(32, 128) / 32)
            for n, t in ((4, 48), (33, 5), (3, 64), (11, 17))
        ],
    ),
    "batch": (
        lambda x, w: F.gelu(x @ w).softmax(-1),
        [lambda n=n: (rand(n, 6), rand(6, 5)) for n in (2, 3, 7, 33)],
    ),
    "both sizes": (
        lambda x: F.layer_norm(x, x.shape[1:]),
        [lambda n=n: (rand(n, n + 3),) for n in (2, 5, 17)],
    ),
    "reduction": (
        lambda x: (x.sum(0), x.mean(1), x.amax()),
        [lambda n=n: (rand(n, 2 * n + 1),) for n in (2, 4, 40)],
    ),
    "broadcast": (
        lambda x, y: x[:, None] * y[None, :],
        [lambda n=n: (rand(n), rand(n + 1)) for n in (2, 5, 9)],
    ),
    "broadcast by a size found to be 1": (
        lambda x, y: (
            x[:, ::2][:, ::2] * y,
            x[:, ::4].sum(0) + y,
            x[:, ::4].expand(2, y.shape[0]).exp(),
        ),
        [lambda n=n: (rand(2, n), rand(n)) for n in (3, 4)],
    ),
    "broadcast by a quotient found to be 1": (
        lambda x, y: torch.where(y > 0, x[: x.shape[0] // y.shape[0]], y),
        [lambda n=n: (rand(n + 2, 3), rand(n, 3)) for n in (4, 5, 9)],
    ),
    "concatenated": (
        lambda x, y: torch.cat([x, y], 0).exp() + 1,
        [lambda n=n: (rand(n, 3), rand(2 * n + 1, 3)) for n in (2, 5, 8)],
    ),
    "size 2n - 1": (
        lambda x: torch.cat([x, x[1:]]).cumsum(0) * x.shape[0],
        [lambda n=n: (rand(n, 3),) for n in (4, 5, 8)],
    ),
    "flattened": (
        lambda x: x.flatten(1).softmax(1),
        [lambda n=n: (rand(2, n, n + 1),) for n in (4, 3, 6)],
    ),
    "split in halves": (
        lambda x: x.view(-1, 2, x.shape[1]).sum(1),
        [lambda n=n: (rand(2 * n, 3),) for n in (2, 3, 8)],
    ),
    "transposed": (
        lambda x: (x.t() + 1).contiguous() * 2,
        [lambda n=n: (rand(n, n + 2),) for n in (2, 3, 30)],
    ),
    "symbolic strides": (
        lambda x: x.exp() + 1,
        [lambda n=n: (rand(n, n + 4)[:, 1:-1],) for n in (3, 5, 11)],
    ),
    "transposed input": (
        lambda x: x.exp().sum(0),
        [lambda n=n: (rand(n, n + 2).t(),) for n in (3, 5, 40)],
    ),
    "size as a number": (
        lambda x: x * x.shape[0] + x.shape[1],
        [lambda n=n: (rand(n, n + 1),) for n in (2, 5)],
    ),
    "arange": (
        lambda x: x + torch.arange(x.shape[0]),
        [lambda n=n: (rand(n),) for n in (3, 4, 100)],
    ),
    "padded": (lambda x: F.pad(x, (1, 2)) * 2, [lambda n=n: (rand(3, n),) for n in (5, 4, 19)]),
    "embedding": (
        lambda i, w: F.embedding(i, w).sum(1),
        [lambda n=n: (torch.arange(2 * n).view(2, n) % 7, rand(7, 4)) for n in (3, 5, 9)],
    ),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q),
        [lambda n=n: (rand(2, 2, n, 8),) for n in (3, 4, 16)],
    ),
    "reversed order of symbols": (
        lambda a, b: b.sum(0) + a.sum(1)[: b.shape[1]],
        [lambda n=n: (rand(n + 3, 2), rand(5 + n, n + 1)) for n in (2, 3, 8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_compile_serves_all_sizes(name: str) -> None:
    fn, calls = CASES[name]
    serves(fn, calls)


@pytest.mark.parametrize("name", CASES)
def test_one_compile_serves_all_sizes_in_training(name: str) -> None:
    fn, calls = CASES[name]
    serves(fn, calls, grad=True)


def test_a_saved_tensor_whose_size_is_an_expression() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cat([x, x[1:]]).exp().tanh().sum()

    serves(fn, [lambda n=n: (rand(n, 3),) for n in (4, 5, 8)], grad=True)


def test_int_arguments_are_symbols() -> None:
    serves(lambda x, n: x[:n] * n, [lambda n=n: (rand(20, 3), n) for n in (3, 5, 8)])


def test_automatic_dynamic_compiles_twice() -> None:
    run, counter = counted(lambda x: F.softmax(x * 2, -1))
    for n in (3, 4, 5, 9):
        x = rand(n, 4)
        torch.testing.assert_close(run(x), F.softmax(x * 2, -1))
    assert counter.frame_count == 2


def test_mark_dynamic() -> None:
    run, counter = counted(lambda x: x.sin().sum(0))
    for n in (3, 4, 5):
        x = rand(n, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), x.sin().sum(0))
    assert counter.frame_count == 1


def test_sizes_of_the_first_call_are_hints() -> None:
    found: list[CompileRecord] = []
    token = observers.set((found.append,))
    x = rand(3, 40).requires_grad_()
    torch._dynamo.mark_dynamic(x, 0, hint_override=500)
    torch._dynamo.mark_dynamic(x, 1)
    torch.compile(lambda x: x.exp().softmax(-1).sin(), backend="plait")(x).sum().backward()
    observers.reset(token)
    assert [r.kind for r in found] == ["forward", "backward"]
    assert all(sorted(r.plan.program.hints.values()) == [40, 500] for r in found)


def test_sizes_zero_and_one_recompile_and_agree() -> None:
    run, _ = counted(lambda x: (x + 1).sum(0), dynamic=True)
    for n in (3, 1, 0, 5):
        x = rand(n, 4)
        torch.testing.assert_close(run(x), (x + 1).sum(0))


def test_sizes_across_a_graph_break() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.sum(0) + x.shape[0]

    run, counter = counted(fn, dynamic=True)
    for n in (3, 4, 5):
        x = rand(n, 4)
        torch.testing.assert_close(run(x), fn(x))
    assert counter.frame_count == 2


def test_data_dependent_sizes() -> None:
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        run = torch.compile(lambda x: x.nonzero() * 2 + 1, backend="plait", fullgraph=True)
        for x in (torch.tensor([1, 0, 3]), torch.tensor([0, 0, 5, 6])):
            assert torch.equal(run(x), x.nonzero() * 2 + 1)
        twice = torch.compile(
            lambda x: torch.stack([x[x > 0], -x[x > 0]]), backend="plait", fullgraph=True
        )
        for x in (rand(5, 4) - 0.5, torch.tensor([[0.0, 1.0]]), -rand(3, 3)):
            assert torch.equal(twice(x), torch.stack([x[x > 0], -x[x > 0]]))
        run = torch.compile(lambda i: torch.ones(i.item(), 3) * 2, backend="plait", fullgraph=True)
        for n in (2, 5):
            assert torch.equal(run(torch.tensor(n)), torch.ones(n, 3) * 2)
        run = torch.compile(lambda x: x * x.sum().item(), backend="plait", fullgraph=True)
        torch.testing.assert_close(run(rand(4) + 1), (rand(4) + 1) * (rand(4) + 1).sum())


CHECKED: dict[str, Callable[[int, int], bool]] = {
    "the size": lambda n, m: n <= 45,
    "twice the size": lambda n, m: n * 2 <= 90,
    "a product of two sizes": lambda n, m: n * m <= 90,
    "a quotient": lambda n, m: n // 15 <= 3,
    "a float": lambda n, m: n * 0.5 <= 22.5,
    "a function": lambda n, m: int(n**0.5) & 7 != 7,
}


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_a_size_that_becomes_a_number(name: str, wrapper: str) -> None:
    """Guards say of the first that 15 divides it and goes once into it: it is 15."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        torch._check(CHECKED[name](x.shape[0], y.shape[0]))
        return x.view(15, -1) + y.sum()

    options = {"wrapper": wrapper, "strict": True}
    run = torch.compile(fn, backend="plait", dynamic=True, options=options)
    for sizes in ((15, 2), (30, 3), (15, 3)):
        x, y = map(rand, sizes)
        torch.testing.assert_close(run(x, y), fn(x, y))
    x, y = rand(60), rand(4)
    for call in (fn, run):
        with pytest.raises(RuntimeError, match="Expected cond to be True"):
            call(x, y)
