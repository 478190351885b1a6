"""Writes packs: kernels of Triton functions, compiled ahead, for C++ programs without Python
(triton_launch/README.md).

`plait pack kernels.py --signatures "add_kernel *fp32:D,*fp32:D,*fp32:D,i32:D,=1024 num_warps=8"`: a
function, what it is specialized to, and options, as an error of a kernel that a pack lacks prints
them. `@FILE` stands for a file of them, a line each. "FUNCTION @heuristics0 n=100" is a question
that a decorator's Python function is asked now, because C++ cannot; with " -> " and an answer
behind it, as for @tuned, it is stored as it is. Triton runs in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import product
from pathlib import Path

from plait.errors import UserError
from plait.log import progress
from plait.runtime.cubin import Cubin, pack
from triton_launch.specialization import read_options, read_specialization, write_item, write_value

MAX_PROCESSES = 8
OLDEST_CAPABILITY = 80
"""Of the GPUs that plait supports."""


class _Line:
    """A conversation with a process that compiles, as C++ has it too
    (triton_launch/src/providers.cpp)."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.stream = connection, connection.makefile("rb")

    def send(self, request: bytes) -> None:
        self.socket.sendall(struct.pack("<Q", len(request)) + request)

    def ask(self, who: str, *lines: str) -> bytes:
        """An answer. Raises UserError, which begins with `who`, if it is no."""
        self.send("\n".join(lines).encode())
        size = self.stream.read(8)
        said: bytes = (
            self.stream.read(*struct.unpack("<Q", size))
            if len(size) == 8
            else b"eits process ended"
        )
        if said[:1] == b"k":
            return said[1:]
        # The reason, and Python's traceback.
        raise UserError(f"{who}: {said[1:].decode().rstrip()}")

    def fork(self) -> _Line:
        """Another process that has loaded what this one has."""
        mine, theirs = socket.socketpair()
        with theirs:
            self.send(b"fork")
            socket.send_fds(self.socket, [b"\0"], [theirs.fileno()])
        return _Line(mine)

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


@contextmanager
def _compiler() -> Iterator[_Line]:
    mine, theirs = socket.socketpair()
    with theirs:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
        command = [sys.executable, "-m", "triton_launch.worker"]
        process = subprocess.Popen(command, stdin=theirs.fileno(), env=env)
    line = _Line(mine)
    try:
        yield line
    finally:
        line.close()
        process.wait()


def triton_pack(
    path: str | Path, file: str | Path, signatures: Sequence[str],
    capabilities: Sequence[int] = (90,), all_configs: bool = False,
) -> None:  # fmt: skip
    """Compiles functions of a Python file and writes them to `path`.

    signatures: each a function's name, its specialization and perhaps options, with spaces between
    them; or a name and a fact about its decorators; one that begins with "?" was only timed, and
    counts with all_configs alone.
    capabilities: of the GPUs, such as 90. Raises UserError for what cannot be read, or what Triton
    refuses."""
    file = str(Path(file).resolve())
    signatures = [
        s.lstrip().removeprefix("?")
        for s in signatures
        if all_configs or not s.lstrip().startswith("?")
    ]
    facts = [s for s in dict.fromkeys(signatures) if _is_fact(s)]
    wanted = [_read(s) for s in dict.fromkeys(signatures) if not _is_fact(s)]
    n = max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(wanted) * len(capabilities)))
    with _compiler() as first, ThreadPoolExecutor(n) as threads, ExitStack() as stack:
        functions = dict.fromkeys(
            [*(f for f, _, _ in wanted), *(fact.split()[0] for fact in facts)]
        )
        texts = {f: first.ask(f, "describe", file, f).decode() for f in functions}
        for fact in facts:
            function, _, what = fact.strip().partition(" @")
            texts[function] += (
                f"\n>{what if ' -> ' in what else _answer(first, file, function, what)}"
            )
        compilers = [stack.enter_context(closing(first.fork())) for _ in range(n)]
        jobs = list(product(wanted, capabilities))
        shares = [jobs[k::n] for k in range(n)]
        done = stack.enter_context(progress("compiling", len(jobs)))
        made = threads.map(partial(_compile, file, texts, done), compilers, shares)
        kernels = {name: cubin for share in made for name, cubin in share.items()}
    data = pack(dict(sorted(kernels.items())), texts)
    path = Path(path)
    whole = path.with_name(f".{path.name}.{os.getpid()}")  # nobody sees half a file
    whole.write_bytes(data)
    whole.replace(path)


