"""README and docs say what is so: their Python runs, and the commands, files, names, variables they
mention exist."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
import plait.config
from plait import compat
from plait.ir.loops import Reduction
from plait.ir.text import read_program
from plait.lower import core
from plait.lower.graph import load_rules
from plait.tools.faults import trial
from tests import warm
from tests.planted import PLANTS

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "triton_launch/README.md")),
    ROOT / "triton_launch" / "ops" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
WORDS = [
    (page.name, word) for page in PAGES for word in re.findall(r"`([^`\n]+)`", page.read_text())
]


def blocks(name: str, language: str = "python") -> list[str]:
    """The code blocks of a page, also those that stand in a list."""
    text = (ROOT / name).read_text()
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


@pytest.mark.parametrize("name", ["README.md", "docs/use.md"])
def test_the_pages_for_users_run(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # plait.warm_start() is one of the blocks
    model = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.LayerNorm(16))
    x = torch.randn(8, 24)
    scope: dict[str, Any] = {"model": model, "x": x}
    found = blocks(name)
    assert len(found) >= 4
    for block in found:
        exec(compile(block, name, "exec"), scope)
        if re.search(r"y = (loaded|compiled)\(x\)| compiled\(x\)\n", block):
            torch.testing.assert_close(scope["y"], model(x))
        elif "compiled" in block:
            many = torch.randn(40, 24) if "dynamic_shapes" in block else x
            with torch.no_grad():
                torch.testing.assert_close(scope["compiled"](many), model(many))
    printed = capsys.readouterr().out
    assert re.search(r"2 graphs: \d+ ATen ops -> \d+ kernels", printed)  # explain
    if name == "README.md":
        assert model[0].weight.grad is not None
    else:
        assert "max-autotune" in printed and "opt_level" in printed  # the lists


@pytest.mark.parametrize("name", ["tour", "recompiles", "from-inductor"])
def test_a_page_that_says_itself_what_comes_out_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # plait.warm_start() is one of the blocks
    scope: dict[str, Any] = {}
    found = blocks(f"docs/{name}.md")
    assert any("assert" in block for block in found)
    for block in found:
        exec(compile(block, name, "exec"), scope)
    if name == "tour":
        assert {p.name for p in tmp_path.iterdir()} >= {"model.plait", "report.html", "caches"}


@pytest.mark.skipif(compat.versions.BEFORE_2_13, reason="this torch has other options")
def test_options_of_inductor_and_their_like_here_exist() -> None:
    """The tables of the page: names on the left are Inductor's, in the middle plait's."""
    modes, options = re.findall(
        r"^## (?:Modes|Options)\n(.*?)(?=^## |\Z)",
        (ROOT / "docs" / "from-inductor.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    known = plait.list_options()
    inductor = {*importlib.import_module("torch._inductor.config").get_config_copy()}
    rows = [
        [cell.strip() for cell in row.split("|")]
        for row in re.findall(r"^\| (`.*) \|$", options, re.MULTILINE)
    ]
    assert len(rows) > 30
    for theirs, ours, *_ in rows:
        assert set(re.findall(r"`([\w.]+)`", theirs)) <= inductor, theirs
        assert ours == "none" or set(re.findall(r"`(\w+)`", ours)) <= known.keys(), ours
        assert ours == "none" or re.fullmatch(r"`\w+`(, `\w+`)*", ours), ours
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", modes, re.MULTILINE))
    theirs = importlib.import_module("torch._inductor").list_mode_options()
    assert listed.keys() >= theirs.keys() | set(plait.list_modes())
    for mode, settings in plait.config.MODES.items():
        named = set(re.findall(r"`(\w+)`", listed[mode]))
        assert named == settings.keys(), mode


@pytest.mark.stress
def test_the_program_of_the_fsdp_page_trains(tmp_path: Path) -> None:
    (program,) = blocks("docs/train-fsdp2.md")
    (tmp_path / "train.py").write_text(program)
    (command,) = re.findall(
        r"^torchrun (.*) train.py$", (ROOT / "docs" / "train-fsdp2.md").read_text(), re.MULTILINE
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split(), "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"step \d: ([\d.]+)", done.stdout)
    assert float(last) < float(first) / 2


def test_the_compiler_of_the_fx_page_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    (block,) = blocks("docs/fx.md")
    model, x = nn.Linear(6, 3), torch.randn(2, 6)
    scope: dict[str, Any] = {"model": model, "x": x}
    exec(compile(block, "docs/fx.md", "exec"), scope)
    torch.testing.assert_close(scope["y"], model(x))
    scope["y"].sum().backward()
    printed = capsys.readouterr().out
    assert "class forward_" in printed and "class backward_" in printed


def test_the_rule_of_the_lowering_page_is_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("docs/lowering.md")
    scope: dict[str, Any] = {"aten": torch.ops.aten, "View": core.View, "Lowering": core.Lowering}
    rules: list[Any] = []
    scope["lower"] = lambda op: lambda rule: rules.append((op, rule))
    load_rules()  # what is in the table before them is taken for a second rule
    scope["elementwise"] = importlib.import_module("plait.lower.elementwise").elementwise
    exec(compile(block, "docs/lowering.md", "exec"), scope)
    ((op, rule),) = rules
    used: list[object] = []

    def spied(*args: Any, **kwargs: Any) -> Any:
        used.append(op)
        return rule(*args, **kwargs)

    monkeypatch.setitem(core.RULES, op, spied)
    x = torch.randn(50)
    with torch.no_grad():
        got = plait.compile(lambda x: nn.functional.leaky_relu(x, 0.2), (x,))(x)
    assert used == [op]
    torch.testing.assert_close(got, nn.functional.leaky_relu(x, 0.2))


@pytest.mark.skipif(compat.versions.BEFORE_2_13, reason="this torch traces other graphs")
def test_the_stages_of_the_architecture_page_are_what_plait_makes() -> None:
    done = warm.run("-m", "tests.walkthrough", env=os.environ, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "docs" / "architecture.md").read_text()


def test_the_blocks_of_the_debug_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    profiling, under_a_profiler, watching, block = blocks("docs/debug.md")
    for one in (profiling, under_a_profiler):
        exec(compile(one, "docs/debug.md", "exec"), {})
        told = capsys.readouterr().out
        assert "source lines:" in told and "guards" in told
        torch._dynamo.reset()  # no size varies because another block's was another
    exec(compile(watching, "docs/debug.md", "exec"), {})
    assert re.search(
        r"^gelu +\(3, 8\) mean .* plait_.*aten.gelu", capsys.readouterr().out, re.MULTILINE
    )
    loops = read_program(block).ops
    assert len(loops) == 2 and isinstance(loops[1], Reduction) and loops[1].kind == "sum"


@pytest.mark.slow
def test_the_blocks_of_the_page_on_wrong_numbers_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    bisect, pair, reduce, failing = blocks("docs/wrong-number.md")
    nothing, wrong, fused = blocks("docs/wrong-number.md", "text")
    scope: dict[str, Any] = {}
    exec(compile(bisect, "docs/wrong-number.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert scope["found"] is None and re.sub(r"\d+ v", "N v", printed) == re.sub(
        r"\d+ v", "N v", nothing
    )
    exec(compile(reduce, "docs/wrong-number.md", "exec"), scope)
    exec(compile(failing, "docs/wrong-number.md", "exec"), scope)
    assert "_linalg_eigh" in (script := scope["reduced"].script) and "relu" not in script
    numbers = re.compile(r"-?\d+(\.\d+)?|_[0-9a-f]{6}|\w+[-.]\w+\.md:|model\.py:")
    for name, block, says in (("rule", bisect, wrong), ("pair", pair, fused)):
        planted = [sys.executable, "-m", "tests.planted", name, trial.__file__]
        monkeypatch.setattr(trial, "COMMAND", planted)
        with PLANTS[name]():
            exec(compile(block, "docs/wrong-number.md", "exec"), scope)
        text, _, script = says.partition("\n\n")
        assert numbers.sub("", scope["found"].text) == numbers.sub("", text.rstrip())
        assert scope["found"].script == script or not script


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = set(
        re.findall(r"\bmake ([a-z][a-z-]*)(?=[`\s]*(?:$|#|`|\n))", page.read_text(), re.MULTILINE)
    )
    assert mentioned <= targets
    named = {"README.md": {"demo", "test"}, "CONTRIBUTING.md": {"env", "test", "lint", "bench"}}
    assert named.get(str(page.relative_to(ROOT)), set()) <= mentioned


def test_environment_variables_exist() -> None:
    files = [
        ROOT / "native" / "common.cmake",
        *(ROOT / "plait" / "lib" / "cmake" / "plait").glob("*.cmake"),
    ]
    cmake = "".join(file.read_text() for file in files)
    native = "".join(
        p.read_text() for d in ("native", "triton_launch/src") for p in (ROOT / d).rglob("*.cpp")
    )
    known = {row.env for row in plait.config.flags()} | {
        "PLAIT_",
        *re.findall(r"PLAIT_[A-Z_]+", cmake),
    }
    known |= {*re.findall(r'getenv\("(PLAIT_[A-Z_]+)"\)', native)}
    mentioned = {v for page in PAGES for v in re.findall(r"\bPLAIT_[A-Z_]*", page.read_text())}
    assert mentioned <= known and {"PLAIT_DEBUG", "PLAIT_CACHE_DIR", "PLAIT_CXX"} <= mentioned


def test_lines_end_at_100_columns() -> None:
    """But for tables, images, links and what programs say."""
    long = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = [line for line in text.splitlines() if not line.startswith(("|", "!", "["))]
        long += [(page.name, line) for line in lines if len(line) > 100]
    assert not long


def test_files_exist() -> None:
    rooms = "plait|native|triton_launch|docs|tests|benchmarks|examples"
    paths = [(page, w) for page, w in WORDS if re.fullmatch(rf"(?:{rooms})/[\w./-]*", w)]
    assert len(paths) > 10
    assert [(page, w) for page, w in paths if not (ROOT / w).exists()] == []


def test_names_exist() -> None:
    names = [(page, m[1]) for page, w in WORDS if (m := re.match(r"(plait(?:\.\w+)+)", w))]
    assert len(names) > 5
    for page, name in names:
        found: Any = plait
        for k, part in enumerate(parts := name.split(".")[1:]):
            if not hasattr(found, part):
                importlib.import_module(".".join(["plait", *parts[: k + 1]]))
            assert hasattr(found, part), (page, name)
            found = getattr(found, part)
