"""Calls of operators that are no loops, and what they are given.

An `Extern` stands among the loops of a program (`plait/ir/loops.py`); eager's kernel, a library or
a Python function runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.ir.dtypes import DType
from plait.ir.expr import Size


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
    callable_index: >= 0 means Python callable of that number.
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
    effectful: bool = False
    may_keep: bool = True
    callable_index: int = -1
    fallback: bool = True
    out_op: str = ""
    out_names: tuple[str, ...] = ()
    flops: Size = 0
    origin: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[ExternArg, ...]:
        """All that it is given."""
        return (*self.args, *(v for _, v in self.kwargs))

    @property
    def made(self) -> tuple[str, ...]:
        """The buffers that its results are, where they are used."""
        return tuple(o for o in self.outs if o is not None)

    @property
    def fence(self) -> bool:
        """Whether it decides where, or after what, all that follows runs: nothing moves across
        it."""
        return self.op.startswith("streams::")
