"""Who gets which time in the page of first calls; the figures here are made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import first
from benchmarks.claims import judge
from benchmarks.first_worker import DYNAMO, WAYS, Observed, split


def run_of(first_s: float, **more: float) -> dict[str, float]:
    return {"first_s": first_s, "cpu_s": first_s, "import back end": 0.05, **more}


def results() -> dict[str, Any]:
    about = {"about": "6 blocks", "rounds": 3, "date": "2026-01-01", "commit": "c"}
    plait = {
        "cold": [run_of(t, **{"stage lower": 0.04}) for t in (3.0, 1.0, 2.0)],
        "warm": [run_of(t, **{"stage lower": 0.04}) for t in (0.7, 0.1, 0.2)],
    }
    inductor = {"cold": [], "warm": [run_of(0.5)], "failed": "cold: it died"}
    ways = {"plait": plait, "inductor": inductor}
    return {name: {"about": about, "ways": ways} for name in ("tf6", "swin-train")}


def test_medians_and_minima_are_shown() -> None:
    text = first.case_table("tf6", results()["tf6"]["about"], results()["tf6"]["ways"])
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in text.splitlines()]
    assert ["plait, cold", "2.000", "1.000", "2.000"] in rows
    assert ["plait, warm", "0.200", "0.100", "0.200"] in rows
    assert "inductor failed, cold: it died" in text
    assert "its steps in ms: lower 40" in text


def test_goals_are_judged_by_medians() -> None:
    judged = {c["claim"]: (c["measured"], c["verdict"]) for c in judge(first.goals(results()))}
    assert judged["tf6, warm"] == ("0.20 s", "MISSED")
    against = judged["swin-train, warm, against Inductor with warm caches"]
    assert against == ("0.40 x", "met")
    assert judged["import of plait, beyond torch"] == ("0.05 s", "met")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_first_call_is_split(monkeypatch: pytest.MonkeyPatch, in_backward: bool) -> None:
    """What plait compiles in a backward pass is no part of Dynamo's frame."""
    from torch._dynamo import utils

    spent = {"_compile.compile_inner": [4.0, 1.0], "OutputGraph.call_user_compiler": [2.0]}
    monkeypatch.setattr(utils, "compilation_time_metrics", spent)
    seen = Observed()
    seen.logs.append((in_backward, {"lower": 400.0, "load": 100.0, "lower/x": 9.0}))
    found = split(6.0, seen)
    assert found["Dynamo"] == pytest.approx(3.0)
    assert found["own"] == pytest.approx(0.4) and found["building"] == pytest.approx(0.1)
    assert found["AOTAutograd"] == pytest.approx(2.0 if in_backward else 1.5)
    assert found["run"] == pytest.approx(0.5 if in_backward else 1.0)


def test_a_way_reports_the_import_of_all_that_it_needs() -> None:
    for way in WAYS.values():
        assert way.name == "eager" or way.modules == DYNAMO and way.rest, way.name
