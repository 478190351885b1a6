"""Loops and loop programs as Python-like text for people, which reads back:
`read_program(program_text(p)) == p`.

A loop is a function: its parameters are the loop variables (reduced ones after `*`), `-> y` is what
it defines, each line is one scalar operation, `return` says what becomes of the last value. Values
are named t0, t1, ... within a loop. An index that is computed from data is a symbol k0, k1, ...,
which `load(x[k0, i1], k0=t2)` gives its value. Python's parser reads the text; nothing runs it.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeGuard, assert_never

from plait.devices import facts_of
from plait.ir.calls import Extern, ExternArg, ListArg, Number, Scalar, TensorArg
from plait.ir.checks import Bound, Check
from plait.ir.dtypes import DTYPES, DType, b1, f32, i64
from plait.ir.expr import Expr, Size, bounds, free_symbols, symbol
from plait.ir.expr.text import (
    Scope,
    SymbolReader,
    check_text,
    is_variable,
    items,
    keywords,
    literal_text,
    name_of,
    name_text,
    positional,
    read_check,
    read_literal,
    symbol_text,
    text_of,
    tuple_text,
    word,
    wrong,
)
from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Item,
    Load,
    LoopProgram,
    Mutate,
    Node,
    Op,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    is_arg,
    node,
    walk,
)
from plait.ir.ops import CHECKED, OPS


def program_text(p: LoopProgram) -> str:
    """A whole loop program: its inputs, symbols and buffers, then every op in order, then what it
    returns."""
    scope = program_scope(p)
    lines = [f"inputs({', '.join(_input(i) for i in p.inputs)})"]
    lines += [
        f"given({name!r}{_source(source, scope)}{_hint(p, name)})"
        for name, source in p.symbols.items()
    ]
    lines += [buffer_line(b, scope) for b in p.buffers.values()]
    for what, names in (("constants", p.constants), ("donated", p.donated)):
        lines += [f"{what}({', '.join(map(name_text, names))})"] if names else []
    for op in p.ops:
        lines += ["", *op_lines(op, scope)]
    lines += ["", f"return {tuple_text([_operand(o, scope) for o in p.outputs])}"]
    return "\n".join([*scope.lines, "", *lines]).lstrip() + "\n"


def read_program(text: str) -> LoopProgram:
    """The loop program that a text describes.

    Raises TextError, or SyntaxError for what is no Python, with the line. Whether the program is
    legal is another question: ir/verify.py answers it.
    """
    reader = OpReader()
    inputs: tuple[str | tuple[str, str] | None, ...] = ()
    named: dict[str, tuple[str, ...]] = {"constants": (), "donated": ()}
    symbols: dict[str, tuple[str, str, int] | Size | None] = {}
    hints: dict[str, int] = {}
    ops: list[Op] = []
    outputs: tuple[Any, ...] = ()
    for s in ast.parse(text).body:
        call = s.value if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) else None
        if reader.header(s):
            continue
        if call is not None and word(call) == "inputs":
            inputs = tuple(_read_input(e) for e in call.args)
        elif call is not None and word(call) in named:
            named[word(call) or ""] = tuple(name_of(e) for e in call.args)
        elif call is not None and word(call) == "given":
            name = text_of(positional(call, 0))
            symbols[name] = _read_source(call, reader)
            if (value := keywords(call, ("hint",)).get("hint")) is not None:
                hints[name] = _int(value)
        elif isinstance(s, ast.Return) and s.value is not None:
            outputs = tuple(reader.operand(e) for e in items(s.value))
        else:
            ops.append(reader.op(s))
    constants, donated = named["constants"], named["donated"]
    return LoopProgram(
        inputs, reader.buffers, constants, tuple(ops), outputs, symbols, donated, hints
    )


# ------------------------------------------------------------------------------------------ writing
def program_scope(p: LoopProgram) -> Scope:
    """The scope of a program's text: symbols get other names than buffers and loop variables."""
    vars_ = [v for op in p.ops for v in (*getattr(op, "vars", ()), *getattr(op, "rvars", ()))]
    return Scope(frozenset(p.buffers) | {str(v) for v in vars_})


