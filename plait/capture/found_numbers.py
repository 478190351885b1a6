"""What tracing makes of numbers that are found at run time, where torch alone would fail on them.

- Python's indexing (`x[i.item()]`) asks such a number for its value, which it does not have yet:
  `IndexByFound` reads by a `select` instead.
- Inside `numbers_kept`, a number that is only asserted of (`torch._check`) stays in the graph, and
  sizes have a `divmod`, a min and a max.
- Inside `mended_tracing`, torch neither looks for symbols that stand in no node nor drops
  assertions.
"""

from __future__ import annotations

import builtins
import functools
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx.node
from torch.fx import GraphModule
from torch.fx.experimental import _config, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from plait.compat import fake_shapes
from plait.compat.shared import Shared

fake_shapes.correct()


class IndexByFound(TorchFunctionMode):
    """Inside, tensors can be read and written at such numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            x, given, *value = args
            items = tuple(map(_number, given if isinstance(given, tuple) else (given,)))
            if any(map(_is_found, items)):
                x, items = _selected(x, items)
            elif not any(isinstance(i, slice) for i in items):
                items = given
            return func(x, items, *value)
        return func(*args, **(kwargs or {}))


def index_by_found(gm: torch.nn.Module) -> AbstractContextManager[Any]:
    """For the tracing of a Dynamo graph: an `IndexByFound` if a tensor stands for a number in an
    index there."""
    nodes = gm.graph.nodes if isinstance(gm, GraphModule) else ()
    wanted = any(
        n.target in _INDEXED and any(map(_is_position, n.all_input_nodes[1:])) for n in nodes
    )
    return IndexByFound() if wanted else nullcontext()


_INDEXED = (operator.getitem, operator.setitem)


def _is_position(node: torch.fx.Node) -> bool:
    x = node.meta.get("example_value")
    return isinstance(x, torch.Tensor) and x.dim() == 0 and _is_integer(x.dtype)


def _number(item: Any) -> Any:
    """An item of an index with numbers in place of tensors that stand for one, as Python's indexing
    has them."""
    if isinstance(item, slice):
        return slice(_number(item.start), _number(item.stop), _number(item.step))
    if isinstance(item, torch.Tensor) and item.dim() == 0 and _is_integer(item.dtype):
        # Under vmap it is a number a row.
        return item if torch._C._functorch.is_batchedtensor(item) else item.item()
    return item


def _is_integer(dtype: torch.dtype) -> bool:
    """Whether elements are positions: those of bool and uint8 are masks."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.uint8))


def _is_found(item: Any) -> bool:
    return isinstance(item, torch.SymInt) and bool(free_unbacked_symbols(item))


def _selected(x: torch.Tensor, items: Sequence[Any]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A view of x and an index that together are x[items], with no such number in the index.
    PyTorch takes integers out of an index before it looks at tensors in it."""
    spans = [_span(i) for i in items]
    rest: list[Any] = list(items)
    dim = sum(
        x.dim() - sum(spans) if i is Ellipsis else n for i, n in zip(items, spans, strict=True)
    )
    for k in reversed(range(len(items))):
        dim -= x.dim() - sum(spans) if items[k] is Ellipsis else spans[k]
        if _is_found(items[k]):
            x = x.select(dim, items[k])
            spans[k] = 0
            del rest[k]
    return x, tuple(rest)


def _span(item: Any) -> int:
    """How many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


aten = torch.ops.aten
_MAKERS = frozenset({
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
    aten.index.Tensor, aten.repeat_interleave.Tensor, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default,
})  # fmt: skip
_METHODS = {"__divmod__": lambda a, b: (a // b, a % b), "__rdivmod__": lambda b, a: (a // b, a % b)}


def _of_found(
    builtin: Callable[..., Any], symbolic: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """min or max, which compare their arguments, as an expression where one of them is not known
    yet."""

    def run(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        ints = [x for x in values if isinstance(x, torch.SymInt)]
        if len(values) > 1 and not kwargs and any(map(free_unbacked_symbols, ints)):
            return functools.reduce(symbolic, values)
        return builtin(*args, **kwargs)

    return run


_BUILTINS = {
    "min": (min, _of_found(min, torch.sym_min)),
    "max": (max, _of_found(max, torch.sym_max)),
}


def _keep() -> None:
    effects: set[Any] = torch.fx.node._side_effectful_functions
    effects |= _MAKERS
    for name, method in _METHODS.items():
        setattr(torch.SymInt, name, method)
    for name, (_, found) in _BUILTINS.items():
        setattr(builtins, name, found)


def _let_go() -> None:
    effects: set[Any] = torch.fx.node._side_effectful_functions
    effects -= _MAKERS
    for name in _METHODS:
        delattr(torch.SymInt, name)
    for name, (builtin, _) in _BUILTINS.items():
        setattr(builtins, name, builtin)


numbers_kept = Shared(_keep, _let_go)
"""Inside, torch keeps calls that make such numbers though nobody uses them (`graph/dead.py` drops
what is not needed), and symbolic integers have a divmod, a min and a max, which torch leaves to
Dynamo."""


# Functions that are run before they are traced make views of their results once more, by sizes with
# symbols of their own, which torch then looks for in the graph. And of two overloads it takes one
# for a pure function.
_STRAY = "soft_pending_unbacked_not_found_error"
_ASSERTION = aten._assert_async.default
_log = logging.getLogger(symbolic_shapes.__name__)


def _is_told(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Pending unbacked symbols")


def _mend() -> None:
    _log.addFilter(_is_told)
    setattr(_config, _STRAY, True)
    torch.fx.node._side_effectful_functions.add(_ASSERTION)


def _undo() -> None:
    torch.fx.node._side_effectful_functions.remove(_ASSERTION)
    setattr(_config, _STRAY, False)
    _log.removeFilter(_is_told)


mended_tracing = Shared(_mend, _undo)
"""Inside, no node of a graph need hold such symbols, and assertions stay in it."""
