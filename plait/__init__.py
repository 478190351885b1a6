"""plait: a compiler for PyTorch programs, `torch.compile(model, backend="plait")`.

The public names, loaded when first used: `compile` (torch.export road, no Dynamo on the path of a
call), `package` and `load` (the same as a file, for processes without the compiler), `warm_start`
(takes what the process before compiled), `explain`, `report` (a page of HTML), `profile` (where the
time goes), `bisect` (the kernel that makes a number wrong), `reduce` (a failing program as a
script), `watch` (callbacks on intermediates), `plait_backend` (what torch.compile calls),
`FxCompiler` (the base of compilers out of tree), `list_modes`, `list_options`, `Config` and the
errors. Importing this package alone loads nothing but itself.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from plait.capture.backend import plait_backend as plait_backend
    from plait.capture.export import compile as compile
    from plait.capture.fx import FxCompiler as FxCompiler
    from plait.capture.package import package as package
    from plait.config import Config as Config
    from plait.config import list_modes as list_modes
    from plait.config import list_options as list_options
    from plait.config import warm_start as warm_start
    from plait.errors import InputError as InputError
    from plait.errors import InternalError as InternalError
    from plait.errors import PlaitError as PlaitError
    from plait.errors import Unsupported as Unsupported
    from plait.errors import UserError as UserError
    from plait.runtime.package import Package as Package
    from plait.runtime.package import PackageError as PackageError
    from plait.runtime.package import load as load
    from plait.tools.explain import explain as explain
    from plait.tools.faults.bisect import bisect as bisect
    from plait.tools.faults.reduce import reduce as reduce
    from plait.tools.page.command import report as report
    from plait.tools.profile import profile as profile
    from plait.wrapper.watch import watch as watch

_HOME = {
    "plait_backend": "plait.capture.backend",
    "compile": "plait.capture.export",
    "FxCompiler": "plait.capture.fx",
    "Config": "plait.config",
    "list_modes": "plait.config",
    "list_options": "plait.config",
    "warm_start": "plait.config",
    "InputError": "plait.errors",
    "InternalError": "plait.errors",
    "PlaitError": "plait.errors",
    "Unsupported": "plait.errors",
    "UserError": "plait.errors",
    "package": "plait.capture.package",
    "Package": "plait.runtime.package",
    "PackageError": "plait.runtime.package",
    "load": "plait.runtime.package",
    "bisect": "plait.tools.faults.bisect",
    "reduce": "plait.tools.faults.reduce",
    "explain": "plait.tools.explain",
    "profile": "plait.tools.profile",
    "report": "plait.tools.page.command",
    "watch": "plait.wrapper.watch",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _Package(ModuleType):
    """The public function `compile` has the name of the pipeline's module: importing that module
    must not hide it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "compile" and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
