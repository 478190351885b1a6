"""Compiles Triton kernels outside of the process that wants them. Run as a script by
`plait/runtime/cubin_pool.py`, with a socket's number, the number of its parent process, a GPU
as JSON, how long it does without workers in seconds, and empty folders.

It imports Triton and nothing of plait or torch, compiles a first small kernel, and then forks a
worker for every socket that comes in over its own: a worker is ready in milliseconds, and what all
need lies in memory once. A worker leads a process group; its number goes out first, as 8 bytes.
Then jobs come in over the worker's socket and cubins go out: a frame is its length as 8 bytes,
little-endian, then a JSON object; an answer's frame is followed by the cubin's bytes. A worker ends
when its socket is closed or this process is gone; this process ends when its socket is closed, its
parent is gone or it was not needed for long.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

PARENT_CHECK_S = 2.0
ROOM = 16 << 20
"""Bytes that a folder must have free for a job."""
_PR_SET_PDEATHSIG = 1

# Lines would be those of a file that is gone.
_OURS = {"TRITON_DISABLE_LINE_INFO": "1"}

# Everything that compilers load when first used: LLVM's target, libdevice, the versions of ptxas.
_FIRST = """import triton
import triton.language as tl
from triton.language.extra.BACKEND import libdevice

@triton.jit
def first(p0, s0):
    x = tl.arange(0, 128)
    tl.store(p0 + x, tl.sum(libdevice.exp(tl.load(p0 + x, x < s0)), 0), x < s0)
"""


def load_module(name: str, text: str, folder: Path) -> ModuleType:
    """The module of that text, imported from a file in `folder`, from which Triton reads a
    function's source."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_job(job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    """What a launcher needs to know of a kernel, and its image."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_module(job["name"], job["text"], folder)
    aligned = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
    source = ASTSource(getattr(module, job["name"]), job["signature"], {}, aligned)
    target = GPUTarget(*job["target"])
    # Triton reads this variable once, when loaded.
    made = triton.compile(
        source, target, {"ptx_options": os.environ.get("PTXAS_OPTIONS"), **job["options"]}
    )
    image = made.asm[job["image"]]
    text = image if isinstance(image, bytes) else image.encode() + b"\0"  # as the driver wants it
    return facts_of(made.metadata), text


def facts_of(m: Any) -> dict[str, Any]:
    """What a launcher needs of the compiler's metadata."""
    return {
        "symbol": m.name,
        "num_warps": m.num_warps,
        "num_ctas": m.num_ctas,
        "shared": m.shared,
        # AMD's kernels want none.
        "global_scratch": [
            getattr(m, "global_scratch_size", 0),
            getattr(m, "global_scratch_align", 1),
        ],
        "profile_scratch": [m.profile_scratch_size, m.profile_scratch_align],
        "cooperative": bool(m.launch_cooperative_grid),
        "pdl": bool(getattr(m, "launch_pdl", False)),
    }


def answer(job: dict[str, Any], folders: Sequence[Path]) -> tuple[dict[str, Any], bytes]:
    """What goes out for a job: its cubin, or what the compiler says against it. The folders are
    empty afterwards, and the environment is what it was."""
    env = dict(os.environ)
    try:
        with tempfile.TemporaryDirectory(dir=roomy(folders), ignore_cleanup_errors=True) as name:
            tempfile.tempdir = name
            # The caller keeps what is made: no other stages on disk.
            only_last = str(int(job["image"] != "ptx"))
            ours = {
                **_OURS,
                "TRITON_STORE_BINARY_ONLY": only_last,
                "TRITON_CACHE_DIR": f"{name}/cache",
            }
            os.environ.update({**job["env"], **ours})
            facts, cubin = compile_job(job, Path(name))
    except Exception as error:  # noqa: BLE001  (it is handed to the process that asked, which raises it)
        return {"error": said_by(error), "trace": traceback.format_exc()}, b""
    finally:
        os.environ.clear()
        os.environ.update(env)
    return {"facts": facts}, cubin


