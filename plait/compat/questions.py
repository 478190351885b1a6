"""What a traced program asks about sizes, and the state of torch while plait traces one.

Inside `exporting`, each question that the program itself asks is noted in `shape_env.asked`, if
there is such a list; `shape_env.turned` has those that get the other answer. Where `shape_env.at`
has values of sizes, all questions are answered for these, those of operators too.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _lazy_graph_module, _symbolic_trace
from torch.fx import proxy as fx_proxy
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)

from plait import errors
from plait.compat.raising import truth
from plait.compat.shared import Shared


@dataclass(frozen=True)
class Question:
    """What a traced program asked about sizes. condition: what makes it of exprs. firm: plait
    asked."""

    answer: bool
    condition: Any
    exprs: tuple[Any, ...]
    firm: bool

    def holds(self, now: Callable[[Any], Any]) -> Any:
        """The condition that the answer stays what it was. now: an expression as it is put
        there."""
        condition = self.condition(*map(now, self.exprs))
        return condition if self.answer else sympy.Not(condition)

    def turns(self, now: Callable[[Any], Any]) -> bool:
        """Whether the answer is the other one."""
        try:
            return self.holds(now) is sympy.false
        except ZeroDivisionError:
            return False


_NO_VALUES = (
    GuardOnDataDependentSymNode,
    NotImplementedError,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_STAND_INS = re.compile(
    r"FakeTensor|FunctionalTensor|tensor subclass|data pointer|does not have storage"
)


def wants_values(error: Exception) -> bool:
    """Whether traced code failed because its tensors have no values: torch has classes of errors
    for some of this, for the rest (`x.numpy()`, `f"{x:.1f}"`, `float(f"{x}")`) the text tells."""
    told = (
        isinstance(error, (RuntimeError, TypeError, ValueError))
        and _STAND_INS.search(str(error)) is not None
    )
    return told or isinstance(error, _NO_VALUES)


class _Users(traceback.StackSummary):
    """What a tracer keeps of a stack: the code that is traced, and torch's layers. torch itself
    keeps functions that are called `forward`. All other frames and their lines take a fifth of a
    trace's time."""

    @classmethod
    def extract(cls, *_: object, **__: object) -> _Users:
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != _CALLER:
            code = frame.f_code  # the number of a line is slow to find
            layer = code.co_name == "forward" and code.co_filename.startswith(_LAYERS)
            if layer or not code.co_filename.startswith(_OPERATORS):
                frames.append(frame)
            frame = frame.f_back
        return cls(
            traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name)
            for f in reversed(frames if frame is not None else ())
        )

    def summary(self) -> _Users:
        return self


_ask = SymNode.bool_
_OURS = f"{Path(errors.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_OPERATORS = (_OURS, _TORCH, contextlib.__file__, functools.__file__)
_CALLER, _LAYERS = f"{_OURS}capture/flat_module.py", f"{_TORCH}nn/modules/"


def _asked(node: SymNode) -> bool:
    """What Python gets that asks whether a condition on sizes holds. Tracing takes sizes and
    strides that vary for 2 or more and leaves no guard where that answers: an env that is tracing
    takes a note of what its program asks."""
    answer = _ask(node)
    asked = getattr(node.shape_env, "asked", None)
    if asked is not None and _is_the_program(sys._getframe(1)):
        condition, exprs = getattr(node, "compares", (sympy.And, (node.expr,)))
        if not any(map(free_unbacked_symbols, exprs)):
            asked.append(Question(answer, condition, exprs, _is_ours(sys._getframe(2))))
    return answer


def _comparing(name: str, condition: Any) -> Callable[[SymNode, SymNode], SymNode]:
    """The method of nodes that compares two, whose result knows both."""
    compare = getattr(SymNode, name)

    def compared(a: SymNode, b: SymNode) -> SymNode:
        node: Any = compare(a, b)
        node.compares = condition, (a.expr, b.expr)
        turned = getattr(a.shape_env, "turned", {})
        if (
            node.compares in turned
            and not _is_ours(sys._getframe(2))
            and _is_the_program(sys._getframe(1))
        ):
            return a.wrap_bool(turned[node.compares])
        return node  # type: ignore[no-any-return]

    return compared


_evaluate: Any = ShapeEnv.evaluate_expr


def _evaluated(env: Any, expr: Any, hint: Any = None, *rest: Any, **more: Any) -> Any:
    """What an expression is, for the sizes that an env is held at. No guard says so."""
    at = getattr(env, "at", None)
    now = env.replace(expr).xreplace(at) if at else expr
    if at and (now.is_number or now.is_Boolean and now.is_Atom):
        return now
    return _evaluate(env, now, hint if now == expr else None, *rest, **more)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_the_program(frame: FrameType | None) -> bool:
    """Whether a frame belongs to what is traced, not to an operator that it called."""
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        if not frame.f_code.co_filename.startswith(_OPERATORS):
            return True
        frame = frame.f_back
    return frame is None


_select: Any = torch._C._select_conv_backend


def _selected(*args: Any, **kwargs: Any) -> Any:
    """Which kernel of torch's convolves: another for 16 images and more. Nothing but the layout of
    a result follows from it, at which a program looks when it runs, so no guard is left."""
    x = args[0] if args else kwargs["input"]
    env = x.fake_mode.shape_env
    with env.suppress_guards() if env is not None else contextlib.nullcontext():
        return _select(*args, **kwargs)


_CONDITIONS = {
    "eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge,
}  # fmt: skip
_CHANGES: list[tuple[Any, str, Any]] = [
    *((SymNode, name, _comparing(name, condition)) for name, condition in _CONDITIONS.items()),
    (torch.compiler, "_is_compiling_flag", True), (torch.compiler, "_is_exporting_flag", True),
    (fx_proxy, "CapturedTraceback", _Users), (SymNode, "bool_", _asked),
    (fx_proxy.TracerBase, "_filter_traceback_frames", lambda _, frames: frames),
    (ShapeEnv, "evaluate_expr", _evaluated), (FunctionalTensor, "__bool__", truth),
    (_symbolic_trace, "is_fx_tracing", lambda: False),
    (_lazy_graph_module, "_use_lazy_graph_module_flag", True),
    (torch._C, "_select_conv_backend", _selected),
]  # fmt: skip
_BEFORE = [getattr(owner, name) for owner, name, _ in _CHANGES]


def _set(values: Sequence[Any]) -> None:
    for (owner, name, _), value in zip(_CHANGES, values, strict=True):
        setattr(owner, name, value)


exporting = Shared(lambda: _set([new for *_, new in _CHANGES]), lambda: _set(_BEFORE))
"""Inside, torch.compiler.is_compiling() and is_exporting() are true: models ask before they look at
values. Stacks hold the user's code, questions about sizes are noted, those of convolutions leave no
guard, and of a graph no Python is made, which has no word for `aten.random.from`."""
