"""Strides that PyTorch's tracing gives the results of a program, whoever compiles it.

The program is made functional and run on fake tensors. Some shape functions promise others than
eager's kernels give, and what is written in place becomes a new tensor, laid out as its operator
likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode


def traced_strides(
    f: Callable[..., Any], args: Sequence[Any], results: Sequence[Any]
) -> list[tuple[int, ...] | None]:
    """Of every result of f(*args); None where tracing does not tell, or gives another number of
    dimensions (it does not know that a found size is 1, and does not squeeze it). results: eager's,
    whose sizes tell those that tracing does not know."""
    made = _traced(f, args) or _traced(f, args, _items(f, args))
    if made is None:
        return [None] * len(results)
    found: dict[Any, int] = {}
    alike = [
        isinstance(x, Tensor) and x.dim() == y.dim() for x, y in zip(made, results, strict=True)
    ]
    for fake, real in (
        pair
        for pair, is_alike in zip(zip(made, results, strict=True), alike, strict=True)
        if is_alike
    ):
        for size, n in zip(fake.shape, real.shape, strict=True):
            symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
            for symbol in symbols if len(symbols) == 1 else ():
                roots = _roots(size.node.expr - n, symbol)
                found |= {symbol: int(roots[0])} if len(roots) == 1 else {}
    return [_known(x, found) if is_alike else None for x, is_alike in zip(made, alike, strict=True)]


def found_sizes(f: Callable[..., Any], args: Sequence[Any], results: int) -> dict[str, bool]:
    """Whether a size of a result of f(*args), named o0 to o(results - 1), is found when it runs.
    Nothing where tracing does not tell."""
    made = _traced(f, args) or ()
    return {
        f"o{k}": isinstance(x, Tensor) and bool(free_unbacked_symbols(x))
        for k, x in enumerate(made[:results])
    }


class _Items(TorchFunctionMode):
    """Notes what every `item()` gives; made from such notes, it gives the same again."""

    def __init__(self, notes: Sequence[Any] = ()) -> None:
        super().__init__()
        self.given, self.notes = list(notes), list[Any]()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is not Tensor.item:
            return fn(*args, **(kwargs or {}))
        self.notes.append(self.given.pop(0) if self.given else fn(*args))
        return self.notes[-1]


def _items(f: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """What every `item()` in f(*args) gives."""
    with _Items() as seen:
        f(*(x.detach().clone() if isinstance(x, Tensor) else x for x in args))
    return seen.notes


def _traced(
    f: Callable[..., Any], args: Sequence[Any], items: Sequence[Any] = ()
) -> Sequence[Any] | None:
    """f(*args) on fake tensors of these sizes. items: what `item()` gives, where tracing does not
    go on without."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    try:
        fakes = [
            mode.from_tensor(x.detach(), static_shapes=True) if isinstance(x, Tensor) else x
            for x in args
        ]
        with mode, torch.no_grad(), _Items(items):
            made: Sequence[Any] = torch.func.functionalize(f)(*fakes)
    except Exception:  # noqa: BLE001 - what cannot be traced so is not judged so
        return None
    return made


def _roots(expr: sympy.Expr, symbol: sympy.Symbol) -> list[Any]:
    try:
        return list(sympy.solve(expr, symbol))
    except NotImplementedError:
        return []


def _known(x: Tensor, found: dict[Any, int]) -> tuple[int, ...] | None:
    strides = [s.node.expr.subs(found) if isinstance(s, torch.SymInt) else s for s in x.stride()]
    return (
        None if any(getattr(s, "free_symbols", ()) for s in strides) else tuple(map(int, strides))
    )
