"""The C++ target: a wrapper program as C++ source that is built once and runs the program.

In: a `WrapperProgram`. Out: source that includes `plait/wrapper.h` alone, and with `load_program`
the program itself. The source says what happens at a call, and in which order; operators with their
literals, kernels, constants and callables go by their numbers in the native target's plan of the
same program. Library files lie beside those of CPU kernels.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path

from plait.config import Config
from plait.errors import warn_once
from plait.runtime.cache import get_or_build
from plait.runtime.load import ENTRY, Program, load
from plait.runtime.toolchain import ToolchainMissing, find_toolchain
from plait.runtime.trust import Library
from plait.wrapper import instructions as ins
from plait.wrapper.cppsource import Source, comment
from plait.wrapper.cppsteps import add_input, add_instruction
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts

_INCLUDE = '#include "plait/wrapper.h"\n'


def load_program(program: ins.WrapperProgram, artifacts: Artifacts) -> Program:
    """The program, built or found in the cache. Where no compiler works, the executor runs its
    plan, with a warning."""
    built = None
    try:
        built = build_cpp(make_cpp(program), artifacts.cfg, (ENTRY,))
    except ToolchainMissing as missing:
        warn_once(f"plait runs programs without making C++ of them: {missing.line}")
    return load(
        encode(program), artifacts.libraries, artifacts.constants, artifacts.callables, built
    )


def build_cpp(source: str, cfg: Config, symbols: Collection[str] = ()) -> Library:
    """The library of a generated source. Its text is built with the header in it, which so is part
    of its key."""
    return get_or_build(
        source.replace(_INCLUDE, _header(), 1), find_toolchain(cfg), cfg, symbols
    ).library


@cache
def _header() -> str:
    return (Path(__file__).parents[1] / "include" / "plait" / "wrapper.h").read_text()


def make_cpp(program: ins.WrapperProgram, entry: str = ENTRY) -> str:
    """The program's source: a function of this name."""
    s = Source(program)
    for given in program.inputs:
        add_input(s, given)
    s.end(-1)
    for k, i in enumerate(program.body):
        add_instruction(s, i)
        s.end(k)
    names = ", ".join(s.kernel_names[k] for k in s.devices)
    lines = [
        *comment(f"{program.name}, compiled by plait"),
        _INCLUDE,
        "using namespace plait::wrapper;",
        "",
        f'extern "C" int {entry}(Call call) {{',
        *([f"  struct kernel {{ enum {{ {names} }}; }};"] if names else []),
        *(f"  {line}" for line in s.lines),
        "}",
    ]
    return "\n".join(lines) + "\n"


def cpp_lines(program: ins.WrapperProgram) -> list[tuple[ins.Instr, list[str]]]:
    """Every instruction with the lines that it becomes, each launch in a region of its own."""
    s = Source(program)
    out = []
    for i in program.body:
        s.end_region()
        before = len(s.lines)
        add_instruction(s, i)
        out.append((i, list(s.region.lines or s.lines[before:] or s.notes)))
    return out
