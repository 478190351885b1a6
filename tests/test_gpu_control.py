"""Control flow on a GPU: branches, loops, scans and regions with kernels of their own against
eager, under every target and beside CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from functorch.experimental.control_flow import map as torch_map
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

from plait.wrapper import instructions as ins
from plait.wrapper.program import CompileRecord, Program, observers

WRAPPERS = ("native", "python", "cpp", "fx")


def branch(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).tanh() * 2, lambda x: x.softmax(-1), (x,))


def loop(x: Tensor, w: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, (x @ w).tanh() + x * 0.5

    return torch.while_loop(
        lambda i, x: i < 4, body, (torch.zeros((), dtype=torch.int64, device=x.device), x)
    )[1]


def scanned(x: Tensor, w: Tensor) -> Any:
    """Its slices begin at addresses that 16 bytes do not divide."""
    return scan(lambda c, a: ((c @ w + a).tanh(), (c * a).sum(-1)), x[0] * 0.5, x)


def mapped(x: Tensor, w: Tensor) -> Any:
    return torch_map(lambda a, w: (a @ w).exp().sum(0), x, w)


def summed(x: Tensor, w: Tensor) -> Any:
    return associative_scan(lambda a, b: a * b + a + b, x, dim=0, combine_mode="pointwise")


region = torch.compiler.nested_compile_region(lambda x, w: ((x @ w).tanh() + x) * 0.5)


def regions(x: Tensor, w: Tensor) -> Any:
    for _ in range(5):
        x = region(x, w)
    return x.sin()


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (branch, loop, scanned, mapped, summed, regions)
}


def stats(program: Program) -> dict[str, Any]:
    return dict(program.call.stats()["graphs"])  # type: ignore[attr-defined]


TRAINED = ("branch", "loop", "scanned", "mapped", "regions")


def given(name: str, n: int = 5) -> tuple[Tensor, Tensor]:
    shape = (n, 3, 7) if name in ("scanned", "mapped", "summed") else (n, 7)
    return torch.randn(shape, device="cuda"), torch.randn(7, 7, device="cuda") / 3


def check(fn: Callable[..., Any], got: Callable[..., Any], *args: Tensor) -> None:
    want, have = (pytree.tree_leaves(call(*args)) for call in (fn, got))
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str, wrapper: str) -> None:
    torch._dynamo.reset()
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    fn = PROGRAMS[name]
    options = {"wrapper": wrapper, "verify": True}
    with torch.no_grad():
        run = torch.compile(fn, backend="plait", options=options)
        for n in (5, 5, 6, 9):  # sizes are symbols from the second on
            x, w = given(name, n)
            check(fn, run, x, w)
            check(fn, run, -x.abs(), w)
    observers.reset(token)
    if name == "summed":
        assert not any(r.ladder for r in made)  # operators, or a loop of them
    else:
        launches = [i for p in made[0].wrapper.programs for i in p.body]
        assert any(isinstance(i, ins.Launch) for i in launches)


def nested(x: Tensor, w: Tensor) -> Any:
    """Branches and a loop in a loop, on what each round makes."""

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cond(x.mean() > 0, lambda x: x - x.amax() / 2, lambda x: (x @ w).cos(), (x,))
        inner = torch.while_loop(
            lambda j, x: j < i, lambda j, x: (j + 1, x * 0.9), (torch.zeros_like(i), x)
        )
        return i + 1, inner[1]

    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return torch.while_loop(lambda i, x: (i < 5) & (x.amax() < 9), body, (start, x))


def data_dependent(x: Tensor, w: Tensor) -> Any:
    """Takes as many rounds as it takes, none at all where x is small."""
    halved = torch.while_loop(
        lambda x: x.abs().amax() > 0.5, lambda x: ((x @ w).tanh() * 0.7,), (x,)
    )[0]
    return halved.softmax(-1), torch.cond(halved.sum() > 0, torch.sin, lambda x: x * 2, (x,))


RECORDED: dict[str, Callable[..., Any]] = {
    **{k: f for k, f in PROGRAMS.items() if k != "summed"},
    "nested": nested,
    "data_dependent": data_dependent,
}


@pytest.mark.parametrize("name", RECORDED)
def test_in_cuda_graphs(name: str, programs: list[Program]) -> None:
    """One recording serves every value: the graph decides."""
    torch._dynamo.reset()
    fn = RECORDED[name]
    with torch.no_grad():
        run = torch.compile(fn, backend="plait", mode="reduce-overhead", dynamic=False)
        x, w = given(name)
        for k in range(8):
            x.copy_(torch.randn_like(x) * (-1) ** k * (k % 4))
            check(fn, run, x, w)
        for _ in range(4):  # what moves is copied
            check(fn, run, *given(name))
    record, made = programs[0].record, stats(programs[0])
    assert made["recorded"] <= 3 and made["replayed"] >= 8 and made["refused"] == {}, made
    parts = [i for i in record.wrapper.body if isinstance(i, ins.Partition)]
    assert [p.reason for p in parts if not p.recorded] in ([], [""])


def test_in_cuda_graphs_of_many_sizes(programs: list[Program]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(nested, backend="plait", mode="reduce-overhead", dynamic=True)
        held = {n: given("nested", n) for n in (5, 7, 9)}
        for n in (5, 7, 5, 7, 9, 5, 7, 9):
            held[n][0].copy_(torch.randn(n, 7))
            check(nested, run, *held[n])
    made = stats(programs[0])
    assert (made["recorded"], made["replayed"], made["refused"]) == (3, 2, {})


def test_random_branches_are_not_recorded(programs: list[Program]) -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5), lambda x: x * 2, (x,))
        return (y @ w).cumsum(0)

    torch._dynamo.reset()
    x, w = given("branch")
    with torch.no_grad():
        run = torch.compile(fn, backend="plait", mode="reduce-overhead")
        drawn = {run(x.abs(), w).sum().item() for _ in range(6)}
    assert len(drawn) == 6
    reasons = [i.reason for i in programs[0].record.wrapper.body if isinstance(i, ins.Partition)]
    assert any("a seed is drawn" in r for r in reasons), reasons


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, graphs: bool) -> None:
    torch._dynamo.reset()
    fn = PROGRAMS[name]
    run = torch.compile(
        fn, backend="plait", dynamic=False, options={"cuda_graphs": True} if graphs else {}
    )
    for _ in range(3):
        args = [a.requires_grad_() for a in given(name)]
        made = []
        for call in (fn, run):
            mine = [a.detach().clone().requires_grad_() for a in args]
            out = sum(t.sum() for t in pytree.tree_leaves(call(*mine)))
            made.append(torch.autograd.grad(out, mine))
        torch.testing.assert_close(made[1], made[0], rtol=5e-5, atol=5e-5)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(
            x.sum() > 0, lambda y: self.a(y).relu(), lambda y: self.b(y) * 2, (x,)
        )
        return chosen


def test_a_module_trains() -> None:
    torch._dynamo.reset()
    model = Gate().cuda()
    plain = copy.deepcopy(model)
    run = torch.compile(model, backend="plait")
    for k in range(4):
        x = torch.rand(4, 8, device="cuda") * (-1) ** k
        for call, module in ((run, model), (plain, plain)):
            module.zero_grad()
            call(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_counter_of_the_host(wrapper: str, mode: str | None) -> None:
    """The host decides on it, between two recordings."""

    def fn(x: Tensor, w: Tensor) -> Any:
        start = torch.zeros((), dtype=torch.int64)
        body = lambda x, i: ((x @ w).tanh() + x * 0.5, i + 1)
        x, n = torch.while_loop(lambda x, i: i < 4, body, (x.cos(), start))
        return n, x.softmax(-1) @ w

    torch._dynamo.reset()
    x, w = given("loop")
    options: dict[str, Any] = {"wrapper": wrapper} | ({"cuda_graphs": True} if mode else {})
    with torch.no_grad():
        run = torch.compile(fn, backend="plait", options=options)
        for _ in range(3):
            check(fn, run, x, w)
