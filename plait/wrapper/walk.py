"""What each instruction defines, uses and computes with: the one place that knows the fields of all instructions.

Passes, the verifier and the builder ask here, so that a new instruction is described once. A name is a tensor, an arena
or an integer symbol; all of them share one space of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import assert_never

from plait.ir.sizes import Expr, Size, free_symbols
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    AssertAlignment,
    AssertScalar,
    AssertSizeStride,
    BumpVersion,
    CallExtern,
    CallPython,
    CheckFinite,
    Constant,
    Copy,
    DefineKernel,
    Fill,
    Free,
    Input,
    Instr,
    ItemOf,
    Launch,
    ListOf,
    Literal,
    Note,
    OpaqueInput,
    Operand,
    Place,
    Ref,
    Return,
    Reuse,
    SizeOf,
    Symbol,
    SymbolInput,
    TensorInput,
    View,
)


def defined(i: Instr) -> tuple[str, ...]:
    """Names that come into being here: tensors, arenas, symbols. Kernels have a space of their own."""
    match i:
        case Symbol() | Arena() | Place() | Alloc() | Reuse() | View() | Constant():
            return (i.name,)
        case CallExtern() | CallPython():
            return tuple(n for n in i.outs if n is not None)
        case (
            AssertScalar() | AssertSizeStride() | AssertAlignment() | CheckFinite() | Free()
            | DefineKernel() | Launch() | Copy() | BumpVersion() | Fill() | Note() | Return()
        ):  # fmt: skip
            return ()
        case _:
            assert_never(i)


def refs(o: Operand) -> Iterator[str]:
    """Tensors named in an operand, in order."""
    match o:
        case Ref(name):
            yield name
        case ListOf(items):
            for item in items:
                yield from refs(item)
        case Literal() | int() | Expr():
            return
        case _:
            assert_never(o)


def operand_sizes(o: Operand) -> Iterator[Size]:
    """Integer expressions in an operand, in order."""
    match o:
        case int() | Expr():
            yield o
        case ListOf(items):
            for item in items:
                yield from operand_sizes(item)
        case Literal() | Ref():
            return
        case _:
            assert_never(o)


def operands(i: Instr) -> tuple[Operand, ...]:
    """The operands of a call, a fill or a return; empty for the rest."""
    match i:
        case CallExtern() | CallPython():
            return (*i.args, *(v for _, v in i.kwargs))
        case Fill():
            return (i.value,)
        case Return():
            return i.values
        case _:
            return ()


def used(i: Instr) -> tuple[str, ...]:
    """Tensors and arenas that this reads, writes or refers to, each once, in order. Free uses nothing."""
    names: list[str] = []
    match i:
        case Symbol(_, SizeOf(tensor) | ItemOf(tensor)):
            names.append(tensor)
        case AssertSizeStride() | AssertAlignment() | CheckFinite() | BumpVersion() | Fill():
            names.append(i.tensor)
        case Place():
            names.append(i.arena)
        case Reuse():
            names.append(i.old)
        case View():
            names.append(i.base)
        case Launch():
            names.extend((*i.args, *i.outs))
        case CallExtern():
            names.extend(i.into)
        case Copy():
            names.extend((i.dst, i.src))
        case (
            Symbol() | AssertScalar() | Arena() | Alloc() | Free() | Constant() | DefineKernel()
            | CallPython() | Note() | Return()
        ):  # fmt: skip
            pass
        case _:
            assert_never(i)
    for o in operands(i):
        names.extend(refs(o))
    return tuple(dict.fromkeys(names))


def sizes(i: Instr) -> tuple[Size, ...]:
    """Integer expressions that this evaluates, in order."""
    match i:
        case Symbol(_, int() | Expr() as value):
            return (value,)
        case AssertScalar():
            return (i.expr,)
        case AssertSizeStride():
            return (*i.shape, *i.strides)
        case Arena():
            return (i.nbytes,)
        case Place() | View():
            return (i.offset, *i.shape, *i.strides)
        case Alloc() | Reuse():
            return (*i.shape, *i.strides)
        case Launch():
            return (*i.sizes, i.work_ns)
        case CallExtern() | CallPython() | Fill() | Return():
            return tuple(s for o in operands(i) for s in operand_sizes(o))
        case (
            Symbol() | AssertAlignment() | CheckFinite() | Free() | Constant() | DefineKernel()
            | Copy() | BumpVersion() | Note()
        ):  # fmt: skip
            return ()
        case _:
            assert_never(i)


def symbols(i: Instr) -> frozenset[str]:
    """Names of the symbols in this instruction's expressions."""
    return frozenset(a.name for e in sizes(i) for a in free_symbols(e))