def _input(i: str | tuple[str, str] | None) -> str:
    return f"int({i[1]!r})" if isinstance(i, tuple) else "None" if i is None else name_text(i)


def _source(source: tuple[str, str, int] | Size | None, scope: Scope) -> str:
    if source is None:
        return ""
    if isinstance(source, tuple):
        return f", read({name_text(source[0])}, {source[1]!r}, {source[2]})"
    return f", {scope.size(source)}"


def _hint(p: LoopProgram, name: str) -> str:
    return f", hint={p.hints[name]}" if name in p.hints else ""


def buffer_line(b: Buffer, scope: Scope) -> str:
    """The declaration of a buffer: type, sizes, strides, whether its layout is fixed, its device if
    not the CPU."""
    facts = ["fixed"] if b.fixed else []
    facts += [repr(b.device)] if not facts_of(b.device).is_host else []
    is_so = f" = {', '.join(facts)}" if facts else ""
    return f"{name_text(b.name)}: {scope.tensor_type(b.dtype, b.shape, b.strides)}{is_so}"


def op_lines(op: Op, scope: Scope) -> list[str]:
    """One op of a program."""
    match op:
        case Pointwise() | Reduction() | Scan() | Scatter():
            return _loop_lines(op, scope)
        case Extern():
            return [extern_line(op, scope)]
        case Alias():
            how = "" if op.relative else ", from_start=True"
            base = name_text(op.base)
            return [f"{name_text(op.out)} = memory({base}, {scope.size(op.offset)}{how})"]
        case Item():
            return [f"item({op.name!r}, {name_text(op.buf)})"]
        case Assert():
            more = f", values={scope.sizes(op.values)}" if op.values else ""
            more += f", error={op.error!r}" if op.error != "RuntimeError" else ""
            return [f"require({scope.size(op.expr)}, {op.message!r}{more})"]
        case Mutate():
            return [f"{name_text(op.target)}[...] = {name_text(op.source)}"]
        case _:
            assert_never(op)


def _loop_lines(op: Pointwise | Reduction | Scan | Scatter, scope: Scope) -> list[str]:
    rvars = op.rvars if isinstance(op, Reduction) else ()
    body = Body(scope, (*op.vars, *rvars))
    value = body.value(op.body)
    match op:
        case Pointwise():
            what, ends = "pointwise", value
            out = name_text(op.out)
            out += "" if op.index is None else f"[{body.inner.index(op.index)}]"
        case Reduction():
            what, ends, out = "reduce", f"{py_word(op.kind)}({value})", _names(op.outs)
        case Scan():
            along = op.vars[op.axis].symbol
            assert along is not None
            ends = f"{py_word(op.kind)}({value}, along={body.inner.names[along]})"
            what, out = "scan", _names(op.outs)
        case Scatter():
            given = body.given(op.index, op.index_args, op.mask)
            ends = f"{op.mode}({', '.join([value, f'base={name_text(op.base)}', *given])})"
            what, out = "scatter", f"{name_text(op.out)}[{body.inner.index(op.index)}]"
        case _:
            assert_never(op)
    head = f"def {what}({params_text(op.vars, rvars, body)}) -> {out}:"
    return [head, *(f"    {s}" for s in (*origin_lines(op.origin), *body.lines, f"return {ends}"))]


def _names(names: Sequence[str | None]) -> str:
    made = ["None" if n is None else name_text(n) for n in names]
    return made[0] if len(made) == 1 else tuple_text(made)


def params_text(vars_: Sequence[Expr], rvars: Sequence[Expr], body: Body) -> str:
    """Loop variables with their numbers of points: `i0: s0, *, r0: 8`."""
    params = [_param(v, body.inner) for v in vars_]
    if rvars:
        params += ["*", *(_param(v, body.inner) for v in rvars)]
    return ", ".join(params)


def _param(var: Expr, scope: Scope) -> str:
    a = var.symbol
    assert a is not None
    name, extent = scope.names[a], None if a.extent is None else scope.size(a.extent)
    usual = a.extent is not None and (a.lo, a.hi) == (0, bounds(a.extent)[1] - 1)
    return f"{name}: {extent if usual and name == a.name else symbol_text(a, name, extent)}"


