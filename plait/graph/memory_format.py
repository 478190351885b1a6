"""Convolutions get channels-last operands where that is faster for the graph as a whole: tensor
cores, and oneDNN's kernels on a CPU, want channels innermost, and the vendor's library would
otherwise turn operands and results. On a CPU only where nothing is trained: some gradients take
three times as long then.

A plan says what would change if every convolution got them: which operands would be copied, which
values computed from the results would keep their layout, and which would have to be given eager's
again, because they leave the graph or go to an operator that reads raw memory, or to a convolution
of groups that cuDNN would turn back. The plan falls into regions that share nothing; a region is
carried out if its convolutions gain more than its copies cost (`conv_cost`). On a CPU a region in
which some gain and others lose is cut where that costs least (`min_cut`). No value changes. Runs
on a joint graph before it is split, so that both halves agree on the layout of what is saved; the
copies of filters are saved too.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.conv_cost import convolution_of, copy_ns, gain_ns, hint
from plait.graph.edit import aten, insert, insert_like, is_view, same_size, source_meta, value_of
from plait.graph.min_cut import Network

_CONVOLUTIONS: dict[
    Any, tuple[int, ...]
] = {  # positions of their operands; the last one is the filter
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}
_RAW = frozenset(
    {aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default}
)
_MERGES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
_ROWS, _LAST = torch.contiguous_format, torch.channels_last
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_HOSTS_DTYPES = (torch.float32, torch.bfloat16)
_DECIDED = "layout_decided"
"""In the meta of a convolution: halves of a joint graph are not asked again."""


def channels_last(gm: GraphModule, packs: bool = False) -> int:
    """Changes the graph in place; returns how many operands it copied. packs: a CPU's convolutions
    will read packed filters, so that none is better in rows."""
    find = gm.graph.find_nodes
    nodes = [n for t in _CONVOLUTIONS for n in find(op="call_function", target=t)]
    found = {n for n in nodes if is_candidate(n)} | _of_host(nodes)
    if not found:
        return 0
    plan = _Plan(gm.graph, found)
    if kept := set() if packs else _kept_in_rows(plan):
        plan = _Plan(gm.graph, found, kept, plan.computed)
    accepted = plan.regions_that_gain()
    for node in plan.convolutions:
        node.meta[_DECIDED] = True
    return _Change(gm.graph, plan).carry_out(accepted)


def is_candidate(node: Node) -> bool:
    """Whether a node is a convolution that tensor cores may compute."""
    at = _CONVOLUTIONS.get(node.target)
    if at is None or node.meta.get(_DECIDED):
        return False
    x = value_of(node.args[at[-2]])  # type: ignore[arg-type]
    if x.dim() not in (3, 4, 5) or not facts_of(x.device).streams:
        return False
    return x.dtype in (torch.float16, torch.bfloat16) or (
        x.dtype == torch.float32 and rounds_float32()
    )


def _of_host(nodes: Sequence[Node]) -> set[Node]:
    """The convolutions of images that oneDNN computes, of a graph that computes no gradients.
    nodes: its convolutions and their gradients."""
    if not nodes or not (torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()):
        return set()
    if any(n.target is aten.convolution_backward.default for n in nodes):
        return set()
    return {n for n in nodes if not n.meta.get(_DECIDED) and _is_hosts(value_of(n.args[0]))}  # type: ignore[arg-type]


def _is_hosts(x: torch.Tensor) -> bool:
    """Whether oneDNN convolves an image."""
    return x.dim() == 4 and facts_of(x.device).is_host and x.dtype in _HOSTS_DTYPES


def rounds_float32() -> bool:
    """Whether the user's flags let cuDNN round the operands of float32 convolutions to TF32, which
    is the default. With products that is a flag of its own."""
    backends: Any = torch.backends
    return bool(backends.cudnn.enabled and backends.cudnn.conv.fp32_precision == "tf32")


# ------------------------------------------------------------------------------------------ layouts
def is_last(x: torch.Tensor) -> bool:
    """Whether the channels are innermost, as cuDNN's callers in ATen see it. Of symbolic sizes by
    their hints: what is inferred decides of copies only."""
    sizes, strides = [hint(n) for n in x.shape], [hint(s) for s in x.stride()]
    if all(n == 1 for n in sizes[2:]):  # a matrix, whatever it is called
        return strides[1] == 1
    least = 0
    for d in (1, *reversed(range(2, x.dim())), 0):
        if strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(sizes[d], 1)
    return True


def lies_last(x: torch.Tensor) -> bool:
    """Whether elements lie without gaps, channels innermost: a filter that is a point does so in
    eager's layout, too."""
    return _lies_in(x, (0, *range(2, x.dim()), 1))


