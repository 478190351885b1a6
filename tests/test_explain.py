"""plait.explain and the debug folder: what people see of a compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import plait
from plait.config import Config
from plait.wrapper.text import read, text


class Net(nn.Module):
    """A kernel, a matmul and an op without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.nn.functional.gelu(self.linear(x)))
        return torch.linalg.inv_ex(y + 100 * torch.eye(64))[0].softmax(-1)


def inputs() -> torch.Tensor:
    return torch.randn(64, 96)


def test_the_report_counts_kernels_calls_and_fallbacks(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        report = plait.explain(Net(), inputs())
    assert capsys.readouterr().out.strip() == report.text.strip() == str(report).strip()
    assert len(report.graphs) == 1
    assert report.kernels == 2
    assert report.extern_calls == {"aten::addmm": 1, "aten::linalg_inv_ex": 1}
    assert report.fallbacks == {"aten::linalg_inv_ex": 1}
    assert "extern aten::addmm: by choice" in report.text
    assert "extern aten::linalg_inv_ex: fell back: " in report.text
    assert "gelu_native_layer_norm" in report.text
    assert "test_explain.py:" in report.text  # source lines
    assert (
        "1 graph, 2 kernels, 2 calls of PyTorch's own operators, 1 of them for want of a rule"
        in report.text
    )


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


def test_every_graph_between_breaks_is_shown() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos() * 2

    assert len(plait.explain(broken, inputs(), quiet=True).graphs) == 2


def test_explaining_again_shows_all_of_it_again() -> None:
    compiled = torch.compile(lambda x: x.exp() * 3, backend="plait")
    compiled(inputs())
    counts = [plait.explain(compiled, inputs(), quiet=True).kernels for _ in range(12)]
    assert counts == [1] * 12


def test_reasons_against_fusion_are_told() -> None:
    report = plait.explain(lambda x: (x.sum(0), x.sum(1)), torch.randn(70, 90), quiet=True)
    assert report.kernels == 2
    assert "not fused: " in report.text


def test_options_reach_the_compiler() -> None:
    report = plait.explain(lambda x: x + 1, inputs(), options={"wrapper": "python"}, quiet=True)
    assert report.graphs[0].target == "python"
    with pytest.raises(plait.UserError, match="unknown option"):
        plait.explain(lambda x: x + 1, inputs(), options={"wraper": "python"}, quiet=True)


def test_what_was_not_fused_is_equal_in_two_runs() -> None:
    def lines() -> list[str]:
        torch._dynamo.reset()
        report = plait.explain(Net(), inputs(), quiet=True)
        return [s for s in report.text.splitlines() if " ms to compile" not in s]

    assert lines() == lines()


# ---------------------------------------------------------------------------------------------- the debug folder
FILES = [
    "0_captured.py",
    "1_graph.py",
    "2_loops.txt",
    "3_plan.txt",
    "4_kernels.cpp",
    "5_wrapper.txt",
    "6_module.py",
]


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


def test_the_module_of_the_debug_folder_runs_by_itself(tmp_path: Path) -> None:
    weight = torch.randn(96, 32)
    report = plait.explain(
        lambda x: (x @ weight).relu().sum(0),
        inputs(),
        options={"debug_dir": str(tmp_path)},
        quiet=True,
    )
    module = tmp_path / report.graphs[0].name / "6_module.py"
    run = subprocess.run(
        [sys.executable, str(module)], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent,
        env={"PYTHONPATH": str(Path(plait.__file__).parent.parent), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert f"{report.graphs[0].name}: float32[32]" in run.stdout
    assert " us of " in run.stdout


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
    plait.explain(lambda x: (x.sum(0), x.sum(1)), torch.randn(70, 90), options=options, quiet=True)
    printed = capfd.readouterr().err
    for at, words in LADDER.items():
        assert (words in printed) == (at <= level), (at, printed[:2000])
    assert (tmp_path / "plait_debug").exists() == (level >= 4)
    assert Config().debug == 0
