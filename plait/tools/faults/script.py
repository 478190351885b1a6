"""What `plait bisect` and `plait reduce` are given: a file that defines a function and arguments,
or, after `--`, a script that compiles something with plait and calls it."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plait.capture.backend import plait_backend
from plait.capture.sources import check_callable
from plait.config import Config
from plait.errors import UserError
from plait.tools.faults.recorded import Graphs, Prepared, Recording, changes


def of_script(command: str, description: str) -> argparse.ArgumentParser:
    """The arguments of a command that looks at a script."""
    parser = argparse.ArgumentParser(
        prog=f"plait {command}",
        description=description,
        usage=f"plait {command} [options] FILE[:FUNCTION]\n"
        f"       plait {command} [options] -- SCRIPT [arguments]",
    )
    parser.add_argument("file", nargs="?", metavar="FILE[:FUNCTION]",
                        help="a file that defines fn and args, or a function of it that returns "
                        "them")  # fmt: skip
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="as torch.compile's; may be given again")  # fmt: skip
    parser.add_argument("--mode", help="as torch.compile's")
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str], prepared: Prepared = lambda cfg: cfg
) -> tuple[argparse.Namespace, list[str], Recording]:
    """The arguments, and what stands behind `--`: one of both names a file. And what records its
    graphs, with a configuration so prepared."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    given, script = parser.parse_args(arguments[:at]), [*arguments[at + 1 :]]
    if bool(given.file) == bool(script):
        parser.error("it needs a file, or a script after --")
    return given, script, Recording(read_options(given.option), given.mode, prepared)


def run_script(words: Sequence[str], recording: Recording) -> Graphs:
    """Runs a script with its arguments; the graphs that it compiles with plait, each with what it
    is called with first."""
    compiles = torch.compile

    def compile(model: Any = None, **words: Any) -> Any:
        if words.get("backend") not in ("plait", plait_backend):
            return compiles(model, **words)
        if model is None:
            return partial(compile, **words)
        cfg = Config.from_env().with_options(words.pop("options", None), words.pop("mode", None))
        return compiles(model, **{**words, "backend": recording.recorder(cfg).backend})

    file, *rest = words
    if not Path(file).is_file():
        raise UserError(f"there is no Python file {file}", hint="-- train.py, without python")
    with (
        recording.bound(),
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(sys, "argv", [file, *rest]),
        mock.patch.object(sys, "path", [str(Path(file).absolute().parent), *sys.path]),
    ):
        try:
            runpy.run_path(file, run_name="__main__")
        except (Exception, SystemExit) as end:  # noqa: BLE001 - what it has compiled is there
            print(f"the script ended with {type(end).__name__}: {end}")
        return recording.graphs


def load_script(text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """fn and args of FILE, or what the function in FILE:FUNCTION returns. Raises UserError."""
    file, _, name = (text, "", "") if Path(text).is_file() else text.rpartition(":")
    spec = spec_from_file_location("plait_script", file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise UserError(f"there is no Python file {file or text}")
    module = sys.modules[spec.name] = module_from_spec(spec)  # Dynamo looks globals up there
    spec.loader.exec_module(module)
    wanted = (name,) if name else ("fn", "args")
    if missing := [n for n in wanted if not hasattr(module, n)]:
        raise UserError(
            f"{file} defines no {' and no '.join(missing)}",
            hint=f"a script that compiles by itself stands behind --: -- {file}",
        )
    match getattr(module, name)() if name else (module.fn, module.args):
        case [fn, [*args]]:
            check_callable(fn, text)
            return fn, tuple(args)
    raise UserError(f"{text} is no function and its arguments", hint="model, (x,): a tuple of them")


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Options of NAME=VALUE, as the environment spells values."""
    env = {f"PLAIT_{w.partition('=')[0].upper()}": w.partition("=")[2] for w in words}
    return changes(Config.from_env(env))
