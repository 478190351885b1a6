"""The goals on a GPU, each computed from one group's results as claims.py does on a CPU.

A goal whose programs or peers did not run is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from typing import Any

from claims import MIB, judge

Result = dict[str, Any]
Claim = tuple[str, float, float, str]
AS_EAGER = 1.25
"""How much farther from the float64 result than eager's a result may be: both round, at different
places."""


class Results:
    """Figures of a group, by program, peer and name."""

    def __init__(self, results: Result) -> None:
        self.results = results

    def get(self, case: str, peer: str, key: str) -> float | None:
        value = self.results.get(case, {}).get(peer, {}).get(key)
        return None if value is None else float(value)

    def least(self, case: str, peers: tuple[str, ...], key: str) -> float | None:
        return min((v for p in peers if (v := self.get(case, p, key)) is not None), default=None)


def check_gpu_claims(group: str, results: Result) -> list[Result]:
    """One row a goal that can be judged."""
    return judge(claim for claim in GOALS[group](Results(results)) if None not in claim)


def _launch(r: Results) -> Iterator[tuple[str, float | None, float | None, str]]:
    yield (
        "chain, CPU a kernel above Dynamo's guards, in bare launches",
        r.get("chain", "plait", "own_bare"),
        1.12,
        "x",
    )
    yield "chain, CPU a call", r.get("chain", "plait", "host_us"), 133, "µs"
    kernels = r.get("chain", "inductor", "kernels")
    yield "chain, kernels, against Inductor's", r.get("chain", "plait", "launches"), kernels, ""
    yield "chain, first call", r.get("chain", "plait", "first_s"), 3.0, "s"
    yield (
        "chain by a CUDA graph, CPU a call above guards",
        r.get("chain", "plait-graphs", "own_us"),
        4.0,
        "µs",
    )
    yield "sum128, first call", r.get("sum128", "plait", "first_s"), 1.0, "s"
    for case in ("sum128", "gate", "tiny-mlp"):
        eager = r.get(case, "eager", "host_us")
        for peer in ("plait", "plait.compile"):
            yield (
                f"{case}, {peer}, CPU a call, against eager's",
                r.get(case, peer, "host_us"),
                eager,
                "µs",
            )


def _steady(r: Results) -> Iterator[tuple[str, float | None, float | None, str]]:
    ratios = []
    for case in r.results:
        for ours, theirs, mode in (
            ("plait", "inductor", ""),
            ("plait-graphs", "inductor-graphs", " by CUDA graphs"),
        ):
            us, best = r.get(case, ours, "us"), r.least(case, ("eager", theirs), "us")
            if us and best:
                yield f"{case}{mode}, against the better of eager and Inductor", us / best, 1.0, "x"
        us, peer = r.get(case, "plait", "us"), r.get(case, "inductor", "us")
        if us and peer:
            ratios.append(us / peer)
    if len(ratios) > 1:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        yield "geometric mean against Inductor", mean, 1 / 1.15, "x"
    for case in r.results:
        for peer in ("plait", "plait-graphs"):
            error, eager_error = r.get(case, peer, "error"), r.get(case, peer, "eager_error")
            if error is not None and eager_error:
                yield f"{case}, {peer}: error, in eager's", error / eager_error, AS_EAGER, "x"
        ours, eager = r.get(case, "plait", "peak_bytes"), r.get(case, "eager", "peak_bytes")
        if ours and eager:
            yield f"{case}: memory peak, against eager's", ours / MIB, eager * 1.02 / MIB + 1, "MiB"
        ours, graphs = (
            r.get(case, "plait", "reserved_bytes"),
            r.get(case, "plait-graphs", "reserved_bytes"),
        )
        if ours and graphs:
            yield (
                f"{case}: memory reserved by CUDA graphs, against none",
                graphs / MIB,
                ours * 1.1 / MIB,
                "MiB",
            )


GOALS = {"launch": _launch, "models": _steady, "train": _steady}
