"""Wrapper programs as Python text that people read and that reads back: `read(text(p)) == p`.

One line an instruction, in the order of execution: its word (`INSTRUCTIONS`) and its fields, each
spelled as its kind is; fields with a default appear only where they differ from it. Python's
parser reads the text; nothing runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from plait.ir.expr import Expr, Size
from plait.ir.expr.text import (
    Scope,
    SymbolReader,
    TextError,
    check_text,
    is_subprogram,
    is_variable,
    items,
    literal_text,
    name_of,
    name_text,
    positional,
    read_check,
    read_literal,
    subprogram_lines,
    text_of,
    tuple_text,
    word,
    wrong,
)
from plait.wrapper import instructions as ins
from plait.wrapper.spec import Kind, Select, defaults_of
from plait.wrapper.walk import named_operands, sizes

_WORDS = {**ins.INSTRUCTIONS, **ins.INPUTS}
_CLASSES: dict[str, type] = {word: cls for cls, word in _WORDS.items()}
_OWN = Kind.SHAPE, Kind.STRIDES, Kind.OPERANDS, Kind.KEYWORDS, Kind.RESULTS
"""Fields that stand elsewhere: sizes and strides in a tensor's type, `f32[s0, 8] @ (8, 1)`, the
arguments and results of calls around them. Symbol and Return have rules of their own."""


_SPELLED = Select(*(kind for kind in Kind if kind not in _OWN))
"""The fields between the brackets after an instruction's word, and the name it defines."""


def text(p: ins.WrapperProgram) -> str:
    """The program as text, symbols declared first; each subprogram stands in a function behind
    it."""
    w = _ProgramWriter()
    for e in (e for i in (*p.inputs, *p.body) for e in sizes(i)):
        w.scope.size(e)  # declared before any tensor is named, so that names cannot be mistaken
    inputs = [w.line(i) for i in p.inputs]
    body = [w.line(i) for i in p.body]
    facts = [repr(p.name)]
    facts += [
        f"{k}={v}" for k, v in (("n_constants", p.n_constants), ("n_callables", p.n_callables)) if v
    ]
    facts += [f"n_results={p.n_results}"] if p.n_results is not None else []
    origins = [f"origin({k!r}, {o!r})" for k, o in p.origins]
    lines = [f"program({', '.join(facts)})", *w.scope.lines, "", *inputs, "", *origins, *body]
    for k, nested in enumerate(p.programs):
        lines += subprogram_lines(k, text(nested))
    return "\n".join(lines) + "\n"


def line(i: ins.Instr | ins.Input) -> str:
    """One instruction as text, for messages and dumps; symbols are not declared."""
    return _ProgramWriter().line(i)


def read(source: str) -> ins.WrapperProgram:
    """The program that a text describes. Raises TextError (or SyntaxError) where it describes
    none."""
    return _ProgramReader().program(ast.parse(source).body)


# ------------------------------------------------------------------------------------------ writing
class _ProgramWriter:
    def __init__(self) -> None:
        self.scope = Scope()

    def line(self, i: ins.Instr | ins.Input) -> str:
        match i:
            case ins.Symbol(name, value):
                return f"{name_text(name)} = {self.source(value)}"
            case _ if isinstance(i, ins.Call):
                return self.call(i)
            case ins.Return(values):
                return f"return {tuple_text([self.operand(o) for o in values])}"
            case _:
                left, right = self.fields(i)
                return f"{left} = {right}" if left else right

    def fields(self, i: ins.Instr | ins.Input) -> tuple[str, str]:
        defaults = defaults_of(type(i))
        left, parts = "", []
        for name, kind in _SPELLED[type(i)]:
            if kind is Kind.DTYPE:
                parts.append(self.scope.tensor_type(*_type_of(i)))
                continue
            value = getattr(i, name)
            if kind in (Kind.DEFINES, Kind.SYMBOL):
                left = name_text(value)
            elif name not in defaults:
                parts.append(self.value(kind, value))
            elif value != defaults[name]:
                parts.append(f"{name}={self.value(kind, value)}")
        return left, f"{_WORDS[type(i)]}({', '.join(parts)})"

    def value(self, kind: Kind, value: Any) -> str:
        match kind:
            case Kind.USES | Kind.ARENA | Kind.ENDS:
                return self.name(value)
            case Kind.ALL_USED:
                return tuple_text([self.name(n) for n in value])
            case Kind.SIZE | Kind.CONDITION:
                return self.scope.size(value)
            case Kind.SIZES:
                return self.scope.sizes(value)
            case Kind.OPERAND:
                return self.operand(value)
            case Kind.CHECKS:
                return tuple_text([check_text(c) for c in value])
            case _:
                return repr(value)

    def source(self, value: ins.SizeOf | ins.ItemOf | Size) -> str:
        match value:
            case ins.SizeOf(tensor, kind, dim):
                return f"read({self.name(tensor)}, {kind!r}, {dim})"
            case ins.ItemOf(tensor):
                return f"item({self.name(tensor)})"
            case int() | Expr():
                return f"let({self.scope.size(value)})"
            case _:
                assert_never(value)

    def call(self, i: ins.Call) -> str:
        _, head = self.fields(i)
        args = [self.operand(o) for o in i.args]
        for key, o in named_operands(i):
            value = self.operand(o)
            args.append(f"{key}={value}" if is_variable(key) else f"**{{{key!r}: {value}}}")
        outs = ", ".join("_" if n is None else name_text(n) for n in i.outs)
        left = f"{outs}{',' if len(i.outs) == 1 else ''} = " if i.outs else ""
        return f"{left}{head}({', '.join(args)})"

    def operand(self, o: ins.Operand) -> str:
        match o:
            case ins.Ref(name):
                return self.name(name)
            case ins.ValueOf(name):
                return f"value({self.name(name)})"
            case ins.Literal(kind, value):
                return literal_text(kind, value)
            case ins.ListOf(values):
                return f"[{', '.join(self.operand(v) for v in values)}]"
            case int() | Expr():
                return self.scope.size(o)
            case _:
                assert_never(o)

    def name(self, name: str) -> str:
        """A tensor; a variable that is taken by a symbol or a word of the text is spelled
        `ref['x']`."""
        plain = is_variable(name) and name != "ref" and name not in self.scope.taken
        return name if plain else f"ref[{name!r}]"


