"""Loop bodies as text, both ways: loop variables with their numbers of points, then a line for each
scalar operation.

`Body` writes `t0: f32 = exp(t1)`, `BodyReader` reads such lines. Values are named t0, t1, ... An
index that is computed from data is a symbol k0, k1, ..., which `load(x[k0, i1], k0=t2)` gives its
value. Used by the texts of loop programs and of plans.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Sequence

from plait.ir.checks import Bound, Check
from plait.ir.dtypes import DTYPES, DType, b1, f32, i64
from plait.ir.expr import Expr, Size, atom_of, bounds, free_symbols, symbol
from plait.ir.expr.text import (
    Scope,
    SymbolReader,
    check_text,
    keywords,
    name_of,
    name_text,
    positional,
    read_check,
    symbol_text,
    text_of,
    word,
    wrong,
)
from plait.ir.loops import LOOSE, Load, Node, is_arg, node, walk
from plait.ir.ops import CHECKED, OPS


def params_text(vars_: Sequence[Expr], rvars: Sequence[Expr], body: Body) -> str:
    """Loop variables with their numbers of points: `i0: s0, *, r0: 8`."""
    params = [_param(v, body.inner) for v in vars_]
    if rvars:
        params += ["*", *(_param(v, body.inner) for v in rvars)]
    return ", ".join(params)


def _param(var: Expr, scope: Scope) -> str:
    a = atom_of(var)
    name, extent = scope.names[a], None if a.extent is None else scope.size(a.extent)
    usual = a.extent is not None and (a.lo, a.hi) == (0, bounds(a.extent)[1] - 1)
    return f"{name}: {extent if usual and name == a.name else symbol_text(a, name, extent)}"


def origin_lines(origin: Sequence[str]) -> list[str]:
    """Source lines and ATen ops: the first line of a body."""
    return [", ".join(map(repr, origin))] if origin else []


def py_word(name: str) -> str:
    """The name of an operation as a word that Python's parser takes: `and_` for and."""
    return f"{name}_" if keyword.iskeyword(name) else name


# ------------------------------------------------------------------------------------------ writing
class Body:
    """The lines of one loop body. vars: its loop variables, which need no declaration."""

    def __init__(self, scope: Scope, vars_: Sequence[Expr]) -> None:
        self.inner = Scope(outer=scope)
        for v in vars_:
            self.inner.names[atom_of(v)] = atom_of(v).name
        self.lines: list[str] = []
        self.named = 0
        self.done: dict[Node, str] = {}

    def value(self, root: Node) -> str:
        """The text that stands for a node's value, after the lines that compute it."""
        for n in walk((root,)):
            if n not in self.done:
                self.done[n] = self._node(n)
        return self.done[root]

    def given(self, index: Sequence[Size], args: Sequence[Node], mask: Node | None) -> list[str]:
        """The values of the Arg symbols of an index, and its mask: ['k0=t2', 'where=t3']."""
        names = {k: f"k{k}" for k in range(len(args))}
        for atom in sorted({a for e in index for a in free_symbols(e) if is_arg(a)}, key=str):
            names[int(atom.name[1:])] = self.inner.declare(atom)
        given = [f"{names[k]}={self.value(a)}" for k, a in enumerate(args)]
        return given if mask is None else [*given, f"where={self.value(mask)}"]

    def _node(self, n: Node) -> str:
        if n.op == "const":
            return _const_text(n)
        text = self._text(n)
        name = f"t{self.named}"
        self.named += 1
        self.lines.append(f"{name}: {n.dtype} = {text}")
        return name

    def _text(self, n: Node) -> str:
        args = [self.done[a] for a in n.args]
        match n.attr:
            case Load(buf, index, masked):
                at = f"{name_text(buf)}[{self.inner.index(index)}]"
                given = self.given(index, n.args[:-1], n.args[-1]) if masked else (
                    self.given(index, n.args, None))  # fmt: skip
                return f"load({', '.join([at, *given])})" if given else at
            case Bound(size, check):
                args += [f"size={self.inner.size(size)}", f"check={check_text(check)}"]
            case Check():
                args.append(f"check={check_text(n.attr)}")
            case int() | Expr():
                args = [self.inner.size(n.attr), *self.given((n.attr,), n.args, None)]
            case None:
                pass
            case _:
                args.append(repr(n.attr))
        return f"{py_word(n.op)}({', '.join(args)})"


_BARE: dict[type, DType] = {float: f32, int: i64, bool: b1}


def _const_text(n: Node) -> str:
    """0.5 is f32, 4 is i64, True is b1; any other type is spelled f64(0.5)."""
    value = n.attr
    finite = not isinstance(value, float) or value - value == 0
    if finite and n.dtype == _BARE.get(type(value)):
        return repr(value)
    return f"{n.dtype}({repr(value) if finite else repr(str(value))})"


# ------------------------------------------------------------------------------------------ reading
def dtype_of(e: ast.expr) -> DType:
    """An element type by its name."""
    if isinstance(e, ast.Name) and e.id in DTYPES:
        return DTYPES[e.id]
    raise wrong(e, "an element type")


