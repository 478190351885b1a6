"""Integer expressions as Python text, exact both ways: symbols are declared with their ranges.

`Scope` gives every symbol a variable name (its own name where that is free) and prints declarations
such as `s0 = symbol(lo=2)`; `SymbolReader` reads declarations and expressions back from the syntax
tree of Python's own parser. Two symbols of one name and different ranges get two variables. What
all texts spell alike is here too: names, tensor types, constants.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable
from textwrap import indent
from typing import TypeGuard

from plait.ir.checks import Check
from plait.ir.dtypes import DTYPES, DType
from plait.ir.expr.core import INF, Atom, Expr, Size, expr_text
from plait.ir.expr.fold import BUILD
from plait.ir.expr.ranges import bounds, symbol

_INFIX = {"div": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<", "le": "<="}
_VALUE = re.compile(r"t\d+")  # t0, t1, ... are the values of a loop body


class TextError(ValueError):
    """A text that is no program of ours; the message has line and column."""


def is_variable(name: str) -> bool:
    """Whether a name can be a variable of the text."""
    return name.isidentifier() and not keyword.iskeyword(name) and name != "_"


class Scope:
    """Variable names of symbols, in order of their first use.

    outer: a scope whose variables are visible here; it declares all that `names` does not hold."""

    def __init__(self, taken: frozenset[str] = frozenset(), outer: Scope | None = None) -> None:
        self.outer = outer
        self.taken: set[str] = set(taken)
        self.names: dict[Atom, str] = {}
        self.lines: list[str] = []

    def declare(self, atom: Atom) -> str:
        """The variable of a symbol; on first use a declaration line is added to the outermost
        scope's `lines`."""
        if atom in self.names:
            return self.names[atom]
        if self.outer is not None:
            return self.outer.declare(atom)
        extent = None if atom.extent is None else self.size(atom.extent)
        name = self.bind(atom)
        self.lines.append(f"{name} = {symbol_text(atom, name, extent)}")
        return name

    def bind(self, atom: Atom) -> str:
        """Gives a symbol a free variable name without a declaration line."""
        stem = atom.name if is_variable(atom.name) else "sym"
        stem = (
            f"k{atom.name[1:]}" if atom.name.startswith("$") else stem
        )  # a position among arguments
        name, k = stem, 2
        while name in self.taken or _VALUE.fullmatch(name):
            name, k = f"{stem}_{k}", k + 1
        self.taken.add(name)
        self.names[atom] = name
        return name

    def size(self, e: Size) -> str:
        """An expression as text; declares the symbols that it meets."""
        return expr_text(e, self._atom)

    def sizes(self, values: tuple[Size, ...]) -> str:
        """A tuple of expressions."""
        return tuple_text([self.size(v) for v in values])

    def index(self, values: tuple[Size, ...]) -> str:
        """Expressions between the brackets of an index or a shape."""
        return ", ".join(self.size(v) for v in values) or "()"

    def tensor_type(self, dtype: DType, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> str:
        """`f32[s0, 8] @ (8, 1)`: element type, sizes, strides."""
        return f"{dtype.name}[{self.index(shape)}] @ {self.sizes(strides)}"

    def _atom(self, a: Atom) -> str:
        if a.kind == "sym":
            return self.declare(a)
        left, right = self.size(a.a), self.size(a.b)
        if a.kind not in _INFIX:
            return f"{a.kind}({left}, {right})"
        return f"({_paren(left)} {_INFIX[a.kind]} {_paren(right)})"


def _paren(text: str) -> str:
    whole = text.isidentifier() or text.isdigit()
    return text if whole else f"({text})"


def symbol_text(a: Atom, variable: str, extent: str | None) -> str:
    """The declaration of a symbol that has this variable: `symbol(lo=2)`. extent: the text of its
    extent."""
    parts = [] if a.name == variable else [repr(a.name)]
    hi = INF
    if extent is not None and a.extent is not None:
        hi = bounds(a.extent)[1] - 1
        parts.append(f"extent={extent}")
    if a.lo != 0:
        parts.append(f"lo={_bound(a.lo)}")
    if a.hi != hi:
        parts.append(f"hi={_bound(a.hi)}")
    return f"symbol({', '.join(parts)})"


def _bound(x: float) -> str:
    return str(int(x)) if abs(x) != INF else "inf" if x > 0 else "-inf"


_SUBPROGRAM = "subprogram_"


def subprogram_lines(number: int, text: str) -> list[str]:
    """A subprogram's text as a function behind that of the program that runs it."""
    return ["", f"def {_SUBPROGRAM}{number}():", indent(text.strip() or "pass", "    ")]


def is_subprogram(s: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether a statement is such a function."""
    return isinstance(s, ast.FunctionDef) and s.name.startswith(_SUBPROGRAM)


def tuple_text(parts: list[str]) -> str:
    """Items as a Python tuple."""
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def name_text(name: str) -> str:
    """A name as the text spells it: itself where that can be a variable, else ref['name']."""
    return name if is_variable(name) and name != "ref" else f"ref[{name!r}]"


def literal_text(kind: str, value: str) -> str:
    """A constant operand (see wrapper.instructions.Literal): Python's where that is exact, else
    kind('text')."""
    if kind == "none" and not value:
        return "None"
    if kind == "str":
        return repr(value)
    if kind == "bool" and value in ("True", "False"):
        return value
    if kind == "float":
        number = _from_hex(value)
        if number is not None and number.hex() == value and number - number == 0:
            return repr(number)
    return f"{kind}({value!r})"


def check_text(check: Check) -> str:
    """The error of a run-time check: IndexError('index out of range')."""
    return f"{check.error}({check.message!r})"


def _from_hex(value: str) -> float | None:
    try:
        return float.fromhex(value)
    except ValueError:
        return None


_COMPARE: dict[type[ast.cmpop], str] = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le"}
_BINARY: dict[type[ast.operator], Callable[[Size, Size], Size]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: BUILD["div"],
    ast.Mod: BUILD["mod"],
}
_CALLS = BUILD.keys() - _INFIX.keys()
"""Functions that the text spells as calls."""


class SymbolReader:
    """Reads declarations and expressions. symbols: variable name -> symbol."""

    def __init__(self, outer: SymbolReader | None = None) -> None:
        self.symbols: dict[str, Expr] = dict(outer.symbols) if outer else {}

    def declaration(self, s: ast.stmt) -> bool:
        """Takes `x = symbol(...)`; False for any other statement."""
        match s:
            case ast.Assign([ast.Name(variable), *_], ast.Call(ast.Name("symbol")) as call):
                self.symbols[variable] = self._symbol(call, variable)
                return True
        return False

    def _symbol(self, call: ast.Call, variable: str) -> Expr:
        name = text_of(call.args[0]) if call.args else variable
        given = keywords(call, ("lo", "hi", "extent"))
        lo = self.bound(given["lo"]) if "lo" in given else 0
        hi = self.bound(given["hi"]) if "hi" in given else INF
        extent = self.size(given["extent"]) if "extent" in given else None
        return symbol(name, lo, hi, extent)

    def is_tensor_type(self, e: ast.expr) -> bool:
        """Whether this is `x[..] @ (..)`."""
        return isinstance(e, ast.BinOp) and isinstance(e.op, ast.MatMult)

    def tensor_type(self, e: ast.expr) -> tuple[DType, tuple[Size, ...], tuple[Size, ...]]:
        """dtype, sizes and strides of `f32[s0, 8] @ (8, 1)`."""
        match e:
            case ast.BinOp(
                left=ast.Subscript(value=ast.Name(id=dtype), slice=shape), op=ast.MatMult()
            ):
                if dtype not in DTYPES:
                    raise wrong(e, "an element type")
                return DTYPES[dtype], self.index(shape), self.sizes(e.right)
            case _:
                raise wrong(e, "a tensor type such as f32[8, 4] @ (4, 1)")

    def index(self, e: ast.expr) -> tuple[Size, ...]:
        """The expressions between the brackets of an index or a shape."""
        return self.sizes(e) if isinstance(e, ast.Tuple) else (self.size(e),)

    def bound(self, e: ast.expr) -> float:
        if isinstance(e, ast.Name) and e.id == "inf":
            return INF
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
            return -self.bound(e.operand)
        if isinstance(e, ast.Constant) and isinstance(e.value, int):
            return e.value
        raise wrong(e, "a bound")

    def is_size(self, e: ast.expr) -> bool:
        """Whether this is an expression rather than another operand."""
        match e:
            case ast.Constant(value=value):
                return type(value) is int
            case ast.Name(id=name):
                return name in self.symbols
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.is_size(operand)
            case ast.BinOp() | ast.Compare():
                return True
            case ast.Call(func=ast.Name(id=name)):
                return name in _CALLS
            case _:
                return False

    def size(self, e: ast.expr) -> Size:
        """An integer expression. Raises TextError for anything else."""
        match e:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name in self.symbols:
                return self.symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.size(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                try:
                    return _BINARY[type(op)](self.size(left), self.size(right))
                except (ZeroDivisionError, AssertionError):
                    raise wrong(e, "a division by a positive number") from None
            case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _CALLS:
                return BUILD[name](self.size(left), self.size(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return BUILD[_COMPARE[type(op)]](self.size(left), self.size(right))
            case _:
                raise wrong(e, "an integer expression")

    def sizes(self, e: ast.expr) -> tuple[Size, ...]:
        """A tuple of expressions."""
        return tuple(self.size(x) for x in items(e))


def items(e: ast.expr) -> list[ast.expr]:
    """The elements of a tuple."""
    if not isinstance(e, ast.Tuple):
        raise wrong(e, "a tuple")
    return e.elts


def text_of(e: ast.expr) -> str:
    """The value of a string constant."""
    if not (isinstance(e, ast.Constant) and isinstance(e.value, str)):
        raise wrong(e, "a string")
    return e.value


def wrong(at: ast.AST, wanted: str) -> TextError:
    """The error at a node of the syntax tree."""
    line, column = getattr(at, "lineno", 0), getattr(at, "col_offset", 0)
    found = ast.unparse(at).strip().split("\n")[0]
    found = found if len(found) <= 80 else found[:77] + "..."
    return TextError(f"line {line}, column {column}: expected {wanted}, got {found}")


def word(e: ast.AST) -> str | None:
    """f of a call `f(...)`."""
    return e.func.id if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) else None


def name_of(e: ast.expr) -> str:
    """What `name_text` spelled."""
    match e:
        case ast.Name(id=name):
            return name
        case ast.Subscript(value=ast.Name(id="ref"), slice=which):
            return text_of(which)
        case _:
            raise wrong(e, "a name")


def is_element(e: ast.expr) -> TypeGuard[ast.Subscript]:
    """Whether this is `x[...]` rather than a name that is spelled ref['x']."""
    return isinstance(e, ast.Subscript) and not (
        isinstance(e.value, ast.Name) and e.value.id == "ref"
    )


def keywords(call: ast.Call, known: tuple[str, ...] | None = None) -> dict[str, ast.expr]:
    """The keyword arguments of a call, by name. Raises TextError for one that is not known (if
    known is given)."""
    for k in call.keywords:
        if k.arg is None or (known is not None and k.arg not in known):
            raise wrong(call, f"only the arguments {', '.join(known or ('that have names',))}")
    return {k.arg: k.value for k in call.keywords if k.arg is not None}


def flag_of(call: ast.Call, name: str) -> bool:
    """Whether a call has the keyword argument name=True."""
    for k in call.keywords:
        if k.arg == name:
            if isinstance(k.value, ast.Constant) and isinstance(k.value.value, bool):
                return k.value.value
            raise wrong(k.value, "True or False")
    return False


def said(call: ast.Call, name: str) -> bool | None:
    """The same; None where the call says nothing of it."""
    return flag_of(call, name) if any(k.arg == name for k in call.keywords) else None


def read_literal(e: ast.expr) -> tuple[str, str] | None:
    """Kind and text of a constant operand; None if this is none."""
    match e:
        case ast.Constant(value=None):
            return "none", ""
        case ast.Constant(value=bool(value)):
            return "bool", str(value)
        case ast.Constant(value=float(value)):
            return "float", value.hex()
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(value))):
            return "float", (-value).hex()
        case ast.Constant(value=str(value)):
            return "str", value
        case ast.Call(func=ast.Name(id=kind), args=[value]) if kind not in _CALLS:
            return kind, text_of(value)
        case _:
            return None


def read_check(e: ast.expr) -> Check:
    """What `check_text` wrote."""
    match e:
        case ast.Call(func=ast.Name(id=error), args=[message]):
            return Check(error, text_of(message))
        case _:
            raise wrong(e, "a check such as IndexError('...')")


def positional(call: ast.Call, k: int) -> ast.expr:
    """The k-th positional argument. Raises TextError if there is none."""
    if k >= len(call.args):
        raise wrong(call, f"an argument number {k + 1}")
    return call.args[k]
