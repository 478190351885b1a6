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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from plait.errors import Unsupported
from plait.ir.checks import ERRORS
from plait.ir.dtypes import DTYPES, DType
from plait.ir.sizes import Atom, Expr, Size
from plait.runtime.functions import FUNCTIONS
from plait.wrapper import instructions as ins
from plait.wrapper import walk

PLAN_VERSION = 7
_MAGIC = b"PLAITNPL"
_DTYPE = {name: code for code, name in enumerate(DTYPES)}
_ANY_DTYPE = len(DTYPES)  # an extern result: the plan does not know its element type
_EXPR_OP = {"const": 0, "sym": 1, "add": 2, "mul": 3, "div": 4, "mod": 5, "min": 6, "max": 7,
            "eq": 8, "ne": 9, "lt": 10, "le": 11,
            **{name: code for code, name in enumerate(FUNCTIONS, 12)}}  # fmt: skip
_SOURCE = {"size": 1, "stride": 2, "offset": 3}
_ITEM_SOURCE = 4
_LITERAL = {"none": 2, "bool": 3, "float": 4, "str": 5, "complex": 6, "dtype": 7, "device": 8,
            "layout": 9, "memory_format": 10}  # fmt: skip
_LIST = 11
_VALUE = 12
_MAX_WORD = 2**63


