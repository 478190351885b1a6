"""The pipeline: one captured graph in, one compiled program out; a step a line, read from top to bottom.

Every step is a function from data to data, run by `log.PassLog`, which times it and, when `Config.verifies`, checks
what it made. A constraint on order is a comment on its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.clean import clean_graph
from plait.ir.verify import verify as verify_loops
from plait.kernel.target import Source
from plait.kernel.targets import TARGETS as KERNELS
from plait.log import PassLog
from plait.lower.graph import Lowered, load_rules, lower_graph
from plait.runtime.cubin import triton_version
from plait.runtime.store import Built
from plait.runtime.toolchain import find_toolchain
from plait.schedule import schedule
from plait.schedule.layout import unaligned
from plait.schedule.plan import Kernel, Plan
from plait.schedule.verify import verify_plan
from plait.wrapper import show
from plait.wrapper.build import build
from plait.wrapper.checks import check_finite
from plait.wrapper.measure import measured
from plait.wrapper.partition import partition
from plait.wrapper.passes import run_passes
from plait.wrapper.program import CompileRecord, Parts, Program, Target, observe
from plait.wrapper.targets import TARGETS as WRAPPERS
from plait.wrapper.watch import add_hooks

__all__ = ["Program", "compile_graph"]

load_rules()  # now, not while the first graph waits


def compile_graph(captured: Captured, cfg: Config, target: Target | None = None) -> Program:
    """Compiles one graph. target: what makes the program run, in place of that of cfg.wrapper.

    Raises Unsupported, with the user's line, for what plait cannot compile, ToolchainMissing where the machine cannot
    build its kernels, and InternalError where a stage broke a rule of its IR.
    """
    log = PassLog(cfg, captured.name, {"lower": _verify_loops, "schedule": verify_plan})
    if cfg.kernels:
        _find_tools(captured, cfg)
    aten_ops = sum(n.op == "call_function" for n in captured.graph.graph.nodes)

    show.show_graph(log, "0_captured.py", captured.graph)
    captured = log("clean graph", clean_graph, captured, cfg)
    show.show_graph(log, "1_graph.py", captured.graph)
    lowered = log("lower", lower_graph, captured, cfg)
    show.show_loops(log, lowered.program)
    plan = log("schedule", schedule, lowered.program, cfg, log)
    sources = log("emit kernels", _emit, plan, cfg)
    plan = _name_kernels(plan, sources)  # equal kernels now have one name
    show.show_plan(log, plan)
    show.show_sources(log, sources)
    with ThreadPoolExecutor(1) as beside:  # compilers are processes of their own: the wrapper is made while they run
        building = beside.submit(_build, sources, cfg)
        wrapper = log("build wrapper", build, plan, captured.name, captured.bumped_inputs, cfg)
        if cfg.nan_asserts or cfg.finite_asserts:
            wrapper = log("finite checks", check_finite, wrapper, cfg.finite_asserts)
        callables = lowered.callables
        if captured.watcher is not None:
            wrapper = log("hooks", add_hooks, wrapper, lowered.nodes)
            callables = (*callables, captured.watcher)
        wrapper = log("wrapper passes", run_passes, wrapper, cfg.verifies, partial(show.show_pass, log))
        if cfg.cuda_graphs:  # last: other passes know nothing of partitions
            wrapper = log("partition", partition, wrapper, lowered.constants, captured.n_results)
        built = log("build kernels", building.result)
    libraries = {kind: str(b.path) for kind, b in built.items()}
    show.show_wrapper(log, wrapper, libraries, lowered.constants)
    parts = Parts(libraries, lowered.constants, callables, sources, lowered.program.hints, cfg)
    loaded = log("load", target or WRAPPERS[cfg.wrapper], wrapper, parts)
    loaded = measured(log, loaded, wrapper, libraries, lowered.constants)

    record = CompileRecord(
        name=captured.name,
        kind=captured.kind,
        target=cfg.wrapper,
        plan=plan,
        wrapper=wrapper,
        aten_ops=aten_ops,
        times_ms=log.times_ms,
        kernel_source="\n".join(s.text for s in sources.values()),
        cache_hit=all(b.hit for b in built.values()) if built else None,
        tuned=tuple(note for s in sources.values() for note in s.notes),
        fallback_reasons=lowered.reasons,
        wrapper_reason=captured.wrapper_reason,
    )
    observe(record)
    return Program(loaded, loaded.boxed, record)


def _verify_loops(lowered: Lowered) -> None:
    verify_loops(lowered.program, "lower")


def _emit(plan: Plan, cfg: Config) -> dict[str, Source]:
    """The sources of all kernels, by kind of device."""
    kinds: dict[str, list[Kernel]] = {}
    for s in plan.steps:
        if isinstance(s, Kernel):
            kinds.setdefault(s.device.partition(":")[0], []).append(s)
    anywhere = unaligned(plan)
    return {kind: KERNELS[kind].emit(kernels, anywhere, cfg) for kind, kernels in kinds.items()}


def _build(sources: Mapping[str, Source], cfg: Config) -> dict[str, Built]:
    # An FX graph holds a GPU's kernels as text.
    kinds = sources if cfg.wrapper != "fx" else sources.keys() & {"cpu"}
    return {kind: KERNELS[kind].build(sources[kind], cfg) for kind in kinds}


def _name_kernels(plan: Plan, sources: Mapping[str, Source]) -> Plan:
    names = {k: n for source in sources.values() for k, n in source.entry_points.items()}
    grids = {k: g for source in sources.values() for k, g in source.grids.items()}
    steps = (
        replace(s, name=names[s.name], grid=grids.get(s.name, 1)) if isinstance(s, Kernel) else s for s in plan.steps
    )
    return replace(plan, steps=tuple(steps))


def _find_tools(captured: Captured, cfg: Config) -> None:
    """Raises ToolchainMissing, before anything else is done, where the machine lacks what kernels for the graph's
    devices are built with."""
    values = [n.meta.get("val") for n in captured.graph.graph.nodes if n.op == "placeholder"]
    if any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values):
        triton_version()
    else:
        find_toolchain(cfg)