def lies_in_rows(x: torch.Tensor) -> bool:
    """Whether elements lie without gaps in the order of their dimensions."""
    return _lies_in(x, range(x.dim()))


def _lies_in(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the dimensions lie without gaps in that order, outermost first."""
    least = 1
    for d in reversed(order):
        if hint(x.shape[d]) != 1 and hint(x.stride(d)) != least:
            return False
        least *= hint(x.shape[d])
    return True


Layouts = tuple[tuple[Any, ...], ...]
"""Strides of several tensors; text where they are symbolic."""


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, int) else str(s) for s in x.stride())


def _turned(x: torch.Tensor) -> torch.Tensor:
    """A channels-last copy; of a sequence the picture of height 1 that it is to cuDNN."""
    x = x.unsqueeze(2) if x.dim() == 3 else x
    return x.clone(memory_format=_FORMATS[x.dim()])


def _all_turned(results: Any) -> Any:
    """The same of several results; the gradient of a bias stays."""
    if isinstance(results, torch.Tensor):
        return _turned(results)
    return [_turned(r) if r is not None and r.dim() > 1 else r for r in results]


# --------------------------------------------------------------------------------------- what to do
class _Regions:
    """Sets of nodes whose layouts are decided on together."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def root(self, node: Node) -> Node:
        """The node that stands for the region."""
        path = []
        while (up := self.parent.get(node, node)) is not node:
            path.append(node)
            node = up
        for n in path:
            self.parent[n] = node
        return node

    def join(self, a: Node, b: Node) -> None:
        """Makes the regions of two nodes one."""
        a, b = self.root(a), self.root(b)
        if a is not b:
            self.parent[b] = a


@dataclass
class _Step:
    """What changes at a node.

    turns: numbers of operands that it takes channels-last copies of
    restores: values that it takes in eager's layout
    order: the dimensions of a copy, outermost first; () for other nodes
    wide: of a convolution of sequences, the results as pictures of height 1
    """

    turns: list[int] = field(default_factory=list)
    restores: list[Node] = field(default_factory=list)
    order: tuple[int, ...] = ()
    wide: Any = None


_NOTHING = _Step()


class _Plan:
    """found: the convolutions that may have another layout.
    now: nodes with a new layout -> their values; several results are met again where one is picked.
    copied: operands -> the values of their channels-last copies.
    costs: (node, ns) of what is gained (negative) and paid in the node's region.
    kept: nodes that stay in eager's layout, convolutions and others.
    computed: (node, layouts of its operands) -> its value, for torch takes long to tell."""

    def __init__(
        self,
        graph: Graph,
        found: Set[Node],
        kept: Set[Node] = frozenset(),
        computed: Mapping[tuple[Node, Layouts], Any] = MappingProxyType({}),
    ) -> None:
        self.found, self.kept = found, kept
        self.computed = dict(computed)
        self.now: dict[Node, Any] = {}
        self.steps: defaultdict[Node, _Step] = defaultdict(_Step)
        self.copied: dict[Node, torch.Tensor] = {}
        self.regions = _Regions()
        self.convolutions: list[Node] = []
        self.costs: list[tuple[Node, float]] = []
        self._restored: set[Node] = set()
        self._demanded = _demanded(graph, found)
        for node in graph.nodes:
            if node.op == "output":
                self._restore_inputs(node)
            elif node.op == "call_function":
                self._visit(node)

    def regions_that_gain(self) -> set[Node]:
        """The nodes that stand for regions which are faster channels-last."""
        total: defaultdict[Node, float] = defaultdict(float)
        for node, ns in self.costs:
            total[self.regions.root(node)] += ns
        return {region for region, ns in total.items() if ns <= 0}

    def value(self, node: Node) -> Any:
        """The value of a node if the plan is carried out."""
        return self.now.get(node, value_of(node))

    def _visit(self, node: Node) -> None:
        chosen = node in self.found
        stays = node in self.kept or (chosen and convolution_of(node).is_oddly_grouped)
        if stays and chosen:
            self.convolutions.append(node)
        inputs = [n for n in node.all_input_nodes if n in self.now]
        if not chosen and not inputs:
            return
        if stays or not _keeps_values(node):
            self._restore_inputs(node)
            return
        try:
            now = self._convolved(node) if chosen else self._computed(node)
        except (RuntimeError, ValueError):  # a view that the new layout has not
            self._restore_inputs(node)
            return
        old = value_of(node)
        for n in inputs:
            self.regions.join(node, n)
        several = isinstance(old, (list, tuple))
        if several or (isinstance(old, torch.Tensor) and _layout(old) != _layout(now)):
            self.now[node] = now  # of sizes there is nothing that could lie otherwise

    def _convolved(self, node: Node) -> Any:
        """The results of a convolution of channels-last operands."""
        self.convolutions.append(node)
        at = _CONVOLUTIONS[node.target]
        given: Any = torch.fx.node.map_arg(node.args, self.value)
        args, turns = list(given), []
        for k in at[:-1] if facts_of(given[at[0]].device).is_host else at:
            x, source = given[k], node.args[k]
            assert isinstance(source, Node), source
            with compat.tracing.beside(x):
                if (lies_last if k == at[-1] else is_last)(x):
                    args[k] = x.unsqueeze(2) if x.dim() == 3 else x
                    continue
                args[k] = self.copied[source] if source in self.copied else _turned(x)
            turns.append((k, source))
        is_line = given[at[-1]].dim() == 3
        with compat.tracing.beside(args[0]):
            if all(type(n) is int for k in at for n in given[k].shape):
                now: Any = node.target(*(_widened(node, args) if is_line else args))  # type: ignore[operator]
            else:  # torch would ask for guards; that the layout is so is checked at run time
                now = _all_turned(value_of(node))
            wide, now = (now, _narrowed(now)) if is_line else (None, now)
        for k, source in turns:
            if source not in self.copied:
                self.copied[source] = args[k]
                self.costs.append((node, copy_ns(source, given[k])))
            self.regions.join(source, node)  # who shares a copy is in the same region
        if turns or is_line:
            self.steps[node] = _Step([k for k, _ in turns], wide=wide)
        self.costs.append((node, -gain_ns(node)))
        return now

    def _computed(self, node: Node) -> Any:
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), self.value)
        args, kwargs = given
        if node.target is operator.getitem:
            return args[0][args[1]]
        assert isinstance(node.target, OpOverload), node.target
        tensors = [v for n in node.all_input_nodes if isinstance(v := self.value(n), torch.Tensor)]
        with compat.tracing.beside(tensors[0]):
            if order := self._order_of_copy(node):
                self.steps[node].order = order
                back = [order.index(d) for d in range(len(order))]
                return args[0].permute(order).clone(memory_format=_ROWS).permute(back)
            if node.target is aten.cat.default and (now := _joined(node, args[0])) is not None:
                return now
            key = node, tuple(map(_layout, tensors))
            if key not in self.computed:
                self.computed[key] = node.target(*args, **kwargs)
            return self.computed[key]

    def _order_of_copy(self, node: Node) -> tuple[int, ...]:
        """Of a copy into eager's layout that a convolution will read: the order in memory,
        outermost first, that makes it channels-last, or what its dimensions are merged to."""
        if node.target is not aten.clone.default or node.kwargs.get("memory_format") != _ROWS:
            return ()
        shape = value_of(node).shape
        if node in self._demanded:
            return (0, *range(2, len(shape)), 1)
        seen = [u for u in node.users if u.target in _MERGES and u in self._demanded]
        merged = (
            _merged(shape, value_of(seen[0]).shape) if len(node.users) == len(seen) == 1 else []
        )
        return tuple(d for k in (0, *range(2, len(merged)), 1) for d in merged[k]) if merged else ()

    def _restore_inputs(self, node: Node) -> None:
        """Hands a node eager's layouts."""
        for source in node.all_input_nodes:
            if isinstance(self.now.get(source), torch.Tensor):
                self.steps[node].restores.append(source)
                base = source
                while (inside := _seen_of(base)) in self.now:
                    base = inside
                if base not in self._restored:
                    self._restored.add(base)
                    self.costs.append((source, copy_ns(base, value_of(base))))


