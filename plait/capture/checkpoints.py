"""Checkpointed regions of a Dynamo graph that eager runs.

Dynamo's operators for them are made to be traced: run as they are, they do not keep the state of
random numbers, and what the backward pass computes again is another result. Here they call
PyTorch's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

_TRACED = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.wrap_activation_checkpoint,
)


def run_by_eager(gm: GraphModule) -> Callable[..., Any]:
    """gm's graph as eager runs it."""
    regions = [
        n
        for m in gm.modules()
        if isinstance(m, GraphModule)
        for n in m.graph.nodes
        if n.target in _TRACED
    ]
    for node in regions:
        node.target = _checkpointed
    for module in {n.graph.owning_module for n in regions}:
        module.recompile()
    forward: Callable[..., Any] = gm.forward
    return forward


def _checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    kept = {"preserve_rng_state": True, **kwargs, "use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        kept["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **kept)
