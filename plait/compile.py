"""The pipeline: one captured graph in, one compiled program out; a step a line, read from top to bottom.

Every step is a function from data to data, run by `log.PassLog`, which times it and, when `Config.verifies`, checks
what it made. A constraint on order is a comment on its line.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial

from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.clean import clean_graph
from plait.ir.verify import verify as verify_loops
from plait.kernel.cpp import emit_library
from plait.kernel.target import Source
from plait.log import PassLog
from plait.lower.graph import Lowered, load_rules, lower_graph
from plait.runtime.cache import Built, get_or_build
from plait.runtime.toolchain import Toolchain, ToolchainMissing, find_toolchain
from plait.schedule import schedule
from plait.schedule.plan import Kernel, Plan
from plait.schedule.verify import verify_plan
from plait.wrapper import show
from plait.wrapper.build import build
from plait.wrapper.measure import measured
from plait.wrapper.passes import run_passes
from plait.wrapper.program import CompileRecord, Program, observe
from plait.wrapper.targets import TARGETS

__all__ = ["Program", "compile_graph"]

load_rules()  # now, not while the first graph waits


def compile_graph(captured: Captured, cfg: Config) -> Program:
    """Compiles one graph.

    Raises Unsupported, with the user's line, for what plait cannot compile, and InternalError where a stage broke a
    rule of its IR.
    """
    log = PassLog(cfg, captured.name, {"lower": _verify_loops, "schedule": verify_plan})
    toolchain = _toolchain(cfg)
    if toolchain is None:
        cfg = replace(cfg, kernels=False)
    aten_ops = sum(n.op == "call_function" for n in captured.graph.graph.nodes)

    show.show_graph(log, "0_captured.py", captured.graph)
    captured = log("clean graph", clean_graph, captured)
    show.show_graph(log, "1_graph.py", captured.graph)
    lowered = log("lower", lower_graph, captured, cfg)
    show.show_loops(log, lowered.program)
    plan = log("schedule", schedule, lowered.program, cfg, log)
    source = log("emit kernels", _emit, plan, toolchain)
    plan = _name_kernels(plan, source)  # equal kernels now have one name
    show.show_plan(log, plan)
    show.show_source(log, source.text)
    library = log("build kernels", _build, source, toolchain, cfg)
    wrapper = log("build wrapper", build, plan, captured.name, captured.bumped_inputs)
    wrapper = log("wrapper passes", run_passes, wrapper, cfg.verifies, partial(show.show_pass, log))
    path = None if library is None else str(library.path)
    show.show_wrapper(log, wrapper, path, lowered.constants)
    loaded = log("load", TARGETS[cfg.wrapper], wrapper, path, lowered.constants, lowered.callables)
    loaded = measured(log, loaded, wrapper, path, lowered.constants)

    record = CompileRecord(
        name=captured.name,
        kind=captured.kind,
        target=cfg.wrapper,
        plan=plan,
        wrapper=wrapper,
        aten_ops=aten_ops,
        times_ms=log.times_ms,
        kernel_source=source.text,
        cache_hit=None if library is None else library.hit,
        fallback_reasons=lowered.reasons,
        wrapper_reason=captured.wrapper_reason,
    )
    observe(record)
    return Program(loaded, loaded.boxed, record)


def _verify_loops(lowered: Lowered) -> None:
    verify_loops(lowered.program, "lower")


def _emit(plan: Plan, toolchain: Toolchain | None) -> Source:
    kernels = [s for s in plan.steps if isinstance(s, Kernel)]
    if not kernels:
        return Source("", {})
    assert toolchain is not None, "without a compiler, nothing is lowered to kernels"
    return emit_library(kernels, toolchain.isa)


def _build(source: Source, toolchain: Toolchain | None, cfg: Config) -> Built | None:
    return None if toolchain is None or not source.entry_points else get_or_build(source.text, toolchain, cfg)


def _name_kernels(plan: Plan, source: Source) -> Plan:
    steps = tuple(replace(s, name=source.entry_points[s.name]) if isinstance(s, Kernel) else s for s in plan.steps)
    return replace(plan, steps=steps)


def _toolchain(cfg: Config) -> Toolchain | None:
    """The machine's C++ compiler; without one, None and one warning a process."""
    if not cfg.kernels:
        return None
    try:
        return find_toolchain(cfg)
    except ToolchainMissing as missing:
        _warn_once(str(missing).replace("\n", ";"))
        return None


@cache
def _warn_once(text: str) -> None:
    warnings.warn(f"plait runs every op as a call of ATen: {text}", stacklevel=2)
