"""The runner of the pipeline: times each step, prints it, writes its dumps, and calls the stage's
verifier.

One `PassLog` serves one graph. Lines go to standard error when `Config.debug` reaches their level,
and otherwise to the Python logger "plait", which PyTorch's own logging switches on:
TORCH_LOGS=plait for level 1, +plait for all. Dumps go to one folder a graph, <debug_dir>/<graph
name>/, and to torch's structured trace when TORCH_TRACE is set.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from plait.config import Config
from plait.errors import warn_once

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("plait")

STAGES, KERNELS, REASONS, SOURCE, IR = 1, 2, 3, 4, 5
"""The debug ladder: the level at which each sort of line is printed."""


class PassLog:
    """Runs the steps of one compilation. verifiers: step name -> check of that step's result, run
    if cfg.verifies."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self, cfg: Config, name: str, verifiers: Mapping[str, Callable[[Any], object]] | None = None
    ) -> None:
        self.cfg = cfg
        self.name = name
        self.verifiers = verifiers or {}
        self.times_ms: dict[str, float] = {}
        self._open: list[str] = []
        root = cfg.debug_dir or ("plait_debug" if cfg.debug >= SOURCE else "")
        self._root = root.replace("%p", str(os.getpid()))

    def __call__(self, step: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """fn(*args, **kwargs), timed as `step` and then verified. Errors pass through untouched.

        A step that runs inside another is timed as "outer/inner"."""
        self._open.append(step)
        name = "/".join(self._open)
        start = self.clock()
        try:
            result = fn(*args, **kwargs)
        finally:
            self._open.pop()
        took = (self.clock() - start) * 1e3
        self.times_ms[name] = self.times_ms.get(name, 0.0) + took
        if self.shows(STAGES):
            self.note(STAGES, f"{self.name}: {name} {took:.1f} ms")
        verifier = self.verifiers.get(step)
        if verifier is not None and self.cfg.verifies:
            verifier(result)
        return result

    def shows(self, level: int) -> bool:
        """Whether a line of this level would be seen; ask before building a text that is costly."""
        return self.cfg.debug >= level or logger.isEnabledFor(_logging_level(level))

    def note(self, level: int, text: str) -> None:
        """Prints text (one or more lines) at a level of the debug ladder."""
        if self.cfg.debug >= level:
            print(f"[plait] {text}", file=sys.stderr)
        else:
            logger.log(_logging_level(level), "%s", text, stacklevel=2)

    @property
    def folder(self) -> Path | None:
        """This graph's debug folder, made on first use; None if no dumps are wanted or it cannot be
        made."""
        if not self._root:
            return None
        try:
            folder = Path(self._root).expanduser() / self.name
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home folder
            self.give_up(error)
            return None
        return folder

    def give_up(self, error: Exception) -> None:
        """Writes no files any more, and says why."""
        reason = getattr(error, "strerror", None) or error
        warn_once(f"plait cannot write debug files to {self._root} ({reason}): it writes none")
        self._root = ""

    @property
    def writes(self) -> bool:
        """Whether `dump` has somebody to write for."""
        return bool(self._root) or _tracing() or self.shows(SOURCE)

    def dump(self, filename: str, text: str | Callable[[], str]) -> None:
        """Writes a file into the debug folder, if there is one. A callable is called only if
        somebody reads."""
        tracing = _tracing()
        folder = self.folder
        if folder is None and not tracing:
            return
        content = text if isinstance(text, str) else text()
        if folder is not None:
            try:
                (folder / filename).write_text(content)
            except OSError as error:
                self.give_up(error)
        if tracing:
            _trace(f"plait_{self.name}_{filename}", content)


BAR_S = 2.0  # seconds after which people want to see how far something is


@contextmanager
def progress(what: str, total: int, prints: bool = False) -> Iterator[Callable[[], None]]:
    """Gives what is called after each of so many steps; threads may call it at once. What takes
    longer than BAR_S has a bar on standard error, if that is a terminal. prints: lines that are
    printed on this terminal meanwhile stand above the bar."""
    if not sys.stderr.isatty() or find_spec("rich") is None:  # no compile fails for want of a bar
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True, soft_wrap=True)  # lines stay as they are printed
    above = prints and sys.stdout.isatty()
    bar = Progress(
        *columns, console=console, transient=True, redirect_stdout=above, redirect_stderr=prints
    )
    task = bar.add_task("", total=total)
    shown = threading.Timer(BAR_S, bar.start)
    shown.daemon = True
    shown.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        shown.cancel()
        shown.join()  # it may be about to begin
        bar.stop()


def watched(what: str, items: Collection[T]) -> Iterator[T]:
    """The items one after the other, for a command that prints lines: `progress` of them."""
    with progress(what, len(items), prints=True) as one_more:
        for item in items:
            yield item
            one_more()


def _logging_level(level: int) -> int:
    return logging.INFO if level <= STAGES else logging.DEBUG


def _tracing() -> bool:
    """Whether torch writes its structured trace; its handler alone does not tell before the first
    record."""
    return "TORCH_TRACE" in os.environ and bool(logging.getLogger("torch.__trace").handlers)


def _trace(name: str, content: str) -> None:
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: content,
    )