def origin_lines(origin: Sequence[str]) -> list[str]:
    """Source lines and ATen ops: the first line of a body."""
    return [", ".join(map(repr, origin))] if origin else []


def py_word(name: str) -> str:
    """The name of an operation as a word that Python's parser takes: `and_` for and."""
    return f"{name}_" if keyword.iskeyword(name) else name


class Body:
    """The lines of one loop body. vars: its loop variables, which need no declaration."""

    def __init__(self, scope: Scope, vars_: Sequence[Expr]) -> None:
        self.inner = Scope(outer=scope)
        for v in vars_:
            assert v.symbol is not None
            self.inner.names[v.symbol] = v.symbol.name
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


_EXTERN = {
    f.name: f.default
    for f in fields(Extern)
    if f.name not in ("outs", "op", "args", "kwargs") and f.default is not MISSING
}


def extern_line(e: Extern, scope: Scope) -> str:
    """A call of an operator: `o = call('aten::mm', fallback=False)(x[8, 4] @ (4, 1), 3)`."""
    facts = [
        f"{name}={_fact(getattr(e, name), scope)}"
        for name, default in _EXTERN.items()
        if getattr(e, name) != default
    ]
    args = [_operand(a, scope) for a in e.args]
    for k, a in e.kwargs:
        value = _operand(a, scope)
        args.append(f"{k}={value}" if is_variable(k) else f"**{{{k!r}: {value}}}")
    outs = ", ".join("_" if o is None else name_text(o) for o in e.outs)
    head = f"call({', '.join([repr(e.op), *facts])})"
    return f"{f'{outs} = ' if e.outs else ''}{head}({', '.join(args)})"


def _fact(value: object, scope: Scope) -> str:
    return scope.size(value) if isinstance(value, Expr) else repr(value)


def _operand(a: ExternArg, scope: Scope) -> str:
    match a:
        case Number(buf):
            return f"value({name_text(buf)})"
        case TensorArg(buf, shape, strides, offset, dtype):
            at = "" if (offset, dtype) == (0, None) else scope.size(offset)
            at += "" if dtype is None else f", {dtype}"
            name = f"{name_text(buf)}.at({at})" if at else name_text(buf)
            return f"{name}[{scope.index(shape)}] @ {scope.sizes(strides)}"
        case Scalar(kind, text):
            return literal_text(kind, text)
        case ListArg(parts):
            return f"[{', '.join(_operand(i, scope) for i in parts)}]"
        case _:
            return scope.size(a)


# ------------------------------------------------------------------------------------------ reading
def _read_input(e: ast.expr) -> str | tuple[str, str] | None:
    if isinstance(e, ast.Constant) and e.value is None:
        return None
    if isinstance(e, ast.Call) and word(e) == "int":
        return "sym", text_of(positional(e, 0))
    return name_of(e)


def _read_source(call: ast.Call, reader: OpReader) -> tuple[str, str, int] | Size | None:
    if len(call.args) < 2:
        return None
    e = call.args[1]
    if isinstance(e, ast.Call) and word(e) == "read":
        return name_of(positional(e, 0)), text_of(positional(e, 1)), _int(positional(e, 2))
    return reader.symbols.size(e)


def is_element(e: ast.expr) -> TypeGuard[ast.Subscript]:
    """Whether this is `x[...]` rather than a name that is spelled ref['x']."""
    return isinstance(e, ast.Subscript) and not (
        isinstance(e.value, ast.Name) and e.value.id == "ref"
    )


def _int(e: ast.expr) -> int:
    if isinstance(e, ast.Constant) and type(e.value) is int:
        return e.value
    raise wrong(e, "a number")


def flag_of(call: ast.Call, name: str) -> bool:
    """Whether a call has the keyword argument name=True."""
    for k in call.keywords:
        if k.arg == name:
            if isinstance(k.value, ast.Constant) and isinstance(k.value.value, bool):
                return k.value.value
            raise wrong(k.value, "True or False")
    return False


