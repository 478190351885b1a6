"""docs/instructions.md, written from the code: every instruction, what it means and what each
target makes of it, and every pass.

`python -m tests.instruction_table` writes it, and the headers of `plan_header.py`; a test proves
that all are up to date. Meanings are the docstrings of `wrapper/instructions.py`; the rest is one
legal program with every instruction in it, put through the targets.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from plait.pipelines import PROGRAM, ProgramPass
from plait.wrapper import instructions as ins
from plait.wrapper import passes
from plait.wrapper.cpp import cpp_lines
from plait.wrapper.fx import fx_lines
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts
from plait.wrapper.python import python_lines
from plait.wrapper.spec import FIELDS, Kind, Select
from plait.wrapper.text import line, read, text
from plait.wrapper.verify import verify
from tests.plan_header import header, tables

EXAMPLE = """\
program('example', n_constants=1, n_callables=2)
s0 = symbol(lo=2)

x = tensor_input(f32[s0, 8] @ (8, 1))
state = tensor_input(f32[s0, 8] @ (8, 1))

s0 = read(x, 'size', 0)
require((s0 < 4096), 'at most 4095 rows, not {}', values=(s0,))
require_layout(state, f32[s0, 8] @ (8, 1))
require_aligned(x, 16)
weight = constant(0)
kernel('plait_relu', 2, 1, checks=(RuntimeError('ZeroDivisionError'),))
arena = take_arena(32*s0)
note('model.py:31: aten.relu')
buf0 = place(arena, 0, f32[s0, 8] @ (8, 1))
launch('plait_relu', (x, buf0), (s0,), (buf0,), 4*s0, barrier=False)
weight_t = view(weight, f32[8, 8] @ (1, 8), 0)
buf1 = alloc(f32[s0, 8] @ (8, 1))
call('aten::mm.out', into=(buf1,), may_keep=False)(buf0, weight_t, out=buf1)
free(buf0)
buf2 = reuse(buf1, f32[s0, 8] @ (8, 1))
partition(True)
launch('plait_relu', (buf1, buf2), (s0,), (buf2,), 4*s0, barrier=False)
free(buf1)
require_finite(buf2, 'model.py:31', infinities=False)
buf3, = call_python(0, 'mylib.scale')(buf2, alpha=0.5)
require_layout(buf3, f32[s0, 8] @ (8, 1), origin='model.py:32 mylib.scale', copies=True)
buf4, = call_programs('cond', (0, 1), 0, 0, 'higher_order::cond')(s0, buf3)
require_layout(buf4, f32[s0, 8] @ (8, 1), copies=True)
hook(buf3, 1, 'scale', 'mylib.scale (model.py:32)')
copy(state, buf4)
bump_version(x)
buf5 = alloc(f32[4] @ (1,))
fill(buf5, 0.0)
return (buf2, buf5, 2*s0)

def subprogram_0():
    program('example.0')
    s0 = symbol(lo=2)

    x = tensor_input(f32[s0, 8] @ (8, 1))

    s0 = read(x, 'size', 0)
    require_layout(x, f32[s0, 8] @ (8, 1), copies=True)
    y, = call('aten::sin')(x)
    require_layout(y, f32[s0, 8] @ (8, 1))
    return (y,)

def subprogram_1():
    program('example.1')

    x = tensor_input(f32[2, 8] @ (8, 1))

    require_layout(x, f32[2, 8] @ (8, 1), copies=True)
    y, = call('aten::cos')(x)
    require_layout(y, f32[2, 8] @ (8, 1))
    return (y,)
