"""Why Dynamo compiles a function again: the guards that the call at hand failed.

Dynamo keeps, for each function, a text for every graph of it whose guards a call failed. The texts
are for people and differ in detail between versions of torch: `capture/recompiles.py` reads in them
what it knows and shows the rest as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import get_metrics_context, guard_failures
from torch._guards import CompileContext


@dataclass(frozen=True)
class FailedGuard:
    """graph: which compile had the guard, as "frame/number". text: the guard, in one line, as
    Python or as words. where: the user's "file:line" that it comes from, or ""."""

    graph: str
    text: str
    where: str


@dataclass(frozen=True)
class Failures:
    """function: its name with "file:line". number: which compile of it this is, from 1. guards: one
    for each of its graphs, the one used last first. without_graph: compiles of it that made none,
    as before a break that comes first, and the back ends that they were for."""

    function: str
    number: int
    guards: tuple[FailedGuard, ...]
    without_graph: Mapping[str, Any]


def current_compile() -> str:
    """The name of the compile that is under way, as "frame/number"; "" outside of any."""
    context = CompileContext.try_get()
    return "" if context is None or context.compile_id is None else str(context.compile_id)


def failures() -> Failures | None:
    """The guards for whose sake the compile that is under way was begun; None where it is the first
    of its function."""
    frame, _, number = current_compile().rpartition("/")
    if not number.isdecimal() or number == "0":
        return None
    first = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    for code, texts in guard_failures.items():
        if texts[-1].startswith(f"{frame}/"):
            name = f"{_in_words(code)} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            begun = [k for k, text in enumerate(texts) if text == first]
            if begun or first is None:  # else the list is of calls before
                guards = tuple(map(_guard, texts[begun[-1] if begun else -1 :]))
                return Failures(name, int(number) + 1, guards, _without_graph(code))
    if not isinstance(first, str):
        return None
    # Of a graph that was dropped, since an object of it is gone, there is no more than this.
    return Failures("a function", int(number) + 1, (_guard(first),), {})


def _without_graph(code: CodeType) -> dict[str, Any]:
    entries = _debug_get_cache_entry_list(code)
    made = [e for e in entries if not any("__compiled_fn" in name for name in e.code.co_names)]
    return {str(e.compile_id): getattr(e.backend, "compiler_fn", e.backend) for e in made}


def _in_words(code: CodeType) -> str:
    """The name of a function; what it is where Dynamo gave it one."""
    if code.co_filename.endswith("/torch/_dynamo/external_utils.py"):
        return "a module of torch's own"
    rest = r"torch_dynamo_resume_in_(\w+?)_at_(\d+)"
    return re.sub(rest, r"\1 (after its break in line \2)", code.co_qualname)


_LINE = re.compile(r"#.*#\s*(\S+:\d+) in ")
_STACK = re.compile(r'File "([^"]+)", line (\d+)')


def _guard(text: str) -> FailedGuard:
    graph, _, rest = text.partition(": ")
    stack = _STACK.findall(rest)
    first = rest.splitlines()[0]
    lines = _LINE.findall(first)
    where = f"{stack[-1][0]}:{stack[-1][1]}" if stack else lines[-1] if lines else ""
    return FailedGuard(graph, first.split("  #")[0].strip(), where.rpartition("/")[2])
