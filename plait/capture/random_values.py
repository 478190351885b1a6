"""Numbers that a program draws from a `random.Random` of its own, on Dynamo's graph.

Dynamo makes each an input, a tensor without dimensions, of float32 while it traces and of float64
at every call. Here the example is float64, too, and the graph narrows it: in a program of float32
a Python number counts no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.source import RandomValueSource
from torch.fx import GraphModule


def as_at_calls(gm: GraphModule, examples: Sequence[Any]) -> list[Any]:
    """The examples as calls have them; changes the graph in place."""
    found = list(examples)
    wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in examples)
    for k, n in enumerate(gm.graph.find_nodes(op="placeholder")):
        x: Any = found[k]
        source = getattr(n.meta.get("grapharg"), "source", None)
        if not isinstance(source, RandomValueSource) or x.dtype != torch.float32:
            continue
        found[k] = x.double()
        users = list(n.users)
        if wide or not users:
            continue
        with gm.graph.inserting_before(users[0]):
            narrow = gm.graph.call_method("to", (n, torch.float32))
        narrow.meta = {"example_value": n.meta.get("example_value")}
        for user in users:
            user.replace_input_with(n, narrow)
    if any(a is not b for a, b in zip(found, examples, strict=True)):
        gm.recompile()
    return found
