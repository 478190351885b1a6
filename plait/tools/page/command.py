"""`plait.report(path)` and `plait report -o PAGE -- COMMAND ...`: a page of all that is compiled in
a block, or by a command and the processes that it starts.

A process that is reported on appends a line to a file of its own for each thing that happens, so
that nothing is lost however it ends; the page is written when the command has ended, which then
ends this process as it ended itself.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from plait.errors import UserError, raised_at, warn_once
from plait.tools.page.collect import Collector, Event, assemble, told
from plait.tools.page.render import page
from plait.tools.report import count


@contextmanager
def report(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a page of what all threads of this process compile inside the block, however it ends.

    Inside, nothing starts warm, and each program times its kernels at its first call, on copies of
    its inputs. Raises UserError where there is no such folder."""
    _check(Path(path))
    events: list[Event] = []
    collector = Collector(events.append)
    collector.start()
    note = ""
    try:
        yield
    except BaseException as error:
        note = f"ended by {type(error).__name__}"
        raise
    finally:
        collector.stop()
        Path(path).write_text(page(assemble([*map(told, events)], note)), encoding="utf-8")


def follow(folder: str) -> None:
    """From now on this process tells a `plait report` what it compiles: a line of JSON for each
    event, in a file named by the process's number (that of a fork, in a fork)."""

    lock = threading.Lock()

    def write(event: Event) -> None:
        try:
            line = json.dumps(asdict(told(event))) + "\n"
            with lock, (Path(folder) / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line)
        except Exception as error:  # noqa: BLE001  (who is looked at must not fail for it)
            warn_once(f"plait report: {type(error).__name__}: {error} ({raised_at(error)})")

    collector = Collector(write)
    collector.start(anew=False)
    atexit.register(collector.stop)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait report",
        description="Runs a command and writes a page of HTML about all that plait compiles in it.",
    )
    parser.add_argument("-o", dest="page", type=Path, default=Path("report.html"), metavar="PAGE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the data, too")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    given = parser.parse_args(arguments)
    command = given.command[given.command[:1] == ["--"] :]
    if not command:
        parser.error("report needs a command")
    for file in filter(None, (given.page, given.json)):
        _check(file)
    with tempfile.TemporaryDirectory() as folder:
        status = run(command, {**os.environ, "PLAIT_REPORT_TO": folder})
        events = list(_events(Path(folder)))
    ended = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    data = assemble(events, f"{shlex.join(command)}: {ended}")
    given.page.write_text(page(data), encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(f"plait: {given.page} tells of {count(len(data['graphs']), 'graph')}", file=sys.stderr)
    if status < 0:
        with suppress(OSError):  # SIGKILL has nothing but its default
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _events(folder: Path) -> Iterator[Event]:
    """What processes told, but for a line that one was killed in the middle of."""
    for file in sorted(folder.glob("*.jsonl"), key=lambda f: int(f.stem)):
        with file.open(encoding="utf-8") as lines:
            yield from (Event(**json.loads(line)) for line in lines if line.endswith("\n"))


def _check(file: Path) -> None:
    if not file.absolute().parent.is_dir():
        raise UserError(f"there is no folder {file.absolute().parent}", hint="make it first")


def run(command: Sequence[str], env: dict[str, str]) -> int:
    """Runs a command to its end; its exit status, or a signal's number below zero. An interruption
    by the keyboard goes to both processes, and only the command's counts; others are passed on."""
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        hint = f"; try: python {shlex.join(command)}" if command[0].endswith(".py") else ""
        sys.exit(f"plait: {command[0]}: {error.strerror}{hint}")

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
