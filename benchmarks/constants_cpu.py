"""Constants that decide how kernels for the CPU are written or run: what other values of them do.

`python -m benchmarks.constants_cpu > benchmarks/results/constants-cpu.md`. Every case is compiled
with each value, and the kernels are called in turn on one thread: the best block of each counts.
The value that plait has is in bold.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import plait
from benchmarks.kernels_cpu import race
from plait.kernel.cpu import passes, vectorize
from plait.log import watched
from plait.runtime.generated import _MIN_SPLIT_NS, _pool

Case = tuple[Callable[[Tensor], Tensor], tuple[int, int]]

KEPT: dict[str, Case] = {
    "softmax, rows of 1000": (lambda x: x.softmax(-1), (500, 1000)),
    "softmax, scaled": (lambda x: (x * 0.125).softmax(-1), (500, 1000)),
    "softmax, clamped": (lambda x: (x * x + 1).clamp(0, 4).softmax(-1), (500, 1000)),
    "layer norm of a quotient": (lambda x: F.layer_norm(1 / (x * x + 1), (1000,)), (500, 1000)),
    "layer norm of GELU": (lambda x: F.layer_norm(F.gelu(x), (1000,)), (500, 1000)),
}
LONG: dict[str, Case] = {
    f"softmax, rows of {n}": (lambda x: x.softmax(-1), (1 << 20 >> n.bit_length(), n))
    for n in (3_000, 15_000, 30_000, 120_000, 500_000)
}
SUMS: dict[str, Case] = {
    f"sum, rows of {n}": (lambda x: x.sum(-1), (1 << 20 >> n.bit_length(), n))
    for n in (1_000, 30_000, 1_000_000)
}


def compiled(fn: Any, x: Tensor, module: ModuleType, name: str, value: float) -> Any:
    """The function with another value of a constant."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return plait.compile(lambda x: fn(x), (x,), options={"cache_dir": folder})
    finally:
        setattr(module, name, before)


def rows(
    cases: dict[str, Case], module: ModuleType, name: str, values: Iterable[float]
) -> Iterable[list[str]]:
    """Microseconds a call, a line a case; and by how much sums are off, in units of their last
    place, for CHUNK."""
    mine = getattr(module, name)
    yield [name, *(f"**{v:g}**" if v == mine else f"{v:g}" for v in values)]
    yield ["---", *("---:" for _ in values)]
    for case, (fn, shape) in watched(name, cases.items()):
        x = torch.rand(shape)
        sides = {f"{v}": compiled(fn, x, module, name, v) for v in values}
        best = race(sides, (x,), 1.0, 1)
        yield [f"{case}, us", *(f"{best[f'{v}']:.1f}" for v in values)]
        if name == "CHUNK":
            exact = x.double().sum(-1)
            off = [((sides[f"{v}"](x) - exact) / exact).abs().max() * 2**24 for v in values]
            yield [f"{case}, off by", *(f"{float(o):.2f}" for o in off)]


def handing_over(n: int) -> float:
    """Microseconds that Python's threads take to be given nothing to do, at best."""
    best = float("inf")
    for _ in range(2000):
        start = time.perf_counter()
        list(_pool(n).map(lambda tid: 0, range(n)))
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    """Command line: see the module's docstring."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("# Constants of kernels for the CPU\n")
    print(
        f"- torch: {torch.__version__}, 1 thread\n- command: `python -m benchmarks.constants_cpu`"
    )
    sweeps = (
        (KEPT, passes, "KEEP_COST", (0.0, 1.5, 3.0, 6.0, 12.0, 1000.0)),
        (LONG, passes, "ROW_BUFFER_BYTES", (0, 1 << 14, 1 << 16, 1 << 17, 1 << 19, 1 << 21)),
        (SUMS, vectorize, "CHUNK", (4, 8, 16, 32, 64, 256, 4096)),
    )
    for sweep in sweeps:
        print(f"\n## {sweep[2]}\n")
        for line in rows(*sweep):
            print("|", " | ".join(line), "|", flush=True)
    print("\n## _MIN_SPLIT_NS\n")
    taken = ", ".join(f"{n} threads {handing_over(n):.0f} us" for n in (2, 4, 8))
    print(f"To hand nothing over to Python's threads and wait for them:\n{taken}.")
    print(f"Work of {_MIN_SPLIT_NS / 1000:g} us or more is split.")


if __name__ == "__main__":
    main()
