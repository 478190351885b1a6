"""Folding of weights: what depends on nothing but weights that nobody writes is computed once,
while compiling. Batch norms after convolutions and products become part of their weights first, and
weights of products are packed for the kernels that read them.

Packing takes long and looks at nothing but weights: a thread does it, beside what follows. A value
is made a constant of the module where the rest of the graph meets it. Views stay in the
graph, since they cost nothing there; what is much larger than what it is made of is computed at
every call, from what it is made of. How the constants are made of weights is kept, so that they can
be made again of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from plait import compat
from plait.graph.constants import compute, settled
from plait.graph.convolutions import CONVOLUTIONS, before_packing
from plait.graph.dead import drop_dead
from plait.graph.edit import (
    aten,
    escaping,
    insert_like,
    is_pure,
    is_view,
    output_of,
    replace,
    value_of,
)
from plait.graph.pack import pack_weights
from plait.runtime.packed import FILLS
from plait.runtime.process import Workers

# Bounds on memory: chosen, not measured.
MAX_GROWTH = 4
"""A folded value takes at most so many times the memory of the weights that it is made of."""
SMALL_NBYTES = 1 << 16
"""Growth does not matter below this."""
_plait: Any = torch.ops.plait


@dataclass(frozen=True)
class Folded:
    """What a graph's weights became.

    frozen: the placeholders of weights that are built in.
    recipe: makes the values of `names` of the values of all weights.
    names: of the constants in the graph's module.
    packed: those that are a second copy of a weight, in another order.
    ready: their values are there; until then the constants are memory without values.
    """

    frozen: frozenset[Node]
    recipe: Graph
    names: tuple[str, ...]
    packed: tuple[str, ...]
    ready: Future[None]

    def values(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The constants for these weights, in memory of their own but for weights themselves."""
        made: dict[Node, torch.Tensor] = {}
        given = iter(weights)
        for node in self.recipe.nodes:
            if node.op == "placeholder":
                made[node] = next(given).detach()
            elif node.op == "get_attr":
                made[node] = node.meta["value"]
            elif node.op == "call_function":
                made[node] = compute(node, made)
        results: Any = output_of(self.recipe).args[0]
        memory = Counter(compat.tracing.storage_of(v) for v in made.values())
        return [
            made[n]
            if n.op == "placeholder"
            else _settled(made[n], value_of(n), memory[compat.tracing.storage_of(made[n])] > 1)
            for n in results
        ]


def fold_weights(
    gm: GraphModule,
    weights: Mapping[Node, torch.Tensor],
    small_flops: int | None = None,
    by_rows: bool = False,
) -> Folded:
    """Folds in place. weights: placeholders that keep their value for good. One that is returned
    and still has users has become a constant for these as well. small_flops: weights are packed for
    kernels, of products with more than that many; None: they are not. by_rows: kernels are not
    chosen by how many rows or images there are."""
    _fold_norms(gm, weights)
    unpacked = [run for _, run in CONVOLUTIONS]
    for run in unpacked if small_flops is None else before_packing(by_rows):
        run(gm)  # what they copy of filters is folded
    if small_flops is not None:
        pack_weights(gm, _known(gm, weights).keys(), -1 if by_rows else small_flops, not by_rows)
    known = _known(gm, weights)
    wanted = _wanted(gm, known)
    values: dict[Node, torch.Tensor] = dict(weights)
    constants = {n: getattr(gm, str(n.target)) for n in gm.graph.find_nodes(op="get_attr")}
    values |= {n: v for n, v in constants.items() if isinstance(v, torch.Tensor)}
    memory = Counter(compat.tracing.storage_of(value) for value in values.values())
    recipe = _Recipe(weights, constants)
    frozen: set[Node] = set()
    made: dict[str, Node] = {}
    packed: dict[str, tuple[Node, torch.Tensor]] = {}
    for node in [node for node in gm.graph.nodes if node in wanted]:
        try:
            if node.target in FILLS:
                like = value_of(node)
                with torch.inference_mode(False):  # the thread that packs may write it
                    value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            else:
                value = _computed(node, values, memory)
        except (RuntimeError, AssertionError, IndexError):
            continue  # it fails at a call too, or takes a device that this machine lacks
        with gm.graph.inserting_before(node):
            constant = _constant(gm, value, value_of(node))
        values[constant] = value
        memory[compat.tracing.storage_of(value)] += 1
        made[str(constant.target)] = recipe.env[constant] = recipe.copied(node)
        if node.target in FILLS:
            packed[str(constant.target)] = recipe.env[constant], value
        frozen |= known[node]
        node.replace_all_uses_with(constant, propagate_meta=False)
    drop_dead(gm)
    for node in weights:
        if node in frozen and node.users:
            with gm.graph.inserting_after(node):
                constant = _constant(gm, weights[node].detach(), value_of(node))
            made[str(constant.target)] = recipe.copied(node)
            node.replace_all_uses_with(constant, propagate_meta=False)
    recipe.graph.output(list(made.values()))
    pool = Workers(1, daemon=False)
    ready = pool.submit(_pack, list(packed.values()), recipe.values(weights))
    pool.leave()
    return Folded(frozenset(frozen), recipe.graph, tuple(made), tuple(packed), ready)