def dtype_of(e: ast.expr) -> DType:
    """An element type by its name."""
    if isinstance(e, ast.Name) and e.id in DTYPES:
        return DTYPES[e.id]
    raise wrong(e, "an element type")


def optional_name(e: ast.expr) -> str | None:
    """A name, or None for `_` and None."""
    empty = (isinstance(e, ast.Constant) and e.value is None) or (
        isinstance(e, ast.Name) and e.id == "_"
    )
    return None if empty else name_of(e)


def _name_list(e: ast.expr) -> tuple[str | None, ...]:
    return tuple(optional_name(x) for x in (e.elts if isinstance(e, ast.Tuple) else [e]))


class OpReader:
    """Reads declarations and ops, one statement after the other. buffers: those declared so far."""

    def __init__(self) -> None:
        self.symbols = SymbolReader()
        self.buffers: dict[str, Buffer] = {}

    def header(self, s: ast.stmt) -> bool:
        """Takes the declaration of a symbol or a buffer; False for any other statement."""
        if isinstance(s, ast.AnnAssign):
            b = self._buffer(s)
            self.buffers[b.name] = b
            return True
        return self.symbols.declaration(s)

    def _buffer(self, s: ast.AnnAssign) -> Buffer:
        dtype, shape, strides = self.symbols.tensor_type(s.annotation)
        device, fixed = "cpu", False
        facts = (
            [] if s.value is None else s.value.elts if isinstance(s.value, ast.Tuple) else [s.value]
        )
        for e in facts:
            if isinstance(e, ast.Name) and e.id == "fixed":
                fixed = True
            else:
                device = text_of(e)
        return Buffer(name_of(s.target), dtype, shape, strides, device, fixed)

    def op(self, s: ast.stmt) -> Op:
        """One op of a program."""
        if isinstance(s, ast.FunctionDef):
            return self._loop(s)
        match s:
            case ast.Assign(targets=[ast.Subscript(value=target, slice=ast.Constant(value=v))]) if (
                v is ...
            ):
                return Mutate(name_of(target), name_of(s.value))
            case ast.Assign(targets=[left], value=ast.Call() as call):
                if word(call) == "memory":
                    return self._alias(name_of(left), call)
                return self._extern(call, _name_list(left))
            case ast.Expr(value=ast.Call() as call):
                if word(call) == "item":
                    return Item(text_of(positional(call, 0)), name_of(positional(call, 1)))
                if word(call) == "require":
                    given = {k.arg: k.value for k in call.keywords}
                    values = self.symbols.sizes(given["values"]) if "values" in given else ()
                    error = text_of(given["error"]) if "error" in given else "RuntimeError"
                    expr = self.symbols.size(positional(call, 0))
                    return Assert(expr, text_of(positional(call, 1)), values, error)
                return self._extern(call, ())
        raise wrong(s, "a loop, a call or a declaration")

    def _alias(self, out: str, call: ast.Call) -> Alias:
        absolute = flag_of(call, "from_start")
        offset = self.symbols.size(positional(call, 1))
        return Alias(out, name_of(positional(call, 0)), offset, relative=not absolute)

    # ---- loops
    def _loop(self, s: ast.FunctionDef) -> Op:
        if s.returns is None or s.name not in ("pointwise", "reduce", "scan", "scatter"):
            raise wrong(s, "def pointwise, reduce, scan or scatter(...) -> what it defines")
        body = BodyReader(self.symbols, s.args)
        origin, lines = body.split_origin(s.body)
        end = lines.pop() if lines else s
        for line in lines:
            body.line(line)
        if not isinstance(end, ast.Return) or end.value is None:
            raise wrong(end, "a return at the end of the loop")
        make: dict[str, Callable[[ast.expr, ast.expr, BodyReader, tuple[str, ...]], Op]] = {
            "pointwise": _pointwise, "reduce": _reduce, "scan": _scan, "scatter": _scatter,
        }  # fmt: skip
        return make[s.name](s.returns, end.value, body, origin)

    # ---- calls
    def _extern(self, call: ast.Call, outs: tuple[str | None, ...]) -> Extern:
        head = call.func
        if not (isinstance(head, ast.Call) and word(head) == "call"):
            raise wrong(call, "call('namespace::op', ...)(...)")
        facts = {
            k: self._fact(e, _EXTERN[k]) for k, e in keywords(head, tuple(_EXTERN)).items()
        }  # fmt: skip
        kwargs: list[tuple[str, ExternArg]] = []
        for k in call.keywords:
            if k.arg is not None:
                kwargs.append((k.arg, self.operand(k.value)))
            elif isinstance(k.value, ast.Dict) and len(k.value.keys) == 1 and k.value.keys[0]:
                kwargs.append((text_of(k.value.keys[0]), self.operand(k.value.values[0])))
            else:
                raise wrong(call, "arguments with names")
        args = tuple(self.operand(a) for a in call.args)
        return Extern(outs, text_of(positional(head, 0)), args, tuple(kwargs), **facts)

    def _fact(self, e: ast.expr, default: object) -> Any:
        """A field of Extern, of the type of its default; flops may be an expression."""
        if type(default) is int:
            return self.symbols.size(e)
        try:
            value = ast.literal_eval(e)
        except ValueError:
            raise wrong(e, "a constant") from None
        if type(value) is not type(default):
            raise wrong(e, f"a {type(default).__name__}")
        return value

    def operand(self, e: ast.expr) -> ExternArg:
        """An operand of a call or an output of the program."""
        if self.symbols.is_tensor_type(e):
            return self._tensor(e)
        if isinstance(e, ast.Call) and word(e) == "value":
            return Number(name_of(positional(e, 0)), (), (), 0)
        if isinstance(e, ast.List):
            return ListArg(tuple(self.operand(x) for x in e.elts))
        if self.symbols.is_size(e):
            return self.symbols.size(e)
        found = read_literal(e)
        if found is None:
            raise wrong(e, "an operand such as x[8, 4] @ (4, 1)")
        return Scalar(*found)

    def _tensor(self, e: ast.expr) -> TensorArg:
        match e:
            case ast.BinOp(left=ast.Subscript(value=base, slice=shape), right=strides):
                offset: Size = 0
                dtype = None
                if isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute):
                    offset = self.symbols.size(positional(base, 0))
                    dtype = dtype_of(base.args[1]) if len(base.args) > 1 else None
                    base = base.func.value
                sizes = self.symbols.index(shape), self.symbols.sizes(strides)
                return TensorArg(name_of(base), *sizes, offset, dtype)
        raise wrong(e, "an operand such as x[8, 4] @ (4, 1)")


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


