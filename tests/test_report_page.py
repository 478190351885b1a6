"""Reports: their data and its description, the page in a browser, and the command."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import plait
from plait import log
from plait.compat import precision
from plait.runtime import generated
from plait.runtime.graphs import refusals
from plait.runtime.timing import Watch
from plait.tools.page import roofline
from plait.tools.page.collect import Collector, Event, assemble, told
from plait.tools.page.data import graph_data, report_data
from plait.tools.page.findings import findings
from plait.tools.page.kernels import accesses_of, operations_of
from plait.tools.page.lives import Life, alive, peaks
from plait.tools.page.reasons import meaning
from plait.tools.page.render import page
from plait.tools.page.roofline import copied_ns, product_rate
from tests import warm
from tests.test_cuda_programs import compile_only, fakes, record  # noqa: F401

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
PLANTED = ROOT / "examples" / "planted.py"


def line_of(text: str, file: Path = PLANTED) -> str:
    """The place of the only line with this text."""
    (n,) = [n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    return f"{file.name}:{n}"


def net(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm((x @ w).relu() + w.t(), (512,)).softmax(0)


def explained(fn: Any = net, n: int = 512) -> dict[str, Any]:
    with torch.no_grad():
        data = plait.explain(fn, torch.randn(n, n), torch.randn(n, n), quiet=True).to_json()
    assert json.loads(json.dumps(data)) == data
    return data


def command(*args: object, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """`plait report` with these arguments."""
    run = [
        "-m",
        "plait",
        "report",
        *map(str, args),
        *((sys.executable, "-c", code) if code else ()),
    ]
    return warm.run(
        *run,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        cwd=cwd,
    )


# ------------------------------------------------------------------------------------------ data
def described() -> dict[str, set[str]]:
    """The keys that docs/report.md describes, by its heading."""
    found = {}
    for part in (ROOT / "docs" / "report.md").read_text().split("\n### ")[1:]:
        title, _, rest = part.partition("\n")
        rows = re.findall(r"^\| (`.*?) \|", rest, re.MULTILINE)
        found[title] = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    return found


def test_every_key_is_described() -> None:
    def control(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() @ w, (x,))
        torch._dynamo.graph_break()
        return net(y, w)

    data, docs = explained(control), described()
    (b,) = data["breaks"]
    graphs = data["graphs"]
    assert {len(g["programs"]) for g in graphs} == {1, 3}
    for title, found in (
        ("The report", [data]),
        ("A graph break", [b]),
        ("A finding", data["findings"]),
        ("A graph", graphs),
        ("A step", [s for g in graphs for s in g["steps"]]),
        ("A program", [p for g in graphs for p in g["programs"]]),
    ):
        assert found
        for part in found:
            assert part.keys() == docs[title], title
    text = (ROOT / "docs" / "report.md").read_text()
    inner = [x for g in graphs for p in g["programs"] for x in (*p["buffers"], *p["peaks"])]
    inner += [a for g in graphs for s in g["steps"] for a in (*s["accesses"], *s["origin"])]
    inner += [x for g in graphs for x in (*g["inputs"], *g["results"])]
    assert all(f"`{key}`" in text for x in inner for key in x)
    assert "Instructions of" in page(data)  # of subprograms, too
    assert data["schema"] == 2 and "the number of this description: 2" in text


def test_a_graph_that_eager_runs_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("none of this")

    torch._dynamo.reset()
    monkeypatch.setattr(importlib.import_module("plait.compile"), "lower_graph", fail)
    monkeypatch.setenv("PLAIT_STRICT", "0")
    with pytest.warns(UserWarning, match="eager runs"), plait.report(tmp_path / "page.html"):
        torch.compile(lambda x: x.sin() + 1, backend="plait")(torch.ones(3))
    text = (tmp_path / "page.html").read_text()
    assert "run by eager" in text and "ValueError: none of this" in text


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        self.norm = torch.nn.BatchNorm1d(8)
        self.table, self.more = torch.ones(8), [torch.ones(8)]

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, d: Any = None) -> torch.Tensor:
        return self.norm(self.layers[0](x).relu()) * mask + self.table + d["k"] + self.more[0]


def test_inputs_and_results_have_the_users_names() -> None:
    def names(report: Any) -> list[tuple[set[str], list[str]]]:
        return [
            ({i["is"] for i in g["inputs"]}, [r["is"] for r in g["results"]])
            for g in report.to_json()["graphs"]
        ]

    x, k = torch.randn(4, 8), torch.ones(8)
    report = plait.explain(Named(), x, mask=k, d={"k": k.clone()}, quiet=True)
    (inputs, results), (given, gradients) = names(report)
    weights = {"layers.0.weight", "layers.0.bias", "norm.weight", "norm.bias"}
    kept = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert inputs == weights | kept | {"x", "mask", "d['k']", "self.table", "self.more[0]"}
    assert results[0] == "result 0" and "saved for the backward pass: 0" in results[1:]
    line = line_of("self.layers[0](x).relu()" + ")", Path(__file__))
    assert given >= {"x", "gradient of result 0"}
    assert any(f", saved at {line}" in name for name in given)
    assert {f"gradient of {name}" for name in weights} <= {*gradients}
    assert "is layers.0.weight" in report.details and " is x\n" in report.details

    def around(inside: torch.Tensor, net: Any) -> Any:
        def fn(x: torch.Tensor, *more: torch.Tensor, y: int = 2) -> Any:
            return net(x) * inside + more[0] * MINE, x.add_(y)

        return fn

    fn = around(k, torch.nn.Linear(8, 8))
    with torch.no_grad():
        every = {"x", "more[0]", "inside", "net.weight", "net.bias", "MINE"}
        for made in (fn, functools.partial(fn, y=3)):
            (found,) = names(plait.explain(made, x, x.clone(), quiet=True))
            assert found[0] == every and found[1][-2:] == ["result 0", "result 1"], found
        assert names(plait.explain(torch.mm, x, x.t(), quiet=True))[0][0] >= {"args[0]", "args[1]"}
        bound = plait.explain(plait.compile(torch.nn.Linear(8, 8), (x,)), quiet=True)
    assert names(bound)[0][0] == {"weight", "bias", "input"}
    assert plait.compile(torch.sin, (x,)).record.result_names == ()  # type: ignore[attr-defined]


MINE = torch.ones(8)


def test_arguments_behind_a_decorator_have_their_names(tmp_path: Path) -> None:
    """As of transformers' `forward`, which hand keywords on."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    def inner(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x[ids]

    with plait.report(tmp_path / "r.html"):
        torch.compile(wrapped, backend="plait")(torch.ones(3), ids=torch.tensor([1]))
    (graph,) = data_in(tmp_path / "r.html")["graphs"]
    assert {i["is"] for i in graph["inputs"]} == {"args[0]", "ids"}


