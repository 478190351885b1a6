"""The first value of a compiled graph that is wrong for what its kernel was given.

The graph is compiled alone and called, watched. Each value that a kernel makes is computed again
from what that kernel was given, as plait computed it: by eager's operators, and in float64, on the
graph without the passes that can be left out. So a kernel that passes an early error on is not
blamed. `measure.py` has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from plait.capture.program import compile_graph
from plait.config import Config
from plait.graph.edit import aten, output_of
from plait.lower.calls import where_of
from plait.pipelines import clean_graph
from plait.tools.faults.evaluate import Values, draws
from plait.tools.faults.measure import Numbers, Worst, worst_of
from plait.tools.faults.pieces import Piece, cut_out
from plait.tools.faults.recorded import Recorded
from plait.wrapper import instructions as ins
from plait.wrapper.program import Program
from plait.wrapper.walk import defined, used


@dataclass(frozen=True)
class Wrong:
    """A value that plait computes and that is further from float64 than eager's.

    graph: the name of its graph. kernel: what computes it; operators: those of ATen in it, with
    source lines. node: the FX node whose value it is. where: its source line. worst: its worst
    element. piece: what computes it alone, from what the kernel was given; None for what no kernel
    computes. same: passes have not given the node another value."""

    graph: str
    kernel: str
    operators: str
    node: str
    where: str
    worst: Worst
    piece: Piece | None = field(compare=False, repr=False)
    same: bool = True

    @property
    def text(self) -> str:
        """A few lines."""
        w = self.worst
        return "\n".join((
            f"{self.graph}: {self.kernel} makes {self.node}, {w.n_wrong} of {w.numel} wrong",
            *([f"  of {self.operators}"] if self.operators else []),
            *([f"  at {self.where}"] if self.where else []),
            f"  element {list(w.at)}: plait {w.plait}, eager {w.eager}, float64 {w.float64}",
        ))  # fmt: skip


@dataclass(frozen=True)
class _Ran:
    """What a compiled graph did: its values in the order in which they were made, and the tensors
    and numbers that it gave."""

    program: Program
    seen: Sequence[tuple[str, str, Tensor]]
    results: Sequence[Any]
    inputs: Sequence[Any]


CALLS = 3
"""How often a graph is called: memory is written again at the second, CUDA graphs are replayed at
the third."""


def _run(graph: Recorded, cfg: Config, drawn: Set[str], watched: bool) -> list[_Ran]:
    """The calls. watched: the first one's values are seen. drawn: nodes of random numbers, which
    are seen at each."""
    rans: list[_Ran] = []
    seen: list[tuple[str, str, Tensor]] = []

    def watcher(node: str, label: str, tensor: Tensor | None) -> None:
        if tensor is not None and (not rans or node in drawn):
            seen.append((node, label, tensor.detach().clone()))

    captured = graph.captured()
    if watched or drawn:
        captured = replace(captured, watcher=watcher)
    program = compile_graph(captured, cfg)
    for _ in range(CALLS):
        seen, inputs = [], graph.copies()
        with torch.no_grad():
            results = program.call(*inputs)
        rans.append(_Ran(program, seen, results, inputs))
    return rans


@dataclass
class Search:
    """What became of a graph. suspects: values, in the order in which kernels make them, that are
    wrong for what their kernel was given, if they are what their node was in the graph as it came.
    n_compared: values that were looked at. passed_over: those that eager cannot compute."""

    suspects: list[Wrong] = field(default_factory=list)
    n_compared: int = 0
    passed_over: list[str] = field(default_factory=list)


def search_graph(graph: Recorded, cfg: Config) -> Search:
    """Compiles a graph, calls it and looks through its values."""
    found = Search(passed_over=[f"{graph.name}, {why}"] if (why := graph.why_unknown) else [])
    if not why:
        searcher = _Searcher(graph, cfg, found, watched=True)
        searcher.look_at_values()
        searcher.look_at_results()
        if not (found.suspects or searcher.drawn):  # what watches is in the way of some faults
            _Searcher(graph, cfg, found, watched=False).look_at_results()
    return found


def wrong_result(graph: Recorded, cfg: Config) -> Wrong | None:
    """The first result of a graph that is wrong for its arguments, which is beyond doubt."""
    found = Search()
    if not graph.why_unknown:
        _Searcher(graph, cfg, found, watched=False).look_at_results()
    return next(iter(found.suspects), None)


class _Searcher:
    """Looks through one graph in the order of its program."""

    def __init__(self, graph: Recorded, cfg: Config, found: Search, watched: bool) -> None:
        self.name, self.found = graph.name, found
        self.right = graph.bare(cfg)
        self.cleaned = clean_graph(graph.captured(), cfg).graph
        self.cleaned_nodes = {n.name: n for n in self.cleaned.graph.nodes}
        self.nodes = {n.name: n for n in self.right.graph.nodes if n.op == "call_function"}
        self.inputs = {n.name: n for n in self.right.graph.find_nodes(op="placeholder")}
        self.alike = _alike(self.right)
        # What plait computed, by the names of nodes that mean what they meant.
        self.known: dict[str, Any] = dict(zip(self.inputs, graph.copies(), strict=True))
        self.drawn = {name for name, n in self.nodes.items() if draws(n)}
        self.rans = _run(graph, cfg, self.drawn, watched)
        self._know_drawn(self.rans[0])
        self.made_of: dict[str, frozenset[str]] = {}  # buffer -> the known nodes that made it

    def look_at_values(self) -> None:
        """What kernels and operators make."""
        seen = list(reversed(self.rans[0].seen))
        for i in self.rans[0].program.record.wrapper.body:
            if not isinstance(i, ins.Hook):
                self._follow(i)
            elif seen and seen[-1][:2] == (i.node, i.label):  # an operator may leave a result out
                self._look(i.tensor, *seen.pop())

    def look_at_results(self) -> None:
        """What the graph returns, and the arguments that it writes, each for all arguments, at
        every call."""
        first = self._results(self.rans[0])
        self._look_at_call(first, "the program")
        for k, ran in enumerate(self.rans[1:], 2):
            shown = self._results(ran)
            if self.drawn or not all(torch.equal(x, first[n]) for n, x in shown.items()):
                self._know_drawn(ran)
                self._look_at_call(shown, f"the program, at call {k},")

    def _know_drawn(self, ran: _Ran) -> None:
        self.known |= {k: x for k, _, x in ran.seen if k in self.drawn}

    def _results(self, ran: _Ran) -> dict[Node, Tensor]:
        outs: Any = output_of(self.right.graph).args[0]
        after = dict(zip(self.inputs.values(), ran.inputs, strict=True))
        results = [
            *zip(outs, ran.results, strict=True),
            *((n, after[n.args[0]]) for n in self.nodes.values() if _writes(n, after)),
        ]
        return {n: x for n, x in results if n in self.nodes.values() and isinstance(x, Tensor)}

    def _look_at_call(self, shown: Mapping[Node, Tensor], label: str) -> None:
        @cache
        def values(wide: bool, seed: int) -> dict[Node, Any]:  # all at once: they share most
            given = self._given(None, frozenset())
            return Values(self.right, given, wide, seed).known(*shown)

        for node, value in shown.items():
            self._judge(node, value, label, frozenset(), values)

    def _follow(self, i: ins.Instr) -> None:
        """What an instruction makes is made of what it uses."""
        if isinstance(i, ins.Alloc | ins.Place | ins.Reuse):
            return
        of = frozenset[str]().union(*(self.made_of.get(u, frozenset()) for u in used(i)))
        for name in (*defined(i), *getattr(i, "outs", ()), *getattr(i, "into", ())):
            self.made_of[name] = self.made_of.get(name, frozenset()) | of

    def _look(self, buffer: str, name: str, label: str, value: Tensor) -> None:
        """At a value that the program shows."""
        if name in self.nodes:  # else it is a part of others
            node, of = self.nodes[name], self.made_of.get(buffer, frozenset())
            same = self._means_the_same(node, value, of)
            self._judge(node, value, label, of, same=same)
            if same:
                self.made_of[buffer] = frozenset({name})
                self.known |= dict.fromkeys(self.alike[name], value)

    def _known_to(self, of: frozenset[str]) -> dict[str, Any]:
        """What is known of these nodes, inputs and random numbers."""
        names = {*self.inputs}.union(*(self.alike[n] for n in of))
        return {
            k: v
            for k, v in self.known.items()
            if k in names or k in self.nodes and draws(self.nodes[k])
        }

    def _means_the_same(self, node: Node, value: Tensor, of: frozenset[str]) -> bool:
        """Whether the node after the passes is, in float64, what its namesake was before them."""
        after = self.cleaned_nodes
        if draws(node):
            return True
        given = {after[k]: v for k, v in self._known_to(of).items() if k in after}
        try:
            now = Values(self.cleaned, given, wide=True).known(after[node.name])[after[node.name]]
            return worst_of(node, now.to(value.dtype), self._values(node, of)) is None
        except KeyError:
            return False

    def _judge(
        self,
        node: Node,
        value: Tensor,
        label: str,
        of: frozenset[str],
        values: Numbers[Node] | None = None,
        same: bool = True,
    ) -> None:
        """Whether a value of a node is wrong. values: of that node, where they are known. same: as
        in `Wrong`."""
        if draws(node):
            return
        try:
            worst = worst_of(node, value, values or self._values(node, of))
        except KeyError:
            self.found.passed_over.append(node.name)
            return
        self.found.n_compared += 1
        if worst is not None:
            kernel, _, operators = label.partition(" (")
            alone = cut_out(self.right, self._given(node, of), [node])
            self.found.suspects.append(
                Wrong(
                    self.name, kernel, operators.removesuffix(")"), node.name, where_of(node),
                    worst, piece=alone, same=same,
                )
            )  # fmt: skip

    def _values(self, node: Node, of: frozenset[str]) -> Numbers[Node]:
        """Of one node, for what is made of these nodes."""
        given = self._given(node, of)
        return lambda wide, seed: Values(self.right, given, wide, seed).known(node)

    def _given(self, node: Node | None, of: frozenset[str]) -> dict[Node, Any]:
        nodes = self.nodes | self.inputs
        return {nodes[k]: v for k, v in self._known_to(of).items() if nodes[k] is not node}


def _alike(module: GraphModule) -> dict[str, tuple[str, ...]]:
    """The name of a node -> the names of all that compute the same: `merge common` leaves one."""
    number: dict[Node, int] = {}
    numbers: dict[str, int] = {}
    names: dict[int, list[str]] = {}

    def numbered(a: Any) -> Any:
        return ("node", number[a]) if isinstance(a, Node) else a

    for n in module.graph.nodes:
        own = n.op != "call_function" or draws(n)
        key = n.name if own else f"{n.target} {map_aggregate((n.args, n.kwargs), numbered)}"
        number[n] = numbers.setdefault(key, len(numbers))
        names.setdefault(number[n], []).append(n.name)
    return {name: tuple(some) for some in names.values() for name in some}


def _writes(n: Node, inputs: Mapping[Node, Any]) -> bool:
    return n.target is aten.copy_.default and n.args[0] in inputs
