"""The Python target: a wrapper program as a standalone module that people read, run and change.

In: a `WrapperProgram`. Out: source text that imports torch and `plait.runtime.generated` only;
`python out.py` makes random inputs from the signature and times a call. `load_python` executes such
a text and gives a callable with the interface of the native program. The kernels are those of the
native target, so the bits of the results are too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from plait.ir.calls import all_programs
from plait.ir.expr import Atom, Size, free_symbols
from plait.runtime.load import Libraries
from plait.runtime.source import executed
from plait.wrapper import instructions as ins
from plait.wrapper.calltext import TORCHS_OWN, CallTexts, header
from plait.wrapper.program import Artifacts, Promise, promises
from plait.wrapper.pysteps import Names, Statements, add_instruction, dtype_text
from plait.wrapper.walk import forks, is_fence, leaves_dispatch, sizes


def make_python(
    program: ins.WrapperProgram,
    libraries: Libraries,
    constants: str = "",
    calls: CallTexts | None = None,
    timed: bool = False,
) -> str:
    """The module's source.

    libraries: paths of the kernel libraries, constants: file of the saved constants beside the
    module, calls: the callables as text; only its main part uses them. timed: operators are timed
    as kernels are, by `time_kernels`."""
    calls = calls or CallTexts((), [])
    paths = {kind: str(path) for kind, path in libraries.items()}
    m, bind = _bind(program, timed=timed)
    operators = _operators(program, calls)
    lines = [
        *_doc(program.name, operators),
        "",
        "import torch",
        "",
        "from plait.runtime import generated as rt",
        "",
        f"LIBRARIES = {paths!r}",
        f"CONSTANTS = {constants!r}",
        "SIGNATURE = (  # name, dtype and device of every input that is a tensor; device None: any",
        *(f"    {_promise(s)}," for s in promises(program)),
        ")",
        "",
        "",
        *bind,
        *calls.lines,
        *([""] if calls.lines else []),
        *_main(program, m.names, calls, operators),
    ]
    return "\n".join(lines) + "\n"


def _bind(
    program: ins.WrapperProgram, nested: str = "", timed: bool = False
) -> tuple[Statements, list[str]]:
    """The statements of a program, and the functions that bind it and, before it, its subprograms.
    nested: the numbers that lead to a subprogram."""
    m = Statements(program, timed)
    inputs = [m.names.variable(i.name) for i in program.inputs]
    lines: list[str] = []
    for k, p in enumerate(program.programs):
        lines += _bind(p, f"{nested}_{k}")[1]
        bound = f"bind{nested}_{k}(libraries, constants, callables)"
        m.setup.append(f"{m.names.variable(f'program_{k}')} = {bound}")
    for i in program.body:
        add_instruction(m, i)
    what = "the subprogram's" if nested else "the"
    return m, [
        *lines,
        f"def bind{nested}(libraries, constants, callables):",
        f'    """Binds {what} kernels and the tables of constants and callables; '
        'gives call(list of inputs)."""',
        *(f"    {s}" for s in m.setup),
        "",
        "    def call(args):",
        *([] if nested else ["        rt.check_inputs(args, SIGNATURE)"]),
        *([f"        {', '.join(inputs)}{',' * (len(inputs) == 1)} = args"] if inputs else []),
        "        args.clear()  # an input lives until its last use",
        *(["        outer = rt.dispatch_state()"] if leaves_dispatch(program) else []),
        f"        with rt.below_autograd(){', rt.callers_stream()' * bool(forks(program))}:",
        *(f"            {s}" for s in m.body),
        "",
        "    return call",
        "",
        "",
    ]


def python_lines(program: ins.WrapperProgram) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines that it becomes."""
    m = Statements(program)
    out = []
    for i in program.body:
        before = len(m.setup), len(m.body)
        add_instruction(m, i)
        out.append((i, m.setup[before[0] :] + m.body[before[1] :]))
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


def load_program(program: ins.WrapperProgram, artifacts: Artifacts) -> PythonProgram:
    """The module of a program, executed and bound. Raises as `load_python` does."""
    source = make_python(program, artifacts.libraries)
    return load_python(source, artifacts.libraries, artifacts.constants, artifacts.callables)


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


def _operators(p: ins.WrapperProgram, calls: CallTexts) -> tuple[str, ...]:
    """The operators that not every process has."""
    called = [i.op for q in all_programs(p) for i in q.body if isinstance(i, ins.CallExtern)]
    foreign = [op for op in called if op.partition("::")[0] not in TORCHS_OWN]
    return tuple(dict.fromkeys([*foreign, *calls.operators]))


def _doc(name: str, operators: Sequence[str]) -> list[str]:
    first = f'"""{name}, compiled by plait: run this file to time a call on random inputs.'
    more = header(operators)
    return [first, *more, '"""'] if more else [f'{first}"""']


def _main(
    p: ins.WrapperProgram, names: Names, calls: CallTexts, operators: Sequence[str]
) -> list[str]:
    """Lines that make inputs and time a call."""
    atoms = {a.name: a for i in p.inputs for e in sizes(i) for a in sorted_symbols(e)}
    for i in p.inputs:
        if isinstance(i, ins.SymbolInput):
            atoms.setdefault(i.name, Atom("sym", i.name, i.name, lo=0))
    params = [f"{names.variable(n)}={_typical(a)}" for n, a in atoms.items()]
    lines = [f"def example_inputs({', '.join(params)}):", "    return ["]
    for i in p.inputs:
        if isinstance(i, ins.TensorInput):
            kind = f"{dtype_text(i.dtype)}, {names.sizes(i.shape)}, {names.sizes(i.strides)}"
            lines.append(f"        rt.random_tensor({kind}, {i.device!r}),  # {i.name}")
        elif isinstance(i, ins.SymbolInput):
            lines.append(f"        {names.variable(i.name)},")
        else:
            lines.append(f"        None,  # {i.name}")
    lines += ["    ]", "", "", 'if __name__ == "__main__":']
    unmade = bool(p.n_callables) and not calls.lines
    missing = calls.missing or "Python objects" * unmade
    named = "streams by number" * any(map(is_fence, p.body)) or missing
    if named:
        return [*lines, f"    raise SystemExit('{p.name} calls {named}, which no file can hold')"]
    given = "python_calls(constants)" if calls.lines else "[]"
    return [
        *lines,
        *([f"    rt.require_operators({operators!r})"] if operators else []),
        "    constants = rt.load_constants(CONSTANTS, __file__)",
        f"    call = bind(LIBRARIES, constants, {given})",
        f"    rt.benchmark(call, example_inputs, {p.name!r})",
    ]


def sorted_symbols(e: Size) -> list[Atom]:
    """The symbols of an expression, by name."""
    return sorted(free_symbols(e), key=lambda a: a.name)


def _typical(a: Atom) -> int:
    """A value for a symbol of which only the range is known."""
    return int(min(max(8, a.lo), a.hi))


def _promise(p: Promise) -> str:
    return "None" if p is None else f"({p[0]!r}, {p[1]}, {p[2]!r})"
