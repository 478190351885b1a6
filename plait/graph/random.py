"""Replaces random operators by pure functions of one seed a graph, drawn with `plait::seed`.

A random number then depends on seed, operator and index alone: it can be fused, recomputed in a
backward pass and under checkpointing, and torch.manual_seed is respected. See
`plait/runtime/philox.py` for the operators. Operators with a generator of their own, on other
devices, or without a rule here (randperm, multinomial, poisson) stay as they are and use torch's
generator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

import plait.runtime.philox  # noqa: F401  (defines the operators)
from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, value_of

prims = torch.ops.prims
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DROPPED_META = ("val", "tensor_meta", "original_aten", "desc", "eager_input_vals")


class _Draws:
    """The draws of one graph, with a seed a device: makes nodes next to the random node that is
    being replaced."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.seeds: dict[torch.device, Node] = {}
        self.n_draws = 0
        self.at: Node | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node before the current one, with its fake value and the current node's metadata."""
        assert self.at is not None, "a call outside the walk over random nodes"
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self.at.meta.items() if k not in _DROPPED_META}
        mode = _fake_mode(self.at)
        values = torch.fx.node.map_arg((args, kwargs), value_of)
        with mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def _next(self, like: torch.Tensor) -> tuple[Node, int]:
        seed = self.seeds.get(like.device)
        if seed is None:
            seed = self.seeds[like.device] = self.call(torch.ops.plait.seed.default, like.device)
            seed.meta["recompute"] = compat.tracing.MUST_SAVE
        self.n_draws += 1
        return seed, self.n_draws - 1

    def _shaped(
        self, like: torch.Tensor, sources: Sequence[Any], draw: Callable[[list[Any]], Node]
    ) -> Node:
        """draw(size) with like's sizes, in like's order of dimensions if it is a dense
        permutation."""
        sizes = [self.size(like, d, sources) for d in range(like.dim())]
        order = _dense_order(like)
        if order == list(range(like.dim())):
            return draw(sizes)
        back = [order.index(d) for d in range(like.dim())]
        return self.call(aten.permute.default, draw([sizes[d] for d in order]), back)

    def size(self, like: torch.Tensor, dim: int, sources: Sequence[Any]) -> Any:
        """Size `dim` of like: an int, or a node of the graph that holds it."""
        wanted: Any = like.shape[dim]
        if isinstance(wanted, int):
            return wanted
        for source in _nodes_in(sources):
            value = value_of(source)
            if isinstance(value, torch.SymInt) and value.node.expr == wanted.node.expr:
                return source
            if isinstance(value, torch.Tensor):
                sizes: tuple[Any, ...] = tuple(value.shape)
                for d, s in enumerate(sizes):
                    if isinstance(s, torch.SymInt) and s.node.expr == wanted.node.expr:
                        return self.call(aten.sym_size.int, source, d)
        raise LookupError(f"no node holds size {wanted}")

    def uniform(self, like: torch.Tensor, sources: Sequence[Any], dtype: torch.dtype) -> Node:
        seed, k = self._next(like)
        op = torch.ops.plait.philox_uniform.default
        return self._shaped(like, sources, lambda size: self.call(op, seed, k, size, dtype))

    def normal(self, like: torch.Tensor, sources: Sequence[Any], dtype: torch.dtype) -> Node:
        seed, k = self._next(like)
        op = torch.ops.plait.philox_normal.default
        return self._shaped(like, sources, lambda size: self.call(op, seed, k, size, dtype))

    def randint(self, low: Any, high: Any, like: torch.Tensor, sources: Sequence[Any]) -> Node:
        seed, k = self._next(like)
        op = torch.ops.plait.philox_randint.default
        return self._shaped(
            like, sources, lambda size: self.call(op, seed, k, low, high, size, like.dtype)
        )

    def within(self, x: Any, low: float, high: float, message: str) -> Any:
        """x, a parameter of a distribution, which must be in [low, high]: checked when the program
        runs if it is a tensor. Raises LookupError for a number that is not, and for one that is
        unknown."""
        if isinstance(x, Node) and isinstance(value_of(x), torch.Tensor):
            return self.call(torch.ops.plait.within.default, x, low, high, message)
        if not isinstance(x, int | float) or not low <= x <= high:
            raise LookupError(message)
        return x

    def to(self, x: Node, dtype: torch.dtype) -> Node:
        if value_of(x).dtype == dtype:
            return x
        return self.call(prims.convert_element_type.default, x, dtype)


