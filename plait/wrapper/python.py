"""The Python target: a wrapper program as a standalone module that people read, run and change.

In: a `WrapperProgram`. Out: source text that imports torch and `plait.runtime.generated` only;
`python out.py` makes random inputs from the signature and times a call. `load_python` executes such
a text and gives a callable with the interface of the native program. The kernels are those of the
native target, so the bits of the results are too.
"""

from __future__ import annotations

import builtins
import json
import keyword
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import torch

from plait.errors import InternalError
from plait.ir.dtypes import DTYPES, DType, opaque
from plait.ir.sizes import Atom, Expr, Size, free_symbols
from plait.ir.symtext import Scope, tuple_text
from plait.lower.dtypes import TO_TORCH
from plait.runtime.functions import FUNCTIONS
from plait.runtime.load import Libraries
from plait.runtime.source import executed
from plait.wrapper import instructions as ins
from plait.wrapper.calltext import TORCHS_OWN, CallTexts, header
from plait.wrapper.program import Promise, promises
from plait.wrapper.walk import forks, is_fence, sizes

_RESERVED = frozenset(
    {
        *dir(builtins),
        *keyword.kwlist,
        *keyword.softkwlist,
        "torch",
        "rt",
        "args",
        "outer",
        "call",
        "inputs",
    }
    | {
        "libraries",
        "constants",
        "callables",
        "bind",
        "LIBRARIES",
        "CONSTANTS",
        "SIGNATURE",
        "nan",
        "inf",
        "example_inputs",
        "python_calls",
    }
)


def make_python(
    program: ins.WrapperProgram,
    libraries: Libraries,
    constants: str = "",
    calls: CallTexts | None = None,
) -> str:
    """The module's source.

    libraries: paths of the kernel libraries, constants: file of the saved constants beside the
    module, calls: the callables as text; only its main part uses them."""
    return _Module(program, libraries, constants, calls or CallTexts((), [])).text()


def python_lines(program: ins.WrapperProgram) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines that it becomes."""
    module = _Module(program, {}, "", CallTexts((), []))
    out = []
    for i in program.body:
        before = len(module.setup), len(module.body)
        module.instruction(i)
        out.append((i, module.setup[before[0] :] + module.body[before[1] :]))
    return out


class PythonProgram:
    """A loaded module as a callable: prog(*inputs) -> tuple, prog.boxed(list of inputs) -> tuple
    (empties the list)."""

    def __init__(self, call: Callable[[list[object]], tuple[object, ...]], source: str) -> None:
        self._call, self.source = call, source

    def __call__(self, *args: object) -> tuple[object, ...]:
        return self._call(list(args))

    @property
    def boxed(self) -> Callable[[list[object]], tuple[object, ...]]:
        """The same program with its inputs in one list."""
        return self._call


def load_python(
    source: str,
    libraries: Libraries,
    constants: Sequence[torch.Tensor],
    callables: Sequence[Callable[..., object]],
) -> PythonProgram:
    """Executes a module's source and binds it. Raises RuntimeError if a library lacks a kernel."""
    bind = executed(source, "program", {"__name__": "plait_generated"}, "bind")
    call = bind(libraries, list(constants), list(callables))
    call._boxed_call = True
    return PythonProgram(call, source)


class _Names(Scope):
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