def input_sizes(i: Input) -> tuple[Size, ...]:
    """The sizes and strides that an input promises."""
    match i:
        case TensorInput():
            return (*i.shape, *i.strides)
        case SymbolInput() | OpaqueInput():
            return ()
        case _:
            assert_never(i)


def map_operand(o: Operand, ref: Callable[[str], str], size: Callable[[Size], Size]) -> Operand:
    """The operand with its tensor names and its integer expressions replaced."""
    match o:
        case Ref(name):
            return Ref(ref(name))
        case ListOf(items):
            return ListOf(tuple(map_operand(item, ref, size) for item in items))
        case int() | Expr():
            return size(o)
        case Literal():
            return o
        case _:
            assert_never(o)


def rewrite(i: Instr, ref: Callable[[str], str], size: Callable[[Size], Size]) -> Instr:
    """The instruction with used tensors renamed by ref and expressions replaced by size. What it defines stays."""

    def many(values: tuple[Size, ...]) -> tuple[Size, ...]:
        return tuple(map(size, values))

    match i:
        case Symbol():
            if isinstance(i.value, (SizeOf, ItemOf)):
                return replace(i, value=replace(i.value, tensor=ref(i.value.tensor)))
            return replace(i, value=size(i.value))
        case AssertScalar():
            return replace(i, expr=size(i.expr))
        case AssertSizeStride():
            return replace(i, tensor=ref(i.tensor), shape=many(i.shape), strides=many(i.strides))
        case AssertAlignment() | CheckFinite() | BumpVersion():
            return replace(i, tensor=ref(i.tensor))
        case Arena():
            return replace(i, nbytes=size(i.nbytes))
        case Place():
            return replace(
                i, arena=ref(i.arena), offset=size(i.offset),
                shape=many(i.shape), strides=many(i.strides),
            )  # fmt: skip
        case Alloc():
            return replace(i, shape=many(i.shape), strides=many(i.strides))
        case Reuse():
            return replace(i, old=ref(i.old), shape=many(i.shape), strides=many(i.strides))
        case Free():
            return replace(i, name=ref(i.name))
        case View():
            return replace(
                i, base=ref(i.base), shape=many(i.shape), strides=many(i.strides),
                offset=size(i.offset),
            )  # fmt: skip
        case Launch():
            return replace(
                i, args=tuple(map(ref, i.args)), sizes=many(i.sizes),
                outs=tuple(map(ref, i.outs)), work_ns=size(i.work_ns),
            )  # fmt: skip
        case CallExtern() | CallPython():
            args = tuple(map_operand(o, ref, size) for o in i.args)
            kwargs = tuple((k, map_operand(o, ref, size)) for k, o in i.kwargs)
            if isinstance(i, CallExtern):
                return replace(i, args=args, kwargs=kwargs, into=tuple(map(ref, i.into)))
            return replace(i, args=args, kwargs=kwargs)
        case Copy():
            return replace(i, dst=ref(i.dst), src=ref(i.src))
        case Fill():
            return replace(i, tensor=ref(i.tensor), value=map_operand(i.value, ref, size))
        case Return():
            return replace(i, values=tuple(map_operand(o, ref, size) for o in i.values))
        case Constant() | DefineKernel() | Note():
            return i
        case _:
            assert_never(i)
