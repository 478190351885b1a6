"""The torch.compile back end: a Dynamo graph in, a callable for Dynamo out.

AOTAutograd makes one inference graph, or a forward and a backward graph, each compiled by `plait.compile`. Where an
inference graph needs nothing of AOTAutograd's runtime wrapper, Dynamo gets the compiled program itself.
Loading this module loads the whole compiler, so that the first call pays for compiling only: `backend="plait"` is
looked up when torch.compile is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from plait import compat
from plait.capture.program import collector_paused, compile_captured
from plait.capture.training import TrainingGraph
from plait.compile import Program
from plait.config import Config
from plait.errors import PlaitError
from plait.graph.captured import Captured, GraphKind
from plait.graph.partition import partition

_serial = itertools.count()  # makes graph names unique within the process


def plait_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph for torch.compile(backend="plait", mode=..., options=...).

    Raises UserError for an unknown mode or option; every error of plait reaches the user unwrapped.
    """
    try:
        cfg = Config.from_env().with_options(options, mode)
        with collector_paused():
            return _OneGraph(cfg, len(example_inputs)).compile(gm, example_inputs)
    except PlaitError as error:
        raise compat.through_dynamo(error) from error.__cause__


class _OneGraph:
    """The compilation of one Dynamo graph: the three compilers that AOTAutograd calls, and what they found out."""

    def __init__(self, cfg: Config, n_inputs: int) -> None:
        self.cfg = cfg
        self.n_inputs = n_inputs
        self.serial = next(_serial)
        self.direct: Callable[..., Any] | None = None
        self.forward_program: Program | None = None
        self.training = TrainingGraph(self._backward)

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrapped = compat.aot_compile(
            gm,
            example_inputs,
            forward=self.forward,
            backward=compat.untraced(self.backward),
            inference=self.inference,
            partition=self.partition,
        )
        if self.forward_program is not None:
            return self.training.around(self.forward_program, wrapped)
        return wrapped if self.direct is None else self.direct

    def partition(
        self, joint: GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        forward, backward = partition(joint, joint_inputs, **kwargs)
        self.training.partitioned(backward)
        return forward, backward

    def inference(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        meta = compat.forward_metadata()
        reason = _graph_reason(gm, len(inputs), self.n_inputs) or compat.wrapper_reason(meta)
        # Behind the wrapper, the wrapper itself bumps versions.
        bumped = () if reason else compat.bumped_input_indices(meta)
        program = self._program(
            gm,
            "inference",
            compat.static_input_indices(meta),
            bumped_inputs=bumped,
            wrapper_reason=reason,
        )
        if not reason:
            self.direct = program.call
        return program.boxed

    def forward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        meta = compat.forward_metadata()
        self.training.forward(gm, meta, _graph_reason(gm, len(inputs), self.n_inputs))
        bumped = () if self.training.reason else compat.bumped_input_indices(meta)
        static = compat.static_input_indices(meta)
        self.forward_program = self._program(
            gm, "forward", static, bumped_inputs=bumped, wrapper_reason=self.training.reason
        )
        return self.forward_program.boxed

    def backward(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        donated = compat.donated_input_indices(compat.forward_metadata())
        return self.training.backward(gm, donated).boxed

    def _backward(self, gm: GraphModule, donated: tuple[int, ...]) -> Program:
        with collector_paused():  # called at the first backward pass, on its own
            return self._program(gm, "backward", donated_inputs=donated)

    def _program(
        self,
        gm: GraphModule,
        kind: GraphKind,
        static_inputs: tuple[int, ...] = (),
        donated_inputs: tuple[int, ...] = (),
        bumped_inputs: tuple[int, ...] = (),
        wrapper_reason: str = "",
    ) -> Program:
        captured = Captured(
            gm,
            f"{kind}_{self.serial}",
            kind,
            static_inputs=static_inputs,
            donated_inputs=donated_inputs,
            bumped_inputs=bumped_inputs,
            wrapper_reason=wrapper_reason,
        )
        return compile_captured(captured, self.cfg)


_TRUSTED_NAMESPACES = ("aten", "prims", "plait", "_operator", "math")


def _graph_reason(gm: GraphModule, n_compiled: int, n_dynamo: int) -> str:
    """Why Dynamo must not be handed the program itself, as far as the graph tells, or ""."""
    if n_compiled != n_dynamo:
        return "inputs were deduplicated or got a synthetic base"
    for node in gm.graph.nodes:
        if node.op == "call_function" and _namespace(node.target) not in _TRUSTED_NAMESPACES:
            return "the wrapper checks custom ops for aliasing on their first call"
    return ""


def _namespace(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    return str(getattr(target, "__module__", ""))