@dataclass(frozen=True)
class Encoded:
    """A plan, and the numbers that tensors and symbols have in it."""

    plan: bytes
    slots: Mapping[str, int]
    symbols: Mapping[str, int]


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
        inputs = [w for i in p.inputs for w in self._input(i)]
        body: list[int] = []
        n_instrs = 0
        for instr in p.body:
            if isinstance(instr, ins.DefineKernel):
                self._kernel_ids[instr.name] = len(self._kernels)
                self._kernels[instr.name] = instr
                continue
            if isinstance(instr, ins.Note):
                continue
            opcode, words = self._instr(instr)
            body += [opcode, len(words), *words]
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
            head += [self._string(k.name), k.n_args, k.n_sizes, len(k.checks)]
            head += [w for c in k.checks for w in (ERRORS.index(c.error), self._string(c.message))]
            head += [self._string(k.device)]
        texts = [s.encode() for s in self._strings]
        words = [len(texts)]
        offset = 0
        for t in texts:
            words += [offset, len(t)]
            offset += len(t)
        words += [*head, n_instrs, *body]
        payload = struct.pack("<q", len(words)) + _pack(words) + b"".join(texts)
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
            found = self._sizes[e] = self._expr(e)
        return found

    def _expr(self, e: Size) -> int:
        if not isinstance(e, Expr):
            return self._node("const", int(e))
        total: int | None = None if e.const == 0 else self._size(e.const)
        for mono, coefficient in e.terms:
            term: int | None = None if coefficient == 1 else self._size(coefficient)
            for atom in mono:
                factor = self._atom(atom)
                term = factor if term is None else self._node("mul", term, factor)
            assert term is not None, "a monomial has at least one atom"
            total = term if total is None else self._node("add", total, term)
        assert total is not None, "an Expr has at least one term"
        return total

    def _atom(self, atom: Atom) -> int:
        if atom.kind == "sym":
            return self._node("sym", self._symbol(atom.name))
        return self._node(atom.kind, self._size(atom.a), self._size(atom.b))

    # ------------------------------------------------------------------------------------ pieces
    def _shape(self, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> list[int]:
        return [len(shape), *(self._size(s) for s in shape), *(self._size(s) for s in strides)]

    def _slots_of(self, names: tuple[str, ...]) -> list[int]:
        return [len(names), *(self._slot(n) for n in names)]

    def _operand(self, o: ins.Operand) -> list[int]:
        match o:
            case ins.Ref(name):
                return [0, self._slot(name)]
            case ins.ValueOf(name):
                return [_VALUE, self._slot(name)]
            case ins.Literal(kind, text):
                return [_LITERAL[kind], *self._literal(kind, text)]
            case ins.ListOf(items):
                return [_LIST, len(items), *(w for i in items for w in self._operand(i))]
            case _:
                return [1, self._size(o)]

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

    def _operands(
        self, args: tuple[ins.Operand, ...], kwargs: tuple[tuple[str, ins.Operand], ...]
    ) -> list[int]:
        words = [len(args)]
        for a in args:
            words += self._operand(a)
        words.append(len(kwargs))
        for name, value in kwargs:
            words += [self._string(name), *self._operand(value)]
        return words

    def _outs(self, outs: tuple[str | None, ...]) -> list[int]:
        words = [len(outs)]
        for name in outs:
            if name is None:
                words += [0]
            elif name in self.symbols:
                words += [2, self._symbol(name)]
            else:
                words += [1, self._define(name, None)]
        return words

    def _input(self, i: ins.TensorInput | ins.SymbolInput | ins.OpaqueInput) -> list[int]:
        match i:
            case ins.TensorInput():
                slot = self._define(i.name, i.dtype)
                dtype, device = _DTYPE[i.dtype.name], self._string(i.device)
                return [0, slot, dtype, *self._shape(i.shape, i.strides), device]
            case ins.SymbolInput():
                return [1, self._symbol(i.name)]
            case ins.OpaqueInput():
                return [2, self._define(i.name, None)]

    # --------------------------------------------------------------------------------- instructions
    def _instr(self, i: ins.Instr) -> tuple[int, list[int]]:
        """(opcode, fields). A slot is defined after its operands were read, so that nothing can
        refer to itself."""
        match i:
            case ins.Symbol():
                return 0, [self._symbol(i.name), *self._source(i.value)]
            case ins.AssertScalar():
                values = [self._size(v) for v in i.values]
                return 1, [
                    self._size(i.expr),
                    self._string(i.message),
                    len(values),
                    *values,
                    ERRORS.index(i.error),
                ]
            case ins.AssertSizeStride():
                dtype = _DTYPE[i.dtype.name]
                shape = self._shape(i.shape, i.strides)
                return 2, [
                    self._slot(i.tensor),
                    dtype,
                    *shape,
                    self._string(i.origin),
                    int(i.copies),
                ]
            case ins.AssertAlignment():
                return 3, [self._slot(i.tensor), i.nbytes]
            case ins.CheckFinite():
                return 4, [self._slot(i.tensor), self._string(i.origin), i.infinities]
            case ins.Arena():
                nbytes, device = self._size(i.nbytes), self._string(i.device)
                return 5, [self._define(i.name, None), nbytes, device]
            case ins.Place():
                arena, offset = self._slot(i.arena), self._size(i.offset)
                shape = self._shape(i.shape, i.strides)
                return 6, [self._define(i.name, i.dtype), arena, offset, *shape]
            case ins.Alloc():
                shape, device = self._shape(i.shape, i.strides), self._string(i.device)
                return 7, [self._define(i.name, i.dtype), *shape, device]
            case ins.Reuse():
                old, shape = self._slot(i.old), self._shape(i.shape, i.strides)
                return 8, [self._define(i.name, i.dtype), old, *shape]
            case ins.Free():
                return 9, [self._slot(i.name)]
            case ins.View():
                base, offset = self._slot(i.base), self._size(i.offset)
                shape = self._shape(i.shape, i.strides)
                return 10, [self._define(i.name, i.dtype), base, *shape, offset, int(i.relative)]
            case ins.Constant():
                return 11, [self._define(i.name, None), i.index]
            case ins.Launch():
                return 12, self._launch(i)
            case ins.CallExtern():
                name, _, overload = i.op.partition(".")
                words = [self._string(name), self._string(overload)]
                words += self._operands(i.args, i.kwargs) + self._outs(i.outs)
                return 13, [*words, *self._slots_of(i.into), int(i.may_keep)]
            case ins.CallPython():
                words = [i.index, self._string(i.label), *self._operands(i.args, i.kwargs)]
                return 14, words + self._outs(i.outs)
            case ins.Hook():
                return self._instr(i.call())
            case ins.Copy():
                return 15, [self._slot(i.dst), self._slot(i.src), int(i.bump)]
            case ins.BumpVersion():
                return 16, [self._slot(i.tensor)]
            case ins.Fill():
                return 17, [self._slot(i.tensor), *self._operand(i.value)]
            case ins.Partition():
                return 18, [int(i.recorded), self._string(i.reason)]
            case ins.Return():
                return 19, [len(i.values), *(w for v in i.values for w in self._operand(v))]
            case ins.DefineKernel() | ins.Note():
                raise AssertionError(f"{type(i).__name__} is no step of the plan")
            case _:
                assert_never(i)

    def _launch(self, i: ins.Launch) -> list[int]:
        words = [self._kernel_ids[i.kernel], *self._slots_of(i.args)]
        words += [len(i.sizes), *(self._size(s) for s in i.sizes), *self._slots_of(i.outs)]
        return [*words, self._size(i.work_ns), int(i.parallel), int(i.barrier), self._size(i.grid)]

    def _source(self, value: ins.SizeOf | ins.ItemOf | Size) -> list[int]:
        match value:
            case ins.SizeOf(tensor, kind, dim):
                return [_SOURCE[kind], self._slot(tensor), dim]
            case ins.ItemOf(tensor):
                return [_ITEM_SOURCE, self._slot(tensor), 0]
            case _:
                return [0, self._size(value)]


def _symbols(p: ins.WrapperProgram) -> Iterator[str]:
    """Every symbol: those that are defined as such, then results of calls that expressions use."""
    yield from (i.name for i in p.inputs if isinstance(i, ins.SymbolInput))
    yield from (i.name for i in p.body if isinstance(i, ins.Symbol))
    used = frozenset(name for i in p.body for name in walk.symbols(i))
    for i in p.body:
        if isinstance(i, ins.CallExtern | ins.CallPython):
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
