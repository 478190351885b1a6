"""The wrapper IR: one program is a typed list of frozen instructions that know nothing of any
target.

Comes from `wrapper/build.py` (a Plan becomes instructions), is rewritten by `wrapper/passes`,
checked by `wrapper/verify.py`, printed and read back by `wrapper/text.py`, and handed to one of the
targets. The meaning of every instruction is written where it is defined, and so is the kind of each
field (`wrapper/spec.py`). No field holds a string of any programming language.

Names: every tensor and every integer symbol of a program has one unique name; a name is defined
once and never redefined. Sizes, strides and offsets are in elements, `nbytes` fields are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from plait.ir.calls import Control
from plait.ir.checks import Check
from plait.ir.dtypes import DType
from plait.ir.expr import Size
from plait.wrapper.spec import Kind


# ----------------------------------------------------------------------------------------- operands
@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by its name, as an operand of an extern call or of Return."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant operand that is no tensor and no size.

    kind says how `text` reads: 'none', 'bool' ('True', 'False'), 'float' (float.hex or inf/nan),
    'str', 'complex' (two floats, real and imaginary part, with a space between), 'dtype' (DType
    name, else torch's), 'device' ('cpu', 'cuda:0'), 'layout', 'memory_format'. Integers are Sizes
    and need no Literal.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list operand (tensors, sizes, optional tensors, floats...)."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class ValueOf:
    """The only element of an f64 or b1 tensor as a Python float or bool; an operand of Return."""

    tensor: str


# An int or an Expr is an integer operand (SymInt or int in the schema).
Operand = Ref | Literal | ListOf | ValueOf | Size


@dataclass(frozen=True, slots=True)
class SizeOf:
    """Element `dim` of a tensor's sizes (kind='size') or strides ('stride'), or its storage offset
    ('offset')."""

    tensor: str
    kind: str
    dim: int


@dataclass(frozen=True, slots=True)
class ItemOf:
    """The value of a one-element tensor as an integer (bool reads 0 or 1)."""

    tensor: str


# ---------------------------------------------------------------------------------- kinds of fields
Defines = Annotated[str, Kind.DEFINES]
DefinesSymbol = Annotated[str, Kind.SYMBOL]
Results = Annotated[tuple[str | None, ...], Kind.RESULTS]
Uses = Annotated[str, Kind.USES]
AllUsed = Annotated[tuple[str, ...], Kind.ALL_USED]
InArena = Annotated[str, Kind.ARENA]
Ends = Annotated[str, Kind.ENDS]
AnOperand = Annotated[Operand, Kind.OPERAND]
Operands = Annotated[tuple[Operand, ...], Kind.OPERANDS]
Keywords = Annotated[tuple[tuple[str, Operand], ...], Kind.KEYWORDS]
Outputs = Annotated[tuple[Operand, ...], Kind.OUTPUTS]
Source = Annotated[SizeOf | ItemOf | Size, Kind.SOURCE]
ASize = Annotated[Size, Kind.SIZE]
Sizes = Annotated[tuple[Size, ...], Kind.SIZES]
ElementType = Annotated[DType, Kind.DTYPE]
Shape = Annotated[tuple[Size, ...], Kind.SHAPE]
Strides = Annotated[tuple[Size, ...], Kind.STRIDES]
KernelName = Annotated[str, Kind.KERNEL]
ConstantIndex = Annotated[int, Kind.CONSTANT]
CallableIndex = Annotated[int, Kind.CALLABLE]
ControlKind = Annotated[str, Kind.CONTROL]
Programs = Annotated[tuple[int, ...], Kind.PROGRAMS]
Operator = Annotated[str, Kind.OPERATOR]
Error = Annotated[str, Kind.ERROR]
Checks = Annotated[tuple[Check, ...], Kind.CHECKS]
Device = Annotated[str, Kind.DEVICE]
Text = Annotated[str, Kind.TEXT]
Int = Annotated[int, Kind.INT]
Flag = Annotated[bool, Kind.FLAG]
ForPasses = Annotated[bool, Kind.FOR_PASSES]
Condition = Annotated[Size, Kind.CONDITION]


# ---------------------------------------------------------------------------------------- signature
@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor argument. shape and strides are what was promised at compile time; symbols in them
    are defined by `Symbol(..., SizeOf(...))` instructions, never implicitly. device: 'cpu' or
    'cuda:N'."""

    name: Defines
    dtype: ElementType
    shape: Shape
    strides: Strides
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class SymbolInput:
    """A Python int argument that defines the symbol of this name."""

    name: DefinesSymbol


