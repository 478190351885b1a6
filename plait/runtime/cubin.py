"""From Triton sources to cubins: a store on disk, and before it a pool of worker processes.

`start_early` may be called long before the first kernel exists: Triton is loaded while Dynamo still
traces. A worker that dies is replaced and its job tried once more; one that has nothing to do ends;
jobs that are equal are compiled once. Comes in: `Job`. Goes out: `Cubin`, everything that a launch
needs besides its arguments. Nothing here needs a GPU.
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
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from plait.config import Config
from plait.errors import ToolchainError
from plait.runtime.process import end_group
from plait.runtime.store import Built, Store, key_of
from plait.runtime.toolchain import ToolchainFailed, ToolchainMissing

WORKER = Path(__file__).parent / "triton_worker.py"
DEVICE = Path("/dev/nvidiactl")
MAX_WORKERS = 16
IDLE_S = 30.0
"""How long a worker waits for a job before it ends."""
SERVER_IDLE_S = 600.0
"""How long the process that they are forked from does without any."""
STOP_S = 2.0
"""How long that process may take to end when told to."""

_VARIABLES = (
    "TRITON_",
    "PTXAS_",
    "NVPTX_",
    "MLIR_",
    "LLVM_",
    "DISABLE_LLVM_",
    "DISABLE_PTXAS_",
    "DISABLE_MMA_",
)
_OTHER_VARIABLES = {
    "TRITON_HOME", "TRITON_INTERPRET", "TRITON_CACHE_MANAGER", "TRITON_CACHE_AUTOTUNING",
    "TRITON_PRINT_AUTOTUNING", "TRITON_LIBCUDA_PATH", "TRITON_STORE_BINARY_ONLY",
    "TRITON_DISABLE_LINE_INFO",
}  # fmt: skip

NUMBERS = {"enable_reflect_ftz": False}
"""The option that has Triton's library of functions keep subnormal numbers, as eager's kernels
do."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile. text: a module that defines function `name`. signature: Triton's type
    of each argument. aligned: positions of pointers that are multiples of 16. capability: such as
    90 for sm_90. ptx: its image is the assembler's input, which the driver of any newer GPU takes
    too. early: launches say that it waits by itself for what is ahead of it in its stream
    (programmatic dependent launch)."""

    name: str
    text: str
    signature: Mapping[str, str]
    capability: int
    num_warps: int
    num_stages: int = 1
    aligned: tuple[int, ...] = ()
    checks: bool = False
    ptx: bool = False
    early: bool = False

    def frame(self) -> str:
        """The job as a worker reads it, with what this process's environment tells the compiler."""
        options = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "debug": self.checks,
            "sanitize_overflow": False, "launch_pdl": self.early, **NUMBERS,
        }  # fmt: skip
        facts = {
            "name": self.name, "text": self.text, "signature": dict(self.signature),
            "capability": self.capability, "aligned": list(self.aligned), "options": options,
            "env": _variables(), "image": "ptx" if self.ptx else "cubin",
        }  # fmt: skip
        return json.dumps(facts, sort_keys=True)

    def key(self) -> str:
        """The name of its result in the store."""
        return _key(self.frame())


def _key(frame: str) -> str:
    named = (v for k, v in _variables().items() if k.endswith("_PATH"))
    return key_of((frame, *_compiler(), *map(_size, named)))


def _variables() -> dict[str, str]:
    """What of the environment may change the compiler's output."""
    return {
        k: v
        for k, v in os.environ.items()
        if k.startswith(_VARIABLES) and not k.endswith("_DIR") and k not in _OTHER_VARIABLES
    }


@lru_cache
def _compiler() -> tuple[str, ...]:
    """What compiles: Triton, what we make of it, and the assemblers that come with it."""
    spec = find_spec("triton")
    tools = Path((spec and spec.origin) or "").parent / "backends" / "nvidia" / "bin"
    return (
        triton_version(),
        WORKER.read_text(),
        *(_size(tools / name) for name in ("ptxas", "ptxas-blackwell")),
    )


