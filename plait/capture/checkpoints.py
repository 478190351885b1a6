"""Regions of a Dynamo graph that eager runs.

Dynamo's operators for them are made to be traced. Run as they are, those for checkpoints do not
keep the state of random numbers, and what the backward pass computes again is another result: here
they call PyTorch's checkpoint. Those for nested regions fail in the backward pass: here the region
is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint


def run_by_eager(gm: GraphModule) -> Callable[..., Any]:
    """gm's graph as eager runs it."""
    regions = [
        n
        for m in gm.modules()
        if isinstance(m, GraphModule)
        for n in m.graph.nodes
        if n.target in _CALLS
    ]
    for node in regions:
        node.target = _CALLS[node.target]
    for module in {n.graph.owning_module for n in regions}:
        module.recompile()
    forward: Callable[..., Any] = gm.forward
    return forward


def is_run_by_eager(gm: GraphModule) -> bool:
    """Whether `run_by_eager` has made other calls of gm's regions."""
    modules = (m for m in gm.modules() if isinstance(m, GraphModule))
    return any(n.target in (_checkpointed, _called) for m in modules for n in m.graph.nodes)


def _checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    kept = {"preserve_rng_state": True, **kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        kept["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **kept)


def _called(body: GraphModule, _name: str, *args: Any) -> Any:
    return body(*args)


_CALLS: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.tag_activation_checkpoint: _checkpointed,
    torch.ops.higher_order.wrap_activation_checkpoint: _checkpointed,
    torch.ops.higher_order.invoke_subgraph: _called,
}
