"""Random whole graphs against eager, on the roads and devices of this machine; tests/fuzz tells how
they are made.

A failure prints a program to paste and run; `python -m tests.fuzz --seed N` shrinks one.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.fuzz.__main__ import BAD, run
from tests.fuzz.check import passes
from tests.fuzz.make import SUBJECTS, generate
from tests.fuzz.program import Program, Road

ELSEWHERE = "PLAIT_WRAPPER" in os.environ  # in Triton's interpreter, or by another wrapper
KNOWN = ()
"""Seeds that find a fault which is open."""
KNOWN_ELSEWHERE = (24, 39)
"""The same in Triton's interpreter, where a check raises a RuntimeError."""
SEEDS = [s for s in range(60) if s not in KNOWN and not (ELSEWHERE and s in KNOWN_ELSEWHERE)]


def programs(seed: int, subject: str = "") -> Program:
    """A program of that seed, in the form that this run of the tests takes."""
    p = generate(seed, subject=subject)
    if ELSEWHERE:
        grad = "backward" if p.road.grad else ""
        road = Road(dynamic=p.road.dynamic, grad=grad, wrapper=os.environ["PLAIT_WRAPPER"])
        calls = [replace(c, sizes={k: min(n, 4) for k, n in c.sizes.items()}) for c in p.calls[:2]]
        p = replace(
            p, road=road, calls=tuple(calls)
        )  # small: a program of an interpreted kernel takes a millisecond
    return p


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed: int) -> None:
    passes(programs(seed))


@pytest.mark.parametrize("seed", range(40))
def test_random_control_flow(seed: int) -> None:
    passes(programs(seed, subject="flow"))


@pytest.mark.parametrize("seed", range(15))
def test_random_networks(seed: int) -> None:
    passes(programs(seed, subject="networks"))


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("first", range(100_000, 104_000, 200))
def test_many_random_graphs(first: int, subject: str) -> None:
    """In processes of their own: what crashes is a failure of one test."""
    found = run(200, None, 1, first, "cpu", 3600, subject)
    bad = [f for f in found["failures"] if f["kind"] in BAD]
    assert not bad, "\n\n".join(f"seed {f['seed']}: {f['what']}" for f in bad)
