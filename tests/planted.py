"""Faults of the compiler, planted in this process: what finds faults has to find these.

`python -m tests.planted NAME FILE ARGUMENTS` plants one and runs a file.
"""

from __future__ import annotations

import dataclasses
import operator
import runpy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from plait import pipelines
from plait.graph import fold
from plait.graph.edit import aten, replace
from plait.ir.loops import Pointwise, walk
from plait.ir.maths import tanh
from plait.kernel.cpu import prelude
from plait.lower import core
from plait.lower.elementwise import FLOAT, elementwise
from plait.lower.graph import load_rules
from plait.schedule import fuse, memory
from plait.wrapper import instructions as ins
from plait.wrapper import targets
from plait.wrapper.passes.merge_views import merge_views
from plait.wrapper.walk import rewrite


def rule() -> Any:
    """tanh is too large by a hundredth."""
    load_rules()

    def planted(ctx: Any, x: Any) -> Any:
        return elementwise(ctx, lambda v: tanh(v) * 1.01, (x,), FLOAT)

    return mock.patch.dict(core.RULES, {aten.tanh.default: planted})


_EXP = "static inline vf32 m_exp_f32(vf32 x) {"


def _in_kernels(text: str, other: str) -> Any:
    """What kernels of a CPU share has another text in place of one."""
    write = prelude._defined

    def planted(*args: Any) -> str:
        return write(*args).replace(text, other)

    return mock.patch.object(prelude, "_defined", planted)


def emitter() -> Any:
    """exp in kernels of a CPU is too large by a thousandth."""
    return _in_kernels("p, r) + 1.0f, n)", "p, r) + 1.001f, n)")


def crash() -> Any:
    """exp in kernels of a CPU writes to where there is no memory."""
    return _in_kernels(_EXP, f"{_EXP} *(volatile int*)8 = 1;")


def slow() -> Any:
    """exp in kernels of a CPU takes some milliseconds for a vector."""
    return _in_kernels(_EXP, f"{_EXP} for (volatile int k = 0; k < 6000000; ++k);")


def error() -> Any:
    """The rule of cumsum has no answer."""
    load_rules()

    def planted(*args: Any) -> Any:
        raise LookupError("no answer for 17 of them")

    return mock.patch.dict(core.RULES, {aten.cumsum.default: planted})


