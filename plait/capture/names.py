"""What the user calls the inputs and results of a graph.

In: Dynamo's graph and those that AOTAutograd makes of it. Out: words by position, "" where nothing
is known. Nothing here is needed to compile: it is asked for where somebody looks at a compile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Graph, Node

from plait.compat.autograd import described
from plait.compat.tracing import source_of
from plait.graph.edit import last_frame


def argument_names(graph: Graph) -> tuple[str, ...]:
    """The user's names of the inputs of Dynamo's graph: `x`, `args[0]`, `layers.0.weight` (of the
    module whose code runs), `self.table` (an attribute of it), `model.head.bias`."""
    return tuple(_shown(source_of(n)) for n in graph.find_nodes(op="placeholder"))


def input_names(graph: Graph, arguments: Sequence[str]) -> tuple[str, ...]:
    """The same for AOTAutograd's graphs. arguments: those of Dynamo's. What the forward pass saved
    is named by its operator and line."""
    return tuple(_input(n, arguments) for n in graph.find_nodes(op="placeholder"))


def result_names(graph: Graph, arguments: Sequence[str]) -> tuple[str, ...]:
    """The same of what such a graph returns."""
    (output,) = graph.find_nodes(op="output")
    return tuple(described(d, arguments) for d in output.meta.get("desc", ()))


def _input(n: Node, arguments: Sequence[str]) -> str:
    if (desc := n.meta.get("desc")) is not None:
        return described(desc, arguments)
    where = last_frame(n.meta.get("stack_trace") or "")
    return f"{n.target}, saved at {where}" if where else ""


def _shown(source: str) -> str:
    """The user's words for a source."""
    # What a module holds has the name that its state_dict says.
    text = re.sub(r"^L\['self'\](?=\._(?:modules|parameters|buffers)\[)", "", source)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    text = text.removeprefix(".")
    text = re.sub(r"^.*\.__globals__", "G", text)
    text = re.sub(r"\bG\['__import_\w+'\]\.", "", text)  # a global of another module
    return re.sub(r"\b(?:L\['kwargs'\]|[LG])\['([^']+)'\]", r"\1", text)
