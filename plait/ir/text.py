"""Loops and loop programs as Python-like text for people, which reads back:
`read_program(program_text(p)) == p`.

A loop is a function: its parameters are the loop variables (reduced ones after `*`), `-> y` is what
it defines, each line is one scalar operation (`plait/ir/body_text.py`), `return` says what becomes
of the last value. Python's parser reads the text; nothing runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, assert_never

from plait.devices import facts_of
from plait.ir.attention import Attention, HostAttention, attention_text, read_attention
from plait.ir.body_text import (
    Body,
    BodyReader,
    dtype_of,
    ends_with,
    origin_lines,
    params_text,
    py_word,
)
from plait.ir.calls import (
    Control,
    Extern,
    ExternArg,
    ListArg,
    Number,
    Operator,
    Rival,
    Scalar,
    TensorArg,
    UserKernel,
    Variant,
)
from plait.ir.expr import Expr, Size, atom_of
from plait.ir.expr.text import (
    Scope,
    SymbolReader,
    flag_of,
    is_element,
    is_subprogram,
    is_variable,
    items,
    keywords,
    literal_text,
    name_of,
    name_text,
    positional,
    read_literal,
    said,
    subprogram_lines,
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
    LoopProgram,
    Mutate,
    Op,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
)
from plait.ir.product import Cut, Pair, Panels, Part, Product, Window


def program_text(p: LoopProgram) -> str:
    """A whole loop program: its inputs, symbols and buffers, then every op in order, then what it
    returns. Each subprogram stands in a function of its own behind it."""
    scope = program_scope(p)
    lines = [f"inputs({', '.join(_input(i) for i in p.inputs)})"]
    lines += [
        f"given({name!r}{_source(source, scope)}{_hint(p, name)})"
        for name, source in p.symbols.items()
    ]
    lines += [buffer_line(b, scope) for b in p.buffers.values()]
    constants = [_constant(name, n, k) for k, (name, n) in enumerate(p.constants.items())]
    for what, names in (("constants", constants), ("donated", [*map(name_text, p.donated)])):
        lines += [f"{what}({', '.join(names)})"] if names else []
    for op in p.ops:
        lines += ["", *op_lines(op, scope)]
    lines += ["", f"return {tuple_text([_operand(o, scope) for o in p.outputs])}"]
    for k, nested in enumerate(p.programs):
        lines += subprogram_lines(k, program_text(nested))
    return "\n".join([*scope.lines, "", *lines]).lstrip() + "\n"


def read_program(text: str) -> LoopProgram:
    """The loop program that a text describes.

    Raises TextError, or SyntaxError for what is no Python, with the line. Whether the program is
    legal is another question: ir/verify.py answers it.
    """
    return _read_statements(ast.parse(text).body)


def _read_statements(statements: Sequence[ast.stmt]) -> LoopProgram:
    reader = OpReader()
    inputs: tuple[str | tuple[str, str] | None, ...] = ()
    constants: dict[str, int] = {}
    donated: tuple[str, ...] = ()
    programs: list[LoopProgram] = []
    symbols: dict[str, tuple[str, str, int] | Size | None] = {}
    hints: dict[str, int] = {}
    ops: list[Op] = []
    outputs: tuple[Any, ...] = ()
    for s in statements:
        call = s.value if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) else None
        if reader.header(s):
            continue
        if call is not None and word(call) == "inputs":
            inputs = tuple(_read_input(e) for e in call.args)
        elif call is not None and word(call) == "constants":
            constants = dict(_read_constant(e, k) for k, e in enumerate(call.args))
        elif call is not None and word(call) == "donated":
            donated = tuple(name_of(e) for e in call.args)
        elif is_subprogram(s):
            programs.append(_read_statements(s.body))
        elif call is not None and word(call) == "given":
            name = text_of(positional(call, 0))
            symbols[name] = _read_source(call, reader)
            if (value := keywords(call, ("hint",)).get("hint")) is not None:
                hints[name] = _int(value)
        elif isinstance(s, ast.Return) and s.value is not None:
            outputs = tuple(reader.operand(e) for e in items(s.value))
        else:
            ops.append(reader.op(s))
    return LoopProgram(
        inputs, reader.buffers, constants, tuple(ops), outputs, symbols, donated, hints,
        tuple(programs),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ writing
def _constant(name: str, number: int, place: int) -> str:
    text = name_text(name)
    return text if number == place else f"at({text}, {number})"


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
            ends = f"{py_word(op.kind)}({value}{_down(op)})"
            what, out = "reduce", _names(op.outs)
        case Scan():
            along = atom_of(op.vars[op.axis])
            ends = f"{py_word(op.kind)}({value}, along={body.inner.names[along]}{_down(op)})"
            what, out = "scan", _names(op.outs)
        case Scatter():
            given = body.given(op.index, op.index_args, op.mask)
            ends = f"{op.mode}({', '.join([value, f'base={name_text(op.base)}', *given])})"
            what, out = "scatter", f"{name_text(op.out)}[{body.inner.index(op.index)}]"
        case _:
            assert_never(op)
    head = f"def {what}({params_text(op.vars, rvars, body)}) -> {out}:"
    return [head, *(f"    {s}" for s in (*origin_lines(op.origin), *body.lines, f"return {ends}"))]


def _down(op: Reduction | Scan) -> str:
    return "" if op.down is None else f", down={op.down}"


def _names(names: Sequence[str | None]) -> str:
    made = ["None" if n is None else name_text(n) for n in names]
    return made[0] if len(made) == 1 else tuple_text(made)


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
    if isinstance(value, UserKernel):
        variants = [
            f"Variant(call={v.call!r}, options={v.options!r}, grid={scope.size(v.grid)})"
            for v in value.variants
        ]
        return (
            f"UserKernel(name={value.name!r}, text={value.text!r}, pointers={value.pointers!r}, "
            f"variants={tuple_text(variants)}"
            f"{'' if value.rival is None else f', rival={value.rival!r}'}"
            f"{f', cold={value.cold!r}' if value.cold else ''})"
        )
    if isinstance(value, Attention):
        return attention_text(value, scope)
    if isinstance(value, Product):
        loops = ["\n".join(_loop_lines(r, scope)) for r in value.results]
        right = ""
        if value.right is not None:
            loop = "\n".join(_loop_lines(value.right, scope))
            right = f", right={loop!r}"
        operator = "" if value.operator is None else f", operator={value.operator!r}"
        half = f", half={value.half}" if value.half else ""
        half += f", parts={value.parts!r}" if value.parts else ""
        facts = f"results={loops!r}, how={value.how}{right}{operator}{half}"
        return f"Product(name={value.name!r}, {facts})"
    if isinstance(value, Pair):
        both = f"first={_fact(value.first, scope)}, second={_fact(value.second, scope)}"
        return f"Pair(name={value.name!r}, {both}, operands={value.operands})"
    return scope.size(value) if isinstance(value, Expr) else repr(value)


def _how(e: ast.expr) -> Any:
    """What `repr` says of how a product is computed, or may be, or a constant."""
    kind = _HOW.get(word(e) or "") if isinstance(e, ast.Call) else None
    if isinstance(e, ast.Call) and kind is not None:
        return kind(**{k.arg or "": _how(k.value) for k in e.keywords})
    if isinstance(e, ast.Tuple):
        return tuple(map(_how, e.elts))
    return ast.literal_eval(e)


_HOW: dict[str, type] = {c.__name__: c for c in (Cut, Panels, Part, Window, Operator, Rival)}


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


def _read_constant(e: ast.expr, place: int) -> tuple[str, int]:
    if isinstance(e, ast.Call) and word(e) == "at":
        return name_of(positional(e, 0)), _int(positional(e, 1))
    return name_of(e), place


def _int(e: ast.expr) -> int:
    if isinstance(e, ast.Constant) and type(e.value) is int:
        return e.value
    raise wrong(e, "a number")


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
        if s.returns is None or s.name not in _LOOPS:
            raise wrong(s, "def pointwise, reduce, scan or scatter(...) -> what it defines")
        body = BodyReader(self.symbols, s.args)
        origin, lines = body.split_origin(s.body)
        end = lines.pop() if lines else s
        for line in lines:
            body.line(line)
        if not isinstance(end, ast.Return) or end.value is None:
            raise wrong(end, "a return at the end of the loop")
        return _LOOPS[s.name](s.returns, end.value, body, origin)

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
        if default is None and isinstance(e, ast.Call) and word(e) == "Control":
            return Control(**{k.arg or "": ast.literal_eval(k.value) for k in e.keywords})
        if default is None and isinstance(e, ast.Call) and word(e) == "UserKernel":
            return self._user_kernel(e)
        if default is None and isinstance(e, ast.Call) and word(e) == "Attention":
            return read_attention(e, self.symbols)
        if default is None and isinstance(e, ast.Call) and word(e) == "Product":
            return self._product(e)
        if default is None and isinstance(e, ast.Call) and word(e) == "HostAttention":
            return HostAttention(**{k.arg or "": ast.literal_eval(k.value) for k in e.keywords})
        if default is None and isinstance(e, ast.Call) and word(e) == "Pair":
            return self._pair(e)
        try:
            value = ast.literal_eval(e)
        except ValueError:
            raise wrong(e, "a constant") from None
        if type(value) is not type(default):
            raise wrong(e, f"a {type(default).__name__}")
        return value

    def _user_kernel(self, e: ast.Call) -> UserKernel:
        facts = {k.arg or "": k.value for k in e.keywords}
        found, variants = facts.pop("variants"), []
        for one in found.elts if isinstance(found, ast.Tuple) else ():
            each = {k.arg or "": k.value for k in one.keywords} if isinstance(one, ast.Call) else {}
            grid = self.symbols.size(each.pop("grid"))
            variants.append(Variant(**{k: ast.literal_eval(v) for k, v in each.items()}, grid=grid))
        known = {k: _how(v) for k, v in facts.items()}
        return UserKernel(**known, variants=tuple(variants))

    def _product(self, e: ast.Call) -> Product:
        facts = {k.arg or "": _how(k.value) for k in e.keywords}
        results = facts.pop("results")
        texts = (*results, *([facts.pop("right")] if "right" in facts else []))
        loops = [self.op(ast.parse(text).body[0]) for text in texts]
        pointwise = tuple(x for x in loops if isinstance(x, Pointwise))
        if len(pointwise) < len(loops):
            raise wrong(e, "a product of loops that are not pointwise")
        right = pointwise[-1] if len(loops) > len(results) else None
        return Product(**facts, results=pointwise[: len(results)], right=right)

    def _pair(self, e: ast.Call) -> Pair:
        of = {k.arg: k.value for k in e.keywords}
        first, second = of.get("first"), of.get("second")
        if not (isinstance(first, ast.Call) and isinstance(second, ast.Call)):
            raise wrong(e, "a pair of products")
        name, operands = (ast.literal_eval(of[k]) for k in ("name", "operands"))
        return Pair(name, self._product(first), self._product(second), operands)

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


def _pointwise(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    value = body.value(end)
    if not is_element(out):
        return Pointwise(name_of(out), body.vars, value, None, origin)
    index = body.symbols.index(out.slice)
    return Pointwise(name_of(out.value), body.vars, value, index, origin)


def _reduce(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    kind, call = ends_with(end)
    value = body.value(positional(call, 0))
    down = said(call, "down")
    return Reduction(_name_list(out), body.vars, body.rvars, kind, value, origin, down)


def _scan(out: ast.expr, end: ast.expr, body: BodyReader, origin: tuple[str, ...]) -> Op:
    kind, call = ends_with(end)
    along = keywords(call, ("along", "down")).get("along")
    found = None if along is None else body.symbols.size(along)
    if found not in body.vars:
        raise wrong(call, "along= a loop variable")
    axis = body.vars.index(found)
    value, down = body.value(positional(call, 0)), said(call, "down")
    return Scan(_name_list(out), body.vars, axis, kind, value, origin, down)


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


_LOOPS: dict[str, Callable[[ast.expr, ast.expr, BodyReader, tuple[str, ...]], Op]] = {
    "pointwise": _pointwise, "reduce": _reduce, "scan": _scan, "scatter": _scatter,
}  # fmt: skip
"""The readers of loops, by what the text calls them."""