class BodyReader:
    """Reads the lines of one loop body. vars, rvars: its loop variables; values: what t0, t1, ...
    are."""

    def __init__(self, symbols: SymbolReader, params: ast.arguments) -> None:
        self.symbols = SymbolReader(symbols)
        self.vars = tuple(self._var(a) for a in params.args)
        self.rvars = tuple(self._var(a) for a in params.kwonlyargs)
        self.values: dict[str, Node] = {}

    def _var(self, a: ast.arg) -> Expr:
        e = a.annotation
        if e is None:
            raise wrong(a, "a loop variable with its number of points")
        if isinstance(e, ast.Call) and word(e) == "symbol":
            target = ast.Name(a.arg, ast.Store())
            self.symbols.declaration(ast.copy_location(ast.Assign([target], e), e))
            return self.symbols.symbols[a.arg]
        made = self.symbols.symbols[a.arg] = symbol(a.arg, extent=self.symbols.size(e))
        return made

    def split_origin(self, lines: list[ast.stmt]) -> tuple[tuple[str, ...], list[ast.stmt]]:
        """The origins that stand in the first line, if any do, and the other lines."""
        e = lines[0].value if isinstance(lines[0], ast.Expr) else None
        if not isinstance(e, ast.Tuple) and not (
            isinstance(e, ast.Constant) and isinstance(e.value, str)
        ):
            return (), list(lines)
        texts = e.elts if isinstance(e, ast.Tuple) else [e]
        return tuple(text_of(x) for x in texts), list(lines[1:])

    def line(self, s: ast.stmt) -> None:
        """One line `t0: f32 = ...`."""
        if not (isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and s.value):
            raise wrong(s, "a line such as t0: f32 = exp(t1)")
        self.values[s.target.id] = self._node(s.value, dtype_of(s.annotation))

    def value(self, e: ast.expr) -> Node:
        """A named value or a constant."""
        match e:
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Call(func=ast.Name(id=dtype), args=[value]) if dtype in DTYPES:
                return node("const", (), _const(value), DTYPES[dtype])
            case ast.Constant() | ast.UnaryOp():
                number = _const(e)
                return node("const", (), number, _BARE[type(number)])
            case _:
                raise wrong(e, "a value of a line above or a constant")

    def given(self, call: ast.Call) -> tuple[tuple[Node, ...], Node | None]:
        """The argument nodes and the mask that `Body.given` wrote; other keywords are left out."""
        found: dict[int, Node] = {}
        for k in call.keywords:
            number = re.fullmatch(r"k(\d+)(_\d+)?", k.arg or "")
            if number:
                found[int(number[1])] = self.value(k.value)
        if list(found) != list(range(len(found))):
            raise wrong(call, "k0, k1, ... in order")
        where = [k.value for k in call.keywords if k.arg == "where"]
        return tuple(found.values()), self.value(where[0]) if where else None

    def _node(self, e: ast.expr, dtype: DType) -> Node:
        if isinstance(e, ast.Subscript):
            return node("load", (), self._load(e, False), dtype)
        if not isinstance(e, ast.Call):
            raise wrong(e, "an operation")
        op = (word(e) or "").removesuffix("_")
        if op == "load":
            args, mask = self.given(e)
            load = self._load(positional(e, 0), mask is not None)
            return node("load", args if mask is None else (*args, mask), load, dtype)
        if op == "index":
            return node("index", self.given(e)[0], self.symbols.size(positional(e, 0)), dtype)
        if op == "acc":
            return node("acc", (), text_of(positional(e, 0)), dtype)
        if op == "cast" and len(e.args) == 2 and text_of(e.args[1]) == LOOSE:
            return node(op, (self.value(e.args[0]),), LOOSE, dtype)
        args = tuple(self.value(x) for x in e.args)
        if op in CHECKED:
            return node(op, args, self._checked(op, e), dtype)
        if op in ("cast", "bitcast") or op in OPS:
            if len(args) != (OPS[op].arity if op in OPS else 1):
                raise wrong(e, "another number of arguments")
            return node(op, args, None, dtype)
        raise wrong(e, "an operation of the op table")

    def _load(self, e: ast.expr, masked: bool) -> Load:
        if not isinstance(e, ast.Subscript):
            raise wrong(e, "an element such as x[i0, i1]")
        return Load(name_of(e.value), self.symbols.index(e.slice), masked)

    def _checked(self, op: str, e: ast.Call) -> Bound | Check:
        given = keywords(e)
        if "check" not in given:
            raise wrong(e, "check=IndexError('...')")
        check = read_check(given["check"])
        if op != "bounded":
            return check
        if "size" not in given:
            raise wrong(e, "size=...")
        return Bound(self.symbols.size(given["size"]), check)


def _const(e: ast.expr) -> bool | int | float:
    try:
        value = ast.literal_eval(e)
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        raise wrong(e, "a number") from None
    if type(value) not in _BARE:
        raise wrong(e, "a number")
    return value


def ends_with(end: ast.expr) -> tuple[str, ast.Call]:
    """Kind and call of `return sum(t0)`."""
    if not isinstance(end, ast.Call) or word(end) is None:
        raise wrong(end, "a call such as sum(t0)")
    return (word(end) or "").removesuffix("_"), end