def _joined(node: Node, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A concatenation of images of symbolic sizes: it lies channels-last if all of them do. torch
    would compare every two of their strides, which can take longer than all else of a compile."""
    old = value_of(node)
    is_image = [x.dim() in _FORMATS and any(hint(n) != 1 for n in x.shape[2:]) for x in tensors]
    if all(type(n) is int for n in old.shape) or not all(is_image):
        return None
    if all(map(is_last, tensors)):
        return _turned(old)
    return old if lies_in_rows(old) else None


def _kept_in_rows(plan: _Plan) -> set[Node]:
    """What a CPU had better leave in rows of a plan whose convolutions gain in one place and lose
    in another: a cut of the graph, through whatever costs least to copy. Empty: nothing."""
    gains = {n: gain_ns(n) for n in plan.convolutions if convolution_of(n).is_on_host}
    if not gains or len(gains) < len(plan.convolutions):
        return set()
    if not min(gains.values()) < 0 < max(gains.values()):
        return set()
    free = set(plan.now) | set(gains)
    net = Network()
    for node, gain in gains.items():
        net.add(_LAST, node, max(gain, 0.0))
        net.add(node, _ROWS, max(-gain, 0.0))
    users: defaultdict[Node, list[Any]] = defaultdict(list)  # of values: who takes them as they lie
    concerned = plan.found | plan.now.keys() | plan.steps.keys()
    for node in [n for n in plan.convolutions[0].graph.nodes if n in concerned]:
        step = plan.steps.get(node, _NOTHING)
        turned = [node.args[k] for k in step.turns]
        for x in node.all_input_nodes:
            if x in plan.now or x in turned:
                users[x].append(node if node in free else _ROWS)
    for x, readers in users.items():
        _add_copies(net, x if x in free else _ROWS, x, readers)
    last = net.sources_side(_LAST, _ROWS)
    kept = {n for n in free if n not in last}
    return kept if gains.keys() - kept else set()


def _add_copies(net: Network, lies: Any, x: Node, readers: Sequence[Any]) -> None:
    """Readers that lie otherwise than a value share a copy of it; views always lie as it does.
    lies: the value's node in the net."""
    value = value_of(x)
    bound = [r for r in readers if not isinstance(value, torch.Tensor) or _is_view_of(r, x)]
    for reader in bound:
        net.add(lies, reader)
        net.add(reader, lies)
    others = [r for r in readers if r not in bound]
    if others:
        cost = copy_ns(x, value)
        net.add((x, "last"), lies, cost)
        net.add(lies, (x, "rows"), cost)
    for reader in others:
        net.add(reader, (x, "last"))
        net.add((x, "rows"), reader)


def _is_view_of(reader: Any, x: Node) -> bool:
    return isinstance(reader, Node) and is_view(reader) and reader.args[0] is x


def _seen_of(node: Node) -> Any:
    """What a view shows, or what several results are views of; None of what has memory of its
    own."""
    inside = node.args[0] if node.args else None
    if not is_view(node) or (node.target is operator.getitem and not is_view(inside)):  # type: ignore[arg-type]
        return None
    return inside


def _demanded(graph: Graph, convolutions: Set[Node]) -> set[Node]:
    """Values that a convolution reads, itself or through operators on each element by itself."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in convolutions:
            found.update(node.args[k] for k in _CONVOLUTIONS[node.target][:-1])
        elif node in found and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            found.update(n for n in node.all_input_nodes if _same_sizes(n, node))
    return found


def _same_sizes(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or x.dim() != y.dim():
        return False
    return all(map(same_size, x.shape, y.shape))


def _merged(shape: Sequence[Any], into: Sequence[Any]) -> list[list[int]]:
    """Which dimensions of a shape make up each one of a shape of images or volumes; [] where those
    of the second are not whole ones of the first."""
    if len(into) not in _FORMATS or len(into) > len(shape):
        return []
    sizes, groups, d = [hint(n) for n in shape], [], 0
    for n in map(hint, into):
        group, product = [d], sizes[d] if d < len(sizes) else 0
        while product < n and d + 1 < len(sizes):
            d += 1
            group.append(d)
            product *= sizes[d]
        if product != n or d >= len(sizes):
            return []
        groups.append(group)
        d += 1
    return groups if d == len(sizes) else []


def _widened(node: Node, args: Sequence[Any]) -> list[Any]:
    """The arguments of a convolution of sequences as those of one of pictures of height 1."""
    first = _CONVOLUTIONS[node.target][-1] + 2  # after the filter and the bias, or its sizes
    out = list(args)
    for k, one in ((0, 1), (1, 0), (2, 1), (4, 0)):  # stride, padding, dilation, output padding
        out[first + k] = [one, *args[first + k]]
    return out


def _narrowed(results: Any) -> Any:
    """Results of such a convolution as sequences."""
    if isinstance(results, torch.Tensor):
        return results.squeeze(2)
    return [r.squeeze(2) if r is not None and r.dim() == 4 else r for r in results]


# -------------------------------------------------------------------------------------- the changes
class _Change:
    """copies: operand -> its channels-last copy. before: nodes with a new layout -> the value with
    eager's. restored: such nodes -> their copies in eager's layout."""

    def __init__(self, graph: Graph, plan: _Plan) -> None:
        self.graph, self.plan = graph, plan
        self.copies: dict[Node, Node] = {}
        self.before: dict[Node, Any] = {}
        self.restored: dict[Node, Node] = {}

    def carry_out(self, accepted: set[Node]) -> int:
        """Changes the nodes of the accepted regions; returns how many operands were copied."""
        root = self.plan.regions.root
        for node in list(self.graph.nodes):
            step = self.plan.steps.get(node, _NOTHING)
            for source in step.restores:
                if root(source) in accepted:
                    node.replace_input_with(source, self._restored(node, source))
            if root(node) not in accepted:
                continue
            if node in self.plan.now:
                self.before[node] = value_of(node)
            if step.order:
                self._reorder(node, step.order)
            self._turn(node, step.turns)
            if node in self.plan.now:
                node.meta["val"] = self.plan.now[node]
            if step.wide is not None:
                self._widen(node, step.wide)
        return len(self.copies)

    def _turn(self, node: Node, operands: Sequence[int]) -> None:
        """Hands a convolution channels-last copies of some operands."""
        for k in operands:
            source = node.args[k]
            assert isinstance(source, Node), source
            if source not in self.copies:
                wide = self._wide(node, source)
                copy = self.plan.copied[source]
                last = {"memory_format": _FORMATS[copy.dim()]}
                self.copies[source] = insert_like(node, copy, aten.clone.default, wide, **last)
            if k == _CONVOLUTIONS[node.target][-1]:
                self.copies[source].meta["recompute"] = compat.tracing.MUST_SAVE
            node.update_arg(k, self.copies[source])

    def _wide(self, before: Node, x: Node) -> Node:
        """A sequence as a picture of height 1, anything else as it is."""
        return insert(before, x, aten.unsqueeze.default, 2) if value_of(x).dim() == 3 else x

    def _reorder(self, node: Node, order: tuple[int, ...]) -> None:
        """Makes a node, which is a copy, one whose dimensions lie in that order in memory."""
        source = node.args[0]
        assert isinstance(source, Node), source
        if _lies_in(value_of(source), order):
            node.kwargs = {"memory_format": torch.preserve_format}
            return
        new = insert(node, source, aten.permute.default, list(order))
        new = insert(node, new, aten.clone.default, memory_format=_ROWS)
        node.target = aten.permute.default
        node.args, node.kwargs = (new, [order.index(d) for d in range(len(order))]), {}

    def _widen(self, node: Node, results: Any) -> None:
        """Makes a convolution of sequences one of pictures of height 1, whose results are seen as
        sequences."""
        args = list(node.args)
        for k in _CONVOLUTIONS[node.target]:
            args[k] = self._wide(node, node.args[k])  # type: ignore[arg-type]
        args = _widened(node, args)
        new = insert_like(node, results, node.target, *args)  # type: ignore[arg-type]
        if node.target is aten.convolution.default:
            node.target, node.args = aten.squeeze.dim, (new, 2)
            return
        for user in list(node.users):
            index = user.args[1]
            result = value_of(new)[index]
            if result is None or result.dim() != 4:  # the gradient of a bias
                user.update_arg(0, new)
                continue
            with self.graph.inserting_before(user):
                picked = self.graph.call_function(operator.getitem, (new, index))
            picked.meta = {**source_meta(user), "val": result}
            user.target, user.args = aten.squeeze.dim, (picked, 2)
        self.graph.erase_node(node)

    def _restored(self, before: Node, source: Node) -> Node:
        """The node with eager's layout; a view is taken again of its restored base, so that views
        go on sharing it."""
        if source not in self.before or source in self.restored:
            return self.restored.get(source, source)
        if _seen_of(source) in self.before:
            with self.graph.inserting_before(before):
                new = self.graph.node_copy(source, lambda n: self._restored(before, n))
            new.meta["val"] = self.before[source]
        else:
            new = laid_out_as(before, source, self.before[source])
        self.restored[source] = new
        return new


def laid_out_as(before: Node, x: Node, old: torch.Tensor) -> Node:
    """A node, or a copy of it that lies in memory as another value of its sizes does."""
    if _layout(value_of(x)) == _layout(old):
        return x
    # The dimensions in the order in which they lie in memory, outermost first; of equal strides,
    # those of one element come last.
    strides, single = [hint(s) for s in old.stride()], [hint(n) == 1 for n in old.shape]
    order = sorted(range(old.dim()), key=lambda d: (-strides[d], single[d], d))
    back = [order.index(d) for d in range(old.dim())]
    new = insert(before, x, aten.permute.default, order)
    new = insert(before, new, aten.clone.default, memory_format=_ROWS)
    return insert(before, new, aten.permute.default, back)


def _keeps_values(node: Node) -> bool:
    """Whether a node's values do not depend on its arguments' layouts: so with all of PyTorch's own
    operators but those that read raw memory."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if (
        not isinstance(target, OpOverload)
        or target.namespace not in ("aten", "prims")
        or target in _RAW
    ):
        return False
    return not target._schema.is_mutable