def test_what_a_kernel_does_to_memory() -> None:
    made: list[Any] = []

    def kernel(fn: Any, *args: torch.Tensor) -> Any:
        report = plait.explain(fn, *args, quiet=True)
        (k,) = [s for s in report.graphs[0].plan.steps if hasattr(s, "rvars")]
        made.append(k)
        return {(a.buffer, a.writes): (a.nbytes, a.order, a.stride) for a in accesses_of(k)}

    x, y, at = torch.randn(64, 32), torch.randn(32, 64), torch.randint(0, 64, (16,))
    out = {k: v for k, v in kernel(lambda x, y: x + y.t(), x, y).items() if not k[1]}
    assert sorted(order for _, order, _ in out.values()) == ["across", "in order"]
    assert {n for n, _, _ in out.values()} == {64 * 32 * 4}
    assert operations_of(made[-1]) == 64 * 32
    assert {v for k, v in kernel(lambda x: x.sum(0), x).items() if not k[1]} == {
        (64 * 32 * 4, "in order", 0)
    }
    assert operations_of(made[-1]) == 64 * 32  # the additions of the sum
    picked = kernel(lambda x, at: x[at].exp(), x, at)
    assert sorted(v[:2] for v in picked.values()) == [
        (16 * 8, "in order"), (16 * 32 * 4, "by data"), (16 * 32 * 4, "in order"),
    ]  # fmt: skip
    every = kernel(lambda x: x[:, ::4].exp(), x)
    assert [v for k, v in every.items() if not k[1]] == [(64 * 8 * 4, "apart", 4)]


def test_layouts_that_are_not_the_users_are_told_apart() -> None:
    def finding(
        order: str, stride: int, kind: str = "inference", n: int = 1, **facts: Any
    ) -> list[str]:
        access = {"buffer": "arg0", "writes": False, "nbytes": 1 << 20, "stride": stride}
        step = {"name": "k", "origin": [], "accesses": [access | {"order": order}]}
        step |= {"time_ns": 10, "roofline": 0.1} | facts
        other = step | {"name": "other", "accesses": [], "time_ns": 80}
        graph = {"name": "g", "kind": kind, "inputs": [{"name": "arg0", "is": "x"}], "ladder": []}
        report = {"breaks": [], "recompiles": [], "left_to_eager": []}
        graphs = [graph | {"steps": [step] * n + [other]}]
        found = findings(report | {"graphs": graphs})
        assert all(f["what"] == f"k reads x {stride} elements apart" for f in found)
        return [f["kind"] for f in found]

    assert finding("across", 512) == finding("apart", -64) == ["layout"]
    assert finding("across", 512, "backward") == ["layout within"]  # what the forward pass saved
    assert finding("across", 512, "backward", time_ns=5) == []
    assert finding("across", 512, "backward", time_ns=5, n=3) == ["layout within"]
    for harmless in (("across", 4), ("in order", 1), ("in pieces", 0), ("by data", 0)):
        assert finding(*harmless) == []
    assert finding("across", 512, roofline=0.9) == []


