"""The first compiles of a process, by several threads at once: names, numbers and shared caches."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parent.parent
ROUNDS = """
    import os, sys, threading, traceback
    import torch, torch._dynamo
    {imported}

    def body(k):
        if k == 0:
            return lambda x: torch.softmax(x, -1)
        return lambda x: torch.softmax(x * (k + 1), -1) + k

    bodies = [body(k) for k in range(8)]
    bodies[7] = bodies[6]  # the same function, twice at once
    x = torch.arange(12.0).view(3, 4)
    want = [f(x) for f in bodies]

    def one_round():
        wrong, start = [], threading.Barrier(8)
        def work(k):
            try:
                start.wait()
                got = torch.compile(bodies[k], backend="plait")(x)
                torch.testing.assert_close(got, want[k])
            except BaseException:
                wrong.append(traceback.format_exc())
        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        print(*wrong, file=sys.stderr, flush=True)
        return len(wrong)

    for n in range({rounds}):  # each in a process in which nothing was ever compiled
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                failed = one_round()
            finally:
                os._exit(failed)
        assert os.waitpid(child, 0)[1] == 0, f"round {{n}}"
"""


@pytest.mark.stress
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("imported", ["", "import plait"], ids=["unknown", "imported"])
def test_eight_threads_compile_first(imported: str, rounds: int, tmp_path: Path) -> None:
    """They look the back end up, load it and compile at once, and share a cache that is empty."""
    code = textwrap.dedent(ROUNDS).format(imported=imported, rounds=rounds)
    env = {**os.environ, "PLAIT_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = warm.run("-c", code, env=env, timeout=600)  # torch is there, and nothing of plait
    assert done.returncode == 0, done.stderr[-4000:]
