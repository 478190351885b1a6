"""Programs that test_package.py puts into packages, and the process without the compiler that runs
them.

`python tests/package_programs.py FOLDER` loads every package there and compares what it gives with
what eager gave.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Counted(nn.Module):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Nested(nn.Module):
    """Arguments and results that are no plain tensors."""

    def forward(
        self, x: dict[str, Tensor], n: int, *, more: list[Any], flag: bool = True
    ) -> dict[str, Any]:
        y = x["a"] * n + more[0] if flag else x["a"]
        return {"sum": y, "both": (y.sum(), more[1]), "none": None, "three": n, "size": y.shape[0]}


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def convolutions() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)
    )
    module.append(nn.BatchNorm2d(4))
    for norm in (module[1], module[4]):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.uniform_(norm.weight)
    return module


@dataclass(frozen=True)
class Program:
    """build makes the module; calls: keyword or positional arguments by a dynamic size."""

    build: Callable[[], nn.Module]
    call: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    training: bool = False


X = torch.linspace(-1, 1, 6 * 16).view(6, 16)
PROGRAMS: dict[str, Program] = {
    "mlp": Program(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)),
        lambda n: ((X[:n],), {}),
    ),
    "product alone": Program(lambda: nn.Linear(16, 4), lambda n: ((X[:n],), {})),
    "transformer": Program(block, lambda n: ((X[:n].view(n, 1, 16) * torch.ones(3, 1),), {})),
    "convolutions": Program(convolutions, lambda n: ((torch.ones(n, 3, 8, 8).cumsum(-1),), {})),
    "batch norm": Program(lambda: nn.BatchNorm1d(16), lambda n: ((X[:n],), {}), training=True),
    "state": Program(Counted, lambda n: ((X[:n],), {})),
    "tied": Program(Tied, lambda n: ((X[:n, :6].contiguous(),), {})),
    "nested": Program(
        Nested, lambda n: (({"a": X[:n]}, 3), {"more": [X[:n] + 1, 2.5], "flag": True})
    ),
}


def modules_of_the_compiler() -> list[str]:
    """What is loaded of plait that a package does not need."""
    rooms = (
        "compile",
        "capture",
        "graph",
        "ir",
        "lower",
        "schedule",
        "kernel",
        "wrapper",
        "tools",
        "compat",
        "config",
    )
    return [
        m
        for m in sys.modules
        if m.split(".")[:1] == ["plait"] and m.split(".")[1:2] and m.split(".")[1] in rooms
    ]


def main(folder: Path) -> None:
    """Runs every package of a folder."""
    import plait

    for path in sorted(folder.glob("*.plait")):
        loaded = plait.load(path)
        for args, kwargs, want in torch.load(path.with_suffix(".pt")):
            got = loaded(*args, **kwargs)
            torch.testing.assert_close(got, want, msg=lambda m, path=path: f"{path.stem}: {m}")
    assert not modules_of_the_compiler(), modules_of_the_compiler()
    assert "torch._dynamo" not in sys.modules
    del loaded
    gc.collect()
    print("all agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
