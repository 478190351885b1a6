"""Compiles Triton kernels in a process of its own: jobs come in over stdin, cubins go out over stdout.

Run as a script by `plait/runtime/cubin.py`, with the number of its parent process; it imports Triton and nothing of
plait or torch. A frame is its length as 8 bytes, little-endian, then a JSON object; an answer's frame is followed by
the cubin's bytes. It ends when its input ends or when its parent is gone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

PARENT_CHECK_S = 2.0


def load_module(name: str, text: str, folder: Path) -> ModuleType:
    """The module of that text, imported from a file in `folder`, from which Triton reads a function's source."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_job(job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    """What a launcher needs to know of a kernel, and its cubin."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_module(job["name"], job["text"], folder)
    aligned = {(k,): [["tt.divisibility", 16]] for k in job["aligned"]}
    source = ASTSource(getattr(module, job["name"]), job["signature"], {}, aligned)
    target = GPUTarget("cuda", job["capability"], 32)
    made = triton.compile(source, target, job["options"])
    m = made.metadata
    facts = {
        "symbol": m.name,
        "num_warps": m.num_warps,
        "num_ctas": m.num_ctas,
        "shared": m.shared,
        "global_scratch": [m.global_scratch_size, m.global_scratch_align],
        "profile_scratch": [m.profile_scratch_size, m.profile_scratch_align],
        "cooperative": bool(m.launch_cooperative_grid),
        "pdl": bool(m.launch_pdl),
    }
    return facts, made.asm["cubin"]


def send(out: BinaryIO, answer: dict[str, Any], payload: bytes = b"") -> None:
    """Writes one frame and what follows it."""
    head = json.dumps({**answer, "nbytes": len(payload)}).encode()
    out.write(len(head).to_bytes(8, "little") + head + payload)
    out.flush()


def receive(source: BinaryIO) -> dict[str, Any] | None:
    """Reads one frame; None at the end of the input."""
    size = source.read(8)
    if len(size) < 8:
        return None
    data = source.read(int.from_bytes(size, "little"))
    frame: dict[str, Any] = json.loads(data)
    return frame


def watch_parent(parent: int) -> None:
    """Ends this process when its parent is gone: a forked sibling may hold the pipe open."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(0)


def main() -> None:
    """Serves until the input ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints must not get between the answers
    threading.Thread(target=watch_parent, args=(int(sys.argv[1]),), daemon=True).start()
    import triton  # noqa: F401  (while the parent still makes the first job)

    with tempfile.TemporaryDirectory(prefix="plait-triton-") as folder:
        while (job := receive(sys.stdin.buffer)) is not None:
            try:
                facts, cubin = compile_job(job, Path(folder))
            except Exception as error:  # noqa: BLE001  (it is handed to the parent, which raises it)
                last = "".join(traceback.format_exception_only(error)).strip()
                send(out, {"error": last, "trace": traceback.format_exc()})
            else:
                send(out, {"facts": facts}, cubin)


if __name__ == "__main__":
    main()
