"""What the nodes of a captured graph are: computed by eager's operators, in eager's dtypes or in
float64, from values of which some are given.

The graph is not changed. Values in float64 may be a little off, by seed: they tell what rounding
decides (`measure.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from plait.graph.edit import aten
from plait.tools.faults.measure import HALF, jitter

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_AS_IT_IS = (aten.view.dtype, aten._local_scalar_dense.default)
"""Operators that mean something else in another dtype."""


class Unknown(Exception):
    """A value that depends on random numbers which nobody has seen, or that eager cannot
    compute."""


@dataclass(frozen=True)
class Values:
    """Values of a graph's nodes. given: those that are known. wide: in float64. seed: of how far
    they are off, 0: not at all; they are wide then."""

    module: GraphModule
    given: Mapping[Node, Any]
    wide: bool = False
    seed: int = 0

    def of(self, *wanted: Node) -> list[Any]:
        """Raises Unknown."""
        found = self.known(*wanted)
        if missing := [n.name for n in wanted if n not in found]:
            raise Unknown(", ".join(missing))
        return [found[n] for n in wanted]

    def known(self, *wanted: Node) -> dict[Node, Any]:
        """The values that eager can compute."""
        env: dict[Node, Any] = {}
        for n in self.needed(wanted):
            if n in self.given:
                env[n] = self._placed(n, self.given[n])
            elif all(x in env for x in n.all_input_nodes):
                with suppress(Unknown):
                    env[n] = self._placed(n, self._run(n, env))
        return {n: env[n] for n in wanted if n in env}

    def needed(self, wanted: Iterable[Node]) -> list[Node]:
        """The nodes that these are computed from, in order, down to what is given."""
        needed, stack = set[Node](), list(wanted)
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack += [] if n in self.given else n.all_input_nodes
        return sorted(needed)

    def _run(self, n: Node, env: Mapping[Node, Any]) -> Any:
        if n.op == "get_attr":
            return _attribute(self.module, str(n.target))
        if n.op != "call_function" or draws(n):
            raise Unknown(n.name)
        if n.target is aten.copy_.default:  # the end of a graph writes to its inputs
            return n.args[1] if not isinstance(n.args[1], Node) else env[n.args[1]]
        given = (n.args, n.kwargs)
        if self.wide and n.target not in _AS_IT_IS and _namespace(n) != "plait":
            wide: Any = map_aggregate(given, lambda a: env[a] if isinstance(a, Node) else _wide(a))
            with suppress(Unknown):  # there may be no such kernel
                return _call(n, *wide)
        own: Any = map_aggregate(given, lambda a: _own(a, env[a]) if isinstance(a, Node) else a)
        return _call(n, *own)

    def _placed(self, n: Node, value: Any) -> Any:
        """A value as the other operators take it."""
        if not self.wide:
            return value
        fakes = tree_leaves(n.meta.get("val"))
        dtypes = iter([f.dtype if isinstance(f, Tensor) else None for f in fakes])
        return tree_map(lambda x: self._off(x, next(dtypes, None)), value)

    def _off(self, x: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in (*WIDER, *WIDER.values()):
            return x
        x = x.to(WIDER.get(x.dtype, x.dtype))
        if not self.seed or x.is_complex():
            return x
        return jitter(x, HALF.get(dtype or x.dtype, 2.0**-24), self.seed)


def draws(n: Node) -> bool:
    """Whether a node is of random numbers."""
    if n.target is operator.getitem:
        return isinstance(n.args[0], Node) and draws(n.args[0])
    if torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()):
        return n.target is torch.ops.plait.seed.default
    names = [a.name for a in n.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, n.args, strict=False)), **n.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _call(n: Node, args: Any, kwargs: Any) -> Any:
    assert callable(n.target), f"{n} is no call"
    schema = getattr(n.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
    try:
        with torch.no_grad():
            return n.target(*args, **kwargs)
    except Exception as error:  # whatever an operator raises
        raise Unknown(f"{n.name}: {error}") from error


def _wide(x: Any) -> Any:
    return WIDER.get(x, x) if isinstance(x, torch.dtype) else x


def _own(n: Node, value: Any) -> Any:
    """A value in the dtypes that its node has in the graph."""
    fakes = iter(tree_leaves(n.meta.get("val")))

    def own(x: Any) -> Any:
        fake = next(fakes, None)
        both = isinstance(x, Tensor) and isinstance(fake, Tensor)
        return x.to(fake.dtype) if both else x  # type: ignore[union-attr]

    return tree_map(own, value)


def _namespace(n: Node) -> str:
    return str(getattr(n.target, "namespace", ""))


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
