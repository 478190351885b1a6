"""How the cost of a compile grows with the graph: µs a node for each stage of plait.

    python -m benchmarks.compile_growth [PATTERN ...] [--sizes 100,1000,10000] [--gpu]

Graphs of 100, 1,000 and 10,000 nodes, in patterns that make compilers quadratic: ladders of shared
operands, long chains, many chains side by side, one concatenation of many parts, layers of
products, an optimiser's step over many parameters, results that are kept, pieces of one tensor,
reductions of one tensor, inputs that are written, views, and sizes that vary. The time is that of
the thread that compiles, from an ATen graph to the encoded program and the texts of its kernels;
nothing is built. The last column is the quotient of the last size and the one before it: 1 is
linear. Stages that take less than 2 % have no line. Python looks for no garbage meanwhile: it would
do so in any stage.

--gpu compiles for an sm_90 (torch must be built for CUDA; no GPU is needed). --profile FILE keeps
what cProfile finds of the largest graph.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from benchmarks.table import render
from plait.compile import compile_texts
from plait.config import Config
from plait.graph.captured import Captured
from plait.log import PassLog, watched
from plait.wrapper.native import encode

aten = torch.ops.aten


class Graph:
    """An ATen graph, node by node."""

    def __init__(self, device: str) -> None:
        self.device, self.mode, self.graph = device, FakeTensorMode(), fx.Graph()

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, device=self.device)
        return node

    def varying(self, *shape: int) -> fx.Node:
        """An input whose first size may be any."""
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        context: Any = StatelessSymbolicContext(
            [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (len(shape) - 1)
        )
        example = torch.empty(shape, device=self.device)
        source = ConstantSource(node.name)
        node.meta["val"] = self.mode.from_tensor(example, source=source, symbolic_context=context)
        return node

    def __call__(self, op: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node


Results = list[fx.Node]


def ladder(g: Graph, n: int) -> Results:
    """Every step reads both results of the one before."""
    a, b = g.input(64, 64), g.input(64, 64)
    for _ in range(n // 2):
        a, b = g(aten.add.Tensor, a, b), g(aten.mul.Tensor, a, b)
    return [a, b]


def chain(g: Graph, n: int) -> Results:
    x = g.input(64, 64)
    for k in range(n):
        x = g((aten.sin.default, aten.exp.default, aten.tanh.default)[k % 3], x)
    return [x]


def parallel(g: Graph, n: int) -> Results:
    """Chains of ten operations that read one tensor; 300 of them are 3,000 nodes."""
    x, ends = g.input(64, 64), []
    for k in range(n // 10):
        y = g(aten.mul.Tensor, x, k + 1.0)
        for step in range(9):
            y = g((aten.exp.default, aten.sin.default)[step % 2], y)
        ends.append(y)
    return ends


def cat(g: Graph, n: int) -> Results:
    """2,000 nodes are a concatenation of 1,000."""
    return [g(aten.cat.default, [g(aten.sin.default, g.input(8, 16)) for _ in range(n // 2)], 1)]


def layers(g: Graph, n: int) -> Results:
    x, w = g.input(64, 64), g.input(64, 64)
    for _ in range(n // 6):
        h = g(aten.relu.default, g(aten.mm.default, x, w))
        total = g(aten.sum.dim_IntList, h, [-1], True)
        x = g(aten.add.Tensor, x, g(aten.div.Tensor, h, total))
    return [x]


def optimiser(g: Graph, n: int) -> Results:
    """Adam's step, 14 nodes a parameter; 7,000 nodes are 500 of them."""
    add, mul, news = aten.add.Tensor, aten.mul.Tensor, []
    for _ in range(n // 14):
        p, grad, mean, square = (g.input(64, 16) for _ in range(4))
        mean = g(add, g(mul, mean, 0.9), g(mul, grad, 0.1))
        square = g(add, g(mul, square, 0.99), g(mul, grad, grad))
        step = g(aten.div.Tensor, mean, g(add, g(aten.sqrt.default, square), 1e-8))
        news += [g(aten.sub.Tensor, p, step), mean, square]
    return news


def saved(g: Graph, n: int) -> Results:
    """Products in a row, each of which is a result, as what a forward pass keeps."""
    x, w, kept = g.input(64, 64), g.input(64, 64), []
    for _ in range(n // 2):
        x = g(aten.tanh.default, g(aten.mm.default, x, w))
        kept.append(x)
    return kept


def pieces(g: Graph, n: int) -> Results:
    """A tensor that is cut into pieces, each changed, and put together again."""
    x = g.input(8 * (n // 2), 16)
    cut = [g(aten.slice.Tensor, x, 0, 8 * k, 8 * k + 8) for k in range(n // 2)]
    return [g(aten.cat.default, [g(aten.sin.default, piece) for piece in cut])]


def sums(g: Graph, n: int) -> Results:
    """Reductions of one tensor, each of something else and read by one after it."""
    x, made = g.input(64, 64), []
    for k in range(n // 4):
        total = g(aten.sum.dim_IntList, g(aten.mul.Tensor, x, k + 1.0), [-1], True)
        made.append(g(aten.sum.default, g(aten.div.Tensor, x, total)))
    return made


def writes(g: Graph, n: int) -> Results:
    """Inputs that are written, as the statistics of norms and caches of keys are."""
    x, made = g.input(64, 16), []
    for k in range(n // 4):
        state = g.input(64, 16)
        new = g(aten.add.Tensor, g(aten.mul.Tensor, state, 0.9), g(aten.mul.Tensor, x, k + 1.0))
        made.append(g(aten.copy_.default, state, new))
    return made[:1]


def views(g: Graph, n: int) -> Results:
    """One layout after another, with something to compute after every three."""
    x = g.input(8, 16, 4)
    for _ in range(n // 4):
        x = g(aten.unsqueeze.default, g(aten.permute.default, x, [2, 0, 1]), 1)
        x = g(aten.exp.default, g(aten.squeeze.dim, x, 1))
    return [x]


def sizes(g: Graph, n: int) -> Results:
    """Inputs each of which has a size of its own that varies."""
    g.mode = FakeTensorMode(shape_env=ShapeEnv())
    made = []
    for k in range(n // 4):
        x = g.varying(k + 5, 16)
        made.append(g(aten.softmax.int, g(aten.mul.Tensor, g(aten.exp.default, x), 2.0), 0))
    return made


PATTERNS: dict[str, Callable[[Graph, int], Results]] = {
    f.__name__: f
    for f in (
        ladder,
        chain,
        parallel,
        cat,
        layers,
        optimiser,
        saved,
        pieces,
        sums,
        writes,
        views,
        sizes,
    )
}


class CpuLog(PassLog):
    clock = staticmethod(time.thread_time)


def stages(
    pattern: str, n: int, device: str = "cpu", profile: cProfile.Profile | None = None
) -> dict[str, float]:
    """CPU seconds of each stage for a graph of about n nodes, and of "all"."""
    cfg = Config(gpu_arch="sm_90")
    g = Graph(device)
    g.graph.output(tuple(PATTERNS[pattern](g, n)))
    gm = fx.GraphModule(torch.nn.Module(), g.graph)
    log = CpuLog(cfg, f"{pattern}_{n}")
    gc.collect()
    gc.disable()
    try:
        with profile or nullcontext():
            start = time.thread_time()
            program, _ = compile_texts(Captured(gm, log.name, "inference"), cfg, log)
            compiled = time.thread_time()
            encode(program)
            end = time.thread_time()
    finally:
        gc.enable()
    found = {name: ms / 1e3 for name, ms in log.times_ms.items()}
    return {**found, "encode": end - compiled, "all": end - start}


def rows(by_size: dict[int, dict[str, float]], least: float = 0.02) -> list[list[str]]:
    """A row a stage that takes a part of the largest graph's time: µs a node of each size, and how
    much more a node of the last one costs than one of the one before it."""
    *_, before, last = by_size
    made = []
    for stage, seconds in by_size[last].items():
        us = {n: 1e6 * took.get(stage, 0.0) / n for n, took in by_size.items()}
        if seconds >= least * by_size[last]["all"] and us[before]:
            cells = [f"{each:.1f}" for each in us.values()]
            made.append([stage, *cells, f"{us[last] / us[before]:.2f}"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=", ".join(PATTERNS))
    parser.add_argument("--sizes", default="100,1000,10000", help="nodes")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    args = parser.parse_args()
    sizes = [int(n) for n in args.sizes.split(",")]
    device = "cuda" if args.gpu else "cpu"
    for pattern in watched("patterns", args.patterns or PATTERNS):
        stages(pattern, 100, device)  # what is imported and remembered first
        profile = cProfile.Profile() if args.profile else None
        found = {n: stages(pattern, n, device, profile if n == sizes[-1] else None) for n in sizes}
        if profile is not None:
            profile.dump_stats(args.profile)
        heads = (f"{pattern}, µs a node", *map(str, sizes), "x")
        print(render(heads, rows(found)), flush=True)


if __name__ == "__main__":
    main()
