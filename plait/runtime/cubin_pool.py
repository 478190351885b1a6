"""From Triton sources to cubins: a store on disk, and before it a pool of worker processes.

`start_early` may be called long before the first kernel exists: Triton is loaded while Dynamo still
traces. A worker that dies is replaced and its job tried once more; one that has nothing to do ends;
jobs that are equal are compiled once. Comes in: `Job`. Goes out: `Cubin`. Nothing here needs a GPU.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from plait.config import Config
from plait.errors import RefusedKernel, ToolchainError
from plait.runtime import cubin
from plait.runtime.cubin import SM_90, Cubin, Gpu, Job, pack, read_exactly
from plait.runtime.process import end_group, pause, starting
from plait.runtime.store import CUBINS, PACKS, WAIT_S, Built, Store, key_of
from plait.runtime.toolchain import ToolchainFailed

DEVICE = Path("/dev/nvidiactl")
# Bounds on processes and on how long they stay: chosen, not measured.
MAX_WORKERS = 16
IDLE_S = 30.0
"""How long a worker waits for a job before it ends."""
SERVER_IDLE_S = 600.0
"""How long the process that they are forked from does without any."""
STOP_S = 2.0
"""How long that process may take to end when told to."""
POLL_S = 0.005
"""How often a job is looked at that another process is at."""


class _Server:
    """The process that workers are forked from."""

    def __init__(self, gpu: Gpu) -> None:
        # It finds Triton where this process does, and nothing of this process's folder. What tells
        # the compiler something comes with each job.
        env = {k: os.environ[k] for k in os.environ.keys() - cubin.compiler_variables().keys()}
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        env.pop("TRITON_INTERPRET", None)
        self.folders = _scratch_folders()  # whoever lives longer removes them
        self.requests, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            facts = (handle, os.getpid(), json.dumps(gpu), SERVER_IDLE_S, *self.folders)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(cubin.WORKER), *map(str, facts)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a compiler prints
                    pass_fds=(handle,),
                    env=env,
                    start_new_session=True,  # the user's Ctrl-C is not for it
                )
            except OSError:
                self._clean()
                raise

    def fork(self) -> socket.socket:
        """What a new worker listens to, from now on or once the server is ready. Raises OSError if
        the server died."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.requests, [b"w"], [theirs.fileno()])
        return mine

    def stop(self) -> None:
        """Ends the process and its workers; a job that one is at is lost."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._clean()

    def _clean(self) -> None:
        self.requests.close()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _scratch_folders() -> list[str]:
    """New folders for what lives as long as a job: in memory, and where there is more room."""
    made: list[str] = []
    for place in ("/dev/shm", None):
        with suppress(OSError):
            made.append(tempfile.mkdtemp(prefix="plait-triton-", dir=place))
    if not made:
        raise FileNotFoundError("no folder for short-lived files")
    return made


class _Process:
    """A worker process, there from its first job on. fork: gives what a new one listens to, or
    raises OSError."""

    def __init__(self, fork: Callable[[], socket.socket]) -> None:
        self.fork = fork
        self.stream: BinaryIO | Any | None = None
        self.socket: socket.socket | None = None
        self.pid = 0  # of it and its process group, once it has said so

    def compile(self, task: _Task) -> Cubin:
        """The cubin of a task. Raises ToolchainError for a source that is refused, ToolchainFailed
        for one that ends process after process or takes too long."""
        failure: Exception | None = None
        for _ in range(2):  # if it dies: once more, in a new one
            try:
                stream = self._connected(task.seconds)
                return _ask(stream, task)
            except ToolchainError:
                raise
            except TimeoutError as error:
                if self.pid:
                    end_group(self.pid)
                self.close()
                text = (
                    f"kernel {task.name} took Triton longer than {task.seconds} s "
                    "(PLAIT_COMPILER_SECONDS)"
                )
                raise ToolchainFailed(text) from error
            except Exception as error:  # noqa: BLE001  (nothing sensible can be read any more)
                failure = error
                self.close()
        raise ToolchainFailed(
            f"the process that compiled kernel {task.name} died twice ({failure})"
        ) from failure

    def close(self) -> None:
        """Ends the process when it has done its job."""
        if self.stream is not None:
            with suppress(OSError):  # what was not read
                self.stream.close()
        if self.socket is not None:
            self.socket.close()
        self.stream, self.socket, self.pid = None, None, 0

    def _connected(self, seconds: float) -> BinaryIO | Any:
        """What a job is written to; reading an answer waits that long."""
        if self.stream is None or self.socket is None:
            self.socket = self.fork()
            self.stream = self.socket.makefile("rwb")
            self.socket.settimeout(seconds)
            self.pid = int.from_bytes(read_exactly(self.stream, 8), "little")
        self.socket.settimeout(seconds)
        return self.stream


def _ask(stream: BinaryIO | Any, task: _Task) -> Cubin:
    """A worker's answer. Raises ToolchainError if that is no, OSError or EOFError if it died."""
    data = task.frame.encode()
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()
    head = json.loads(read_exactly(stream, int.from_bytes(read_exactly(stream, 8), "little")))
    image = read_exactly(stream, head["nbytes"])
    if "error" in head:
        raise _refused(task.name, f"Triton refused kernel {task.name}: {head['error']}")
    return Cubin.of(head["facts"], image)


