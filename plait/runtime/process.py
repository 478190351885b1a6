"""Compilers as child processes: ended after a time, and with whoever waits for them.

A child leads a process group of its own, so that ending it ends what it started (a C++ compiler is
several programs), and so that Ctrl-C comes to this process alone, which then ends the child.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_local = threading.local()
_blocks: weakref.WeakSet[_Children] = weakref.WeakSet()
_over = threading.Event()  # the interpreter ends

# Held where a process is started, where a block's children are counted, and by whoever forks. A
# child forked in between would keep pipes open whose end the starting thread waits for, and have a
# lock that none of its threads gives back. A signal's handler may fork in a thread that holds it.
starting = threading.RLock()
os.register_at_fork(
    before=starting.acquire, after_in_parent=starting.release, after_in_child=starting.release
)


class Stopped(Exception):
    """Whoever waited for the compiler does no more."""


@dataclass(frozen=True)
class Done:
    """What came of a command. code: its exit status, minus the number of the signal that ended it,
    or None if its time was over. errors: what it wrote there, whatever the encoding."""

    code: int | None
    output: str
    errors: str

    @property
    def killed(self) -> bool:
        """A signal ended it, or a program that it ran: often for want of memory."""
        if self.code is None or self.code == 0:
            return False
        return self.code < 0 or self.code > 128 or "signal terminated program" in self.errors


class _Children:
    """The children of the threads of one block."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._process = os.getpid()
        _blocks.add(self)

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        """Raises Stopped, OSError."""
        with starting:
            if self._stopped:
                raise Stopped
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=env, process_group=0,
            )  # fmt: skip
            self._running.add(child)
        return child

    def ended(self, child: subprocess.Popen[bytes]) -> None:
        """Forgets a child whose end was waited for. Raises Stopped if it was made to end."""
        with starting:
            self._running.remove(child)
            if self._stopped:
                raise Stopped

    def check(self) -> None:
        """Raises Stopped if no other child would start."""
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """Ends all that run; no other starts."""
        with starting:
            self._stopped = True
            # A fork leaves them alone.
            for child in self._running if self._process == os.getpid() else ():
                end_group(child.pid)


def end_group(leader: int) -> None:
    """Kills a process that was not waited for yet, and all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> Done:
    """Runs a command to its end, or for that long. Raises OSError if it cannot be started, Stopped
    in a thread of `workers` whose block was left by an exception."""
    if threading.current_thread() is threading.main_thread() and not _over.is_set():
        # A signal's handler can raise here, also between the start of a child and the moment when
        # its number is known; in other threads it cannot.
        return run_all([command], seconds, env)[0]
    children: _Children = getattr(_local, "children", None) or _Children()
    child = children.start(command, env)
    try:
        output, errors = child.communicate(timeout=seconds)
        code: int | None = child.returncode
    except subprocess.TimeoutExpired:
        output, errors, code = b"", b"", None
    finally:
        if child.returncode is None:  # its time is over, or no memory
            end_group(child.pid)
            child.wait()
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        _stay()
        children.ended(child)
    return Done(code, output.decode(errors="replace"), errors.decode(errors="replace"))


def pause(seconds: float) -> None:
    """Sleeps, for whoever waits for the child of another process. Raises Stopped as run does."""
    if threading.current_thread() is threading.main_thread():
        time.sleep(seconds)
    else:
        _over.wait(seconds)
        _stay()
    children: _Children | None = getattr(_local, "children", None)
    if children is not None:
        children.check()


def _stay() -> None:
    """Ends no more in a thread that the end of the interpreter finds here; see _stop_all."""
    if _over.is_set() and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


def run_all(
    commands: Sequence[Sequence[str]], seconds: float, env: Mapping[str, str] | None = None
) -> list[Done]:
    """Runs commands side by side, as many at a time as there are cores; see run."""
    blocks: _Children | None = getattr(_local, "children", None)
    children = blocks or _Children()
    pool = Workers(min(len(commands), len(os.sched_getaffinity(0))), children)
    try:
        made = [pool.submit(run, command, seconds, env) for command in commands]
        pool.leave()
        return [one.result() for one in made]
    except BaseException:
        if blocks is None:  # else whoever left the block has stopped them, or goes on
            children.stop()
            pool.end()
        raise


class Workers:
    """Threads that wait for compilers. The end of the interpreter waits for them only where they
    are no `daemon`, which threads that run torch's operators must not be: such a one, woken in an
    operator after the end, would be unwound through C++ that lets nothing pass."""

    def __init__(self, n: int, children: _Children | None = None, daemon: bool = True) -> None:
        self._children = children or _Children()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="plait-build", daemon=daemon) for _ in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What function(*args) will give, or raise."""
        result: Future[T] = Future()

        def job() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001  (it is raised where the result is wanted)
                    result.set_exception(error)

        self._jobs.put(job)
        return result

    def _work(self) -> None:
        _local.children = self._children
        while (job := self._jobs.get()) is not None:
            job()

    def end(self) -> None:
        """Waits until all is done."""
        self.leave()
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """Lets the threads end when all is done."""
        for _ in self._threads:
            self._jobs.put(None)

    def stop(self) -> None:
        """Ends the compilers at once; what was submitted and has not ended raises Stopped."""
        self._children.stop()
        self.leave()


@contextmanager
def workers(n: int) -> Iterator[Workers]:
    """Threads for a block. An exception that leaves it ends the compilers that they wait for."""
    pool = Workers(n)
    try:
        yield pool
        pool.end()
    except BaseException:
        pool.stop()
        raise


@atexit.register
def _stop_all() -> None:
    """Ends compilers. Threads that wait for them go on waiting: one that woke after the
    interpreter's end would be unwound by Python, which torch's C++ code on its stack answers by
    ending the process."""
    _over.set()
    for children in list(_blocks):
        children.stop()