# ------------------------------------------------------------------------------------------ reading
class _ProgramReader:
    def __init__(self) -> None:
        self.symbols = SymbolReader()

    def program(self, statements: Sequence[ast.stmt]) -> ins.WrapperProgram:
        if not statements:
            raise TextError("line 1: expected program(...), got nothing")
        first, *rest = statements
        head = _call_of(first, "program")
        facts = {k.arg: k.value for k in head.keywords}
        inputs: list[ins.Input] = []
        body: list[ins.Instr] = []
        origins: list[tuple[str, str]] = []
        programs: list[ins.WrapperProgram] = []
        for s in rest:
            if self.symbols.declaration(s):
                continue
            if is_subprogram(s):
                programs.append(_ProgramReader().program(s.body))
                continue
            if isinstance(s, ast.Expr) and word(s.value) == "origin":
                assert isinstance(s.value, ast.Call), s.value
                of = s.value
                origins.append((text_of(positional(of, 0)), text_of(positional(of, 1))))
                continue
            i = self.statement(s)
            if isinstance(i, (ins.TensorInput, ins.SymbolInput, ins.OpaqueInput)):
                inputs.append(i)
            else:
                body.append(i)
        return ins.WrapperProgram(
            name=text_of(positional(head, 0)),
            inputs=tuple(inputs),
            body=tuple(body),
            n_constants=_int(facts["n_constants"]) if "n_constants" in facts else 0,
            n_callables=_int(facts["n_callables"]) if "n_callables" in facts else 0,
            n_results=_int(facts["n_results"]) if "n_results" in facts else None,
            origins=tuple(origins),
            programs=tuple(programs),
        )

    def statement(self, s: ast.stmt) -> Any:
        if isinstance(s, ast.Return) and s.value is not None:
            return ins.Return(tuple(self.operand(x) for x in items(s.value)))
        targets: list[str | None] = []
        if isinstance(s, ast.Assign):
            left = s.targets[0]
            parts = left.elts if isinstance(left, ast.Tuple) else [left]
            targets = [
                None if isinstance(t, ast.Name) and t.id == "_" else name_of(t) for t in parts
            ]
        if not isinstance(s, (ast.Assign, ast.Expr)) or not isinstance(s.value, ast.Call):
            raise wrong(s, "an instruction")
        call = s.value
        if isinstance(call.func, ast.Call):
            return self.call(call.func, call, tuple(targets))
        if word(call) in ("read", "item", "let"):
            return ins.Symbol(_new(call, targets), self.source(call))
        return self.instruction(call, targets)

    def source(self, call: ast.Call) -> ins.SizeOf | ins.ItemOf | Size:
        if word(call) == "let":
            return self.symbols.size(positional(call, 0))
        tensor = name_of(positional(call, 0))
        if word(call) == "item":
            return ins.ItemOf(tensor)
        return ins.SizeOf(tensor, text_of(positional(call, 1)), _int(positional(call, 2)))

    def instruction(self, call: ast.Call, targets: list[str | None]) -> Any:
        cls = _CLASSES.get(word(call) or "")
        if cls is None:
            raise wrong(call, "an instruction")
        return cls(**dict(self.fields(cls, call, targets)))

    def fields(
        self, cls: type, call: ast.Call, targets: list[str | None]
    ) -> Iterator[tuple[str, Any]]:
        given = {k.arg: k.value for k in call.keywords}
        given_in_order = iter(call.args)
        defaults = defaults_of(cls)
        for name, kind in _SPELLED[cls]:
            if kind in (Kind.DEFINES, Kind.SYMBOL):
                yield name, _new(call, targets)
            elif kind is Kind.DTYPE:
                made = self.symbols.tensor_type(_next(given_in_order, call, "a tensor type"))
                yield from zip(("dtype", "shape", "strides"), made, strict=True)
            elif name in given:
                yield name, self.value(kind, given[name])
            elif name not in defaults:
                yield name, self.value(kind, _next(given_in_order, call, f"an argument {name}"))
        known = [name for name, _ in _SPELLED[cls]]
        for more in (*given_in_order, *(k.value for k in call.keywords if k.arg not in known)):
            raise wrong(more, f"no other arguments than {', '.join(known)}")

    def value(self, kind: Kind, e: ast.expr) -> Any:
        match kind:
            case Kind.USES | Kind.ARENA | Kind.ENDS:
                return name_of(e)
            case Kind.ALL_USED:
                return tuple(name_of(x) for x in items(e))
            case Kind.SIZE | Kind.CONDITION:
                return self.symbols.size(e)
            case Kind.SIZES:
                return self.symbols.sizes(e)
            case Kind.OPERAND:
                return self.operand(e)
            case Kind.CHECKS:
                return tuple(read_check(x) for x in items(e))
            case Kind.INT | Kind.CONSTANT | Kind.CALLABLE | Kind.FLAG | Kind.FOR_PASSES:
                return _constant(e)
            case Kind.PROGRAMS:
                return tuple(_int(x) for x in items(e))
            case _:
                return text_of(e)

    def call(self, head: ast.Call, call: ast.Call, outs: tuple[str | None, ...]) -> ins.Call:
        cls = _CLASSES.get(word(head) or "")
        args = tuple(self.operand(a) for a in call.args)
        kwargs: list[tuple[str, ins.Operand]] = []
        for k in call.keywords:
            if k.arg is not None:
                kwargs.append((k.arg, self.operand(k.value)))
            elif isinstance(k.value, ast.Dict) and k.value.keys and k.value.keys[0] is not None:
                kwargs.append((text_of(k.value.keys[0]), self.operand(k.value.values[0])))
            else:
                raise wrong(call, "arguments with names")
        if cls is not None and issubclass(cls, ins.Call):
            facts: dict[str, Any] = dict(self.fields(cls, head, []))
            if kwargs or cls is not ins.CallPrograms:
                facts["kwargs"] = tuple(kwargs)
            made: ins.Call = cls(args=args, outs=outs, **facts)
            return made
        raise wrong(head, "call, call_python or call_programs")

    def operand(self, e: ast.expr) -> ins.Operand:
        match e:
            case ast.List(elts=elts):
                return ins.ListOf(tuple(self.operand(x) for x in elts))
            case _ if self.symbols.is_size(e):
                return self.symbols.size(e)
            case ast.Call(func=ast.Name(id="value"), args=[tensor]):
                return ins.ValueOf(name_of(tensor))
            case _:
                found = read_literal(e)
                return ins.Ref(name_of(e)) if found is None else ins.Literal(*found)


def _type_of(i: Any) -> tuple[Any, Any, Any]:
    return i.dtype, i.shape, i.strides


def _next(given: Iterator[ast.expr], call: ast.Call, wanted: str) -> ast.expr:
    e = next(given, None)
    if e is None:
        raise wrong(call, wanted)
    return e


def _new(call: ast.Call, targets: list[str | None]) -> str:
    if len(targets) != 1 or targets[0] is None:
        raise wrong(call, "one name on the left of '='")
    return targets[0]


def _call_of(s: ast.stmt, wanted: str) -> ast.Call:
    if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and word(s.value) == wanted:
        return s.value
    raise wrong(s, f"{wanted}(...)")


def _constant(e: ast.expr) -> object:
    if not (isinstance(e, ast.Constant) and isinstance(e.value, (int, bool))):
        raise wrong(e, "a number")
    return e.value


def _int(e: ast.expr) -> int:
    value = _constant(e)
    assert isinstance(value, int), value
    return value
