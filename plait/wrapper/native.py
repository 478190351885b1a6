"""The native target: a WrapperProgram becomes the compact plan bytes that the precompiled executor
runs.

Comes from `wrapper/passes`, goes to `runtime/load.py` or into the cache. The layout is written in
`native/core/plan.cpp`; the executor verifies every plan before it runs it. Nothing is decided here:
this is a writer.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

from plait.errors import Unsupported
from plait.ir.calls import CONTROL_KINDS
from plait.ir.checks import ERRORS, Check
from plait.ir.dtypes import DTYPES, DType
from plait.ir.expr import Atom, Size, fold
from plait.runtime.functions import FUNCTIONS
from plait.runtime.load import Program, load
from plait.wrapper import instructions as ins
from plait.wrapper import walk
from plait.wrapper.program import Artifacts
from plait.wrapper.spec import FIELDS, Kind

PLAN_VERSION = 10
_MAGIC = b"PLAITNPL"
# The place of a name is its number in plans; `native/core/tables.h` is written from these.
EXPR_OPS = ("const", "sym", "add", "mul", "div", "mod", "min", "max", "eq", "ne", "lt", "le")
OPERANDS = ("ref", "size", "none", "bool", "float", "str", "complex", "dtype", "device", "layout",
            "memory_format", "list", "value")  # fmt: skip
SOURCES = ("expr", "size", "stride", "offset", "item")
RESULTS = ("dropped", "tensor", "symbol")


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


_DTYPE = _numbers(DTYPES)
_ANY_DTYPE = len(DTYPES)  # an extern result: the plan does not know its element type
_EXPR_OP = _numbers((*EXPR_OPS, *FUNCTIONS))
_OPERAND, _SOURCE, _RESULT = map(_numbers, (OPERANDS, SOURCES, RESULTS))
OPCODES = {
    cls: code
    for code, cls in enumerate(
        c for c in ins.INSTRUCTIONS if c not in (ins.DefineKernel, ins.Hook, ins.Note)
    )
}
"""Kernels are a table of their own, a hook is a call, and notes are for readers."""
_INPUT = {cls: code for code, cls in enumerate(ins.INPUTS)}
_MAX_WORD = 2**63


@dataclass(frozen=True)
class Encoded:
    """A plan, and the numbers that tensors and symbols have in it."""

    plan: bytes
    slots: Mapping[str, int]
    symbols: Mapping[str, int]


def load_program(program: ins.WrapperProgram, artifacts: Artifacts) -> Program:
    """The program, run by the executor."""
    return load(encode(program), artifacts.libraries, artifacts.constants, artifacts.callables)


def encode(program: ins.WrapperProgram) -> bytes:
    """The plan of a verified program.

    Raises ValueError for an integer that needs more than 64 bits, Unsupported for a dtype literal
    that plans lack.
    """
    return encode_numbered(program).plan


def encode_numbered(program: ins.WrapperProgram) -> Encoded:
    """The same, with its numbers."""
    encoder = _Encoder()
    return Encoded(encoder.program(program), encoder.slots, encoder.symbols)


class _Encoder:
    """Numbers names, strings and expressions as they are met; the words of the body refer to
    them."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._sizes: dict[Size, int] = {}
        self.symbols: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self._slot_table: list[tuple[str, int]] = []  # name and dtype by slot
        self._kernels: dict[str, ins.DefineKernel] = {}
        self._kernel_ids: dict[str, int] = {}

    def program(self, p: ins.WrapperProgram) -> bytes:
        """The whole plan: header, words, strings."""
        for name in _symbols(p):
            self._symbol(name)
        inputs = [w for i in p.inputs for w in (_INPUT[type(i)], *self._fields(i))]
        body: list[int] = []
        n_instrs = 0
        for instr in p.body:
            if isinstance(instr, ins.DefineKernel):
                self._kernel_ids[instr.name] = len(self._kernels)
                self._kernels[instr.name] = instr
                continue
            if isinstance(instr, ins.Note):
                continue
            step = instr.call() if isinstance(instr, ins.Hook) else instr
            words = self._fields(step)
            body += [OPCODES[type(step)], len(words), *words]
            n_instrs += 1
        # The tables come last: everything above has filled them.
        head = [
            self._string(p.name),
            p.n_constants,
            p.n_callables,
            -1 if p.n_results is None else p.n_results,
        ]
        head += [len(self._nodes), *(w for node in self._nodes for w in node)]
        head += [len(self.symbols), *(self._string(s) for s in self.symbols)]
        head += [len(self._slot_table)]
        for name, dtype in self._slot_table:
            head += [self._string(name), dtype]
        head += [len(p.inputs), *inputs, len(self._kernels)]
        for k in self._kernels.values():
            head += [self._string(k.name), k.n_args, k.n_sizes]
            head += [*self._checks(k.checks), self._string(k.device)]
        texts = [s.encode() for s in self._strings]
        plans = [encode(nested) for nested in p.programs]
        ends = [0, *accumulate(map(len, (*texts, *plans)))]
        places = [(start, end - start) for start, end in pairwise(ends)]
        words = [len(texts), *chain(*places[: len(texts)])]
        words += [*head, n_instrs, *body, len(plans), *chain(*places[len(texts) :])]
        payload = struct.pack("<q", len(words)) + _pack(words) + b"".join((*texts, *plans))
        return (
            _MAGIC + struct.pack("<IIQ", PLAN_VERSION, zlib.crc32(payload), len(payload)) + payload
        )

    # ------------------------------------------------------------------------------------ tables
    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _symbol(self, name: str) -> int:
        return self.symbols.setdefault(name, len(self.symbols))

    def _define(self, name: str, dtype: DType | None) -> int:
        slot = self.slots[name] = len(self._slot_table)
        self._slot_table.append((name, _ANY_DTYPE if dtype is None else _DTYPE[dtype.name]))
        return slot

    def _slot(self, name: str) -> int:
        return self.slots[name]

    def _node(self, op: str, a: int, b: int = 0) -> int:
        return self._nodes.setdefault((_EXPR_OP[op], a, b), len(self._nodes))

    def _size(self, e: Size) -> int:
        found = self._sizes.get(e)
        if found is None:
            const, add, mul = (partial(self._node, op) for op in ("const", "add", "mul"))
            found = self._sizes[e] = fold(e, self._atom, const, add, mul)
        return found

    def _atom(self, atom: Atom) -> int:
        if atom.kind == "sym":
            return self._node("sym", self._symbol(atom.name))
        return self._node(atom.kind, self._size(atom.a), self._size(atom.b))

    # ------------------------------------------------------------------------------------ pieces
    def _operand(self, o: ins.Operand) -> list[int]:
        match o:
            case ins.Ref(name):
                return [_OPERAND["ref"], self._slot(name)]
            case ins.ValueOf(name):
                return [_OPERAND["value"], self._slot(name)]
            case ins.Literal(kind, text):
                return [_OPERAND[kind], *self._literal(kind, text)]
            case ins.ListOf(items):
                words = (w for i in items for w in self._operand(i))
                return [_OPERAND["list"], len(items), *words]
            case _:
                return [_OPERAND["size"], self._size(o)]

    def _literal(self, kind: str, text: str) -> list[int]:
        match kind:
            case "none":
                return []
            case "bool":
                return [int(text == "True")]
            case "float":
                return [_float_bits(_read_float(text))]
            case "complex":
                real, imaginary = text.split()
                return [_float_bits(_read_float(real)), _float_bits(_read_float(imaginary))]
            case "dtype" if text in _DTYPE:
                return [_DTYPE[text]]
            case "dtype":
                raise Unsupported(
                    f"the dtype {text} as an operand of a native plan",
                    hint='set the option wrapper="python"',
                )
            case _:
                return [self._string(text)]

    def _outs(self, outs: tuple[str | None, ...]) -> list[int]:
        words = [len(outs)]
        for name in outs:
            if name is None:
                words += [_RESULT["dropped"]]
            elif name in self.symbols:
                words += [_RESULT["symbol"], self._symbol(name)]
            else:
                words += [_RESULT["tensor"], self._define(name, None)]
        return words

    # --------------------------------------------------------------------------------- instructions
    def _fields(self, i: ins.Instr | ins.Input) -> list[int]:
        """The fields, in order. A name is defined after its operands were read, so that nothing can
        refer to itself."""
        words: list[int] = []
        new: tuple[int, str, DType | None] | None = None
        for name, kind, write in _WRITERS[type(i)]:
            value = getattr(i, name)
            if kind is Kind.DEFINES:
                new = len(words), value, getattr(i, "dtype", None)
                words.append(0)
            elif kind is not Kind.DTYPE or new is None:  # slots have their types in a table
                words += write(self, value)
        if new is not None:
            at, defined, dtype = new
            words[at] = self._define(defined, dtype)
        return words

    def _source(self, value: ins.SizeOf | ins.ItemOf | Size) -> list[int]:
        match value:
            case ins.SizeOf(tensor, kind, dim):
                return [_SOURCE[kind], self._slot(tensor), dim]
            case ins.ItemOf(tensor):
                return [_SOURCE["item"], self._slot(tensor), 0]
            case _:
                return [_SOURCE["expr"], self._size(value)]

    def _operands(self, values: Sequence[ins.Operand]) -> list[int]:
        return [len(values), *(w for o in values for w in self._operand(o))]

    def _keywords(self, values: Sequence[tuple[str, ins.Operand]]) -> list[int]:
        named = ((self._string(k), *self._operand(o)) for k, o in values)
        return [len(values), *chain.from_iterable(named)]

    def _checks(self, checks: Sequence[Check]) -> list[int]:
        pairs = ((ERRORS.index(c.error), self._string(c.message)) for c in checks)
        return [len(checks), *chain.from_iterable(pairs)]

    def _operator(self, name: str) -> list[int]:
        name, _, overload = name.partition(".")
        return [self._string(name), self._string(overload)]


