"""The FX target: a wrapper program as a `torch.fx.GraphModule` of public parts, for compilers out
of tree to consume.

In: a `WrapperProgram` and its `Artifacts`. Out: a module that runs by calling it under no_grad;
docs/fx.md says what its nodes mean. Memory is plain tensors that die after their last use, as in
every FX graph: an arena, a Free and a kernel's definition leave no node. `load_program` runs the
module, or what a compiler makes of it, behind the interface of the native program.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from plait import compat
from plait.devices import facts_of
from plait.errors import Unsupported
from plait.ir.calls import all_programs
from plait.runtime import generated
from plait.runtime.fxops import python_below_autograd, with_scratch
from plait.runtime.source import executed
from plait.wrapper import instructions as ins
from plait.wrapper.fxgraph import FxGraph
from plait.wrapper.fxnodes import add_input, add_instruction
from plait.wrapper.program import Artifacts, Loaded, promises
from plait.wrapper.walk import forks, leaves_dispatch, used

GraphCompiler = Callable[[GraphModule], Callable[..., Any]]


def load_program(
    program: ins.WrapperProgram, artifacts: Artifacts, compiler: GraphCompiler | None = None
) -> Loaded:
    """The program as a callable. compiler: makes a callable of the graph; None: the graph itself
    runs.

    Raises RuntimeError if a library lacks a kernel."""
    for i in _kernels(program):
        if facts_of(i.device).is_host:
            generated.kernel(artifacts.libraries["cpu"], i.name)  # the file may be gone later
    module = make_fx(program, artifacts)
    return FxProgram(program, module, boxed(module) if compiler is None else compiler(module))


def _kernels(program: ins.WrapperProgram) -> list[ins.DefineKernel]:
    """Those of its subprograms too."""
    every = (i for p in all_programs(program) for i in p.body)
    return [i for i in every if isinstance(i, ins.DefineKernel)]


class FxProgram:
    """prog(*inputs) -> tuple, prog.boxed(list of inputs) -> tuple (empties the list).

    module: the graph. run: what it became; takes the inputs, in one list if it has a true attribute
    _boxed_call."""

    def __init__(
        self, program: ins.WrapperProgram, module: GraphModule, run: Callable[..., Any]
    ) -> None:
        self.module = module
        signature = promises(program)
        in_list = getattr(run, "_boxed_call", False)
        gpus = sorted({i.device for i in _kernels(program) if not facts_of(i.device).is_host})
        if len(gpus) > 1:  # Triton's operator launches on the current device
            raise Unsupported(
                f"one FX graph with kernels on {' and '.join(gpus)}",
                hint="options={'wrapper': 'native'}",
            )
        run = with_scratch(run) if gpus else run
        raw = _read_by_kernels(program) if gpus else []
        streams = generated.callers_stream if forks(program) else contextlib.nullcontext
        outside = leaves_dispatch(program)
        below = python_below_autograd if outside else generated.below_autograd

        def call(args: list[object]) -> tuple[object, ...]:
            generated.check_inputs(args, signature)
            device = torch.cuda.device(gpus[0]) if gpus else contextlib.nullcontext()
            with below(), device, streams():
                for k in raw:  # Triton reads memory as it is
                    args[k] = generated.without_lazy_bits(args[k])  # type: ignore[arg-type]
                if in_list:
                    return tuple(run(args))
                given = list(args)
                args.clear()
                return tuple(run(*given))

        call._boxed_call = True  # type: ignore[attr-defined]
        self._call = compat.tracing.untraced(call)

    def __call__(self, *args: object) -> tuple[object, ...]:
        return self._call(list(args))

    @property
    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]:
        """The same program with its inputs in one list."""
        return self._call


def _read_by_kernels(program: ins.WrapperProgram) -> list[int]:
    """Positions of the tensors that kernels read and nothing else touches."""
    users: dict[str, list[ins.Instr]] = {}
    for i in program.body:
        for name in used(i):
            users.setdefault(name, []).append(i)
    return [
        k
        for k, given in enumerate(program.inputs)
        if isinstance(given, ins.TensorInput)
        and all(
            isinstance(i, ins.Launch) and given.name not in i.outs
            for i in users.get(given.name, ())
        )
    ]


def boxed(module: GraphModule) -> Callable[[list[object]], Any]:
    """The module's function with its inputs in one list, which it empties: an input dies after its
    last use."""
    made = module.graph.python_code("self")
    tree = ast.parse(made.src)
    (forward,) = (s for s in tree.body if isinstance(s, ast.FunctionDef))
    names = [a.arg for a in forward.args.args[1:]]
    given = max(["inputs", *names], key=len) + "_"  # another name than theirs
    forward.args.args[1:] = [ast.arg(given)]
    unpack = f"{', '.join(names)}, = {given}\n" if names else ""
    forward.body[:0] = ast.parse(f"{unpack}{given}.clear()").body
    source = ast.unparse(ast.fix_missing_locations(tree))
    run = partial(executed(source, "graph", dict(made.globals), forward.name), module)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def make_fx(program: ins.WrapperProgram, artifacts: Artifacts) -> GraphModule:
    """The graph of a program; every node has its fake value in meta['val'] where that is known."""
    return _made(program, artifacts)[0]


def fx_lines(
    program: ins.WrapperProgram, artifacts: Artifacts
) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines of the graph's code that it becomes."""
    module, ends = _made(program, artifacts)
    code = [s.strip().partition(";  ")[0] for s in module.code.splitlines()]
    lines = {"output" if s.startswith("return") else s.partition(" = ")[0]: s for s in code}
    nodes = [n for n in module.graph.nodes if n.op != "placeholder"]
    starts = [0, *ends]
    return [
        (i, [lines[n.name] for n in nodes[start:end]])
        for i, start, end in zip(program.body, starts, ends, strict=False)
    ]


def _made(program: ins.WrapperProgram, artifacts: Artifacts) -> tuple[GraphModule, list[int]]:
    """The graph, and how many nodes there were, inputs not counted, after each instruction."""
    g, ends = FxGraph(program, artifacts), []
    for k, nested in enumerate(program.programs):
        g.root.add_module(f"program{k}", make_fx(nested, artifacts))
    with g.fakes.active():
        for i in program.inputs:
            add_input(g, i)
        for instruction in program.body:
            add_instruction(g, instruction)
            ends.append(len(g.graph.nodes) - len(program.inputs))
    module = GraphModule(g.root, g.graph, program.name)
    compat.tracing.drop_text_with(module)
    module.graph.lint()
    return module, ends