def _size(file: str | Path) -> str:
    """Tells one version of a program from another, and is the same on every machine."""
    try:
        return str(Path(file).stat().st_size)
    except OSError:
        return ""


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel. symbol: its entry point. num_warps: after compilation, which may change
    it. shared: bytes of dynamic shared memory. global_scratch, profile_scratch: bytes a program and
    alignment of the two pointers that follow the arguments. cooperative, pdl: attributes that a
    launch must set. descriptors: how a launch makes tensor maps
    (triton_launch/src/specialize.h)."""

    image: bytes
    symbol: str
    num_warps: int
    num_ctas: int
    shared: int
    global_scratch: tuple[int, int]
    profile_scratch: tuple[int, int]
    cooperative: bool
    pdl: bool
    descriptors: str = ""

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
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()
        }
        return Cubin(image=image, **known)


@lru_cache
def triton_version() -> str:
    """The version of the installed Triton, without importing it. Raises ToolchainMissing if there
    is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ToolchainMissing("Triton is not installed", hint="pip install triton") from None


class _Server:
    """The process that workers are forked from."""

    def __init__(self, capability: int) -> None:
        # It finds Triton where this process does, and nothing of this process's folder. What tells
        # the compiler something comes with each job.
        env = {k: os.environ[k] for k in os.environ.keys() - _variables().keys()}
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        env.pop("TRITON_INTERPRET", None)
        self.folders = _scratch_folders()  # whoever lives longer removes them
        self.requests, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            facts = (handle, os.getpid(), capability, SERVER_IDLE_S, *self.folders)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), *map(str, facts)],
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
            except Exception as error:  # noqa: BLE001  (whatever it is, nothing sensible can be read any more)
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
            self.pid = int.from_bytes(_exactly(self.stream, 8), "little")
        self.socket.settimeout(seconds)
        return self.stream


def _ask(stream: BinaryIO | Any, task: _Task) -> Cubin:
    """A worker's answer. Raises ToolchainError if that is no, OSError or EOFError if it died."""
    data = task.frame.encode()
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()
    head = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    image = _exactly(stream, head["nbytes"])
    if "error" in head:
        hint = "PLAIT_DEBUG=4 writes the source"
        raise ToolchainError(f"Triton refused kernel {task.name}: {head['error']}", hint=hint)
    return Cubin.of(head["facts"], image)


@dataclass(frozen=True)
class _Task:
    """A job under way. name: of its kernel. frame: what a worker reads. key: of its entry in the
    store. seconds: that it may take."""

    name: str
    frame: str
    key: str
    store: Store
    seconds: int
    result: Future[Cubin] = field(default_factory=Future)


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

    def start(self, capability: int = 90) -> None:
        """Starts the server, if it is not there yet. capability: what it is likely to compile
        for."""
        with self._lock:
            if self._server is None:
                self._server = _Server(capability)

    def compile(self, jobs: Sequence[Job], cfg: Config) -> list[Cubin]:
        """The cubins of jobs, in their order: from the store, or compiled now, as many at once as
        there are workers.

        Raises ToolchainError with the compiler's words for the first job that it refuses.
        """
        return [result.result() for result in self.submit(jobs, cfg)]

    def submit(self, jobs: Sequence[Job], cfg: Config) -> list[Future[Cubin]]:
        """The same, not waited for."""
        store = Store.of(cfg, "cubins", ".cubin")
        return [self._submit(job, store, cfg.compiler_seconds) for job in jobs]

    def _submit(self, job: Job, store: Store, seconds: int) -> Future[Cubin]:
        frame = job.frame()
        task = _Task(job.name, frame, _key(frame), store, seconds)
        with self._lock:
            if task.key in self._pending:
                return self._pending[task.key]
            found = store.read(task.key)
            if found is not None:
                task.result.set_result(Cubin.from_bytes(found))
                return task.result
            if len(self._threads) < min(self.n_workers, len(self._pending) + 1):
                args = (self._jobs, job.capability)
                thread = threading.Thread(
                    target=self._serve, args=args, name="plait-triton", daemon=True
                )
                thread.start()
                self._threads.append(thread)
            self._pending[task.key] = task.result
            self._jobs.put(task)
        return task.result

    def _serve(self, jobs: queue.SimpleQueue[_Task | None], capability: int) -> None:
        """The life of a thread. Whatever happens to a task, whoever waits for it is told."""
        process = _Process(partial(self._fork, jobs, capability))
        while (task := self._next(jobs)) is not None:
            try:
                cubin = process.compile(task)
                task.store.put(task.key, cubin.to_bytes())  # whoever asks from now on finds it
                tell = partial(task.result.set_result, cubin)
            except BaseException as error:  # noqa: BLE001  (it is raised where the result is wanted)
                tell = partial(task.result.set_exception, error)
            with self._lock:
                del self._pending[task.key]
            tell()
        process.close()

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
            threads, self._threads = self._threads, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
        if server is not None:
            server.stop()
        for _ in threads:
            jobs.put(None)
        for thread in threads:
            thread.join()


