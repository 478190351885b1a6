"""A library with operators, a graph pass and a kernel target of its own, behind plait:

    python examples/extending.py

Everything is registered from outside of plait's tree. The program runs as eager does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

import plait
from plait import extend
from plait.config import Config
from plait.ir.loops import Node
from plait.ir.maths import exp, where
from plait.kernel.cpu.target import CppTarget
from plait.kernel.target import Choices, Source
from plait.lower.core import Lowering, View
from plait.lower.pointwise import elementwise
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
        self, kernels: Sequence[Kernel], unaligned: Set[str], cfg: Config, choices: Choices
    ) -> Source:
        type(self).kernels += len(kernels)
        return super().emit(kernels, unaligned, cfg, choices)


def model(x: torch.Tensor) -> torch.Tensor:
    return soft_mean(soft_step(x + 1, 0.5).neg().neg()) * 2


def main() -> None:
    x = torch.randn(64, 1000)
    before = extend.kernel_target("cpu", Counted())
    try:
        got = torch.compile(model, backend="plait")(x)
    finally:
        extend.kernel_target("cpu", before)
    torch.testing.assert_close(got, model(x))
    plait.explain(model, x)
    print(f"{Counted.kernels} kernel")


if __name__ == "__main__":
    main()
