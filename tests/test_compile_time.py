"""The benchmarks of compile time: what they make of times, and that they measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import compile_growth
from benchmarks.compile_time import Comparison, least, measure
from plait.capture import program
from plait.compile import compile_graph
from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.text import given_text, tensors_of
from plait.wrapper.show import GIVEN, GIVEN_TENSORS


def test_of_several_rounds_the_least_time_counts() -> None:
    rounds = [{"a": 3.0, "b": 2.0, "once": 1.0}, {"a": 1.0, "b": 4.0}]
    assert least(rounds) == {"a": 1.0, "b": 2.0}


def test_ratios() -> None:
    found = Comparison({"a": 1.0, "b": 2.0, "gone": 9.0}, {"a": 4.0, "b": 2.0, "new": 9.0})
    assert list(found.ratios.items()) == [("a", 4.0), ("b", 1.0)]
    assert found.of_sums == 2.0 and found.geometric_mean == pytest.approx(2.0)
    first, total, *alone = found.lines(worst=1)
    assert first.split() == ["4.00", "x", "1000.0", "->", "4000.0", "ms", "a"]
    assert total.startswith(" 2.000 x       3.00 ->      6.00 s   sum of 2 graphs")
    assert alone == ["compiled by this version alone: new", "compiled by the other alone: gone"]


def test_nothing_in_common() -> None:
    assert Comparison({"a": 1.0}, {}).lines(worst=1) == ["no graph is compiled by both versions"]


def test_recorded_graphs_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def keep(captured: Captured, cfg: Config, target: object = None) -> object:
        folder = tmp_path / f"graph{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / GIVEN).write_text(given_text(captured, cfg))
        torch.save(tensors_of(captured.graph), folder / GIVEN_TENSORS)
        return compile_graph(captured, cfg)

    monkeypatch.setattr(program, "compile_graph", keep)
    for shift in (1.0, 2.0):
        fn = torch.compile(lambda x, shift=shift: (x + shift).sin(), backend="plait")
        fn(torch.randn(8))
    (tmp_path / "graph1" / GIVEN).rename(tmp_path / "graph1" / "other.json")
    found = measure(tmp_path)
    assert list(found) == ["graph0"] and 0 < found["graph0"] < 60
    assert measure(tmp_path, ["graph1"]) == {}


@pytest.mark.parametrize("pattern", compile_growth.PATTERNS)
def test_every_pattern_is_compiled(pattern: str) -> None:
    """Stages are inside the whole, and the largest has a row."""
    found = {n: compile_growth.stages(pattern, n) for n in (14, 28)}
    assert {"clean graph", "lower", "schedule", "encode"} < set(found[28])
    assert all(0 <= took["schedule"] < took["all"] for took in found.values())
    table = compile_growth.rows(found)
    assert [row[0] for row in table][-1] == "all" and {len(row) for row in table} == {4}


def test_growth_is_of_time_a_node() -> None:
    took = {10: {"lower": 1e-5, "all": 1e-4}, 100: {"lower": 2e-4, "small": 1e-6, "all": 1e-3}}
    assert compile_growth.rows(took) == [
        ["lower", "1.0", "2.0", "2.00"],
        ["all", "10.0", "10.0", "1.00"],
    ]
