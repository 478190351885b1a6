"""Results of a backward graph that are constant objects: the mesh of a gradient that is a
distributed tensor, where the forward pass was given none.

No program returns objects: they are taken out of the graph, and put among its results at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.graph.edit import output_of
from plait.wrapper.program import Program


def take_objects(gm: GraphModule) -> dict[int, Any]:
    """The objects that a graph returns, by position; None takes their place in the graph."""
    output = output_of(gm.graph)
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    found: dict[int, Any] = {}
    for k, v in enumerate(values):
        if isinstance(v, Node) and v.op == "get_attr":
            value = getattr(gm, str(v.target), None)
            if not isinstance(value, torch.Tensor | None):
                found[k] = getattr(value, "real_obj", value)  # behind the fake one of tracing
                values[k] = None
    if found:
        output.args = (tuple(values),)
    return found


def with_objects(program: Program, objects: Mapping[int, Any]) -> Program:
    """The program, as AOTAutograd's callable runs it, with objects among its results."""
    run = program.boxed

    def boxed(args: list[Any]) -> tuple[Any, ...]:
        results = list(run(args))
        for k, value in objects.items():
            results[k] = value
        return tuple(results)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
    return replace(program, boxed=compat.tracing.untraced(boxed)) if objects else program
