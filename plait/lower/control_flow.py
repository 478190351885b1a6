"""Control flow as data: the subgraphs that an operator runs, and what each of them is given.

In: a call of a higher-order operator, as lowering recorded it (`pycall.PythonCall`). Out: its
subgraphs, which can be compiled like any captured graph, and its operands by what they are to them.
Nothing here compiles or runs a subgraph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from plait.lower.pycall import PythonCall

Given = tuple[bool, int]
"""(False, number of an operand of the call) or (True, an integer)."""


@dataclass(frozen=True)
class ControlFlow:
    """Which subgraphs run, and on what.

    kind: 'call' (the only subgraph), 'cond' (the first if the predicate holds, else the second),
        'loop' (the second, for as long as the first holds) or 'scan' (the only one, once a slice).
    subgraphs: in the order of the operator's arguments.
    predicate: the condition of a cond, one operand; empty for other kinds.
    carried: operands that a round replaces for the next one.
    scanned: operands of which each round is given a slice.
    shared: operands that every round is given as they are.
    strides: of each result, where known.
    """

    kind: str
    subgraphs: tuple[GraphModule, ...]
    predicate: tuple[Given, ...]
    carried: tuple[Given, ...]
    scanned: tuple[Given, ...]
    shared: tuple[Given, ...]
    strides: tuple[tuple[int, ...] | None, ...]


_hop = torch.ops.higher_order
_KINDS: dict[Any, tuple[str, str]] = {
    _hop.cond: ("cond", "pffr"),
    _hop.while_loop: ("loop", "ffcr"),
    _hop.map_impl: ("scan", "fsr"),
    _hop.scan: ("scan", "fcsr"),
    _hop.invoke_subgraph: ("call", "f-*"),
}
"""Operators that run subgraphs: the kind, and what their arguments are: p the predicate, f a
subgraph, c what is carried, s what is scanned, r what is shared, * the same as arguments of their
own, - nothing."""


def control_flow(call: object) -> ControlFlow | None:
    """What a callable of a program runs; None if it is no such operator or has unusual
    arguments."""
    if not isinstance(call, PythonCall) or call.op not in _KINDS or call.items:
        return None
    kind, roles = _KINDS[call.op]
    sizes = [arg.num_leaves for arg in call.tree.children()[0].children()]
    roles = roles.replace("*", "r" * len(sizes))
    numbers = {leaf: number for number, leaf in enumerate(call.holes)}
    subgraphs: list[GraphModule] = []
    groups: dict[str, list[Given]] = {role: [] for role in "pcsr"}
    for k, role in enumerate(r for r, n in zip(roles, sizes, strict=False) for _ in range(n)):
        leaf = call.leaves[k]
        if role == "f" and isinstance(leaf, GraphModule):
            subgraphs.append(leaf)
        elif role in groups and (k in numbers or isinstance(leaf, int)):
            groups[role].append((False, numbers[k]) if k in numbers else (True, int(leaf)))
        elif role != "-":
            return None
    predicate, carried, scanned, shared = (tuple(groups[role]) for role in "pcsr")
    return ControlFlow(kind, tuple(subgraphs), predicate, carried, scanned, shared, call.strides)