def said_by(error: BaseException) -> str:
    """What an error says, and the one at its root: Triton wraps what it finds in a function in one
    error for each call on the way there."""
    said = "".join(traceback.format_exception_only(error)).strip()
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    more = "".join(traceback.format_exception_only(root)).strip()
    return said if root is error else f"{said}\nbecause of {more}"


def roomy(folders: Sequence[Path]) -> Path:
    """The first that has room for a job, or the last."""
    return next((f for f in folders if shutil.disk_usage(f).free >= ROOM), folders[-1])


def receive(source: BinaryIO | Any) -> dict[str, Any] | None:
    """Reads one frame; None at the end of the input."""
    size = source.read(8)
    if len(size) < 8:
        return None
    data = source.read(int.from_bytes(size, "little"))
    frame: dict[str, Any] = json.loads(data)
    return frame


def work(jobs: socket.socket, folders: Sequence[Path]) -> None:
    """A worker: says which process group it leads, and answers jobs until there are no more."""
    with jobs.makefile("rwb") as stream:
        stream.write(os.getpid().to_bytes(8, "little"))
        stream.flush()
        while (job := receive(stream)) is not None:
            head, cubin = answer(job, folders)
            text = json.dumps({**head, "nbytes": len(cubin)}).encode()
            stream.write(len(text).to_bytes(8, "little") + text + cubin)
            stream.flush()


def prepare(target: Sequence[Any], image: str, folders: Sequence[Path]) -> None:
    """Loads the compiler and all that it loads when first used. What fails here will fail with a
    job too, and be told."""
    try:
        import triton.runtime.cache

        # The caller has the version of Triton in its keys: no second one, which is a hash of all of
        # Triton's files.
        triton.runtime.cache.triton_key = lambda: triton.__version__
    except ImportError:
        return
    options = {"num_warps": 4, "num_stages": 1}
    signature = {"p0": "*fp32", "s0": "i64"}
    job = {
        "name": "first", "text": _FIRST.replace("BACKEND", target[0]),
        "signature": signature, "target": target, "image": image, "aligned": [0],
        "options": options, "env": {},
    }  # fmt: skip
    answer(job, folders)


def serve(requests: socket.socket, parent: int, idle_s: float, folders: Sequence[Path]) -> None:
    """Forks a worker for every socket that comes in, and ends them with itself."""
    server, workers = os.getpid(), set[int]()
    end = time.monotonic() + idle_s
    try:
        while os.getppid() == parent and time.monotonic() < end:
            # The end of the input may never be seen: what the parent forked holds the socket open.
            ready, _, _ = select.select([requests], [], [], PARENT_CHECK_S)
            workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
            if workers or ready:
                end = time.monotonic() + idle_s
            if not ready:
                continue
            _, handles, _, _ = socket.recv_fds(requests, 1, 1)
            if not handles:
                return
            with socket.socket(fileno=handles[0]) as jobs:
                child = os.fork()
                if child == 0:
                    be_worker(jobs, server, folders)
                with suppress(OSError):  # it does so too: whoever is first
                    os.setpgid(child, child)
                workers.add(child)
    finally:
        for pid in workers:
            os.killpg(pid, signal.SIGKILL)  # an assembler that it runs too
            os.waitpid(pid, 0)


def be_worker(jobs: socket.socket, server: int, folders: Sequence[Path]) -> NoReturn:
    """The life of a forked process."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            work(jobs, folders)
    finally:
        os._exit(0)  # what the server has open is not its own


def main() -> None:
    """Serves until the parent wants no more."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    handle, parent, gpu, idle_s = sys.argv[1:5]
    folders = [Path(f) for f in sys.argv[5:]]
    try:
        *target, image = json.loads(gpu)
        prepare(target, image, folders)
        gc.freeze()  # workers share what is there
        serve(socket.socket(fileno=int(handle)), int(parent), float(idle_s), folders)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
