"""Products of few rows and what follows them, on any device: what is run and how it is judged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plait.config import Config
from plait.runtime.tune import Contest, Outcome
from plait.wrapper.instructions import CallExtern, Launch
from plait.wrapper.program import CompileRecord, observers
from tests.against_eager import poison

Program = Callable[..., Any]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """fn: of tensors with these sizes. launches, calls: of a program on a GPU, and of ATen."""

    fn: Program
    sizes: tuple[Sizes, ...]
    launches: int
    dtype: torch.dtype = torch.bfloat16
    calls: int = 0

    def tensors(self, device: str, seed: int = 0) -> list[Tensor]:
        """Inputs, whose products are of about 1."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for size in self.sizes:
            scale = size[-1] ** -0.5 if len(size) > 1 else 1.0
            x = torch.randn(size, generator=generator) * scale
            made.append(x.to(self.dtype).to(device))
        return made


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def residual(x: Tensor, w: Tensor, b: Tensor, rest: Tensor) -> Tensor:
    return rest + F.gelu(F.linear(x, w, b))


def heads(x: Tensor, w: Tensor) -> Tensor:
    """Projected, with heads apart and before positions, as attention wants them."""
    y = F.linear(x, w)
    return (y.view(*y.shape[:-1], 4, -1).transpose(1, 2) * 0.5).contiguous()


