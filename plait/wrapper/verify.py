"""What a legal wrapper program is, written down and checked; run after every pass in tests and when
debugging.

Every name is defined once and before its uses, freed at most once and never used after that
(aliases included); every output is live, every symbol bound; arena ranges in use together are
apart, and nothing in an arena outlives the call; every fact has an owner (`wrapper/owners.py`).
Errors are InternalError and name the pass, the instruction and the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from plait.errors import InternalError
from plait.ir.checks import ERRORS
from plait.ir.expr import Expr, evaluate, free_symbols
from plait.wrapper import forms
from plait.wrapper import instructions as ins
from plait.wrapper.in_flight import InFlight
from plait.wrapper.owners import Owners
from plait.wrapper.spec import FIELDS, Kind
from plait.wrapper.walk import (
    defined,
    may_keep,
    operands,
    refs,
    root,
    sizes,
    symbols,
    used,
    views_of,
)

LITERALS = frozenset(
    {"none", "bool", "float", "str", "complex", "dtype", "device", "layout", "memory_format"}
)


def verify(program: ins.WrapperProgram, after: str = "build") -> None:
    """Raises InternalError where the program breaks a rule. after: the pass to blame."""
    for nested in program.programs:
        verify(nested, after)
    _Verifier(program, after).run()


def verify_kept(before: ins.WrapperProgram, now: ins.WrapperProgram, after: str) -> None:
    """Raises InternalError if a pass dropped, doubled or invented an assert, a launch, a call or
    another effect."""
    was, has = _effects(before), _effects(now)
    if was != has:
        lost = [str(e) for e in was if was[e] > has[e]]
        new = [str(e) for e in has if has[e] > was[e]]
        raise InternalError(
            f"after {after}: effects changed: lost {lost or 'none'}, new {new or 'none'}"
        )
    if before.inputs != now.inputs:
        raise InternalError(f"after {after}: the signature changed")


def _effects(p: ins.WrapperProgram) -> Counter[tuple[str, ...]]:
    out: Counter[tuple[str, ...]] = Counter()
    for i in p.body:
        name = type(i).__name__
        match i:
            case ins.AssertScalar():
                out[name, i.message] += 1
            case ins.Launch():
                out[name, i.kernel] += 1
            case _ if isinstance(i, ins.Call):
                out[name, i.label] += 1
            case ins.Hook():
                out[name, i.node, i.label] += 1
            case ins.Free() | ins.DefineKernel() | ins.Partition() | ins.Note() | ins.Return():
                pass
            case _ if not defined(i):
                out[name, *used(i)] += 1
            case _:
                pass
    return out


class _Verifier:
    """One walk over a program. kind: name -> 'tensor', 'place', 'alloc', 'constant', 'arena',
    'symbol', 'opaque' or 'result' (of a call: a tensor or a symbol)."""

    def __init__(self, program: ins.WrapperProgram, after: str) -> None:
        self.p, self.after = program, after
        self.kind: dict[str, str] = {}
        self.base: dict[str, str] = {}
        self.freed: dict[str, int] = {}
        self.spent: dict[str, str] = {}  # taken over by Reuse -> the new name
        self.kernels: dict[str, ins.DefineKernel] = {}
        self.placed: dict[str, ins.Place] = {}
        self.ranges: dict[str, Ranges] = {}
        self.samples = _samples(program)
        self.arenas: dict[str, ins.Arena] = {}
        self.at = -1
        self.moments = self.at_once(program.body)
        self.uses = _uses(program.body, self.moments)
        self.owners = Owners(program.programs)
        self.in_flight = InFlight(self.base)

    def run(self) -> None:
        for entry in self.p.inputs:
            kinds = {
                ins.TensorInput: "tensor",
                ins.SymbolInput: "symbol",
                ins.OpaqueInput: "opaque",
            }
            self.define(entry.name, kinds[type(entry)])
            self.ranks(entry)
        if not self.p.body or not isinstance(self.p.body[-1], ins.Return):
            self.fail("the last instruction is no Return")
        for i in self.p.body:
            self.at += 1
            self.instruction(i)

    def at_once(self, body: Sequence[ins.Instr]) -> list[int]:
        """When each instruction runs, after the rules of work that is done in several ways."""
        try:
            found = forms.faults(self.p, self.samples)
        except ValueError as error:
            found = [str(error)]
        if found:
            self.fail(found[0])
        return forms.moments(body)

    def fail(self, what: str) -> NoReturn:
        where = "signature" if self.at < 0 else f"instruction {self.at}, {self.p.body[self.at]}"
        raise InternalError(f"after {self.after}: {self.p.name}: {where}: {what}")

    # ---- names
    def define(self, name: str, kind: str) -> None:
        if name in self.kind:
            self.fail(f"{name} is defined twice")
        if not name:
            self.fail("an empty name")
        self.kind[name] = kind

    def live(self, name: str) -> str:
        """Checks that name and the memory under it may be used here; gives its kind."""
        kind = self.kind.get(name)
        if kind is None:
            self.fail(f"{name} is used before it is defined")
        at: str | None = name
        while at is not None:
            if at in self.freed:
                through = "" if at == name else f" (through {name})"
                self.fail(
                    f"{at} is used after it was freed by instruction {self.freed[at]}{through}"
                )
            at = self.base.get(at)
        memory = root(name, self.base)
        taker = self.spent.get(memory)
        if taker is not None and self.moments[self.at] > self.first_use(taker):
            self.fail(f"{memory} is used after {taker} took over its memory")
        return kind

    def tensor(self, name: str) -> None:
        if self.live(name) in ("symbol", "opaque", "arena"):
            self.fail(f"{name} is no tensor")

    def first_use(self, name: str) -> int:
        return next(iter(self.uses.get(name, ())), len(self.p.body))

    def last_use(self, name: str) -> int:
        return self.uses.get(name, [-1])[-1]

    # ---- instructions
    def instruction(self, i: ins.Instr) -> None:
        for name in symbols(i):
            if self.kind.get(name) not in ("symbol", "result"):
                self.fail(f"symbol {name} is not bound")
        for name, kind in FIELDS[type(i)]:
            self.field(kind, getattr(i, name))
        self.ranks(i)
        if fault := self.owners.missing(i) or self.in_flight.fault(i):
            self.fail(fault)
        match i:
            case ins.Symbol():
                self.define(i.name, "symbol")
            case ins.Arena():
                if any(a.device == i.device for a in self.arenas.values()):
                    self.fail(f"a second arena on {i.device}")
                self.define(i.name, "arena")
                self.arenas[i.name] = i
            case ins.Place():
                self.place(i)
            case ins.Alloc():
                self.define(i.name, "alloc")
            case ins.Reuse():
                self.reuse(i)
            case ins.Free():
                self.free(i)
            case ins.View():
                self.define(i.name, "tensor")
                self.base[i.name] = i.base
            case ins.Constant():
                self.define(i.name, "constant")
            case ins.DefineKernel():
                if i.name in self.kernels:
                    self.fail(f"kernel {i.name} is defined twice")
                self.kernels[i.name] = i
            case ins.Launch():
                self.launch(i)
            case _ if isinstance(i, ins.Call):
                self.call(i)
            case ins.Return():
                self.at_return(i)
            case _:
                for name in defined(i):
                    self.define(name, "tensor")

    def field(self, kind: Kind, value: Any) -> None:
        """The rules that hold for every field of a kind."""
        match kind:
            case Kind.USES:
                self.tensor(value)
            case Kind.ALL_USED:
                for name in value:
                    self.tensor(name)
            case Kind.ARENA:
                if self.live(value) != "arena":
                    self.fail(f"{value} is no arena")
            case Kind.SOURCE if isinstance(value, (ins.SizeOf, ins.ItemOf)):
                self.tensor(value.tensor)
            case Kind.OPERAND:
                self.operand(value)
                for name in refs(value):
                    self.tensor(name)
            case Kind.OPERANDS:
                for o in value:
                    self.operand(o)
            case Kind.KEYWORDS:
                for _, o in value:
                    self.operand(o)
            case Kind.OUTPUTS:
                for o in value:
                    self.operand(ins.Ref(o.tensor) if isinstance(o, ins.ValueOf) else o)
            case Kind.CONSTANT if not 0 <= value < self.p.n_constants:
                self.fail(f"the program has {self.p.n_constants} constants")
            case Kind.PROGRAMS if any(not 0 <= k < len(self.p.programs) for k in value):
                self.fail(f"the program has {len(self.p.programs)} subprograms")
            case Kind.CALLABLE if not 0 <= value < self.p.n_callables:
                self.fail(f"the program has {self.p.n_callables} callables")
            case Kind.CHECKS:
                unknown = [c.error for c in value if c.error not in ERRORS]
                if unknown:
                    self.fail(f"a check of unknown kind {unknown[0]!r}")
            case _:
                pass

    def ranks(self, i: ins.Instr | ins.Input) -> None:
        n, strides = len(getattr(i, "shape", ())), len(getattr(i, "strides", ()))
        if n != strides:
            self.fail(f"{n} sizes but {strides} strides")

    def operand(self, o: ins.Operand) -> None:
        if isinstance(o, ins.ValueOf):
            self.fail("a tensor's value can only be returned")
        if isinstance(o, ins.Literal) and o.kind not in LITERALS:
            self.fail(f"a literal of unknown kind {o.kind!r}")
        for name in refs(o):
            if self.live(name) in ("arena", "symbol"):
                self.fail(f"{name} is no tensor")

    def place(self, i: ins.Place) -> None:
        self.define(i.name, "place")
        if isinstance(i.offset, int) and i.offset % i.dtype.nbytes:
            self.fail(f"byte {i.offset} is no place for {i.dtype}")
        ranges = self.ranges[i.name] = [_bytes(i, env) for env in self.samples]
        room = self.arenas[i.arena].nbytes
        if any(
            end > evaluate(room, env) for (_, end), env in zip(ranges, self.samples, strict=True)
        ):
            self.fail(f"it ends beyond the {room} bytes of {i.arena}")
        for other in self.placed.values():
            if other.arena == i.arena:
                self.check_apart(i, other)
        self.placed[i.name] = i

    def check_apart(self, i: ins.Place, other: ins.Place) -> None:
        last, first = self.last_use(other.name), self.first_use(i.name)
        # What a kernel overwrites in place starts at the same byte and is read for the last time by
        # that kernel.
        if last < first or (last == first and i.offset == other.offset):
            return
        if _overlap(self.ranges[i.name], self.ranges[other.name]):
            self.fail(f"its memory overlaps that of {other.name}, which is live")

    def reuse(self, i: ins.Reuse) -> None:
        if self.kind[i.old] != "alloc":
            self.fail(f"{i.old} was not allocated by this program")
        if i.old in self.spent:
            self.fail(f"{i.old} was already taken over by {self.spent[i.old]}")
        self.define(i.name, "alloc")
        self.spent[i.old] = i.name

    def free(self, i: ins.Free) -> None:
        kind = self.kind.get(i.name)
        if kind is None:
            self.fail(f"{i.name} is freed before it is defined")
        if kind in ("symbol", "arena", "opaque", "constant"):
            self.fail(f"{i.name} is no tensor that can be freed")
        if i.name in self.freed:
            self.fail(f"{i.name} was already freed by instruction {self.freed[i.name]}")
        self.freed[i.name] = self.at

    def launch(self, i: ins.Launch) -> None:
        k = self.kernels.get(i.kernel)
        if k is None:
            self.fail(f"kernel {i.kernel} is launched before it is defined")
        if (len(i.args), len(i.sizes)) != (k.n_args, k.n_sizes):
            self.fail(f"{i.kernel} takes {k.n_args} tensors and {k.n_sizes} sizes")
        stray = [n for n in i.outs if n not in i.args]
        if stray:
            self.fail(f"{stray[0]} is written but no argument")

    def call(self, i: ins.Call) -> None:
        if may_keep(i):
            for name in used(i):
                if self.kind[root(name, self.base)] == "place":
                    self.fail(f"{name} lies in the arena and the call may keep it")
        if isinstance(i, ins.CallExtern):
            given = {n for _, o in i.kwargs for n in refs(o)}
            if not given.issuperset(i.into):
                self.fail("a result is written into a tensor that is no keyword argument")
        if isinstance(i, ins.CallPrograms):
            signatures = [(len(p.inputs), len(operands(p.body[-1]))) for p in self.p.programs]
            if fault := i.control.fault(len(i.args), signatures, len(i.outs)):
                self.fail(fault)
        for name in defined(i):
            self.define(name, "result")

    def at_return(self, i: ins.Return) -> None:
        if self.at != len(self.p.body) - 1:
            self.fail("instructions follow")
        for o in i.values:
            if not isinstance(o, (ins.Ref, ins.Literal, ins.ValueOf, int, Expr)):
                self.fail(f"{o} is no output")
            for name in refs(o) if isinstance(o, ins.Ref) else ():
                if self.kind[root(name, self.base)] == "place":
                    self.fail(f"output {name} lies in the arena")


def _uses(body: Sequence[ins.Instr], moments: Sequence[int]) -> dict[str, list[int]]:
    """Moments at which each tensor, or a view of it, is used; views do not count as uses
    themselves."""
    base = views_of(body)
    out: dict[str, list[int]] = {}
    for k, i in zip(moments, body, strict=True):
        for name in () if isinstance(i, ins.View) else used(i):
            at: str | None = name
            while at is not None:
                out.setdefault(at, []).append(k)
                at = base.get(at)
    return out


# ------------------------------------------------------------------------------------ sample values
Env = Mapping[str, int]
Ranges = Sequence[tuple[int, int]]
_SAMPLES = (0, 1, 2, 3, 5, 8, 17, 64, 127, 1000)


def _samples(p: ins.WrapperProgram) -> list[dict[str, int]]:
    """Values of all symbols: one set for a program without symbols, else a handful, within the
    symbols' ranges.

    Those at which a function of sizes has no value, or a size divides by zero, are left out.

    A symbol that is an expression takes its value from the others. Conditions that are checked hold
    symbols without the ranges that follow from them."""
    found = {a for i in p.body for e in sizes(i) for a in free_symbols(e)}
    atoms = {a.name: a for a in sorted(found, key=lambda a: (a.lo, -a.hi))}
    given = {
        i.name: i.value
        for i in p.body
        if isinstance(i, ins.Symbol) and isinstance(i.value, (int, Expr))
    }
    free = [n for n in sorted(atoms) if n not in given]
    placed = [e for i in p.body if isinstance(i, (ins.Arena, ins.Place)) for e in sizes(i)]
    if not atoms:
        return [{}]
    out = []
    for k, step in enumerate(_SAMPLES):
        env: dict[str, int] = {}
        for j, name in enumerate(free):
            atom = atoms[name]
            lo = 0 if atom.lo == float("-inf") else int(atom.lo)
            value = lo + (step if j == 0 else _SAMPLES[(k + j) % len(_SAMPLES)])
            env[name] = int(min(value, atom.hi))
        with suppress(ArithmeticError, ValueError):  # a call at these sizes fails there
            for name, source in given.items():
                env[name] = evaluate(source, env)
            for e in placed:
                evaluate(e, env)
            out.append(env)
    return out


def _bytes(i: ins.Place, env: Env) -> tuple[int, int]:
    """First byte and one past the last byte of a placed tensor; equal if it has no elements."""
    start = evaluate(i.offset, env)
    shape = [evaluate(s, env) for s in i.shape]
    if 0 in shape:
        return start, start
    reach = sum((s - 1) * evaluate(t, env) for s, t in zip(shape, i.strides, strict=True))
    return start, start + (reach + 1) * i.dtype.nbytes


def _overlap(a: Ranges, b: Ranges) -> bool:
    """Whether two ranges share a byte at any of the sample values."""
    return any(
        a0 < b1 and b0 < a1 and a0 < a1 and b0 < b1 for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
