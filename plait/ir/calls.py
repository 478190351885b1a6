"""Calls of operators that are no loops, and what they are given.

An `Extern` stands among the loops of a program (`plait/ir/loops.py`); eager's kernel, a library or
a Python function runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from plait.ir.dtypes import DType
from plait.ir.expr import Size, smax, smin


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A strided tensor operand of an extern: buffer `buf` seen with this shape, strides and element
    offset (dtype None: the buffer's)."""

    buf: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class Number(TensorArg):
    """An output of the program: the only element of an f64 or b1 buffer as a Python float or
    bool."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A constant operand; kind and text as in wrapper.instructions.Literal."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ListArg:
    """A list operand."""

    items: tuple[ExternArg, ...]


ExternArg = TensorArg | Scalar | ListArg | Size

WAIT = "_c10d_functional::wait_tensor"


def starts_collective(op: str) -> bool:
    """Whether an operator starts a collective and gives what WAIT waits for."""
    return op.startswith(("_c10d_functional::", "_c10d_functional_autograd::")) and op != WAIT


CONTROL_KINDS = ("call", "cond", "loop", "rounds", "scan")
LOOPS = ("loop", "rounds")


@dataclass(frozen=True, slots=True)
class Control:
    """Which subprograms a call runs, and what its operands are to them: first the condition of a
    cond, then what is carried, what is scanned, and what every run is given as it is.

    kind: 'call' (runs the only program), 'cond' (the first if the condition holds, else the
        second), 'loop' (the second, for as long as the first holds), 'rounds' (as 'loop'; what each
        round gave is stacked, or, if there was none, what is carried is the only one) or 'scan'
        (the only one, once a slice).
    programs: their numbers among the subprograms of the program.
    carried: of how many operands a round gives the values of the next one. They are the first
        results of the program that is repeated.
    scanned: of how many operands each round is given a slice. Results that are not carried are
        stacked.
    """

    kind: str
    programs: tuple[int, ...]
    carried: int = 0
    scanned: int = 0

    def fault(self, n_operands: int, signatures: Sequence[tuple[int, int]], n_results: int) -> str:
        """Why it cannot run programs with these numbers of inputs and results, in words; "" if it
        can."""
        n_given = n_operands - (self.kind == "cond")
        known = [signatures[k] for k in self.programs if 0 <= k < len(signatures)]
        if self.kind not in CONTROL_KINDS:
            return f"control flow of unknown kind {self.kind!r}"
        if len(known) != len(self.programs) or len(known) != 1 + (self.kind in ("cond", *LOOPS)):
            return "control flow has a wrong number of programs"
        if any(inputs != n_given for inputs, _ in known):
            return "control flow has a program with other operands than it is given"
        results = [n for _, n in known]
        if results[-1] != n_results or (self.kind == "cond" and results[0] != n_results):
            return "control flow has a program with other results than it gives"
        carried = self.kind in (*LOOPS, "scan") and self.carried
        scanned = self.kind == "scan" and self.scanned
        if (carried, scanned) != (self.carried, self.scanned) or carried + scanned > n_given:
            return "control flow carries or scans more than it is given"
        if self.kind in LOOPS and (results[0], results[1]) != (1, carried):
            return "a loop needs a condition with one result, and a body that gives what it carries"
        if self.kind == "scan" and (not scanned or carried > n_results):
            return "a scan needs something to scan, and a body that gives what it carries"
        return ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile and launch a user's kernel.

    call: the statement that calls the user's function, on p0, p1, ... (pointers) and s0, s1, ...
        (sizes).
    options: what the compiler is told beside.
    grid: programs of a launch, see `pack_grid`.
    """

    call: str
    options: tuple[tuple[str, bool | int | str | None], ...]
    grid: Size


@dataclass(frozen=True, slots=True)
class DeviceKernel:
    """A kernel that is no loop nest: the user's, or one of a kind that targets know
    (`plait/ir/attention.py`).

    name: unique in the program and its subprograms.
    """

    name: str

    @property
    def grids(self) -> tuple[Size, ...]:
        """In how many programs it may be launched, as far as that is known."""
        return ()


@dataclass(frozen=True, slots=True)
class Operator:
    """The operator of a product in whose place a kernel is, which the vendor's library computes.

    name: `mm`, `addmm`, `_addmm_activation` or `_int_mm`
    dims: of what it adds: 2 of a matrix, 1 of a row; 0: it adds nothing
    gelu: what the activation is; else relu
    is_planned: it is called, unless measuring finds the kernel faster
    is_followed: kernels that there are anyway compute what it leaves
    """

    name: str
    dims: int = 0
    gelu: bool = False
    is_planned: bool = False
    is_followed: bool = False


