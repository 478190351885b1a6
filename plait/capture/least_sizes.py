"""How small the sizes of a traced program may be.

Tracing takes a size that varies for 2 or more, leaves no guard where that decides something
(`x[:2]` has two elements), and lets 0 and 1 pass. So the graph is run once more, on fake tensors of
these sizes: where a node then has other sizes than were traced, or is refused, the program is not
for such a size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from plait import compat
from plait.compat.questions import wants_values
from plait.compat.size_facts import SizeFacts
from plait.graph.edit import shape_env_of

_Point = Mapping[Any, Any]
_UNKNOWN = object()
_REFUSED = object()


class _NegativeSize(Exception):
    pass


def with_least_sizes(facts: SizeFacts, graph: GraphModule) -> SizeFacts:
    """The facts with larger lower bounds where 0 or 1 would be wrong; each size is tried by itself.

    From here on the ShapeEnv of the graph knows the bounds: nobody takes a size for 2 or more that
    may be less. A size that may be 0 is one from 1 on: as 1 it counts in strides, and loops over it
    test whether they run. An integer argument that may be 0 stays one from 0 on."""
    given = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
    env = shape_env_of(given)
    if env is None:
        return facts
    hints = {s: sympy.sympify(n) for s, n in compat.tracing.backed_values(env).items()}
    integers = {x.node.expr for x in given if isinstance(x, torch.SymInt)}
    bounds = dict(facts.bounds)
    for symbol in hints:
        low, high = bounds.get(str(symbol), (None, None))
        if low != 0:
            continue
        wrong = [n for n in (0, 1) if not _is_right(graph, {**hints, symbol: sympy.Integer(n)})]
        low = max(wrong, default=-1) + 1
        bounds[str(symbol)] = (low, high)
        known = low if symbol in integers else max(low, 1)
        env.var_to_range[symbol] = ValueRanges(known, env.var_to_range[symbol].upper)
    return replace(facts, bounds=bounds)


def _is_right(graph: GraphModule, point: _Point) -> bool:
    """Whether every node has the sizes that were traced where the sizes of inputs are these."""
    try:
        return _holds(graph, point)
    except (ZeroDivisionError, _NegativeSize):
        return False


def _holds(graph: GraphModule, point: _Point) -> bool:
    values: dict[Node, Any] = {}
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "output":
                return True
            traced = pytree.tree_map(lambda x: _at(x, point), node.meta.get("val"))
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                found = _run(node, values)
                if found is _REFUSED or not _alike(found, traced):
                    return False
            values[node] = traced
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's log of what fake tensors refuse."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _run(node: Node, values: Mapping[Node, Any]) -> Any:
    """A node's result on fake tensors; _REFUSED, or _UNKNOWN if its sizes depend on values."""
    given = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    leaves = pytree.tree_leaves(given)
    if any(x is _UNKNOWN for x in leaves):
        return _UNKNOWN
    args, kwargs = pytree.tree_map(
        lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, given
    )
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001  whatever a kernel of fake tensors raises
        return _UNKNOWN if wants_values(error) else _REFUSED


def _at(x: Any, point: _Point) -> Any:
    """A traced value at these sizes, on the host: nothing is computed there."""
    if isinstance(x, torch.Tensor):
        if x.layout != torch.strided:
            return _UNKNOWN
        sizes, strides = ([_at(n, point) for n in given] for given in (x.shape, x.stride()))
        if _UNKNOWN in sizes or _UNKNOWN in strides:
            return _UNKNOWN
        if min(sizes, default=0) < 0:
            raise _NegativeSize
        return torch.empty_strided(sizes, strides, dtype=x.dtype, device="cpu")
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = x.node.expr.xreplace(point)
        return (
            x.node.pytype(value)
            if value.is_number or value in (sympy.true, sympy.false)
            else _UNKNOWN
        )
    return x


def _alike(found: Any, traced: Any) -> bool:
    """Whether two results have the same sizes, and numbers the same values, as far as they are
    known."""
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(traced), strict=False):
        if a is _UNKNOWN or b is _UNKNOWN:
            continue
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape:
                return False
        elif isinstance(a, (int, float)) and isinstance(b, (int, float)) and a != b:
            return False
    return True