def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w)
    return y.relu(), y.float().exp()


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def written_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As GPT-2 has it."""
    y = torch.addmm(b, x.view(-1, x.shape[-1]), w).view(*x.shape[:-1], -1)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def nearly_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.0447 * torch.pow(y, 3.0))))


def read_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return y.relu(), y.exp()


def batch(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y.transpose(1, 2)).tanh()


def norm(x: Tensor, w: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    y = rest + F.linear(x, w)
    return y, F.layer_norm(y, y.shape[-1:])


CASES = {
    "plain": Case(lambda x, w: F.linear(x, w), ((16, 256), (192, 256)), 1),
    "odd": Case(lambda x, w: F.linear(x, w), ((5, 264), (203, 264)), 1),
    "residual": Case(residual, ((3, 4, 256), (128, 256), (128,), (3, 4, 128)), 1),
    "swiglu": Case(swiglu, ((2, 4, 256), (128, 256), (128, 256)), 2),
    "heads": Case(heads, ((2, 5, 256), (128, 256)), 1),
    "two": Case(two, ((7, 256), (128, 256)), 1),
    "batch": Case(batch, ((3, 6, 256), (3, 96, 256)), 1),
    "parts": Case(residual, ((12, 2048), (128, 2048), (128,), (12, 128)), 2),
    "norm": Case(norm, ((8, 256), (256, 256), (8, 256)), 2),
    "scaled": Case(
        lambda c, x, w: torch.addmm(c, x, w.t(), beta=0.5, alpha=2),
        ((4, 128), (4, 256), (128, 256)), 1,
    ),
    "half": Case(residual, ((3, 4, 256), (128, 256), (128,), (3, 4, 128)), 1, torch.float16),
    "few results": Case(lambda x, y: x.t() @ y + 1, ((2048, 48), (2048, 64)), 2),
    "fewest results": Case(lambda x, y: (x.t() @ y).relu(), ((4096, 8), (4096, 24)), 2),
    "forty rows": Case(residual, ((40, 256), (128, 256), (128,), (40, 128)), 1),
    "columns": Case(lambda x, w: torch.tanh(x @ w), ((5, 256), (256, 200)), 1),
    "odd sums": Case(lambda x, w: F.linear(torch.tanh(x), w), ((4096, 83), (1200, 83)), 2, calls=1),
    "one row of columns": Case(lambda x, w: torch.tanh(x @ w), ((1, 256), (256, 192)), 1),
    "single": Case(lambda x, w: x @ w + 1, ((16, 128), (128, 128)), 1, torch.float32),
    "one row": Case(residual, ((1, 512), (128, 512), (128,), (1, 128)), 1),
    "layer": Case(layer, ((3, 50, 256), (192, 256), (192,)), 0, calls=1),
    "layer of relu": Case(
        lambda x, w, b: F.linear(x, w, b).relu(), ((3, 50, 256), (192, 256), (192,)), 0, calls=1
    ),
    "layer written out": Case(
        written_out, ((3, 50, 256), (256, 192), (192,)), 0, calls=1
    ),
    "layer of another kind": Case(
        nearly_gelu, ((150, 256), (192, 256), (192,)), 1, calls=1
    ),
    "sum": Case(
        lambda x, w, r: F.linear(x, w) + r, ((2, 40, 256), (192, 256), (2, 40, 192)), 0, calls=1
    ),
    "sum that is a factor": Case(
        lambda x, w, r: (r + F.linear(x, w)) @ w, ((80, 256), (192, 256), (80, 192)), 0, calls=2
    ),
    "sum of fewer rows": Case(
        lambda x, w, r: F.linear(x, w) + r, ((2, 40, 256), (192, 256), (40, 192)), 1, calls=1
    ),
    "sum that is read": Case(
        lambda x, w, r: (F.linear(x, w) + r).exp(), ((80, 256), (192, 256), (80, 192)), 1, calls=1
    ),
    "layer of odd rows": Case(layer, ((300, 264), (1003, 264), (1003,)), 1, calls=1),
    "layer that two read": Case(read_twice, ((150, 256), (192, 256), (192,)), 1, calls=1),
    "layer of some rows": Case(
        residual, ((2, 80, 128), (448, 128), (448,), (2, 80, 448)), 1
    ),
    "layers of some rows": Case(
        lambda x, w, b, v: torch.tanh(F.linear(F.gelu(F.linear(x, w, b)), v)),
        ((160, 128), (448, 128), (448,), (448, 448)), 2,
    ),
    "layer of few rows": Case(layer, ((2, 8, 256), (192, 256), (192,)), 1),
    "few uneven columns": Case(lambda g, x: g.t() @ x, ((1 << 16, 160), (1 << 16, 63)), 2),
    "uneven columns": Case(lambda g, x: g.t() @ x, ((8192, 256), (8192, 319)), 2, calls=1),
    "uneven columns that stay": Case(
        lambda g, w: torch.relu(g @ w)[:, 63:], ((8192, 256), (256, 319)), 2, calls=1
    ),
    "vocabulary": Case(lambda x, w: F.linear(x, w), ((136, 136), (4099, 136)), 1),
    "vocabulary of few rows": Case(
        lambda x, w, b: F.linear(x, w, b), ((100, 136), (5250, 136), (5250,)), 1
    ),
    "vocabulary of many rows": Case(
        lambda x, w, b: F.linear(x, w, b).view(8, 128, -1), ((1024, 128), (515, 128), (515,)), 1
    ),
    "vocabulary in float32": Case(
        lambda x, w, r: F.linear(x, w).float() * r[:, None],
        ((1040, 128), (518, 128), (1040,)), 1, torch.float16,
    ),
    "integers": Case(
        lambda x, w, s: (torch._int_mm((x * 999).to(torch.int8), (w * 999).to(torch.int8).t()) * s)
        .to(torch.bfloat16), ((520, 256), (1104, 256), (1104,)), 3,
    ),
    "finished": Case(residual, ((136, 128), (4098, 128), (4098,), (136, 4098)), 1),
    "one column": Case(lambda x, w: (x @ w).relu(), ((130, 512), (512, 1)), 1),
}  # fmt: skip


def check(
    case: Case, wrapper: str, device: str, on_gpu: bool, **options: object
) -> list[CompileRecord]:
    """What a compiled program computes is as near to the float64 result as what eager does, for
    other numbers than it was compiled with too. on_gpu: it is compiled for one, where it launches
    what the case says and calls nothing."""
    records: list[CompileRecord] = []
    torch.compiler.reset()
    with observing(records), torch.no_grad():
        compiled = torch.compile(case.fn, backend="plait", options={"wrapper": wrapper, **options})
        for seed in range(2):
            given = case.tensors(device, seed)
            eager = tree_leaves(case.fn(*given))
            poison(eager)
            found = tree_leaves(compiled(*given))
            truth = tree_leaves(case.fn(*(x.double() for x in given)))
            for a, b, exact in zip(found, eager, truth, strict=True):
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())
                far, limit = (float((x.double() - exact).abs().max()) for x in (a, b))
                least = torch.finfo(a.dtype).eps * float(exact.abs().max())
                assert far <= 1.5 * limit + least, f"off by {far}, eager by {limit}"
    (record,) = records
    body = record.wrapper.body
    launched = [i.kernel for i in body if isinstance(i, Launch)]
    if on_gpu:
        assert len(launched) == case.launches, launched
        assert sum(isinstance(i, CallExtern) for i in body) == case.calls, record.wrapper
    return records


VOCABULARY = CASES["vocabulary of many rows"]
BY_ROWS = Case(lambda x, w, b: (x @ w + b).relu(), ((1100, 136), (136, 520), (520,)), 1)
VERSIONS = {
    r"described_product\(.*across=False": VOCABULARY,
    r" product\(.*kinds=8": VOCABULARY,
    r"described_product\(.*across=True": BY_ROWS,
}
"""Of the kernel of a large product, which are chosen by measuring, and a program with it."""


def check_version(version: str, wrapper: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One version is right, whichever is the fastest."""

    def tuned(contests: list[Contest], cfg: Config) -> list[Outcome]:
        found = [[k for k, x in enumerate(c.labels) if re.search(version, x)] for c in contests]
        return [
            Outcome(k[0] if k else 0, (1.0,) * c.n_ways)
            for k, c in zip(found, contests, strict=True)
        ]

    monkeypatch.setattr("plait.kernel.triton.target.tune", tuned)
    (record,) = check(VERSIONS[version], wrapper, device, wrapper != "fx", autotune=True)
    assert re.search(version, record.kernel_source), record.kernel_source


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Factors in float32 are rounded as this says."""
    how = torch.backends.cuda.matmul
    before, how.fp32_precision = how.fp32_precision, precision
    try:
        yield
    finally:
        how.fp32_precision = before


@contextmanager
def observing(records: list[CompileRecord]) -> Iterator[None]:
    """Programs that are compiled inside are added to records."""
    before = observers.get()
    observers.set((*before, records.append))
    try:
        yield
    finally:
        observers.set(before)
