"""What Dynamo tells a back end and what it is told: why graphs end, which functions it left to
eager, and guards on sizes that make it compile anew.

A function that was compiled for too many sizes or values is left to eager by Dynamo, which says so
in a warning of its log only; `watch_limits` reads it there. So is one in which a graph ends where
Dynamo cannot go on after it, as in a loop; `note_skipped` finds these among Dynamo's compiles.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch._dynamo.config as dynamo_config
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons
from torch._guards import CompileContext, TracingContext

from plait import compat
from plait.log import logger

left_to_eager: list[str] = []
"""Functions of this process that Dynamo compiles no more, and why."""


class _Limits(logging.Filter):
    """Reads Dynamo's warning that a function reached the limit of recompilations; lets all
    through."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (
            str(record.msg).startswith("torch._dynamo hit config.")
            and len(args := record.args or ()) >= 4
        ):
            limit, number, function, reason = (str(a).strip() for a in tuple(args)[:4])
            text = (
                f"{function}: compiled {number} times, torch._dynamo.config.{limit}; last "
                f"{reason.splitlines()[0]}"
            )
            if text not in left_to_eager:
                left_to_eager.append(text)
                logger.warning("Dynamo leaves to eager %s", text)
        return True


@cache
def watch_limits() -> None:
    """From now on `left_to_eager` is kept."""
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_Limits())


def note_skipped() -> None:
    """Adds functions that Dynamo gave up at a break, of its last compiles, to `left_to_eager`."""
    for m in get_compilation_metrics():
        if m.fail_type == "Unsupported":
            causes = re.findall(r"(?:\A|\*\*\*\n\n)(.+)", m.fail_reason or "")
            function = f"{m.co_name} ({Path(m.co_filename or '').name}:{m.co_firstlineno})"
            at = f"{Path(m.fail_user_frame_filename or '').name}:{m.fail_user_frame_lineno}"
            if (text := f"{function}: {at}: {', '.join(causes)}") not in left_to_eager:
                left_to_eager.append(text)


@dataclass(frozen=True)
class Specialised:
    """Sizes of a graph that became numbers: by name, and the ShapeEnv that guards them."""

    shape_env: Any
    values: dict[str, int]


def specialise(names: Sequence[str]) -> Specialised | None:
    """Makes the sizes of these names the numbers that they are in the example inputs, each with a
    guard, so that Dynamo compiles anew for others. None, with nothing done, where the guards are
    made by now, a size is known only when the program runs, the user said that it varies, or Dynamo
    will not compile this code again."""
    context = TracingContext.try_get()
    env: Any = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if env is None or env.frozen or _is_last_compile():
        return None
    backed = compat.tracing.backed_values(env)
    found = {s.name: s for s in backed if isinstance(backed[s], int | sympy.Integer)}
    open_names = [n for n in names if n in found and not env.replace(found[n]).is_number]
    fixed = _said_to_vary(context, env)
    if not open_names or any(n not in found or fixed & _sources(env, found[n]) for n in names):
        return None
    values = {
        n: int(env.create_symintnode(found[n], hint=int(backed[found[n]]))) for n in open_names
    }
    return Specialised(env, values)


def _is_last_compile() -> bool:
    """Whether Dynamo compiles this code for the last time: what it makes now should serve all
    sizes."""
    compiling = CompileContext.current_compile_id()
    count = None if compiling is None else compiling.frame_compile_id
    limit: int = dynamo_config.recompile_limit
    return count is not None and count + 1 >= limit


def _sources(env: Any, symbol: Any) -> set[str]:
    named = getattr(env, "var_to_sources", None) or env.source_to_var
    return {s.name if isinstance(s.name, str) else s.name() for s in named.get(symbol, ())}


def _said_to_vary(context: Any, env: Any) -> set[str]:
    """The sizes, as Dynamo names them, that mark_dynamic says must not become numbers."""
    found = set()
    for symbolic in context.tensor_to_context.values():
        for dim, constraint in enumerate(getattr(symbolic, "constraint_sizes", ()) or ()):
            if constraint is not None and not getattr(constraint, "warn_only", False):
                source = symbolic.tensor_source
                name = source.name if isinstance(source.name, str) else source.name()
                found.add(f"{name}.size()[{dim}]")
    return found


@dataclass(frozen=True)
class Break:
    """Why Dynamo ended a graph before its function's end.

    where: the user's "file:line", or "".
    cause: in one line.
    hints: what else Dynamo says of it: the explanation, then what would avoid it."""

    where: str
    cause: str
    hints: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Place and cause."""
        return f"{self.where}: {self.cause}" if self.where else self.cause

    @property
    def told(self) -> str:
        """The same with the first hint."""
        return "; ".join((self.line, *(h.partition(": ")[2] for h in self.hints[:1])))


def note_breaks() -> None:
    """Keeps those of Dynamo's own list, which a reset empties, in words: it counts causes by
    process, so a graph's are known while it is compiled."""
    for why in list(graph_break_reasons):
        if id(why) not in _noted:
            _noted[id(why)] = (why, _in_words(why))


def breaks() -> list[Break]:
    """Those of this process, in order, also where there was nothing to compile before one."""
    note_breaks()
    return [b for _, b in list(_noted.values())]


# By the id of Dynamo's reason, which is kept, so that no other gets its id.
_noted: dict[int, tuple[Any, Break]] = {}


def _in_words(why: Any) -> Break:
    frame = why.user_stack[-1] if why.user_stack else None
    where = f"{Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
    reason = why.reason.strip()
    if reason == "step_unsupported":
        reason = _cannot_go_on()
    elif reason.startswith("generic_jump"):
        reason = _BRANCH
    cause, *lines = reason.splitlines()
    told = (line.strip() for line in lines)
    hints = tuple(h for h in told if h.startswith(("Explanation: ", "Hint: ")))
    return Break(where, cause, hints)


_BRANCH = (
    "Data-dependent branching\nHint: compute both and choose by torch.where, or use torch.cond"
)


def _cannot_go_on() -> str:
    """Why Dynamo ran a whole call by Python, where it went on no further inside: it keeps no reason
    by graph, and counts them by process."""
    reasons = [*counters["unimplemented"]] or [*counters["graph_break"]]
    if len(reasons) == 1:
        return reasons[0].strip()
    return "something inside this call\n  Hint: TORCH_LOGS=graph_breaks tells what it is"


def refusals() -> Counter[str]:
    """How often in this process Dynamo gave up on code, by reason."""
    found: Counter[str] = Counter()
    for kind in ("graph_break", "unimplemented"):
        for why, n in counters[kind].items():
            found[why.strip().splitlines()[0]] += n
    return found


def steers_dynamo(error: Exception) -> bool:
    """Whether an exception is for Dynamo, which starts over or breaks the graph, and no failure.
    Others of its classes are failures: those that operators of control flow raise where they are
    traced, or a compile within this one."""
    return isinstance(error, (RestartAnalysis, SkipFrame, ShortenTraceback))
