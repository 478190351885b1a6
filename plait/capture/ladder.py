"""The lower end of the ladder: what becomes of a graph that the compiler gives up.

A size that no expression stands for is taken for the number that it is in the example, with a guard
of Dynamo's, and the graph is compiled again. Where that is no way, and after a bug of plait's own,
eager runs the graph as it came: Dynamo's graph, or the backward graph that AOTAutograd made of it.
Each step is a `Fallback` in the record, warned of once. With the option 'strict' the error is
raised instead; so it is, always, where Dynamo is not at hand (`plait.compile`, packages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Interpreter, Node

from plait import _native, compat
from plait.capture import dynamo
from plait.capture.aliases import Argument
from plait.capture.checkpoints import run_by_eager
from plait.capture.plain_tensors import forward_mode_level
from plait.capture.program import collector_paused, roomy
from plait.config import Config
from plait.errors import (
    Fallback,
    InexpressibleSize,
    InternalError,
    PlaitError,
    Unsupported,
    warn_once,
)
from plait.graph.captured import GraphKind
from plait.graph.edit import output_of
from plait.ir.dtypes import opaque
from plait.ir.expr import symbol
from plait.log import STAGES, PassLog
from plait.lower import symbols
from plait.lower.dtypes import device_name
from plait.wrapper import instructions as ins
from plait.wrapper.program import Artifacts, CompileRecord, Program, observe
from plait.wrapper.targets import TARGETS

T = TypeVar("T")
Steps = tuple[Fallback, ...]


@roomy
def descend(
    cfg: Config,
    name: Callable[[], str],
    compile_with: Callable[[Steps], T],
    by_eager: Callable[[Steps], T],
) -> T:
    """What compile_with makes, after as many steps down the ladder as it takes; by_eager makes the
    last one. Both are told the steps so far. name: of the graph that compile_with was busy with.

    Raises what is the caller's mistake, and under the option 'strict' what compile_with raises."""
    taken: Steps = ()
    with collector_paused():
        while True:
            try:
                with compat.tracing.transforms_ended():
                    return compile_with(taken)
            except Exception as error:
                if cfg.strict or not _may_descend(error):
                    raise
                found = _specialise(error)
                taken += found or (_last(error, name()),)
            for step in found or taken[-1:]:
                _tell(PassLog(cfg, name()), step)
            if not found:
                return by_eager(taken)


def _may_descend(error: Exception) -> bool:
    """Whether eager may do better: not for a mistake of the caller, nor for what steers Dynamo."""
    if isinstance(error, PlaitError):
        return isinstance(error, (Unsupported, InternalError))
    return not dynamo.steers_dynamo(error)


def _specialise(error: Exception) -> Steps:
    """Makes numbers of the sizes that the error names; no step where that is impossible."""
    if not isinstance(error, InexpressibleSize):
        return ()
    found = dynamo.specialise(error.symbols)
    if found is None:
        return ()
    symbols.forget(found.shape_env)
    sizes = found.values.items()
    return tuple(
        Fallback("specialise", f"{name} = {n}", error.what, error.where) for name, n in sizes
    )


def _last(error: Exception, name: str) -> Fallback:
    """The step to eager. The reason names no graph, so that equal ones are warned of once."""
    if isinstance(error, PlaitError):
        hint = f"; {error.hint}" if isinstance(error, InternalError) else ""
        return Fallback("eager", "the graph", error.what.replace(name, "it") + hint, error.where)
    first = (str(error).splitlines() or [""])[0]
    return Fallback(
        "eager", "the graph", f"capturing it failed with {type(error).__name__}: {first}"
    )


def _tell(log: PassLog, step: Fallback) -> None:
    """A line of the log for every step, a warning for each that differs by more than a number."""
    log.note(STAGES, f"{log.name}: {step.rung} {step.line}")
    at = f" (at {step.where})" if step.where else ""
    how = (
        "eager runs a graph"
        if step.rung == "eager"
        else "compiles a graph anew for each value of a size"
    )
    warn_once(
        f"plait: {how}: {step.reason}{at}; docs/debug.md tells more, options={{'strict': True}} "
        "raises"
    )


