"""Runs scripts in processes of their own: a crash or a hang is an answer.

`python -m plait.tools.faults.trial` reads a line of JSON a script and writes a line with what
became of it. It loads torch and plait once, and forks a worker, another one where a script took the
last with it. `Trials` is the other side.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

RIGHT = "exit 0"
COMMAND: Sequence[str] = (sys.executable, "-m", "plait.tools.faults.trial")


class Trials:
    """A process that tries scripts. seconds: that one may take."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds = seconds

    def outcome(self, script: str) -> str:
        """ "exit N", "signal NAME", "hang", or "raises" with the kind of error."""
        asks, answers = self.process.stdin, self.process.stdout
        assert asks is not None and answers is not None, "the pipes are there"
        asks.write(json.dumps({"script": script, "seconds": self.seconds}) + "\n")
        asks.flush()
        return str(json.loads(answers.readline()))

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()


def plain_words(text: str) -> str:
    """The first words of an error, without names and numbers: what two failures have in common."""
    return " ".join(re.sub(r"[^A-Za-z. ]+", "", re.sub(r"\b\w*\d\w*\b", "", text)).split()[:8])


class Worker:
    """A fork of this process that runs scripts until one ends it."""

    def __init__(self) -> None:
        (asked, asks), (told, tells) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(asks)
            os.close(told)
            _work(os.fdopen(asked), tells)
        os.close(asked)
        os.close(tells)
        self.asks, self.answers = os.fdopen(asks, "w"), os.fdopen(told)

    def outcome(self, script: str, seconds: float) -> tuple[str, bool]:
        """What becomes of a script, and whether the worker is still there."""
        self.asks.write(json.dumps(script) + "\n")
        self.asks.flush()
        if not select.select([self.answers], [], [], seconds)[0]:
            os.kill(self.pid, signal.SIGKILL)
            self._end()
            return "hang", False
        if text := self.answers.readline():
            return str(json.loads(text)), True
        code = self._end()
        return (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"), False

    def _end(self) -> int:
        self.asks.close()
        self.answers.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _work(scripts: Iterable[str], tells: int) -> NoReturn:
    import torch

    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for line in scripts:
        torch._dynamo.reset()
        os.write(tells, (json.dumps(_run(json.loads(line))) + "\n").encode())
    os._exit(0)


def _run(script: str) -> str:
    module = sys.modules["__main__"] = ModuleType("__main__")  # Dynamo looks globals up there
    try:
        exec(compile(script, "<tried>", "exec"), vars(module))
    except SystemExit as end:
        return f"exit {end.code or 0}"
    except BaseException as error:  # noqa: BLE001 - whatever it raises is the answer
        return f"raises {type(error).__name__}: {plain_words(str(error))}"
    return RIGHT


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import plait.compile
    import plait.tools.faults.check  # noqa: F401

    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        worker = worker or Worker()
        outcome, lives = worker.outcome(request["script"], request["seconds"])
        worker = worker if lives else None
        out.write(json.dumps(outcome) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
