"""The C++ target: a wrapper program as C++ source that is built once and runs the program.

In: a `WrapperProgram`. Out: source that includes `plait/wrapper.h` alone, and with `load_cpp` the
program itself. The source says what happens at a call, and in which order; operators with their
literals, kernels, constants and callables go by their numbers in the native target's plan of the
same program. Library files lie beside those of CPU kernels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import assert_never

from plait.config import Config
from plait.errors import warn_once
from plait.ir.checks import ERRORS
from plait.ir.dtypes import DTYPES, opaque
from plait.ir.sizes import Atom, Expr, Size
from plait.runtime.cache import get_or_build
from plait.runtime.functions import FUNCTIONS
from plait.runtime.load import ENTRY, Program, load
from plait.runtime.toolchain import ToolchainMissing, find_toolchain
from plait.runtime.trust import Library
from plait.wrapper import instructions as ins
from plait.wrapper.native import encode, encode_numbered
from plait.wrapper.program import Artifacts
from plait.wrapper.text import line
from plait.wrapper.walk import operands, symbols, used

_FUNCTIONS = {name: number for number, name in enumerate(FUNCTIONS)}
_INCLUDE = '#include "plait/wrapper.h"\n'
_RESERVED = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t
    char16_t char32_t class compl concept const consteval constexpr constinit const_cast
    continue co_await co_return co_yield decltype default delete do double dynamic_cast else
    enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename
    union unsigned using virtual void volatile wchar_t while xor xor_eq linux unix call kernel
    plait wrapper div mod min max eq ne lt le require op python run give symbol launch main
    Call Int Slot Tensor Operand Launch Arguments TRY SIZE NULL plait_size plait_stride
    plait_offset plait_item plait_integer plait_bool plait_real plait_complex""".split()
)
_MEMORY = (
    ins.Launch,
    ins.Place,
    ins.Reuse,
    ins.View,
    ins.AssertAlignment,
    ins.Free,
)  # need no more than a pointer
_SMALL = 1 << 20  # memory that dies in a region and is not worth ending it for before an allocation


def load_cpp(program: ins.WrapperProgram, artifacts: Artifacts) -> Program:
    """The program, built or found in the cache. Where no compiler works, the executor runs its
    plan, with a warning."""
    built = None
    try:
        built = build_cpp(make_cpp(program), artifacts.cfg, (ENTRY,))
    except ToolchainMissing as missing:
        warn_once(f"plait runs programs without making C++ of them: {missing.line}")
    return load(
        encode(program), artifacts.libraries, artifacts.constants, artifacts.callables, built
    )


def build_cpp(source: str, cfg: Config, symbols: Collection[str] = ()) -> Library:
    """The library of a generated source. Its text is built with the header in it, which so is part
    of its key."""
    return get_or_build(
        source.replace(_INCLUDE, _header(), 1), find_toolchain(cfg), cfg, symbols
    ).library


@cache
def _header() -> str:
    return (Path(__file__).parents[1] / "include" / "plait" / "wrapper.h").read_text()


def make_cpp(program: ins.WrapperProgram, entry: str = ENTRY) -> str:
    """The program's source: a function of this name."""
    return _Source(program).text(entry)


def cpp_lines(program: ins.WrapperProgram) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines that it becomes, each launch in a region of its own."""
    source = _Source(program)
    out = []
    for i in program.body:
        source.end_region()
        before = len(source.lines)
        source.instruction(i)
        out.append((i, list(source.region.lines or source.lines[before:] or source.notes)))
    return out


class _Names:
    """C++ variables by name, each of them used once."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.taken: set[str] = set(_RESERVED)

    def __getitem__(self, name: str) -> str:
        """The variable of a name, always the same."""
        if name not in self.variables:
            self.variables[name] = self.fresh(name)
        return self.variables[name]

    def fresh(self, name: str) -> str:
        """A variable that nothing else has, like this name."""
        stem = re.sub(r"_+", "_", re.sub(r"\W", "_", name, flags=re.ASCII)).strip("_")
        stem = stem if stem and not stem[0].isdigit() else f"v_{stem}"
        found, k = stem, 2
        while found in self.taken:
            found, k = f"{stem}_{k}", k + 1
        self.taken.update((found, f"{found}_checked"))
        return found


