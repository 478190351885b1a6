"""What the scheduler hands on: kernels to emit, calls to make, in order, with the memory each
buffer gets.

A `Kernel` is one iteration space with a straight list of statements; kernel targets turn it into
source, `wrapper/build.py` turns the whole `Plan` into instructions. Nothing here knows a target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from plait.ir.calls import Extern, TensorArg, UserKernel, all_programs
from plait.ir.checks import Check
from plait.ir.dtypes import DType
from plait.ir.expr import Expr, Size, atom_of, compare, free_symbols, symbol
from plait.ir.loops import Alias, Assert, Buffer, Item, LoopProgram, Mutate, Node, check_of, walk


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combines `value` over all rvars into the result `name`, one value per point of vars.

    kind: a row of REDUCTIONS. Later statements read it as node acc[name], or acc[name + part] where
    it has several results. running=True (kinds that scan; one rvar): acc[name] at full level is the
    combination of values up to and including this point. segment: acc[name] at full level is the
    combination over the segment that this point is in; rvars (row-major) are cut into segments of
    so many points, a power of two. 0: it is over all. down: see `settle_rows`."""

    name: str
    kind: str
    value: Node
    running: bool = False
    segment: int = 0
    down: bool | None = None

    @property
    def inner(self) -> bool:
        """Whether its results are at full level."""
        return self.running or self.segment > 0


@dataclass(frozen=True, slots=True)
class Store:
    """buf[index] = value (mode 'store'), or buf[index] (mode)= value for 'add', 'mul', 'min',
    'max', or (mode 'sum', at full level) the sums of value over the outer points, which are dealt
    out to as many parts as `part` of an index has values, a program each. Which they are is the
    target's choice.

    full: executed at every point of vars x rvars; otherwise once per point of vars. index is
    LOGICAL, over vars, rvars and Arg symbols $k, which mean index_args[k]. mask: nothing is stored
    where it is false. atomic: points of different threads may collide. segment: all of so many
    points, as of a Reduce, store the same to one element; 0: each stores by itself."""

    buf: str
    index: tuple[Size, ...]
    value: Node
    full: bool
    mode: str = "store"
    index_args: tuple[Node, ...] = ()
    mask: Node | None = None
    atomic: bool = False
    segment: int = 0


Stmt = Reduce | Store


SEGMENTED = ("sum", "prod", "max", "min", "xor")
"""Kinds of reductions that may be over segments."""


def segment_axes(rvars: Sequence[Expr], segment: int) -> tuple[Expr, ...] | None:
    """The reduced axes that one segment has, the last ones; None where it ends inside of one."""
    for k in range(len(rvars)):
        extents = [atom_of(v).extent for v in rvars[k:]]
        known = [n for n in extents if isinstance(n, int)]
        if len(known) == len(extents) and prod(known) == segment:
            return tuple(rvars[k:])
    return None


PART = "part"


def part_of(parts: Size) -> Expr:
    """One of the parts that a kernel's outer points are dealt out to."""
    return symbol(PART, extent=parts)


def column_programs(stmts: Iterable[Stmt]) -> Size | None:
    """How many programs a kernel's outer points are dealt out to, if it sums columns."""
    sums = (s for s in stmts if isinstance(s, Store) and s.mode == "sum")
    return next(
        (a.extent for s in sums for e in s.index for a in free_symbols(e) if a.name == PART), None
    )


def stmt_roots(s: Stmt) -> tuple[Node, ...]:
    """Every expression that a statement evaluates."""
    if isinstance(s, Reduce):
        return (s.value,)
    extra = () if s.mask is None else (s.mask,)
    return (s.value, *s.index_args, *extra)


@dataclass(frozen=True, slots=True)
class Form:
    """One of several ways to do the same work, of which a call takes one: the kernels of each read
    and write the same buffers, besides what they alone use.

    pick: number of the way that a call takes, over size symbols.
    symbol: stands for it, from 0 up to the number of ways less 1.
    at: number of this way.
    """

    pick: Size
    symbol: Expr
    at: int

    @property
    def runs(self) -> Size:
        """1 where a call takes this way, else 0."""
        return compare("eq", self.symbol, self.at)