def _refused(kernel: str, what: str) -> RefusedKernel:
    error = RefusedKernel(what, hint="PLAIT_DEBUG=4 writes the source")
    error.kernel = kernel
    return error


@dataclass(frozen=True)
class _Task:
    """A job under way.

    name: of its kernel
    frame: what a worker reads
    key: of its entry in the store
    seconds: that it may take
    until: the time up to which another process that is at the same job is waited for
    """

    name: str
    frame: str
    key: str
    store: Store
    seconds: int
    result: Future[Cubin] = field(default_factory=Future)
    until: float = math.inf


def _n_workers() -> int:
    """As many as there are processors for each of the processes that a launcher started beside this
    one."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    mine = len(os.sched_getaffinity(0)) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)
    return max(1, min(MAX_WORKERS, mine))


class CubinPool:
    """Worker processes that compile kernels: a server, started when first needed or before, and
    workers that it forks as jobs come in. Threads may share one pool."""

    def __init__(self, n_workers: int = 0) -> None:
        self.n_workers = n_workers or _n_workers()
        self._jobs: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._server: _Server | None = None
        self._threads: list[threading.Thread] = []  # one a worker process
        self._pending: dict[str, Future[Cubin]] = {}
        self._lock = threading.Lock()

    def start(self, gpu: Gpu = SM_90) -> None:
        """Starts the server, if it is not there yet. gpu: what it is likely to compile for."""
        with self._lock, starting:
            if self._server is None:
                self._server = _Server(gpu)

    def compile(self, jobs: Sequence[Job], cfg: Config) -> list[Cubin]:
        """The cubins of jobs, in their order: from the store, or compiled now, as many at once as
        there are workers.

        Raises ToolchainError with the compiler's words for the first job that it refuses.
        """
        return [result.result() for result in self.submit(jobs, cfg)]

    def submit(self, jobs: Sequence[Job], cfg: Config) -> list[Future[Cubin]]:
        """The same, not waited for."""
        store = Store.of(cfg, CUBINS)
        return [self._submit(job, store, cfg.compiler_seconds) for job in jobs]

    def _submit(self, job: Job, store: Store, seconds: int) -> Future[Cubin]:
        frame = job.frame()
        task = _Task(job.name, frame, cubin.key_of_frame(frame), store, seconds)
        with self._lock:
            if task.key in self._pending:
                return self._pending[task.key]
            found = store.read(task.key)
            if found is not None:
                task.result.set_result(Cubin.from_bytes(found))
                return task.result
            if len(self._threads) < min(self.n_workers, len(self._pending) + 1):
                args = (self._jobs, job.gpu)
                thread = threading.Thread(
                    target=self._serve, args=args, name="plait-triton", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._pending[task.key] = task.result
            self._jobs.put(task)
        return task.result

    def _serve(self, jobs: queue.SimpleQueue[_Task | None], gpu: Gpu) -> None:
        """The life of a thread. Whatever happens to a task, whoever waits for it is told."""
        process = _Process(partial(self._fork, jobs, gpu))
        while (task := self._next(jobs)) is not None:
            turn = task.store.turn(task.key, 0) if task.store.waits else nullcontext(True)
            with turn as mine:
                put_off = not mine and self._put_off(task, jobs)
                if not put_off:
                    self._finish(task, process)
            if put_off:
                pause(POLL_S)
        process.close()

    def _put_off(self, task: _Task, jobs: queue.SimpleQueue[_Task | None]) -> bool:
        """Whether others come first, since another process is at this one."""
        now = time.monotonic()
        with self._lock:
            if now >= task.until or jobs is not self._jobs:  # it was stopped: no more are taken
                return False
            jobs.put(replace(task, until=min(task.until, now + WAIT_S)))
        return True

    def _finish(self, task: _Task, process: _Process) -> None:
        try:
            found = task.store.read(task.key)  # by now
            if found is None:
                made = process.compile(task)
                task.store.put(task.key, made.to_bytes())  # whoever asks from now on finds it
            else:
                made = Cubin.from_bytes(found)
            tell = partial(task.result.set_result, made)
        except BaseException as error:  # noqa: BLE001  (raised where the result is wanted)
            tell = partial(task.result.set_exception, error)
        with self._lock:
            del self._pending[task.key]
        tell()

    def _next(self, jobs: queue.SimpleQueue[_Task | None]) -> _Task | None:
        """The next task; None where there is none for long, or the pool was stopped."""
        while True:
            try:
                return jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if jobs is self._jobs and jobs.empty():
                        self._threads.remove(threading.current_thread())
                        return None

    def _fork(self, jobs: queue.SimpleQueue[_Task | None], gpu: Gpu) -> socket.socket:
        with self._lock, starting:
            if jobs is not self._jobs:
                raise OSError("the pool was stopped")
            if self._server is not None:
                try:
                    return self._server.fork()
                except OSError:  # it is gone
                    self._server.stop()
            self._server = _Server(gpu)
            return self._server.fork()

    def stop(self) -> None:
        """Ends the workers. The pool starts new ones when it is used again."""
        with self._lock:
            server, self._server = self._server, None
            threads, self._threads = self._threads, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
        if server is not None:
            server.stop()
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()


def get_or_build_pack(jobs: Sequence[Job], cfg: Config) -> Built:
    """The file with all kernels, each under its job's name. Raises ToolchainError for the first
    that Triton refuses, or that needs more memory than such a GPU has."""
    store = Store.of(cfg, PACKS)
    key = key_of([f"pack {cubin.PACK_VERSION}", *(f"{job.name} {job.key()}" for job in jobs)])
    found = store.find(key)
    if found is not None:
        return Built(found, True)
    cubins = pool().compile(jobs, cfg)
    for job, made in zip(jobs, cubins, strict=True):
        most = job.gpu.most_shared
        if most is not None and made.shared > most:
            need = f"{made.shared} bytes of shared memory, {job.gpu.name} has {most}"
            raise _refused(job.name, f"kernel {job.name} needs {need}")
    return Built(
        store.put(key, pack({job.name: c for job, c in zip(jobs, cubins, strict=True)})), False
    )


_pools: dict[int, CubinPool] = {}


def pool() -> CubinPool:
    """The pool of this process; a forked child gets one of its own."""
    mine = _pools.get(os.getpid())
    if mine is None:
        mine = _pools.setdefault(os.getpid(), CubinPool())
    return mine


@atexit.register
def _stop() -> None:
    if os.getpid() in _pools:  # a forked child leaves the others alone
        pool().stop()


def start_early() -> None:
    """Starts the pool's server where a GPU and Triton seem to be there, so that it has loaded the
    compiler by the time that the first kernel is written. Neither CUDA nor Triton is touched in
    this process."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if DEVICE.exists() and not hidden and find_spec("triton") is not None:
        with suppress(OSError):  # the first job will say so
            pool().start()
