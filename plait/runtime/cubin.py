"""From Triton sources to cubins: a store on disk, and before it a pool of worker processes.

`start_early` may be called long before the first kernel exists: Triton is loaded while Dynamo still traces. A worker
that dies is replaced and its job tried once more; jobs that are equal are compiled once. Comes in: `Job`. Goes
out: `Cubin`, everything that a launch needs besides its arguments. Nothing here needs a GPU.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime.store import Built, Store, key_of
from plait.runtime.toolchain import ToolchainMissing

WORKER = Path(__file__).parent / "triton_worker.py"
DEVICE = Path("/dev/nvidiactl")
MAX_WORKERS = 16


@dataclass(frozen=True)
class Job:
    """One kernel to compile. text: a module that defines function `name`. signature: Triton's type of each argument.
    aligned: positions of pointers that are multiples of 16. capability: such as 90 for sm_90."""

    name: str
    text: str
    signature: Mapping[str, str]
    capability: int
    num_warps: int
    num_stages: int = 1
    aligned: tuple[int, ...] = ()
    checks: bool = False

    def frame(self) -> dict[str, Any]:
        """The job as a worker reads it."""
        options = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "debug": self.checks,
            "sanitize_overflow": False,
        }  # fmt: skip
        return {
            "name": self.name, "text": self.text, "signature": dict(self.signature),
            "capability": self.capability, "aligned": list(self.aligned), "options": options,
        }  # fmt: skip

    def key(self) -> str:
        """The name of its result in the store."""
        return key_of((json.dumps(self.frame(), sort_keys=True), triton_version()))


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel. symbol: its entry point. num_warps: after compilation, which may change it. shared: bytes of
    dynamic shared memory. global_scratch, profile_scratch: bytes a program and alignment of the two pointers that
    follow the arguments. cooperative, pdl: attributes that a launch must set."""

    image: bytes
    symbol: str
    num_warps: int
    num_ctas: int
    shared: int
    global_scratch: tuple[int, int]
    profile_scratch: tuple[int, int]
    cooperative: bool
    pdl: bool

    def to_bytes(self) -> bytes:
        """One line of JSON, then the image."""
        facts = {k: v for k, v in vars(self).items() if k != "image"}
        return json.dumps(facts).encode() + b"\n" + self.image

    @staticmethod
    def from_bytes(data: bytes) -> Cubin:
        """What to_bytes wrote."""
        head, _, image = data.partition(b"\n")
        return Cubin.of(json.loads(head), image)

    @staticmethod
    def of(facts: Mapping[str, Any], image: bytes) -> Cubin:
        """A worker's answer."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        return Cubin(image=image, **known)


@lru_cache
def triton_version() -> str:
    """The version of the installed Triton, without importing it. Raises ToolchainMissing if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ToolchainMissing("Triton is not installed", hint="pip install triton") from None


class _Server:
    """The process that workers are forked from."""

    def __init__(self, capability: int) -> None:
        # It finds Triton where this process does, and nothing of this process's folder.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env.pop("TRITON_INTERPRET", None)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="plait-triton-", dir=memory)  # whoever lives longer removes it
        self.requests, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), str(handle), str(os.getpid()), str(capability), self.folder],
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
        """What a new worker listens to, from now on or once the server is ready. Raises OSError if the server died."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.requests, [b"w"], [theirs.fileno()])
        return mine

    def stop(self) -> None:
        """Ends the process and its workers; a job that one is at is lost."""
        self.process.terminate()
        self.process.wait()
        self._clean()

    def _clean(self) -> None:
        self.requests.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Worker:
    """One worker process and the thread that talks to it. fork: gives what a new one listens to, or raises OSError."""

    def __init__(self, jobs: queue.SimpleQueue[_Task | None], fork: Callable[[], socket.socket]) -> None:
        self.jobs, self.fork = jobs, fork
        self.thread = threading.Thread(target=self._serve, name="plait-triton", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        stream = None
        while (task := self.jobs.get()) is not None:
            answer: Cubin | str | None = None
            for _ in range(2):  # if it dies: once more, in a new one
                try:
                    stream = stream or self._connect()
                    answer = _ask(stream, task.job)
                    break
                except (OSError, EOFError):
                    _close(stream)
                    stream = None
            task.finish(answer)
        _close(stream)

    def _connect(self) -> BinaryIO | Any:
        with self.fork() as mine:
            return mine.makefile("rwb")


def _close(stream: BinaryIO | Any | None) -> None:
    if stream is not None:
        with suppress(OSError):  # what was not read
            stream.close()


def _ask(stream: BinaryIO | Any, job: Job) -> Cubin | str:
    """A worker's answer, or the error that it reports. Raises OSError or EOFError if it died."""
    data = json.dumps(job.frame()).encode()
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()
    head = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    image = _exactly(stream, head["nbytes"])
    return head["error"] if "error" in head else Cubin.of(head["facts"], image)


