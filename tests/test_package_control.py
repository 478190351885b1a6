"""Control flow in packages: it runs without Python, to the bit as plait.compile runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from functorch.experimental.control_flow import map as torch_map
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim, export

import plait
from plait.errors import Unsupported
from plait.lower.control_flow import ControlFlow, control_flow
from plait.wrapper.package import Contents, Control, PackageWriter
from tests.native_tools import write_package

ROOT = Path(__file__).parent.parent
N = Dim("n", min=3, max=9)


class Branch(nn.Module):
    """A branch with weights, one with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        offset = torch.tensor([1.0, 2.0, 3.0, 4.0])
        result: Tensor = torch.cond(
            x.sum() > 0, lambda x: self.inner(x).sin(), lambda x: x * 2 + offset, (x,)
        )
        return result.exp()


def repeat(x: Tensor) -> Any:
    return torch.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() * 2), (torch.tensor(0), x)
    )


def never(x: Tensor) -> Any:
    return torch.while_loop(lambda x: x.sum() > 1e6, lambda x: (x * 2,), (x,))


def count(x: Tensor) -> Any:
    """Carries an int; its result has a size that only the loop tells."""
    return torch.while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 2, x * 1.5 + i), (1, x))


def in_a_branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: repeat(x)[1], lambda x: x.cos(), (x,))


def on_a_size(x: Tensor) -> Any:
    return torch.cond(x.shape[0] > 5, lambda x: x.sin(), lambda x: x.cos(), (x,))


def mapped(x: Tensor) -> Any:
    """Its slices have elements that do not lie side by side."""
    return torch_map(lambda a, b: (a.sin() + b, a * 2), x.t().contiguous().t(), torch.ones(4))


def scanned(x: Tensor) -> Any:
    return scan(lambda c, a: (c + a, c * a), x[0], x.t().contiguous().t(), dim=0)


def drawn(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 2, (x,))


region = torch.compiler.nested_compile_region(lambda x: (x * 2).sin())


def nested(x: Tensor) -> Any:
    return region(region(x)) + 1


class Module(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


FUNCTIONS = (repeat, never, count, in_a_branch, on_a_size, mapped, scanned, drawn, nested)
PROGRAMS: dict[str, nn.Module] = {f.__name__: Module(f) for f in FUNCTIONS} | {"branch": Branch()}


def agree(path: Path, source: Any, example: Any, inputs: list[Tensor], eager: nn.Module) -> None:
    plait.package(source, path, example)
    compiled, loaded = plait.compile(source, example), plait.load(path)
    for x in inputs:
        results = []
        for call in (compiled, loaded, eager):
            torch.manual_seed(0)
            with torch.no_grad():
                results.append(pytree.tree_leaves(call(x)))
        for want, got, plain in zip(*results, strict=True):
            torch.testing.assert_close(want, plain)
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_packages_agree_with_compile(tmp_path: Path, name: str) -> None:
    module, x = PROGRAMS[name], torch.randn(5, 4)
    agree(tmp_path / "p.plait", module, (x,), [x, x.abs(), -x.abs()], module)
    sizes = {"x": {0: N}}
    exported = export(
        module, (x,), dynamic_shapes=sizes, strict=name == "nested"
    )  # strict: regions are kept
    agree(tmp_path / "q.plait", exported, None, [x, x.abs(), -torch.rand(8, 4)], module)


def contents(monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> Contents:
    seen: list[Contents] = []
    with monkeypatch.context() as m:
        m.setattr(PackageWriter, "finish", lambda self, c: seen.append(c))
        plait.package(module, "unused", (torch.randn(5, 4),))
    return seen[0]


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    c = contents(monkeypatch, PROGRAMS["repeat"])
    (loop,) = c.controls
    assert loop == Control("loop", (0, 1), ((False, 0), (False, 1)), ((), (4, 1)), carried=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"operands": ((False, 0), (False, 2))}, "while_loop does not fit its control flow"),
        ({"strides": ()}, "while_loop does not fit its control flow"),
        (
            {"operands": ((False, 0),), "carried": 1},
            "a program with other operands than it is given",
        ),
        ({"routines": (1,)}, "a wrong number of programs"),
        ({"routines": (1, 0)}, "a condition with several results"),
        ({"carried": 1}, "carries what it does not return"),
        ({"kind": "scan"}, "a wrong number of programs"),
        ({"kind": "cond", "operands": ((True, 0), *loop.operands)}, "branches with unlike results"),
        ({"routines": (0, 2)}, "routine 2 is out of range"),
        ({"carried": 3}, "number of operands 3 is out of range"),
    ]
    for changes, text in wrong:
        write_package(tmp_path / "p", replace(c, controls=(replace(loop, **changes),)))
        with pytest.raises(plait.PackageError, match=text):
            plait.load(tmp_path / "p")
    write_package(tmp_path / "p", replace(c, controls=()))
    with pytest.raises(plait.PackageError, match="calls 1 functions, 0 were described"):
        plait.load(tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "kind", "operands", "calls"),
    [
        ("repeat", "loop", (0, 2, 0, 0), ({"lt"}, {"add", "sin", "mul"})),
        ("branch", "cond", (1, 0, 0, 4), ({"addmm", "sin"}, {"add", "mul"})),
        ("scanned", "scan", (0, 1, 1, 0), ({"add", "mul"},)),
        ("mapped", "scan", (0, 0, 1, 1), ({"sin", "add", "mul"},)),
    ],
)
def test_control_flow_is_data(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    operands: tuple[int, ...],
    calls: tuple[set[str], ...],
) -> None:
    """Lowering's calls say which subgraphs they run and on what."""
    made: list[ControlFlow | None] = []

    def noting(call: object) -> ControlFlow | None:
        made.append(control_flow(call))
        return made[-1]

    monkeypatch.setattr("plait.capture.control.control_flow", noting)
    contents(monkeypatch, PROGRAMS[name])
    (flow,) = made
    assert flow is not None and flow.kind == kind
    given = (flow.predicate, flow.carried, flow.scanned, flow.shared)
    assert tuple(map(len, given)) == operands
    for graph, want in zip(flow.subgraphs, calls, strict=True):
        ops = {str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"}
        assert want <= ops


GENERATOR = torch.Generator()


def test_python_is_refused_by_name_and_line(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(4, generator=GENERATOR)

    with pytest.raises(
        Unsupported, match=r"calls Python: aten::randn.*\n.*test_package_control.py:\d+"
    ):
        plait.package(Noisy(), tmp_path / "p.plait", (torch.ones(4),))


def test_no_python_is_needed(tmp_path: Path) -> None:
    """The threads of a process share a package; the compiler is not loaded."""
    torch.manual_seed(1)
    x = torch.randn(5, 4)
    plait.package(PROGRAMS["in_a_branch"], tmp_path / "p.plait", (x,))
    code = f"""
import sys, torch, plait
from concurrent.futures import ThreadPoolExecutor
p = plait.load({str(tmp_path / "p.plait")!r})
xs = [torch.full((5, 4), float(k % 5 - 2)) for k in range(200)]
with ThreadPoolExecutor(4) as threads:
    got = list(threads.map(p, xs))
assert all(torch.equal(a, p(x)) for a, x in zip(got, xs))
assert "torch._dynamo" not in sys.modules and "plait.compile" not in sys.modules
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "fine\n", done.stderr
