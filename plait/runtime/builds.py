"""Builds of kernels that no call waits for: one after another in a process, so that compilers are
as many at a time as where calls wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Generic, TypeVar

from plait.runtime.process import Workers

T = TypeVar("T")


class Build(Generic[T]):
    """What work() gives, in a thread of its own. A forked child has no such thread: there it is
    done again, which finds what the parent has built. The end of the interpreter ends it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._result: Future[T] = _builder(self._process).submit(self._work)

    def done(self) -> bool:
        """Whether `result` comes at once."""
        return self._here().done()

    def exception(self) -> BaseException | None:
        """What `result` raises, waited for."""
        return self._here().exception()

    def result(self) -> T:
        """Waited for. Raises what work raises."""
        return self._here().result()

    def _here(self) -> Future[T]:
        if self._process != os.getpid():
            self._begin()
        return self._result


@cache
def _builder(process: int) -> Workers:
    return Workers(1)
