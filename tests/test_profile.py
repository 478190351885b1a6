"""plait.profile: times by module, source line and kernel, the host's gaps, and the trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import plait
from plait.tools.profile import _gaps, instructions_of, profile_of, programs
from plait.wrapper.program import observers_of_process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


def test_modules_lines_and_kernels_of_a_call(tmp_path: Path) -> None:
    model, x = Stack().eval(), torch.randn(32, 64)
    with torch.no_grad():
        found = plait.profile(model, x, calls=3, quiet=True)
    modules = {r.what: r for r in found.by_module}
    assert modules["blocks.*.up"].times == modules["blocks.*.down"].times == 3
    assert {"blocks.*.act", "head"} <= modules.keys()
    assert any(r.what.startswith("test_profile.py:") for r in found.by_line)
    kernels = {r.what: r.times for r in found.by_kernel}
    assert kernels["aten::addmm"] == 7 and any("gelu" in k or "erf" in k for k in kernels)
    busy = sum(us for _, us, _ in found.steps)
    assert 0 < busy <= found.wall_us
    assert busy + sum(r.us for r in found.gaps) == pytest.approx(found.wall_us)
    assert {"guards", "launching", "Python"} <= {r.what for r in found.gaps}
    assert all(title in str(found) for title in ("modules:", "source lines:", "the host, besides:"))
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = [e["args"] for e in events if e.get("name") == "aten::addmm" and "module" in e["args"]]
    assert len(told) == 3 * 7 and told[0]["module"] == "blocks.0.up"
    assert any("test_profile.py" in line for a in told for line in a["source"]) or told[0]["source"]
    assert json.loads(json.dumps(found.to_json()))["steps"][0]["graph"]


def test_layers_that_no_code_of_the_users_calls() -> None:
    """Dynamo knows no line of them; each has its own name."""
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    found = plait.profile(block.eval(), torch.randn(32, 64), calls=1, quiet=True)
    assert [r.what for r in found.by_line] == ["no line known"]
    assert {"0", "2"} <= {r.what for r in found.by_module}


def test_the_first_call_that_is_profiled_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process it takes a millisecond, whatever is called."""
    made: list[Any] = []

    def profiles(**how: Any) -> Any:
        made.append(torch.profiler.profile(**how))
        return made[-1]

    monkeypatch.setattr("plait.tools.profile.torch_profile", profiles)
    plait.profile(nn.Linear(4, 4), torch.ones(2, 4), calls=2, quiet=True)
    assert [sum(e.name == "plait: a call" for e in p.events()) for p in made] == [1, 2]


def test_a_training_step_has_its_backward_pass() -> None:
    found = plait.profile(Stack().train(), torch.randn(32, 64), calls=2, quiet=True)
    graphs = {i.graph.partition("_")[0] for i, _, _ in found.steps}
    assert graphs == {"forward", "backward"}
    assert any(i.module == "blocks.1.down" for i, _, _ in found.steps if "backward" in i.graph)


class Twice(nn.Module):
    """Two layers read what a third one makes: its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.left(x) * self.right(x)


def test_sums_of_gradients_are_of_modules() -> None:
    found = plait.profile(Twice(), torch.randn(32, 64), calls=2, quiet=True)
    sums = [i for i, _, _ in found.steps if any(o.endswith("aten.add.Tensor") for o in i.lines)]
    assert {i.module for i in sums} <= {"left", "right"} and len(sums) == 1
    others = [i for i, _, _ in found.steps if not i.module]
    assert others and all("aten.mul.Tensor" in i.lines[0] for i in others)
    rows = {r.what for r in found.by_module}
    assert rows == {"first", "left", "right", "outside of submodules"}


def test_programs_under_a_profiler_of_the_users_own() -> None:
    model, x = Stack().eval(), torch.randn(32, 64)
    compiled = torch.compile(model, backend="plait", options={"warm_start": False})
    with torch.no_grad():
        with programs() as records:
            compiled(x)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as taken:
            compiled(x)
            compiled(x)
    found = profile_of(taken, records, calls=2)
    assert {r.what: r.times for r in found.by_kernel}["aten::addmm"] == 7
    (record,) = records
    assert len(instructions_of(record)) == len(found.steps)
    busy = sum(us for _, us, _ in found.steps) + sum(r.us for r in found.gaps)
    assert busy == pytest.approx(found.wall_us)  # from the first range to the last, by calls
    assert observers_of_process == []


class Broken(nn.Module):
    """Four graphs that call the same operators, and a layer that no compiler sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.unseen = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch._dynamo.disable(self.unseen)(x)
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.first(self.third(x))


def test_graphs_that_call_the_same_are_told_apart() -> None:
    found = plait.profile(Broken(), torch.randn(8, 64), calls=2, quiet=True)
    graphs: dict[str, set[tuple[str, str, float]]] = {"forward": set(), "backward": set()}
    for i, _, times in found.steps:
        if i.name in ("aten::addmm", "aten::mm"):
            graphs[i.graph.partition("_")[0]].add((i.module, i.lines[0].split()[0], times))
    begin = Broken.forward.__code__.co_firstlineno
    first, second, last = (f"test_profile.py:{begin + n}" for n in (1, 3, 5))
    assert graphs["forward"] == {
        ("first", first, 1.0), ("second", second, 1.0), ("third", last, 1.0), ("first", last, 1.0)
    }  # fmt: skip
    assert graphs["backward"] == {
        ("first", first, 1.0), ("second", second, 2.0), ("third", last, 2.0), ("first", last, 2.0)
    }  # fmt: skip
    outside = {r.what: r.times for r in found.gaps}["operators outside of programs"]
    assert outside == 2  # the layer that no compiler sees, and a gradient to begin with