def test_cells_of_a_notebook_have_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "import torch\ndef fn(x):\n    return x.exp() + 2\n"
    path = "/tmp/ipykernel_7/93618.py"
    monkeypatch.setitem(linecache.cache, path, (len(cell), None, cell.splitlines(True), path))
    names: dict[str, Any] = {}
    exec(compile(cell, path, "exec"), names)
    (g,) = plait.explain(names["fn"], torch.ones(8), quiet=True).to_json()["graphs"]
    assert g["lines"] == {"93618.py:3": "return x.exp() + 2"}


def test_a_break_is_named_once_for_all_sizes() -> None:
    a_break = {"where": "model.py:3", "cause": "print", "hints": []}
    other = a_break | {"where": "model.py:5"}
    report = report_data([], [a_break, other, a_break], [], left_to_eager=["f: x"])
    assert report["breaks"] == [a_break, other]
    kinds = [(f["kind"], f["where"]) for f in report["findings"]]
    breaks = [("graph break", "model.py:3"), ("graph break", "model.py:5")]
    assert kinds == [*breaks, ("left to eager", "")]


def test_memory_over_a_program() -> None:
    lives = [
        Life("given", "input", 1000, -1, 3),
        Life("a", "own", 10, 0, 2),
        Life("b", "arena", 30, 1, 4, 0),
        Life("c", "call", 28, 5, 6),
    ]
    assert alive(lives, 6) == [10, 40, 30, 30, 0, 28]
    assert peaks([10, 40, 30, 30, 0, 28]) == [1]
    assert peaks([10, 40, 30, 30, 0, 36]) == [1, 5]
    assert peaks([]) == peaks([0, 0]) == []
    memory = explained()["graphs"][0]["programs"][0]
    held, at = memory["held_nbytes"], memory["peaks"][0]["at"]
    assert held[at] == max(held) >= 2 * 512 * 512 * 4
    there = [b for b in memory["buffers"] if b["where"] != "input" and b["born"] <= at < b["dies"]]
    assert sum(b["nbytes"] for b in there) == max(held)


def test_what_is_written_over_in_the_arena_is_counted_once() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x @ w), (512,)) @ w

    memory = explained(layers)["graphs"][0]["programs"][0]
    placed = [b for b in memory["buffers"] if b["where"] == "arena"]
    (new,) = [b for b in placed if b["on"]]
    (old,) = [b for b in placed if b["name"] == new["on"]]
    assert (old["offset"], old["nbytes"], old["dies"]) == (0, 512 * 512 * 4, new["born"])
    others = sum(b["nbytes"] for b in memory["buffers"] if b["where"] in ("own", "call"))
    assert max(memory["held_nbytes"]) <= memory["arena_nbytes"] + others


def test_steps_lead_to_their_instructions_and_sources() -> None:
    (g,) = explained()["graphs"]
    for s in g["steps"]:
        text = g["programs"][0]["instructions"][s["instruction"]]
        assert s["name"] in text
        if s["what"] == "kernel":
            assert f" {s['name']}(i64 tid" in g["kernel_sources"][s["name"]]
            assert f"def {s['name']}(" in s["loops"]
    assert all(g["lines"][o["where"]] for s in g["steps"] for o in s["origin"])
    assert "typedef" in g["kernel_sources"][""]


def test_a_terminal_shows_tables_and_a_file_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, w = torch.randn(8, 512), torch.randn(512, 512)[:8]
    report = plait.explain(lambda x, w: (x + w).softmax(0).softmax(1) @ w.t(), x, w)
    plain = capsys.readouterr().out
    assert plain == f"{report.text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    plait.explain(lambda x, w: (x + w).softmax(0).softmax(1) @ w.t(), x, w, details=True)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.partition("\ninference_")[0].splitlines())) <= 100
    words = re.sub(r"\s+", "", shown)
    for title, lines in report.sections:
        assert title in shown
        if title != "kernels":
            assert all(re.sub(r"\s+", "", line) in words for line in lines)
    assert "of the operators" in shown and "  kernel plait_" in shown


