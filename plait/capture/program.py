"""Hands a captured graph to the compiler; holds the garbage collector, and makes room on Python's
stack, while one is made and compiled.

What escapes from here is an error of plait's own, whatever went wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import plait.graph.fits  # noqa: F401 - with strides.py, puts its checks into the table
from plait.config import Config
from plait.errors import InternalError, PlaitError, raised_at, warn_once
from plait.graph.captured import Captured
from plait.log import PassLog
from plait.runtime.builds import Build
from plait.runtime.toolchain import ToolchainMissing
from plait.wrapper.program import Program, Target

if TYPE_CHECKING:
    from plait.compile import Steps

P = ParamSpec("P")
T = TypeVar("T")
_ROOM = 2**15  # values on a frame's stack: more than any piece of Python's stack has left


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: tracing makes so many objects that scanning the process for
    garbage, again and again, takes half of the time. Two threads may be inside at once; the first
    to leave switches it on again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def follow(folder: str) -> None:
    """From now on this process tells a `plait report` what it compiles."""
    import_module("plait.tools.page.command").follow(folder)


def roomy(fn: Callable[P, T]) -> Callable[P, T]:
    """fn, whose calls begin a new piece of Python's stack, with room for 1000 frames.

    Python keeps frames in pieces of 16 KB, and gives a piece back with its last frame: where a loop
    calls across a border, every call maps memory and unmaps it, which takes forty times as long as
    a call. Which calls these are is up to how deep the stack of the caller is."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_ROOM)
    return wraps(fn)(call)


def load_compiler() -> None:
    """Before the first graph is traced, and not sooner: where programs come from an earlier process
    nothing is compiled."""
    with collector_paused():
        import_module("plait.compile")


def compile_graph(captured: Captured, cfg: Config, target: Target | None = None) -> Program:
    """`plait.compile.compile_graph`, loaded when it is called."""
    from plait.compile import compile_graph

    return compile_graph(captured, cfg, target)


def compile_captured(captured: Captured, cfg: Config, target: Target | None = None) -> Program:
    """`compile_graph`, with what `guarded` adds. Warns, once each, of higher-order operators that
    run as Python."""
    program = guarded(lambda cfg: compile_graph(captured, cfg, target), captured, cfg)
    _tell_python(program)
    return program


def compile_beside(captured: Captured, cfg: Config, target: Target | None) -> Steps:
    """`compile_captured` in steps; between them kernels are built while others go on."""
    from plait.compile import compile_steps

    with _named(captured, cfg):
        try:
            program = yield from compile_steps(captured, cfg, target, Build)
        except ToolchainMissing as missing:
            bare = _without_kernels(cfg, missing)
            program = yield from compile_steps(captured, bare, target, Build)
    _tell_python(program)
    return program


def _tell_python(program: Program) -> None:
    for step in program.record.ladder:
        if step.rung == "python" and step.what.startswith("higher_order::"):
            warn_once(f"plait calls {step.line}")


def guarded(compile_with: Callable[[Config], T], captured: Captured, cfg: Config) -> T:
    """compile_with(cfg), without kernels if it turns out that the machine cannot build them; an
    unexpected exception becomes the cause of an InternalError that names the graph."""
    with _named(captured, cfg):
        try:
            return compile_with(cfg)
        except ToolchainMissing as missing:
            return compile_with(_without_kernels(cfg, missing))


def _without_kernels(cfg: Config, missing: ToolchainMissing) -> Config:
    warn_once(f"plait runs every op as a call of ATen: {missing.line}")
    return replace(cfg, kernels=False)


@contextmanager
def _named(captured: Captured, cfg: Config) -> Iterator[None]:
    """Makes an InternalError that names the graph of an unexpected exception, its cause."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        # Dynamo drops the cause of what it passes on, so the place goes into the text.
        folder = PassLog(cfg, captured.name).folder
        raise InternalError(
            f"compiling {captured.name} failed with {type(error).__name__}: {error} "
            f"({raised_at(error)})",
            hint="" if folder is None else f"report it with the folder {folder}",
        ) from error
