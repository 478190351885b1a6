"""Why Dynamo compiles a function again: the guards that the call at hand failed.

Dynamo keeps, for each function, a text for every graph of it whose guards a call failed. The texts
are for people and differ in detail between versions of torch: `capture/recompiles.py` reads in them
what it knows and shows the rest as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

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
    for each of its graphs, the one used last first."""

    function: str
    number: int
    guards: tuple[FailedGuard, ...]


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
                return _failures(name, int(number), texts[begun[-1] if begun else -1 :])
    # Of a graph that was dropped, since an object of it is gone, there is no more than this.
    return _failures("a function", int(number), [first]) if isinstance(first, str) else None


def _in_words(code: CodeType) -> str:
    """The name of a function; what it is where Dynamo gave it one."""
    if code.co_filename.endswith("/torch/_dynamo/external_utils.py"):
        return "a module of torch's own"
    rest = r"torch_dynamo_resume_in_(\w+?)_at_(\d+)"
    return re.sub(rest, r"\1 (after its break in line \2)", code.co_qualname)


def _failures(function: str, number: int, texts: Sequence[str]) -> Failures:
    return Failures(function, number + 1, tuple(map(_guard, texts)))


_LINE = re.compile(r"#.*#\s*(\S+:\d+) in ")
_STACK = re.compile(r'File "([^"]+)", line (\d+)')


def _guard(text: str) -> FailedGuard:
    graph, _, rest = text.partition(": ")
    stack = _STACK.findall(rest)
    first = rest.splitlines()[0]
    lines = _LINE.findall(first)
    where = f"{stack[-1][0]}:{stack[-1][1]}" if stack else lines[-1] if lines else ""
    return FailedGuard(graph, first.split("  #")[0].strip(), where.rpartition("/")[2])
