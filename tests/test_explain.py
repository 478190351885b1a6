"""plait.explain and the debug folder: what people see of a compilation."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.capture import dynamo
from plait.capture.pending import meanwhile
from plait.capture.warm.frames import outcomes
from plait.config import Config
from plait.ir.text import read_program
from plait.schedule.text import read_plan
from plait.tools.profile import programs
from plait.wrapper.instructions import Launch
from plait.wrapper.text import read, text
from tests import warm


@pytest.fixture(autouse=True)
def of_this_test() -> None:
    """Reports tell of all frames of the process."""
    meanwhile.clear()
    outcomes.clear()


class Net(nn.Module):
    """A matmul, a call of PyTorch's own by choice, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.nn.functional.gelu(self.linear(x)))
        return torch.linalg.inv_ex(y + 100 * torch.eye(64))[0].softmax(-1)


@torch.library.custom_op("plaittest::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """An operator for which there is no rule."""
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def inputs() -> torch.Tensor:
    return torch.randn(64, 96)


def two_softmaxes(x: torch.Tensor) -> torch.Tensor:
    """Two kernels, since one needs all of what the other makes."""
    return x.softmax(0).softmax(1)


def test_the_report_counts_kernels_calls_and_fallbacks(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    with torch.no_grad():
        report = plait.explain(lambda x: halved(net(x)), inputs())
    assert capsys.readouterr().out.strip() == report.text.strip() == str(report).strip()
    assert len(report.graphs) == 1
    assert report.kernels == 2
    calls = {"aten::addmm": 1, "aten::linalg_inv_ex": 1, "plaittest::halved": 1}
    assert report.extern_calls == calls
    assert report.fallbacks["plaittest::halved"] == 1
    assert "extern aten::addmm: by choice" in report.details
    assert "extern plaittest::halved: fell back: no lowering rule" in report.details
    assert "gelu_native_layer_norm" in report.details
    assert "test_explain.py:" in report.details  # source lines
    head, *lines = report.text.splitlines()
    assert head == (
        f"1 graph: {report.graphs[0].aten_ops} ATen ops -> 2 kernels, 3 calls of PyTorch's own "
        f"operators, {sum(report.fallbacks.values())} of them for want of a rule; 0 pairs not "
        "fused"
    )
    assert "  1 x aten::addmm" in lines
    assert "  1 x plaittest::halved: no lowering rule" in lines
    assert not any("test_explain.py:" in line for line in lines)


def test_memory_that_calls_allocate_is_told() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.sin(), (x,))

    x, calls = torch.randn(64, 64), "1 allocated by calls of operators (16.0 KiB)"
    told: dict[str, Callable[[torch.Tensor], object]] = {
        f"  memory: {calls}": lambda x: x @ x,
        "  memory: 1 allocated (16.0 KiB)": lambda x: x + 1,
        f"  memory: 2 allocated (16.0 KiB), {calls}": branches,
    }
    for line, fn in told.items():
        assert line in plait.explain(fn, x, quiet=True).text.splitlines()
    rows = torch.export.Dim("rows", min=2, max=100)
    varying = plait.compile(lambda x: x @ x.T, (x,), ({0: rows},))
    assert f"{calls[:-1]} in the example)" in plait.explain(varying, quiet=True).text


def test_details_are_printed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    report = plait.explain(lambda x: x.sin() + 1, inputs(), details=True)
    assert capsys.readouterr().out == f"{report.text}\n{report.details}\n"


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report = plait.explain(lambda x: x.sin() + 1, inputs(), quiet=True)
    assert capsys.readouterr().out == ""
    assert report.kernels == 1
    assert report.fallbacks == {}


def test_backward_graphs_are_explained_and_no_gradient_is_left() -> None:
    net = Net()
    x = inputs().requires_grad_()
    report = plait.explain(net, x, quiet=True)
    assert [g.kind for g in report.graphs] == ["forward", "backward"]
    assert x.grad is None
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("tool", [plait.explain, plait.profile, plait.bisect])
def test_parameters_that_a_function_holds_have_gradients(tool: Any) -> None:
    """In a closure or a list. The graph behind what was computed before stays usable."""
    net, before = nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    x, held = before.sin(), [net]
    other = torch.ones(4, 8)
    behind = before.exp()
    for fn, given in (
        (lambda x: net(x).sin(), x),
        (lambda x: held[0](x), other),
        (lambda x: x * behind, other),
    ):
        with programs() as records:
            tool(fn, given, quiet=True)
        assert {r.kind for r in records} == {"forward", "backward"}
    (x + behind).sum().backward()
    torch.testing.assert_close(before.grad, before.cos() + before.exp())
    assert net.weight.grad is None


def test_gradients_that_a_function_took_of_what_it_returns_are_not_taken_again() -> None:
    net = nn.Linear(8, 8)
    compiled = torch.compile(net, backend="plait", options={"warm_start": False})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    step(torch.ones(4, 8))  # its backward graph is compiled before
    for tool in (plait.explain, plait.profile):
        tool(step, torch.ones(4, 8), quiet=True)


def test_every_graph_between_breaks_is_shown() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() * 2

    report = plait.explain(broken, inputs(), quiet=True)
    assert len(report.graphs) == 2
    (why,) = report.breaks
    assert re.match(r"test_explain.py:\d+: ", why) and "graph_break" in why
    assert "graph breaks:\n  test_explain.py:" in report.text

    def says(x: torch.Tensor) -> torch.Tensor:
        print("now")
        return x.sin()

    report = plait.explain(says, inputs(), quiet=True)
    (why,) = report.breaks
    assert f"  {why}; Dynamo does not know how to trace builtin operator `print`" in report.text


def test_breaks_with_nothing_to_compile_before_them() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        factor = x.sum().item()
        if x.amax() > 3:
            x = x * 2
        return x * factor

    def whole(x: torch.Tensor) -> float:
        return asks(x).sum().item()

    report = plait.explain(whole, inputs(), quiet=True)
    first = inspect.getsourcelines(asks)[1]
    for line, cause in ((1, "item()"), (2, "branching"), (7, "item()")):
        assert sum(f":{first + line}: " in b and cause in b for b in report.breaks) == 1
    found = report.to_json()["findings"]
    assert len(found) == len(report.breaks) and all(f["advice"] for f in found)


def test_a_function_that_runs_its_backward_pass_itself() -> None:
    net, x = Net(), inputs()

    def step() -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    report = plait.explain(step, quiet=True)
    assert [g.kind for g in report.graphs] == ["forward", "backward"]
    assert net.linear.weight.grad is not None
    assert any("backward" in why for why in report.breaks)
    want, net.linear.weight.grad = net.linear.weight.grad, None
    step()
    torch.testing.assert_close(net.linear.weight.grad, want)


def test_a_loss_whose_graph_is_used_up_is_left_alone() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.sin().sum()
        loss.backward(torch.ones(()))
        return loss

    x = inputs().requires_grad_()
    plait.explain(step, x, quiet=True)
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_sizes_that_vary_are_shown_with_their_ranges() -> None:
    x = inputs()
    torch._dynamo.mark_dynamic(x, 0, min=4, max=900)
    text = plait.explain(lambda x: x.softmax(0) * 2, x, quiet=True).text
    assert re.search(r"  sizes that may vary: s\d+ >= 4 and <= 900\n", text)


def switches_grad_mode(x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return x * 2


def test_why_calls_go_through_the_wrapper_is_shown() -> None:
    plain = plait.explain(lambda x: x * 2, inputs(), quiet=True)
    assert plain.graphs[0].wrapper_reason == "" and "AOTAutograd" not in plain.text
    with torch.enable_grad():  # leaves grad mode as it was
        wrapped = plait.explain(switches_grad_mode, inputs(), quiet=True)
    why = wrapped.graphs[0].wrapper_reason
    assert why and f"  called through AOTAutograd's wrapper: {why}\n" in wrapped.text


def test_what_was_compiled_before_an_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        raise ValueError(f"no {y.shape}")

    with pytest.raises(ValueError, match="no torch"):
        plait.explain(fails, inputs())
    printed = capsys.readouterr().out
    assert printed.startswith("ValueError after these graphs were compiled\n1 graph: ")
    with pytest.raises(ValueError, match="no torch"):
        plait.explain(fails, inputs(), quiet=True)
    assert capsys.readouterr().out == ""


def test_arguments_are_given_as_in_a_call() -> None:
    def scaled(x: torch.Tensor, by: float, mode: torch.Tensor) -> torch.Tensor:
        return x * by + mode

    x = inputs()
    assert plait.explain(scaled, x, 3.0, x, quiet=True).kernels == 1
    assert plait.explain(functools.partial(scaled, mode=x), x, by=3.0, quiet=True).kernels == 1
    with pytest.raises(
        plait.UserError, match=r"plait\.explain needs a function or module, got int"
    ):
        plait.explain(3, x)  # type: ignore[arg-type]


def test_what_plait_compile_returned_is_shown_and_not_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[None] = []
    for result in (lambda y: y, lambda y: {"y": y}):
        compiled = plait.compile(lambda x: (calls.append(None), result(x.sin() + 1))[1], inputs())  # noqa: B023
        before = len(calls)
        report = plait.explain(compiled, inputs())
        assert report.graphs == (compiled.record,) and report.kernels >= 1
        assert capsys.readouterr().out.startswith(
            "compiled by plait.compile before, not run again\n1 graph: "
        )
        assert len(calls) == before


def test_why_there_is_no_graph() -> None:
    sparse = plait.explain(lambda x: x @ torch.ones(96, 2), inputs().to_sparse(), quiet=True)
    assert sparse.graphs == () and sparse.text.startswith("Dynamo captured no graph: ")
    assert "sparse" in sparse.note
    assert "no operations on tensors" in plait.explain(lambda: None, quiet=True).note
    assert plait.explain(lambda x: x + 1, inputs(), quiet=True).note == ""


def test_equal_kernels_and_reasons_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "note_skipped", lambda: None)  # other tests have such functions
    monkeypatch.setattr(dynamo, "left_to_eager", [])

    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.nn.functional.layer_norm((x @ w).tanh(), (96,))
        return x

    with torch.no_grad():
        report = plait.explain(layers, inputs(), torch.randn(96, 96), quiet=True)
    assert report.kernels == 6
    assert re.search(
        r"\n  6 x plait_tanh_native_layer_norm_\w+: tanh, native_layer_norm; about", report.text
    )
    assert len(report.text.splitlines()) < 15

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(0).softmax(1).softmax(0).softmax(1)

    report = plait.explain(twice, torch.randn(70, 90), quiet=True)
    refusals = report.refusals
    assert sum(refusals.values()) >= 2 and len(refusals) < sum(refusals.values())
    assert f"; {sum(refusals.values())} pairs not fused\n" in report.text
    assert not any(c.isdigit() for kind in refusals for c in kind)


def test_explaining_again_shows_all_of_it_again() -> None:
    compiled = torch.compile(lambda x: x.exp() * 3, backend="plait")
    compiled(inputs())
    counts = [plait.explain(compiled, inputs(), quiet=True).kernels for _ in range(12)]
    assert counts == [1] * 12


def test_reasons_against_fusion_are_told() -> None:
    report = plait.explain(two_softmaxes, torch.randn(70, 90), quiet=True)
    assert report.kernels == 2
    assert "not fused: " in report.details and "\nnot fused:\n  1 pair: " in report.text


def test_options_reach_the_compiler() -> None:
    report = plait.explain(lambda x: x + 1, inputs(), options={"wrapper": "python"}, quiet=True)
    assert report.graphs[0].target == "python"
    with pytest.raises(plait.UserError, match="unknown option"):
        plait.explain(lambda x: x + 1, inputs(), options={"wraper": "python"}, quiet=True)


def test_what_was_not_fused_is_equal_in_two_runs() -> None:
    def lines() -> list[str]:
        torch._dynamo.reset()
        report = plait.explain(Net(), inputs(), quiet=True)
        lines = (report.text + report.details).splitlines()
        return [s for s in lines if " ms to compile" not in s]

    assert lines() == lines()


# --------------------------------------------------------------------------------- the debug folder
FILES = (
    "0_captured.py 0_given.json 1_graph.py 2_loops.txt 3_plan.txt 4_kernels.cpp 5_wrapper.txt "
    "6_module.py"
).split()


def test_the_debug_folder_has_every_stage(tmp_path: Path) -> None:
    table = torch.randn(5, 96)
    report = plait.explain(
        lambda x: (x + table[3]).relu(), inputs(), options={"debug_dir": str(tmp_path)}, quiet=True
    )
    (folder,) = tmp_path.iterdir()
    assert folder.name == report.graphs[0].name
    assert sorted(p.name for p in folder.iterdir() if p.suffix != ".pt") == FILES
    assert "torch.ops.aten.relu" in (folder / "0_captured.py").read_text()
    assert "pointwise" in (folder / "2_loops.txt").read_text()
    assert "def plait_" in (folder / "3_plan.txt").read_text()
    assert read((folder / "5_wrapper.txt").read_text()) == report.graphs[0].wrapper
    assert (folder / "5_wrapper.txt").read_text() == text(report.graphs[0].wrapper)


def run_module(file: Path, *args: str) -> str:
    """What a stranger sees who runs a debug folder's module from another place."""
    env = {
        "PYTHONPATH": str(Path(plait.__file__).parent.parent),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    run = warm.run(file, *args, env=env, cwd=file.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_module_of_the_debug_folder_runs_by_itself(tmp_path: Path) -> None:
    weight = torch.randn(96, 32)
    report = plait.explain(
        lambda x: (x @ weight).relu().sum(0),
        inputs(),
        options={"debug_dir": str(tmp_path)},
        quiet=True,
    )
    printed = run_module(tmp_path / report.graphs[0].name / "6_module.py")
    assert f"{report.graphs[0].name}: float32[32]" in printed
    assert " us of " in printed
    (kernel,) = [i.kernel for i in report.graphs[0].wrapper.body if isinstance(i, Launch)]
    line = re.search(rf"{kernel} +([\d.]+) us +([\d.]+) KiB +([\d.]+) GB/s +([\d.]+) us", printed)
    assert line is not None and float(line[1]) > 0
    assert float(line[2]) == pytest.approx((64 * 32 + 32) * 4 / 1024, abs=0.01)
    assert float(line[3]) == pytest.approx(float(line[2]) * 1.024 / float(line[1]), rel=0.2)


def test_the_debug_folders_of_a_training_step_and_of_dynamic_shapes(tmp_path: Path) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 48)
            self.norm = nn.BatchNorm1d(48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.dropout(self.norm(self.linear(x)), 0.3)
            return torch.cat([y, y.roll(1, 0)]).softmax(-1)

    x = torch.randn(37, 24)
    torch._dynamo.mark_dynamic(x, 0)
    report = plait.explain(Step(), x, options={"debug_dir": str(tmp_path)}, quiet=True)
    assert [g.kind for g in report.graphs] == ["forward", "backward"]
    for graph in report.graphs:
        folder = tmp_path / graph.name
        assert sorted(p.name for p in folder.iterdir() if p.suffix != ".pt") == FILES
        program = read_program((folder / "2_loops.txt").read_text())
        assert program.inputs
        planned = read_plan((folder / "3_plan.txt").read_text(), graph.plan.program)
        assert planned == graph.plan
        assert read((folder / "5_wrapper.txt").read_text()) == graph.wrapper
        assert "symbol(" in (folder / "3_plan.txt").read_text()
        printed = run_module(folder / "6_module.py")
        assert f"{graph.name}: best " in printed and "all " in printed and "GB/s" in printed


# --------------------------------------------------------------------------------------- the ladder
LADDER = {
    1: "lower ",
    2: "kernel plait_",
    3: "not fused: ",
    4: 'extern "C"',
    5: "wrapper after place frees",
}


@pytest.mark.parametrize("level", range(6))
def test_the_ladder(
    level: int, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"debug": level}
    plait.explain(two_softmaxes, torch.randn(70, 90), options=options, quiet=True)
    printed = capfd.readouterr().err
    for at, words in LADDER.items():
        assert (words in printed) == (at <= level), (at, printed[:2000])
    assert (tmp_path / "plait_debug").exists() == (level >= 4)
    assert Config().debug == 0


TIME = re.compile(r"(plait_\w+) +([\d.]+) us +([\d.]+) [KM]iB +[\d.]+ GB/s +([\d.]+) us")


def test_level_2_times_each_kernel_at_the_first_call_and_changes_no_result(
    capfd: pytest.CaptureFixture[str],
) -> None:
    net = nn.Sequential(nn.BatchNorm1d(40), nn.Dropout(0.5), nn.GELU())
    states = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(300, 40, requires_grad=True)

    def run(level: int) -> list[torch.Tensor]:
        torch._dynamo.reset()
        net.load_state_dict({k: v.clone() for k, v in states.items()})
        compiled = torch.compile(net, backend="plait", options={"debug": level})
        torch.manual_seed(5)
        x.grad = None
        outs = [compiled(x), compiled(x)]
        (outs[0].sum() + outs[1].pow(2).sum()).backward()
        assert x.grad is not None
        return [*outs, x.grad.clone(), *(v.clone() for v in net.state_dict().values())]

    quiet = run(0)
    assert capfd.readouterr().err == ""
    loud = run(2)
    timed = TIME.findall(capfd.readouterr().err)
    assert len(timed) >= 2 and len(timed) == len(set(timed))  # at the first call only
    assert all(float(ns) > 0 for _, ns, _, _ in timed)
    for a, b in zip(quiet, loud, strict=True):
        assert torch.equal(a, b)


def test_level_2_times_a_program_whose_inputs_share_memory(
    capfd: pytest.CaptureFixture[str],
) -> None:
    base = torch.arange(60.0)
    given = base[:50].view(5, 10), base[10:20].expand(5, 10)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return (x + y).sum(1)

    want = f(base.clone()[:50].view(5, 10), base[10:20].clone() * 2)
    got = torch.compile(f, backend="plait", options={"debug": 2})(*given)
    assert torch.equal(got, want)
    assert torch.equal(base[:50], torch.arange(50.0) * 2)
    assert TIME.search(capfd.readouterr().err)


def test_level_2_says_why_nothing_is_timed(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] * 2

    compiled = torch.compile(f, backend="plait", options={"debug": 2})
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.randn(4), torch.tensor([9]))
    assert "kernels are not timed: index is out of bounds" in capfd.readouterr().err