def _fake_mode(node: Node) -> Any:
    value = value_of(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.fake_mode


def _nodes_in(sources: Sequence[Any]) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(tuple(sources), found.append)
    return found


def _dense_order(like: torch.Tensor) -> list[int]:
    """Dimensions from outermost to innermost in memory; the identity if like is not a dense
    permutation."""
    identity = list(range(like.dim()))
    strides = like.stride()
    # Before anything that asks: sizes that depend on data have no answer.
    if not all(isinstance(s, int) for s in (*strides, *like.shape)) or like.is_contiguous():
        return identity
    order = sorted(identity, key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected and like.shape[d] != 1:
            return identity
        expected *= like.shape[d]
    return order


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a formula over a uniform number is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Each rule takes the draws and the node's arguments and returns the new value (for native_dropout
# two of them).
def _rand(g: _Draws, node: Node) -> Node:
    like = value_of(node)
    return g.uniform(like, node.args, like.dtype)


def _randn(g: _Draws, node: Node) -> Node:
    like = value_of(node)
    return g.normal(like, node.args, like.dtype)


def _randint(g: _Draws, node: Node) -> Node:
    args = node.args[1:] if node.target in _LIKE else node.args
    two = "low" in str(node.target)
    low, high = (args[0], args[1]) if two else (0, args[0])
    kind = value_of(node).dtype
    if isinstance(high, int) and not kind.is_floating_point:
        g.within(high - 1, 0, 1 if kind == torch.bool else torch.iinfo(kind).max, "the upper end")
    return g.randint(low, high, value_of(node), node.args)


_LIKE = frozenset({aten.randint_like.default, aten.randint_like.low_dtype})


def _uniform(g: _Draws, node: Node) -> Node:
    _, low, high = _filled(node, (None, 0.0, 1.0))
    high = g.within(
        high, g.within(low, -math.inf, math.inf, "the lower end"), math.inf, "the upper end"
    )
    like = value_of(node)
    u = g.uniform(like, node.args, like.dtype)
    if (low, high) == (0.0, 1.0):
        return u
    return g.call(aten.add.Scalar, g.call(aten.mul.Scalar, u, high - low), low)


def _normal(g: _Draws, node: Node) -> Node:
    args = node.args
    if node.target is aten.normal_functional.default:
        args = args[1:]
    mean, std = (*args, 0.0, 1.0)[:2] if len(args) != 1 else (args[0], 1.0)
    std = g.within(std, 0.0, math.inf, "normal expects all elements of std >= 0.0")
    like = value_of(node)
    z = g.normal(like, node.args, like.dtype)
    scaled = g.call(aten.mul.Tensor if isinstance(std, Node) else aten.mul.Scalar, z, std)
    return g.call(aten.add.Tensor if isinstance(mean, Node) else aten.add.Scalar, scaled, mean)


def _bernoulli(g: _Draws, node: Node) -> Node:
    like = value_of(node)
    p = g.within(node.args[-1], 0.0, 1.0, "bernoulli expects all elements of p to be in [0, 1]")
    wide = _wide(value_of(p).dtype) if isinstance(p, Node) else torch.float32
    u = g.uniform(like, node.args, wide)
    hit = g.call(aten.lt.Tensor if isinstance(p, Node) else aten.lt.Scalar, u, p)
    return g.to(hit, like.dtype)


def _exponential(g: _Draws, node: Node) -> Node:
    _, rate = _filled(node, (None, 1.0))
    like = value_of(node)
    u = g.uniform(like, node.args, _wide(like.dtype))
    upper = g.call(aten.add.Scalar, g.call(aten.neg.default, u), 1)  # in (0, 1]
    e = g.call(aten.neg.default, g.call(aten.log.default, upper))
    # Zero has a chance of 2^-24 and is outside of the distribution: its logarithm would be
    # infinite.
    e = g.call(aten.clamp.default, e, 2.0**-25)
    return g.to(g.call(aten.mul.Scalar, e, 1.0 / rate), like.dtype)


def _log_normal(g: _Draws, node: Node) -> Node:
    _, mean, std = _filled(node, (None, 1.0, 2.0))
    like = value_of(node)
    z = g.normal(like, node.args, like.dtype)
    shifted = g.call(aten.add.Scalar, g.call(aten.mul.Scalar, z, std), mean)
    return g.call(aten.exp.default, shifted)


def _cauchy(g: _Draws, node: Node) -> Node:
    _, median, sigma = _filled(node, (None, 0.0, 1.0))
    like = value_of(node)
    u = g.uniform(like, node.args, _wide(like.dtype))
    angle = g.call(aten.mul.Scalar, g.call(aten.sub.Scalar, u, 0.5), math.pi)
    spread = g.call(aten.mul.Scalar, g.call(aten.tan.default, angle), sigma)
    return g.to(g.call(aten.add.Scalar, spread, median), like.dtype)


def _geometric(g: _Draws, node: Node) -> Node:
    p = node.args[1]
    if not isinstance(p, float) or not 0.0 < p < 1.0:
        raise LookupError("geometric with p of 0 or 1")
    like = value_of(node)
    u = g.uniform(like, node.args, _wide(like.dtype))
    upper = g.call(aten.add.Scalar, g.call(aten.neg.default, u), 1)  # in (0, 1]
    trials = g.call(aten.mul.Scalar, g.call(aten.log.default, upper), 1.0 / math.log1p(-p))
    return g.to(g.call(aten.clamp.default, g.call(aten.ceil.default, trials), 1), like.dtype)


def _dropout(g: _Draws, node: Node) -> tuple[Node, Node]:
    x, p, train = _filled(node, (None, None, True))
    like = value_of(node)[0]
    if train is False:
        ones = g.call(aten.full_like.default, x, True, dtype=torch.bool)
        return g.call(aten.clone.default, x), ones
    keep = 1.0 - g.within(p, 0.0, 1.0, "dropout expects p to be in [0, 1]")
    mask = g.call(aten.lt.Scalar, g.uniform(like, node.args, torch.float32), keep)
    kept = g.call(aten.mul.Tensor, x, mask)
    return g.call(aten.mul.Scalar, kept, 1.0 / keep if keep else 0.0), mask


def _filled(node: Node, defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """The node's positional arguments, the missing ones from defaults."""
    return (*node.args, *defaults[len(node.args) :])


_RULES: dict[Any, Callable[[_Draws, Node], Node | tuple[Node, Node]]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
    aten.uniform.default: _uniform,
    aten.normal_functional.default: _normal,
    aten.normal.float_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.exponential.default: _exponential,
    aten.log_normal.default: _log_normal,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    aten.native_dropout.default: _dropout,
}


def replace_random(gm: GraphModule) -> int:
    """Replaces in place what has a rule; returns how many random operators were replaced."""
    draws = _Draws(gm)
    replaced = 0
    for node in list(gm.graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or not _replaceable(node):
            continue
        draws.at = node
        try:
            new = rule(draws, node)
        except LookupError:
            continue  # nothing of the rule is used; dead code removal takes what it made
        _substitute(node, new)
        replaced += 1
    return replaced


def _replaceable(node: Node) -> bool:
    if node.kwargs.get("generator") is not None:
        return False
    value = value_of(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    if (
        not isinstance(first, torch.Tensor)
        or not facts_of(first.device).target
        or first.layout != torch.strided
    ):
        return False
    is_int = (
        "randint" in str(node.target)
        or "bernoulli" in str(node.target)
        or "geometric" in str(node.target)
    )
    return first.dtype in _FLOATS or (is_int and not first.dtype.is_complex)


def _substitute(node: Node, new: Node | tuple[Node, Node]) -> None:
    if isinstance(new, Node):
        node.replace_all_uses_with(new, propagate_meta=False)
    else:
        for user in list(node.users):
            if user.target is operator.getitem:
                chosen = new[1] if user.args[1] == 1 else new[0]
                user.replace_all_uses_with(chosen, propagate_meta=False)
                node.graph.erase_node(user)
    node.graph.erase_node(node)
