"""The suite of models that `make bench-suite` races: its list, and what becomes of its figures. The
figures here are made up."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers import renamed
from benchmarks.suite import page, plot, run
from benchmarks.suite import records as book
from benchmarks.suite.child import family
from benchmarks.suite.models import MODELS, Case, Model, cases, missing, normal
from benchmarks.suite.run import Running
from benchmarks.suite.worker import Held


def record(case: str, plait: float, inductor: float, **more: Any) -> book.Record:
    """A row: eager 2 ms, plait and Inductor as given, by CUDA graphs twice as fast."""
    variants: dict[str, Any] = {"eager": {"ms": 2.0, "peak_mib": 8.0}}
    for name, ms in (("plait", plait), ("inductor", inductor)):
        variants[name] = {"ms": ms, "error": 0.5, "first_s": 3.0 if name == "plait" else 6.0}
        variants[name] |= {"peak_mib": 4.0, "kernels": 7, "breaks": 0}
        variants[f"{name}-graphs"] = {"ms": ms / 2, "error": 0.5, "peak_mib": 4.0}
    return {
        "case": case, "field": "text", "note": "", "batch": 1, "truth": "torch.float64",
        "eager_error": 0.5, "variants": variants, "date": "2026-01-01T00:00:00+00:00",
        "spec": "s", "plait": "p", "commit": "c", "torch": "t", "device": "NVIDIA H100 80GB HBM3",
    } | more  # fmt: skip


def table() -> book.Records:
    """Three rows that are fine, one that is slow, one that is wrong, two that failed."""
    rows = [
        record("bert/infer/bfloat16", 1.0, 2.0),
        record("bert/train/bfloat16", 1.0, 3.0),
        record("vit/infer/bfloat16", 1.0, 0.5),
        record("gpt2/infer/bfloat16", 1.0, 1.0),
        record("resnet18/infer/float32", 1.0, 1.0),
        record("swin/infer/bfloat16", 1.0, 1.0),
        record("detr/infer/bfloat16", 1.0, 1.0, failed="OSError: no", variants={}),
    ]
    rows[3]["variants"]["plait-graphs"]["error"] = 5.0
    rows[5]["variants"]["inductor"] = {"failed": "CompileError: a | b"}
    rows[5]["variants"]["inductor-graphs"] = {"failed": "worker died"}
    return {row["case"]: row for row in rows}


def test_the_list_is_what_the_issue_asks_for() -> None:
    on_gpu, on_cpu = cases("cuda"), cases("cpu")
    of = {
        dtype: [c for c in on_gpu.values() if c.dtype == dtype] for dtype in ("bfloat16", "float32")
    }
    assert len({c.model.name for c in of["bfloat16"]}) >= 60
    assert len({c.model.name for c in of["float32"]}) >= 15
    assert len({c.model.name for c in on_cpu.values()}) >= 30
    assert {c.dtype for c in on_cpu.values()} == {"float32"}
    assert sum(m.tuned for m in MODELS.values()) >= 20
    fields = {m.field for m in MODELS.values()}
    assert fields >= {
        "text", "vision", "speech", "mixture of experts", "state space", "encoder-decoder",
        "diffusion", "recommendation", "graph network",
    }  # fmt: skip
    assert all(name == case.name for name, case in on_gpu.items())
    assert len({c.spec for c in on_gpu.values()}) >= len(MODELS)


@pytest.mark.parametrize("name", ["dlrm", "graph_attention", "dcgan"])
def test_models_of_our_own_compute(name: str) -> None:
    model, inputs = Case(MODELS[name], True, "float32", "cpu", small=True).build()
    results = model(*inputs)
    assert all(x.isfinite().all() for x in results)
    sum(x.square().mean() for x in results).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_can_be_built(name: str) -> None:
    model = MODELS[name]
    if missing(model.library):
        pytest.skip(f"{model.library} is missing")
    with torch.device("meta"):
        built = model.build(False)
    assert 1e4 < sum(p.numel() for p in built.parameters()) < 1e9
    dropouts = [m.p for m in built.modules() if isinstance(m, nn.Dropout)]
    assert not any(dropouts), f"gradients of {name} cannot be compared: it drops out"


def test_a_variant_has_a_code_object_of_its_own() -> None:
    module = nn.Linear(2, 2)
    twin = renamed(module, "twin")
    assert type(twin).forward.__code__ is not nn.Linear.forward.__code__
    assert twin.weight is module.weight and isinstance(twin, nn.Linear)
    torch.testing.assert_close(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))


class Edge(nn.Module):
    """Every activation is at the edge of its ReLU: zero, until a weight moves by a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + self.weight + torch.relu(self.weight - 1),)