class Range(SimpleNamespace):
    """An event as torch.profiler has them: microseconds from its start to its end."""

    def __init__(self, name: str, start: float, end: float, thread: int = 1) -> None:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        super().__init__(name=name, thread=thread, time_range=span)

    __hash__ = object.__hash__


def test_what_the_host_does_between_instructions_has_names() -> None:
    events = [
        Range("plait: a call", 0, 100),
        Range("TorchDynamo Cache Lookup", 1, 11),
        Range("Torch-Compiled Region: 1/0", 12, 40),
        Range("Pregraph bytecode", 13, 15),
        Range("plait_k", 20, 25),
        Range("aten::empty_strided", 26, 29),
        Range("aten::item", 30, 34),
        Range("aten::empty", 31, 32),  # a part of it
        Range("aten::sum", 41, 46),
        Range("aten::empty", 42, 43),
        Range("autograd::engine::evaluate_function: PlaitBackward", 50, 70),
        Range("PlaitBackward", 52, 68),
        Range("plait_k", 55, 60),
        Range("autograd::engine::evaluate_function: AccumulateGrad", 70, 73),
        Range("aten::add_", 71, 72),
        Range("cudaMalloc", 80, 84, thread=2),
    ]
    kernels = dict.fromkeys((e for e in events if e.name == "plait_k"), object())
    on_cpu = {r.what: r.us for r in _gaps(events, kernels, False, 100, 1)}
    assert on_cpu == {
        "guards": 10 + 2, "launching": 28 - 2 - 5 - 3 - 4 + 16 - 5, "allocating": 3 + 4,
        "waiting for the device": 4, "operators outside of programs": 5, "autograd": 20 - 16 + 3,
        "Python": 100 - 28 - 10 - 5 - 20 - 3 - 4,
    }  # fmt: skip
    on_gpu = {r.what: r.us for r in _gaps(events, kernels, True, 100, 1)}
    assert on_gpu == on_cpu | {"launching": on_cpu["launching"] + 10}


class Careful(nn.Module):
    """Goes on without a layer that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.head = Stack(), nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10))

    def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Tensor]:
        try:
            self.head(x)
        except RuntimeError:
            x = self.stack(x)
        return {"result": self.head(x + y).sin()}


def test_modules_and_lines_have_the_same_names_without_dynamo() -> None:
    torch._dynamo.reset()
    model, x, y = Careful().eval(), torch.randn(32, 64), torch.randn(32, 10)
    stack = model.stack
    with torch.no_grad(), programs() as records:
        torch.compile(stack, backend="plait", options={"warm_start": False})(x)
        plait.compile(stack, (x,))
        plait.compile(lambda x: stack(x), (x,))
        plait.compile(torch.export.export(stack, (x,), strict=True))
    told = [[(i.name, i.lines, i.module) for i in instructions_of(r)] for r in records]
    dynamo, ours, function, exported = told
    assert dynamo == ours == exported and "blocks.2.up" in {module for *_, module in ours}
    assert [module for *_, module in function] == [module for *_, module in ours]
    again = plait.compile(model, {"x": x, "y": y})
    found = {i.module for i in instructions_of(again.record)}  # type: ignore[attr-defined]
    assert {"stack.blocks.0.up", "stack.head"} <= found

    profiled = plait.profile(again, x=x, y=y, calls=2, quiet=True)
    rows = {r.what: r.times for r in profiled.by_module}
    assert rows["stack.blocks.*.up"] == 3 and "stack.head" in rows
    assert {"launching", "Python"} <= {r.what for r in profiled.gaps}


def test_modules_of_graphs_have_names() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    first, modules, code = net[0], list[dict[str, str]](), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = plait.compile(graph, inputs)  # its code is not written yet
        modules.append(compiled.record.modules)  # type: ignore[attr-defined]
        code.append(graph.code)
        return compiled

    graph = torch.fx.symbolic_trace(net)
    out = graph.graph.output_node()
    out.args = tuple(graph.graph.find_nodes(op="placeholder"))
    for node in reversed(list(graph.graph.nodes)[1:-1]):
        graph.graph.erase_node(node)  # and its code is that of before
    with torch.no_grad():
        torch.compile(net, backend=backend)(x)
        backend(graph, [x])
        both = plait.compile(lambda x: net(x) + first(x), (x,))
    assert {*modules[0].values()} == {"0", "1"} and "def forward" in code[0]
    assert {*both.record.modules.values()} == {"0", "1"}  # type: ignore[attr-defined]


class Branches(nn.Module):
    """What follows a layer is one of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cond(
            x.sum() > 0,
            lambda x: self.left(x).softmax(-1),
            lambda x: self.right(x).cumsum(-1),
            (x,),
        )


def test_buffers_on_the_way_have_the_module_of_what_is_computed() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.last(self.first(x)).exp()).sin()

    with torch.no_grad():
        small = plait.compile(Small().eval(), (torch.randn(4, 8),))
        branches = plait.compile(Branches(), (torch.randn(64, 64),))
    # The sums before the bias are no node's value.
    assert instructions_of(small.record)[0].module == "first"  # type: ignore[attr-defined]
    told = instructions_of(branches.record)  # type: ignore[attr-defined]
    assert [i.module for i in told if "softmax" in i.name or "cumsum" in i.name] == ["", ""]


def test_what_cannot_be_profiled_says_so() -> None:
    x = torch.randn(8)
    with pytest.raises(plait.UserError, match="CUDA graphs"):
        plait.profile(torch.sin, x, mode="reduce-overhead")
    with pytest.raises(plait.UserError, match="0 calls"):
        plait.profile(torch.sin, x, calls=0)
    with pytest.raises(plait.UserError, match="profile"):
        plait.profile("model", x)  # type: ignore[arg-type]