@dataclass(frozen=True)
class Kernel:
    """One loop nest: for every point of vars (independent of each other, any order, may be split
    over threads), run stmts; those at full level and the Reduces run over all points of rvars
    (row-major).

    A node is at outer level if it holds no rvar and no running acc. A value stored by an earlier
    statement of the kernel is never loaded again: later statements hold its node. vars are in the
    memory order the scheduler chose: the last of (vars, rvars) is meant to be innermost, but an
    target may vectorise any axis.
    name: telling and unique in the program. args: buffers in the order of the pointer arguments
    (each once; an in-place pair is two args). outs: those written.
    sizes: the size symbols used, in the order of the integer arguments; hints: plausible values of
    them. sequential: points must run in row-major order on one thread (scatters that collide,
    ordered).
    work_ns: estimate on one core. origin: source lines and ATen ops.
    parts: nests that one launch runs one after the other with nothing in between, since none needs
    what another makes; such a kernel has no axes and statements of its own, and its args, outs and
    sizes are those of all. alike: the parts are one nest over other buffers, of other lengths
    (`batch.py`). lengths: further integer arguments, where it was written for any length
    (`schedule/share_lengths.py`). grid: programs of a launch, on devices that launch grids; known
    once the kernel is emitted. form: which of several it is, if the work can be done in several
    ways."""

    name: str
    vars: tuple[Expr, ...]
    rvars: tuple[Expr, ...]
    stmts: tuple[Stmt, ...]
    args: tuple[Buffer, ...]
    outs: tuple[str, ...]
    sizes: tuple[Expr, ...]
    sequential: bool = False
    work_ns: Size = 0
    origin: tuple[str, ...] = ()
    parts: tuple[Kernel, ...] = ()
    hints: tuple[int, ...] = ()
    alike: bool = False
    lengths: tuple[int, ...] = ()
    grid: Size = 1
    form: Form | None = None

    @property
    def hint_of(self) -> dict[str, int]:
        """The hints by symbol."""
        return dict(zip(map(str, self.sizes), self.hints, strict=False))

    @property
    def device(self) -> str:
        """Where its buffers are, and it runs."""
        return self.args[0].device if self.args else "cpu"

    @property
    def nests(self) -> tuple[Kernel, ...]:
        """The loop nests: its parts, or itself."""
        return self.parts or (self,)

    @property
    def apart(self) -> tuple[Expr, ...]:
        """Of the first and last of vars, those along which no two points store to one element: a
        sequential kernel may be shared by threads along either."""
        stores = [s for s in self.stmts if isinstance(s, Store)]
        ends = dict.fromkeys((*self.vars[:1], *self.vars[-1:]))
        return tuple(v for v in ends if all(v in s.index for s in stores))

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the kernel's run-time checks raise: it returns k where checks[k - 1] failed."""
        if self.parts:
            return tuple(c for p in self.parts for c in p.checks)
        nodes = walk([n for s in self.stmts for n in stmt_roots(s)])
        return tuple(dict.fromkeys(c for n in nodes if (c := check_of(n)) is not None))


@dataclass(frozen=True, slots=True)
class UserLaunch:
    """A launch of a user's kernel, as targets of kernels see it.

    buffers: what its pointers point to, as far as they read and write.
    aligned: positions of pointers that are multiples of 16.
    sizes: the values of its integers, as far as they are known.
    hints: of symbols.
    """

    kernel: UserKernel
    device: str
    buffers: tuple[TensorArg, ...]
    dtypes: tuple[DType, ...]
    aligned: tuple[int, ...]
    sizes: tuple[Size, ...]
    hints: Mapping[str, int]


def launching_calls(plan: Plan) -> list[Extern]:
    """The calls of a plan that launch kernels which are no loop nests."""
    return [s for s in plan.steps if isinstance(s, Extern) and s.kernel is not None]


def device_of(plan: Plan, call: Extern) -> str:
    """Where a call launches its kernel."""
    return plan.buffers[next(a.buf for a in call.args if isinstance(a, TensorArg))].device


def launching_devices(plan: Plan) -> list[str]:
    """The devices on which a plan and its subprograms launch kernels, each once."""
    calls = ((p, call) for p in all_programs(plan) for call in launching_calls(p))
    found = [k.device for k in kernels_of(plan)] + [device_of(p, call) for p, call in calls]
    return list(dict.fromkeys(found))


def user_launch(plan: Plan, call: Extern, unaligned: Collection[str]) -> UserLaunch:
    """What a plan's call of a user's kernel is given. unaligned: buffers that may start
    anywhere."""
    assert isinstance(call.kernel, UserKernel), f"{call.op} launches no kernel with a text"
    given = [a for a in call.args if isinstance(a, TensorArg)]
    buffers = [plan.buffers[o] for o in call.made]
    given += [TensorArg(b.name, b.shape, b.strides, 0) for b in buffers]
    dtypes = tuple(a.dtype or plan.buffers[a.buf].dtype for a in given)
    aligned = tuple(
        k
        for k, (a, dtype) in enumerate(zip(given, dtypes, strict=True))
        if a.buf not in unaligned and a.offset * dtype.nbytes % 16 == 0
    )
    sizes = tuple(a for a in call.args if isinstance(a, (int, Expr)))
    return UserLaunch(
        call.kernel, device_of(plan, call), tuple(given), dtypes, aligned, sizes,
        plan.program.hints,
    )  # fmt: skip


Step = Kernel | Extern | Alias | Item | Assert | Mutate


@dataclass(frozen=True, slots=True)
class Fused:
    """Two groups became one."""

    into: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was not done; printed by explain."""

    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """a and b (kernel or op names) were candidates for fusion and stayed apart."""

    a: str
    b: str
    reason: Reason


@dataclass(frozen=True)
class MemoryPlan:
    """arena_nbytes: size of the block. offsets: buffer -> byte offset in it. in_place: output or
    intermediate -> the dying buffer in whose memory it is written (Reuse). Buffers in none of these
    are allocated by themselves (outputs, extern results)."""

    arena_nbytes: Size = 0
    offsets: Mapping[str, Size] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The scheduled program. steps run in order; frees[k]: buffers whose last use is step k.
    buffers: final layouts of everything that still exists. programs: the plans of subprograms."""

    program: LoopProgram
    steps: tuple[Step, ...]
    frees: tuple[tuple[str, ...], ...]
    buffers: Mapping[str, Buffer]
    memory: MemoryPlan
    refusals: tuple[Refusal, ...] = ()
    programs: tuple[Plan, ...] = ()


def kernels_of(plan: Plan) -> list[Kernel]:
    """The kernels of a plan and its subprograms, in order."""
    return [s for p in all_programs(plan) for s in p.steps if isinstance(s, Kernel)]
