"""A training graph as one native callable, where its metadata allows it.

AOTAutograd hands over a forward graph and, when it likes, a backward graph. Its own callable is an
autograd function in Python; `TrainingGraph.around` puts the forward program and a native autograd
node in its place, which compiles the backward graph at the first backward pass and keeps
AOTAutograd's callable for states that it does not serve. Under both, gradients that are not plain
tensors (batched, of a subclass, dual) find the backward graph run by operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from plait import _native, compat
from plait.capture.direct import calls_custom_ops, marks_data
from plait.capture.ladder import AsItCame
from plait.compat.frame_facts import NotKept
from plait.devices import facts_of
from plait.graph.captured import InputView
from plait.graph.edit import aten, output_of, value_of
from plait.lower.symbols import is_ragged
from plait.wrapper.program import AS_PYTHON, Program

CompileBackward = Callable[[GraphModule, tuple[int, ...]], Program]
Interpret = Callable[[list[Any]], tuple[Any, ...]]
_ASKING = (aten.convolution_backward.default, aten.sum.dim_IntList, aten.mean.dim)


class TrainingGraph:
    """The training half of one Dynamo graph's compilation.

    compile_backward: (graph, donated inputs) -> program.
    backward: the backward graph that the partitioner made.
    interpreter: a function that gives the backward graph -> what runs it operator by operator.
    reason: why calls need AOTAutograd's callable, or "".
    """

    def __init__(
        self,
        compile_backward: CompileBackward,
        backward: GraphModule,
        interpreter: Callable[[Callable[[], GraphModule]], Interpret],
    ) -> None:
        self.reason = "no forward graph"
        self._compile_backward = compile_backward
        self._interpreter = interpreter
        self._backward_graph = backward
        self._programs: dict[tuple[int, ...], Program] = {}  # by donated inputs
        self._lock = threading.Lock()

    def learn(
        self, gm: GraphModule, meta: Any, reason: str, native: bool, views: Mapping[int, InputView]
    ) -> None:
        """Learns the forward graph, before it is compiled. reason: why its calls need AOTAutograd's
        callable, as far as the caller knows, or "". native: its program will be a native one.
        views: outputs that are views of inputs; AOTAutograd's callable makes these."""
        self._resume = compat.tracing.resume_tracing()
        self._donated = compat.autograd.take_donated(meta)
        self.reason = reason or compat.autograd.training_reason(gm, meta) or _graph_reason(gm, meta)
        self.reason = self.reason or ("" if native else AS_PYTHON)
        if self.reason:
            return
        has_gradient = [v is not None for v in _outputs(self._backward_graph)]
        self._facts = compat.autograd.training_facts(meta, len(_outputs(gm)), has_gradient)
        self._sources = _sources(self._backward_graph, len(self._facts.tangents))
        self._wrapper_first = calls_custom_ops(gm)
        if not self._facts.wants_grad:
            self.reason = "no input gets a gradient"

    def backward(self, gm: GraphModule, donated: tuple[int, ...]) -> Program:
        """The backward program of AOTAutograd's copy of the graph, compiled once for each set of
        donated inputs."""
        with self._lock:
            if donated not in self._programs:
                came = AsItCame(gm)  # compiling changes it
                program = self._compile_backward(gm, donated)
                boxed = _by_kind(program.boxed, self._interpreter(came.module))
                self._programs[donated] = replace(program, boxed=boxed)
            return self._programs[donated]

    def boxed(self, gm: GraphModule, later: bool) -> Interpret:
        """What AOTAutograd's callable runs as backward pass. Where the saved tensors are kept for
        another one (`retain_graph=True`), that is a program that leaves them as they are. later:
        the program is not asked for before the first pass."""
        came = AsItCame(gm)
        once = None if later else self.backward(gm, self._donated)

        def boxed(args: list[Any]) -> tuple[Any, ...]:
            keeps = bool(self._donated) and compat.autograd.keeps_graph()
            if once is not None and not keeps:
                return once.boxed(args)
            with self._resume():
                found = self.backward(came.module(), () if keeps else self._donated)
            return found.boxed(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return compat.tracing.untraced(boxed)

    def around(self, forward: Program, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for Dynamo. forward: the forward program; wrapped: AOTAutograd's
        callable."""
        if self.reason:
            return wrapped
        return native_training(
            forward.call,
            wrapped,
            self._at_first_use,
            self._interpreter(lambda: self._backward_graph),
            self._data(),
            self._facts.marks,
            self._wrapper_first,
        )

    def _data(self) -> dict[str, Any]:
        facts = self._facts
        return {
            "differentiable": facts.differentiable,
            "n_saved": facts.n_saved,
            "n_sizes": facts.n_sizes,
            "tangents": facts.tangents,
            "wants_grad": [(i, self._sources[i]) for i in facts.wants_grad],
            "nondeterministic": facts.nondeterministic,
        }

    def data(self) -> dict[str, Any]:
        """What `around` puts around the programs, for another process. Raises NotKept."""
        if self.reason:
            raise NotKept(self.reason)
        marks = marks_data(self._facts.marks)
        return {"how": "training", "donated": self._donated, "marks": marks, **self._data()}

    def backward_graph(self) -> tuple[GraphModule, tuple[int, ...]]:
        """A copy of the backward graph, and its donated inputs."""
        return AsItCame(self._backward_graph).module(), self._donated

    def _at_first_use(self, may_overwrite: bool) -> _native.Program:
        """The backward program, in the thread of a backward pass."""
        with self._resume():
            graph = AsItCame(self._backward_graph).module()  # compiling changes it
            call = self.backward(graph, self._donated if may_overwrite else ()).call
        assert isinstance(call, _native.Program), call
        return call


def native_training(
    forward: Any,
    wrapped: Callable[..., Any],
    at_first_use: Callable[[bool], _native.Program],
    interpret: Interpret,
    data: Mapping[str, Any],
    marks: Sequence[compat.autograd.Mark],
    wrapper_first: bool = False,
) -> Callable[..., Any]:
    """The native node. data: what `TrainingGraph.data` tells of the graph."""
    return _native.Training(
        forward,
        wrapped,
        compat.tracing.untraced(at_first_use),
        compat.tracing.untraced(interpret),
        data["differentiable"],
        data["n_saved"],
        data["n_sizes"],
        [t if isinstance(t, str) else (tuple(t[0]), tuple(t[1])) for t in data["tangents"]],
        [(i, sources) for i, sources in data["wants_grad"]],
        data["nondeterministic"],
        marks,
        compat.autograd.autograd_switches(),
        wrapper_first,
    )


def _by_kind(program: Interpret, interpret: Interpret) -> Interpret:
    """The backward program for plain tensors, interpret for others."""
    all_plain = _native.all_plain

    def boxed(args: list[Any]) -> tuple[Any, ...]:
        return program(args) if all_plain(args) else interpret(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
    return compat.tracing.untraced(boxed)


def _outputs(gm: GraphModule) -> tuple[Any, ...]:
    values: Any = output_of(gm.graph).args[0]
    return tuple(values)


def _sources(backward: GraphModule, n_tangents: int) -> list[list[int]]:
    """For each output of a backward graph, the tangents (its last placeholders) that it is computed
    from."""
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = placeholders[len(placeholders) - n_tangents :]
    found = {n: {k} for k, n in enumerate(tangents)}
    for node in backward.graph.nodes:
        found.setdefault(node, set()).update(*(found[a] for a in node.all_input_nodes))
    return [sorted(found.get(v, ())) for v in _outputs(backward)]


def _graph_reason(gm: GraphModule, meta: Any) -> str:
    """What of the graph itself the native node does not serve, or ""."""
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and (
            not isinstance(val, (torch.Tensor, torch.SymInt, int)) or is_ragged(val)
        ):
            return "an input is neither a tensor nor a size"
    outputs = _outputs(gm)
    results = [
        n
        for n in outputs[: meta.num_forward]
        if isinstance(getattr(n, "meta", {}).get("val"), torch.Tensor)
    ]
    if len(set(results)) != len(results):
        return "a result is returned twice"
    if any(n.op == "placeholder" for n in results):
        return "a result is an input"
    sizes = outputs[len(outputs) - meta.num_symints_saved_for_bw :]
    if not all(isinstance(n, int) or isinstance(n.meta["val"], torch.SymInt) for n in sizes):
        return "a number that is no size is saved for the backward pass"
    return ""


def asks_of_precision(backward: GraphModule) -> bool:
    """Whether passes may ask of a backward graph, once it is compiled, how exactly a CPU
    multiplies: of convolutions and sums that may be products."""
    found = (n for n in backward.graph.nodes if n.target in _ASKING)
    return any(facts_of(value_of(n.args[0]).device).is_host for n in found)
