"""The pipeline: one captured graph in, one compiled program out; a step a line, read from top to
bottom.

Every step is a function from data to data, run by `log.PassLog`, which times it and, when
`Config.verifies`, checks what it made. A constraint on order is a comment on its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Protocol

import torch
from torch._ops import OpOverload
from torch.fx import Node

from plait import _native, compat
from plait.compat.recompiles import current_compile
from plait.config import Config
from plait.devices import DEVICES, facts_of
from plait.errors import Fallback, RefusedKernel, warn_once
from plait.graph.captured import Captured
from plait.graph.refused_kernels import refuse_kernels
from plait.ir.calls import UserKernel, Variant, all_programs
from plait.kernel.target import Source
from plait.kernel.targets import TARGETS as KERNELS
from plait.log import PassLog
from plait.lower.calls import where_of
from plait.lower.extern import op_name
from plait.lower.graph import Lowered, load_rules, lower_graph
from plait.pipelines import (
    VERIFIERS,
    Kernels,
    clean_graph,
    left_out,
    make_kernels,
    run_passes,
    schedule,
)
from plait.runtime.process import workers
from plait.runtime.store import Built
from plait.runtime.toolchain import check_isa
from plait.schedule.cost import buffer_nbytes
from plait.schedule.plan import Plan, launching_calls, launching_devices
from plait.wrapper import show
from plait.wrapper.build import build
from plait.wrapper.checks import check_finite
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.measure import measured
from plait.wrapper.partition import partition
from plait.wrapper.passes.inline_programs import inline_programs
from plait.wrapper.program import Artifacts, CompileRecord, Program, Target, observe
from plait.wrapper.streams import keep_memory
from plait.wrapper.targets import TARGETS as WRAPPERS
from plait.wrapper.walk import is_fence
from plait.wrapper.watch import add_hooks

__all__ = ["Program", "compile_graph"]

load_rules()  # now, not while the first graph waits


@dataclass
class Refused:
    """What the compiler of kernels has refused.

    variants: of the user's kernels, and why (`lower.core.Tables`).
    steps: calls of attention, which are written out from then on, and of products.
    """

    variants: dict[tuple[str, Variant], str] = field(default_factory=dict)
    steps: list[Fallback] = field(default_factory=list)


def compile_graph(captured: Captured, cfg: Config, target: Target | None = None) -> Program:
    """Compiles one graph. target: what makes the program run, in place of that of cfg.wrapper.

    Raises Unsupported, with the user's line, for what plait cannot compile, ToolchainMissing where
    the machine cannot build its kernels, and InternalError where a stage broke a rule of its IR.
    """
    with workers(1) as beside:
        steps = compile_steps(captured, cfg, target, beside.submit)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                made: Program = end.value
                return made


class Building(Protocol):
    """Kernels that are being built, beside whoever wants them."""

    def done(self) -> bool:
        """Whether `result` comes at once."""

    def exception(self) -> BaseException | None:
        """What `result` raises, waited for."""

    def result(self) -> dict[str, Built]:
        """By kind of device, waited for. Raises what the build raises."""
        ...


Beside = Callable[[Callable[[], dict[str, Built]]], Building]
"""Begins to build."""
Steps = Generator[Building, None, Program]
"""A compilation that hands out what it waits for next: going on earlier is going on to wait."""


def compile_steps(captured: Captured, cfg: Config, target: Target | None, beside: Beside) -> Steps:
    """`compile_graph` in steps, one for each time that kernels are built."""
    cfg = _as_flags_say(cfg)
    log = PassLog(cfg, captured.name, VERIFIERS)
    if cfg.kernels:
        _find_tools(captured, cfg)
        check_isa(cfg)  # it will run here
    aten_ops = sum(n.op == "call_function" for n in captured.graph.graph.nodes)

    refused = Refused()
    built: dict[str, Built] | None = None
    while built is None:  # again without each kernel that the compiler refuses
        lowered, made = _kernels(captured, cfg, log, refused)
        # Compilers are processes of their own: the wrapper is made while they run.
        building = beside(partial(_build, made.sources, cfg))
        wrapper = _wrap(captured, lowered, made.plan, cfg, log)
        yield building
        built = log("build kernels", _built, building, captured, made, refused, cfg)
    libraries = {kind: b.library for kind, b in built.items()}
    show.show_wrapper(log, wrapper, libraries, lowered.constants, lowered.callables)
    callables = (
        lowered.callables if captured.watcher is None else (*lowered.callables, captured.watcher)
    )
    artifacts = Artifacts(
        libraries, lowered.constants, callables, made.sources, lowered.program.hints, cfg
    )
    loaded = log("load", target or WRAPPERS[cfg.wrapper], wrapper, artifacts)
    loaded = measured(log, loaded, wrapper, libraries, lowered.constants)

    record = CompileRecord(
        name=captured.name,
        kind=captured.kind,
        target=cfg.wrapper,
        plan=made.plan,
        wrapper=wrapper,
        aten_ops=aten_ops,
        times_ms=log.times_ms,
        kernel_source="\n".join(s.text for s in made.sources.values()),
        cache_hit=all(b.hit for b in built.values()) if built else None,
        tuned=made.notes,
        ladder=(*captured.ladder, *refused.steps, *lowered.steps),
        wrapper_reason=captured.wrapper_reason,
        numerics=cfg.numerics,
        batch_invariant=cfg.batch_invariant,
        modules=_modules(captured, lowered),
        input_names=captured.input_names,
        result_names=captured.result_names,
        compile_id=current_compile(),
    )
    observe(record)
    return Program(loaded, loaded.boxed, record)


def compile_texts(
    captured: Captured, cfg: Config, log: PassLog | None = None
) -> tuple[WrapperProgram, Artifacts]:
    """What a compile makes up to its program, and the files of cfg.debug_dir; nothing is built or
    loaded, so the graph may be for a machine that is not this one. log: one that is read later."""
    cfg = _as_flags_say(cfg)
    log = log or PassLog(cfg, captured.name, VERIFIERS)
    lowered, made = _kernels(captured, cfg, log)
    wrapper = _wrap(captured, lowered, made.plan, cfg, log)
    show.show_wrapper(log, wrapper, {}, lowered.constants, lowered.callables)
    return wrapper, Artifacts(
        {}, lowered.constants, lowered.callables, made.sources, lowered.program.hints, cfg
    )


@dataclass(frozen=True)
class Portable:
    """A graph compiled for a machine that need not be this one. machine: its vector instructions,
    its GPU or both, such as "avx2+sm_90". kernels: by kind of device. constants: the table that
    wrapper numbers. steps: the first call of each operator without a kernel, and why. Wrappers that
    are equal are one object."""

    machine: str
    wrapper: WrapperProgram
    kernels: Mapping[str, Built]
    constants: Sequence[torch.Tensor]
    constant_devices: tuple[str, ...]
    steps: Sequence[Fallback]


def compile_portable(
    captured: Captured, cfg: Config, isas: Sequence[str], archs: Sequence[str]
) -> list[Portable]:
    """Compiles one graph for every machine with one of isas and one of archs, as far as it has
    kernels that depend on them: planned once, kernels built side by side. Raises as compile_graph
    does."""
    cfg = _as_flags_say(cfg)
    log = PassLog(cfg, captured.name, VERIFIERS)
    if cfg.kernels:
        _find_tools(captured, cfg)
    lowered, plan = _plan(captured, cfg, log)
    kinds = {d.partition(":")[0] for d in launching_devices(plan)}
    on_gpu = any(not facts_of(b.device).is_host for b in lowered.program.buffers.values())
    anywhere = ("gpu_arch", ["ptx_0"]) if on_gpu else ("isa", isas[-1:])  # without kernels
    machines_of = {"isa": isas, "gpu_arch": archs}
    asked = [facts.machine for kind, facts in DEVICES.items() if kind in kinds]
    rows = [(option, machines_of[option]) for option in asked] or [anywhere]
    machines = list(product(*(found for _, found in rows)))
    cfgs = [
        cfg.with_options({name: m for (name, _), m in zip(rows, found, strict=True)})
        for found in machines
    ]
    made: list[Kernels] = []
    building: list[Future[dict[str, Built]]] = []
    wrappers: list[tuple[Plan, WrapperProgram]] = []
    with workers(len(os.sched_getaffinity(0))) as beside:
        for c in cfgs:
            made.append(make_kernels(plan, c, log))
            building.append(beside.submit(_build, made[-1].sources, c))
        for m in made:
            show.show_sources(log, m.sources, m.notes)
            known = next((w for p, w in wrappers if p == m.plan), None)
            wrappers.append((m.plan, known or _wrap(captured, lowered, m.plan, cfg, log)))
        built = log("build kernels", lambda: [b.result() for b in building])
    show.show_plan(log, wrappers[0][0])
    first = {kind: b.library for kind, b in built[0].items()}
    show.show_wrapper(log, wrappers[0][1], first, lowered.constants, lowered.callables)
    places = {
        k: p.buffers[name].device
        for p in all_programs(lowered.program)
        for name, k in p.constants.items()
    }
    devices = tuple(places.get(k, "") for k in range(len(lowered.constants)))
    return [
        Portable("+".join(machine), wrapper, kernels, lowered.constants, devices, lowered.steps)
        for machine, (_, wrapper), kernels in zip(machines, wrappers, built, strict=True)
    ]


def _modules(captured: Captured, lowered: Lowered) -> dict[str, str]:
    """The module whose code makes a buffer, of the nodes of the graph: `model.h.0.mlp`. A sum of
    gradients is of the module from whose backward pass the last of them comes."""
    paths: dict[str, str] = {}
    known = cache(lambda told: re.sub(r"^[LG]\[.*?\]\.?", "", told))
    for n in captured.graph.graph.nodes:
        if stack := n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack"):
            paths[n.name] = known(stack[next(reversed(stack))][0])
        elif n.meta.get("is_gradient_acc"):
            terms = (paths.get(m.name, "") for m in reversed(n.all_input_nodes))
            paths[n.name] = next(filter(None, terms), "")
    made = {**lowered.makers, **lowered.nodes}
    return {buf: paths[node] for buf, node in made.items() if paths.get(node)}


def _as_flags_say(cfg: Config) -> Config:
    """Under deterministic algorithms nothing is measured: which tile is faster may differ from one
    process to the next, and with it the order of sums."""
    if cfg.autotune and torch.are_deterministic_algorithms_enabled():
        warn_once("plait measures no kernels while torch.use_deterministic_algorithms is on")
        return replace(cfg, autotune=False)
    return cfg


def _plan(
    captured: Captured, cfg: Config, log: PassLog, refused: Refused | None = None
) -> tuple[Lowered, Plan]:
    """The front half, which knows nothing of machines."""
    show.show_given(log, captured)
    captured = log("clean graph", clean_graph, captured, cfg)
    show.show_graph(log, "1_graph.py", captured.graph)
    lowered = log("lower", lower_graph, captured, cfg, refused.variants if refused else {})
    show.show_loops(log, lowered.program)
    return lowered, log("schedule", schedule, lowered.program, cfg, log)


def _kernels(
    captured: Captured, cfg: Config, log: PassLog, refused: Refused | None = None
) -> tuple[Lowered, Kernels]:
    """The front half, and the sources of its kernels."""
    lowered, plan = _plan(captured, cfg, log, refused)
    made = make_kernels(plan, cfg, log)
    lost = {name.rpartition(".")[2] for name in made.lost}
    if lost and refuse_kernels(captured.graph, lost):  # their operators are faster
        lowered, plan = _plan(captured, cfg, log, refused)
        notes = made.notes
        made = make_kernels(plan, cfg, log)
        made = replace(made, notes=(*notes, *made.notes))
    show.show_plan(log, made.plan)
    show.show_sources(log, made.sources, made.notes)
    return lowered, made


def _built(
    building: Building, captured: Captured, made: Kernels, refused: Refused, cfg: Config
) -> dict[str, Built] | None:
    """The kernels; None: the compiler refuses one of the user's, of attention or of a product,
    which is among refused now."""
    try:
        return building.result()
    except RefusedKernel as error:
        if cfg.strict:
            raise
        why = f"its compiler refused it: {error.what.splitlines()[-1]}"
        calls = [c for p in all_programs(made.plan) for c in launching_calls(p)]
        users = [c.kernel for c in calls if c.op.startswith("triton::")]
        kernels = [k for k in users if isinstance(k, UserKernel) and k.name == error.kernel]
        refused.variants.update({(k.text, v): why for k in kernels for v in k.variants})
        symbols = (row for s in made.sources.values() for row in s.entry_points.items())
        names = {n.rpartition(".")[2] for n, symbol in symbols if symbol == error.kernel}
        templates = refuse_kernels(captured.graph, set() if kernels else names)
        for n in templates:
            refused.steps.append(_step_without_kernel(n, why))
            warn_once(f"plait does without a kernel for {refused.steps[-1].line}")
        if not kernels and not templates:
            raise
        return None


def _step_without_kernel(n: Node, why: str) -> Fallback:
    """A call of attention is written out, one of a product made."""
    if isinstance(n.target, OpOverload):
        return Fallback("aten", op_name(n.target), why, where_of(n))
    return Fallback("operators", f"higher_order::{n.target}", why, where_of(n))


def _wrap(
    captured: Captured, lowered: Lowered, plan: Plan, cfg: Config, log: PassLog
) -> WrapperProgram:
    """The instructions around kernels."""
    wrapper = log(
        "build wrapper", build, plan, captured.name, captured.bumped_inputs, cfg, captured.guarded
    )
    # Whole tables are handed over, also what no instruction refers to any more.
    n_constants, n_callables = len(lowered.constants), len(lowered.callables)
    wrapper = replace(wrapper, n_constants=n_constants, n_callables=n_callables)
    if cfg.nan_asserts or cfg.finite_asserts:
        wrapper = log("finite checks", check_finite, wrapper, cfg.finite_asserts)
    if captured.watcher is not None:
        wrapper = log("hooks", add_hooks, wrapper, lowered.nodes)
    if any(map(is_fence, wrapper.body)):
        devices = {n: b.device for n, b in {**lowered.program.buffers, **plan.buffers}.items()}
        wrapper = log("keep memory", keep_memory, wrapper, devices)
    off = left_out(cfg)
    # Before passes, which then see the whole program.
    if cfg.cuda_graphs and "inline programs" not in off:
        wrapper = log("inline programs", inline_programs, wrapper, lowered.constants)
    shown = partial(show.show_pass, log)
    wrapper = log("wrapper passes", run_passes, wrapper, cfg.verifies, shown, off)
    if cfg.cuda_graphs and "partition" not in off:  # last: other passes know nothing of partitions
        nbytes = {n: buffer_nbytes(b, lowered.program.hints) for n, b in plan.buffers.items()}
        wrapper = log(
            "partition",
            partition,
            wrapper,
            lowered.constants,
            captured.n_results,
            nbytes,
            _spent(captured),
            _native.has_conditional_nodes(),
        )
    return wrapper


def _spent(captured: Captured) -> set[str]:
    """Inputs of a backward program that nobody needs after it: what was saved for it, and
    gradients."""
    if captured.kind != "backward":
        return set()
    given = captured.graph.graph.find_nodes(op="placeholder")
    tangents = [k for k, n in enumerate(given) if compat.autograd.is_tangent(n)]
    return {f"arg{k}" for k in (*captured.donated_inputs, *tangents)}


def _build(sources: Mapping[str, Source], cfg: Config) -> dict[str, Built]:
    # An FX graph holds a GPU's kernels as text.
    kinds = [k for k in sources if cfg.wrapper != "fx" or facts_of(k).is_host]
    return {kind: KERNELS[kind].build(sources[kind], cfg) for kind in kinds}


def _find_tools(captured: Captured, cfg: Config) -> None:
    """Raises ToolchainMissing, before anything else is done, where the machine lacks what kernels
    for the graph's devices are built with."""
    values = [n.meta.get("val") for n in captured.graph.graph.nodes if n.op == "placeholder"]
    kinds = {v.device.type for v in values if isinstance(v, torch.Tensor)} & {*KERNELS}
    # The CPU, first in the table, has only numbers where there is another device.
    KERNELS[max(kinds, key=[*KERNELS].index, default="cpu")].find_tools(cfg)
