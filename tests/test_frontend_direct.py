"""Which graphs Dynamo may call as they are, and that every other one gets AOTAutograd's runtime wrapper."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.capture.backend import plait_backend
from tests.against_eager import same


def road(fn: Callable[..., Any], args: Sequence[Any], **kwargs: Any) -> list[str]:
    """'direct' or 'wrapped' for every graph that fn(*args) compiles."""
    roads: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        out = plait_backend(gm, inputs)
        roads.append("wrapped" if isinstance(out, types.FunctionType) else "direct")
        return out

    with torch.no_grad():
        torch.compile(fn, backend=backend, **kwargs)(*args)
    return roads


def batch_norm() -> Callable[..., Any]:
    return torch.nn.BatchNorm1d(6).train()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1).sum(),
        lambda x: (x + 1, None, x * 2),
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: torch.rand_like(x) + x,
        lambda x: torch.nn.functional.linear(x, x),
        batch_norm(),
    ],
)
def test_direct(fn: Callable[..., Any]) -> None:
    assert road(fn, (torch.randn(4, 6),)) == ["direct"]


def mutate(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def mutate_with_view(x: Tensor, v: Tensor) -> Tensor:
    x.mul_(2)
    return v + 1


def resize(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (1, 2))


def views() -> Sequence[Any]:
    x = torch.randn(4, 6)
    return x, x[1:]


def subclass() -> Sequence[Any]:
    from torch.testing._internal.two_tensor import TwoTensor

    return (TwoTensor(torch.randn(4), torch.randn(4)),)


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (lambda x: x.t(), None),
        (lambda x: (x[1:], x + 1), None),
        (resize, None),
        (mutate_with_view, views),
        (lambda x: x * 2, subclass),
    ],
    ids=[
        "alias of input", "slice and result", "as_strided of input", "synthetic base", "subclass",
    ],
)  # fmt: skip
def test_wrapped(fn: Callable[..., Any], make: Callable[[], Sequence[Any]] | None) -> None:
    args = make() if make else (torch.randn(4, 6),)
    assert road(fn, args) == ["wrapped"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (y := x + 1, y.t()),
        lambda x: ((y := x.sin())[0], y[1]),
        lambda x: (y := x.exp().view(-1), y[:3]),
    ],
)
def test_views_of_an_intermediate_are_direct_and_share_memory(fn: Callable[..., Any]) -> None:
    """Without gradients AOTAutograd leaves such views to the graph."""
    assert road(fn, (torch.randn(4, 6),)) == ["direct"]
    same(fn, lambda: (torch.linspace(0, 1, 24).view(4, 6),))


def test_dynamic_outputs_are_wrapped() -> None:
    assert road(lambda x: x + 1, (torch.randn(4, 6),), dynamic=True) == ["wrapped"]


def test_dynamic_inputs_with_a_static_result_are_direct() -> None:
    assert road(lambda x: (x + 1).sum(), (torch.randn(4, 6),), dynamic=True) == ["direct"]


def test_training_is_direct() -> None:
    roads: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        out = plait_backend(gm, inputs)
        roads.append("wrapped" if isinstance(out, types.FunctionType) else "direct")
        return out

    torch.compile(lambda x: x.sin(), backend=backend)(
        torch.randn(3, requires_grad=True)
    ).sum().backward()
    assert roads == ["direct"]


def test_custom_op_is_wrapped() -> None:
    with torch.library._scoped_library("plait_test", "FRAGMENT") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("plait_test::twice", torch.empty_like, lib=lib)
        op = torch.ops.plait_test.twice.default
        assert road(lambda x: op(x) + 1, (torch.randn(4),)) == ["wrapped"]


def test_fake_first_call_is_wrapped() -> None:
    from torch._guards import TracingContext

    from plait import compat

    class Meta:
        num_mutated_inp_runtime_indices = num_outputs_aliased = num_intermediate_bases = 0
        tokens: dict[Any, Any] = {}  # noqa: RUF012
        is_rng_op_functionalized = dynamic_outputs = False
        grad_enabled_mutation = None
        subclass_inp_meta: tuple[Any, ...] = ()
        subclass_fw_graph_out_meta: tuple[Any, ...] = ()

    assert compat.wrapper_reason(Meta()) == ""
    for name in ("tokens", "is_rng_op_functionalized", "dynamic_outputs", "num_intermediate_bases"):
        changed = Meta()
        setattr(changed, name, 1)
        assert compat.wrapper_reason(changed) != "", name
    changed = Meta()
    changed.grad_enabled_mutation = False  # type: ignore[assignment]
    assert compat.wrapper_reason(changed) == "the graph switches grad mode"
    context = TracingContext(None)
    context.fakify_first_call = True
    with torch._guards.tracing(context):
        assert compat.wrapper_reason(Meta()) == "the first call is fake"


def test_deduplicated_inputs() -> None:
    x = torch.randn(4, 6)
    same(lambda a, b: (a * b, a + 1), lambda: (x, x))


def test_mutation_in_a_direct_graph_bumps_versions_once_seen_by_autograd() -> None:
    x = torch.randn(4)
    assert road(mutate, (x,)) == ["direct"]
    y = torch.randn(4)
    fn = torch.compile(mutate, backend="plait")
    with torch.no_grad():
        fn(y)
        before = y._version
        fn(y)
    assert y._version > before


def test_batch_norm_buffers_of_a_direct_graph_bump() -> None:
    bn = torch.nn.BatchNorm1d(6)
    fn = torch.compile(bn, backend="plait")
    with torch.no_grad():
        fn(torch.randn(4, 6))
        before = bn.running_mean._version
        fn(torch.randn(4, 6))
    assert bn.running_mean._version > before


def test_result_shared_by_two_outputs_stays_shared() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    out = torch.compile(fn, backend="plait")(torch.ones(3))
    assert out[0] is out[1]