@dataclass
class _Task:
    """A job, and what becomes of it. pending: the pool's unfinished results, which it leaves when it is done."""

    job: Job
    key: str
    store: Store
    pending: dict[str, Future[Cubin]]
    result: Future[Cubin] = field(default_factory=Future)

    def finish(self, answer: Cubin | str | None) -> None:
        """Stores the cubin before anyone waits no longer, so that whoever asks next finds it."""
        name = self.job.name
        if isinstance(answer, Cubin):
            self.store.put(self.key, answer.to_bytes())
        del self.pending[self.key]
        if isinstance(answer, Cubin):
            self.result.set_result(answer)
        elif answer is None:
            error = ToolchainError(f"the process that compiled kernel {name} died twice")
            self.result.set_exception(error)
        else:
            hint = "PLAIT_DEBUG=4 writes the source"
            error = ToolchainError(f"Triton refused kernel {name}: {answer}", hint=hint)
            self.result.set_exception(error)


class CubinPool:
    """Worker processes that compile kernels: a server, started when first needed or before, and workers that it forks
    as jobs come in. Threads may share one pool."""

    def __init__(self, n_workers: int = 0) -> None:
        self.n_workers = n_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._jobs: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._server: _Server | None = None
        self._workers: list[_Worker] = []
        self._pending: dict[str, Future[Cubin]] = {}
        self._lock = threading.Lock()

    def start(self, capability: int = 90) -> None:
        """Starts the server, if it is not there yet. capability: what it is likely to compile for."""
        with self._lock:
            if self._server is None:
                self._server = _Server(capability)

    def compile(self, jobs: Sequence[Job], cfg: Config) -> list[Cubin]:
        """The cubins of jobs, in their order: from the store, or compiled now, as many at once as there are workers.

        Raises ToolchainError with the compiler's words for the first job that it refuses.
        """
        return [result.result() for result in self.submit(jobs, cfg)]

    def submit(self, jobs: Sequence[Job], cfg: Config) -> list[Future[Cubin]]:
        """The same, not waited for."""
        store = Store(Path(cfg.cache_dir) / "cubins", ".cubin")
        return [self._submit(job, store) for job in jobs]

    def _submit(self, job: Job, store: Store) -> Future[Cubin]:
        key = job.key()
        with self._lock:
            if key in self._pending:
                return self._pending[key]
            found = store.read(key)
            if found is not None:
                done: Future[Cubin] = Future()
                done.set_result(Cubin.from_bytes(found))
                return done
            task = _Task(job, key, store, self._pending)
            self._pending[key] = task.result
            self._jobs.put(task)
            if len(self._workers) < min(self.n_workers, len(self._pending)):
                self._workers.append(_Worker(self._jobs, partial(self._fork, self._jobs, job.capability)))
        return task.result

    def _fork(self, jobs: queue.SimpleQueue[_Task | None], capability: int) -> socket.socket:
        with self._lock:
            if jobs is not self._jobs:
                raise OSError("the pool was stopped")
            if self._server is not None:
                try:
                    return self._server.fork()
                except OSError:  # it is gone
                    self._server.stop()
            self._server = _Server(capability)
            return self._server.fork()

    def stop(self) -> None:
        """Ends the workers. The pool starts new ones when it is used again."""
        with self._lock:
            server, self._server = self._server, None
            workers, self._workers = self._workers, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
        if server is not None:
            server.stop()
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.thread.join()


_PACK = struct.Struct("<10q")


def pack(cubins: Mapping[str, Cubin]) -> bytes:
    """Kernels by name as one file; native/core/cubins.cpp says how and reads it."""
    parts = [b"PLAITCUB", struct.pack("<2q", 1, len(cubins))]
    for name, c in cubins.items():
        texts = (name.encode(), c.symbol.encode(), c.image)
        facts = (c.num_warps, c.num_ctas, c.shared, c.global_scratch[0], c.profile_scratch[0], c.cooperative, c.pdl)
        parts += [_PACK.pack(*map(len, texts), *facts), *texts]
    return b"".join(parts)


def get_or_build_pack(jobs: Sequence[Job], cfg: Config) -> Built:
    """The file with all kernels, each under its job's name. Raises ToolchainError for the first that Triton refuses."""
    store = Store(Path(cfg.cache_dir) / "kernels", ".cubins")
    key = key_of(f"{job.name} {job.key()}" for job in jobs)
    found = store.find(key)
    if found is not None:
        return Built(found, True)
    cubins = pool().compile(jobs, cfg)
    return Built(store.put(key, pack({job.name: c for job, c in zip(jobs, cubins, strict=True)})), False)


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
    """Starts the pool's server where a GPU and Triton seem to be there, so that it has loaded the compiler by the time
    that the first kernel is written. Neither CUDA nor Triton is touched in this process."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if DEVICE.exists() and not hidden and find_spec("triton") is not None:
        with suppress(OSError):  # the first job will say so
            pool().start()


def _exactly(source: BinaryIO | Any, n: int) -> bytes:
    data: bytes = source.read(n)
    if len(data) < n:
        raise EOFError
    return data
