"""One process of `benchmarks/cost_of_tools.py`: prints its figures as JSON.

Runs with the plait of another commit, too, so it takes nothing else from this tree.
Usage: python cost_worker.py TREE, with TREE on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS, CALLS = 1000, 20  # rounds that are shorter than the slice of a busy machine


def loaded() -> int:
    """How many modules of plait are there."""
    return sum(name.partition(".")[0] == "plait" for name in sys.modules)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of all threads' CPU time, and of the clock."""
    start, cpu = time.perf_counter_ns(), time.process_time_ns()
    run()
    return (time.process_time_ns() - cpu) / 1e6, (time.perf_counter_ns() - start) / 1e6


def call_ns(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Nanoseconds a call, of the fastest of many short rounds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter_ns() - start) / CALLS)
    return best


def main() -> None:
    import torch
    import torch._dynamo  # both trees load it for a compile

    # An editable installation has a finder of its own, which would be asked first.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]

    torch.set_num_threads(1)
    found = {}

    def load() -> None:
        import plait

        assert Path(plait.__file__).is_relative_to(Path(sys.argv[1]).resolve()), plait.__file__

    found["import_cpu_ms"], found["import_ms"] = timed(load)
    found["import_modules"] = loaded()
    import plait

    nn = torch.nn
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="plait")
        found["first_cpu_ms"], found["first_ms"] = timed(lambda: compiled(x))
        found["compile_modules"] = loaded()
        found["call_ns"] = call_ns(lambda: compiled(x))
    direct = plait.compile(model, (x,))
    found["direct_ns"] = call_ns(lambda: direct(x))
    compiled(x).sum().backward()
    found["training_ns"] = call_ns(lambda: compiled(x).sum().backward(), ROUNDS // 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
