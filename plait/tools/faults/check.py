"""What scripts call to show what is wrong with one function: they exit with what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from plait.config import Config
from plait.tools.faults.recorded import Recording, copied, load_recorded, record
from plait.tools.faults.search import wrong_result

SECONDS, ROUNDS = 0.4, 3
"""Of calls that are timed, of both sides; after each round it may be seen that plait is not slower.
"""


def wrong_number(
    fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None
) -> int:
    """1, and what it is, if a result of the compiled fn is wrong; else 0, as where eager fails."""
    if not _runs(fn, args):
        return 0
    for graph, cfg in record(fn, args, {}, Recording(options), dynamic=False):
        if wrong := wrong_result(graph, cfg):
            print(wrong.text)
            return 1
    print("nothing is wrong")
    return 0


def wrong_graph(file: str, options: Mapping[str, Any] | None = None) -> int:
    """1 if a result of the graph that a file holds is wrong; else 0, as where operators are in it
    that this process does not have."""
    cfg, graph = Config.from_env().with_options(options), load_recorded(Path(file))
    try:
        graph.captured()
    except ValueError:
        return 0
    return int(wrong_result(graph, cfg) is not None)


def _runs(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether eager can."""
    try:
        fn(*copied(args))
    except Exception as error:  # noqa: BLE001 - whatever an operator raises
        print(f"eager fails: {error}")
        return False
    return True


def slower(
    fn: Callable[..., Any],
    *args: Any,
    factor: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> int:
    """1 if the compiled fn takes more than so many times as long as eager; else 0. Both take turns,
    and of each the fastest call counts. Whatever else the machine does makes calls slower, so what
    seems to be slow is given more time to be fast."""
    if not _runs(fn, args):
        return 0
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", dynamic=False, options=dict(options or {}))
    devices = {x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
    waits = [d for d in devices if torch.accelerator.is_available() and d.index is not None]
    best = [float("inf"), float("inf")]
    with torch.no_grad():
        for run in (fn, compiled, compiled):
            run(*args)
        for _ in range(ROUNDS):
            end = time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                for k, run in enumerate((fn, compiled)):
                    start = time.perf_counter()
                    run(*args)
                    for d in waits:
                        torch.accelerator.synchronize(d)
                    best[k] = min(best[k], time.perf_counter() - start)
            if best[1] <= factor * best[0]:
                break
    eager, plait = (s * 1e6 for s in best)
    print(f"plait {plait:.1f} us, eager {eager:.1f} us")
    return int(plait > factor * eager)
