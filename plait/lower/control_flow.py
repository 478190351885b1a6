"""Control flow: operators that run graphs of their own become calls that run subprograms.

Comes in: a call of a higher-order operator. Goes out: its graphs, lowered as programs, and a call
that says which of them runs on what (`ir/calls.Control`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from plait.ir.calls import Control, Extern, ExternArg, Scalar
from plait.ir.expr import Expr
from plait.ir.loops import LoopProgram
from plait.lower.core import Lowering, NoRule, View
from plait.lower.operands import operand, results

_hop = torch.ops.higher_order
CONTROL_FLOW: dict[HigherOrderOperator, tuple[str, str]] = {
    _hop.cond: ("cond", "pffr"),
    _hop.while_loop: ("loop", "ffcr"),
    _hop.while_loop_stack_output: ("rounds", "ffcr"),
    _hop.map_impl: ("scan", "fsr"),
    _hop.scan: ("scan", "fcsr"),
    _hop.invoke_subgraph: ("call", "f-*"),
}
"""Operators that run graphs: the kind, and what their arguments are: p the condition, f a graph, c
what is carried, s what is scanned, r what each run is given as it is, * the same as arguments of
their own, - nothing."""


def graphs_within(graph: GraphModule) -> list[GraphModule]:
    """The graphs that control flow in a graph runs, each once."""
    nodes = (n for n in graph.graph.nodes if n.target in CONTROL_FLOW)
    found = (a for n in nodes for a in n.args if isinstance(a, Node) and a.op == "get_attr")
    values = (attrgetter(str(a.target))(graph) for a in found)
    return list(dict.fromkeys(v for v in values if isinstance(v, GraphModule)))


def call_control_flow(ctx: Lowering, op: HigherOrderOperator, args: Sequence[Any]) -> Any:
    """Records a call of `op`, the current node's operator and one of CONTROL_FLOW, as one of
    subprograms; returns its results as a rule would.

    Raises NoRule for an argument that no subprogram takes, Unsupported for a graph that no program
    holds."""
    kind, roles = CONTROL_FLOW[op]
    roles = roles.replace("*", "r" * (len(args) - len(roles) + 1))
    graphs: list[GraphModule] = []
    given: dict[str, list[ExternArg]] = {role: [] for role in "pcsr"}
    for role, arg, node in zip(roles, args, ctx.node.args, strict=True):
        if role == "f":
            graphs.append(arg if arg in ctx.programs else _traced(arg))
        elif role in given and isinstance(arg, View):
            given[role].append(operand(ctx, arg, node))
        elif role in given:
            values, fakes = pytree.tree_leaves(arg), pytree.tree_leaves(node)
            given[role] += (_operand(ctx, x, fake) for x, fake in zip(values, fakes, strict=True))
    for g in graphs:
        if g not in ctx.programs:
            ctx.programs[g] = _checked(ctx.lower_graph(g, f"{ctx.name}.{len(ctx.programs)}"))
    outs, symbols, result = results(ctx, ctx.node.meta["val"])
    if kind == "rounds" and symbols:
        raise NoRule("a loop that stacks integers")
    numbers = tuple(map(list(ctx.programs).index, graphs))
    control = Control(kind, numbers, len(given["c"]), len(given["s"]))
    operands = tuple(a for values in given.values() for a in values)
    signatures = [(len(p.inputs), len(p.outputs)) for p in ctx.programs.values()]
    if fault := control.fault(len(operands), signatures, len(outs)):
        raise NoRule(fault)
    named = f"{op.namespace}::{op.__name__}"
    ctx.ops.append(
        Extern(
            outs, named, operands, symbols=symbols, effectful=True,
            control=control, fallback=False, origin=ctx.origin,
        )
    )  # fmt: skip
    return result


def _checked(program: LoopProgram) -> LoopProgram:
    """A subprogram of which every target knows how to run it, else raises NoRule."""
    if any(isinstance(o, Extern) and o.fence for o in program.ops):
        raise NoRule("a graph that works on other streams")
    for o in program.outputs:
        if isinstance(o, Scalar) and o.kind not in ("none", "bool"):
            raise NoRule(f"a graph that returns a Python {o.kind}")
    return program


def _traced(graph: Any) -> GraphModule:
    """A graph of whose values fake ones are known; else raises NoRule."""
    if not isinstance(graph, GraphModule):
        raise NoRule(f"{type(graph).__name__} in the place of a graph")
    # A check has no value, and what nobody reads may have none.
    values = (n for n in graph.graph.nodes if n.op in ("placeholder", "call_function") and n.users)
    if any("val" not in n.meta for n in values):
        raise NoRule("a graph that was not traced")
    return graph


def _operand(ctx: Lowering, value: Any, fake: Any) -> ExternArg:
    if isinstance(value, (View, Expr)):
        return operand(ctx, value, fake)
    if isinstance(value, int):
        return int(value)
    raise NoRule(f"control flow over {type(value).__name__}")
