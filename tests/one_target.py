"""Compiling for one target only, and what a compiled function gave: results, arguments after the
call, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.wrapper.program import CompileRecord, observers


@contextmanager
def only(target: str) -> Iterator[list[CompileRecord]]:
    """Every graph is compiled to this target and runs as it: the executor is not there for the
    Python targets, and has no step of a plan to run for C++, whose functions are its own. Gives the
    record of each graph."""
    from plait.wrapper import cpp

    def unavailable(*args: object) -> None:
        raise AssertionError("the native executor runs")

    def generated(*args: Any) -> Any:
        made = load(*args)
        assert args[4] is not None and made.stats()["steps"] == 0
        return made

    torch._dynamo.reset()
    load = cpp.load
    records: list[CompileRecord] = []
    token = observers.set((records.append,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_WRAPPER", target)
        if target != "native":
            patch.setattr("plait.wrapper.native.load", unavailable)
        if target == "cpp":
            patch.setattr(cpp, "load", generated)
        elif target != "native":
            patch.setattr("plait.runtime.load.Program", unavailable)
        yield records
    observers.reset(token)
    assert records and {r.target for r in records} == {target}


def outcome(
    target: str,
    fn: Callable[..., Any],
    calls: Sequence[Callable[[], Sequence[Any]]],
    dynamic: bool | None,
    training: bool,
    module: torch.nn.Module | None = None,
) -> list[Any]:
    """All that a caller sees of fn, compiled for a target and called once with the arguments that
    each of calls makes.

    training: the sum of all float results is differentiated. module: whose gradients and buffers
    are seen too."""
    torch.manual_seed(0)
    seen: list[Any] = []
    with only(target):
        run = torch.compile(fn, backend="plait", dynamic=dynamic)
        for make in calls:
            args = make()
            leaves = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            if training:
                for x in leaves:
                    x.requires_grad_(x.is_floating_point())
            with torch.set_grad_enabled(training):
                out = run(*args)
            sums = [
                x.square().mean()
                for x in tree_leaves(out)
                if isinstance(x, Tensor) and x.requires_grad
            ]
            if training and sums:
                torch.stack(sums).sum().backward()
            seen += [*tree_leaves(out), *leaves, *(x.grad for x in leaves)]
    if module is not None:
        seen += [*(p.grad for p in module.parameters()), *module.buffers()]
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in seen]


def same_bits(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Equal values of equal types, NaNs included."""
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert type(a) is type(b), k
        if not isinstance(b, Tensor):
            assert a == b, k
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), k
        assert torch.equal(_bits(a), _bits(b)), (
            f"value {k}: {(a != b).sum()} of {a.numel()} elements differ"
        )


def _bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
