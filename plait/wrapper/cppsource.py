"""The text of a C++ program while it is written: its lines, its variables, launches that wait.

`cppsteps.py` adds a program's instructions to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from plait.ir.expr import Atom, Expr, Size, fold
from plait.runtime.functions import FUNCTIONS
from plait.wrapper import instructions as ins
from plait.wrapper.cpplives import lives_of, nbytes_of
from plait.wrapper.native import encode_numbered

_FUNCTIONS = {name: number for number, name in enumerate(FUNCTIONS)}
_RESERVED = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t
    char16_t char32_t class compl concept const consteval constexpr constinit const_cast
    continue co_await co_return co_yield decltype default delete do double dynamic_cast else
    enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename
    union unsigned using virtual void volatile wchar_t while xor xor_eq linux unix call kernel
    plait wrapper div mod min max eq ne lt le require op python programs run give symbol launch main
    Call Int Slot Tensor Operand Launch Arguments TRY SIZE NULL plait_size plait_stride
    plait_offset plait_item plait_integer plait_bool plait_real plait_complex""".split()
)
# Chosen, not measured.
_SMALL = 1 << 20  # memory that dies in a region and is not worth ending it for before an allocation


class Names:
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
class Region:
    """Launches that wait to be run as one, and the tensors that die with them. lines: as they are
    written."""

    lines: list[str] = field(default_factory=list)
    dying: list[str] = field(default_factory=list)


class Source:
    """The text so far. numbers: those of slots and symbols in the native plan. notes: comments for
    what follows. sizes: the variables of expressions."""

    def __init__(self, p: ins.WrapperProgram) -> None:
        self.p = p
        self.numbers = encode_numbered(p)
        self.lives = lives_of(p, self.numbers.slots)
        self.names, self.kernel_names = Names(), Names()
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.region = Region()
        self.sizes: dict[Size, str] = {}
        self.n_calls = Counter[str]()
        self.devices = {i.name: i.device for i in p.body if isinstance(i, ins.DefineKernel)}

    def add(self, text: str, comment: str = "") -> None:
        """One line, with a comment."""
        self.lines.append(f"{text}  // {one_line(comment)}" if comment else text)

    def slot(self, name: str) -> str:
        """The declaration of a tensor, less its class."""
        return f"{self.names[name]}(call, {self.numbers.slots[name]})"

    def symbol(self, name: str) -> None:
        """Declares a symbol that the call knows."""
        self.add(f"const int64_t {self.names[name]} = symbol(call, {self.numbers.symbols[name]});")

    def at(self, name: str) -> str:
        """The pointer of a tensor."""
        return self.names[name] if self.lives.is_pointer(name) else f"{self.names[name]}.data()"

    def size(self, e: Size) -> str:
        """An integer; what has to be computed for it comes first, once."""
        if isinstance(e, int):
            return _integer(e)
        if (atom := e.symbol) is not None:
            return self.names[atom.name]
        if e not in self.sizes:
            name = self.names.fresh("size")
            self.add(f"SIZE({name}, {self.expression(e)});")
            self.sizes[e] = name
        return self.sizes[e]

    def expression(self, e: Size) -> str:
        """An integer that is computed where it stands."""
        text: str = fold(e, self._atom, _int, "{} + {}".format, "{} * {}".format)
        return text

    def _atom(self, a: Atom) -> str:
        if a.kind == "sym":
            return f"Int({self.names[a.name]})"
        left, right = self.expression(a.a), self.expression(a.b)
        if a.kind in _FUNCTIONS:
            return f"function(call, {_FUNCTIONS[a.kind]} /* {a.kind} */, {left}, {right})"
        return f"{a.kind}({left}, {right})"

    def layout(
        self, i: ins.Place | ins.Alloc | ins.Reuse | ins.View | ins.AssertSizeStride
    ) -> list[str]:
        """Sizes and strides, as arguments."""
        return [self.listed(i.shape), self.listed(i.strides)] if i.shape else []

    def listed(self, values: Sequence[Size]) -> str:
        """Integers as a list."""
        return f"{{{', '.join(self.size(v) for v in values)}}}"

    def given(self, values: Sequence[ins.Operand]) -> list[str]:
        """What a call is handed: tensors and integers, constants aside."""
        out: list[str] = []
        for o in values:
            match o:
                case ins.Ref(name) | ins.ValueOf(name):
                    out.append(self.names[name])
                case ins.ListOf(items):
                    out += self.given(items)
                case Expr():
                    out.append(self.size(o))
                case ins.Literal() | int():
                    pass
                case _:
                    assert_never(o)
        return out

    def end(self, k: int) -> None:
        """Adds the ends of what the instruction at this position uses last."""
        drops = self.lives.drops.get(k, [])
        if self.region.lines:
            self.region.dying += drops
        else:
            self.drop(drops)

    def drop(self, names: Sequence[str]) -> None:
        """Tensors end here."""
        self.lines += [f"{self.names[n]}.drop();" for n in names]

    def end_region(self) -> None:
        """Launches that follow each other run as one."""
        if not self.region.lines:
            return
        done, self.region = self.region, Region()
        last = max(k for k, s in enumerate(done.lines) if not s.startswith("//"))
        done.lines[last] = done.lines[last].removesuffix(",") + "));"
        self.lines += ["TRY(run(call,", *(f"    {s}" for s in done.lines)]
        self.drop(done.dying)

    def before_alloc(self) -> None:
        """Large memory that died is given back first."""
        for name in self.region.dying:
            i = self.lives.made[name]
            if isinstance(i, (ins.View, ins.Reuse)):
                continue
            nbytes = nbytes_of(i) if isinstance(i, (ins.Alloc, ins.TensorInput)) else None
            if nbytes is None or nbytes >= _SMALL:
                return self.end_region()
        return None

    def begin(self) -> None:
        """What follows needs what all launches have written."""
        self.end_region()
        self.lines += self.notes
        self.notes = []


def _int(n: int) -> str:
    return f"Int({_integer(n)})"


def _integer(n: int) -> str:
    return str(n) if n > -(2**63) else f"({n + 1} - 1)"


def real(text: str) -> str:
    """A float literal of a value in hexadecimal."""
    value = float.fromhex(text)
    if value - value == 0:
        return value.hex()
    return '__builtin_nan("")' if value != value else f"{'-' if value < 0 else ''}__builtin_inf()"


def string(text: str) -> str:
    """A string literal of any text."""
    plain = set(range(32, 127)) - set(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


def one_line(text: str) -> str:
    """Text that ends no comment and continues it on no other line."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip("\\ ")


def comment(text: str) -> list[str]:
    """Any text as lines of comment."""
    return [f"// {one_line(s)}" for s in text.splitlines()]
