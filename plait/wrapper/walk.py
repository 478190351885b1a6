"""What each instruction defines, uses and computes with, by the kinds of its fields
(`wrapper/spec.py`).

Passes, the verifier and the builder ask here. A name is a tensor, an arena or an integer symbol;
all of them share one space of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from plait.ir.expr import Expr, Size, free_symbols
from plait.wrapper import instructions as ins
from plait.wrapper.spec import Kind, Select

_OPERANDS = Kind.OPERAND, Kind.OPERANDS, Kind.KEYWORDS, Kind.OUTPUTS
_USES = Kind.USES, Kind.ALL_USED, Kind.ARENA
_SIZES = Kind.SIZE, Kind.SIZES, Kind.SHAPE, Kind.STRIDES

_DEFINED = Select(Kind.DEFINES, Kind.SYMBOL, Kind.RESULTS)
_WITH_OPERANDS = Select(*_OPERANDS)
_USED = Select(*_USES, Kind.SOURCE, *_OPERANDS)
_SIZED = Select(*_SIZES, Kind.SOURCE, *_OPERANDS)
_NONE: frozenset[str] = frozenset()
_REWRITTEN = Select(*_USES, Kind.ENDS, *_SIZES, Kind.SOURCE, *_OPERANDS)


def defined(i: ins.Instr) -> tuple[str, ...]:
    """Names that come into being here: tensors, arenas, symbols. Kernels have a space of their
    own."""
    names: list[str] = []
    for name, kind in _DEFINED[type(i)]:
        value = getattr(i, name)
        names.extend((n for n in value if n is not None) if kind is Kind.RESULTS else (value,))
    return tuple(names)


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
    return tuple(o for name, kind in _WITH_OPERANDS[type(i)] for o in _of(i, name, kind))


def _of(i: ins.Instr, name: str, kind: Kind) -> tuple[ins.Operand, ...]:
    """The operands in one field."""
    value = getattr(i, name)
    if kind is Kind.KEYWORDS:
        return tuple(o for _, o in value)
    return (value,) if kind is Kind.OPERAND else tuple(value)


def used(i: ins.Instr) -> tuple[str, ...]:
    """Tensors and arenas that this reads, writes or refers to, each once, in order. Free uses
    nothing."""
    names: list[str] = []
    for name, kind in _USED[type(i)]:
        if kind in _OPERANDS:
            for o in _of(i, name, kind):
                names += (o.name,) if type(o) is ins.Ref else refs(o)
            continue
        value = getattr(i, name)
        if kind is Kind.ALL_USED:
            names.extend(value)
        elif kind is not Kind.SOURCE:
            names.append(value)
        elif isinstance(value, (ins.SizeOf, ins.ItemOf)):
            names.append(value.tensor)
    return tuple(dict.fromkeys(names))


def sizes(i: ins.Instr | ins.Input) -> tuple[Size, ...]:
    """Integer expressions that an instruction evaluates or an input promises, in order."""
    found: list[Size] = []
    for name, kind in _SIZED[type(i)]:
        if kind in _OPERANDS:
            assert not isinstance(i, ins.Input), "an input has no operands"
            for o in _of(i, name, kind):
                if type(o) is not ins.Ref:  # most of them
                    found.extend(operand_sizes(o))
            continue
        value = getattr(i, name)
        if type(value) is tuple:
            found += value
        elif isinstance(value, (int, Expr)):
            found.append(value)
    return tuple(found)


def symbols(i: ins.Instr) -> frozenset[str]:
    """Names of the symbols in this instruction's expressions."""
    symbolic = [e for e in sizes(i) if type(e) is not int]
    return frozenset([a.name for e in symbolic for a in free_symbols(e)]) if symbolic else _NONE


def is_fence(i: ins.Instr) -> bool:
    """Whether an instruction orders streams or makes another one the current one."""
    return isinstance(i, ins.CallExtern) and i.fence


def may_keep(i: ins.Instr) -> bool:
    """Whether a call may keep or alias its arguments, so that none of them lies in an arena."""
    return isinstance(i, ins.Call) and (not isinstance(i, ins.CallExtern) or i.may_keep)


def named_operands(i: ins.Call) -> tuple[tuple[str, ins.Operand], ...]:
    """The operands of a call that have names."""
    return () if isinstance(i, ins.CallPrograms) else i.kwargs


def leaves_dispatch(p: ins.WrapperProgram) -> bool:
    """Whether something in a program runs in the dispatch state of its caller."""
    leaving = ins.CallPython | ins.CallPrograms | ins.Hook
    return any(isinstance(i, leaving) for i in p.body)


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
    changed: dict[str, Any] = {}
    for name, kind in _REWRITTEN[type(i)]:
        changed[name] = _rewritten(kind, getattr(i, name), ref, size)
    return replace(i, **changed) if changed else i


def renamed(i: ins.Instr, ref: Callable[[str], str], size: Callable[[Size], Size]) -> ins.Instr:
    """The same, with what it defines renamed, too."""
    changed: dict[str, Any] = {}
    for name, kind in _DEFINED[type(i)]:
        value = getattr(i, name)
        several = kind is Kind.RESULTS
        changed[name] = tuple(n and ref(n) for n in value) if several else ref(value)
    return replace(rewrite(i, ref, size), **changed)


def _rewritten(
    kind: Kind, value: Any, ref: Callable[[str], str], size: Callable[[Size], Size]
) -> Any:
    """The value of one field, rewritten."""
    match kind:
        case Kind.USES | Kind.ARENA | Kind.ENDS:
            return ref(value)
        case Kind.ALL_USED:
            return tuple(map(ref, value))
        case Kind.SIZES | Kind.SHAPE | Kind.STRIDES:
            return tuple(map(size, value))
        case Kind.OPERAND:
            return map_operand(value, ref, size)
        case Kind.OPERANDS | Kind.OUTPUTS:
            return tuple(map_operand(o, ref, size) for o in value)
        case Kind.KEYWORDS:
            return tuple((k, map_operand(o, ref, size)) for k, o in value)
        case _ if isinstance(value, (ins.SizeOf, ins.ItemOf)):
            return replace(value, tensor=ref(value.tensor))
        case _:
            return size(value)