@dataclass
class _Region:
    """Launches that wait to be run as one, and the tensors that die with them. lines: as they are
    written."""

    lines: list[str] = field(default_factory=list)
    dying: list[str] = field(default_factory=list)


class _Source:
    """The text of one program.

    headers: tensors that need more than a pointer. base: view -> whose memory it is. last: tensor
    -> position of the last instruction that needs it or what lies in its memory."""

    def __init__(self, p: ins.WrapperProgram) -> None:
        self.p = p
        self.numbers = encode_numbered(p)
        self.names, self.kernel_names = _Names(), _Names()
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.region = _Region()
        self.sizes: dict[Size, str] = {}
        self.n_ops = self.n_pythons = 0
        self.kernels = [i for i in p.body if isinstance(i, ins.DefineKernel)]
        self.devices = {k.name: k.device for k in self.kernels}
        self.made: dict[str, ins.Instr | ins.Input] = {i.name: i for i in p.inputs}
        self.base: dict[str, str] = {}
        self.headers: set[str] = set()
        self.last = {i.name: -1 for i in p.inputs if isinstance(i, ins.TensorInput)}
        for k, i in enumerate(p.body):
            self._learn(k, i)
        self.drops: dict[int, list[str]] = {}
        for name, k in self.last.items():
            if self._dies(name):
                self.drops.setdefault(k, []).append(name)

    def _learn(self, k: int, i: ins.Instr) -> None:
        match i:
            case (
                ins.View() | ins.Reuse() | ins.Alloc() | ins.Place() | ins.Constant() | ins.Arena()
            ):
                self.made[i.name] = i
                self.last[i.name] = k
            case ins.CallExtern() | ins.CallPython():
                for name in i.outs:
                    if name is not None and name in self.numbers.slots:
                        self.made[name] = i
                        self.last[name] = k
            case _:
                pass
        if isinstance(i, (ins.View, ins.Reuse)):
            self.base[i.name] = i.base if isinstance(i, ins.View) else i.old
            if i.dtype == opaque:
                self.headers.add(self.base[i.name])  # which has the element type
        for name in used(i):
            if not isinstance(i, _MEMORY):
                self.headers.add(name)
            while name in self.last:
                self.last[name] = k
                name = self.base.get(name, "")

    def _dies(self, name: str) -> bool:
        """Whether the tensor's end gives something back. At the program's end, everything that is
        left dies."""
        i = self.made[name]
        if (
            isinstance(i, (ins.Constant, ins.Arena, ins.Place))
            or self.last[name] == len(self.p.body) - 1
        ):
            return False
        return name in self.headers or not isinstance(i, (ins.View, ins.Reuse))

    def text(self, entry: str) -> str:
        for given in self.p.inputs:
            self._input(given)
        self._drop(self.drops.get(-1, []))
        for k, i in enumerate(self.p.body):
            self.step(k, i)
        names = ", ".join(self.kernel_names[k.name] for k in self.kernels)
        lines = [
            *_comment(f"{self.p.name}, compiled by plait"),
            _INCLUDE,
            "using namespace plait::wrapper;",
            "",
            f'extern "C" int {entry}(Call call) {{',
            *([f"  struct kernel {{ enum {{ {names} }}; }};"] if names else []),
            *(f"  {s}" for s in self.lines),
            "}",
        ]
        return "\n".join(lines) + "\n"

    def _input(self, i: ins.Input) -> None:
        match i:
            case ins.TensorInput():
                self._add(f"const Slot {self._slot(i.name)};", f"{i.dtype.name}, {i.device}")
            case ins.OpaqueInput():
                self._add(f"const Slot {self._slot(i.name)};")
            case ins.SymbolInput():
                if any(i.name in symbols(step) for step in self.p.body):
                    self._symbol(i.name)
            case _:
                assert_never(i)

    # ---- pieces
    def _add(self, text: str, comment: str = "") -> None:
        self.lines.append(f"{text}  // {_one_line(comment)}" if comment else text)

    def _slot(self, name: str) -> str:
        return f"{self.names[name]}(call, {self.numbers.slots[name]})"

    def _symbol(self, name: str) -> None:
        self._add(f"const int64_t {self.names[name]} = symbol(call, {self.numbers.symbols[name]});")

    def _at(self, name: str) -> str:
        """The pointer of a tensor."""
        return self.names[name] if self._is_pointer(name) else f"{self.names[name]}.data()"

    def _is_pointer(self, name: str) -> bool:
        """Whether nothing but a pointer is made of it."""
        i = self.made[name]
        if name in self.headers or not isinstance(i, (ins.View, ins.Reuse, ins.Place)):
            return False
        return not isinstance(i, ins.Place) or not any(
            isinstance(e, Expr) for e in (i.offset, *i.shape, *i.strides)
        )

    def size(self, e: Size) -> str:
        """An integer; what has to be computed for it comes first, once."""
        if isinstance(e, int):
            return _integer(e)
        if (atom := e.symbol) is not None:
            return self.names[atom.name]
        if e not in self.sizes:
            name = self.names.fresh("size")
            self._add(f"SIZE({name}, {self._expression(e)});")
            self.sizes[e] = name
        return self.sizes[e]

    def _expression(self, e: Size) -> str:
        if isinstance(e, int):
            return f"Int({_integer(e)})"
        parts = [f"Int({_integer(e.const)})"] if e.const else []
        for mono, c in e.terms:
            factors = [f"Int({_integer(c)})"] if c != 1 else []
            parts.append(" * ".join([*factors, *(self._atom(a) for a in mono)]))
        return " + ".join(parts)

    def _atom(self, a: Atom) -> str:
        if a.kind == "sym":
            return f"Int({self.names[a.name]})"
        left, right = self._expression(a.a), self._expression(a.b)
        if a.kind in _FUNCTIONS:
            return f"function(call, {_FUNCTIONS[a.kind]} /* {a.kind} */, {left}, {right})"
        return f"{a.kind}({left}, {right})"

    def _shape(
        self, i: ins.Place | ins.Alloc | ins.Reuse | ins.View | ins.AssertSizeStride
    ) -> list[str]:
        return [self._list(i.shape), self._list(i.strides)] if i.shape else []

    def _list(self, values: Sequence[Size]) -> str:
        return f"{{{', '.join(self.size(v) for v in values)}}}"

    def _given(self, values: Sequence[ins.Operand]) -> list[str]:
        """What a call is handed: tensors and integers, constants aside."""
        out: list[str] = []
        for o in values:
            match o:
                case ins.Ref(name) | ins.ValueOf(name):
                    out.append(self.names[name])
                case ins.ListOf(items):
                    out += self._given(items)
                case Expr():
                    out.append(self.size(o))
                case ins.Literal() | int():
                    pass
                case _:
                    assert_never(o)
        return out

    # ---- instructions
    def step(self, k: int, i: ins.Instr) -> None:
        """Adds the lines of the instruction at this position, and the ends of what it uses last."""
        self.instruction(i)
        drops = self.drops.get(k, [])
        if self.region.lines:
            self.region.dying += drops
        else:
            self._drop(drops)

    def _drop(self, names: Sequence[str]) -> None:
        self.lines += [f"{self.names[n]}.drop();" for n in names]

    def end_region(self) -> None:
        """Launches that follow each other run as one."""
        if not self.region.lines:
            return
        done, self.region = self.region, _Region()
        last = max(k for k, s in enumerate(done.lines) if not s.startswith("//"))
        done.lines[last] = done.lines[last].removesuffix(",") + "));"
        self.lines += ["TRY(run(call,", *(f"    {s}" for s in done.lines)]
        self._drop(done.dying)

    def _before_alloc(self) -> None:
        """Large memory that died is given back first."""
        for name in self.region.dying:
            i = self.made[name]
            if isinstance(i, (ins.View, ins.Reuse)):
                continue
            nbytes = _nbytes(i) if isinstance(i, (ins.Alloc, ins.TensorInput)) else None
            if nbytes is None or nbytes >= _SMALL:
                return self.end_region()
        return None

    def _begin(self) -> None:
        """What follows needs what all launches have written."""
        self.end_region()
        self.lines += self.notes
        self.notes = []

    def instruction(self, i: ins.Instr) -> None:
        """Adds the lines of one instruction, or puts a launch off."""
        name = self.names
        match i:
            case ins.Symbol():
                self._define(i.name, i.value)
            case ins.AssertScalar():
                given = f", {ERRORS.index(i.error)}, {self._list(i.values)}" if i.values else ""
                if not i.values and i.error != "RuntimeError":
                    given = f", {ERRORS.index(i.error)}"
                self._add(f"TRY(require(call, {self.size(i.expr)}, {_string(i.message)}{given}));")
            case ins.AssertSizeStride():
                dtype = list(DTYPES).index(i.dtype.name)
                given = ", ".join(
                    [_string(i.origin), str(i.copies).lower(), str(dtype), *self._shape(i)]
                )
                self._add(f"TRY({name[i.tensor]}.require({given}));", i.dtype.name)
            case ins.AssertAlignment():
                slot = (
                    f"Slot(call, {self.numbers.slots[i.tensor]})"
                    if self._is_pointer(i.tensor)
                    else name[i.tensor]
                )
                self._add(f"TRY({slot}.require_aligned({self._at(i.tensor)}, {i.nbytes}));")
            case ins.CheckFinite():
                self._begin()
                given = f"{_string(i.origin)}, {str(i.infinities).lower()}"
                self._add(f"TRY({name[i.tensor]}.require_finite({given}));")
            case ins.Arena():
                nbytes = self.size(i.nbytes)
                self._add(f"const Slot {self._slot(i.name)};", i.device)
                self._add(f"TRY({name[i.name]}.take({nbytes}));")
            case ins.Place():
                if self._is_pointer(i.name):
                    self._add(
                        f"char* const {name[i.name]} = {name[i.arena]}.data() + {i.offset};",
                        i.dtype.name,
                    )
                else:
                    given = ", ".join([self.size(i.offset), *self._shape(i)])
                    self._add(f"const Slot {self._slot(i.name)};", i.dtype.name)
                    self._add(f"TRY({name[i.name]}.place({given}));")
            case ins.Alloc():
                self._before_alloc()
                given = ", ".join(self._shape(i))
                self._add(f"Tensor {self._slot(i.name)};", f"{i.dtype.name}, {i.device}")
                self._add(f"TRY({name[i.name]}.alloc({given}));")
            case ins.Reuse():
                self._view(i, self._at(i.old))
            case ins.Free():
                pass  # `last` says the same, of kernels' views too
            case ins.View():
                start = self._at(i.base) if i.relative else self._storage(i.base)
                self._view(
                    i,
                    f"{start} + {self.size(i.offset)} * {i.dtype.nbytes}"
                    if i.offset != 0
                    else start,
                )
            case ins.Constant():
                self._add(f"const Slot {self._slot(i.name)};", f"constant {i.index}")
            case ins.DefineKernel():
                self.kernel_names[i.name]
            case ins.Launch():
                self._launch(i)
            case ins.CallExtern() | ins.CallPython():
                self._call(i)
            case ins.Hook():
                self._call(i.call())
            case ins.Copy():
                self._begin()
                self._add(f"TRY({name[i.dst]}.copy({name[i.src]}, {str(i.bump).lower()}));")
            case ins.BumpVersion():
                self._add(f"TRY({name[i.tensor]}.bump());")
            case ins.Fill():
                self._begin()
                self._add(f"TRY({name[i.tensor]}.fill({self._number(i.value)}));")
            case ins.Partition(recorded, reason):
                self._begin()
                what = (
                    f"at every call: {reason}"
                    if not recorded
                    else "a CUDA graph in the native target"
                )
                self.lines += _comment(what)
            case ins.Note():
                self.notes += _comment(i.text)
            case ins.Return():
                self._return(i)
            case _:
                assert_never(i)

    def _define(self, name: str, value: ins.SizeOf | ins.ItemOf | Size) -> None:
        if isinstance(value, (ins.SizeOf, ins.ItemOf)):
            if isinstance(value, ins.ItemOf):
                self._begin()
                what = "plait_item, 0"
            else:
                what = f"plait_{value.kind}, {value.dim}"
            self._add(f"int64_t {self.names[name]};")
            self._add(f"TRY({self.names[value.tensor]}.read({what}, {self.names[name]}));")
        elif isinstance(value, Expr) and value.symbol is None:
            self._add(f"SIZE({self.names[name]}, {self._expression(value)});")
        else:
            self._add(f"const int64_t {self.names[name]} = {self.size(value)};")

    def _view(self, i: ins.View | ins.Reuse, first: str) -> None:
        if self._is_pointer(i.name):
            self._add(f"char* const {self.names[i.name]} = {first};", i.dtype.name)
            return
        given = ", ".join([first, *self._shape(i)])
        self._add(f"Tensor {self._slot(i.name)};", i.dtype.name)
        self._add(f"TRY({self.names[i.name]}.view({given}));")

    def _storage(self, name: str) -> str:
        """Where the storage of a tensor starts."""
        first = self.names.fresh(f"{name}_storage")
        self._add(f"char* {first};")
        self._add(f"TRY(Slot(call, {self.numbers.slots[name]}).storage({first}));")
        return first

    def _launch(self, i: ins.Launch) -> None:
        kernel = f"kernel::{self.kernel_names[i.kernel]}"
        buffers = ", ".join(self._at(a) for a in i.args)
        sizes = self._list(i.sizes)
        if self.devices[i.kernel] != "cpu":
            self._begin()
            grid = self.size(i.grid)
            self._add(
                f"TRY(launch(call, {kernel}, {grid}, Arguments<{len(i.args)}, {len(i.sizes)}>{{"
                f"{{{buffers}}}, {sizes}}}));"
            )
            return
        flags = " | ".join(
            f for f, on in (("kWhole", not i.parallel), ("kNoBarrier", not i.barrier)) if on
        )
        if all(isinstance(s, int) for s in i.sizes):
            sizes = f"kSizes<{sizes[1:-1]}>"
        arguments = f"{{{buffers}}}, {sizes}, {self.size(i.work_ns)}, {flags or 0}"
        self.region.lines += [
            *self.notes,
            f"Launch<{len(i.args)}, {len(i.sizes)}>{{{kernel}, {arguments}}},",
        ]
        self.notes = []

    def _call(self, i: ins.CallExtern | ins.CallPython) -> None:
        self._begin()
        given = _handed(self._given(operands(i)))
        if isinstance(i, ins.CallExtern):
            function, index = "op", self.n_ops
            self.n_ops += 1
        else:
            function, index = "python", self.n_pythons
            self.n_pythons += 1
        self.lines += _comment(line(i))
        self._add(f"TRY({function}(call, {index}{given}));")
        for out in i.outs:
            if out is not None and out in self.numbers.slots:
                self._add(f"Tensor {self._slot(out)};")
            elif out is not None and out in self.numbers.symbols:
                self._symbol(out)

    def _number(self, o: ins.Operand) -> str:
        match o:
            case ins.Literal("bool", text):
                return f"plait_bool, {int(text == 'True')}"
            case ins.Literal("float", text):
                return f"plait_real, 0, {_real(text)}"
            case ins.Literal("complex", text):
                return f"plait_complex, 0, {', '.join(map(_real, text.split()))}"
            case int() | Expr():
                return f"plait_integer, {self.size(o)}"
            case _:
                raise ValueError(f"a tensor cannot be filled with {o!r}")

    def _return(self, i: ins.Return) -> None:
        self._begin()
        given = []
        for o in i.values:
            if isinstance(o, (ins.Ref, ins.ValueOf)):
                name = o.name if isinstance(o, ins.Ref) else o.tensor
                borrowed = isinstance(
                    self.made[name],
                    (ins.TensorInput, ins.OpaqueInput, ins.Constant, ins.Place, ins.Arena),
                )
                given.append(f"{self.names[name]}{'' if borrowed else '.keep()'}")
            else:
                given += self._given([o])
        self._add(f"return give(call{_handed(given)});")


def _nbytes(i: ins.Alloc | ins.TensorInput) -> int | None:
    """Bytes from a tensor's first to past its last element, where constant."""
    reach = 1
    for n, step in zip(i.shape, i.strides, strict=True):
        if not isinstance(n, int) or not isinstance(step, int):
            return None
        if n == 0:
            return 0
        reach += (n - 1) * step
    return reach * i.dtype.nbytes


def _handed(given: Sequence[str]) -> str:
    """A list as the last argument; none if it is empty."""
    return f", {{{', '.join(given)}}}" if given else ""


def _integer(n: int) -> str:
    return str(n) if n > -(2**63) else f"({n + 1} - 1)"


def _real(text: str) -> str:
    value = float.fromhex(text)
    if value - value == 0:
        return value.hex()
    return '__builtin_nan("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inf()"


def _string(text: str) -> str:
    """A string literal of any text."""
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


def _one_line(text: str) -> str:
    """Text that ends no comment and continues it on no other line."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip("\\ ")


def _comment(text: str) -> list[str]:
    return [f"// {_one_line(s)}" for s in text.splitlines()]
