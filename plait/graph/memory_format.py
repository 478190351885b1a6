"""Convolutions on a GPU get channels-last operands: tensor cores want channels innermost, and cuDNN
would otherwise turn every operand and every result around.

One copy makes the first operand so, and one each filter that is more than a point; what is computed
from the results keeps their layout, and only what leaves the graph, or goes to an operator that
reads raw memory, gets eager's layout again. No value changes. Runs on a joint graph before it is
split, so that both halves agree on the layout of what is saved; the copies of filters are saved
too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, insert, is_view, value_of

_CONVOLUTIONS: dict[
    Any, tuple[int, ...]
] = {  # positions of their operands; the last one is the filter
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}
_RAW = frozenset(
    {aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default}
)
# No record of a measurement: a tensor core multiplies eight channels or more at once.
FEW_CHANNELS = 4
"""Between so few channels on both sides there is nothing to gain inside of a tensor core."""


def channels_last(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many operands it copied."""
    if not any(_wants(n) for n in gm.graph.nodes):
        return 0
    return _Pass(gm).run()


def _wants(node: Node) -> bool:
    """Whether a node is a convolution that gains from it."""
    at = _CONVOLUTIONS.get(node.target)
    if at is None:
        return False
    x, weight = (value_of(node.args[k]) for k in at[-2:])  # type: ignore[arg-type]
    transposed, groups = (
        (node.args[6], node.args[8]) if len(at) == 2 else (node.args[7], node.args[9])
    )
    if x.dim() != 4 or not facts_of(x.device).streams or transposed or groups != 1:
        return False
    if all(isinstance(c, int) and c <= FEW_CHANNELS for c in weight.shape[:2]):
        return False
    return x.dtype in (torch.float16, torch.bfloat16) or (
        x.dtype == torch.float32 and _rounds_float32()
    )


def _rounds_float32() -> bool:
    """Whether TF32 is what the user asked for. Convolutions may take it by default, and with
    another layout cuDNN does so where it would not for eager; with products it is a choice."""
    backends: Any = torch.backends
    return all(b.fp32_precision == "tf32" for b in (backends.cuda.matmul, backends.cudnn.conv))


def _is_last(x: torch.Tensor) -> bool:
    """Whether the channels are innermost, as far as that is known."""
    channels, strides = x.shape[1], x.stride()
    single = isinstance(channels, int) and channels == 1
    return isinstance(strides[1], int) and strides[1] == 1 and (single or strides[3] != 1)


def _may_be_last(x: torch.Tensor) -> bool:
    """Whether a filter can do with the strides that it has."""
    static = all(isinstance(n, int) for n in (*x.shape, *x.stride()))
    return not static or x.is_contiguous(memory_format=torch.channels_last)


class _Pass:
    """copied: operand -> its channels-last copy. eager: nodes with a new layout -> the value with
    eager's.
    restored: such nodes -> their copies in eager's layout."""

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.copied: dict[Node, Node] = {}
        self.eager: dict[Node, Any] = {}
        self.restored: dict[Node, Node] = {}

    def run(self) -> int:
        for node in list(self.graph.nodes):
            if node.op == "output":
                self._restore_inputs(node)
            elif node.op == "call_function":
                self._visit(node)
        return len(self.copied)

    def _visit(self, node: Node) -> None:
        wants = _wants(node)
        if wants:
            *operands, weight = _CONVOLUTIONS[node.target]
            for k in operands:
                self._turn(node, k, _is_last)
            if (copy := self._turn(node, weight, _may_be_last)) is not None:
                copy.meta["recompute"] = compat.tracing.MUST_SAVE
        if not wants and not any(a in self.eager for a in node.all_input_nodes):
            return
        if not _keeps_values(node):
            self._restore_inputs(node)
            return
        try:
            now = self._computed(node)
        except (RuntimeError, ValueError):  # a view that the new layout has not
            self._restore_inputs(node)
            return
        old = value_of(node)
        if (
            isinstance(old, torch.Tensor)
            and isinstance(now, torch.Tensor)
            and _layout(old) != _layout(now)
        ):
            self.eager[node] = old
        elif isinstance(old, (tuple, list)):  # each is met again where it is picked
            self.eager[node] = old
        node.meta["val"] = now

    def _turn(self, node: Node, k: int, is_fit: Callable[[torch.Tensor], bool]) -> Node | None:
        """Hands the convolution a channels-last copy of an operand that is not fit."""
        source = node.args[k]
        assert isinstance(source, Node), source
        if is_fit(value_of(source)):
            return None
        if source not in self.copied:
            self.copied[source] = insert(
                node, source, aten.clone.default, memory_format=torch.channels_last
            )
        node.update_arg(k, self.copied[source])
        return self.copied[source]

    def _computed(self, node: Node) -> Any:
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
        args, kwargs = given
        if node.target is operator.getitem:
            return args[0][args[1]]
        assert isinstance(node.target, OpOverload), node.target
        tensors = [v for n in node.all_input_nodes if isinstance(v := value_of(n), torch.Tensor)]
        with tensors[0].fake_mode:  # type: ignore[attr-defined]
            return node.target(*args, **kwargs)

    def _restore_inputs(self, node: Node) -> None:
        """Hands a node eager's layouts."""
        for source in node.all_input_nodes:
            if isinstance(self.eager.get(source), torch.Tensor):
                node.replace_input_with(source, self._restored(node, source))

    def _restored(self, before: Node, source: Node) -> Node:
        """The node with eager's layout; a view is taken again of its restored base, so that views
        go on sharing it."""
        if source not in self.eager or source in self.restored:
            return self.restored.get(source, source)
        inside = source.args[0]
        picked = source.target is operator.getitem and isinstance(inside, Node)
        if is_view(source) and (not picked or is_view(inside)):  # type: ignore[arg-type]
            with self.graph.inserting_before(before):
                new = self.graph.node_copy(source, lambda n: self._restored(before, n))
            new.meta["val"] = self.eager[source]
        else:
            old = self.eager[source]
            # The dimensions in the order in which eager has them in memory, outermost first.
            order = sorted(range(old.dim()), key=lambda d: (-_hint(old.stride(d)), d))
            back = [order.index(d) for d in range(old.dim())]
            new = insert(before, source, aten.permute.default, order)
            new = insert(before, new, aten.clone.default, memory_format=torch.contiguous_format)
            new = insert(before, new, aten.permute.default, back)
        self.restored[source] = new
        return new


def _hint(stride: Any) -> int:
    return stride if isinstance(stride, int) else int(stride.node.hint)


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(s if isinstance(s, int) else str(s) for s in x.stride())


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