# ------------------------------------------------------------------------------ graphs by eager
def whole_graph(
    gm: compat.tracing.DynamoGraph, name: str, kind: GraphKind, taken: Steps
) -> Callable[..., Any]:
    """Dynamo's graph as the callable that Dynamo gets: autograd differentiates what it does."""
    if not isinstance(gm, GraphModule):
        observe(_record(name, kind, n_calls(gm.gm), taken))
        return lambda flat: gm.forward(*flat)
    observe(_record(name, kind, n_calls(gm), taken))
    return run_by_eager(gm)


def at_first_call(gm: GraphModule) -> Callable[..., Any]:
    """Dynamo's graph by eager, made ready when it is first called: that changes the graph."""
    run: Callable[..., Any] | None = None

    def eager(*args: Any) -> Any:
        nonlocal run
        run = run or run_by_eager(gm)
        return run(*args)

    return eager


EagerAtCalls = Callable[[str, str], Callable[..., Any]]
"""(why, what else to do) -> Dynamo's graph for single calls, as `eager_at_calls` makes it."""


def with_tangents(call: Callable[..., Any], eager: EagerAtCalls) -> _native.Tangents:
    """call, which is what Dynamo's graph was compiled to, for arguments without forward-mode
    tangents. Eager takes those that carry one: AOTAutograd traces no tangents and Dynamo guards on
    none. Under the option 'strict' they are Unsupported."""
    by_eager = eager(
        "an argument carries a tangent of forward-mode differentiation",
        "torch.func.jvp inside the compiled function",
    )
    return _native.Tangents(call, by_eager, *forward_mode_level())


def kept_apart(
    call: Callable[..., Any], eager: EagerAtCalls, arguments: Sequence[Argument]
) -> Callable[..., Any]:
    """The same for arguments that share no memory, or do as when they were traced, where one of
    them is written. Eager takes the others: AOTAutograd takes for apart what was so when it traced,
    and some views that are not, and Dynamo guards on few."""
    by_eager = eager(
        "an argument that is written shares memory with another one, as none did when it was "
        "traced",
        "a copy of one of them",
    )
    return _native.Apart(call, by_eager, tuple(arguments))


def eager_at_calls(
    run: Callable[..., Any],
    name: str,
    kind: GraphKind,
    cfg: Config,
    n_ops: int,
    reason: str,
    hint: str,
) -> Callable[..., Any]:
    """run, which is Dynamo's graph by eager, for single calls: their arguments are not what it was
    compiled for."""
    step = Fallback("eager", "the graph", reason)
    told = False

    def eager(*args: Any) -> Any:
        nonlocal told
        if cfg.strict:
            raise Unsupported(reason, hint=hint)
        if not told:
            told = True
            observe(_record(name, kind, n_ops, (step,)))
            _tell(PassLog(cfg, name), step)
        return run(*args)

    return eager


class AsItCame:
    """A graph as it was when this was made, about a microsecond a node: passes edit graphs."""

    def __init__(self, gm: GraphModule) -> None:
        self._owner = gm
        self._rows = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta))
            for n in gm.graph.nodes
        ]

    def module(self) -> GraphModule:
        """The graph, in a module of its own that shares tensors and subgraphs."""
        graph, made = torch.fx.Graph(), dict[Node, Node]()
        for n, op, target, args, kwargs, name, kind, meta in self._rows:
            new_args = torch.fx.node.map_arg(args, made.__getitem__)
            new_kwargs = torch.fx.node.map_arg(kwargs, made.__getitem__)
            made[n] = graph.create_node(op, target, new_args, new_kwargs, name, kind)
            made[n].meta = dict(meta)
        return GraphModule(self._owner, graph)