def _pack(packed: Sequence[tuple[Node, torch.Tensor]], values: dict[Node, torch.Tensor]) -> None:
    """Fills constants with packed weights. packed: nodes of a recipe, and the memory of each.
    values: of what the recipe is given."""
    for node, out in packed:
        for source in node.all_input_nodes:
            _compute_all(source, values)
        compute(node, values, partial(FILLS[node.target], out))


class _Recipe:
    """A graph of what is folded, in which all weights are placeholders."""

    def __init__(
        self, weights: Mapping[Node, torch.Tensor], constants: Mapping[Node, torch.Tensor]
    ) -> None:
        self.graph = Graph()
        self.env = {node: self.graph.placeholder(node.name) for node in weights}
        self.constants = constants

    def values(self, weights: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """What it is given."""
        given = {self.env[node]: value.detach() for node, value in weights.items()}
        constants = ((self.env[n], value) for n, value in self.constants.items() if n in self.env)
        return {**given, **dict(constants)}

    def copied(self, node: Node) -> Node:
        """The node of the recipe that stands for one of the graph, with all that it needs."""
        todo = [node]
        while todo:
            last = todo[-1]
            if last in self.env:
                todo.pop()
            elif last in self.constants:
                self.env[last] = self.graph.create_node("get_attr", str(last.target))
                self.env[last].meta["value"] = self.constants[last]
            elif missing := [i for i in last.all_input_nodes if i not in self.env]:
                todo += missing
            else:
                self.env[last] = self.graph.node_copy(last, self.env.__getitem__)
        return self.env[node]


def _known(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> dict[Node, frozenset[Node]]:
    """The nodes that weights alone decide, each with those that its value is made of."""
    known = {node: frozenset((node,)) for node in weights}
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" and isinstance(getattr(gm, node.target), torch.Tensor):
            known[node] = frozenset()
        elif is_pure(node) and _is_fixed(value_of(node)) and all(i in known for i in inputs):
            known[node] = frozenset().union(*(known[i] for i in inputs))
    return known


def _is_fixed(value: Any) -> bool:
    """Whether it is a tensor whose sizes no value decides: other weights have the same."""
    if not isinstance(value, torch.Tensor):
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _wanted(gm: GraphModule, known: Mapping[Node, frozenset[Node]]) -> dict[Node, None]:
    """The nodes whose values become constants: where the rest of the graph meets them."""
    visible = escaping(gm.graph)
    wanted: dict[Node, None] = {}

    def want(node: Node) -> None:
        """Has the value of a node that is met: folds it, or what it is made of."""
        if node.op != "call_function" or not known[node]:
            return  # a weight itself, or what is made of numbers alone
        if node in wanted:
            return
        if is_view(node) or node in visible or _grows(node, known[node]):
            for source in node.all_input_nodes:
                want(source)
        else:
            wanted[node] = None

    for node in gm.graph.nodes:
        if node not in known:
            for source in node.all_input_nodes:
                if source in known:
                    want(source)
    return wanted


def _fold_norms(gm: GraphModule, weights: Mapping[Node, torch.Tensor]) -> None:
    """A batch norm with fixed statistics right after a convolution or a product goes into its
    weights."""
    for norm in gm.graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_no_training.default
    ):
        before, gamma, beta, mean, var, _, eps = norm.args
        if len(before.users) > 1 or any(u.args[1] for u in norm.users):
            continue
        place = _weights_of(before)
        if place is None:
            continue
        weight: Node = before.args[place[0]]
        bias = None if place[1] is None else before.args[place[1]]
        given = [n for n in (bias, gamma, beta, mean, var) if n is not None]
        root = weight.args[0] if _is_turned(weight) else weight
        if any(n not in weights for n in (root, *given)):
            continue
        dtype = value_of(weight).dtype
        scaled = insert_like(
            before, value_of(weight), _plait.norm_weight.default, weight, gamma, var, eps, place[2]
        )
        with value_of(mean).fake_mode:
            like = value_of(mean).new_empty(value_of(mean).shape, dtype=dtype)
        rounded = insert_like(
            before, like, _plait.norm_bias.default, bias, gamma, beta, mean, var, eps, dtype
        )
        made = _with_weights(before, scaled, rounded)
        for first in list(norm.users):
            replace(first, made)
        gm.graph.erase_node(norm)  # passes that follow would compute its layout


def _weights_of(node: Node) -> tuple[int, int | None, int] | None:
    """Where a convolution or a product has its weight and its bias, and which dimension of the
    weight is that of channels; None for all else."""
    if node.target is aten.convolution.default and not node.args[6]:  # [6]: transposed
        return 1, None if node.args[2] is None else 2, 0
    if node.target is aten.mm.default:
        return 1, None, 1
    if node.target is aten.addmm.default and not node.kwargs:
        bias = value_of(node.args[0])  # type: ignore[arg-type]
        return (2, 0, 1) if bias.dim() == 1 else None
    return None


def _is_turned(node: Node) -> bool:
    return node.target in (aten.permute.default, aten.t.default, aten.transpose.int)


def _with_weights(node: Node, weight: Node, bias: Node) -> Node:
    """The same convolution or product with another weight and bias, in the place of this one."""
    if node.target is aten.convolution.default:
        node.args = (node.args[0], weight, bias, *node.args[3:])
        return node
    a = node.args[-2]
    assert isinstance(a, Node), node
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.addmm.default, (bias, a, weight))
    made.meta = {**node.meta}
    return made


