"""From Triton sources to cubins: a store on disk, and before it a pool of worker processes.

`CubinPool.start` may be called long before the first kernel exists: workers import Triton while Dynamo still traces.
A worker that dies is replaced and its job tried once more; jobs that are equal are compiled once. Comes in: `Job`. Goes
out: `Cubin`, everything that a launch needs besides its arguments. Nothing here needs a GPU.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime.store import Built, Store, key_of
from plait.runtime.toolchain import ToolchainMissing

WORKER = Path(__file__).parent / "triton_worker.py"
MAX_WORKERS = 8


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


def triton_version() -> str:
    """The version of the installed Triton, without importing it. Raises ToolchainMissing if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ToolchainMissing("Triton is not installed", hint="pip install triton") from None


class _Worker:
    """One worker process and the thread that talks to it."""

    def __init__(self, jobs: queue.SimpleQueue[_Task | None]) -> None:
        self.jobs = jobs
        self.process = self._spawn()
        self.thread = threading.Thread(target=self._serve, name="plait-triton", daemon=True)
        self.thread.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The worker finds Triton where this process does, and nothing of this process's folder.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,  # the user's Ctrl-C is not for it
        )

    def _serve(self) -> None:
        while (task := self.jobs.get()) is not None:
            answer = self._ask(task.job)
            if answer is None:  # it died: once more, in a new one
                self.process = self._spawn()
                answer = self._ask(task.job)
            if answer is None:
                self.process = self._spawn()
            task.finish(answer)

    def _ask(self, job: Job) -> Cubin | str | None:
        """The worker's answer, the error that it reports, or None if it died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        data = json.dumps(job.frame()).encode()
        try:
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)
            self.process.stdin.flush()
            head = json.loads(_exactly(self.process.stdout, _length(self.process.stdout)))
            image = _exactly(self.process.stdout, head["nbytes"])
        except (OSError, EOFError):
            self.process.wait()
            return None
        return head["error"] if "error" in head else Cubin.of(head["facts"], image)

    def stop(self) -> None:
        """Ends the process; a job that it is at is lost."""
        self.process.kill()
        self.process.wait()


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
    """Worker processes that compile kernels, started when first needed. Threads may share one pool."""

    def __init__(self, n_workers: int = 0) -> None:
        self.n_workers = n_workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._jobs: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._pending: dict[str, Future[Cubin]] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the workers, if they are not there yet."""
        with self._lock:
            while len(self._workers) < self.n_workers:
                self._workers.append(_Worker(self._jobs))

    def compile(self, jobs: Sequence[Job], cfg: Config) -> list[Cubin]:
        """The cubins of jobs, in their order: from the store, or compiled now, as many at once as there are workers.

        Raises ToolchainError with the compiler's words for the first job that it refuses.
        """
        store = Store(Path(cfg.cache_dir) / "cubins", ".cubin")
        return [result.result() for result in [self._submit(job, store) for job in jobs]]

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
        self.start()
        self._jobs.put(task)
        return task.result

    def stop(self) -> None:
        """Ends the workers. The pool starts new ones when it is used again."""
        with self._lock:
            workers, self._workers = self._workers, []
        for _ in workers:
            self._jobs.put(None)
        for w in workers:
            w.stop()


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
        mine = _pools[os.getpid()] = CubinPool()
        atexit.register(mine.stop)
    return mine


def _length(source: BinaryIO | Any) -> int:
    return int.from_bytes(_exactly(source, 8), "little")


def _exactly(source: BinaryIO | Any, n: int) -> bytes:
    data: bytes = source.read(n)
    if len(data) < n:
        raise EOFError
    return data
