"""Loops and loop programs as Python-like text for people: one definition a loop, one line a scalar operation.

In: the data of `ir/loops.py`. Out: text, the same for equal data. Values are numbered t0, t1, ... within a loop; an
index that is computed from data names the value that it comes from. The text is for reading only.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Extern,
    ExternArg,
    Item,
    ListArg,
    Load,
    LoopProgram,
    Mutate,
    Node,
    Op,
    Pointwise,
    Reduction,
    Scalar,
    Scan,
    Scatter,
    TensorArg,
    walk,
)
from plait.ir.sizes import Atom, Expr, Size, free_symbols
from plait.ir.symtext import Scope, tuple_text


def program_text(p: LoopProgram) -> str:
    """A whole loop program: buffers, symbols, then every op in order."""
    scope = Scope(frozenset(p.buffers))
    inputs = ", ".join(
        "_" if i is None else i if isinstance(i, str) else f"{i[1]}: int" for i in p.inputs
    )
    lines = [f"inputs({inputs})"]
    lines += [f"{name} = {_source(source, scope)}" for name, source in p.symbols.items()]
    lines += [f"{b.name}: {buffer_type(b, scope)}" for b in p.buffers.values()]
    if p.constants:
        lines.append(f"constants({', '.join(p.constants)})")
    if p.donated:
        lines.append(f"donated({', '.join(p.donated)})")
    for op in p.ops:
        lines += ["", *op_lines(op, scope)]
    lines += ["", f"return {tuple_text([_arg(o, scope) for o in p.outputs])}"]
    return "\n".join([*scope.lines, *lines]) + "\n"


def buffer_type(b: Buffer, scope: Scope) -> str:
    """dtype, sizes and strides of a buffer, and whether its layout is fixed."""
    shape = ", ".join(scope.size(s) for s in b.shape) or "()"
    return f"{b.dtype}[{shape}] @ {scope.sizes(b.strides)}{' fixed' if b.fixed else ''}"


def _source(source: tuple[str, str, int] | Size | None, scope: Scope) -> str:
    if source is None:
        return "int"
    if isinstance(source, tuple):
        return f"{source[0]}.{source[1]}({source[2]})"
    return scope.size(source)


def op_lines(op: Op, scope: Scope) -> list[str]:
    """One op of a program."""
    match op:
        case Pointwise():
            return _loop(op.out, "pointwise", op.vars, (), scope, op.origin, _pointwise_end(op))
        case Reduction():
            name = ", ".join(o or "_" for o in op.outs)
            return _loop(
                name,
                f"reduction {op.kind}",
                op.vars,
                op.rvars,
                scope,
                op.origin,
                [("return", op.body)],
            )
        case Scan():
            name = ", ".join(o or "_" for o in op.outs)
            kind = f"scan {op.kind} along {op.vars[op.axis]}"
            return _loop(name, kind, op.vars, (), scope, op.origin, [("return", op.body)])
        case Scatter():
            return _scatter(op, scope)
        case Extern():
            return [extern_line(op, scope)]
        case Alias():
            how = "" if op.relative else " from the start of its storage"
            return [f"{op.out} = memory of {op.base} at {scope.size(op.offset)}{how}"]
        case Item():
            return [f"{op.name} = item({op.buf})"]
        case Assert():
            return [f"assert {scope.size(op.expr)}, {op.message!r}"]
        case Mutate():
            return [f"{op.target}[...] = {op.source}"]


def _pointwise_end(op: Pointwise) -> list[tuple[str, Node]]:
    if op.index is None:
        return [("return", op.body)]
    return [(f"{op.out}[{', '.join(map(str, op.index))}] =", op.body)]


def _scatter(op: Scatter, scope: Scope) -> list[str]:
    body = Body(scope, op.vars)
    lines = [_head(op.out, f"scatter {op.mode} into a copy of {op.base}", op.vars, (), scope)]
    value, where = body.value(op.body), body.mask(op.mask)
    at = body.index(op.index, op.index_args)
    ends = f"{op.out}[{at}] {'' if op.mode == 'store' else op.mode}= {value}{where}"
    return _finish(lines, op.origin, body, [ends])


def _loop(
    name: str,
    kind: str,
    vars_: Sequence[Expr],
    rvars: Sequence[Expr],
    scope: Scope,
    origin: tuple[str, ...],
    ends: Sequence[tuple[str, Node]],
) -> list[str]:
    body = Body(scope, (*vars_, *rvars))
    lines = [_head(name, kind, vars_, rvars, scope)]
    return _finish(lines, origin, body, [f"{word} {body.value(node)}" for word, node in ends])


def _head(name: str, kind: str, vars_: Sequence[Expr], rvars: Sequence[Expr], scope: Scope) -> str:
    params = [extent_text(v, scope) for v in vars_]
    if rvars:
        params += ["*", *(extent_text(v, scope) for v in rvars)]
    return f"def {name}({', '.join(params)}):  # {kind}"


def _finish(lines: list[str], origin: tuple[str, ...], body: Body, ends: list[str]) -> list[str]:
    notes = [f'    """{"; ".join(origin)}"""'] if origin else []
    return [*lines, *notes, *(f"    {s}" for s in body.lines), *(f"    {s}" for s in ends)]


def extent_text(var: Expr, scope: Scope) -> str:
    """A loop variable with its number of points: `i0: 8`."""
    atom = var.symbol
    assert atom is not None
    return f"{atom.name}: {'?' if atom.extent is None else scope.size(atom.extent)}"


class Body:
    """The lines of one loop body. vars: its loop variables, which need no declaration."""

    def __init__(self, scope: Scope, vars_: Sequence[Expr]) -> None:
        self.scope = scope
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

    def mask(self, n: Node | None) -> str:
        """' where t3', or nothing."""
        return "" if n is None else f" where {self.value(n)}"

    def index(self, index: Sequence[Size], args: Sequence[Node]) -> str:
        """A logical index, its Arg symbols replaced by the values that they stand for."""
        names = {k: self.value(a) for k, a in enumerate(args)}
        inner = Scope(outer=self.inner)
        for atom in sorted({a for e in index for a in _arg_atoms(e)}, key=lambda a: a.name):
            inner.names[atom] = names.get(int(atom.name[1:]), atom.name)
        return ", ".join(inner.size(e) for e in index)

    def _node(self, n: Node) -> str:
        if n.op == "const":
            return repr(n.attr)
        if n.op == "acc":
            return str(n.attr)
        text = self._text(n)
        name = f"t{self.named}"
        self.named += 1
        self.lines.append(f"{name}: {n.dtype} = {text}")
        return name

    def _text(self, n: Node) -> str:
        args = [self.done[a] for a in n.args]
        if isinstance(n.attr, Load):
            at = n.args[:-1] if n.attr.masked else n.args
            return f"{n.attr.buf}[{self.index(n.attr.index, at)}]{self.mask(n.args[-1] if n.attr.masked else None)}"
        if n.op == "index" and isinstance(n.attr, (int, Expr)):
            return f"index({self.index((n.attr,), n.args)})"
        if isinstance(n.attr, Expr):
            args.append(self.inner.size(n.attr))
        elif n.attr is not None:
            args.append(repr(n.attr))
        return f"{n.op}({', '.join(args)})"


def _arg_atoms(e: Size) -> list[Atom]:
    return [a for a in free_symbols(e) if a.name.startswith("$")]


def extern_line(e: Extern, scope: Scope) -> str:
    """A call of an operator."""
    args = [_arg(a, scope) for a in e.args] + [f"{k}={_arg(a, scope)}" for k, a in e.kwargs]
    outs = [o or "_" for o in e.outs] + [s for _, s in e.symbols]
    left = f"{', '.join(outs)} = " if outs else ""
    why = "fallback" if e.fallback else "by choice"
    origin = f"; {'; '.join(e.origin)}" if e.origin else ""
    return f"{left}{e.op}({', '.join(args)})  # extern, {why}{origin}"


def _arg(a: ExternArg, scope: Scope) -> str:
    match a:
        case TensorArg():
            offset = f" + {scope.size(a.offset)}" if a.offset != 0 else ""
            dtype = f" as {a.dtype}" if a.dtype is not None else ""
            return f"{a.buf}{offset}[{', '.join(scope.size(s) for s in a.shape)}] @ {scope.sizes(a.strides)}{dtype}"
        case Scalar(kind, text):
            return "None" if kind == "none" else text
        case ListArg(items):
            return f"[{', '.join(_arg(i, scope) for i in items)}]"
        case _:
            return scope.size(a)
