"""The wrapper targets: each makes a verified WrapperProgram and its tables run.

`config.WRAPPERS` names a module for each, whose `load_program` is the target. It is imported when
a program is first made for it: some define operators, which takes 20 ms.
"""

from __future__ import annotations

from importlib import import_module

from plait.config import WRAPPERS
from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.program import Artifacts, Loaded, Target


def _target(module: str) -> Target:
    def load(program: WrapperProgram, artifacts: Artifacts) -> Loaded:
        loaded: Loaded = import_module(module).load_program(program, artifacts)
        return loaded

    return load


TARGETS: dict[str, Target] = {name: _target(module) for name, module in WRAPPERS.items()}
