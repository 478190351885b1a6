"""The gradient of a loop that may run no round.

PyTorch's while_loop keeps what each round made for the backward pass, and what it was given where
there was no round: as if there had been one, of which the backward pass then takes the gradient.
Inside `rounds_counted` such a loop counts its rounds, too, and the backward pass starts behind its
only round where there was none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch._guards import detect_fake_mode

from plait.compat.shared import Shared

_home: Any = import_module("torch._higher_order_ops.while_loop")
_own: Any = getattr(_home, "WhileLoopAutogradOp", None)


class _Counted(_own or object):  # type: ignore[misc]
    """PyTorch's autograd function, in which the operators that its code calls are replaced."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        def stacked(holds: Any, step: Any, carried: Any, more: Any) -> Any:
            return _and_count(ctx, holds, step, carried, more)

        return _calling(_own.forward, while_loop_stack_output_op=stacked)(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def loop(holds: Any, step: Any, carried: Any, more: Any) -> Any:
            _, *rest = carried  # the first one is the number of the round
            return _home.while_loop_op(holds, step, (1 - ctx.rounds[0], *rest), more)

        return _calling(_own.backward, while_loop_op=loop)(ctx, *grads)


def _calling(fn: Callable[..., Any], **instead: Any) -> Callable[..., Any]:
    """fn, in which these global names are something else."""
    code = fn.__code__
    missing = instead.keys() - set(code.co_names)
    assert not missing, f"PyTorch's while_loop no longer calls {', '.join(missing)}"
    return FunctionType(code, {**vars(_home), **instead}, code.co_name, fn.__defaults__)


def _and_count(
    ctx: Any, holds: Any, step: Any, carried: tuple[Any, ...], more: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What each round of a loop made. ctx.rounds becomes their numbers, from 1 on; 0 if there was
    none."""
    n = len(carried)
    holds, step = map(_home._maybe_run_with_interpreter, (holds, step))

    def goes_on(*given: Any) -> Any:
        return holds(*given[:n], *given[n + 1 :])

    def and_next(*given: Any) -> tuple[Any, ...]:
        return *step(*given[:n], *given[n + 1 :]), given[n] + 1

    none = torch.zeros((), dtype=torch.int64)
    made = _home.while_loop_stack_output_op(goes_on, and_next, (*carried, none), more)
    *outs, ctx.rounds = made
    return tuple(outs)


def _count() -> None:
    _home.WhileLoopAutogradOp = _Counted


def _undo() -> None:
    _home.WhileLoopAutogradOp = _own


rounds_counted = Shared(_count, _undo)
"""Inside, loops whose gradients are wanted count their rounds."""


@contextmanager
def positions_found(inputs: Any) -> Iterator[None]:
    """Inside, a graph over these inputs may become one that reads numbers from tensors, whatever
    Dynamo is told about scalar outputs: the gradient of a loop finds what a round made by its
    number."""
    mode: Any = detect_fake_mode(inputs)
    if mode is None:
        yield
        return
    before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before