@dataclass(frozen=True, slots=True)
class OpaqueInput:
    """An argument that is neither tensor nor int (None, float, generator...). Extern calls may take
    it by Ref."""

    name: Defines


Input = TensorInput | SymbolInput | OpaqueInput


# ------------------------------------------------------------------------------------- instructions
@dataclass(frozen=True, slots=True)
class Symbol:
    """Defines integer `name`. value: read from a tensor, or an expression over symbols defined
    before."""

    name: DefinesSymbol
    value: Source


@dataclass(frozen=True, slots=True)
class AssertScalar:
    """The call fails with `message` unless expr != 0. Never dropped by any target.

    values: what the first marks {} of message stand for, in order. error: the class of
    `checks.ERRORS` that is raised.
    """

    expr: ASize
    message: Text
    values: Sizes = ()
    error: Error = "RuntimeError"


@dataclass(frozen=True, slots=True)
class AssertSizeStride:
    """The call fails unless tensor has this dtype and exactly these sizes and strides (strides of
    dimensions of size 1 and of empty tensors are free; so are the dtype and all strides if it is
    `opaque`).

    origin: the operator that made the tensor and its source lines, which the error names. copies:
    strides that are different are no error: from here on the name stands for a copy that has these
    strides."""

    tensor: Uses
    dtype: ElementType
    shape: Shape
    strides: Strides
    origin: Text = ""
    copies: Flag = False


@dataclass(frozen=True, slots=True)
class AssertAlignment:
    """The call fails unless the data pointer of tensor is a multiple of nbytes."""

    tensor: Uses
    nbytes: Int


@dataclass(frozen=True, slots=True)
class CheckFinite:
    """The call fails, naming `origin`, if tensor holds a NaN or, if they count, an infinity.
    Non-float tensors pass."""

    tensor: Uses
    origin: Text
    infinities: Flag = True


@dataclass(frozen=True, slots=True)
class Arena:
    """Checks a block of nbytes bytes, aligned to 64, out of the process-wide pool until the call
    ends. A program has at most one arena per device; two threads in one program hold two blocks."""

    name: Defines
    nbytes: ASize
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Place:
    """Defines tensor `name` in an arena at byte `offset`.

    It never leaves the call and is never handed to an op that may keep or alias its arguments."""

    name: Defines
    arena: InArena
    offset: ASize
    dtype: ElementType
    shape: Shape
    strides: Strides


@dataclass(frozen=True, slots=True)
class Alloc:
    """Defines tensor `name` with uninitialised memory of its own from the device's allocator.
    Outputs are made so."""

    name: Defines
    dtype: ElementType
    shape: Shape
    strides: Strides
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Defines tensor `name` on the memory of `old`, an Alloc'ed tensor that dies.

    The memory of old must be at least as large. The next instruction that uses `name` is the last
    that may use old: a kernel that reads old and writes `name` elementwise in place. Contents are
    undefined otherwise. old has a Free of its own."""

    name: Defines
    old: Uses
    dtype: ElementType
    shape: Shape
    strides: Strides


@dataclass(frozen=True, slots=True)
class Free:
    """The tensor is not used after this: an owned reference is dropped, an arena range becomes
    free."""

    name: Ends


@dataclass(frozen=True, slots=True)
class View:
    """Names memory that already exists; copies nothing.

    Element (i0, i1, ...) is at base's first element + offset + sum(ik * strides[k]), all in
    elements of `dtype`. Keeps base's storage alive where base is a tensor of its own.
    relative=False: offset counts from the start of base's storage instead."""

    name: Defines
    base: Uses
    dtype: ElementType
    shape: Shape
    strides: Strides
    offset: ASize
    relative: Flag = True


