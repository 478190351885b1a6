"""Control flow for packages: what a compiled program calls as Python becomes routines and what runs
them.

A call of a higher-order operator holds its subgraphs (`lower/hop.py`); at a call of a compiled
program eager runs these, operator by operator, and so does a package, without Python. Whatever else
is Python is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from plait.capture.program import guarded
from plait.compile import Portable, compile_calls
from plait.config import Config
from plait.errors import Unsupported
from plait.graph.captured import Captured
from plait.ir.expr import Expr
from plait.lower.pycall import PythonCall
from plait.wrapper import instructions as ins
from plait.wrapper import walk
from plait.wrapper.native import encode
from plait.wrapper.package import Control, Routine

_hop = torch.ops.higher_order
_KINDS: dict[Any, tuple[str, str]] = {
    _hop.cond: ("cond", "pffr"),
    _hop.while_loop: ("loop", "ffcr"),
    _hop.map_impl: ("scan", "fsr"),
    _hop.scan: ("scan", "fcsr"),
    _hop.invoke_subgraph: ("call", "f-*"),
}
"""Operators that run subgraphs: the kind of Control, and what their arguments are: p the condition,
f a subgraph, c what is carried, s what comes in slices, r the other operands, * those as arguments
of their own, - nothing."""


def controls_of(
    name: str, made: Portable, cfg: Config, routines: list[Routine]
) -> tuple[Control, ...]:
    """What stands for each of the callables of a program; what they run is added to routines.

    Raises Unsupported, with the source line, for a callable that is no control flow.
    """
    controls: dict[int, Control] = {}
    line = ""
    for instr in made.wrapper.body:
        if isinstance(instr, ins.Note):
            line = instr.text
        if isinstance(instr, ins.CallPython):
            call = made.callables[instr.index]
            found = _parts(call) if isinstance(call, PythonCall) else None
            if not isinstance(call, PythonCall) or found is None:
                raise Unsupported(
                    f"a package of a program that calls Python: {instr.label}", where=line
                )
            kind, graphs, groups = found
            numbers = tuple(
                _routine(f"{name}.{instr.index}.{k}", g, cfg, routines)
                for k, g in enumerate(graphs)
            )
            operands = (*groups["p"], *groups["c"], *groups["s"], *groups["r"])
            controls[instr.index] = Control(
                kind, numbers, operands, call.strides, len(groups["c"]), len(groups["s"])
            )
    return tuple(controls[k] for k in sorted(controls))


Operand = tuple[bool, int]


def _parts(call: PythonCall) -> tuple[str, list[GraphModule], dict[str, list[Operand]]] | None:
    """The kind of a call's control flow, its subgraphs and operands; None for another call or
    unusual arguments."""
    if call.op not in _KINDS or call.items:
        return None
    kind, roles = _KINDS[call.op]
    leaves: list[Any] = [x if isinstance(x, GraphModule) else (True, x) for x in call.leaves]
    for number, hole in enumerate(call.holes):
        leaves[hole] = (False, number)
    args, _ = pytree.tree_unflatten([_Leaf(x) for x in leaves], call.tree)
    graphs: list[GraphModule] = []
    groups: dict[str, list[Operand]] = {"p": [], "c": [], "s": [], "r": []}
    if roles.endswith("*"):
        n = len(roles) - 1
        args, roles = (*args[:n], args[n:]), roles.replace("*", "r")
    for role, arg in zip(roles, args, strict=False):
        for leaf in pytree.tree_leaves(arg):
            value = leaf.value
            if role == "f" and isinstance(value, GraphModule):
                graphs.append(value)
            elif role in groups and isinstance(value, tuple) and isinstance(value[1], int):
                groups[role].append((value[0], int(value[1])))
            elif role != "-":
                return None
    return kind, graphs, groups


class _Leaf:
    """A leaf of a call's arguments: a subgraph, (False, number of an operand) or (True, a
    constant)."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _routine(name: str, graph: GraphModule, cfg: Config, routines: list[Routine]) -> int:
    captured = Captured(graph, name, "inference")
    made = guarded(lambda cfg: compile_calls(captured, cfg), captured, cfg)
    controls = controls_of(name, made, cfg, routines)
    program = _checking(made.wrapper)
    routines.append(Routine(encode(program), made.constants, made.constant_devices, controls))
    return len(routines) - 1


def _checking(program: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program with checks of its inputs, which come from other programs. Raises Unsupported for
    an input that it reads and that is neither tensor nor integer, or whose sizes nothing tells."""
    read = {name for i in program.body for name in walk.used(i)}
    tensors = [
        i for i in program.inputs if isinstance(i, ins.TensorInput) and i.dtype.name != "opaque"
    ]
    known = {i.name for i in program.inputs if isinstance(i, ins.SymbolInput)}
    head: list[ins.Instr] = []
    for t in tensors:
        for dim, size in enumerate(t.shape):
            atom = size.symbol if isinstance(size, Expr) else None
            if atom is not None and atom.name not in known:
                known.add(atom.name)
                head.append(ins.Symbol(atom.name, ins.SizeOf(t.name, "size", dim)))
    checks = [ins.AssertSizeStride(t.name, t.dtype, t.shape, t.strides) for t in tensors]
    unread = all(i.name not in read for i in program.inputs if isinstance(i, ins.OpaqueInput))
    if not unread or any(name not in known for check in checks for name in walk.symbols(check)):
        raise Unsupported(
            "a package of control flow with an operand that is no tensor of plain sizes and no "
            "integer"
        )
    body = [i for i in program.body if not (isinstance(i, ins.Symbol) and i.name in known)]
    return replace(program, body=(*head, *checks, *body))
