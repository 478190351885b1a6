"""Modules of the debug folder that call Python: control flow with its subgraphs, operators of the
user's script."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.runtime.generated import load_constants
from plait.wrapper.calltext import CallTexts
from tests import warm

X = torch.arange(12.0).reshape(3, 4) / 5 - 1
TABLE = torch.arange(3.0).view(3, 1)

USERS = """
import torch

from tests import warm

@torch.library.custom_op("plaitscript::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return torch.cond(y.sum() > 3, lambda z: z.exp(), lambda z: self.linear(z), (y,))

        return torch.cond(x.mean() > 0, inner, lambda y: y - TABLE, (x,)) * 2


def loop(x: Tensor) -> Any:
    def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, y * 1.5

    return torch.while_loop(
        lambda i, y: (i < 3) & (y.sum() < float("inf")), body, (torch.tensor(0), x)
    )


def scanned(x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, y: (carry + y, carry * y), torch.zeros(4), x)


def module_of(fn: Callable[..., Any], folder: Path, *args: Tensor) -> Path:
    """The module of the one graph of fn(*args)."""
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend="plait", options={"debug_dir": str(folder)})(*args)
    (made,) = folder.glob("*/6_module.py")
    return made


def run_again(file: Path, *inputs: Tensor) -> tuple[Any, ...]:
    """What the program in the file computes, made from nothing but the file."""
    made = runpy.run_path(str(file))
    constants = load_constants(made["CONSTANTS"], str(file))
    calls = made["python_calls"](constants) if "python_calls" in made else []
    result: tuple[Any, ...] = made["bind"](made["LIBRARIES"], constants, calls)(list(inputs))
    return result


def in_a_process(file: Path, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(plait.__file__).parent.parent)
    env = {
        "PYTHONPATH": os.pathsep.join([root, *env.values()]),
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return warm.run(file, env=env, cwd=file.parent)


@pytest.mark.parametrize("fn", [loop, scanned], ids=lambda f: f.__name__)
def test_subgraphs_are_written_into_the_module(fn: Callable[..., Any], tmp_path: Path) -> None:
    file = module_of(fn, tmp_path, X)
    got = run_again(file, X)
    for g, w in zip(got, torch.utils._pytree.tree_leaves(fn(X)), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("x", [X, X + 1, X - 1], ids=["outer", "inner", "else"])
def test_branches_within_branches_and_their_tensors(x: Tensor, tmp_path: Path) -> None:
    module = Branches()
    file = module_of(module, tmp_path, x)
    assert file.read_text().count("def bind_") == 4
    inputs = {t.shape: t.detach() for t in (*module.parameters(), x, TABLE)}
    given = [inputs[t.shape] for t in runpy.run_path(str(file))["example_inputs"]()]
    torch.testing.assert_close(run_again(file, *given)[0], module(x).detach())


def test_a_module_with_branches_runs_by_itself(tmp_path: Path) -> None:
    file = module_of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + 1, tmp_path, X)
    run = in_a_process(file)
    assert run.returncode == 0, run.stderr
    assert "float32[3, 4]" in run.stdout and " us of " in run.stdout


def test_operators_of_the_script_are_named(tmp_path: Path) -> None:
    script = tmp_path / "users_operators.py"
    script.write_text(USERS)
    if not hasattr(torch.ops.plaitscript, "twice"):
        runpy.run_path(str(script))

    def fn(x: Tensor) -> Tensor:
        doubled = torch.ops.plaitscript.twice(x) + 1
        return torch.cond(
            x.sum() > 0, lambda y: torch.ops.plaitscript.twice(y), lambda y: y - 1, (doubled,)
        )

    file = module_of(fn, tmp_path / "debug", X)
    torch.testing.assert_close(run_again(file, X)[0], fn(X))
    assert "plaitscript::twice" in file.read_text().split("import torch")[0]  # the head says so
    assert "users_operators.py" in file.read_text().split("import torch")[0]
    run = in_a_process(file)
    assert run.returncode == 1
    assert (
        "there is no operator plaitscript::twice: import the module, or load the library"
        in run.stderr
    )
    file.write_text(
        file.read_text().replace("import torch\n", "import torch\nimport users_operators\n", 1)
    )
    run = in_a_process(file, folder=str(tmp_path))
    assert run.returncode == 0, run.stderr


def test_what_no_text_stands_for_is_named() -> None:
    assert CallTexts((print,), []).missing == "a Python object of class builtin_function_or_method"
