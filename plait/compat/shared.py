"""What is changed in torch while graphs are traced, by any thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class Shared:
    """A context in which a change of torch holds. It may be entered by several threads: the first
    makes the change, the last undoes it."""

    def __init__(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        self._change, self._undo = change, undo
        self._lock, self._inside = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._undo()
