"""The table of wrapper targets: each turns a verified WrapperProgram and its tables into something
that runs.

A new target is one new file and one row here.
"""

from __future__ import annotations

from plait.runtime.load import load
from plait.wrapper.cpp import load_cpp
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts, Loaded, Target
from plait.wrapper.python import load_python, make_python


def _native(program: WrapperProgram, artifacts: Artifacts) -> Loaded:
    return load(encode(program), artifacts.libraries, artifacts.constants, artifacts.callables)


def _python(program: WrapperProgram, artifacts: Artifacts) -> Loaded:
    source = make_python(program, artifacts.libraries)
    return load_python(source, artifacts.libraries, artifacts.constants, artifacts.callables)


def _fx(program: WrapperProgram, artifacts: Artifacts) -> Loaded:
    from plait.wrapper.fx import load_fx  # defines operators, which takes 20 ms

    return load_fx(program, artifacts)


TARGETS: dict[str, Target] = {"native": _native, "python": _python, "cpp": load_cpp, "fx": _fx}
