"""`plait.reduce` makes failing programs short scripts that fail in the same way: crashes, errors,
wrong numbers, what is slow, and whatever a function says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import plait
import plait.__main__
from plait.tools.faults import check, trial
from plait.tools.faults.shrink import smallest
from tests import warm
from tests.planted import PLANTS

ROOT = Path(__file__).parent.parent


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are tried in forks of a process that has loaded torch."""
    monkeypatch.setattr(trial, "subprocess", warm.WARM)


def program(x: Tensor, w: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Some dozen operators, in more than one kernel, with one that each planted fault is in."""
    y = F.layer_norm(x @ w, (16,))
    z = (y * 0.3).exp() + y[i].flip(0)
    z = (z.cumsum(0) @ w.T).relu()
    return z.softmax(-1), z.sum(0, keepdim=True) - y.amax(-1, keepdim=True)


def arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(12, 16), torch.randn(16, 16), torch.randint(0, 12, (12,))


OPERATORS = {
    "crash": ("exp", "signal SIGSEGV", {}),
    "error": ("cumsum", "raises InternalError: ", {"strict": True}),
    "reduction": ("sum", "exit 1", {}),
}
"""Fault -> the operator that is left, what becomes of the script, options."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "crash" else pytest.mark.slow) for n in OPERATORS]
)
def test_planted_faults_shrink_to_one_operator(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    operator, outcome, options = OPERATORS[name]
    plants = [sys.executable, "-m", "tests.planted", name, trial.__file__]
    monkeypatch.setattr(trial, "COMMAND", plants)
    found = plait.reduce(program, *arguments(), options=options, seconds=1e3)
    assert found is not None and found.outcome.startswith(outcome)
    assert found.n_operators == 1 and f"aten.{operator}." in found.script
    assert "torch.manual_seed(0)" in found.script and found.script.count("torch.rand") <= 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{found.outcome}: ") and found.script in printed

    script = tmp_path / "script.py"
    script.write_text(found.script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    bad = warm.run("-m", "tests.planted", name, script, env=env, cwd=tmp_path)
    assert bad.returncode == (-11 if name == "crash" else 1), found.script
    assert warm.run(script, env=env, cwd=tmp_path).returncode == 0


@pytest.mark.usefixtures("forked")
def test_what_does_not_fail_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    for fn in (program, plait.compile(program, arguments())):
        assert plait.reduce(fn, *arguments()) is None
        assert capsys.readouterr().out == "nothing fails: 1 graph tried\n"


def test_what_eager_refuses_is_no_failure() -> None:
    """As where a script calls an operator that only the program defines."""
    for call in (check.wrong_number, check.slower):
        assert call(lambda x: torch.ops.nowhere.at_all(x), torch.ones(2)) == 0


@pytest.mark.usefixtures("forked")
def test_whatever_a_function_says_stays_true() -> None:
    """In this process, of values that no seed gives: they are in the script."""
    torch._dynamo.reset()

    def failing(fn: Any, args: tuple[Any, ...]) -> bool:
        return any(bool((x == 12345).any()) for x in fn(*args))

    x = torch.zeros(3, 4)
    x[1, 2] = 12344
    found = plait.reduce(lambda x: (x + 1).sin() * 0 + (x + 1), x, failing=failing, quiet=True)
    assert found is not None and found.n_operators == 1 and "12344" in found.script
    assert "manual_seed" not in found.script
    assert "check" not in found.script  # of other failures, which it does not have
    assert found.script.endswith('print(torch.compile(fn, backend="plait", options={})(*args))\n')
    exec(found.script, {})


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_slow_programs_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exp that takes a thousand times as long as any other operator."""
    torch._dynamo.reset()
    plants = [sys.executable, "-m", "tests.planted", "slow", trial.__file__]
    monkeypatch.setattr(trial, "COMMAND", plants)
    found = plait.reduce(program, *arguments(), slower=20, quiet=True, seconds=1e3)
    assert found is not None and found.outcome == "exit 1" and found.n_operators == 1
    assert "aten.exp.default" in found.script
    assert "check.slower(fn, *args, factor=20" in found.script


def test_what_is_slow_once_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts calls: the first round of a busy machine proves nothing."""
    now, calls = 0.0, 0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    def fn(x: Tensor) -> Tensor:
        return x

    def compiled(x: Tensor) -> Tensor:
        nonlocal now, calls
        calls += 1
        now += 0.5 if calls < quiet_after else 0.0
        return x

    monkeypatch.setattr(check.time, "perf_counter", clock)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compiled)
    for limit, slow in ((4, 0), (99, 1)):
        quiet_after, calls = limit, 0
        assert check.slower(fn, torch.ones(2), factor=2.0) == slow


def test_a_worker_outlives_errors_but_not_crashes() -> None:
    trials = trial.Trials(0.5)
    scripts = {
        "import torch": "exit 0",
        "raise ValueError('x12 is 5, not so')": "raises ValueError: is not so",
        "raise SystemExit(3)": "exit 3",
        "import time; time.sleep(60)": "hang",
        "import os; os.kill(os.getpid(), 6)": "signal SIGABRT",
        "import os; os._exit(4)": "exit 4",
        "x = 1": "exit 0",
    }
    assert {s: trials.outcome(s) for s in scripts} == scripts
    trials.close()


def test_the_loop_takes_the_first_that_fails() -> None:
    tried: list[int] = []

    def fails(n: int) -> bool:
        tried.append(n)
        return n % 7 == 0

    assert smallest(84, lambda n: [n // 2, n - 7, n - 1][: n > 7 and 3 or 0], fails, 10) == 7
    assert tried[:2] == [42, 21] and smallest(84, lambda n: [n - 7], fails, 0.0) == 84


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    file = tmp_path / "model.py"
    file.write_text("import torch\nfn, args = lambda x: torch.tanh(x).exp(), (torch.ones(3),)\n")
    plants = [sys.executable, "-m", "tests.planted", "rule", trial.__file__]
    for command, status in ((trial.COMMAND, 0), (plants, 1)):
        monkeypatch.setattr(trial, "COMMAND", command)
        with pytest.raises(SystemExit) as end:
            plait.__main__.main(["reduce", str(file), "--option", "opt_level=0"])
        assert end.value.code == status
    assert "options={'opt_level': 0}" in capsys.readouterr().out and "rule" in PLANTS
