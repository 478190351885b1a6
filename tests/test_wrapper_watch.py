"""`plait.watch`: in every target, callbacks see what an interpreter of the FX graph computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.nn import functional as F

import plait
from plait.errors import InternalError
from plait.wrapper.instructions import Hook, Partition, WrapperProgram
from plait.wrapper.partition import partition
from plait.wrapper.program import observers
from plait.wrapper.targets import TARGETS
from plait.wrapper.text import read
from plait.wrapper.verify import verify
from plait.wrapper.watch import add_hooks
from tests.test_cuda_programs import pipeline
from tests.test_wrapper_same import scale_


def fn(x: Tensor) -> tuple[Tensor, ...]:
    """Kernels, operators with one result and with several, a custom operator, memory that is used
    again."""
    y = F.gelu(x @ x.T).sin()
    values, where = torch.sort(y, dim=-1)
    z = torch.softmax(values @ y + where, -1)
    s = scale_(z, 2.0)
    x.add_(1)
    return torch.cat([z.exp(), y.cos()]).cumsum(0), s + 1


class Values(Interpreter):
    """The value of every node of the last run."""

    def run_node(self, n: Node) -> Any:
        out = super().run_node(n)
        self.values[n.name] = out.clone() if isinstance(out, Tensor) else out
        return out

    def of(self, *args: object) -> dict[str, Any]:
        self.values: dict[str, Any] = {}
        with torch.no_grad():
            self.run(*args)
        return self.values


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled."""
    found: list[torch.fx.GraphModule] = []
    compile_graph = pipeline.compile_graph

    def spy(captured: Any, *rest: Any) -> Any:
        found.append(captured.graph)
        return compile_graph(captured, *rest)

    monkeypatch.setattr("plait.capture.program.compile_graph", spy)
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("target", TARGETS)
def test_callbacks_see_the_values_of_nodes(
    target: str, dynamic: bool, graphs: list[torch.fx.GraphModule]
) -> None:
    seen: list[tuple[str, str, Tensor]] = []
    compiled = torch.compile(fn, backend="plait", dynamic=dynamic, options={"wrapper": target})
    with plait.watch(lambda *what: seen.append(what)):
        compiled(torch.randn(6, 5))
    for n in (6, 9) if dynamic else (6,):
        seen.clear()
        x = torch.randn(n, 5)
        want = Values(graphs[0]).of(*(x.shape if dynamic else []), x.clone())
        compiled(x)
        known = {node: t for node, _, t in seen if node in want}
        assert len(known) >= 10 and known.keys() >= {"sin", "getitem", "_softmax", "cumsum"}
        for node, t in known.items():
            torch.testing.assert_close(t, want[node], msg=lambda m, node=node: f"{node}: {m}")
    labels = "\n".join(label for _, label, _ in seen)
    assert "plait_" in labels and "aten::" in labels and "plait_same::scale_" in labels
    assert "test_wrapper_watch.py:" in labels and "aten.gelu" in labels
    assert len(graphs) == 1


def test_forward_and_backward_are_watched_and_nothing_else() -> None:
    kinds: list[str] = []
    seen: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    token = observers.set((lambda record: kinds.append(record.kind),))
    with (
        plait.watch(lambda node, label, t: seen.append(node)),
        plait.watch(lambda node, label, t: seen.append(label)),
    ):
        watched = torch.compile(model, backend="plait")
        watched(torch.randn(3, 8)).sum()
    observers.reset(token)
    assert "tanh" in seen and any("aten.tanh" in s for s in seen)
    n = len(seen)
    out = watched(torch.randn(3, 8))
    assert kinds == ["forward"] and len(seen) == 2 * n
    out.sum().backward()  # which compiles it
    assert len(seen) > 2 * n
    torch._dynamo.reset()
    seen.clear()
    torch.compile(model, backend="plait")(torch.randn(3, 8))
    assert seen == []


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_callback_raises_reaches_the_caller(target: str) -> None:
    calls = 0

    def callback(node: str, label: str, t: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError(node)

    with plait.watch(callback):
        run = plait.compile(
            lambda x: x.exp().cumsum(0), (torch.randn(5),), options={"wrapper": target}
        )
    x = torch.randn(5)
    torch.testing.assert_close(run(x), x.exp().cumsum(0))
    with pytest.raises(KeyError, match="cumsum"):
        run(x)
    torch.testing.assert_close(run(x), x.exp().cumsum(0))


PROGRAM = """
program('g')
x = tensor_input(f32[4] @ (1,), device='cuda:0')
kernel('k', 2, 0, device='cuda:0')
a = alloc(f32[4] @ (1,), device='cuda:0')
note('model.py:3 aten.exp')
launch('k', (x, a), (), (a,), 1)
b, = call('aten::neg')(a)
require_layout(b, f32[4] @ (1,))
launch('k', (a, b), (), (b,), 1)
return (b,)
"""


def test_hooks_run_at_every_call() -> None:
    watched = partition(add_hooks(read(PROGRAM), {"a": "exp"}), ())
    verify(watched)
    parts = [i for i in watched.body if isinstance(i, Partition)]
    at = [
        max(k for k, i in enumerate(watched.body[:n]) if isinstance(i, Partition))
        for n, _ in _hooks(watched)
    ]
    assert not any(watched.body[k].recorded for k in at)
    assert [p.recorded for p in parts] == [False, False, True, False]
    assert parts[-1].reason == "intermediates are watched"
    hooks = [i for _, i in _hooks(watched)]
    assert [(i.tensor, i.node, i.label) for i in hooks] == [
        ("a", "exp", "k (model.py:3 aten.exp)"),
        ("b", "b", "k (model.py:3 aten.exp)"),
    ]


def _hooks(p: WrapperProgram) -> list[tuple[int, Any]]:
    return [(k, i) for k, i in enumerate(p.body) if isinstance(i, Hook)]


def test_a_hook_names_a_callable() -> None:
    text = "program('g')\nx = tensor_input(f32[4] @ (1,))\nhook(x, 0, 'n', 'l')\nreturn ()"
    with pytest.raises(InternalError, match="the program has 0 callables"):
        verify(read(text))
