"""What each instruction defines, uses and computes with: the one place that knows the fields of all
instructions.

Passes, the verifier and the builder ask here, so that a new instruction is described once. A name
is a tensor, an arena or an integer symbol; all of them share one space of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from plait.ir.sizes import Expr, Size, free_symbols
from plait.wrapper import instructions as ins


def defined(i: ins.Instr) -> tuple[str, ...]:
    """Names that come into being here: tensors, arenas, symbols. Kernels have a space of their
    own."""
    match i:
        case (
            ins.Symbol()
            | ins.Arena()
            | ins.Place()
            | ins.Alloc()
            | ins.Reuse()
            | ins.View()
            | ins.Constant()
        ):
            return (i.name,)
        case ins.CallExtern() | ins.CallPython():
            return tuple(n for n in i.outs if n is not None)
        case (
            ins.AssertScalar() | ins.AssertSizeStride() | ins.AssertAlignment() | ins.CheckFinite()
            | ins.Free() | ins.DefineKernel() | ins.Launch() | ins.Hook() | ins.Copy()
            | ins.BumpVersion() | ins.Fill() | ins.Partition() | ins.Note() | ins.Return()
        ):  # fmt: skip
            return ()
        case _:
            assert_never(i)


def refs(o: ins.Operand) -> Iterator[str]:
    """Tensors named in an operand, in order."""
    match o:
        case ins.Ref(name) | ins.ValueOf(name):
            yield name
        case ins.ListOf(items):
            for item in items:
                yield from refs(item)
        case ins.Literal() | int() | Expr():
            return
        case _:
            assert_never(o)


def operand_sizes(o: ins.Operand) -> Iterator[Size]:
    """Integer expressions in an operand, in order."""
    match o:
        case int() | Expr():
            yield o
        case ins.ListOf(items):
            for item in items:
                yield from operand_sizes(item)
        case ins.Literal() | ins.Ref() | ins.ValueOf():
            return
        case _:
            assert_never(o)


def operands(i: ins.Instr) -> tuple[ins.Operand, ...]:
    """The operands of a call, a fill or a return; empty for the rest."""
    match i:
        case ins.CallExtern() | ins.CallPython():
            return (*i.args, *(v for _, v in i.kwargs))
        case ins.Fill():
            return (i.value,)
        case ins.Return():
            return i.values
        case _:
            return ()


def used(i: ins.Instr) -> tuple[str, ...]:
    """Tensors and arenas that this reads, writes or refers to, each once, in order. Free uses
    nothing."""
    names: list[str] = []
    match i:
        case ins.Symbol(_, ins.SizeOf(tensor) | ins.ItemOf(tensor)):
            names.append(tensor)
        case (
            ins.AssertSizeStride() | ins.AssertAlignment() | ins.CheckFinite() | ins.Hook()
            | ins.BumpVersion() | ins.Fill()
        ):  # fmt: skip
            names.append(i.tensor)
        case ins.Place():
            names.append(i.arena)
        case ins.Reuse():
            names.append(i.old)
        case ins.View():
            names.append(i.base)
        case ins.Launch():
            names.extend((*i.args, *i.outs))
        case ins.CallExtern():
            names.extend(i.into)
        case ins.Copy():
            names.extend((i.dst, i.src))
        case (
            ins.Symbol() | ins.AssertScalar() | ins.Arena() | ins.Alloc() | ins.Free()
            | ins.Constant() | ins.DefineKernel() | ins.CallPython() | ins.Partition() | ins.Note()
            | ins.Return()
        ):  # fmt: skip
            pass
        case _:
            assert_never(i)
    for o in operands(i):
        names.extend(refs(o))
    return tuple(dict.fromkeys(names))


def sizes(i: ins.Instr) -> tuple[Size, ...]:
    """Integer expressions that this evaluates, in order."""
    match i:
        case ins.Symbol(_, int() | Expr() as value):
            return (value,)
        case ins.AssertScalar():
            return (i.expr, *i.values)
        case ins.AssertSizeStride():
            return (*i.shape, *i.strides)
        case ins.Arena():
            return (i.nbytes,)
        case ins.Place() | ins.View():
            return (i.offset, *i.shape, *i.strides)
        case ins.Alloc() | ins.Reuse():
            return (*i.shape, *i.strides)
        case ins.Launch():
            return (*i.sizes, i.work_ns, i.grid)
        case ins.CallExtern() | ins.CallPython() | ins.Fill() | ins.Return():
            return tuple(s for o in operands(i) for s in operand_sizes(o))
        case (
            ins.Symbol() | ins.AssertAlignment() | ins.CheckFinite() | ins.Free() | ins.Constant()
            | ins.DefineKernel() | ins.Hook() | ins.Copy() | ins.BumpVersion() | ins.Partition()
            | ins.Note()
        ):  # fmt: skip
            return ()
        case _:
            assert_never(i)


def symbols(i: ins.Instr) -> frozenset[str]:
    """Names of the symbols in this instruction's expressions."""
    return frozenset(a.name for e in sizes(i) for a in free_symbols(e))


