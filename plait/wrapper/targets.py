"""The table of wrapper targets: each turns a verified WrapperProgram and its tables into something
that runs.

A new target is one new file and one row here.
"""

from __future__ import annotations

from plait.runtime.load import load
from plait.wrapper.cpp import load_cpp
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.program import Loaded, Parts, Target
from plait.wrapper.python import load_python, make_python


def _native(program: WrapperProgram, parts: Parts) -> Loaded:
    return load(encode(program), parts.libraries, parts.constants, parts.callables)


def _python(program: WrapperProgram, parts: Parts) -> Loaded:
    source = make_python(program, parts.libraries)
    return load_python(source, parts.libraries, parts.constants, parts.callables)


def _fx(program: WrapperProgram, parts: Parts) -> Loaded:
    from plait.wrapper.fx import load_fx  # defines operators, which takes 20 ms

    return load_fx(program, parts)


TARGETS: dict[str, Target] = {"native": _native, "python": _python, "cpp": load_cpp, "fx": _fx}