def _grows(node: Node, sources: frozenset[Node]) -> bool:
    nbytes = _nbytes(value_of(node))
    return nbytes > max(SMALL_NBYTES, MAX_GROWTH * sum(_nbytes(value_of(s)) for s in sources))


def _nbytes(value: torch.Tensor) -> int:
    return int(value.numel()) * value.element_size()


def _computed(node: Node, values: dict[Node, torch.Tensor], memory: Counter[int]) -> torch.Tensor:
    """The value of a node, of which values has the weights. memory: how many values each storage
    has."""
    for value in _compute_all(node, values):
        memory[compat.tracing.storage_of(value)] += 1
    value = values[node]
    return _settled(value, value_of(node), memory[compat.tracing.storage_of(value)] > 1)


def _compute_all(node: Node, values: dict[Node, torch.Tensor]) -> list[torch.Tensor]:
    """Puts the value of a node, and those that it is made of, where they lack; gives these."""
    todo, made = [node], []
    while todo:
        last = todo[-1]
        missing = [i for i in last.all_input_nodes if i not in values]
        if not missing and todo.pop() not in values:
            values[last] = compute(last, values)
            made.append(values[last])
        todo += missing
    return made


def _settled(value: torch.Tensor, like: torch.Tensor, shared: bool) -> torch.Tensor:
    """A value with the strides of a fake tensor. shared: others lie in its memory."""
    return settled(value, like) if shared or value.stride() != like.stride() else value


def _constant(gm: GraphModule, value: torch.Tensor, fake: torch.Tensor) -> Node:
    name = f"_weight_{len(gm._buffers)}"
    gm.register_buffer(name, value, persistent=False)
    node = gm.graph.get_attr(name)
    node.meta["val"] = fake
    return node
