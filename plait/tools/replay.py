"""`plait replay`: what a compile was given and what it made, recorded, made again, and compared.

    plait replay record FOLDER -- python train.py   a folder a graph, for all that is compiled
    plait replay rerun FOLDER                       compile these again: what has changed since?
    plait replay compare BEFORE AFTER               the same of two folders

A change that is meant to change no program shows nothing. Nothing that is compared was built or
run, and a graph recorded beside a GPU is compiled again without one. Graphs that are equal are
recorded once.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from plait.devices import facts_of
from plait.errors import PlaitError
from plait.log import progress
from plait.tools.page.command import run
from plait.wrapper.show import GIVEN, GIVEN_TENSORS

_MADE = "[1-5]_*"
"""The files that are compared."""
_TARGETS = ("7_native.txt", "7_program.cpp", "7_graph.py")
"""What `rerun` adds: the program for the targets that its graph was not compiled for."""
_KERNEL = re.compile(r"\b(plait_\w+?|kernel_idx|constant_args_idx)(?:_[0-9a-f]{4,}| = \d+)\b")
"""A kernel's name, which ends with a digest of its text, or its place in the process's table."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser(
        "record", help="run a command, and record every graph that it compiles"
    )
    recorded.add_argument("folder", type=Path)
    recorded.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    again = commands.add_parser("rerun", help="compile recorded graphs again, and compare")
    again.add_argument("folder", type=Path)
    again.add_argument(
        "--out", type=Path, help="where to leave what was made; a temporary folder if not given"
    )
    again.add_argument(
        "--load", action="append", default=[], metavar="FILE.py", help="defines operators of graphs"
    )
    again.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    compared = commands.add_parser("compare", help="compare two folders")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    for command in (again, compared):
        command.add_argument(
            "--renames", type=Path, help="a file of lines `old new`: words that changed their name"
        )
        command.add_argument(
            "--details", metavar="GRAPH", default="", help="show the differences of one graph"
        )
    given = parser.parse_args(arguments)
    if given.command == "record":
        program = given.program[given.program[:1] == ["--"] :]
        if not program:
            parser.error("record needs a command")
        sys.exit(record(given.folder, program))
    folders = (given.before, given.after) if given.command == "compare" else (given.folder,)
    if absent := [str(f) for f in folders if not f.is_dir()]:
        parser.error(f"there is no folder {absent[0]}")
    renames = read_renames(given.renames) if given.renames else {}
    if given.command == "compare":
        sys.exit(_print(given.before, given.after, renames, given.details))
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        rerun(given.folder, out, given.load, given.jobs)
        sys.exit(_print(given.folder, out, renames, given.details))


# ------------------------------------------------------------------------------------------- record
def record(folder: Path, program: Sequence[str]) -> int:
    """Runs a command and moves what its compiles left into `folder`, a folder a graph, named after
    what was given. Returns the command's exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as raw:
        status = run(program, {**os.environ, "PLAIT_DEBUG_DIR": f"{raw}/%p"})
        for made in sorted(Path(raw).glob("*/*")):
            _keep(made, folder)
    return status


def _keep(made: Path, folder: Path) -> None:
    """One graph's debug folder, under a name that depends on what was given alone."""
    name, kind = made.name, made.name.rpartition("_")[0]
    given = made / GIVEN
    if not given.is_file() or not (made / "5_wrapper.txt").is_file():
        return  # an error ended the compile
    digest = hashlib.sha256(_renamed(given.read_text(), name, kind).encode())
    if (made / GIVEN_TENSORS).is_file():
        digest.update((made / GIVEN_TENSORS).read_bytes())
    target = folder / f"{kind}_{digest.hexdigest()[:12]}"
    for file in (*made.glob(_MADE), given):
        file.write_text(_renamed(file.read_text(), name, target.name))
    if not target.exists():
        shutil.move(made, target)


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)


# -------------------------------------------------------------------------------------------- rerun
def rerun(folder: Path, out: Path, load: Sequence[str], jobs: int) -> None:
    """Compiles every recorded graph of `folder` again, into folders of the same names in `out`.

    load: Python files that define operators, run first. jobs: processes."""
    graphs = _graphs(folder)
    jobs = max(1, min(jobs, len(graphs)))
    context = get_context("forkserver")
    context.set_forkserver_preload(["plait.compile"])  # by one process, for all of them
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(list(load),))
    with pool, progress("graphs", len(graphs)) as one_more:
        for _ in pool.map(_again, graphs, [out] * len(graphs), chunksize=4):
            one_more()


