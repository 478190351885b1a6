"""Recorded compiles: what was given reads back, makes the same again, and what differs is shown."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.capture import program
from plait.compile import compile_texts
from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.text import given_text, read_given, tensors_of
from plait.runtime.toolchain import detect_isa
from plait.tools import replay
from plait.wrapper.text import text
from tests import warm

PROGRAM = """
import torch

def pointwise(x, y):
    return (x * y + 1).relu(), x.sum(-1), x.view(torch.int32), x.t()

def found(x):
    i = x.nonzero()
    torch._check(i.size(0) > 1)
    return x[x > 0] * 2, i + 1

def branches(x):
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

def compiled(fn, **options):
    return torch.compile(fn, backend="plait", **options)

x, y = torch.randn(8, 6), torch.randn(8, 6)
compiled(pointwise)(x, y)
for n in (4, 5):
    compiled(pointwise, dynamic=True)(torch.randn(n, 6), torch.randn(n, 6))
torch._dynamo.config.capture_dynamic_output_shape_ops = True
compiled(found)(torch.tensor([1.0, -2.0, 3.0]))
compiled(branches)(x)
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
compiled(model)(x).sum().backward()
"""


def run(*arguments: object, status: int = 0) -> str:
    """What `plait replay` prints, in this process: compiles run in processes of their own."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as left:
        replay.main(list(map(str, arguments)))
    assert (left.value.code or 0) == status, said.getvalue()
    return said.getvalue()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    script = folder / "program.py"
    script.write_text(PROGRAM)
    run("record", folder / "graphs", "--", sys.executable, script)
    return folder / "graphs"


def test_every_graph_is_recorded_once(recorded: Path) -> None:
    kinds = [g.name.partition("_")[0] for g in recorded.iterdir()]
    # pointwise twice, static and dynamic (the second size compiles nothing), found, branches
    assert sorted(kinds) == ["backward", "forward", *["inference"] * 4]


def test_the_same_compiler_makes_the_same_again(recorded: Path, tmp_path: Path) -> None:
    assert (
        run("rerun", recorded, "--out", tmp_path / "again", "--jobs", 2) == "6 graphs, 0 differ\n"
    )
    made = {f.name for g in (tmp_path / "again").iterdir() for f in g.iterdir()}
    assert {"1_graph.py", "4_kernels.cpp", "7_native.txt", "7_program.cpp", "7_graph.py"} <= made
    command = ("-m", "plait", "replay", "compare", recorded, tmp_path / "again")
    done = warm.run(*command, env=os.environ, timeout=120)
    assert (done.returncode, done.stdout) == (0, "6 graphs, 0 differ\n"), done.stderr


def test_what_differs_is_shown(recorded: Path, tmp_path: Path) -> None:
    for graph in recorded.iterdir():  # as a compiler without fusion would have made it
        (tmp_path / "other" / graph.name).mkdir(parents=True)
        given = json.loads((graph / "0_given.json").read_text())
        given["config"]["fusion"] = False
        (tmp_path / "other" / graph.name / "0_given.json").write_text(json.dumps(given))
    replay.rerun(tmp_path / "other", tmp_path / "unfused", [], 1)
    found = dict(replay.compare(recorded, tmp_path / "unfused", {}))
    pointwise = next(files for name, files in found.items() if name.startswith("forward"))
    assert "3_plan.txt" in pointwise and "4_kernels.cpp" in pointwise
    assert "1_graph.py" not in pointwise
    name = next(name for name in found if name.startswith("forward"))
    shown = run("compare", recorded, tmp_path / "unfused", "--details", name, status=1)
    assert f"{name}: " in shown and "\n+kernel" in shown or "\n+def " in shown


def test_the_corpus_has_graphs_for_both_devices(tmp_path: Path) -> None:
    """A part of it, which `make corpus` records whole."""
    run("record", tmp_path, "--", sys.executable, "-m", "tests.corpus", "--every", "220")
    names = [g.name.rpartition("_")[0] for g in tmp_path.iterdir()]
    on_gpu = [name for name in names if name.endswith("_gpu")]
    assert on_gpu and sorted(f"{n}_gpu" for n in names if n not in on_gpu) == sorted(on_gpu)


def test_a_graph_that_one_folder_lacks(recorded: Path, tmp_path: Path) -> None:
    found = dict(replay.compare(recorded, tmp_path, {}))
    assert len(found) == 6 and all(
        files == {"": f"{tmp_path} lacks it"} for files in found.values()
    )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        replay.main(["compare", str(tmp_path), str(tmp_path / "gone")])
    assert left.value.code == 2


def test_renames(tmp_path: Path) -> None:
    for folder, line in (("a", "old(x1, older)"), ("b", "new(x1, older)")):
        (tmp_path / folder / "g").mkdir(parents=True)
        (tmp_path / folder / "g" / "5_wrapper.txt").write_text(line)
    assert dict(replay.compare(tmp_path / "a", tmp_path / "b", {}))["g"]
    (tmp_path / "renames").write_text("# what changed its name\nold new\n")
    renames = replay.read_renames(tmp_path / "renames")
    assert dict(replay.compare(tmp_path / "a", tmp_path / "b", renames)) == {"g": {}}
    (tmp_path / "renames").write_text("old\n")
    with pytest.raises(ValueError, match="no line `old new`"):
        replay.read_renames(tmp_path / "renames")


def test_kernels_are_compared_by_text_not_by_digest(tmp_path: Path) -> None:
    lines = (
        "plait_add_1a2b3c4d(); plait_mul_99ff00aa(); f(kernel_idx = 170, x); f(kernel_idx = 9)",
        "plait_add_0000ffff(); plait_mul_12345678(); f(kernel_idx = 0, x); f(kernel_idx = 1)",
    )
    for folder, line in zip("ab", lines, strict=True):
        (tmp_path / folder / "g").mkdir(parents=True)
        (tmp_path / folder / "g" / "5_wrapper.txt").write_text(line)
    assert dict(replay.compare(tmp_path / "a", tmp_path / "b", {})) == {"g": {}}