def is_fence(i: ins.Instr) -> bool:
    """Whether an instruction orders streams or makes another one the current one."""
    return isinstance(i, ins.CallExtern) and i.fence


def views_of(body: Iterable[ins.Instr]) -> dict[str, str]:
    """View -> what it views, in order."""
    return {i.name: i.base for i in body if isinstance(i, ins.View)}


def forks(p: ins.WrapperProgram) -> list[ins.CallExtern]:
    """The calls that make another stream the current one: of the stream before, and the one
    after."""
    return [i for i in p.body if isinstance(i, ins.CallExtern) and i.op == "streams::fork"]


def bases_of(body: Sequence[ins.Instr]) -> dict[str, str]:
    """Names on the memory of another, by view or takeover -> that one."""
    return {**views_of(body), **{i.name: i.old for i in body if isinstance(i, ins.Reuse)}}


def root(name: str, bases: Mapping[str, str]) -> str:
    """The tensor whose memory a name stands for. bases: names on the memory of another -> that
    one."""
    while name in bases:
        name = bases[name]
    return name


def input_sizes(i: ins.Input) -> tuple[Size, ...]:
    """The sizes and strides that an input promises."""
    match i:
        case ins.TensorInput():
            return (*i.shape, *i.strides)
        case ins.SymbolInput() | ins.OpaqueInput():
            return ()
        case _:
            assert_never(i)


def map_operand(
    o: ins.Operand, ref: Callable[[str], str], size: Callable[[Size], Size]
) -> ins.Operand:
    """The operand with its tensor names and its integer expressions replaced."""
    match o:
        case ins.Ref(name):
            return ins.Ref(ref(name))
        case ins.ValueOf(name):
            return ins.ValueOf(ref(name))
        case ins.ListOf(items):
            return ins.ListOf(tuple(map_operand(item, ref, size) for item in items))
        case int() | Expr():
            return size(o)
        case ins.Literal():
            return o
        case _:
            assert_never(o)


def rewrite(i: ins.Instr, ref: Callable[[str], str], size: Callable[[Size], Size]) -> ins.Instr:
    """The instruction with used tensors renamed by ref and expressions replaced by size. What it
    defines stays."""

    def many(values: tuple[Size, ...]) -> tuple[Size, ...]:
        return tuple(map(size, values))

    match i:
        case ins.Symbol():
            if isinstance(i.value, (ins.SizeOf, ins.ItemOf)):
                return replace(i, value=replace(i.value, tensor=ref(i.value.tensor)))
            return replace(i, value=size(i.value))
        case ins.AssertScalar():
            return replace(i, expr=size(i.expr), values=many(i.values))
        case ins.AssertSizeStride():
            return replace(i, tensor=ref(i.tensor), shape=many(i.shape), strides=many(i.strides))
        case ins.AssertAlignment() | ins.CheckFinite() | ins.Hook() | ins.BumpVersion():
            return replace(i, tensor=ref(i.tensor))
        case ins.Arena():
            return replace(i, nbytes=size(i.nbytes))
        case ins.Place():
            return replace(
                i, arena=ref(i.arena), offset=size(i.offset),
                shape=many(i.shape), strides=many(i.strides),
            )  # fmt: skip
        case ins.Alloc():
            return replace(i, shape=many(i.shape), strides=many(i.strides))
        case ins.Reuse():
            return replace(i, old=ref(i.old), shape=many(i.shape), strides=many(i.strides))
        case ins.Free():
            return replace(i, name=ref(i.name))
        case ins.View():
            return replace(
                i, base=ref(i.base), shape=many(i.shape), strides=many(i.strides),
                offset=size(i.offset),
            )  # fmt: skip
        case ins.Launch():
            return replace(
                i, args=tuple(map(ref, i.args)), sizes=many(i.sizes),
                outs=tuple(map(ref, i.outs)), work_ns=size(i.work_ns), grid=size(i.grid),
            )  # fmt: skip
        case ins.CallExtern() | ins.CallPython():
            args = tuple(map_operand(o, ref, size) for o in i.args)
            kwargs = tuple((k, map_operand(o, ref, size)) for k, o in i.kwargs)
            if isinstance(i, ins.CallExtern):
                return replace(i, args=args, kwargs=kwargs, into=tuple(map(ref, i.into)))
            return replace(i, args=args, kwargs=kwargs)
        case ins.Copy():
            return replace(i, dst=ref(i.dst), src=ref(i.src))
        case ins.Fill():
            return replace(i, tensor=ref(i.tensor), value=map_operand(i.value, ref, size))
        case ins.Return():
            return replace(i, values=tuple(map_operand(o, ref, size) for o in i.values))
        case ins.Constant() | ins.DefineKernel() | ins.Partition() | ins.Note():
            return i
        case _:
            assert_never(i)
