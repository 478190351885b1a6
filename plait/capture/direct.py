"""An inference graph as a native callable, where its metadata allows it.

Where AOTAutograd's runtime wrapper has nothing to do, Dynamo is handed the program itself; where it
has little to do (results that are inputs or views of them, inputs that take another shape, marks of
dynamic dimensions, the check of custom operators on the first call), the program behind a native
epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from plait import _native, compat
from plait.capture.aliases import offset_in, repeats_memory, same_bits
from plait.compat.frame_facts import NotKept
from plait.graph.captured import InputView
from plait.graph.edit import output_of
from plait.wrapper.program import AS_PYTHON, Program

_TRUSTED_NAMESPACES = ("aten", "prims", "plait", "_operator", "math")


class DirectGraph:
    """The inference half of one Dynamo graph's compilation.

    reason: why calls need AOTAutograd's callable, or "".
    """

    def __init__(self) -> None:
        self.reason = "no graph"

    def learn(
        self, gm: GraphModule, meta: Any, reason: str, native: bool, views: Mapping[int, InputView]
    ) -> None:
        """Learns the graph, before it is compiled. reason: why it needs the wrapper, as far as the
        caller knows. native: its program will be a native one. views: the outputs that are views of
        inputs."""
        self.reason = reason or compat.autograd.wrapper_reason(gm, meta)
        if self.reason:
            return
        todo = _with_offsets(gm, compat.autograd.epilogue(meta), views)
        if todo is None:
            self.reason = "a view of an input that its sizes and strides do not describe"
            return
        self._epilogue = todo
        self._wrapper_first = calls_custom_ops(gm)
        self._bare = todo.trivial and not self._wrapper_first
        if not (native or self._bare):
            self.reason = AS_PYTHON

    def around(self, program: Program, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for Dynamo; wrapped: AOTAutograd's callable."""
        call: Any = program.call
        if self.reason:
            return wrapped
        if self._bare:
            return program.call
        todo = self._epilogue
        return _native.Direct(call, wrapped, todo.results, todo.marks, self._wrapper_first)

    def data(self) -> dict[str, Any]:
        """What `around` puts around the program, for another process. Raises NotKept."""
        if self.reason:
            raise NotKept(self.reason)
        todo = self._epilogue
        how = "program" if self._bare else "direct"
        return {"how": how, "results": todo.results, "marks": marks_data(todo.marks)}


def marks_data(marks: Sequence[compat.autograd.Mark]) -> list[list[Any]]:
    """Marks of dynamic dimensions as plain data."""
    return [[k, name, sorted(dims)] for k, name, dims in marks]


def calls_custom_ops(gm: GraphModule) -> bool:
    """Whether there are operators whose first call AOTAutograd's wrapper checks for undeclared
    aliases."""
    return any(
        node.op == "call_function" and _namespace(node.target) not in _TRUSTED_NAMESPACES
        for node in gm.graph.nodes
    )


def _namespace(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    return str(getattr(target, "__module__", ""))


def _with_offsets(
    gm: GraphModule, todo: compat.autograd.Epilogue, views: Mapping[int, InputView]
) -> compat.autograd.Epilogue | None:
    """todo with the offsets of views, None where they depend on sizes. None if the wrapper has to
    make a view."""
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    outputs: Any = output_of(gm.graph).args[0]
    results = []
    for k, (result, node) in enumerate(zip(todo.results, outputs, strict=True)):
        if result[0] == "view":
            base, view = inputs[result[1]], node.meta["val"]
            if node.target is torch.ops.aten.alias.default and base.dtype == view.dtype:
                return None  # detached: no view to autograd
            if k not in views or not same_bits(base, view):
                return None
            if result[2] and repeats_memory(base):
                return None
            result = (*result, offset_in(base, node, views[k].offset))
        results.append(result)
    return replace(todo, results=tuple(results))
