"""Compiling takes time in proportion to the graph: for a graph of twice the size, every function of
the compiler runs about twice as many lines, whatever the graph is."""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from plait.config import Config
from plait.graph.captured import Captured
from plait.ir import expr, loops
from plait.ir.expr import symbol
from plait.lower.graph import load_rules, lower_graph
from plait.pipelines import clean_graph, run_passes, schedule
from plait.schedule.memory import Block, place
from plait.wrapper.build import build

CFG = Config()
aten = torch.ops.aten


class Graph:
    """An ATen graph, op by op."""

    def __init__(self) -> None:
        self.mode, self.graph = FakeTensorMode(), fx.Graph()

    def inputs(self, n: int, *shape: int) -> list[fx.Node]:
        nodes = [self.graph.placeholder(f"x{len(self.graph.nodes)}_{k}") for k in range(n)]
        for node in nodes:
            with self.mode:
                node.meta["val"] = torch.empty(shape)
        return nodes

    def __call__(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def returning(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def many_results(n: int) -> fx.GraphModule:
    g = Graph()
    return g.returning(
        *[g(aten.add.Tensor, g(aten.mul.Tensor, x, 2), 1) for x in g.inputs(n, 4096)]
    )


def optimizer_step(n: int) -> fx.GraphModule:
    g = Graph()
    params, grads, means = (g.inputs(n, 16) for _ in range(3))
    news = []
    for p, grad, m in zip(params, grads, means, strict=True):
        mean = g(aten.add.Tensor, g(aten.mul.Tensor, m, 0.9), g(aten.mul.Tensor, grad, 0.1))
        news += [(p, g(aten.sub.Tensor, p, g(aten.mul.Tensor, mean, 0.01))), (m, mean)]
    for old, new in news:
        g(aten.copy_.default, old, new)
    return g.returning()


def lists(n: int) -> fx.GraphModule:
    """The same by operators on lists, of tensors of mixed size."""
    g = Graph()
    params, grads, means = ([g.inputs(1, 16 + k // 2)[0] for k in range(n)] for _ in range(3))
    made = g(aten._foreach_lerp.Scalar, means, grads, 0.1)
    new = [g(operator.getitem, made, k) for k in range(n)]
    stepped = g(aten._foreach_add.List, params, new)
    for k in range(n):
        g(aten.copy_.default, means[k], new[k])
        g(aten.copy_.default, params[k], g(operator.getitem, stepped, k))
    return g.returning()


def chain(n: int) -> fx.GraphModule:
    g = Graph()
    made = g.inputs(1, 4096)
    for k in range(n):
        made.append(g(aten.add.Tensor, g(aten.sin.default, made[-1]), k % 7))
    return g.returning(*made[1:])


def long_sum(n: int) -> fx.GraphModule:
    g = Graph()
    total, *others = g.inputs(n, 4096)
    for x in others:
        total = g(aten.add.Tensor, total, x)
    return g.returning(total)


def deep_training(n: int) -> fx.GraphModule:
    g = Graph()
    (x,), weights = g.inputs(1, 64, 32), g.inputs(n, 32, 32)
    seen, grads = [x], []
    for w in weights:
        seen.append(g(aten.relu.default, g(aten.mm.default, seen[-1], w)))
    grad = seen[-1]
    for w, a in zip(weights[::-1], seen[-2::-1], strict=True):
        grad = g(aten.mul.Tensor, grad, g(aten.sigmoid.default, a))
        grads.append(g(aten.mm.default, g(aten.permute.default, a, [1, 0]), grad))
        grad = g(aten.mm.default, grad, g(aten.permute.default, w, [1, 0]))
    return g.returning(*grads)


def joined(n: int) -> fx.GraphModule:
    """A concatenation, which many loops write and others read."""
    g = Graph()
    y = g(aten.cat.default, [g(aten.mul.Tensor, x, 2) for x in g.inputs(n, 4096)])
    return g.returning(y, g(aten.sin.default, y))


def pieces(n: int) -> fx.GraphModule:
    """A tensor that is cut, each piece changed, and put together again."""
    g = Graph()
    (x,) = g.inputs(1, 8 * n, 16)
    cut = [g(aten.slice.Tensor, x, 0, 8 * k, 8 * k + 8) for k in range(n)]
    return g.returning(g(aten.cat.default, [g(aten.sin.default, piece) for piece in cut]))


def compiled(graph: fx.GraphModule) -> None:
    """Takes a graph through the compiler, up to the instructions around kernels."""
    lowered = lower_graph(clean_graph(Captured(graph, "graph", "inference"), CFG), CFG)
    run_passes(build(schedule(lowered.program, CFG), "graph"))


CACHED = type(functools.cache(len))
ROOMS = tuple(f"plait.{room}." for room in "ir graph lower schedule kernel wrapper".split())


def start_afresh() -> None:
    """Empties what is remembered of expressions: what other tests left there is compared, too."""
    expr.forget()
    loops.forget()
    for name in [n for n in sys.modules if n.startswith(ROOMS)]:
        for found in vars(sys.modules[name]).values():
            if isinstance(found, CACHED):
                found.cache_clear()


def lines_run(work: Callable[[], object]) -> Counter[str]:
    """How many lines of each function of plait run: of a loop, once a turn."""
    counts: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            counts[
                f"{frame.f_code.co_filename.rpartition('/plait/')[2]}: {frame.f_code.co_qualname}"
            ] += 1
        return trace if event != "call" or "/plait/" in frame.f_code.co_filename else None

    start_afresh()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counts


PROGRAMS = {many_results: 50, optimizer_step: 160, lists: 50, chain: 50, long_sum: 50,
            deep_training: 80, joined: 50, pieces: 100}  # fmt: skip
"""And the smaller size: fewer kernels of an optimizer do not all share launches, and of fewer
products everything fits into one arena at the first try."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_twice_the_graph_is_twice_the_work(program: Callable[[int], fx.GraphModule]) -> None:
    load_rules()
    n = PROGRAMS[program]
    graphs = program(n), program(2 * n)
    once, twice = (lines_run(partial(compiled, graph)) for graph in graphs)
    assert sum(once.values()) > 10_000
    assert not grown(once, twice)


def test_buffers_of_twice_as_many_sizes_are_twice_the_work() -> None:
    """Each lives on while the next one is made, so that every second one may lie at one place."""

    def placed(n: int) -> Counter[str]:
        sizes = [symbol(f"s{k}", 1) * 64 for k in range(n)]
        blocks = [Block((f"b{k}",), size, k, k + 1) for k, size in enumerate(sizes)]
        return lines_run(partial(place, blocks, {f"s{k}": 5 + k % 7 for k in range(n)}))

    once, twice = placed(200), placed(400)
    assert sum(once.values()) > 10_000
    assert not grown(once, twice)


def grown(once: Counter[str], twice: Counter[str]) -> dict[str, tuple[int, int]]:
    """The functions whose work grew by more than that of a graph of twice the size."""
    return {name: (once[name], n) for name, n in twice.items() if n > 2.5 * once[name] + 300}
