"""Control flow in packages: it runs without Python, to the bit as plait.compile runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
            if eager is not PROGRAMS["drawn"]:  # a kernel draws other numbers than eager
                torch.testing.assert_close(want, plain)
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_packages_agree_with_compile(tmp_path: Path, name: str, exported: bool) -> None:
    module, x = PROGRAMS[name], torch.randn(5, 4)
    if not exported:
        agree(tmp_path / "p.plait", module, (x,), [x, x.abs(), -x.abs()], module)
        return
    sizes = {"x": {0: N}}
    program = export(
        module, (x,), dynamic_shapes=sizes, strict=name == "nested"
    )  # strict: regions are kept
    agree(tmp_path / "q.plait", program, None, [x, x.abs(), -torch.rand(8, 4)], module)


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
