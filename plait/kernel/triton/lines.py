"""The lines of a kernel that is being printed, in two scopes: outside and inside its loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.ir.expr import Size
from plait.ir.loops import Node


@dataclass
class Scope:
    """lines: what is printed.
    names: the variables that hold values and indices."""

    lines: list[str] = field(default_factory=list)
    names: dict[Node | Size, str] = field(default_factory=dict)


class Lines:
    """Two scopes, and names that are used once."""

    def __init__(self) -> None:
        self.outer, self.inner = Scope(), Scope()
        self._n = 0

    def find(self, key: Node | Size) -> str | None:
        """The variable that holds a value or an index, if there is one."""
        return self.outer.names.get(key) or self.inner.names.get(key)

    def define(self, text: str, inner: bool, prefix: str = "v") -> str:
        """A new variable."""
        self._n += 1
        name = f"{prefix}{self._n}"
        self.add(f"{name} = {text}", inner)
        return name

    def keep(self, key: Node | Size, name: str, inner: bool) -> None:
        """Says which variable holds a value or an index."""
        (self.inner if inner else self.outer).names[key] = name

    def add(self, line: str, inner: bool) -> None:
        """A line."""
        (self.inner if inner else self.outer).lines.append(line)

    def enter(self) -> None:
        """Begins the inside of a loop."""
        self.inner = Scope()

    def merge(self) -> None:
        """The inside stands outside: there is no loop, later lines go on with the same values."""
        self.outer.lines += self.inner.lines
        self.outer.names.update(self.inner.names)
        self.enter()
