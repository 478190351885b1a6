"""Every stage of a compilation in readable form: files of the debug folder, lines of the debug
ladder.

In: the data of a stage and the graph's `PassLog`, which knows who wants to see it. The files of one
graph, in order: 0_given.json with 0_given.pt, which `plait replay` compiles again, 0_captured.py,
1_graph.py (FX), 2_loops.txt (before fusion), 3_plan.txt (after), 4_kernels.cpp (4_kernels_cuda.py
for a GPU), 5_wrapper.txt and 6_module.py with 6_constants.pt, which runs by itself. docs/debug.md
describes them. Nothing is built that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from plait.devices import facts_of
from plait.graph.captured import Captured
from plait.graph.text import given_text, tensors_of
from plait.ir.loops import LoopProgram
from plait.ir.text import program_text
from plait.kernel.target import Source
from plait.log import IR, KERNELS, REASONS, SOURCE, PassLog
from plait.runtime.load import Libraries
from plait.schedule.plan import Plan
from plait.schedule.text import plan_text, refusal_lines, summary_lines
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.text import text

CONSTANTS = "6_constants.pt"
GIVEN, GIVEN_TENSORS = "0_given.json", "0_given.pt"


def show_given(log: PassLog, captured: Captured) -> None:
    """The graph as it came in, before any pass changes it: as data that reads back, and as Python
    to read."""
    if log.folder is not None:
        log.dump(GIVEN, lambda: given_text(captured, log.cfg))
        _save(log, GIVEN_TENSORS, tensors_of(captured.graph))
    show_graph(log, "0_captured.py", captured.graph)


def show_graph(log: PassLog, filename: str, graph: torch.fx.GraphModule) -> None:
    """An FX graph as the Python that torch prints, with shapes and source lines."""

    def readable() -> str:
        printed: str = graph.print_readable(
            print_output=False, include_stride=True, include_device=False
        )
        return printed

    log.dump(filename, readable)
    if log.shows(IR):
        log.note(IR, f"{log.name}: {filename}\n{readable()}")


def show_loops(log: PassLog, program: LoopProgram) -> None:
    """The loops before fusion."""
    log.dump("2_loops.txt", lambda: program_text(program))
    if log.shows(IR):
        log.note(IR, f"{log.name}: loops\n{program_text(program)}")


def show_plan(log: PassLog, plan: Plan) -> None:
    """What was fused: one line a kernel, then what stayed apart and why, then the loop nests."""
    log.dump("3_plan.txt", lambda: plan_text(plan))
    if log.shows(KERNELS):
        for line in summary_lines(plan):
            log.note(KERNELS, f"{log.name}: {line}")
    if log.shows(REASONS):
        for line in refusal_lines(plan):
            log.note(REASONS, f"{log.name}: {line}")
    if log.shows(IR):
        log.note(IR, f"{log.name}: plan\n{plan_text(plan)}")


def show_sources(log: PassLog, sources: Mapping[str, Source], notes: Sequence[str]) -> None:
    """The kernels' source as their compilers see it, and what measuring found. sources: by kind of
    device."""
    for kind, source in sources.items():
        log.dump(facts_of(kind).kernel_file, source.text)
        if log.shows(SOURCE):
            log.note(SOURCE, f"{log.name}: kernels\n{source.text}")
    for line in notes:
        log.note(KERNELS, f"{log.name}: {line}")


def show_pass(log: PassLog, name: str, program: WrapperProgram) -> None:
    """The wrapper program after one of its passes."""
    if log.shows(IR):
        log.note(IR, f"{log.name}: wrapper after {name}\n{text(program)}")


def show_wrapper(
    log: PassLog,
    program: WrapperProgram,
    libraries: Libraries,
    constants: Sequence[torch.Tensor],
    callables: Sequence[Any],
) -> None:
    """The final wrapper program, as a Python module that runs by itself too, and as the C++ that
    runs if so."""
    if not log.writes:
        return
    # Most compiles are for the native target and shown to nobody.
    from plait.wrapper.calltext import CallTexts
    from plait.wrapper.cpp import make_cpp
    from plait.wrapper.python import make_python

    calls = CallTexts(callables, list(constants))
    constants = calls.constants
    saved = CONSTANTS if constants else ""
    log.dump("5_wrapper.txt", lambda: text(program))
    log.dump("6_module.py", lambda: make_python(program, libraries, saved, calls))
    if log.cfg.wrapper == "cpp":
        log.dump("6_program.cpp", lambda: make_cpp(program))
    _save(log, CONSTANTS, dict(enumerate(constants)))
    if log.shows(SOURCE):
        log.note(SOURCE, f"{log.name}: wrapper\n{make_python(program, libraries, saved, calls)}")


def _save(log: PassLog, filename: str, tensors: Mapping[Any, torch.Tensor]) -> None:
    if not tensors or log.folder is None:
        return
    with torch.utils._python_dispatch._disable_current_modes():  # they are no fake tensors
        try:
            torch.save({name: t.detach() for name, t in tensors.items()}, log.folder / filename)
        except (OSError, RuntimeError) as error:
            log.give_up(error)
