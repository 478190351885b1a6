"""Control flow for packages: what a compiled program calls as Python becomes routines and what runs
them.

A call of a higher-order operator holds its subgraphs as data (`lower/control_flow.py`). A compiled
program has eager run these, operator by operator; so does a package, without Python. Whatever else
is Python is refused.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from plait.capture.program import guarded
from plait.compile import Portable, compile_calls
from plait.config import Config
from plait.errors import Unsupported
from plait.graph.captured import Captured
from plait.ir.expr import Expr
from plait.lower.control_flow import control_flow
from plait.wrapper import instructions as ins
from plait.wrapper import walk
from plait.wrapper.native import encode
from plait.wrapper.package import Control, Routine


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
            flow = control_flow(made.callables[instr.index])
            if flow is None:
                raise Unsupported(
                    f"a package of a program that calls Python: {instr.label}", where=line
                )
            numbers = tuple(
                _routine(f"{name}.{instr.index}.{k}", g, cfg, routines)
                for k, g in enumerate(flow.subgraphs)
            )
            operands = (*flow.predicate, *flow.carried, *flow.scanned, *flow.shared)
            controls[instr.index] = Control(
                flow.kind, numbers, operands, flow.strides, len(flow.carried), len(flow.scanned)
            )
    return tuple(controls[k] for k in sorted(controls))


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
