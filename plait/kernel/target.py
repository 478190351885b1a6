"""What a kernel target is: a name, one table with a row for every op, and a way from kernels to source text.

A new target is one entry module and a row in TARGETS. A test proves that no target's table has a hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.runtime.toolchain import Isa
from plait.schedule.plan import Kernel


@dataclass(frozen=True)
class Source:
    """One translation unit. entry_points: kernel name -> symbol; kernels that are equal but for names share one."""

    text: str
    entry_points: Mapping[str, str]


class Target(Protocol):
    """Turns kernels into source. table: op name (of ops.OPS and ops.SPECIAL) -> how the target writes it."""

    name: str
    table: Mapping[str, object]

    def emit_library(self, kernels: Sequence[Kernel], isa: Isa) -> Source:
        """The source of all kernels: equal input gives byte-identical text."""
        ...