def backward_graph(gm: GraphModule, name: str, taken: Steps, native: bool, cfg: Config) -> Program:
    """A program that interprets a backward graph. native: an executor's program is wanted, for
    graphs that take sizes and tensors only."""
    program = _one_call(gm, name)
    record = _record(name, "backward", n_calls(gm), taken, program)
    runner = Interpreter(gm)
    runner.extra_traceback = False  # errors are eager's own

    def interpret(*args: Any) -> tuple[Any, ...]:
        return boxed(list(args))

    def boxed(args: list[Any]) -> tuple[Any, ...]:
        with torch.no_grad(), torch._C._DisableAutocast():
            return tuple(copy(runner).boxed_run(args))  # a copy: calls in several threads

    boxed._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
    observe(record)
    if not native:
        return Program(interpret, boxed, record)
    loaded = TARGETS["native"](program, Artifacts({}, callables=(interpret,), cfg=cfg))
    return Program(loaded, loaded.boxed, record)


def _one_call(gm: GraphModule, name: str) -> ins.WrapperProgram:
    """The program that hands all inputs to one Python callable and returns its results."""
    inputs: list[ins.Input] = []
    for k, n in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor):
            inputs.append(ins.TensorInput(f"arg{k}", opaque, (), (), device_name(val.device)))
        elif isinstance(val, (int, torch.SymInt)):
            inputs.append(ins.SymbolInput(f"arg{k}"))
        else:
            inputs.append(ins.OpaqueInput(f"arg{k}"))
    values: Sequence[Any] = output_of(gm.graph).args[0]  # type: ignore[assignment]
    outs = tuple(f"out{k}" if isinstance(v, Node) else None for k, v in enumerate(values))
    args = [symbol(i.name) if isinstance(i, ins.SymbolInput) else ins.Ref(i.name) for i in inputs]
    returned = [ins.Literal("none") if o is None else ins.Ref(o) for o in outs]
    call = ins.CallPython(0, "the graph by eager", tuple(args), (), outs)
    body = call, ins.Return(tuple(returned))
    return ins.WrapperProgram(name, tuple(inputs), body, n_callables=1)


def _record(
    name: str, kind: GraphKind, n_ops: int, taken: Steps, program: ins.WrapperProgram | None = None
) -> CompileRecord:
    # The compiler's: where the program is from an earlier process, nobody has loaded them.
    from plait.ir.loops import LoopProgram
    from plait.schedule.plan import MemoryPlan, Plan

    empty = LoopProgram((), {}, {}, (), (), {})
    return CompileRecord(
        name=name,
        kind=kind,
        target="eager",
        plan=Plan(empty, (), (), {}, MemoryPlan()),
        wrapper=program or ins.WrapperProgram(name, (), (ins.Return(()),)),
        aten_ops=n_ops,
        ladder=taken,
    )


def n_calls(gm: Any) -> int:
    """How many operators a graph calls."""
    calls = ("call_function", "call_method", "call_module")
    return sum(n.op in calls for n in gm.graph.nodes)


# --------------------------------------------------------------- gradients that kernels cannot read
def interpreted_gradients(
    graph: Callable[[], GraphModule], name: str, cfg: Config
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What runs a backward graph where an incoming gradient is not a plain tensor: eager, operator
    by operator, so that PyTorch's rules for such tensors apply. It takes one list of inputs and
    asks for the graph when it is first called. Under the option 'strict' it raises Unsupported."""
    reason = (
        "an incoming gradient is batched, of a tensor subclass or carries a forward-mode tangent"
    )
    step = Fallback("eager", "the graph", reason)
    program: Program | None = None

    def interpret(args: list[Any]) -> tuple[Any, ...]:
        nonlocal program
        if cfg.strict:
            raise Unsupported(reason, hint="the function outside of torch.compile")
        if program is None:
            program = backward_graph(graph(), name, (step,), False, cfg)
            _tell(PassLog(cfg, name), step)
        return program.boxed(args)

    return interpret
