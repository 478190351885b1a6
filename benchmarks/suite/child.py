"""Processes that measure, and the devices that they are given."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import records as book

Figures = dict[str, Any]


class Child:
    """Processes one after the other that share caches of nobody else's. Each reads commands, a JSON
    list a line, and says events, a JSON object a line, which come to `events`, and None at its end.

    words: the module and its arguments. threads: of a compiler. slot: which GPU. env: more.
    """

    events: queue.Queue[Figures | None]
    process: subprocess.Popen[str]

    def __init__(
        self, words: Sequence[str], device: str, slot: int, threads: int, **env: str
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="plait-worker-"))
        self.command = [sys.executable, "-m", *words]
        self.log = (self.folder / "log").open("a+")
        self.env = os.environ | {
            "PLAIT_CACHE_DIR": str(self.folder / "plait"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "LOCAL_WORLD_SIZE": str(max(1, (os.cpu_count() or 1) // threads)),  # plait's too
            "OMP_NUM_THREADS": str(cpu_threads()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if device == "cuda":
            self.env |= {"CUDA_VISIBLE_DEVICES": gpus()[slot]}
        self.env |= env
        self.start()

    def start(self) -> None:
        """The first process, or another when the last has ended."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=self.env,
            cwd=book.ROOT,
            start_new_session=True,
        )
        self.events = queue.Queue()
        threading.Thread(target=_listen, args=(self.process, self.events), daemon=True).start()

    def send(self, *command: Any) -> None:
        assert self.process.stdin is not None, "a worker's input is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def why(self) -> str:
        """Waits for the end of a process, and says how it ended."""
        return f"({self.process.wait()}): {self.last_words()}"

    def last_words(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines()]
        lines = [line for line in lines if line and not line.startswith("USDT")]
        return " | ".join(lines[-4:])[-600:] or "no message"

    def signal(self, number: int) -> None:
        """To the process and all that it started."""
        for pid in family(self.process.pid) if self.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Ends the process and all that it started. Caches stay."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left behind if it died itself
        self.process.wait()

    def close(self) -> None:
        """Ends the process for good."""
        self.end()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _listen(process: subprocess.Popen[str], events: queue.Queue[Figures | None]) -> None:
    assert process.stdout is not None, "a worker's output is a pipe"
    for line in process.stdout:
        events.put(json.loads(line))
    events.put(None)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found


def cpu_threads() -> int:
    """Threads of a model on a CPU: few, as the processes that compile beside it have as many."""
    return min(4, os.cpu_count() or 1)


def devices(kind: str) -> tuple[str, int]:
    """The name of the devices, and how many there are."""
    if kind == "cpu":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return f"CPU: {cpu_threads()} x {names[0] if names else platform.processor()}", 1
    return _asked()[0], len(gpus())


def gpus() -> list[str]:
    """The GPUs that are used, as CUDA names them: those of CUDA_VISIBLE_DEVICES, or all."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown.split(",") if shown else [str(k) for k in range(len(_asked()))]


@functools.cache
def _asked() -> list[str]:
    """The names of all GPUs. CUDA is not asked: a context here would take memory and time."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name.strip() for name in found.splitlines()]
