"""Processes of Python that need not load torch: they are forked from one that did nothing else.

`run` and `start` take what follows `python` on a command line: -c and code, -m and a module, or a
file. The code finds a process as if it were new: its environment, folder, arguments and modules but
for torch's. What is not new: torch read the environment of the tests when it was imported, and
strings hash as in other processes that are forked here. Not for tests of what is imported, of
variables that torch reads, or of the interpreter's end.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

_NUMBER = struct.Struct("i")


class Process:
    """One that began. returncode: None while it is not known to have ended; -n: by signal n."""

    def __init__(self, args: Sequence[str], status: int) -> None:
        self.args, self._status = args, status
        self.returncode: int | None = None
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired, as subprocess does."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        got = os.read(self._status, _NUMBER.size)
        assert len(got) == _NUMBER.size, f"the server of processes ended before {self.args}"
        (number,) = _NUMBER.unpack(got)
        return int(number)


def start(
    args: Sequence[str | Path],
    env: Mapping[str, str],
    cwd: str | Path,
    stdin: int | IO[Any],
    stdout: int | IO[Any],
    stderr: int | IO[Any],
) -> Process:
    """The three are open files, or their numbers."""
    words = [str(a) for a in args]
    request = json.dumps({"args": words, "env": dict(env), "cwd": str(cwd)}).encode()
    files = [f if isinstance(f, int) else f.fileno() for f in (stdin, stdout, stderr)]
    status, told = os.pipe()
    try:
        socket.send_fds(_door(env), [request], [*files, told])
    finally:
        os.close(told)
    return Process(words, status)


def run(
    *args: str | Path, env: Mapping[str, str], cwd: str | Path = ".", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """To its end, or for so many seconds; what it wrote is in the result."""
    with (
        Path(os.devnull).open() as nothing,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        process = start(args, env, cwd, nothing, output, errors)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read(), errors.read())


class Popen:
    """A process with a pipe to it and one from it, for what starts it by subprocess.Popen. In place
    of the module, `WARM` has it."""

    def __init__(self, command: Sequence[str], *, stdin: int, stdout: int, text: bool) -> None:
        assert command[0] == sys.executable and stdin == stdout == WARM.PIPE and text
        (asked, asks), (told, tells) = os.pipe(), os.pipe()
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        try:
            self._process = start(command[1:], env, Path.cwd(), asked, tells, 2)
        finally:
            os.close(asked)
            os.close(tells)
        self.stdin, self.stdout = os.fdopen(asks, "w"), os.fdopen(told)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        """Waits for its end."""
        self.stdin.close()
        self.stdout.close()
        self._process.wait()


WARM = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE)

_servers: dict[tuple[object, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}
"""This process's number and more -> a process to fork from and the way to it."""


def _door(env: Mapping[str, str]) -> socket.socket:
    """Torch looks for Triton, and Triton at this variable, when they are imported: a server for
    each."""
    searched = env.get("PYTHONPATH", "").split(os.pathsep)
    triton = [p for p in searched if p and Path(p, "triton").is_dir()]
    key = (os.getpid(), *triton, env.get("TRITON_INTERPRET", ""))
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([*triton, os.environ.get("PYTHONPATH", "")])
        with theirs:
            server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={
                    **os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": str(key[-1]),
                    # Who asks for GPUs in another way can have none in a fork.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )  # fmt: skip
        _servers[key] = server, ours
    return _servers[key][1]


@atexit.register
def _end() -> None:
    for key, (server, door) in _servers.items():
        if key[0] == os.getpid():
            door.close()
            server.kill()
            server.wait()


# -------------------------------------------------------------------------------------- the server
def _serve(door: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks a process for every request. Returns in that process, with what it was asked."""
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._functorch.partitioners
    import torch.export  # noqa: F401

    gc.freeze()
    while True:
        request, files, _, _ = socket.recv_fds(door, 1 << 20, 4)
        if not request:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    door.close()
    *files, told = files
    if process := os.fork():  # the server's child waits for its own, and tells
        for file in files:
            os.close(file)
        os.write(told, _NUMBER.pack(process))
        _, status = os.waitpid(process, 0)
        os.write(told, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os._exit(0)
    os.close(told)
    return json.loads(request), files


def _become(args: list[str], env: dict[str, str], cwd: str, files: list[int]) -> None:
    """Makes this the process that was asked for, and runs its code."""
    for k, file in enumerate(files):
        os.dup2(file, k)
        os.close(file)
    ours = {"", str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    base = [p for p in sys.path if p not in ours]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p] + base
    random.seed()
    if env.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    if threads := env.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    if args[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if args[0] == "-c":
        sys.path.insert(0, "")
        sys.argv, source, name = ["-c", *args[2:]], args[1], "<string>"
    else:
        sys.path.insert(0, str(Path(args[0]).parent.absolute()))
        sys.argv, source, name = args, Path(args[0]).read_text(), args[0]
        main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)


if __name__ == "__main__":
    _request, _files = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(**_request, files=_files)
