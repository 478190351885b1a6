"""The goals that plait sets itself, each computed from one run's results: what was measured, the
limit, met or not.

A goal whose programs or peers did not run in this run is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Result = dict[str, Any]
INDUCTORS = ("inductor", "inductor-cpp", "inductor-freeze")
FROZEN = ("openvino", "onnxruntime", "inductor-freeze")
"""Peers that take weights for constants, as plait-freeze does."""
MIB = 2**20


def check_claims(results: Result) -> list[Result]:
    """One row a goal that can be judged."""
    return judge(_claims(results))


def judge(claims: Iterable[tuple[str, float, float, str]]) -> list[Result]:
    """Rows of (goal, measured, limit, unit): met where the measure is at most the limit."""
    return [
        {
            "claim": text,
            "measured": f"{value:.2f} {unit}",
            "limit": f"{limit:.2f} {unit}",
            "verdict": "met" if value <= limit else "MISSED",
        }
        for text, value, limit, unit in claims
    ]


def _claims(results: Result) -> Iterator[tuple[str, float, float, str]]:
    def get(case: str, peer: str, key: str = "us") -> float | None:
        value = results.get(case, {}).get(peer, {}).get(key)
        return None if value is None else float(value)

    def best(case: str, peers: tuple[str, ...]) -> float | None:
        found = [v for p in peers if (v := get(case, p)) is not None]
        return min(found, default=None)

    fixed: tuple[tuple[str, float | None, Callable[[], float | None], str], ...] = (
        ("first graph ever, cold cache (sum8)", get("sum8", "plait", "first_s"), lambda: 1.0, "s"),
        ("tf6, compile + first call, cold", get("tf6", "plait", "first_s"), lambda: 1.4, "s"),
        (
            "tiny-mlp through plait.compile, a call",
            get("tiny-mlp", "plait.compile"),
            lambda: 1.5,
            "µs",
        ),
    )
    for text, value, limit, unit in fixed:
        bound = limit()
        if value is not None and bound is not None:
            yield text, value, bound, unit
    for case, floor, limit_us, text in (
        ("sum8", "guards", 1.2, "own cost a call above Dynamo's guards (sum8)"),
        ("sum8-view", "guards", 2.5, "the same where AOTAutograd would wrap the call (sum8-view)"),
    ):
        ours, theirs = get(case, "plait"), get(case, floor)
        if ours is not None and theirs is not None:
            yield text, ours - theirs, limit_us, "µs"
    for case, peers, factor, text in (
        (
            "pw",
            (*INDUCTORS, "aotinductor"),
            0.95,
            "pw, against the best of Inductor and AOTInductor",
        ),
        ("tf6", ("inductor",), 1.0, "tf6, against Inductor default"),
    ):
        ours, theirs = get(case, "plait"), best(case, peers)
        if ours is not None and theirs is not None:
            yield text, ours / theirs, factor, "x"
    for case, factor in (
        ("tf6", 0.93),
        ("resnet18", 0.95),
        ("minilm-1", 0.95),
        ("minilm-32", 0.95),
        ("mobilenet", 0.95),
        ("gpt2", 0.95),
    ):
        ours, theirs = get(case, "plait-freeze"), best(case, FROZEN)
        if ours is not None and theirs is not None:
            yield f"{case}, weights as constants, against the best peer", ours / theirs, factor, "x"
        first = get(case, "plait-freeze", "first_s")
        if first is not None:
            yield f"{case}, weights as constants, compile + first call", first, 1.5, "s"
    for case in results:
        eager = get(case, "eager")
        for peer in ("plait", "plait.compile"):
            ours = get(case, peer)
            if eager and ours is not None and (eager >= 20 or peer == "plait.compile"):
                yield f"{case}, {peer} against eager", ours / eager, 1.0, "x"
            ours, theirs = get(case, peer, "peak_bytes"), get(case, "eager", "peak_bytes")
            if ours is not None and theirs is not None:
                limit_mib = (theirs * 1.02 + MIB) / MIB
                yield f"{case}, {peer}: memory peak against eager's", ours / MIB, limit_mib, "MiB"