# ------------------------------------------------------------------------------ the text of a graph
def captured_of(
    monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any, **options: Any
) -> list[tuple[str, Any, str]]:
    """(text of what was given, tensors, wrapper) of every graph that a call compiles."""
    found = []
    compile_graph = program.compile_graph

    def spy(captured: Captured, cfg: Config, target: Any = None) -> Any:
        given, tensors = given_text(captured, cfg), tensors_of(captured.graph)
        made = compile_graph(captured, cfg, target)
        found.append((given, tensors, text(made.record.wrapper)))
        return made

    monkeypatch.setattr(program, "compile_graph", spy)
    torch.compile(fn, backend="plait", **options)(*args)
    return found


def reads_back(found: list[tuple[str, Any, str]]) -> None:
    assert found
    for given, tensors, wrapper in found:
        captured, cfg = read_given(given, tensors)
        assert given_text(captured, cfg).partition('"config"')[0] == given.partition('"config"')[0]
        assert text(compile_texts(captured, cfg)[0]) == wrapper


def test_views_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> Any:
        a = x[1:].as_strided((2, 3), (3, 1), 2)
        return (
            a,
            a.view(torch.int32),
            torch.full((2,), float("-inf")),
            x.sum(dtype=torch.float64),
            torch.conj(x * 1j),
        )

    reads_back(captured_of(monkeypatch, fn, torch.randn(5, 3)))


def test_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(6.0).t()
    reads_back(
        captured_of(
            monkeypatch, lambda x: x + torch.tensor([1.0, 2.0]) + table[1:3], torch.randn(2)
        )
    )


def test_sizes_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        n = x.shape[0]
        return (
            x.repeat(n // 2, 1)[: max(n - 3, 1)] * n**0.5,
            y.view(n * 2, -1),
            x.new_zeros(n % 3 + 1),
        )

    reads_back(captured_of(monkeypatch, fn, torch.randn(6, 4), torch.randn(12, 5), dynamic=True))


def test_found_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> Any:
        n = k.item()
        torch._check(n >= 0)
        torch._check(n < x.shape[0])
        return x[:n].sum(0), x.narrow(0, n, 1)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        reads_back(captured_of(monkeypatch, fn, torch.randn(6, 4), torch.tensor(2)))


def test_a_stack_trace_stands_in_a_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of one line share theirs: written at each, they were nine tenths of the text."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin() * 3
        return x.exp()

    found = captured_of(monkeypatch, fn, torch.randn(3))
    reads_back(found)
    ((given, tensors, _),) = found
    nodes = read_given(given, tensors)[0].graph.graph.find_nodes
    of_sin = [
        n.meta["stack_trace"] for n in nodes(op="call_function", target=torch.ops.aten.sin.default)
    ]
    (of_exp,) = [
        n.meta["stack_trace"] for n in nodes(op="call_function", target=torch.ops.aten.exp.default)
    ]
    assert len(of_sin) == 4 and len(set(of_sin)) == 1
    assert "x = x.sin() * 3" in of_sin[0] and "return x.exp()" in of_exp
    assert given.count("return x.exp()") == 1
    assert given.count("x.sin() * 3") <= 2  # of the sine, and where columns are told of the product


def test_what_has_no_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import plait

    with plait.watch(lambda *_: None):
        ((given, tensors, _),) = captured_of(monkeypatch, torch.sin, torch.randn(3))
    with pytest.raises(ValueError, match="no text holds a callback"):
        read_given(given, tensors)


def test_an_operator_that_is_not_here(recorded: Path, tmp_path: Path) -> None:
    graph = next(g for g in recorded.iterdir() if g.name.startswith("forward"))
    given = (
        (graph / "0_given.json")
        .read_text()
        .replace("aten::native_layer_norm.default", "mine::norm.default")
    )
    with pytest.raises(ValueError, match=r"there is no mine::norm\.default here"):
        read_given(given, {})
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "0_given.json").write_text(given)
    assert "1_error.txt" in run("rerun", tmp_path, "--out", tmp_path / "out", status=1)
    assert "mine::norm.default" in (tmp_path / "out" / "g" / "1_error.txt").read_text()
    operator = (
        "torch.library.define('mine::norm', '(Tensor x, int[] s, Tensor? w, Tensor? b, float e)"
    )
    (tmp_path / "operator.py").write_text(
        f"import torch\n{operator} -> (Tensor, Tensor, Tensor)')\n"
    )
    run(
        "rerun",
        tmp_path,
        "--out",
        tmp_path / "loaded",
        "--load",
        tmp_path / "operator.py",
        status=1,
    )
    assert "mine::norm" in (tmp_path / "loaded" / "g" / "5_wrapper.txt").read_text()


def test_folders_of_processes(tmp_path: Path) -> None:
    torch.compile(lambda x: x * 3, backend="plait", options={"debug_dir": f"{tmp_path}/%p"})(
        torch.randn(2)
    )
    assert [f.name for f in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.parametrize(("recorded", "isa"), [("avx2", "avx2"), ("other+more", "other")])
def test_instructions_of_another_machine(
    recorded: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((given, tensors, _), *_) = captured_of(monkeypatch, torch.sin, torch.ones(3))
    document = json.loads(given)
    document["machine"]["isa"] = recorded
    assert read_given(json.dumps(document), tensors)[1].isa == isa
    document["machine"]["isa"] = detect_isa().full_name
    assert detect_isa(read_given(json.dumps(document), tensors)[1].isa) == detect_isa()