def _begin(load: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for file in load:
        runpy.run_path(file)


def _again(recorded: Path, out: Path) -> None:
    import torch

    from plait.compile import compile_texts
    from plait.graph.text import read_given
    from plait.wrapper.cpp import make_cpp
    from plait.wrapper.fx import make_fx
    from plait.wrapper.native import encode

    target = out / recorded.name
    target.mkdir(parents=True, exist_ok=True)
    text, tensors = (recorded / GIVEN).read_text(), recorded / GIVEN_TENSORS
    torch.set_default_dtype(getattr(torch, json.loads(text)["machine"]["default_dtype"]))
    try:
        captured, cfg = read_given(
            text, torch.load(tensors, weights_only=True) if tensors.is_file() else {}
        )
        captured = replace(captured, name=recorded.name)
        program, artifacts = compile_texts(captured, cfg.with_options({"debug_dir": str(out)}))
    except (PlaitError, ValueError) as error:
        (target / "1_error.txt").write_text(f"{type(error).__name__}: {error}\n")
        return
    (target / "7_native.txt").write_text("\n".join(re.findall(".{1,64}", encode(program).hex())))
    (target / "7_program.cpp").write_text(make_cpp(program))
    if find_spec("triton") is None and any(not facts_of(k).is_host for k in artifacts.sources):
        return  # an FX graph holds a GPU's kernels as Triton's functions
    unbuilt = replace(artifacts, libraries={"cpu": "kernels.so"})
    (target / "7_graph.py").write_text(make_fx(program, unbuilt).code)


# ------------------------------------------------------------------------------------------ compare
def compare(
    before: Path, after: Path, renames: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Every graph of both folders -> file -> what differs, as a diff, or who lacks it. Equal graphs
    give {}. renames: words of `before` -> words of `after`."""
    for name in sorted({g.name for folder in (before, after) for g in _graphs(folder)}):
        one, other = before / name, after / name
        absent = next((str(g.parent) for g in (one, other) if not g.is_dir()), "")
        yield (
            name,
            {"": f"{absent} lacks it"} if absent else dict(_differences(one, other, renames)),
        )


def _differences(
    before: Path, after: Path, renames: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    files = sorted({f.name for folder in (before, after) for f in folder.glob(_MADE)})
    both = (n for n in _TARGETS if (before / n).is_file() and (after / n).is_file())
    for name in (*files, *both):
        absent = next(
            (str(folder) for folder in (before, after) if not (folder / name).is_file()), ""
        )
        if absent:
            yield name, f"{absent} lacks it"
            continue
        old = _canonical(_with_names((before / name).read_text(), renames))
        new = _canonical((after / name).read_text())
        if old != new:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), "before", "after", lineterm="", n=2
            )
            yield name, "\n".join(lines)


def _canonical(text: str) -> str:
    """The text with kernels numbered: the digest in a name follows the kernel's text, which is
    compared itself, its place in a table what was compiled before."""
    numbers: dict[str, int] = {}
    return _KERNEL.sub(lambda m: f"{m[1]}_{numbers.setdefault(m[0], len(numbers))}", text)


def read_renames(path: Path) -> dict[str, str]:
    """A file of lines `old new`; lines that start with # are comments. Raises ValueError for any
    other line."""
    pairs = [
        line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")
    ]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path}: {' '.join(wrong[0])!r} is no line `old new`")
    return dict(pairs)


def _with_names(text: str, renames: Mapping[str, str]) -> str:
    if not renames:
        return text
    words = "|".join(map(re.escape, sorted(renames, key=len, reverse=True)))
    return re.sub(rf"\b(?:{words})\b", lambda m: renames[m[0]], text)


def _print(before: Path, after: Path, renames: Mapping[str, str], details: str) -> int:
    """Prints a line a graph that differs, and a sum; 1 if any does. details: the graph that is
    shown whole."""
    graphs, differing = 0, 0
    for name, found in compare(before, after, renames):
        graphs += 1
        if not found:
            continue
        differing += 1
        print(f"{name}: {', '.join(file or text for file, text in found.items())}")
        if details and details in name:
            for file, text in found.items():
                print(f"--- {file}\n{text}")
    print(f"{graphs} graphs, {differing} differ")
    return int(differing > 0)


def _graphs(folder: Path) -> list[Path]:
    return sorted(
        g for g in folder.iterdir() if (g / GIVEN).is_file() or (g / "5_wrapper.txt").is_file()
    )