@dataclass(frozen=True, slots=True)
class Constant:
    """Defines tensor `name` as constant number `index` of the program's table of tensors (weights,
    folded values)."""

    name: Defines
    index: ConstantIndex


@dataclass(frozen=True, slots=True)
class DefineKernel:
    """Declares kernel `name` of the kernel library, with n_args buffer arguments and n_sizes
    integer arguments.

    checks: where a launch returns k > 0, the call fails with checks[k - 1]. device: 'cpu' or
    'cuda:N'; each kind of device has a library of its own."""

    name: KernelName
    n_args: Int
    n_sizes: Int
    checks: Checks = ()
    device: Device = "cpu"


@dataclass(frozen=True, slots=True)
class Launch:
    """Runs a kernel on the data pointers of `args` and the values of `sizes`.

    outs: the subset of args that it writes. work_ns: estimated nanoseconds on one core, an
    expression (decides parallelism and whether the GIL is released). parallel: the kernel may be
    split over threads. barrier: it must not start before all earlier launches of its region ended
    on every thread (False only where no data flows between them). grid: programs to launch on a
    GPU, where nothing runs for 0 of them; 1 on a CPU. when: `pick == k` where it belongs to the
    k-th of several ways to do the same work, of which symbol `pick` takes one: its grid is 0 where
    that is another. Each way writes all that the others write."""

    kernel: KernelName
    args: AllUsed
    sizes: Sizes
    outs: AllUsed
    work_ns: ASize
    parallel: Flag = True
    barrier: Flag = True
    grid: ASize = 1
    when: Condition = 1


@dataclass(frozen=True, slots=True)
class CallExtern:
    """Calls a PyTorch operator through the dispatcher and names its tensor results.

    op: 'namespace::name.overload' (overload may be empty: 'aten::mm'). Positional args in schema
    order, then kwargs by name; missing ones take the schema's default. outs: one name per result,
    None for one that nobody uses; for an op that returns a single TensorList the names are its
    elements. An int result defines a symbol of that name.
    into: names of existing tensors that receive the results (`out=` variants: then `op` is the out
    overload, the tensors stand in kwargs too and outs is empty). may_keep: the op may keep or alias
    its arguments, so none of them lies in an arena. as_eager: its results have eager's bits; else
    products on a GPU may be cuBLASLt's. fence: it orders streams or makes another one the current
    one, and stays where it is."""

    op: Operator
    args: Operands
    kwargs: Keywords
    outs: Results
    into: AllUsed = ()
    may_keep: Flag = True
    as_eager: Flag = False
    fence: ForPasses = False

    @property
    def label(self) -> str:
        """What is called, in words."""
        return self.op


@dataclass(frozen=True, slots=True)
class CallPython:
    """Calls Python object number `index` of the program's table of callables (higher-order ops,
    Python custom ops).

    The GIL is held. outs: one name per element of the tuple that it returns, or a single one for
    anything else."""

    index: CallableIndex
    label: Text
    args: Operands
    kwargs: Keywords
    outs: Results


@dataclass(frozen=True, slots=True)
class CallPrograms:
    """Runs subprograms of this program, of these numbers, as `ir.calls.Control` says: kind,
    carried, scanned and the order of args are as there.

    label: the operator that it came from. A subprogram copies what lies otherwise than it was
    traced with; slices of a scan are contiguous copies. A loop that never runs gives
    copies of what it carries. What runs is below autograd, in the dispatch state of the
    program's caller."""

    kind: ControlKind
    programs: Programs
    carried: Int
    scanned: Int
    label: Text
    args: Operands
    outs: Results

    @property
    def control(self) -> Control:
        """What it runs, as lowering said it."""
        return Control(self.kind, self.programs, self.carried, self.scanned)


