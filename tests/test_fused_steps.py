"""PyTorch's operators that are a whole step of an optimizer, called in what is compiled: they are
written out, and numbers are theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import plait
from tests.against_eager import compiled

SHAPES = [(3, 4), (5,), (), (1,), (17, 3)]
ADAM = {"lr": 0.02, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8,
        "amsgrad": False, "maximize": False}  # fmt: skip
SGD = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": False,
       "maximize": False, "is_first_step": False}  # fmt: skip
ADAGRAD = {"lr": 0.02, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SCALED = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("_fused_adam_", ADAM),
    "adamw": ("_fused_adamw_", ADAM),
    "adamw, amsgrad": ("_fused_adamw_", {**ADAM, "amsgrad": True, "maximize": True}),
    "adam, tensor lr": ("_fused_adam_", {**ADAM, "lr": torch.tensor(0.02)}),
    "adamw, scaled": ("_fused_adamw_", {**ADAM, **SCALED}),
    "adamw, overflow": ("_fused_adamw_", {**ADAM, **SCALED, "found_inf": torch.tensor(1.0)}),
    "adam, beta 0": ("_fused_adam_", {**ADAM, "beta1": 0.0, "weight_decay": 0.0}),
    "sgd": ("_fused_sgd_", SGD),
    "sgd, first": ("_fused_sgd_", {**SGD, "is_first_step": True, "nesterov": True}),
    "sgd, plain": ("_fused_sgd_", {**SGD, "momentum": 0.0, "nesterov": False}),
    "sgd, scaled": ("_fused_sgd_", {**SGD, **SCALED, "nesterov": True, "maximize": True}),
    "adagrad": ("_fused_adagrad_", ADAGRAD),
}


def given(
    name: str, options: dict[str, Any], dtype: torch.dtype, rounded: torch.dtype
) -> list[list[torch.Tensor]]:
    """The lists of a step: parameters, gradients, state, and the numbers of steps. rounded: values
    are such of this type."""
    torch.manual_seed(0)

    def some() -> list[torch.Tensor]:
        return [torch.randn(s).to(rounded).to(dtype) for s in SHAPES]

    def positive() -> list[torch.Tensor]:
        return [(torch.rand(s) + 0.1).to(rounded).to(dtype) for s in SHAPES]

    counters = [torch.tensor(3.0) for _ in SHAPES]
    lists = [some(), some()]
    if name == "_fused_sgd_":
        return [*lists, some() if options["momentum"] else []]
    if name == "_fused_adagrad_":
        return [*lists, positive(), counters]
    return [*lists, some(), positive(), positive() if options["amsgrad"] else [], counters]


def stepped(
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    run: Callable[..., Any],
    rounded: torch.dtype | None = None,
) -> list[list[torch.Tensor]]:
    """All lists after two steps."""
    lists = given(name, options, dtype, rounded or dtype)
    op = getattr(torch.ops.aten, name)

    def step(*lists: Any) -> None:
        op(*lists, **options)

    call = run(step)
    call(*lists)
    call(*lists)
    return lists


DTYPES = [
    *[(case, torch.float32) for case in CASES],
    *[(case, torch.bfloat16) for case in ("adamw, scaled", "sgd", "adagrad")],
    *[(case, dtype) for case in ("adamw",) for dtype in (torch.float64, torch.float16)],
]


@pytest.mark.parametrize(("case", "dtype"), DTYPES, ids=[f"{c} {d}" for c, d in DTYPES])
def test_steps(case: str, dtype: torch.dtype) -> None:
    name, options = CASES[case]
    if not hasattr(torch.ops.aten, name):
        pytest.skip("this torch has no such operator")
    try:
        want = stepped(name, options, dtype, lambda f: f)
    except (RuntimeError, NotImplementedError) as refused:
        pytest.skip(str(refused))
    got = stepped(name, options, dtype, compiled)
    exact = stepped(name, options, torch.float64, lambda f: f, dtype)
    eps = max(torch.finfo(dtype).eps, 2e-7)
    for some, others, right in zip(got, want, exact, strict=True):
        for g, w, e in zip(some, others, right, strict=True):
            far, allowed = (g.double() - e).abs(), (w.double() - e).abs()
            assert g.dtype == w.dtype and (far <= allowed + 4 * eps * (1 + e.abs())).all(), (g, w)


def test_few_launches() -> None:
    """They take those of the operators on lists, and nothing is called."""
    lists = given("_fused_adamw_", ADAM, torch.float32, torch.float32)

    def step(*lists: Any) -> None:
        call: Any = torch._fused_adamw_
        call(*lists, **ADAM)

    told = plait.explain(step, *lists, quiet=True)
    assert 1 <= told.kernels <= 3 and not told.fallbacks and len(told.graphs) == 1, told


def test_one_parameter_twice() -> None:
    """It is updated twice: the operator is eager's then."""
    seen: list[Any] = []

    def step(p: Any, g: Any, m: Any) -> None:
        torch.ops.aten._fused_sgd_([p, p], [g, g], [m, m], **SGD)

    def run(call: Callable[..., None]) -> None:
        p, g, m = torch.ones(3), torch.ones(3), torch.zeros(3)
        call(p, g, m)
        seen.append((p, m))

    run(step)
    with pytest.warns(UserWarning, match="eager runs a graph"):
        run(torch.compile(step, backend="plait", options={"strict": False}))
    torch.testing.assert_close(seen[1], seen[0])
