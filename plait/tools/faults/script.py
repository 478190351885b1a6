"""The script that `plait bisect` and `plait reduce` are given: its function, arguments and
options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from plait.config import Config
from plait.errors import UserError
from plait.tools.faults.recorded import changes


def of_script(command: str, description: str) -> argparse.ArgumentParser:
    """The arguments of a command that looks at a script's function."""
    parser = argparse.ArgumentParser(prog=f"plait {command}", description=description)
    parser.add_argument("script", help="a file that defines fn and args, or FILE:FUNCTION, which "
                        "returns them")  # fmt: skip
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="as torch.compile's; may be given again")  # fmt: skip
    parser.add_argument("--mode", help="as torch.compile's")
    return parser


def load_script(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """fn and args of FILE, or what the function in FILE:FUNCTION returns. Raises UserError."""
    file, _, name = (text, "", "") if Path(text).is_file() else text.rpartition(":")
    spec = spec_from_file_location("plait_script", file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise UserError(f"there is no Python file {file or text}")
    module = sys.modules[spec.name] = module_from_spec(spec)  # Dynamo looks globals up there
    spec.loader.exec_module(module)
    fn, args = getattr(module, name)() if name else (module.fn, module.args)
    return fn, tuple(args)


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of NAME=VALUE, as the environment spells values."""
    env = {f"PLAIT_{w.partition('=')[0].upper()}": w.partition("=")[2] for w in words}
    return changes(Config.from_env(env))