def _is_fact(signature: str) -> bool:
    return re.match(r"\s*\w+ @", signature) is not None


def _answer(compiler: _Line, file: str, function: str, question: str) -> str:
    """A fact: what a decorator's function says now. Raises UserError."""
    kind, _, arguments = question.partition(" ")
    if kind.startswith("tuned"):
        raise UserError(f"{function} @{question}: ' -> ' and a configuration are missing")
    answer = compiler.ask(
        f"{function} @{question}", "evaluate", file, function, kind, arguments
    ).decode()
    names, _, result = answer.partition("\n")
    told = dict(item.split("=", 1) for item in arguments.split(";") if "=" in item)
    conditions = ";".join(f"{name}={told.get(name, '-')}" for name in names.split(",") if name)
    return f"{kind} {conditions} -> {result}"


def _read(signature: str) -> tuple[str, str, str]:
    """The function, specialization and options of a signature, the latter two as C++ writes
    them."""
    function, _, rest = signature.strip().partition(" ")
    # Options begin with a name, which a specialization has nowhere.
    specialization, options = rest, ""
    if (found := re.search(r"(^|\s)[A-Za-z_]\w*\s*=", rest)) is not None:
        specialization, options = rest[: found.start()], rest[found.start() :]
    try:
        items = ",".join(map(write_item, read_specialization(specialization)))
        values = read_options("".join(options.split()))
        return function, items, ";".join(f"{k}={write_value(v)}" for k, v in sorted(values.items()))
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"the signature {signature!r} cannot be read: {error}") from None


def _compile(
    file: str,
    texts: dict[str, str],
    done: Callable[[], None],
    compiler: _Line,
    jobs: Sequence[tuple[tuple[str, str, str], int]],
) -> dict[str, Cubin]:
    """Kernels by the names under which C++ looks for them. done: is called after each."""
    found = {}
    for (function, specialization, options), capability in jobs:
        defaults = texts[function].partition("\n")[0].split(";")
        differing = ";".join(o for o in options.split(";") if o not in defaults)
        who = f"{function} {specialization}{' ' * bool(options)}{options} (sm_{capability})"
        answer = compiler.ask(
            who, "cubin", file, function, str(capability), specialization, differing
        )
        found[f"{function}|{specialization}|{differing}|{capability}"] = Cubin.from_bytes(answer)
        done()
    return found


def _capability(text: str) -> int:
    if text.isdecimal() and int(text) >= OLDEST_CAPABILITY:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no compute capability from {OLDEST_CAPABILITY} on, such as 90"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait pack", description=(__doc__ or "").partition("\n")[0],
        fromfile_prefix_chars="@",
    )  # fmt: skip
    parser.add_argument("file", help="the Python file with the functions")
    parser.add_argument("--signatures", nargs="+", required=True, metavar="SIGNATURE")
    parser.add_argument(
        "--tune-table",
        metavar="FILE",
        help="a tuned program's list of signatures: what was decided is taken from it",
    )
    parser.add_argument(
        "--all-configs", action="store_true",
        help=(
            "also what a recorded run timed and did not choose: then a pack is enough to tune anew"
        ),
    )  # fmt: skip
    parser.add_argument(
        "--arch", nargs="+", type=_capability, default=[90], metavar="N",
        help=f"compute capabilities, from {OLDEST_CAPABILITY} on (90)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", help="the pack (the file's name with .pack)")
    given = parser.parse_args(arguments)
    output = given.output or Path(given.file).with_suffix(".pack")
    try:
        table = Path(given.tune_table).read_text().splitlines() if given.tune_table else []
        signatures = [*given.signatures, *filter(_is_fact, table)]
        triton_pack(output, given.file, signatures, given.arch, given.all_configs)
    except (UserError, OSError) as error:
        sys.exit(f"plait: {error}")


if __name__ == "__main__":
    main()
