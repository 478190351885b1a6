"""From loops to kernels: dependences, inlining, fusion, order, memory.

Comes in: a LoopProgram. Goes out: a Plan. `schedule` is the list of steps; each step takes and
gives data that can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from plait.config import Config
from plait.ir.loops import LoopProgram
from plait.schedule.assemble import make_plan
from plait.schedule.deps import Bodies, drop_dead
from plait.schedule.fuse import fuse
from plait.schedule.grouping import group_loops
from plait.schedule.horizontal import fuse_horizontally
from plait.schedule.inline import inline_loops
from plait.schedule.layout import settle_layouts
from plait.schedule.memory import plan_memory
from plait.schedule.normal import normalise
from plait.schedule.order import order
from plait.schedule.plan import Plan
from plait.schedule.split import split_reductions

P = ParamSpec("P")
T = TypeVar("T")


class Log(Protocol):
    """Runs one named step (plait.log.PassLog does)."""

    def __call__(self, step: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args, **kwargs)."""
        ...


class _Quiet:
    def __call__(self, step: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)


LOOP_STEPS = ("drop dead loops", "normal form", "inline", "drop inlined loops", "settle layouts")
"""The steps of `schedule` that give a loop program."""


def schedule(program: LoopProgram, cfg: Config, log: Log | None = None) -> Plan:
    """The plan of a program. log: runs and times each step."""
    log = log or _Quiet()
    bodies = Bodies()
    loops = log("drop dead loops", drop_dead, program, bodies)
    loops = log("normal form", normalise, loops, bodies)
    loops = log("inline", inline_loops, loops, cfg, bodies)
    loops = log("drop inlined loops", drop_dead, loops, bodies)
    loops = log(
        "settle layouts", settle_layouts, loops, bodies
    )  # before splitting, which asks what is contiguous
    split = log("split reductions", split_reductions, loops, bodies)
    grouping = log("group loops", group_loops, split, bodies)
    grouping = log("fuse", fuse, grouping, cfg)
    ordered = log("order", order, grouping)
    # After the order is known: it must not let more memory be alive at once.
    ordered = log("fuse horizontally", fuse_horizontally, grouping, ordered, cfg)
    plan = log("make plan", make_plan, grouping, ordered)
    return log("plan memory", plan_memory, plan, cfg)


__all__ = ["LOOP_STEPS", "Log", "Plan", "schedule"]