def _pointwise(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    value = body.value(end)
    if not is_element(out):
        return Pointwise(name_of(out), body.vars, value, None, origin)
    index = body.symbols.index(out.slice)
    return Pointwise(name_of(out.value), body.vars, value, index, origin)


def ends_with(end: ast.expr) -> tuple[str, ast.Call]:
    """Kind and call of `return sum(t0)`."""
    if not isinstance(end, ast.Call) or word(end) is None:
        raise wrong(end, "a call such as sum(t0)")
    return (word(end) or "").removesuffix("_"), end


def _reduce(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    kind, call = ends_with(end)
    value = body.value(positional(call, 0))
    return Reduction(_name_list(out), body.vars, body.rvars, kind, value, origin)


def _scan(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    kind, call = ends_with(end)
    along = keywords(call, ("along",)).get("along")
    found = None if along is None else body.symbols.size(along)
    if found not in body.vars:
        raise wrong(call, "along= a loop variable")
    axis = body.vars.index(found)
    return Scan(_name_list(out), body.vars, axis, kind, body.value(positional(call, 0)), origin)


def _scatter(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    mode, call = ends_with(end)
    base = next((k.value for k in call.keywords if k.arg == "base"), None)
    if not isinstance(out, ast.Subscript) or base is None:
        raise wrong(call, "-> y[...] and base=x")
    args, mask = body.given(call)
    index = body.symbols.index(out.slice)
    value = body.value(positional(call, 0))
    return Scatter(
        name_of(out.value), name_of(base), body.vars, index, args, value, mode, mask, origin
    )
