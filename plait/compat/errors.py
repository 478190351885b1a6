"""Errors that pass through Dynamo as they are.

For all torch versions alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from plait.errors import PlaitError


class _ThroughDynamo(ShortenTraceback):
    """Mixed into a PlaitError so that torch.compile raises it as it is instead of wrapping it."""

    def __init__(self, error: PlaitError) -> None:
        Exception.__init__(self, str(error))
        self.first_useful_frame = None
        self.what, self.where, self.hint = error.what, error.where, error.hint
        self.real_stack = None  # what torch's own errors carry; None: nothing to show


@lru_cache(maxsize=32)
def _passing(kind: Any) -> type[_ThroughDynamo]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_ThroughDynamo, kind), names)


def through_dynamo(error: PlaitError) -> Exception:
    """The same error, of a subclass of its class with the same name, that torch.compile does not
    wrap."""
    kind: Any = type(error)
    return _passing(kind)(error)
