"""The command line: `plait COMMAND`, also `python -m plait COMMAND`.

A command is the `main` of a module of plait.tools, which takes its arguments; the module is
imported when the command is called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import plait
from plait.errors import UserError

COMMANDS = {
    "bisect": "where a compiled program leaves eager, relative to float64",
    "cache": "what lies in the folder of caches: list, verify, prune, export, import",
    "doctor": "what of this machine, its settings and caches costs speed or does not work",
    "info": "what is in a package, or in a pack of kernels",
    "reduce": "shrink a failing program to a script",
    "replay": "record what compiles were given and made, make it again, compare",
    "report": "run a command, and write a page of HTML about all that is compiled in it",
    "pack": "compile Triton functions ahead, for C++ programs without Python",
}
HOMES = {"bisect": "faults.bisect", "reduce": "faults.reduce", "report": "page.command"}
"""The module of plait.tools, where it is not named as the command is."""


def main(arguments: Sequence[str] | None = None) -> None:
    listed = "\n".join(f"  {name:6} {meaning}" for name, meaning in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="plait",
        usage="plait [options] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"commands:\n{listed}\n\n`plait COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="version", version=plait.__version__)
    cmake = Path(__file__).parent / "lib" / "cmake"
    cmake_help = "print the folder for CMAKE_PREFIX_PATH with which C++ programs find plait"
    parser.add_argument("--cmake-dir", action="version", version=str(cmake), help=cmake_help)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    # argparse would take a `--` for itself that stands behind the command.
    at = next((k for k, a in enumerate(arguments, 1) if not a.startswith("-")), len(arguments))
    given = parser.parse_args(arguments[:at])
    home = HOMES.get(given.command, given.command)
    try:
        importlib.import_module(f"plait.tools.{home}").main(arguments[at:])
    except UserError as error:
        sys.exit(f"plait: {error}")


if __name__ == "__main__":
    main()