def reduction() -> Any:
    """Sums of two and more leave their first element out."""
    load_rules()
    old = core.RULES[aten.sum.dim_IntList]

    def planted(ctx: Any, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        (d,) = dim
        d %= len(x.shape)
        if x.shape[d] == 1:
            return old(ctx, x, dim, keepdim, **kwargs)
        slice_ = core.RULES[aten.slice.Tensor]
        return old(ctx, slice_(ctx, x, d, 1, x.shape[d]), dim, keepdim, **kwargs)

    return mock.patch.dict(core.RULES, {aten.sum.dim_IntList: planted})


def graph_pass() -> Any:
    """The pass that drops copies drops those that cut off the digits of a number."""

    def drops(gm: GraphModule) -> int:
        found = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
        cuts = [n for n in found if n.kwargs.get("dtype") == torch.int32]
        for n in cuts:
            x = n.args[0]
            for user in list(n.users):
                replace(user, x)
            replace(n, x)
        return len(cuts)

    passes = tuple((n, drops if n == "drop no-ops" else p) for n, p in pipelines.GRAPH)
    return mock.patch.object(pipelines, "GRAPH", passes)


def joint_pass() -> Any:
    """The pass that drops what is common to both passes drops the sign of gradients of tanh."""

    def planted(gm: GraphModule) -> int:
        found = gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
        last = [n for n in found if any("tanh" in str(x.target) for x in n.all_input_nodes)]
        for n in last[-1:]:
            with gm.graph.inserting_after(n):
                negated = gm.graph.call_function(aten.neg.default, (n,))
            negated.meta = dict(n.meta)
            n.replace_all_uses_with(negated, partial(operator.is_not, negated))
        return len(last)

    passes = tuple((n, planted if n == "split biases" else p) for n, p in pipelines.JOINT)
    return mock.patch.object(pipelines, "JOINT", passes)


def fusion() -> Any:
    """A pointwise loop that joins a kernel comes out negated."""
    join = fuse._Fuser._join

    def planted(self: Any, a: int, b: int, host: Any, guest: Any, found: Any) -> None:
        members = [
            dataclasses.replace(m, loop=dataclasses.replace(m.loop, body=-m.loop.body))
            if isinstance(m.loop, Pointwise) and m.loop.body.dtype.name == "f32" else m
            for m in guest.group.members
        ]  # fmt: skip
        guest.group.members, guest.members = members, {m.op: m for m in members}
        join(self, a, b, host, guest, found)

    return mock.patch.object(fuse._Fuser, "_join", planted)


def pair() -> Any:
    """A sine that joins a kernel with a sum comes out negated, other loops do not."""
    join = fuse._Fuser._join

    def has(node: Any, op: str) -> bool:
        return any(n.op == op for m in node.group.members for n in walk((m.loop.body,)))

    def planted(self: Any, a: int, b: int, host: Any, guest: Any, found: Any) -> None:
        if host.group.rvars and has(guest, "sin"):
            members = [
                dataclasses.replace(m, loop=dataclasses.replace(m.loop, body=-m.loop.body))
                if isinstance(m.loop, Pointwise) else m
                for m in guest.group.members
            ]  # fmt: skip
            guest.group.members, guest.members = members, {m.op: m for m in members}
        join(self, a, b, host, guest, found)

    return mock.patch.object(fuse._Fuser, "_join", planted)


def reuse() -> Any:
    """A kernel writes over what it reads for the last time, wherever else it reads it."""
    return mock.patch.object(memory, "overwritable", lambda *args: True)


def arena() -> Any:
    """Everything lies at the start of the arena."""
    place = memory.place

    def planted(blocks: Any, hints: Any) -> Any:
        offsets, nbytes = place(blocks, hints)
        return dict.fromkeys(offsets, 0), nbytes

    return mock.patch.object(memory, "place", planted)


def views() -> Any:
    """The pass that merges views of a program takes all of one shape for one."""

    def merges(p: Any) -> Any:
        first: dict[Any, str] = {}
        names: dict[str, str] = {}
        body = []
        for i in merge_views(p).body:
            now = rewrite(i, lambda n: names.get(n, n), lambda e: e)
            if isinstance(now, ins.View):
                names[now.name] = first.setdefault((now.base, now.shape), now.name)
                if names[now.name] != now.name:
                    continue
            body.append(now)
        return dataclasses.replace(p, body=tuple(body))

    passes = tuple((n, merges if n == "merge views" else p) for n, p in pipelines.PROGRAM)
    return mock.patch.object(pipelines, "PROGRAM", passes)


def target() -> Any:
    """The third call of a native program is wrong."""
    load = targets.TARGETS["native"]

    class Planted:
        def __init__(self, program: Any, artifacts: Any) -> None:
            self.loaded, self.calls = load(program, artifacts), 0
            self.boxed = lambda args: self(*args)

        def __call__(self, *args: Any) -> Any:
            first, *rest = self.loaded(*args)
            self.calls += 1
            return first + (self.calls == 3), *rest

    return mock.patch.dict(targets.TARGETS, {"native": Planted})


def frozen() -> Any:
    """What is computed of weights when they become constants is too large by a hundredth."""
    settled = fold._settled
    return mock.patch.object(fold, "_settled", lambda x, *args: settled(x, *args) * 1.01)


PLANTS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        rule,
        emitter,
        reduction,
        graph_pass,
        joint_pass,
        fusion,
        pair,
        reuse,
        arena,
        views,
        target,
        frozen,
        crash,
        slow,
        error,
    )
}


def main() -> None:
    name, file, *rest = sys.argv[1:]
    sys.argv = [file, *rest]
    with PLANTS[name]():
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    main()