@dataclass(frozen=True, slots=True)
class Rival:
    """What may be faster than a kernel.

    nbytes: that a kernel beside the operator reads and writes; 0: there is none
    more_us: what else it takes more than the kernel does
    """

    operator: Operator
    nbytes: int = 0
    more_us: float = 0.0


@dataclass(frozen=True, slots=True)
class UserKernel(DeviceKernel):
    """A kernel that the user wrote, in the language of the device's own kernels. A launch is given
    the tensors of the call's operands, then its results, as pointers, and then its sizes.

    text: a module with the user's functions.
    pointers: the types of the pointers, as that language has them.
    variants: in which it may be compiled; they differ in time alone. Tuning chooses one.
    rival: what may be faster than all of them, on the first two operands.
    cold: operands that come from memory at each launch: weights. Others, where there are some, are
        in the cache, for kernels before make them.
    """

    text: str
    pointers: tuple[str, ...]
    variants: tuple[Variant, ...]
    rival: Rival | None = None
    cold: tuple[int, ...] = ()

    @property
    def grids(self) -> tuple[Size, ...]:
        return tuple(v.grid for v in self.variants)


MAX_GRID = ((1 << 31) - 1, (1 << 16) - 1, (1 << 15) - 1)
"""The largest grid along each dimension that one word holds."""


def pack_grid(x: Size, y: Size, z: Size) -> Size:
    """A grid as one word: x itself, or x, y and z side by side under a mark. 0 is an empty one.
    Exact as far as MAX_GRID goes; native/core/cuda.h reads it."""
    if (y, z) == (1, 1):
        return smax(x, 0)
    some = smin(1, smax(0, smin(smin(x, y), z)))
    return some * ((1 << 62) + z * (1 << 47) + y * (1 << 31) + x)


def unpack_grid(word: Size) -> tuple[Size, Size, Size]:
    """The grid that `pack_grid` was given, where it is not empty."""
    most = word if isinstance(word, int) else max(word.const, *(c for _, c in word.terms))
    if most < 1 << 62:
        return word, 1, 1
    return word % (1 << 31), word // (1 << 31) % (1 << 16), word // (1 << 47) % (1 << 15)


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of an ATen (or custom) op: outs[k] is its k-th tensor result (None: unused), with
    exactly the strides that its Buffer says.

    symbols: names of integer results by position (result k defines that symbol) where a result is
    an int.
    aliases: names of buffers that a result may share memory with (views made by an op: then the
    result keeps them alive).
    mutates: buffers it writes in place. effectful: must run even if unused, and in program order
    with other effectful calls.
    may_keep: it may keep or alias its arguments, so these must not live in an arena.
    as_eager: its results have eager's bits: nothing else that computes the same stands for it.
    held: buffers that a collective which this call waits for was given: it counts as a reader.
    callable_index: >= 0 means Python callable of that number.
    control: it runs subprograms; the op is the higher-order operator that it came from.
    kernel: it launches a kernel on its operands, tensors first, and its results, which the plan
        gives memory.
    fallback: no lowering rule exists (counted and shown by explain), as opposed to extern by choice
    (mm, convolution, SDPA).
    out_variant: the result may be computed into memory that plait provides, through op `out_op`
    with these kwarg names."""

    outs: tuple[str | None, ...]
    op: str
    args: tuple[ExternArg, ...]
    kwargs: tuple[tuple[str, ExternArg], ...] = ()
    symbols: tuple[tuple[int, str], ...] = ()
    aliases: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    effectful: bool = False
    may_keep: bool = True
    as_eager: bool = False
    callable_index: int = -1
    control: Control | None = None
    kernel: DeviceKernel | None = None
    fallback: bool = True
    out_op: str = ""
    out_names: tuple[str, ...] = ()
    flops: Size = 0
    origin: tuple[str, ...] = ()

    @property
    def is_operator(self) -> bool:
        """Whether it calls the operator itself, and no Python, subprogram or kernel."""
        return self.callable_index < 0 and self.control is None and self.kernel is None

    @property
    def operands(self) -> tuple[ExternArg, ...]:
        """All that it is given."""
        return (*self.args, *(v for _, v in self.kwargs))

    @property
    def made(self) -> tuple[str, ...]:
        """The buffers that its results are, where they are used."""
        return tuple([o for o in self.outs if o is not None])

    @property
    def starts(self) -> bool:
        """Whether it starts a collective, whose result is there once it is waited for."""
        return starts_collective(self.op)

    @property
    def fence(self) -> bool:
        """Whether it decides where, or after what, all that follows runs: nothing moves across
        it."""
        return self.op.startswith("streams::")


class _Nested(Protocol):
    @property
    def programs(self: N) -> tuple[N, ...]: ...


N = TypeVar("N", bound=_Nested)


def all_programs(program: N) -> Iterator[N]:
    """A program, then its subprograms and theirs, in order."""
    yield program
    for p in program.programs:
        yield from all_programs(p)