def test_a_gradient_that_jumps_is_in_eagers_error() -> None:
    model = Model("edge", "text", lambda small: Edge(), {"x": normal(64)}, cpu=4)
    held = Held(Case(model, True, "float32", "cpu"))
    held.eager()
    alone = held._error(held.calls["eager"])
    assert alone is not None and alone < 1e-6
    assert held.eager_error is not None and held.eager_error > 0.01
    assert torch.equal(held.program.model.weight, torch.ones(64))


def test_records_are_kept_merged_and_chosen(tmp_path: Path) -> None:
    old = table()
    file = book.path("NVIDIA H100 80GB HBM3", tmp_path)
    assert file.name == "suite-h100.json" and book.short("CPU: 2 x AMD EPYC 9B14") == "cpu"
    assert book.read(file) == {}
    book.write(file, old)
    assert book.read(file) == old and len(json.loads(file.read_text())) == len(old)

    later = record("bert/infer/bfloat16", 0.5, 2.0, date="2026-01-02T00:00:00+00:00")
    earlier = record("vit/infer/bfloat16", 9.0, 2.0, date="2025-01-02T00:00:00+00:00")
    other = record("t5/infer/bfloat16", 1.0, 1.0)
    new = book.merge(old, {r["case"]: r for r in (later, earlier, other)})
    assert new["bert/infer/bfloat16"] == later and new["t5/infer/bfloat16"] == other
    assert new["vit/infer/bfloat16"] == old["vit/infer/bfloat16"]

    alone = {**earlier, "variants": {"plait-max": {"ms": 1.0}}}  # modes of an earlier command
    (joined,) = book.merge({"bert/infer/bfloat16": later}, {"bert/infer/bfloat16": alone}).values()
    assert joined["date"] == later["date"]
    assert joined["variants"] == {**later["variants"], **alone["variants"]}

    assert book.worst(old, 2) == ["vit/infer/bfloat16", "gpt2/infer/bfloat16"]
    assert book.matching(list(old), "bert") == ["bert/infer/bfloat16", "bert/train/bfloat16"]
    assert book.matching(list(old), "*/infer/float32") == ["resnet18/infer/float32"]
    assert book.matching(list(old), "vit/infer") == ["vit/infer/bfloat16"]
    assert book.matching(list(old), "") == list(old)


@pytest.mark.parametrize(
    ("change", "changed", "wanted", "is_open"),
    [
        ({}, False, ("plait",), False),
        ({"spec": "x"}, False, ("plait",), True),
        ({"torch": "x"}, False, ("plait",), True),
        ({"device": "x"}, False, ("plait",), True),
        ({"plait": "x"}, False, ("plait",), False),
        ({"plait": "x"}, True, ("plait",), True),
        ({}, True, ("plait",), False),
        ({}, False, ("plait", "plait-max"), True),
    ],
)
def test_what_is_open(
    change: dict[str, str], changed: bool, wanted: tuple[str, ...], is_open: bool
) -> None:
    row = record("bert/infer/bfloat16", 1.0, 2.0)
    now = {key: row[key] for key in ("spec", "torch", "device", "plait")} | change
    assert book.is_open(row, now, changed, wanted) is is_open
    assert book.is_open(None, now, changed, wanted)


def test_modes_of_other_commands_stay() -> None:
    """Those of the same program, with the same torch and on the same device."""
    old = {"spec": "a", "torch": "2", "device": "d", "variants": {"plait": 1, "eager": 2}}
    new = old | {"variants": {"plait-max": 3, "eager": 4}}
    assert book.with_others(old, new)["variants"] == {"plait": 1, "eager": 4, "plait-max": 3}
    assert book.with_others(None, new) is new
    for key in ("spec", "torch", "device"):
        assert book.with_others(old | {key: "b"}, new) is new


def test_ratios_are_of_the_best_modes() -> None:
    rows = table()
    assert book.ratio(rows["bert/infer/bfloat16"]) == 2.0
    assert book.ratio(rows["detr/infer/bfloat16"]) is None
    assert book.ratio(rows["swin/infer/bfloat16"]) is None
    assert book.failures(rows["bert/infer/bfloat16"]) == {}
    assert book.failures(rows["gpt2/infer/bfloat16"]) == {
        "plait-graphs": "its error is 10.0 times eager's"
    }
    assert book.failures(rows["swin/infer/bfloat16"]) == {}
    assert list(book.failures(rows["swin/infer/bfloat16"], "inductor")) == [
        "inductor", "inductor-graphs",
    ]  # fmt: skip
    assert book.failures(rows["detr/infer/bfloat16"]) == {"eager": "OSError: no"}


