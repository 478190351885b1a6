"""Worker processes that run programs: a crash or a hang is an answer, never the end of the run.

`Worker.ask` gives the answer of worker.py, or {"kind": "crash"} and {"kind": "hang"}, after which a
new process takes over. So it does where a program lost the device, and after some hundred programs
anyway.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = 400  # of one process
INTERPRETED = "interpreted"
"""The device of programs that are compiled for a GPU and run on a CPU, by tests/interpreted.py."""


class Worker:
    def __init__(
        self, seconds: float = 90.0, root: Path = ROOT, cache: str = "", device: str = ""
    ) -> None:
        """seconds: that one program may take. root: what `plait` and `tests` are imported from."""
        self.seconds, self.root, self.cache = seconds, root, cache
        self.interpreted = device == INTERPRETED
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this
        self.process: warm.Process | None = None
        self.n = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What became of one program."""
        p = self._process()
        self.asks.write(json.dumps(request) + "\n")
        self.asks.flush()
        self.n += 1
        seconds = self.seconds + (60 if self.n == 1 else 0)
        ready, _, _ = select.select([self.answers], [], [], seconds)
        text = self.answers.readline() if ready else ""
        if text:
            found: dict[str, Any] = json.loads(text)
            if found.pop("last"):
                self.close()
            return found
        if ready:
            code = p.wait()
            self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(self.errors.tell() - 1500, 0))
            self.close()
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            return {
                "kind": "crash",
                "what": f"crash: {name}\n{self.errors.read()}",
                "classes": [],
                "program": "",
            }
        self.close()
        return {"kind": "hang", "what": f"hang: {seconds} s", "classes": [], "program": ""}

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.asks, self.answers):
                with suppress(BrokenPipeError):
                    pipe.close()
            self.process = None

    def _process(self) -> warm.Process:
        if self.process is not None and self.n >= PROGRAMS:
            self.close()
        if self.process is None:
            env = {
                **os.environ,
                "PYTHONPATH": str(self.root),
                "PLAIT_VERIFY": "1",
                "PLAIT_WARM_START": "0",
                "PYTHONFAULTHANDLER": "1",
            }
            env.setdefault("PLAIT_OPT_LEVEL", "1")
            env["OMP_NUM_THREADS"] = "1"
            if self.cache:
                env["PLAIT_CACHE_DIR"] = self.cache
            if self.interpreted:
                env["TRITON_INTERPRET"] = "1"
                env["PYTHONPATH"] += os.pathsep + str(Path(sys.prefix) / "triton")
            (asked, asks), (answers, answered) = os.pipe(), os.pipe()
            self.asks, self.answers = os.fdopen(asks, "w"), os.fdopen(answers)
            module = ["-m", "tests.fuzz.worker"]
            self.process = warm.start(module, env, self.root, asked, answered, self.errors)
            os.close(asked)
            os.close(answered)
            self.n = 0
        return self.process
