"""Instructions as statements of Python.

In: `Statements` and the next instruction of a program. Out: the statements with its lines.
"""

from __future__ import annotations

import builtins
import json
import keyword
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

from plait.devices import facts_of
from plait.errors import InternalError
from plait.ir.dtypes import DTYPES, DType, opaque
from plait.ir.expr import Atom, Expr, Size
from plait.ir.expr.text import Scope, tuple_text
from plait.lower.dtypes import TO_TORCH
from plait.runtime.functions import FUNCTIONS
from plait.wrapper import instructions as ins
from plait.wrapper.operators import known_operator, lists_of
from plait.wrapper.walk import named_operands, sizes

_RESERVED = frozenset(
    """torch rt args outer call inputs libraries constants callables bind LIBRARIES CONSTANTS
    SIGNATURE nan inf example_inputs python_calls""".split()
).union(dir(builtins), keyword.kwlist, keyword.softkwlist)


class Names(Scope):
    """Python variables for tensors, kernels and symbols; a symbol is its name, whatever its
    range."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[str, str] = {}
        self.used: set[str] = set(_RESERVED)

    def variable(self, name: str) -> str:
        """The variable of a tensor or symbol, always the same."""
        if name not in self.variables:
            self.variables[name] = self.fresh(name)
        return self.variables[name]

    def _atom(self, a: Atom) -> str:
        if a.kind in FUNCTIONS:
            return f"rt.FUNCTIONS[{a.kind!r}]({self.size(a.a)}, {self.size(a.b)})"
        return super()._atom(a)

    def fresh(self, name: str) -> str:
        """A variable that nothing else has, like this name."""
        stem = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        stem = stem if stem.isidentifier() and not stem.startswith("__") else f"v_{stem}"
        found, k = stem, 2
        while found in self.used:
            found, k = f"{stem}_{k}", k + 1
        self.used.add(found)
        return found

    def declare(self, atom: Atom) -> str:
        return self.variable(atom.name)


class Statements:
    """The program's lines so far.

    setup: before the call. body: of the call. foreign: tensors whose memory the caller may hold:
    inputs and views. made: the variables of expressions that several instructions need. timed:
    whether calls of operators tell a watch of their times."""

    def __init__(self, p: ins.WrapperProgram, timed: bool = False) -> None:
        self.names = Names()
        self.timed = timed
        self.setup: list[str] = []
        self.body: list[str] = []
        self.foreign = {i.name for i in p.inputs}
        self.devices = {i.name: i.device for i in p.body if isinstance(i, ins.DefineKernel)}
        self.uses = Counter(e for i in p.body for e in {*self.computed(i)})
        self.made: dict[Size, str] = {}

    def computed(self, i: ins.Instr) -> Iterator[Expr]:
        """Expressions of an instruction that take more than the name of a symbol."""
        if isinstance(i, ins.Launch):
            host = facts_of(self.devices[i.kernel]).is_host
            i = replace(i, grid=1) if host else replace(i, work_ns=0)
        if not isinstance(i, ins.Symbol):
            yield from (e for e in sizes(i) if isinstance(e, Expr) and e.symbol is None)

    def share_sizes(self, i: ins.Instr) -> None:
        """Gives a variable to what this instruction and others compute."""
        for e in self.computed(i):
            if self.uses[e] > 1 and e not in self.made:
                made = self.names.fresh("size")
                self.body.append(f"{made} = {self.names.size(e)}")
                self.made[e] = made

    def size(self, e: Size) -> str:
        """An expression; what several instructions need has a variable."""
        return self.made.get(e) or self.names.size(e)

    def sizes(self, values: Sequence[Size]) -> str:
        return tuple_text([self.size(v) for v in values])

    def type(self, i: ins.Place | ins.Reuse | ins.View) -> str:
        return f"{dtype_text(i.dtype)}, {self.sizes(i.shape)}, {self.sizes(i.strides)}"

    def source(self, value: ins.SizeOf | ins.ItemOf | Size) -> str:
        match value:
            case ins.SizeOf(tensor, "offset", _):
                return f"{self.names.variable(tensor)}.storage_offset()"
            case ins.SizeOf(tensor, kind, dim):
                return f"{self.names.variable(tensor)}.{kind}({dim})"
            case ins.ItemOf(tensor):
                return f"rt.item({self.names.variable(tensor)}, {tensor!r})"
            case int() | Expr():
                return self.names.size(value)
            case _:
                assert_never(value)

    def integer(self, e: Size) -> str:
        """An expression that leaves the program: a comparison alone would be a bool."""
        alone = isinstance(e, Expr) and len(e.terms) == 1 and len(e.terms[0][0]) == 1
        compares = alone and e.terms[0][0][0].kind in ("eq", "ne", "lt", "le")  # type: ignore[union-attr]
        return f"int({self.size(e)})" if compares else self.size(e)

    def operand(self, o: ins.Operand) -> str:
        match o:
            case ins.Ref(name):
                return self.names.variable(name)
            case ins.ValueOf(name):
                return f"{self.names.variable(name)}.item()"
            case ins.Literal():
                return _literal(o)
            case ins.ListOf(items):
                return f"[{', '.join(self.operand(v) for v in items)}]"
            case int() | Expr():
                return self.integer(o)
            case _:
                assert_never(o)


def add_instruction(m: Statements, i: ins.Instr) -> None:
    """Adds the lines of one instruction, and before them what it shares with others."""
    name, size, add = m.names.variable, m.size, m.body.append
    m.share_sizes(i)
    match i:
        case ins.Symbol():
            add(f"{name(i.name)} = {m.source(i.value)}")
        case ins.AssertScalar():
            _require(m, i)
        case ins.AssertSizeStride():
            _check_layout(m, i)
        case ins.AssertAlignment():
            add(f"rt.require_aligned({name(i.tensor)}, {i.tensor!r}, {i.nbytes})")
        case ins.CheckFinite():
            add(
                f"rt.require_finite({name(i.tensor)}, {i.tensor!r}, {i.origin!r}, "
                f"infinities={i.infinities})"
            )
        case ins.Arena():
            add(f"{name(i.name)} = rt.arena({size(i.nbytes)}, {i.device!r})")
        case ins.Place():
            add(f"{name(i.name)} = rt.place({name(i.arena)}, {size(i.offset)}, {m.type(i)})")
        case ins.Alloc():
            _alloc(m, i)
        case ins.Reuse():
            add(f"{name(i.name)} = rt.reuse({name(i.old)}, {m.type(i)})")
        case ins.Free():
            add(f"del {name(i.name)}")
        case ins.View():
            _view(m, i)
        case ins.Constant():
            m.setup.append(f"{name(i.name)} = constants[{i.index}]")
        case ins.DefineKernel():
            _define_kernel(m, i)
        case ins.Launch():
            _launch(m, i)
        case ins.CallExtern() | ins.CallPython() | ins.CallPrograms():
            _call(m, i)
        case ins.Hook():
            _call(m, i.call())
        case ins.Copy():
            add(f"rt.copy({name(i.dst)}, {name(i.src)}, bump={i.bump})")
        case ins.BumpVersion():
            add(f"rt.bump_version({name(i.tensor)})")
        case ins.Fill():
            add(f"{name(i.tensor)}.fill_({m.operand(i.value)})")
        case ins.Partition(recorded, reason):
            recording = "a CUDA graph in the native target"
            add(f"# {recording if recorded else f'at every call: {reason}'}")
        case ins.Note():
            m.body.extend(f"# {s}" for s in i.text.splitlines())
        case ins.Return():
            add(f"return {tuple_text([m.operand(o) for o in i.values])}")
        case _:
            assert_never(i)


def _require(m: Statements, i: ins.AssertScalar) -> None:
    given = "".join(f", {m.size(v)}" for v in i.values)
    given += "" if i.error == "RuntimeError" else f", error={i.error}"
    m.body.append(f"rt.require({m.size(i.expr)}, {i.message!r}{given})")


def _alloc(m: Statements, i: ins.Alloc) -> None:
    layout = f"{m.sizes(i.shape)}, {m.sizes(i.strides)}"
    kind = f"dtype={dtype_text(i.dtype)}, device={i.device!r}"
    m.body.append(f"{m.names.variable(i.name)} = torch.empty_strided({layout}, {kind})")


def _view(m: Statements, i: ins.View) -> None:
    m.foreign.add(i.name)
    name, base = m.names.variable(i.name), m.names.variable(i.base)
    at = m.size(i.offset) + ("" if i.relative else ", relative=False")
    m.body.append(f"{name} = rt.view({base}, {m.type(i)}, {at})")


def _define_kernel(m: Statements, i: ins.DefineKernel) -> None:
    checks = "".join(f"({c.error}, {c.message!r}), " for c in i.checks)
    given = f", ({checks.rstrip()})" if checks else ""
    if facts_of(i.device).is_host:
        kind = i.device.partition(":")[0]
        made = f"rt.kernel(libraries[{kind!r}], {i.name!r}{given})"
    else:
        made = f"rt.GpuKernel(libraries['cuda'], {i.name!r}, {i.device!r})"
    m.setup.append(f"{m.names.variable(i.name)} = {made}")


def _check_layout(m: Statements, i: ins.AssertSizeStride) -> None:
    dtype = None if i.dtype == opaque else dtype_text(i.dtype)
    t, origin = m.names.variable(i.tensor), f", {i.origin!r}" if i.origin else ""
    wanted = f"{dtype}, {m.sizes(i.shape)}, {m.sizes(i.strides)}{origin}"
    made, function = (f"{t} = ", "with_layout") if i.copies else ("", "require_layout")
    m.body.append(f"{made}rt.{function}({t}, {i.tensor!r}, {wanted})")


def _launch(m: Statements, i: ins.Launch) -> None:
    args = tuple_text([m.names.variable(a) for a in i.args])
    sizes = m.sizes(i.sizes)
    if facts_of(m.devices[i.kernel]).is_host:
        more = f"work_ns={m.size(i.work_ns)}{'' if i.parallel else ', parallel=False'}"
    else:
        more = f"grid={m.size(i.grid)}"
    writes = tuple(k for k, a in enumerate(i.args) if a in i.outs and a in m.foreign)
    more += f", writes={writes}" if writes else ""
    m.body.append(f"{m.names.variable(i.kernel)}({args}, {sizes}, {more})")


def _call(m: Statements, i: ins.Call) -> None:
    args = [m.operand(o) for o in i.args]
    for key, o in named_operands(i):
        plain = key.isidentifier() and not keyword.iskeyword(key)
        args.append(f"{key}={m.operand(o)}" if plain else f"**{{{key!r}: {m.operand(o)}}}")
    several = True
    if isinstance(i, ins.CallExtern):
        op = known_operator(i.op)
        function, several = f"{_operator(m, i.op, op)}(", lists_of(op) != [False]
    elif isinstance(i, ins.CallPrograms):
        m.body.append(f"# {i.label}")
        programs = tuple_text([m.names.variable(f"program_{k}") for k in i.programs])
        given = f"[{', '.join(args)}]"
        function = (
            f"rt.run_programs(outer, {i.kind!r}, {programs}, {given}, {i.carried}, {i.scanned}"
        )
        args = []
    else:
        function = f"rt.python_call(outer, callables[{i.index}]{', ' if args else ''}"
        m.body.append(f"# {i.label}")
    made = f"{function}{', '.join(args)})"
    targets = ["_" if n is None else m.names.variable(n) for n in i.outs]
    if not targets:
        m.body.append(made)
    elif several:
        m.body.append(f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = rt.flat({made})")
    else:
        m.body.append(f"{targets[0]} = {made}")


def dtype_text(d: DType) -> str:
    return str(TO_TORCH[d]) if d in TO_TORCH else "torch.uint8"


def _operator(m: Statements, name: str, op: Any) -> str:
    """What is called for an operator."""
    if not m.timed:
        return _operator_text(op)
    timed = m.names.fresh(op.__name__.partition(".")[0])
    m.setup.append(f"{timed} = rt.TimedOperator({_operator_text(op)}, {name.partition('.')[0]!r})")
    return timed


def _operator_text(op: Any) -> str:
    if keyword.iskeyword(op._overloadname):
        return f"getattr(torch.ops.{op.overloadpacket}, {op._overloadname!r})"
    return f"torch.ops.{op}"


def _literal(o: ins.Literal) -> str:
    match o.kind:
        case "none":
            return "None"
        case "bool":
            return str(o.text in ("True", "true", "1"))
        case "float":
            value = float.fromhex(o.text)
            return repr(value) if value - value == 0 else f"float({str(value)!r})"
        case "str" | "device":
            return (
                json.dumps(o.text, ensure_ascii=False)
                if o.kind == "str"
                else f"torch.device({o.text!r})"
            )
        case "complex":
            real, imaginary = (float.fromhex(t) for t in o.text.split())
            return f"complex(float({str(real)!r}), float({str(imaginary)!r}))"
        case "dtype":
            return dtype_text(DTYPES[o.text]) if o.text in DTYPES else f"torch.{o.text}"
        case "layout" | "memory_format":
            return f"torch.{o.text}"
        case _:
            raise InternalError(f"a literal of unknown kind {o.kind!r}")
