"""A random program as data, and as Python source that stands for itself.

A `Program` has operands (function arguments), lines (statements) and calls (sizes, ints and seeds
of data, for which it is called one after the other), and a `Road` on which plait compiles it.
Everything is plain data, so that it can be shrunk, sent to another process and written as a repro.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NAME = re.compile(r"\b[a-z]\d+\b")


@dataclass(frozen=True)
class Operand:
    """One argument of the function.

    dtype: as torch names it, or "int" for a Python int. shape: expressions of the sizes of a call.
    bound: of an index, an expression too. alias: the argument that this one is a view of, or "".
    """

    name: str
    dtype: str = "float32"
    shape: tuple[str, ...] = ()
    layout: str = "plain"
    values: str = "whole"
    bound: str = "0"
    grad: bool = False
    alias: str = ""


@dataclass(frozen=True)
class Line:
    """One statement. kind: the class that it is counted as. exact: eager's bits are the only right
    ones."""

    out: str
    text: str
    kind: str
    exact: bool = True

    @property
    def source(self) -> str:
        return f"{self.out} = {self.text}" if self.out else self.text

    @property
    def reads(self) -> set[str]:
        return set(NAME.findall(self.text))


@dataclass(frozen=True)
class Call:
    """sizes and ints by name. mood: see values.py. apart: arguments that are views of others are
    copies of those."""

    seed: int
    sizes: dict[str, int]
    ints: dict[str, int]
    mood: str = "mixed"
    apart: bool = False


@dataclass(frozen=True)
class Road:
    """How plait comes to the program.

    way: "compile" (torch.compile), "direct" (plait.compile), "package" (plait.package and load).
    dynamic: of torch.compile; on the other ways True gives every size a Dim. capture: sizes and
    numbers that depend on data stay in the graph. grad: "", "backward" or "forward". threads: calls
    run at once. params: operands that are parameters of a module, with new ones for each call.
    held: an operand that is a buffer of a module, which a call assigns anew; "": none. freeze:
    parameters are constants, which calls notice to have changed, in a package those of the first
    call. in_place: they get the numbers of a call in place.
    """

    way: str = "compile"
    dynamic: bool | None = False
    capture: bool = False
    grad: str = ""
    threads: int = 1
    wrapper: str = "native"
    isa: str = "auto"
    params: tuple[str, ...] = ()
    held: str = ""
    freeze: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Program:
    seed: int
    operands: tuple[Operand, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    calls: tuple[Call, ...]
    road: Road = field(default_factory=Road)
    device: str = "cpu"

    @property
    def inexact(self) -> tuple[str, ...]:
        """The names whose values float64 has to judge: of a statement without a value, all that it
        may write."""
        lines = [line for line in self.lines if not line.exact]
        return tuple(
            name for line in lines for name in ((line.out,) if line.out else ("", *line.reads))
        )

    def source(self) -> str:
        """A module with f, inputs and CALLS."""
        args = ", ".join(o.name for o in self.operands)
        body = "\n".join(f"    {line.source}" for line in self.lines)
        made = "\n".join(
            f"        {_made(o, k)}," for k, o in enumerate(self.operands) if not o.alias
        )
        calls = "\n".join(f"    {asdict(c)!r}," for c in self.calls)
        names = ", ".join(o.name for o in self.operands if not o.alias)
        views = "".join(
            f"    {o.name} = ({o.alias}).clone() if c.get('apart') else {o.alias}\n"
            for o in self.operands
            if o.alias
        )
        sizes = sorted({s for c in self.calls for s in c.sizes})
        unpacked = (
            f"    {', '.join(sizes)}, = (c['sizes'][s] for s in {sizes!r})\n" if sizes else ""
        )
        returned = "".join(f"{o}, " for o in self.outputs)
        return f"""\
import math

import torch
from torch.nn import functional as F

from tests.fuzz.flow import REGIONS, associative_scan, autocast, cond, map_, scan, while_loop
from tests.fuzz.values import tensor

CALLS = [
{calls}
]


def f({args}):
{body}
    return ({returned})