def test_a_program_of_a_gpu(compile_only: None) -> None:  # noqa: F811
    mode, (x, w) = fakes((64, 128), (128, 128))
    fn = lambda x, w: F.gelu(F.gelu(x).softmax(-1) @ w).sum(0)
    data = graph_data(record(fn, x, w, mode=mode, cuda_graphs=True))
    kernels = [s for s in data["steps"] if s["what"] == "kernel"]
    assert len(kernels) >= 2 and {s["device"] for s in kernels} == {"cuda:0"}
    for s in kernels:
        source = data["kernel_sources"][s["name"]]
        assert source.startswith("@triton.jit") and source.count("def plait_") == 1
        assert s["name"] in data["programs"][0]["instructions"][s["instruction"]]
    parts = data["programs"][0]["partitions"]
    assert [p["recorded"] for p in parts].count(True) == 1
    text = page(report_data([data], [], []))
    assert "recorded and replayed" in text
    assert all(p["reason"] in text for p in parts)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stream: io.StringIO, words: str) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        with log.progress("weaving", 3) as done:
            done()
            done()
            end = time.monotonic() + 30
            while words and words not in stream.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
        return stream.getvalue()

    assert shown(io.StringIO(), "") == shown(Terminal(), "") == ""  # no terminal; soon done
    monkeypatch.setattr(log, "BAR_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    assert "weaving" in shown(Terminal(), "2/3")


def test_lines_stand_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are on one terminal; else what is printed is as it was."""
    monkeypatch.setattr(log, "BAR_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    line = f"[bold] {'word ' * 30}end"

    def shown(out: io.StringIO, err: io.StringIO) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        for k in log.watched("woven", range(9)):
            end = time.monotonic() + 30
            while err.isatty() and f"{k}/9" not in err.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
            print(line)
            if k == 2:
                break
        assert sys.stdout is out
        return out.getvalue(), err.getvalue()

    assert shown(io.StringIO(), io.StringIO()) == (f"{line}\n" * 3, "")
    printed, bar = shown(io.StringIO(), Terminal())
    assert printed == f"{line}\n" * 3 and "2/9" in bar and line not in bar
    printed, both = shown(Terminal(), Terminal())
    assert printed == "" and both.count(f"\x1b[2K{line}\n") == 3


def test_the_roofline_goes_by_size() -> None:
    copies = {"4096": 1000, "8192": 1600, str(1 << 28): 1 << 27}
    assert copied_ns(100, copies) == 1000
    assert copied_ns(6144, copies) == 1200
    assert copied_ns(1 << 29, copies) == 1 << 28


def test_what_a_report_alone_changes_is_not_told() -> None:
    """A program runs as Python while it is timed. Seeds are of no library of PyTorch's."""
    torch._dynamo.reset()
    events: list[Event] = []
    collector = Collector(events.append)
    collector.start()
    dropped = torch.compile(lambda x: F.dropout(x.sin()), backend="plait")
    dropped(torch.ones(64, requires_grad=True)).sum().backward()
    collector.stop()
    graphs = assemble([*map(told, events)])["graphs"]
    assert [g["wrapper_reason"] for g in graphs] == ["", ""]
    (why,) = {s["why"] for g in graphs for s in g["steps"] if s["name"].startswith("plait::seed")}
    assert why == "an operator of plait's own"


# ------------------------------------------------------------------------------------- the command
def test_the_causes_of_the_planted_case_are_named(tmp_path: Path) -> None:
    done = command(
        "-o", "page.html", "--json", "page.json", "--", sys.executable, PLANTED, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "page.json").read_text())
    found = {f["kind"]: f for f in data["findings"]}
    assert [f["kind"] for f in data["findings"]] == ["graph break", "recompile", "layout"]
    assert found["graph break"]["where"] == line_of('print("scores are there")')
    assert "print" in found["graph break"]["advice"]
    assert found["recompile"]["where"] == line_of("scores / self.temperature")
    assert found["recompile"]["what"] == "self.temperature == 1.0"
    assert "in a tensor" in found["recompile"]["advice"]
    assert found["layout"]["where"] == line_of("x + self.table")
    assert "512 elements apart" in found["layout"]["what"]
    slow = data["graphs"][found["layout"]["graph"]]["steps"][found["layout"]["step"]]
    assert slow["time_ns"] > 0 and slow["roofline"] > 0 and slow["name"] in found["layout"]["what"]
    text = (tmp_path / "page.html").read_text()
    assert all(f["where"] in text for f in data["findings"])
    assert "http" not in re.sub(
        r"https?://(www\.w3|github|pytorch|meta-pytorch)\.", "", text.lower()
    )


COMPILES = "import torch; torch.compile(lambda x: x.sin() + 1, backend='plait')(torch.ones(3)); "


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        pytest.param("sys.exit(7)", 7, marks=pytest.mark.slow),  # as the next one
        ("raise ValueError('mine')", 1),
        pytest.param("os._exit(3)", 3, marks=pytest.mark.slow),  # runs as little as a signal lets
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),  # as for want of memory
    ],
)
def test_a_command_ends_as_it_would(ends: str, status: int, tmp_path: Path) -> None:
    code = f"import os, signal, sys; {COMPILES}{ends}"
    done = command("-o", "page.html", "--", cwd=tmp_path, code=code)
    assert done.returncode == status, done.stderr
    assert ("ValueError: mine" in done.stderr) == (status == 1)
    text = (tmp_path / "page.html").read_text()
    assert "plait_sin_add" in text
    ended = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    assert ended in text


