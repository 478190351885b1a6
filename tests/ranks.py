"""Runs a module of tests as several ranks."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parent.parent


def passes(module: str, processes: int, meet: Path, *more: str) -> None:
    """Every rank says that it passed. The module gets its rank, their number, a file to meet by,
    and more."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    with ExitStack() as files:
        nothing = files.enter_context(Path(os.devnull).open())
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        ranks = [
            warm.start(
                ["-m", module, str(k), str(processes), meet, *more], env, ROOT, nothing, file, file
            )
            for k, file in enumerate(said)
        ]
        try:
            codes = [rank.wait(600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        told = [(file.seek(0), file.read())[1] for file in said]
    assert not any(codes) and all("passed\n" in t for t in told), "\n".join(told)
