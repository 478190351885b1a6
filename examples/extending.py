"""A library with operators, a graph pass, a kernel target, a kind of device and an object store of
its own, behind plait:

    python examples/extending.py

Everything is registered from outside of plait's tree. The program runs as eager does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import plait
from plait import extend
from plait.compile import compile_texts
from plait.config import Config
from plait.devices import DEVICES
from plait.graph.captured import Captured
from plait.ir.loops import Node
from plait.ir.maths import exp, where
from plait.kernel.cpu.target import CppTarget
from plait.kernel.null.target import NullTarget
from plait.kernel.target import Choices, Machines, Source
from plait.lower.core import Lowering, View
from plait.lower.elementwise import elementwise
from plait.schedule.plan import Kernel


# ------------------------------------------------------------------------ an operator with a kernel
@torch.library.custom_op("extending::soft_step", mutates_args=())
def soft_step(x: torch.Tensor, width: float) -> torch.Tensor:
    """A smooth step: 1 / (1 + exp(-x / width)), and 0 below -20 * width."""
    return torch.where(x < -20 * width, 0.0, 1 / (1 + torch.exp(-x / width)))


@soft_step.register_fake
def _(x: torch.Tensor, width: float) -> torch.Tensor:
    return torch.empty_like(x)


@extend.lowering(torch.ops.extending.soft_step.default)
def _soft_step(ctx: Lowering, x: View, width: float) -> View:
    """One loop, which fuses with what stands around it."""

    def formula(a: Node) -> Node:
        return where(a < -20 * width, 0.0, 1.0 / (exp(-a / width) + 1.0))

    return elementwise(ctx, formula, (x,))


# ------------------------------------------------------------------ an operator made of other ones
@torch.library.custom_op("extending::soft_mean", mutates_args=())
def soft_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean of the last dimension, with the weights of its softmax."""
    return (x.softmax(-1) * x).sum(-1)


@soft_mean.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1])


@extend.decomposition(torch.ops.extending.soft_mean.default)
def _soft_mean(x: torch.Tensor) -> torch.Tensor:
    return (x.softmax(-1) * x).sum(-1)


# ------------------------------------------------------------------------------------- a graph pass
@extend.graph_pass("two negations are none")
def drop_double_negation(gm: torch.fx.GraphModule) -> int:
    """-(-x) is x, bit for bit."""
    neg = torch.ops.aten.neg.default
    found = [
        n for n in gm.graph.nodes if n.target is neg and getattr(n.args[0], "target", None) is neg
    ]
    for n in found:
        n.replace_all_uses_with(n.args[0].args[0])
    return len(found)


# ---------------------------------------------------------------------------------- a kernel target
class Counted(CppTarget):
    """The C++ target, which also counts the kernels it was given."""

    name = "counted"
    kernels = 0

    def emit(
        self,
        kernels: Sequence[Kernel],
        unaligned: Set[str],
        machines: Machines,
        choices: Choices,
        verifies: bool,
    ) -> Source:
        type(self).kernels += len(kernels)
        return super().emit(kernels, unaligned, machines, choices, verifies)


# -------------------------------------------------------------------------------- a kind of device
class Listed(NullTarget):
    """Kernels as the text of what they do, for a device that has no compiler yet."""

    name = "listed"


def kernels_for_a_new_device() -> str:
    """The kernels of a softmax there; no such device need be at hand."""
    row = replace(DEVICES["cpu"], target="listed", eager_cpu=False, kernel_file="4_kernels.txt")
    extend.device("mtia", row, Listed())
    with FakeTensorMode():
        x = torch.empty(64, 1000, device="mtia")
        graph = make_fx(lambda x: (torch.softmax(x, -1),), tracing_mode="fake")(x)
    _, made = compile_texts(Captured(graph, "new_0", "inference"), Config())
    return made.sources["mtia"].text


# ---------------------------------------------------------------------------------- an object store
class Shelf:
    """Keeps what is built for as long as the process lives, for all folders of caches."""

    kept: ClassVar[dict[str, bytes]] = {}

    def __init__(self, url: str) -> None: ...

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data

    def list(self) -> Iterable[str]:
        return self.kept


extend.remote_cache("shelf", Shelf)


def model(x: torch.Tensor) -> torch.Tensor:
    return soft_mean(soft_step(x + 1, 0.5).neg().neg()) * 2


def main() -> None:
    x = torch.randn(64, 1000)
    before = extend.kernel_target("cpu", Counted())
    try:
        with tempfile.TemporaryDirectory() as folder:
            mine = {"cache_dir": folder, "cache_remote": "shelf://here"}
            got = torch.compile(model, backend="plait", options={**mine})(x)
    finally:
        extend.kernel_target("cpu", before)
    torch.testing.assert_close(got, model(x))
    plait.explain(model, x)
    print(f"{len(Shelf.kept)} on the shelf")
    print(kernels_for_a_new_device())
    print(f"{Counted.kernels} kernel")


if __name__ == "__main__":
    main()