_Words = Callable[[_Encoder, Any], list[int]]
_STRING: _Words = lambda e, text: [e._string(text)]
_SLOT: _Words = lambda e, name: [e._slot(name)]
_NUMBER: _Words = lambda _, value: [int(value)]
_SHAPE: _Words = lambda e, sizes: [len(sizes), *map(e._size, sizes)]
_WORDS: dict[Kind, _Words] = dict.fromkeys(Kind, _NUMBER) | {
    Kind.SIZES: _SHAPE,
    Kind.SHAPE: _SHAPE,
    Kind.STRIDES: lambda e, sizes: [*map(e._size, sizes)],
    Kind.SIZE: lambda e, size: [e._size(size)],
    Kind.TEXT: _STRING,
    Kind.DEVICE: _STRING,
    Kind.SYMBOL: lambda e, name: [e._symbol(name)],
    Kind.USES: _SLOT,
    Kind.ARENA: _SLOT,
    Kind.ENDS: _SLOT,
    Kind.ALL_USED: lambda e, names: [len(names), *map(e._slot, names)],
    Kind.SOURCE: _Encoder._source,
    Kind.DTYPE: lambda _, dtype: [_DTYPE[dtype.name]],
    Kind.OPERAND: _Encoder._operand,
    Kind.OPERANDS: _Encoder._operands,
    Kind.OUTPUTS: _Encoder._operands,
    Kind.KEYWORDS: _Encoder._keywords,
    Kind.RESULTS: _Encoder._outs,
    Kind.CONTROL: lambda _, kind: [CONTROL_KINDS.index(kind)],
    Kind.PROGRAMS: lambda _, numbers: [len(numbers), *numbers],
    Kind.KERNEL: lambda e, name: [e._kernel_ids[name]],
    Kind.OPERATOR: _Encoder._operator,
    Kind.ERROR: lambda _, error: [ERRORS.index(error)],
    Kind.CHECKS: _Encoder._checks,
}
"""How the value of a field of each kind is written."""