def test_the_page_says_what_the_records_say() -> None:
    rows = table()
    text = page.page(rows, {"vit/infer/bfloat16": "a reason"}, "plot.svg")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line[:1] == "|"}
    cells = [c.strip() for c in lines["inference, bfloat16"].split("|")[2:-1]]
    # Five rows, two of them failed or wrong; of three ratios the mean is that of 2, 0.5 and 1
    assert cells[:4] == ["5", "3", "1", "1.00"]
    assert "a reason" in text and "not known yet" in text
    assert "- detr/infer/bfloat16, eager: OSError: no" in text
    assert "- gpt2/infer/bfloat16, plait-graphs: its error is 10.0 times eager's" in text
    assert "- swin/infer/bfloat16, inductor: CompileError: a | b" in text
    assert page.mean([2.0, 0.5, None]) == pytest.approx(1.0)


def test_the_plot_is_sorted_and_the_same_again() -> None:
    rows = table()
    panels = page.speedups(rows)
    assert list(panels) == ["inference, bfloat16", "training, bfloat16", "inference, float32"]
    assert panels["inference, bfloat16"] == [("bert", 2.0), ("gpt2", 1.0), ("vit", 0.5)]
    first = plot.draw(panels, "a < b")
    assert first == plot.draw(page.speedups(dict(reversed(rows.items()))), "a < b")
    assert "a &lt; b" in first and first.index(">bert<") < first.index(">vit<")
    assert plot.place(1.0) < plot.place(2.0) < plot.place(99.0) == plot.place(4.0)


def test_a_family_is_a_process_and_what_descends_from_it() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], stdout=subprocess.DEVNULL)
    try:
        found: list[int] = []
        while len(found) < 2:
            found = family(child.pid)
        assert found[0] == child.pid and len(found) == 2
    finally:
        for pid in found:
            subprocess.run(["kill", "-9", str(pid)], check=False)
        child.wait()


def test_what_a_process_says_becomes_a_row(tmp_path: Path) -> None:
    case = Running.__new__(Running)
    case.figures, case.failed, case.state, case.current = {}, "", "preparing", ""
    case.pauses, case.wanted = [(1.0, 3.0), (9.0, 20.0)], ("plait", "inductor")
    case.take({"event": "begin", "variant": "plait"})
    case.take({"event": "ready", "variant": "plait", "figures": {"first": [0.5, 10.0], "error": 1}})
    assert case.figures["plait"] == {"error": 1, "first_s": 9.5 - 2.0 - 1.0}
    case.take({"event": "begin", "variant": "inductor"})
    assert case.current == "inductor"
    case.take({"event": "failed", "variant": "inductor", "why": "x"})
    case.take({"event": "prepared"})
    assert case.figures["inductor"] == {"failed": "x"} and case.state == "ready"
    case.take({"event": "failed", "variant": "eager", "why": "y"})
    case.take({"event": "prepared"})
    assert case.state == "failed" and case.failed == "y"


def test_a_sweep_tells_a_bar_of_each_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A case that found no memory beside others counts once it was measured alone."""
    told: list[str] = []

    @contextlib.contextmanager
    def progress(what: str, total: int, prints: bool) -> Iterator[Callable[[], None]]:
        told.append(f"{what}: {total}")
        yield lambda: told.append("one more")

    class Made:
        """A case that ends at once, at first for want of memory."""

        def __init__(self, case: Case, slot: int, wanted: object, args: Namespace) -> None:
            self.case, self.slot, self.state, self.figures = case, slot, "done", {}
            self.why = "CUDA out of memory" if args.together > 1 and case is large else ""
            self.child = Namespace(close=lambda: None)

        def look(self) -> None: ...

        def end(self) -> None: ...

        def record(self, key: object) -> book.Record:
            made = record(self.case.name, 1.0, 1.0, seconds=3)
            return made | ({"variants": {"plait": {"failed": self.why}}} if self.why else {})

    monkeypatch.setattr(run, "progress", progress)
    monkeypatch.setattr(run, "Running", Made)
    args = Namespace(results=tmp_path, together=2, slots=1, minutes=10, modes="", autotune=False)
    args.out = None
    _, large, _ = some = [*cases("cpu").values()][:3]
    sweep = run.Sweep(some, args, "a device")
    sweep.run()
    assert told == ["cases: 3", *["one more"] * 3] and len(sweep.new) == 3


def test_figures_of_small_models_are_kept_out_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--small", "--device", "cpu"])
    with pytest.raises(SystemExit, match="are no results"):
        run.main()