def inputs(c, device="cpu"):
    seed, mood = c["seed"], c["mood"]
{unpacked}    {names}{"," if names else "_"} = (
{made}
    )
{views}    return [{args}]
"""

    def repro(self) -> str:
        """The module, and the comparison of plait with eager."""
        head = "# Save as repro.py in the root of the source tree, then: python repro.py"
        grads = tuple(o.name for o in self.operands if o.grad)
        inexact = self.inexact
        return (
            f"{head}\n{self.source()}\n\nif __name__ == '__main__':\n"
            "    from tests.fuzz.check import check_source\n    from tests.fuzz.program import "
            "Road\n\n"
            f"    road = {self.road!r}\n    grads, inexact, device = {grads!r}, {inexact!r}, "
            f"{self.device!r}\n"
            "    check_source(open(__file__).read(), road, grads, inexact, device)\n"
        )

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Program:
        data: dict[str, Any] = json.loads(text)
        return Program(
            data["seed"],
            tuple(Operand(**{**o, "shape": tuple(o["shape"])}) for o in data["operands"]),
            tuple(Line(**line) for line in data["lines"]),
            tuple(data["outputs"]),
            tuple(Call(**c) for c in data["calls"]),
            Road(**{**data["road"], "params": tuple(data["road"]["params"])}),
            data["device"],
        )

    def classes(self) -> set[str]:
        """What kinds of graph this one is, for the counts."""
        found = {f"op: {line.kind}" for line in self.lines}
        r = self.road
        found.add(f"road: {r.way}, {_DYNAMIC[r.dynamic]}{', captured sizes' if r.capture else ''}")
        found.add(f"wrapper: {r.wrapper}")
        found |= {f"grad: {r.grad}"} if r.grad else set()
        found |= {"threads"} if r.threads > 1 else set()
        found |= {"parameters replaced"} if r.params else set()
        found |= {"a buffer assigned"} if r.held else set()
        found |= {"frozen parameters"} if r.freeze else set()
        found |= {"parameters change in place"} if r.in_place else set()
        found |= (
            {"arguments share memory at some calls"} if any(c.apart for c in self.calls) else set()
        )
        found |= {f"isa: {r.isa}"} if r.isa != "auto" else set()
        for o in self.operands:
            found.add(f"dtype: {o.dtype}")
            found.add(f"layout: {'alias' if o.alias else o.layout}")
            if o.values in ("special", "huge", "zeros"):
                found.add("values: special")
        sizes = [tuple(sorted(c.sizes.items())) for c in self.calls]
        flat = [n for c in self.calls for n in c.sizes.values()]
        found |= {"sizes change"} if len(set(sizes)) > 1 else set()
        found |= {"empty"} if 0 in flat or any("0" in o.shape for o in self.operands) else set()
        found |= (
            {"sizes change to or from 0 or 1"}
            if len(set(sizes)) > 1 and {0, 1} & set(flat)
            else set()
        )
        found |= (
            {"positions change"} if len({tuple(c.ints.items()) for c in self.calls}) > 1 else set()
        )
        found |= {"data change"} if len({(c.seed, c.mood) for c in self.calls}) > 1 else set()
        return found

    def pruned(self) -> Program:
        """Without operands that nothing reads."""
        used = set(self.outputs).union(
            *(line.reads for line in self.lines), self.road.params, {self.road.held}
        )
        for o in self.operands:
            used |= set(NAME.findall(o.alias)) if o.name in used else set()
        operands = tuple(o for o in self.operands if o.name in used)
        text = " ".join(
            [
                *(" ".join((*o.shape, o.bound, o.alias)) for o in operands),
                *(x.text for x in self.lines),
            ]
        )
        named = set(re.findall(r"[a-z]\w*", text)) | {o.name for o in operands}
        calls = tuple(
            replace(
                c,
                sizes={k: v for k, v in c.sizes.items() if k in named},
                ints={k: v for k, v in c.ints.items() if k in named},
            )
            for c in self.calls
        )
        return replace(self, operands=operands, calls=calls)


_DYNAMIC = {None: "automatic sizes", True: "dynamic sizes", False: "static sizes"}


def _made(o: Operand, k: int) -> str:
    if o.dtype == "int":
        return f"c['ints'][{o.name!r}]"
    shape = "".join(f"{d}, " for d in o.shape)
    bound = f", bound={o.bound}" if o.values in ("index", "signed", "perm") else ""
    return (
        f"tensor({o.values!r}, ({shape.strip()}), {o.dtype!r}, {o.layout!r}, seed * 97 + {k}, "
        f"mood{bound}, "
        "device=device)"
    )
