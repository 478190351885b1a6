"""`plait.bisect` names the kernel, its source line and the pass of planted faults, prints a script
that shows them in a process of its own, and blames nobody where nothing is wrong."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import plait
import plait.__main__
from plait.compile import compile_graph, compile_texts
from plait.config import Config
from plait.errors import UserError
from plait.graph.captured import Captured
from plait.pipelines import COUNTED, LEAVABLE
from plait.schedule.limits import LIMITED
from plait.tools.faults import bisect as bisecting
from plait.tools.faults import trial
from plait.tools.faults.recorded import Recording, record
from plait.tools.faults.switches import NOTHING, Switch, _smallest
from plait.wrapper.instructions import Partition
from tests import warm
from tests.planted import PLANTS

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts are tried in forks of a process that has loaded torch; tests of `plait.reduce` start
    what tries them as users do."""
    monkeypatch.setattr(trial, "subprocess", warm.WARM)


def planted(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Several kernels; each planted fault is in the first."""
    y = F.layer_norm(x @ w, (16,))
    z = torch.tanh(y) + y.exp()
    z = z / z.sum(-1, keepdim=True)
    k = (z * 9).to(torch.int32).float() + z
    r = torch.flip(k.sin(), [0]) + k.sin().roll(1, 1)
    return F.layer_norm(r, (16,)).softmax(0), r.cumsum(0)


@contextmanager
def plant(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fault in this process, and in those that try scripts."""
    with monkeypatch.context() as m, PLANTS[name]():
        m.setattr(bisecting, "SECONDS", 1e3)  # which does not end on a busy machine
        m.setattr(trial, "COMMAND", [sys.executable, "-m", "tests.planted", name, trial.__file__])
        yield


EXPECTED = {
    "rule": ("aten.tanh.default", "kernels"),
    "emitter": ("aten.tanh.default", "vector instructions (isa)"),  # tanh calls exp
    "reduction": ("aten.sum.dim_IntList", "kernels"),
    "graph_pass": ("aten._to_copy.default", "drop no-ops"),
    "fusion": ("aten.mm.default", "fuse"),
}
"""Fault -> the operator in the script, and what a compile without is right."""


def often(names: Iterable[str], *daily: str) -> list[Any]:
    """Cases, of which all but these are slow: each is a search by halves."""
    return [pytest.param(n, marks=[] if n in daily else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", often(EXPECTED, "reduction"))
def test_planted_faults_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with plant(name, monkeypatch):
        found = plait.bisect(planted, torch.randn(12, 16), torch.randn(16, 16))
    assert found is not None
    operator, switch = EXPECTED[name]
    assert operator in found.script and found.script.count("torch.ops.") <= 3
    assert len(found.switches) == 1 and found.switches[0].startswith(switch)
    # The line of the last operator in the first kernel.
    lines, first = inspect.getsourcelines(planted)
    at = next(k for k, line in enumerate(lines) if ".sin()" in line)
    assert found.wrong.where.startswith(f"test_bisect.py:{first + at}")
    assert found.text in (printed := capsys.readouterr().out) and found.script in printed

    script = tmp_path / "script.py"
    script.write_text(found.script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    bad = warm.run("-m", "tests.planted", name, script, env=env, cwd=tmp_path)
    assert (bad.returncode, bad.stderr) == (1, "") and "element" in bad.stdout
    good = warm.run(script, env=env, cwd=tmp_path)
    assert good.returncode == 0, good.stderr


def fused_pair(x: Tensor, w: Tensor) -> Tensor:
    z = F.relu(x) / x.exp().sum(-1, keepdim=True)
    return z.sin() * z


def written_over(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return (y.flip(0) + 1) @ w


def placed(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return (y + (torch.cumsum(y, 0) @ w).flip(0)) @ w


def viewed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return y[:6] @ w, y[6:] @ w


DECISIONS = {
    "pair": (fused_pair, "fuse", "fusing a reduction of sum_1 ({1}) with sin ({2})", 2),
    "reuse": (written_over, "write in place", "writing flip ({2}) over mm ({1})", 2),
    "arena": (placed, "arena", "placing mm_1 ({2}) in the arena", 2),
    "views": (viewed, "merge views", "", 2),
}
"""Fault -> a program, the pass, the decision that makes the number wrong, and a line of the program
that the report names; {1} is its first line of code."""


@pytest.mark.parametrize("name", often(DECISIONS, "pair"))
def test_the_decision_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pair of loops is fused, what is written over what; a pass over programs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fn, step, decision, line = DECISIONS[name]
    options = {"small_matmul_flops": 0, "verify": False}  # which finds some of these faults
    with plant(name, monkeypatch):
        found = plait.bisect(fn, torch.randn(12, 16), torch.randn(16, 16), options=options)
    assert found is not None and found.switches == (step,)
    _, first = inspect.getsourcelines(fn)
    lines = [f"test_bisect.py:{first + k}" for k in range(4)]
    assert found.decision == decision.format(*lines), found.text
    assert lines[line] in found.wrong.operators, found.text
    assert found.script.startswith("import torch") and "manual_seed" in found.script


@pytest.mark.parametrize("step", COUNTED)
def test_decisions_can_be_limited(step: str) -> None:
    """The first ones are taken, whatever the limit; then there is one that is not."""
    x, w, v = torch.randn(96, 160), torch.randn(160, 160) / 16, torch.randn(8)

    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ w) @ w
        z = (y.flip(0) + 1) @ w
        x.mul_(2).add_(y)
        v.sub_(1)
        return z.softmax(-1).sum(0) + 1, z.cumsum(0), x.sin().cumsum(1), w.sum(0), w.amax(1)

    ((graph, _),) = record(fn, (x, w, v), {}, Recording({}))
    seen, wants = [], fn(x.clone(), w, v.clone())
    for n in (0, 1, 2, 99):
        cfg = Config(without=f"{step}:{n}", small_matmul_flops=0, verify=True)
        program = compile_graph(graph.captured(), cfg)
        limited = [r for r in program.record.plan.refusals if r.reason == LIMITED]
        seen.append([(r.a, r.b) for r in limited][-1:])
        for got, want in zip(program.call(*graph.copies())[-5:], wants, strict=True):
            torch.testing.assert_close(got, want)
    assert seen[0] and not seen[3] and seen[0] != seen[1], "the first is taken, then the second is"


@pytest.mark.parametrize("name", ["partition", "inline programs"])
def test_passes_for_cuda_graphs_can_be_left_out(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(64, 1000, device="cuda")
        graph = make_fx(lambda x: (x.softmax(-1) @ x.mT,), tracing_mode="fake")(x)
    found = []
    for without in ("", name):
        cfg = Config(gpu_arch="sm_90", cuda_graphs=True, without=without, verify=True)
        program, _ = compile_texts(Captured(copy.deepcopy(graph), "g_0", "inference"), cfg)
        found.append(any(isinstance(i, Partition) for i in program.body))
    assert found == [True, name != "partition"]


def test_the_first_kernel_is_blamed_and_not_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in the backward graph: what passes it on is as far from eager, and is not wrong."""
    torch._dynamo.reset()

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ((torch.tanh(x @ w) @ w).softmax(-1) @ w).sum()

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64) / 8
    with plant("rule", monkeypatch):
        found = plait.bisect(fn, x, w, options={"small_matmul_flops": 0}, quiet=True)
    assert found is not None and "tanh" in found.wrong.operators
    assert found.wrong.node.startswith("tanh") and found.wrong.graph.startswith("forward")
    assert "small_matmul_flops" in found.script


@pytest.mark.slow
def test_faults_of_graphs_for_all_sizes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    torch._dynamo.mark_dynamic(x, 0)
    with plant("rule", monkeypatch):
        found = plait.bisect(lambda x: (torch.tanh(x) * x.shape[0]).sum(1), x, quiet=True)
    assert found is not None and "aten.tanh" in found.script


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) * x


def test_what_is_wrong_in_no_kernel_is_seen_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass on the joint graph, from which forward and backward graphs are cut, has the fault."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    with plant("joint_pass", monkeypatch):
        found = plait.bisect(Scaled(), x, quiet=True)
    assert found is not None and found.wrong.node in ("result 0", "the gradient of w")
    assert found.wrong.kernel == "no kernel" and found.switches == ("split biases",)
    assert plait.bisect(Scaled(), x, quiet=True) is None


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) * x


@pytest.mark.slow
def test_a_wrong_gradient_of_a_function_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a whole, which a function is looked at if it holds nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
    held = [1.0]

    def holds(x: Tensor, w: Tensor) -> Tensor:
        return scaled(x, w) * held[0]

    with plant("joint_pass", monkeypatch):
        found = plait.bisect(scaled, x, w, quiet=True)
        assert plait.bisect(holds, x, w) is None
    assert found is not None and found.wrong is not None
    printed = capsys.readouterr().out
    assert "(functions and exported programs may hold what a call changes)" in printed
    assert found.wrong.graph == "the whole"
    assert found.wrong.node in ("result 0", "the gradient of argument 1")


@pytest.mark.slow
def test_the_third_call_and_one_target(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with plant("target", monkeypatch):
        found = plait.bisect(lambda x: x.sin() + 1, torch.randn(3), quiet=True)
        python = {"wrapper": "python"}
        assert plait.bisect(torch.sin, torch.randn(3), options=python, quiet=True) is None
    assert found is not None and found.switches == ("the wrapper native",)
    assert "call 3" in found.text and "torch.ops.aten.sin.default" in found.script


@pytest.mark.slow
def test_only_what_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 3, 8, 8)
    with plant("frozen", monkeypatch), torch.no_grad():
        assert plait.bisect(net, x, quiet=True) is None
        found = plait.bisect(net, x, quiet=True, freeze=True)
    assert found is not None and found.text.startswith("the whole, frozen: no kernel makes result")


def test_a_crash_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the compiler refuses: neither ends this process."""
    for name, outcome, operator in (
        ("crash", "signal SIGSEGV", "aten.exp.default"),
        ("error", "raises InternalError", "aten.cumsum.default"),
    ):
        torch._dynamo.reset()
        with plant(name, monkeypatch):
            found = plait.bisect(lambda x: x.exp().sin().cumsum(0), torch.randn(3, 4))
        assert found is not None and found.wrong is None and found.outcome.startswith(outcome)
        assert found.operators.endswith(operator) and f"torch.ops.{operator}" in found.script
        assert found.operators.startswith("test_bisect.py:") and found.switches
        assert capsys.readouterr().out.startswith(f"{found.graph}: {found.outcome}\n  of test")


SCRIPT = """
import sys
import torch

@torch.compile(backend="plait", options={"opt_level": 1})
def step(x, w):
    y = torch.nn.functional.dropout(x @ w, 0.5)
    torch._dynamo.graph_break()
    return torch.tanh(y).sum()

w = torch.randn(4, 4, requires_grad=True)
for size in map(int, sys.argv[1:]):
    step(torch.ones(size, 4), w).backward()
raise SystemExit(3)
"""


def test_a_script_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which compiles by itself: several graphs, for several sizes, gradients, random numbers."""
    torch._dynamo.reset()
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    for fault, status in (("error", 0), ("rule", 1)):
        with plant(fault, monkeypatch), pytest.raises(SystemExit) as end:
            plait.__main__.main(["bisect", "--", str(file), "3", "5"])
        assert end.value.code == status
        printed = capsys.readouterr().out
        assert printed.startswith("the script ended with SystemExit: 3\n")
        assert status or re.search(r"nothing found in [4-9] graphs: \d\d values", printed)
        assert status or "the whole (a script runs once)" in printed
    assert "at train.py:9" in printed and "options={'opt_level': 1}" in printed
    for words in ([], ["x.py", "--", "y.py"]):
        with pytest.raises(SystemExit):
            plait.__main__.main(["bisect", *words])
    with pytest.raises(SystemExit, match="plait: there is no Python file"):
        plait.__main__.main(["bisect", "--", "nowhere.py"])
    with pytest.raises(SystemExit, match=r"plait: .* defines no fn and no args"):
        plait.__main__.main(["reduce", str(Path(warm.__file__))])
    file.write_text("import torch\ndef case():\n    return torch.sin, torch.ones(3)\n")
    with pytest.raises(SystemExit, match=r"case is no function and its arguments\n.*\(x,\)"):
        plait.__main__.main(["bisect", f"{file}:case"])
    file.write_text("fn, args = 3, (1,)\n")
    for command in ("bisect", "reduce"):
        with pytest.raises(SystemExit, match=r"plait: .*train.py needs a function .*, got int"):
            plait.__main__.main([command, str(file)])


BOUND = """
import sys, torch, plait
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
rows = torch.export.Dim("rows", min=2, max=9)
if len(sys.argv) > 1:
    given = {"options": {"opt_level": 1}, "freeze": sys.argv[1] == "frozen"}
    compiled = plait.compile(model, (torch.ones(3, 8),), ({0: rows},), **given)
    compiled(torch.randn(4, 8))
"""


def test_programs_of_plait_compile_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bound.py"
    file.write_text(BOUND)

    def status(*words: str) -> object:
        with pytest.raises(SystemExit) as end:
            plait.__main__.main(["bisect", "--", str(file), *words])
        return end.value.code

    assert status("bound") == 0 and status("frozen") == 0 and status() == 2
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+ values", "values", line) for line in lines] == [
        *[
            "nothing found in 1 graph: values compared",
            "not compared: results and gradients of the whole (a script runs once)",
        ]
        * 2,
        "plait compiled no graph; plait.explain says why",
    ]
    with plant("rule", monkeypatch):
        assert status("bound") == 1
    printed = capsys.readouterr().out
    assert "aten.tanh.default" in printed and "'opt_level': 1" in printed


class Counted(nn.Module):
    """Keeps a sum in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Tensor]:
        self.total += x.sum(0)
        return {"result": torch.tanh(x + y) + self.total}


def test_what_plait_compile_returned_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = Counted(), torch.randn(4, 8), torch.randn(4, 8)
    options = {"opt_level": 1}
    compiled = plait.compile(model, {"x": x, "y": y}, options=options)
    options["opt_level"] = 3
    assert compiled.given["options"] == {"opt_level": 1}  # type: ignore[attr-defined]
    assert plait.bisect(compiled, x, y=y, quiet=True) is None
    with plant("rule", monkeypatch):
        found = plait.bisect(compiled, x=x, y=y, quiet=True)
    assert found is not None and found.wrong is not None and "tanh" in found.operators
    assert found.graph.startswith("export_") and found.switches[0].startswith("kernels")
    assert model.total.eq(0).all()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    image = torch.randn(2, 3, 8, 8)
    frozen = plait.compile(net, (image,), freeze=True)
    with plant("frozen", monkeypatch), torch.no_grad():
        found = plait.bisect(frozen, image, quiet=True)
    assert found is not None and found.text.startswith("the whole, frozen: no kernel makes result")


def test_functions_of_plait_compile_are_compared_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fn(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(x * scale) + y

    def more(x: Tensor, **others: Tensor) -> Tensor:
        return x + others["y"]

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    rows = torch.export.Dim("rows", min=2, max=9)
    varying = plait.compile(fn, (x, y), ({0: rows}, {0: rows}))
    plait.bisect(varying, x[:3], y[:3])
    plait.bisect(varying, x[:3], y=y[:3])
    plait.bisect(plait.compile(fn, {"x": x, "y": y, "scale": 2.0}), x, y=y, scale=2.0)
    plait.bisect(plait.compile(more, {"x": x, "y": y}), x, y=y)
    plait.bisect(fn, x, y)
    printed = capsys.readouterr().out
    assert printed.count("nothing found in 1 graph:") == 5 and "not compared" not in printed
    assert not [*tmp_path.glob("tmp*")]


@torch.library.custom_op("plaittest::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_processes_of_their_own_lack_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operators of the program's, sizes of jagged tensors, a fault of this process alone."""
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    assert plait.bisect(lambda x: doubled(x.sin()).cos(), x) is None
    assert "nothing found in 1 graph: 5 values compared" in capsys.readouterr().out
    with plant("rule", monkeypatch):
        found = plait.bisect(lambda x: torch.tanh(doubled(x.sin())), x, quiet=True)
    assert found is not None and found.operators.endswith("aten.tanh.default")

    def jagged(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged).sin().values()

    assert plait.bisect(jagged, x) is None
    assert re.search(r"not compared: inference_\d+, which has no text", capsys.readouterr().out)
    with PLANTS["rule"]():
        found = plait.bisect(lambda x: torch.tanh(x), x, quiet=True)
    assert found is not None and found.switches == (NOTHING,)


class Block(nn.Module):
    """Attention with a mask, dropout, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.one, self.two = nn.LayerNorm(32), nn.LayerNorm(32)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / 8**0.5).masked_fill(~mask[:, None, None], float("-inf"))
        x = x + self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))
        x = x + self.drop(self.down(F.gelu(self.up(self.two(x)))))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        pytest.param(True, torch.float32, id="training-torch.float32"),
        pytest.param(True, torch.bfloat16, id="training-torch.bfloat16", marks=pytest.mark.slow),
        pytest.param(False, torch.float32, id="inference-torch.float32", marks=pytest.mark.slow),
        pytest.param(False, torch.bfloat16, id="inference-torch.bfloat16"),
    ],
)
def test_nobody_is_blamed_for_rounding(
    dtype: torch.dtype, training: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout, rows of a mask that are almost empty, forward and backward graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 50, (3, 9)), torch.arange(9) < torch.tensor([[9], [5], [1]])
    block = Block().to(dtype).train(training)
    with torch.set_grad_enabled(training):
        assert plait.bisect(block, ids, mask) is None
    graphs, values = map(int, re.findall(r"\d+", capsys.readouterr().out))
    assert graphs == 1 + training and values > 5 + 20 * training


def test_a_bar_is_told_of_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def progress(what: str, total: int, prints: bool) -> Iterator[Callable[[], None]]:
        told.append(f"{what}: {total}")
        yield lambda: told.append("one more")

    monkeypatch.setattr("plait.log.progress", progress)
    x = torch.randn(4, 4, requires_grad=True)
    assert plait.bisect(lambda x: (x.sin() * 2).sum(), x, quiet=True) is None
    assert told == ["graphs: 2", "one more", "one more"]


def test_what_is_left_out_by_halves_is_the_smallest_set() -> None:
    switches = [Switch(str(k), {}) for k in range(21)]
    for wanted in ({3}, {20}, {0, 13}, {4, 5, 19}):
        asked = 0

        def enough(some: Any, wanted: set[int] = wanted) -> bool:
            nonlocal asked
            asked += 1
            return wanted <= {int(s.name) for s in some}

        assert {int(s.name) for s in _smallest(switches, enough)} == wanted
        assert len(wanted) > 1 or asked <= 12


@pytest.mark.parametrize("names", [*LEAVABLE, ",".join(LEAVABLE)], ids=lambda n: n[:20])
def test_every_pass_can_be_left_out(names: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LogSoftmax(-1),
    )
    x = torch.randn(2, 3, 8, 8)
    seen = []
    for run in (net, torch.compile(net, backend="plait", options={"without": names})):
        net.zero_grad()
        y = run(x) * run(x + 1)
        y.pow(2).sum().backward()
        seen.append([y, *(p.grad for p in net.parameters())])
    for got, want in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_left_out_is_said() -> None:
    torch._dynamo.reset()
    for name, says in (
        ("save old values", "no pass save old values can be left out"),
        ("no pass at all", "no pass no pass at all can be left out"),
        ("fuse:", "without='fuse:' is no limit"),
        ("merge views:2", "without='merge views:2' is no limit"),
    ):
        compiled = torch.compile(torch.sin, backend="plait", options={"without": name})
        with pytest.raises(UserError, match=says):
            compiled(torch.randn(3))


def test_arguments_and_modules_stay_as_they_are() -> None:
    torch._dynamo.reset()
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.norm(x) + y.add_(1)

    y = torch.zeros(8, 4)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    assert plait.bisect(Adds(), x, y, quiet=True) is None
    assert not y.any() and x.grad is None and norm.weight.grad is None
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfn, args = torch.sin, (torch.ones(3),)\n"
        "def other():\n    return torch.tanh, (torch.ones(3),)\n"
    )
    for script, options, fault, status in (
        (f"{file}", [], "rule", 0),
        (f"{file}:other", ["--option", "opt_level=1"], "rule", 1),
    ):
        with plant(fault, monkeypatch), pytest.raises(SystemExit) as end:
            plait.__main__.main(["bisect", script, *options])
        assert end.value.code == status
        printed = capsys.readouterr().out
        assert ("nothing found" in printed) == (status == 0)
    assert "options={'opt_level': 1}" in printed
    assert Config().without == ""
