"""Streams that the user chose: the graph says where each node runs, and keeps the order of what
orders streams.

Comes in: nodes that carry the number of their stream in `meta["custom"]`, and calls of
`torch.ops.streams` inside `control_deps`, an operator that only says what comes before what. Goes
out: these calls by themselves, in their place, and `streams::fork` wherever the next work is
another stream's; the program begins and ends on its caller's. All of them are fences to the
scheduler (`Extern.fence`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from plait import compat
from plait.devices import facts_of
from plait.graph.edit import aten, is_view, output_of


def order_streams(gm: GraphModule) -> int:
    """Edits the graph; returns how many nodes it touched."""
    if not any(map(_concerns_streams, gm.graph.nodes)):
        return 0
    wrapped = [n for n in gm.graph.nodes if _is_control_deps(n)]
    for node in wrapped:
        node.update_arg(0, ())  # their order is that of the graph
    for node in wrapped:
        _inline(gm, node)
    if any(is_fence(n) or stream_of(n) is not None for n in gm.graph.nodes):
        compat.streams.keep_streams()
    return len(wrapped) + _place_forks(gm)


def stream_of(node: Node) -> int | None:
    """The number of the stream that the user chose for a node; None: the caller's."""
    custom = node.meta.get("custom")
    found: int | None = custom.get("stream") if custom else None
    return found


def _concerns_streams(node: Node) -> bool:
    if (custom := node.meta.get("custom")) and custom.get("stream") is not None:
        return True
    if isinstance(node.target, OpOverload):
        return node.target.namespace == "streams"
    return _is_control_deps(node)


def _is_control_deps(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.__name__ == "control_deps"


def _inline(gm: GraphModule, node: Node) -> None:
    """control_deps(what comes before, subgraph, *operands): the subgraph's nodes in the place of
    the call."""
    _, inner, *operands = node.args
    assert isinstance(inner, Node) and isinstance(inner.target, str), inner
    subgraph = gm.get_submodule(inner.target)
    assert isinstance(subgraph, GraphModule), subgraph
    body = subgraph.graph
    env = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(node):
        for n in body.nodes:
            if n.op not in ("placeholder", "output"):
                env[n] = gm.graph.node_copy(n, lambda a: env[a])
    (result,) = output_of(body).args

    def outside(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda a: env[a])

    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            if user.target is operator.getitem:
                k = user.args[1]
                assert isinstance(k, int), k
                user.replace_all_uses_with(outside(result[k]))
                gm.graph.erase_node(user)
    elif node.users:
        node.replace_all_uses_with(outside(result))
    gm.graph.erase_node(node)
    if not inner.users:
        gm.graph.erase_node(inner)


def _place_forks(gm: GraphModule) -> int:
    """Calls that make another stream the current one, where the next node works on it."""
    home = compat.streams.CALLERS_STREAM
    if home is None or all(stream_of(n) in (None, home) for n in gm.graph.nodes):
        return 0
    work = [n for n in gm.graph.nodes if _works(n)]
    streams = torch.ops.streams
    now, used, forks = home, dict[int, None](), 0
    writes_back = [n for n in work if n.target is aten.copy_.default]
    end = writes_back[0] if writes_back else output_of(gm.graph)
    for node in [*(n for n in work if n not in writes_back), end]:
        stream = stream_of(node)
        wanted = home if node is end or stream is None else stream
        if wanted != now:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(streams.fork.default, (now, wanted))
            now, forks = wanted, forks + 1
            used.setdefault(wanted)
    if writes_back:  # done at the very end, by the caller's stream
        for stream in sorted(used.keys() - {home}):
            with gm.graph.inserting_before(end):
                gm.graph.call_function(streams.wait_stream.default, (home, stream))
            with gm.graph.inserting_after(writes_back[-1]):
                gm.graph.call_function(streams.wait_stream.default, (stream, home))
    return forks


def _works(node: Node) -> bool:
    """Whether a node puts work on a stream."""
    if node.op != "call_function" or is_view(node) or is_fence(node):
        return False
    val = node.meta.get("val")
    made, given = (
        _tensors(val),
        [t for a in node.all_input_nodes for t in _tensors(a.meta.get("val"))],
    )
    if val is not None and not made:
        return False  # a size
    return any(not facts_of(t.device).is_host for t in (*made, *given))


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(val) if isinstance(v, torch.Tensor)]


def is_fence(node: Node) -> bool:
    """Whether a node orders streams."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "streams"