def test_processes_that_a_command_starts_are_told_of(tmp_path: Path) -> None:
    child = "import torch; torch.compile(lambda x: x.cos() * 3, backend='plait')(torch.ones(3))"
    code = f"import subprocess, sys; {COMPILES}subprocess.run([sys.executable, '-c', {child!r}])"
    done = command("-o", "page.html", "--json", "page.json", "--", cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    graphs = json.loads((tmp_path / "page.json").read_text())["graphs"]
    assert [s["name"].rpartition("_")[0] for g in graphs for s in g["steps"]] in (
        ["plait_sin_add", "plait_cos_mul"], ["plait_cos_mul", "plait_sin_add"],
    )  # fmt: skip
    assert len({g["process"] for g in graphs}) == 2


def test_what_the_command_refuses(tmp_path: Path) -> None:
    assert "needs a command" in command(cwd=tmp_path).stderr
    assert "no folder" in command("-o", "none/page.html", "--", "true", cwd=tmp_path).stderr
    assert "No such file" in command("--", "./no-such-command", cwd=tmp_path).stderr


def test_a_command_that_compiles_nothing_is_told_so(tmp_path: Path) -> None:
    assert "tells of 0 graphs" in command("--", "true", cwd=tmp_path).stderr
    text = (tmp_path / "report.html").read_text()
    assert "Nothing was compiled by plait" in text and "no graph breaks" not in text


def test_a_block_is_reported_on_however_it_ends(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm((x @ w).relu(), (512,))

    with pytest.raises(ZeroDivisionError), plait.report(tmp_path / "page.html"):
        compiled = torch.compile(normed, backend="plait")
        thread = threading.Thread(target=compiled, args=(torch.ones(8, 512), torch.ones(512, 512)))
        thread.start()
        thread.join()
        refusals["program_7"] = {3: "it is no use"}
        raise ZeroDivisionError
    text = (tmp_path / "page.html").read_text()
    assert "ended by ZeroDivisionError" in text and "plait_relu_native_layer_norm" in text
    assert "program_7, part 3: it is no use" in text
    del refusals["program_7"]
    size = len(text)
    torch.compile(lambda x: x.exp() + 2, backend="plait")(torch.ones(3))
    assert len((tmp_path / "page.html").read_text()) == size  # nobody listens any more
    with pytest.raises(plait.UserError, match="no folder"), plait.report(tmp_path / "no" / "page"):
        pass


def data_in(path: Path) -> dict[str, Any]:
    """The data that a page holds."""
    found = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_calls_of_operators_are_timed_beside_kernels(tmp_path: Path) -> None:
    torch._dynamo.reset()

    def mixed(x: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q = F.conv2d(x, k, padding=1)
        q = F.scaled_dot_product_attention(q, q, q).sin()
        return ((q.view(-1, 512) @ w).bfloat16() @ w.bfloat16()).msort()

    args = torch.randn(2, 8, 64, 64), torch.randn(512, 512), torch.randn(8, 8, 3, 3)
    threads = torch.get_num_threads()
    with torch.no_grad(), plait.report(tmp_path / "page.html"):
        torch.compile(mixed, backend="plait")(*args)
        torch.compile(torch.mm, backend="plait")(args[1], args[1])  # has no kernels at all
    assert torch.get_num_threads() == threads
    data = data_in(tmp_path / "page.html")
    steps = [s for g in data["graphs"] for s in g["steps"]]
    assert all(s["time_ns"] > 0 and s["roofline"] is not None for s in steps)
    kinds = [s["kind"] for s in steps]
    for kind, n in (("convolution", 1), ("attention", 1), ("product", 3), ("operator", 1)):
        assert kinds.count(kind) == n
    assert {s["precision"] for s in steps if s["kind"] == "product"} == {"f32", "bf16"}
    assert data["product_flops"]["cpu"].keys() == {"f32", "bf16"}
    for s in steps:  # what a product could take by its operations is never forgotten
        if s["precision"]:
            best_ns = s["operations"] / data["product_flops"]["cpu"][s["precision"]] * 1e9
            assert s["roofline"] >= round(best_ns / s["time_ns"], 3)
    text = (tmp_path / "page.html").read_text()
    for words in ("matrix products", "convolutions", "attention", "other operators of PyTorch"):
        assert f'<th scope="row">{words}</th>' in text
    assert "<code>aten::mm</code>" in text  # among what takes most time
    assert "Of one call of each graph" in text


def test_a_call_on_a_gpu_is_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu_ns(launch: Any) -> int:
        launch()
        return 7

    monkeypatch.setattr(generated, "gpu_ns", gpu_ns)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    timed = generated.TimedOperator(torch.ops.aten.mm.out, "aten::mm")
    with FakeTensorMode():
        x, out = torch.empty(8, 4, device="cuda"), torch.empty(8, 8, device="cuda")
        assert timed(x, x.t(), out=out) is out
        timed.watch = Watch()
        assert timed(x, x.t(), out=out) is out
    (ran,) = timed.watch.launches
    assert (ran.name, ran.best_ns, ran.nbytes) == ("aten::mm", 7, (32 + 32 + 64) * 4)


def test_a_device_whose_memory_is_full_has_no_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: str) -> dict[str, int]:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(roofline, "copy_times", full)
    step = {"device": "cuda:0", "time_ns": 7, "precision": "f32", "roofline": None}
    assert roofline.set_rooflines([step]) == {"copy_ns": {}, "product_flops": {}}
    assert step["roofline"] is None


def test_float32_that_libraries_may_round_is_told_apart(tmp_path: Path) -> None:
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.no_grad(), plait.report(tmp_path / "page.html"):
            torch.compile(torch.mm, backend="plait")(*torch.ones(2, 256, 256))
    finally:
        torch.set_float32_matmul_precision(before)
    data = data_in(tmp_path / "page.html")
    assert data["graphs"][0]["steps"][0]["precision"] == "f32 as tf32"
    assert data["product_flops"]["cpu"]["f32 as tf32"] > 0
    assert product_rate("cpu", "i64") == 0  # `mm` of integers is no vendor's product
    with pytest.raises(ZeroDivisionError), precision.float32_as("mkldnn", "bf16"):
        assert precision.float32_flags()["mkldnn matmul"] == "bf16"
        raise ZeroDivisionError
    assert precision.float32_flags()["mkldnn matmul"] != "bf16"


def test_all_kernels_are_timed_on_every_road(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
    x = torch.randn(8, 64)
    with plait.report(tmp_path / "page.html"):
        with torch.no_grad():
            torch.testing.assert_close(plait.compile(net, (x,), freeze=True)(x), net(x))
            torch.compile(net, backend="plait", dynamic=True)(torch.randn(9, 64))
        torch.compile(net, backend="plait")(x).sum().backward()
        plait.compile(net, (x,))  # nobody calls it
    *timed, uncalled = data_in(tmp_path / "page.html")["graphs"]
    steps = [s for g in timed for s in g["steps"]]
    assert {g["kind"] for g in timed} == {"inference", "forward", "backward"}
    assert all(s["time_ns"] > 0 and s["roofline"] is not None for s in steps)
    assert any(not s["loops"] and s["name"] in timed[0]["kernel_sources"] for s in steps)  # packed
    assert [g["why_untimed"] for g in timed] == [""] * len(timed)
    assert uncalled["why_untimed"] == "no call of it was seen"


def test_the_block_of_the_page_about_reports_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "report.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    step = torch.compile(lambda: torch.ones(3).cos() - 1, backend="plait")
    exec(block, {"plait": plait, "train_step": step})
    assert "plait_" in (tmp_path / "report.html").read_text()


N_CALLS = 0


@torch.library.custom_op("plaittest::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """An operator that does more than compute, as those of ranks do that wait for each other."""
    global N_CALLS
    N_CALLS += 1
    return x + 1


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_may_do_more_than_compute_runs_as_often_as_without(tmp_path: Path) -> None:
    torch._dynamo.reset()
    before = N_CALLS
    with torch.no_grad(), plait.report(tmp_path / "page.html"):
        torch.compile(lambda x: counted(x.sin()).cos(), backend="plait")(torch.ones(100))
    assert N_CALLS == before + 1
    text = (tmp_path / "page.html").read_text()
    assert "Kernels and calls are not timed: it calls plaittest::counted, which may do more" in text


def test_nothing_is_loaded_that_nobody_asked_for(tmp_path: Path) -> None:
    code = """
        import sys, torch
        net, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.ones(3, 8)
        others = {*sys.modules}
        import plait
        print(sorted(m for m in {*sys.modules} - others if m.startswith("plait.")))
        compiled = torch.compile(net, backend="plait")
        compiled(x).sum().backward()
        plait.compile(net, (x,))(x)
        asked = "plait.tools", "plait.capture.names", "plait.wrapper.python", "jinja2", "rich"
        print(sorted(m for m in {*sys.modules} - others if m.startswith(asked)))
    """
    done = warm.run("-c", dedent(code), env=os.environ, cwd=tmp_path)
    assert done.stdout == "[]\n[]\n"


# ------------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: a package of Debian, which make env installs")
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync.sync_playwright() as p:
        args = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-background-networking",
        ]
        made = p.chromium.launch(executable_path=CHROMIUM, args=args)
        yield made
        made.close()


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """A report of a graph with two kernels and a call."""
    return explained()


def opened(browser: Any, folder: Path, data: dict[str, Any], at: str = "", **how: Any) -> Any:
    """The page of a report, in a browser without a network, where no script fails."""
    (folder / "page.html").write_text(page(data), encoding="utf-8")
    shown = browser.new_context(offline=True, **how).new_page()

    def fail(error: object) -> None:
        raise AssertionError(error)

    shown.on("pageerror", fail)
    shown.on("dialog", fail)
    shown.goto(f"file://{folder}/page.html{at}")
    return shown


def test_rows_open_and_lead_to_what_they_name(
    browser: Any, small: dict[str, Any], tmp_path: Path
) -> None:
    shown = opened(browser, tmp_path, small)
    steps = small["graphs"][0]["steps"]
    assert shown.locator(".step").count() == len(steps) == 3
    assert (
        shown.locator("svg.graph a").count() == 3 and shown.locator("svg.graph path").count() >= 2
    )
    kernel = next(k for k, s in enumerate(steps) if s["what"] == "kernel")
    shown.locator(f"svg.graph a[href='#g0s{kernel}']").click()
    row = shown.locator(f"#g0s{kernel}")
    assert row.get_attribute("open") is not None
    text = row.text_content()
    assert steps[kernel]["loops"].strip() in text and "i64 tid" in text
    row.get_by_text("instruction ").last.click()
    line = shown.locator(f"#g0p0i{steps[kernel]['instruction']}")
    assert line.is_visible() and steps[kernel]["name"] in line.text_content()
    line.get_by_role("link").click()
    row.get_by_role("link", name=steps[kernel]["writes"][0], exact=True).click()
    buffer = shown.locator(f"[id='g0b-{steps[kernel]['writes'][0]}']")
    assert buffer.is_visible() and steps[kernel]["name"] in buffer.text_content()
    where = steps[kernel]["origin"][0]["where"]
    row.get_by_role("link", name=where).click()
    assert shown.locator(f"[id='line-{where}']").is_visible()
    shown.locator("svg.memory a").first.click()
    assert shown.locator("#g0peak0 li").first.is_visible()
    shown.context.close()


def test_keys(browser: Any, small: dict[str, Any], tmp_path: Path) -> None:
    shown = opened(browser, tmp_path, small)
    here = "document.activeElement.closest('.step')?.id"
    for keys, there in (("j", "g0s0"), ("jj", "g0s2"), ("k", "g0s1"), ("j", "g0s2"), ("j", "g0s2")):
        for key in keys:
            shown.keyboard.press(key)
        assert shown.evaluate(here) == there
    shown.keyboard.press("Enter")
    assert shown.locator("#g0s2 pre").first.is_visible()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert shown.evaluate(outline) == "solid"  # who tabs sees where they are
    shown.keyboard.press("/")
    shown.keyboard.type("softmax")
    visible = shown.locator(".step:visible")
    assert visible.count() == 1 and "softmax" in visible.text_content()
    shown.keyboard.press("Escape")
    assert visible.count() == 3
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.tagName") in ("A", "SUMMARY")
    shown.context.close()


def test_dark_narrow_and_printed(browser: Any, small: dict[str, Any], tmp_path: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = opened(browser, tmp_path, small)
    dark = opened(browser, tmp_path, small, color_scheme="dark")
    assert light.evaluate(paper) == "rgb(255, 255, 255)" != dark.evaluate(paper)
    narrow = opened(browser, tmp_path, small, "#g0s0", viewport={"width": 360, "height": 700})
    wide = "document.documentElement.scrollWidth"
    assert narrow.evaluate(wide) == 360  # only what is in a frame of its own scrolls sideways
    light.emulate_media(media="print")
    light.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert (
        light.locator("#g0s2 pre").first.is_visible() and not light.locator("#search").is_visible()
    )
    for shown in (light, dark, narrow):
        shown.context.close()


BAD = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&amp;<!--"


def test_every_text_stays_text(browser: Any, small: dict[str, Any], tmp_path: Path) -> None:
    known = ("what", "order", "target", "where", "kind")  # of a few words; kind: of a graph

    def worst(value: Any, key: str = "") -> Any:
        """The data with other words."""
        if isinstance(value, dict):
            return {k: worst(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [worst(v, key) for v in value]
        return BAD if isinstance(value, str) and key not in known else value

    data = worst(small)
    refusal = {"pair": [BAD, BAD], "steps": [0, None], "reason": BAD, "kind": BAD}
    data["graphs"][0]["refusals"] = [refusal]
    data["graphs"][0]["meanings"] = {BAD: BAD}
    data["graphs"][0]["kernel_sources"] = {BAD: BAD}
    data["findings"] = [dict.fromkeys(("kind", "what", "where", "why", "advice"), BAD)]
    data["findings"][0] |= {"graph": 0, "step": 0}
    shown = opened(browser, tmp_path, data)
    shown.evaluate("for (const d of document.querySelectorAll('details')) open(d)")
    assert shown.locator("script").count() == 3 and shown.locator("img").count() == 0
    assert shown.locator("#g0s0").text_content().count(BAD) > 3
    assert BAD in shown.locator(".refusals li").text_content()
    shown.context.close()


def large(n: int) -> dict[str, Any]:
    """A report of n kernels in a row."""
    data = explained(lambda x, w: x + w, 8)
    (graph,) = data["graphs"]
    (step,) = graph["steps"]
    program = graph["programs"][0]
    text, buffer = program["instructions"][step["instruction"]], program["buffers"][-1]
    source = graph["kernel_sources"][step["name"]]
    graph["steps"] = [
        {**step, "name": f"k{k}", "reads": [f"b{k - 1}"], "writes": [f"b{k}"], "instruction": k}
        for k in range(n)
    ]
    graph["kernel_sources"] = {f"k{k}": source for k in range(n)}
    program["instructions"] = [text] * n
    program["buffers"] = [{**buffer, "name": f"b{k}", "born": k, "dies": k + 2} for k in range(n)]
    program["peaks"] = [{"at": n - 1, "nbytes": 999 * 64, "buffers": ["b0"]}]
    program["held_nbytes"] = [k % 1000 * 64 for k in range(n)]
    return data


def test_large_pages_grow_with_their_kernels_alone(browser: Any, tmp_path: Path) -> None:
    """A page of 10,000 kernels opens in 0.6 s on two cores that have a load of 12 (`python -m
    tests.test_report_page FOLDER`), of which the browser needs most to read 22 MB; here what takes
    the time is counted."""
    count = "document.querySelectorAll('*').length"
    found = []
    for n in (1000, 3000):
        shown = opened(browser, tmp_path, large(n))
        shown.evaluate("document.querySelector('.steps').scrollIntoView()")
        shown.locator("#g0s0").wait_for(state="attached")  # comes with its piece alone
        assert shown.evaluate("parsed === undefined")  # the data waits until it is wanted
        found.append((shown.evaluate(count), (tmp_path / "page.html").stat().st_size))
        shown.keyboard.press("j")
        shown.keyboard.press("Enter")
        shown.locator("#g0s0 pre").nth(1).wait_for(state="attached")
        shown.goto(shown.url.partition("#")[0] + f"#g0s{n - 1}")
        assert shown.locator(f"#g0s{n - 1} pre").nth(1).is_visible()
        shown.goto(shown.url.partition("#")[0] + f"#g0p0i{n - 1}")
        assert shown.locator(f"#g0p0i{n - 1}").is_visible()
        assert shown.locator(".step").count() <= 500  # little of what lies between
        shown.locator("details.drawing summary").click()
        shown.locator("svg.graph a").first.wait_for(state="attached")  # all come at once
        assert shown.locator("svg.graph a").count() == n
        shown.context.close()
    (elements, nbytes), (elements_2, nbytes_2) = found
    few = 100  # stages of a compile that are long enough to be shown
    assert elements_2 <= elements + 20 + few < 1500  # one for each hundred kernels
    assert nbytes_2 < 3.1 * nbytes


def test_a_search_in_a_large_page(browser: Any, tmp_path: Path) -> None:
    shown = opened(browser, tmp_path, large(2000))
    shown.keyboard.press("/")
    shown.keyboard.type("k1777")
    rows = shown.locator(".step:visible")
    assert rows.count() == 1 and "k1777" in rows.text_content()
    assert shown.locator("#found").text_content() == "1 found"
    shown.keyboard.press("Tab")
    shown.keyboard.press("j")
    here = "document.activeElement.closest('.step')?.id"
    assert shown.evaluate(here) == "g0s1777"
    shown.keyboard.press("j")
    assert shown.evaluate(here) == "g0s1777"  # there is no other
    shown.evaluate("location.hash = '#g0s3'")  # a link to what was not found ends the search
    shown.locator("#g0s3 pre").first.wait_for(state="visible")
    assert shown.locator("#found").text_content() == "" and shown.locator("#g0s1777").is_visible()
    shown.context.close()


def test_every_link_leads_somewhere(
    browser: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    def control(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() @ w, (x,))
        return net(y, w).msort()

    data = explained(control)
    torch._dynamo.reset()
    varying = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(varying, 0)
    with torch.no_grad():
        sizes = plait.explain(lambda x: x.exp().sum(), varying, quiet=True).to_json()["graphs"]
    assert any(i["name"].startswith("s") for i in sizes[0]["inputs"])  # a size is no buffer
    data["graphs"] += sizes
    request.getfixturevalue("compile_only")
    mode, (x, w) = fakes((64, 128), (128, 128))
    fn = lambda x, w: F.gelu(F.gelu(x).softmax(-1) @ w).sum(0)
    on_gpu = graph_data(record(fn, x, w, mode=mode, cuda_graphs=True))
    data["graphs"].append(on_gpu)
    shown = opened(browser, tmp_path, data)
    assert any(g["refusals"] for g in data["graphs"]) and on_gpu["programs"][0]["partitions"]
    lost = shown.evaluate("""() => {
      for (let k = 0; k < 3; k++)  // what opens has more in it
        for (const d of document.querySelectorAll("details")) open(d);
      const links = new Set([...document.querySelectorAll("a")].map((a) => a.getAttribute("href")));
      return [...links].filter((to) => {
        reveal(decodeURIComponent(to.slice(1)));
        return !document.getElementById(decodeURIComponent(to.slice(1)));
      });
    }""")
    assert lost == [] and shown.locator("a").count() > 100
    for details in shown.locator("details.partitions a").all():
        where = details.get_attribute("href")
        assert "partition" in shown.locator(f"[id='{where[1:]}']").text_content()
    shown.context.close()


def test_every_reason_of_the_scheduler_has_a_meaning() -> None:
    found = []
    for file in sorted((ROOT / "plait" / "schedule").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason":
                (text,) = node.args
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                words = (p.value if isinstance(p, ast.Constant) else "7" for p in parts)
                found.append("".join(words))
    spoken = [reason for reason in found if reason != "7"]  # those that stand there
    assert len(spoken) > 20 and [r for r in spoken if not meaning(r)] == []
    assert meaning("it is Tuesday") == ""


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        folder = Path(sys.argv[1])
        made = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(3):
            shown = opened(made, folder, large(10_000))
            times = "JSON.stringify(performance.getEntriesByType('navigation')[0])"
            told = json.loads(shown.evaluate(times))
            print(
                f"{told['domContentLoadedEventEnd']:.0f} ms to the end of scripts, "
                f"{told['loadEventEnd']:.0f} ms to the end"
            )