_FOR_PASSES = Kind.FOR_PASSES, Kind.CONDITION


class _Writers(dict[type, tuple[tuple[str, Kind, _Words], ...]]):
    """The fields of an instruction that plans hold, in order."""

    def __missing__(self, cls: type) -> tuple[tuple[str, Kind, _Words], ...]:
        kept = [(name, kind) for name, kind in FIELDS[cls] if kind not in _FOR_PASSES]
        self[cls] = tuple((name, kind, _WORDS[kind]) for name, kind in kept)
        return self[cls]


_WRITERS = _Writers()


def _symbols(p: ins.WrapperProgram) -> Iterator[str]:
    """Every symbol: those that are defined as such, then results of calls that expressions use."""
    yield from (i.name for i in p.inputs if isinstance(i, ins.SymbolInput))
    yield from (i.name for i in p.body if isinstance(i, ins.Symbol))
    used = frozenset(name for i in p.body for name in walk.symbols(i))
    for i in p.body:
        if isinstance(i, ins.Call):
            yield from (name for name in walk.defined(i) if name in used)


def _read_float(text: str) -> float:
    return float.fromhex(text) if "x" in text else float(text)


def _float_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _pack(words: list[int]) -> bytes:
    try:
        return array("q", words).tobytes()
    except OverflowError:
        worst = next(w for w in words if not -_MAX_WORD <= w < _MAX_WORD)
        raise ValueError(f"{worst} does not fit into a plan: it needs more than 64 bits") from None
