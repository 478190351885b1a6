"""What a kernel target is: a name, one table with a row for every op, and the ways from kernels to
a file that runs.

A new target is one entry module, an entry in `targets.py`, and its name in a row of
`plait/devices.py`. A test proves that no target's table has a hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.config import Config
from plait.errors import Unsupported
from plait.ir.calls import Extern
from plait.ir.expr import Size
from plait.runtime.store import Built
from plait.schedule.plan import Kernel, Plan, UserLaunch


@dataclass(frozen=True)
class Forms:
    """A kernel that is written in several forms, of which each launch takes one.

    pick: the number of the one that it takes, over the kernel's sizes.
    entries: the entry point of each, and its programs of a launch.
    """

    pick: Size
    entries: tuple[tuple[str, Size], ...]


@dataclass(frozen=True)
class Source:
    """The kernels of one kind of device. text: what people read. entry_points: kernel name ->
    symbol; kernels that are equal but for names share one. grids: kernel name -> programs of a
    launch. units: what the target compiles, where that is not the text as a whole. forms: of the
    kernels that have several, by name; the entry point is that of the last, which takes any
    size."""

    text: str
    entry_points: Mapping[str, str]
    grids: Mapping[str, Size] = field(default_factory=dict)
    units: tuple[Any, ...] = ()
    forms: Mapping[str, Forms] = field(default_factory=dict)

    def joined(self, other: Source) -> Source:
        """Both together."""
        return Source(
            "\n\n".join(filter(None, (self.text, other.text))),
            {**self.entry_points, **other.entry_points},
            {**self.grids, **other.grids},
            (*self.units, *other.units),
            {**self.forms, **other.forms},
        )


Machines = Mapping[str, Any]
"""Device -> what kernels for it are made for, in its target's own terms."""
Unaligned = Mapping[str, Set[str]]
"""Kernel name -> buffers that may start anywhere; all others start at multiples of 16 bytes."""
Choices = Mapping[str, Any]
"""Kernel name -> how to write it, in its target's own terms; the target plans those not in it."""


@dataclass(frozen=True)
class Measured:
    """What measuring found.

    notes: a line for each kernel that had several candidates.
    lost: kernels that are slower than the operators in whose place they are.
    """

    choices: Choices
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Target(Protocol):
    """Turns kernels into source and source into a file. table: op name (of ops.OPS and ops.SPECIAL)
    -> how the target writes it."""

    name: str
    table: Mapping[str, object]

    def find_tools(self, cfg: Config) -> None:
        """Raises ToolchainMissing where the machine lacks what kernels are built with."""

    def machines(self, devices: Set[str], cfg: Config) -> Machines:
        """What cfg names, or what is found where it says "auto"."""
        return {}

    def measure(
        self, kernels: Sequence[Kernel], unaligned: Unaligned, machines: Machines, cfg: Config
    ) -> Measured:
        """Runs the candidates of each kernel, on the device that they are for if it is here."""
        return Measured({})  # there is one way to write a kernel

    def emit(
        self,
        kernels: Sequence[Kernel],
        unaligned: Unaligned,
        machines: Machines,
        choices: Choices,
        verifies: bool,
    ) -> Source:
        """The source of all kernels: equal input gives byte-identical text. choices: what `measure`
        chose. verifies: what is decided is checked."""
        ...

    def write_template(self, plan: Plan, call: Extern, machines: Machines, tunes: bool) -> Extern:
        """A call of a kernel of a known kind, as one of a kernel with a text. tunes: in versions to
        choose among by measuring, where the target knows any."""
        raise Unsupported(f"{call.op} as one kernel for the target {self.name}")

    def emit_users(
        self, launches: Sequence[UserLaunch], machines: Machines, choices: Choices
    ) -> Source:
        """The same of kernels that the user wrote. choices: their variants, by number."""
        raise Unsupported(f"a user's kernel for the target {self.name}")

    def measure_users(
        self, launches: Sequence[UserLaunch], machines: Machines, cfg: Config
    ) -> Measured:
        """The fastest variant of each, where it has several."""
        return Measured({})

    def expect(self, forms: Set[str], cfg: Config) -> None:
        """Begins to build what kernels of packed products of these forms share, beside what the
        caller does meanwhile."""
        return  # they share nothing

    def finish(self, source: Source, machines: Machines) -> Source:
        """The source of all kernels of a program, whoever wrote them, as it is built."""
        return source

    def build(self, source: Source, cfg: Config) -> Built:
        """The built kernels, from the store on disk where they are there. Raises ToolchainError."""
        ...