Call = CallExtern | CallPython | CallPrograms
"""They run what plait did not compile, or another program: nothing is known of their results but
what is looked at. All but a CallExtern that says otherwise may keep their arguments."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Calls Python object number `index` of the program's table of callables with the words `node`
    and `label` and the tensor, as it is by now.

    The GIL is held. The object keeps and changes nothing of the tensor; what it returns is
    nobody's."""

    tensor: Uses
    index: CallableIndex
    node: Text
    label: Text

    def call(self) -> CallPython:
        """The same as a call."""
        words = Literal("str", self.node), Literal("str", self.label)
        return CallPython(self.index, self.node, (*words, Ref(self.tensor)), (), ())


@dataclass(frozen=True, slots=True)
class Copy:
    """dst.copy_(src): broadcasting and dtype conversion as ATen's copy_.

    Used for mutated inputs; bumps the version counter of dst when `bump`."""

    dst: Uses
    src: Uses
    bump: Flag = True


@dataclass(frozen=True, slots=True)
class BumpVersion:
    """A kernel wrote into input `tensor` in place: its autograd version counter goes up by one."""

    tensor: Uses


@dataclass(frozen=True, slots=True)
class Fill:
    """Sets every element of tensor to the Literal or Size value."""

    tensor: Uses
    value: AnOperand


@dataclass(frozen=True, slots=True)
class Partition:
    """What follows, up to the next Partition, is work of a GPU that may be recorded once and
    replayed as a whole (recorded=True), or has to run at every call because of `reason`. Changes no
    result."""

    recorded: Flag
    reason: Text = ""


@dataclass(frozen=True, slots=True)
class Note:
    """For readers only: source lines ('model.py:31') and ATen ops of what follows."""

    text: Text


@dataclass(frozen=True, slots=True)
class Return:
    """Ends the program. A Ref is a tensor, a Size an int, a ValueOf a float or bool,
    Literal('none') is None."""

    values: Outputs


Instr = (
    Symbol | AssertScalar | AssertSizeStride | AssertAlignment | CheckFinite | Arena | Place | Alloc
    | Reuse | Free | View | Constant | DefineKernel | Launch | Call | Hook | Copy
    | BumpVersion | Fill | Partition | Note | Return
)  # fmt: skip
INSTRUCTIONS: dict[type, str] = {
    Symbol: "let",
    AssertScalar: "require",
    AssertSizeStride: "require_layout",
    AssertAlignment: "require_aligned",
    CheckFinite: "require_finite",
    Arena: "take_arena",
    Place: "place",
    Alloc: "alloc",
    Reuse: "reuse",
    Free: "free",
    View: "view",
    Constant: "constant",
    DefineKernel: "kernel",
    Launch: "launch",
    CallExtern: "call",
    CallPython: "call_python",
    CallPrograms: "call_programs",
    Hook: "hook",
    Copy: "copy",
    BumpVersion: "bump_version",
    Fill: "fill",
    Partition: "partition",
    Note: "note",
    Return: "return",
}
"""The word of each in the text form. Their order numbers the instructions of a native plan."""
INPUTS: dict[type, str] = {
    TensorInput: "tensor_input",
    SymbolInput: "int_input",
    OpaqueInput: "object_input",
}


@dataclass(frozen=True)
class WrapperProgram:
    """A whole program: its signature and its instructions.

    Constants and callables are tables held beside it (they are no data); n_constants and
    n_callables are their lengths, as far as it and its subprograms number them. n_results: how many
    of the first values that it returns are for the caller, the others being kept for a backward
    pass; None: all of them. programs: its subprograms.
    """

    name: str
    inputs: tuple[Input, ...]
    body: tuple[Instr, ...]
    n_constants: int = 0
    n_callables: int = 0
    n_results: int | None = None
    # Kernel name -> source lines and ATen ops.
    origins: tuple[tuple[str, str], ...] = field(default=())
    programs: tuple[WrapperProgram, ...] = ()