"""

_NATIVE: dict[type, str] = {
    ins.Symbol: "one step; an expression is evaluated once a call, or at load if it is a constant",
    ins.Place: "none where the offset is a constant: pointers are bound when the arena is taken",
    ins.View: "none for kernels where the offset is a constant; operators get a tensor header",
    ins.Constant: "none: bound at load",
    ins.DefineKernel: "a row of the kernel table",
    ins.Free: "a bound: memory is given back after the last use",
    ins.Launch: "part of a region: launches that follow each other run as one",
    ins.Partition: (
        "the steps that follow are recorded as a CUDA graph at their second run and replayed from "
        "then on"
    ),
    ins.Note: "left out",
    ins.Alloc: "one step",
}
_FX: dict[type, str] = {
    ins.Arena: "none: every Place is a tensor of its own",
    ins.Free: "none: a value is dropped after its last use",
    ins.DefineKernel: "none: launches name library, kernel and checks",
    ins.Partition: "an annotation of the nodes that follow",
    ins.Note: "an annotation of the nodes that follow, and their stack trace",
}
_CPP: dict[type, str] = {
    ins.DefineKernel: "a number in the struct `kernel`",
    ins.Free: "`.drop();` after the last use, of kernels' views too",
    ins.Partition: "a comment: it runs as it is",
}


def example() -> ins.WrapperProgram:
    """A legal program that has every instruction."""
    return read(EXAMPLE)


def markdown() -> str:
    """The whole file."""
    p = example()
    verify(p, after="example")
    encode(p)  # the native target takes all of it
    beside = Artifacts({"cpu": "kernels.so"}, [torch.ones(8, 8)], [print, print])
    shown: dict[type, tuple[ins.Instr, list[str], list[str], list[str]]] = {}
    for (i, python), (_, cpp), (_, fx) in zip(
        python_lines(p), cpp_lines(p), fx_lines(p, beside), strict=True
    ):
        shown.setdefault(type(i), (i, python, cpp, fx))
    parts = [
        "# Wrapper instructions",
        "",
        "<!-- Written by `python -m tests.instruction_table`; edit plait/wrapper/instructions.py "
        "instead. -->",
        "",
        "A compiled program is a list of these. The same list is checked (`wrapper/verify.py`),",
        "printed and read back (`wrapper/text.py`), run by the native executor, and written as",
        "Python, C++ or an FX graph.",
        "",
        "## Meanings",
        "",
        "| instruction | fields | meaning |",
        "| --- | --- | --- |",
        *(_meaning(cls) for cls in ins.INSTRUCTIONS),
        "",
        "## Kinds of fields",
        "",
        "| kind | meaning | fields |",
        "| --- | --- | --- |",
        *map(_kind, Kind),
        "",
        "## Targets",
        "",
        "| instruction | text | python | cpp | fx | native |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(cls, *shown[cls]) for cls in ins.INSTRUCTIONS),
        "",
        "## Passes",
        "",
        *_paragraphs(passes.__doc__),
        "",
        "| pass | file | what it does |",
        "| --- | --- | --- |",
        *(_pass(name, step) for name, step in PROGRAM),
        "",
        "## A program with all of them",
        "",
        "```python",
        text(p).rstrip(),
        "```",
    ]
    return "\n".join(parts) + "\n"


def _meaning(cls: type) -> str:
    names = ", ".join(name for name, _ in FIELDS[cls])
    words = " ".join((inspect.getdoc(cls) or "").split())
    return f"| `{cls.__name__}` | {names} | {_cell(words)} |"


def _kind(kind: Kind) -> str:
    of = [f"{cls.__name__}.{name}" for cls in ins.INSTRUCTIONS for name, _ in Select(kind)[cls]]
    return f"| {kind.name.lower()} | {_cell(kind.value)} | {', '.join(of)} |"


def _row(cls: type, i: ins.Instr, python: list[str], cpp: list[str], fx: list[str]) -> str:
    made, in_cpp, nodes = (
        "<br>".join(f"`{_cell(s)}`" for s in lines) for lines in (python, cpp, fx)
    )
    native = _NATIVE.get(cls, "ends the call" if cls is ins.Return else "one step")
    cells = (
        f"`{cls.__name__}`",
        f"`{_cell(line(i))}`",
        made,
        _CPP.get(cls, in_cpp),
        nodes or _FX[cls],
        native,
    )
    return f"| {' | '.join(cells)} |"


def _paragraphs(doc: str | None) -> list[str]:
    return inspect.cleandoc(doc or "").splitlines()


def _pass(name: str, step: ProgramPass) -> str:
    module = inspect.getmodule(step)
    assert module is not None
    words = " ".join((module.__doc__ or "").split())
    return f"| {name} | `{module.__name__.replace('.', '/')}.py` | {_cell(words)} |"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def files() -> dict[Path, str]:
    """What is written from the instructions, by its place in a source tree."""
    root = Path(__file__).parents[1]
    return {
        root / "docs" / "instructions.md": markdown(),
        root / "native" / "core" / "instructions.h": header(),
        root / "native" / "core" / "tables.h": tables(),
    }


if __name__ == "__main__":
    for path, words in files().items():
        path.write_text(words)