_PACK = struct.Struct("<12q")
_PACK_VERSION = 2


def pack(cubins: Mapping[str, Cubin], texts: Mapping[str, str] | None = None) -> bytes:
    """Kernels by name, and texts by name, as one file; native/core/cubins.cpp says how and reads
    it. A kernel's descriptors are the text of its name."""
    parts = [b"PLAITCUB", struct.pack("<2q", _PACK_VERSION, len(cubins))]
    for name, c in cubins.items():
        words = (name.encode(), c.symbol.encode(), c.image)
        facts = (
            c.num_warps,
            c.num_ctas,
            c.shared,
            *c.global_scratch,
            *c.profile_scratch,
            c.cooperative,
            c.pdl,
        )
        parts += [_PACK.pack(*map(len, words), *facts), *words]
    texts = {
        **(texts or {}),
        **{name: c.descriptors for name, c in cubins.items() if c.descriptors},
    }
    parts.append(struct.pack("<q", len(texts)))
    for name, text in texts.items():
        pair = (name.encode(), text.encode())
        parts += [struct.pack("<2q", *map(len, pair)), *pair]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[dict[str, Cubin], dict[str, str]]:
    """The kernels and texts that pack was given. Raises ValueError for what is no such file, or
    damaged."""
    stream = BytesIO(data)

    def words(n: int) -> tuple[int, ...]:
        found = struct.unpack(f"<{n}q", _exactly(stream, 8 * n))
        if min(found) < 0:
            raise EOFError
        return found

    try:
        if _exactly(stream, 8) != b"PLAITCUB" or words(1) != (_PACK_VERSION,):
            raise ValueError("no kernel file of this version")
        cubins, texts = {}, {}
        for _ in range(*words(1)):
            sizes = words(12)
            name, symbol, image = (_exactly(stream, n) for n in sizes[:3])
            warps, ctas, shared, *scratch, cooperative, pdl = sizes[3:]
            cubins[name.decode()] = Cubin(
                image, symbol.decode(), warps, ctas, shared, (scratch[0], scratch[1]),
                (scratch[2], scratch[3]), bool(cooperative), bool(pdl),
            )  # fmt: skip
        for _ in range(*words(1)):
            name, text = (_exactly(stream, n) for n in words(2))
            texts[name.decode()] = text.decode()
        cubins = {name: replace(c, descriptors=texts.pop(name, "")) for name, c in cubins.items()}
    except (EOFError, UnicodeDecodeError):
        raise ValueError("a damaged kernel file") from None
    return cubins, texts


def get_or_build_pack(jobs: Sequence[Job], cfg: Config) -> Built:
    """The file with all kernels, each under its job's name. Raises ToolchainError for the first
    that Triton refuses."""
    store = Store.of(cfg, "kernels", ".cubins")
    key = key_of([f"pack {_PACK_VERSION}", *(f"{job.name} {job.key()}" for job in jobs)])
    found = store.find(key)
    if found is not None:
        return Built(found, True)
    cubins = pool().compile(jobs, cfg)
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


def _exactly(source: BinaryIO | Any, n: int) -> bytes:
    data: bytes = source.read(n)
    if len(data) < n:
        raise EOFError
    return data
