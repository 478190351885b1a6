"""A captured ATen graph becomes one LoopProgram.

Comes in: `Captured`. Goes out: `Lowered`. `lower_graph` is the pipeline: `inputs.py` declares
inputs and finds a source for each symbol, `calls.py` lowers each call by the ladder (a rule, else a
call of ATen or of Python), `results.py` says what the program returns.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.fx

from plait.config import Config
from plait.errors import Fallback, InexpressibleSize, Unsupported
from plait.graph.captured import Captured
from plait.graph.edit import shape_env_of
from plait.ir import expr, loops
from plait.ir.calls import Extern, Variant
from plait.ir.loops import LoopProgram
from plait.lower.calls import Calls, lower_call, where_of
from plait.lower.core import Lowering, Tables, View
from plait.lower.found_numbers import FoundNumbers
from plait.lower.inputs import Inputs, add_constant, add_input, define_symbols, example_sizes
from plait.lower.integers import define_functions
from plait.lower.memory import finish_mutations
from plait.lower.results import Result, lower_results
from plait.lower.symbols import number_functions
from plait.lower.wide import take_out_wide

# A process that compiles without end must not grow without end: about 100 MB of expressions and
# nodes.
# A bound on memory, not a result of measuring.
_MAX_INTERNED = 200_000


@dataclass(frozen=True)
class Lowered:
    """A program, and what it refers to by number.

    constants, callables: the tables that it and its subprograms number.
    fallbacks: how often each op became an extern call for want of a rule.
    steps: the first such call of each op, and why.
    nodes: buffer -> the FX node whose value it is.
    makers: buffer -> the FX node in whose computation it is made; "" if in none.
    """

    program: LoopProgram
    constants: tuple[torch.Tensor, ...]
    callables: tuple[object, ...]
    fallbacks: Mapping[str, int]
    steps: tuple[Fallback, ...]
    nodes: Mapping[str, str]
    makers: Mapping[str, str]

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons of steps, by op."""
        return {step.what: step.reason for step in self.steps}


@cache
def load_rules() -> None:
    """Imports every module of plait.lower, which registers its rules."""
    import plait.lower as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def lower_graph(
    captured: Captured, cfg: Config, refused: Mapping[tuple[str, Variant], str] | None = None
) -> Lowered:
    """The LoopProgram of a graph. refused: see `Tables`. Raises Unsupported, with the user's line,
    where neither a rule nor an extern call will do."""
    load_rules()
    if expr.interned() > _MAX_INTERNED:
        expr.forget()
        loops.forget()
    return _lower(captured, cfg, Tables(refused=refused or {}))


def _lower(captured: Captured, cfg: Config, tables: Tables) -> Lowered:
    def lower_nested(graph: torch.fx.GraphModule, name: str) -> LoopProgram:
        nested = _lower(Captured(graph, name, "subprogram"), cfg, tables)
        ctx.fell_back_within(nested.steps)
        return nested.program

    ctx = Lowering(captured.name, cfg, tables, lower_nested)
    ctx.donated = frozenset(f"arg{k}" for k in captured.donated_inputs)
    nodes = list(captured.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    shape_env = shape_env_of([n.meta.get("val") for n in placeholders])
    ctx.functions = number_functions(shape_env)
    inputs = Inputs(expands=captured.kind != "subprogram")
    for node in placeholders:
        ctx.env[node] = add_input(ctx, inputs, node)
    define_symbols(ctx, inputs)
    calls = Calls(ctx, FoundNumbers(ctx))
    results: tuple[Result, ...] = ()
    for node in nodes:
        if node.op == "call_function":
            ctx.env[node] = lower_call(calls, node)
            _note_strides(ctx, node)
        elif node.op == "get_attr":
            ctx.env[node] = add_constant(ctx, inputs, captured.graph, node)
        elif node.op == "output":
            results = lower_results(ctx, captured, inputs, placeholders, node)
            finish_mutations(ctx)
            for fence in calls.last_fences:
                lower_call(calls, fence)
        elif node.op != "placeholder":
            raise Unsupported(f"a graph node of kind {node.op}", where=where_of(node))
    return _lowered(captured, ctx, inputs, shape_env, results)


def _note_strides(ctx: Lowering, node: torch.fx.Node) -> None:
    x, val = ctx.env[node], node.meta.get("val")
    if not isinstance(x, View) or not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return
    if ctx.is_whole(x) and all(type(s) is int for s in val.stride()):
        ctx.traced.setdefault(x.buf, val.stride())


def _lowered(
    captured: Captured,
    ctx: Lowering,
    inputs: Inputs,
    shape_env: object,
    results: tuple[Result, ...],
) -> Lowered:
    define_functions(ctx)
    ops, wide = take_out_wide(ctx.ops, ctx.buffers.values(), ctx.symbols)
    ctx.symbols |= wide
    donated = (inputs.names[k] for k in captured.donated_inputs)
    program = LoopProgram(
        tuple(inputs.names), ctx.buffers, ctx.constants, tuple(ops), results, ctx.symbols,
        tuple(name for name in donated if isinstance(name, str)),
        example_sizes(ctx, inputs, shape_env, wide), tuple(ctx.programs.values()),
    )  # fmt: skip
    _check_symbols(program)
    counts = Counter(op.op for op in ctx.ops if isinstance(op, Extern) and op.fallback)
    values = reversed(ctx.env.items())  # of nodes with one value the first counts
    return Lowered(
        program,
        tuple(ctx.tables.constants),
        tuple(ctx.tables.callables),
        dict(counts),
        ctx.steps(),
        {x.buf: n.name for n, x in values if isinstance(x, View) and ctx.is_whole(x)},
        ctx.makers,
    )


def _check_symbols(program: LoopProgram) -> None:
    """Every symbol in the shape of a buffer has a source. Raises Unsupported."""
    for buf in program.buffers.values():
        for e in (e for e in (*buf.shape, *buf.strides) if type(e) is not int):
            for atom in expr.free_symbols(e):
                if atom.name not in program.symbols:
                    raise InexpressibleSize(
                        f"no input tells the value of the size symbol {atom.name} (in {e})",
                        hint="pass a tensor that has this size by itself, or mark it static",
                        symbols=(atom.name,),
                    )