class _Module:
    """The text of one module. setup: lines of `bind` before the call, body: lines of the call."""

    def __init__(
        self, p: ins.WrapperProgram, libraries: Libraries, constants: str, calls: CallTexts
    ) -> None:
        self.p, self.libraries, self.constants, self.calls = p, libraries, constants, calls
        called = [i.op for i in p.body if isinstance(i, ins.CallExtern)]
        foreign = [op for op in called if op.partition("::")[0] not in TORCHS_OWN]
        self.operators = tuple(dict.fromkeys([*foreign, *calls.operators]))
        self.names = _Names()
        self.setup: list[str] = []
        self.foreign = {i.name for i in p.inputs}  # and views: memory that the caller may hold
        self.body: list[str] = []
        self.devices = {i.name: i.device for i in p.body if isinstance(i, ins.DefineKernel)}
        self.uses = Counter(e for i in p.body for e in {*self.computed(i)})
        self.made: dict[Size, str] = {}

    def text(self) -> str:
        p = self.p
        inputs = [self.names.variable(i.name) for i in p.inputs]
        for i in p.body:
            self.instruction(i)
        python_calls = any(isinstance(i, (ins.CallPython, ins.Hook)) for i in p.body)
        lines = [
            *self.doc(),
            "",
            "import torch",
            "",
            "from plait.runtime import generated as rt",
            "",
            "LIBRARIES = "
            f"{dict(zip(self.libraries, map(str, self.libraries.values()), strict=True))!r}",
            f"CONSTANTS = {self.constants!r}",
            "SIGNATURE = (  # name, dtype and device of every input that is a tensor; device "
            "None: any",
            *(f"    {_promise(s)}," for s in promises(p)),
            ")",
            "",
            "",
            "def bind(libraries, constants, callables):",
            '    """Binds kernels and the tables of constants and callables; '
            'gives call(list of inputs)."""',
            *(f"    {s}" for s in self.setup),
            "",
            "    def call(args):",
            "        rt.check_inputs(args, SIGNATURE)",
            *(
                [f"        {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args"]
                if inputs
                else []
            ),
            "        args.clear()  # an input lives until its last use",
            *(["        outer = rt.dispatch_state()"] if python_calls else []),
            f"        with rt.below_autograd(){', rt.callers_stream()' * bool(forks(p))}:",
            *(f"            {s}" for s in self.body),
            "",
            "    return call",
            "",
            "",
            *self.calls.lines,
            *([""] if self.calls.lines else []),
            *self.main(),
        ]
        return "\n".join(lines) + "\n"

    def doc(self) -> list[str]:
        first = (
            f'"""{self.p.name}, compiled by plait: run this file to time a call on random inputs.'
        )
        more = header(self.operators)
        return [first, *more, '"""'] if more else [f'{first}"""']

    def main(self) -> list[str]:
        atoms = {a.name: a for i in self.p.inputs for e in sizes(i) for a in sorted_symbols(e)}
        for i in self.p.inputs:
            if isinstance(i, ins.SymbolInput):
                atoms.setdefault(i.name, Atom("sym", i.name, i.name, lo=0))
        params = [f"{self.names.variable(n)}={_typical(a)}" for n, a in atoms.items()]
        lines = [f"def example_inputs({', '.join(params)}):", "    return ["]
        for i in self.p.inputs:
            if isinstance(i, ins.TensorInput):
                kind = (
                    f"{_dtype(i.dtype)}, {self.names.sizes(i.shape)}, {self.names.sizes(i.strides)}"
                )
                lines.append(f"        rt.random_tensor({kind}, {i.device!r}),  # {i.name}")
            elif isinstance(i, ins.SymbolInput):
                lines.append(f"        {self.names.variable(i.name)},")
            else:
                lines.append(f"        None,  # {i.name}")
        lines += ["    ]", "", "", 'if __name__ == "__main__":']
        unmade = bool(self.p.n_callables) and not self.calls.lines
        missing = self.calls.missing or "Python objects" * unmade
        named = "streams by number" * any(map(is_fence, self.p.body)) or missing
        if named:
            return [
                *lines,
                f"    raise SystemExit('{self.p.name} calls {named}, which no file can hold')",
            ]
        given = "python_calls(constants)" if self.calls.lines else "[]"
        return [
            *lines,
            *([f"    rt.require_operators({self.operators!r})"] if self.operators else []),
            "    constants = rt.load_constants(CONSTANTS, __file__)",
            f"    call = bind(LIBRARIES, constants, {given})",
            f"    rt.benchmark(call, example_inputs, {self.p.name!r})",
        ]

    # ---- instructions
    def computed(self, i: ins.Instr) -> Iterator[Expr]:
        """Expressions of an instruction that take more than the name of a symbol."""
        if isinstance(i, ins.Launch):
            i = replace(i, work_ns=0) if self.devices[i.kernel] != "cpu" else replace(i, grid=1)
        if not isinstance(i, ins.Symbol):
            yield from (e for e in sizes(i) if isinstance(e, Expr) and e.symbol is None)

    def size(self, e: Size) -> str:
        """An expression; what several instructions need has a variable."""
        return self.made.get(e) or self.names.size(e)

    def sizes(self, values: Sequence[Size]) -> str:
        return tuple_text([self.size(v) for v in values])

    def instruction(self, i: ins.Instr) -> None:
        name, size, sizes = self.names.variable, self.size, self.sizes
        add = self.body.append
        for e in self.computed(i):
            if self.uses[e] > 1 and e not in self.made:
                made = self.names.fresh("size")
                add(f"{made} = {self.names.size(e)}")
                self.made[e] = made
        match i:
            case ins.Symbol():
                add(f"{name(i.name)} = {self.source(i.value)}")
            case ins.AssertScalar():
                given = "".join(f", {size(v)}" for v in i.values)
                given += "" if i.error == "RuntimeError" else f", error={i.error}"
                add(f"rt.require({size(i.expr)}, {i.message!r}{given})")
            case ins.AssertSizeStride():
                self.check_layout(i)
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
                add(f"{name(i.name)} = rt.place({name(i.arena)}, {size(i.offset)}, {self.type(i)})")
            case ins.Alloc():
                made = (
                    f"{sizes(i.shape)}, {sizes(i.strides)}, dtype={_dtype(i.dtype)}, "
                    f"device={i.device!r}"
                )
                add(f"{name(i.name)} = torch.empty_strided({made})")
            case ins.Reuse():
                add(f"{name(i.name)} = rt.reuse({name(i.old)}, {self.type(i)})")
            case ins.Free():
                add(f"del {name(i.name)}")
            case ins.View():
                self.foreign.add(i.name)
                relative = "" if i.relative else ", relative=False"
                add(
                    f"{name(i.name)} = rt.view({name(i.base)}, {self.type(i)}, "
                    f"{size(i.offset)}{relative})"
                )
            case ins.Constant():
                self.setup.append(f"{name(i.name)} = constants[{i.index}]")
            case ins.DefineKernel():
                checks = "".join(f"({c.error}, {c.message!r}), " for c in i.checks)
                given = f", ({checks.rstrip()})" if checks else ""
                if i.device == "cpu":
                    made = f"rt.kernel(libraries['cpu'], {i.name!r}{given})"
                else:
                    made = f"rt.GpuKernel(libraries['cuda'], {i.name!r}, {i.device!r})"
                self.setup.append(f"{name(i.name)} = {made}")
            case ins.Launch():
                self.launch(i)
            case ins.CallExtern() | ins.CallPython():
                self.call(i)
            case ins.Hook():
                self.call(i.call())
            case ins.Copy():
                add(f"rt.copy({name(i.dst)}, {name(i.src)}, bump={i.bump})")
            case ins.BumpVersion():
                add(f"rt.bump_version({name(i.tensor)})")
            case ins.Fill():
                add(f"{name(i.tensor)}.fill_({self.operand(i.value)})")
            case ins.Partition(recorded, reason):
                add(
                    f"# at every call: {reason}"
                    if not recorded
                    else "# a CUDA graph in the native target"
                )
            case ins.Note():
                self.body.extend(f"# {s}" for s in i.text.splitlines())
            case ins.Return():
                add(f"return {tuple_text([self.operand(o) for o in i.values])}")
            case _:
                assert_never(i)

    def check_layout(self, i: ins.AssertSizeStride) -> None:
        dtype = None if i.dtype == opaque else _dtype(i.dtype)
        t, origin = self.names.variable(i.tensor), f", {i.origin!r}" if i.origin else ""
        wanted = f"{dtype}, {self.sizes(i.shape)}, {self.sizes(i.strides)}{origin}"
        made, function = (f"{t} = ", "with_layout") if i.copies else ("", "require_layout")
        self.body.append(f"{made}rt.{function}({t}, {i.tensor!r}, {wanted})")

    def type(self, i: ins.Place | ins.Reuse | ins.View) -> str:
        return f"{_dtype(i.dtype)}, {self.sizes(i.shape)}, {self.sizes(i.strides)}"

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

    def launch(self, i: ins.Launch) -> None:
        args = tuple_text([self.names.variable(a) for a in i.args])
        sizes = self.sizes(i.sizes)
        if self.devices[i.kernel] == "cpu":
            more = f"work_ns={self.size(i.work_ns)}{'' if i.parallel else ', parallel=False'}"
        else:
            more = f"grid={self.size(i.grid)}"
        writes = tuple(k for k, a in enumerate(i.args) if a in i.outs and a in self.foreign)
        more += f", writes={writes}" if writes else ""
        self.body.append(f"{self.names.variable(i.kernel)}({args}, {sizes}, {more})")

    def call(self, i: ins.CallExtern | ins.CallPython) -> None:
        args = [self.operand(o) for o in i.args]
        for key, o in i.kwargs:
            plain = key.isidentifier() and not keyword.iskeyword(key)
            args.append(
                f"{key}={self.operand(o)}" if plain else f"**{{{key!r}: {self.operand(o)}}}"
            )
        if isinstance(i, ins.CallExtern):
            function, several = f"{_operator(i.op)}(", _returns_several(i.op)
        else:
            function, several = (
                f"rt.python_call(outer, callables[{i.index}]{', ' if args else ''}",
                True,
            )
            self.body.append(f"# {i.label}")
        made = f"{function}{', '.join(args)})"
        targets = ["_" if n is None else self.names.variable(n) for n in i.outs]
        if not targets:
            self.body.append(made)
        elif several:
            self.body.append(
                f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = rt.flat({made})"
            )
        else:
            self.body.append(f"{targets[0]} = {made}")

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


def sorted_symbols(e: Size) -> list[Atom]:
    """The symbols of an expression, by name."""
    return sorted(free_symbols(e), key=lambda a: a.name)


def _typical(a: Atom) -> int:
    """A value for a symbol of which only the range is known."""
    return int(min(max(8, a.lo), a.hi))


def _promise(p: Promise) -> str:
    return "None" if p is None else f"({p[0]!r}, {p[1]}, {p[2]!r})"


def _dtype(d: DType) -> str:
    return str(TO_TORCH[d]) if d in TO_TORCH else "torch.uint8"


def _operator(op: str) -> str:
    """torch.ops' spelling of 'namespace::name.overload'."""
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = f"torch.ops.{namespace}.{name}"
    overload = overload or "default"
    return (
        f"{packet}.{overload}"
        if not keyword.iskeyword(overload)
        else f"getattr({packet}, {overload!r})"
    )


def _returns_several(op: str) -> bool:
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    returns = getattr(packet, overload or "default")._schema.returns
    return len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)


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
            return _dtype(DTYPES[o.text]) if o.text in DTYPES else f"torch.{o.text}"
        case "layout" | "memory_format":
            return f"torch.{o.text}"
        case _:
            raise InternalError(f"a literal of unknown kind {o.kind!r}")
