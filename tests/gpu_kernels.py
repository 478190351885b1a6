"""Random kernels of the Triton target against the slow reference: `python -m tests.gpu_kernels
FIRST COUNT [GPU]`, where GPU is a name such as sm_80 or gfx942.

A log_softmax of rows too long for a block comes first. They run on a GPU, built and launched as
those of a program are; with TRITON_INTERPRET=1 in Triton's interpreter instead. Prints the seeds
that differ and exits with 1 if there is one.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from plait.config import Config
from plait.errors import Unsupported
from plait.ir.dtypes import f32
from plait.ir.expr import evaluate
from plait.ir.loops import Load, loop_vars, node
from plait.kernel.null.run import run_kernel
from plait.kernel.triton.dialects import GPUS
from plait.kernel.triton.target import TritonTarget, emit_kernel
from plait.log import watched
from plait.runtime.generated import GpuKernel
from plait.schedule.plan import Kernel, Reduce, Store
from tests.fuzz_kernels import Maker, compare
from tests.kernel_tools import as_tensor, emitted, strided

DEVICE = "cuda:0"


class OnDevice:
    """Kernels on a GPU, with the interface of kernel_tools.Loaded."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        target, cfg = TritonTarget(), Config.from_env()
        self.source = emitted(target, [_moved(k) for k in kernels], cfg)
        self.pack = str(target.build(self.source, cfg).path)

    def __call__(
        self,
        kernel: Kernel,
        arrays: dict[str, np.ndarray],
        sizes: dict[str, int] | None = None,
        threads: int = 1,
    ) -> int:
        host = [as_tensor(arrays[b.name], b.dtype) for b in kernel.args]
        args = [t.to(DEVICE) for t in host]
        values = [(sizes or {})[str(s)] for s in kernel.sizes]
        grid = evaluate(self.source.grids[kernel.name], sizes or {})
        run = GpuKernel(
            self.pack, self.source.entry_points[kernel.name], DEVICE
        )  # loaded until it has run
        run(args, values, grid)
        for mine, theirs in zip(host, args, strict=True):
            mine.copy_(theirs)
        return 0


def wrong(
    seeds: Iterable[int], runner: Callable[[list[Kernel]], Callable[..., int]], device: bool
) -> list[str]:
    """What is wrong with the kernels of some seeds.

    device: a failed check ends the process's use of the device, so kernels in which one fails are
    left out."""
    makers = {f"fuzz_{seed}": Maker(seed) for seed in seeds}
    kernels: list[Kernel] = []
    for name, maker in makers.items():
        kernel = dataclasses.replace(maker.kernel(), name=name)
        for s in kernel.stmts:  # the order in which points combine is the device's
            if isinstance(s, Store) and s.mode == "add":
                maker.exact_of[s.buf] = False
        if not (_collides(kernel) or _refused(kernel) or (device and _fails(kernel, maker))):
            kernels.append(kernel)
    run = runner(kernels)
    found = []
    with np.errstate(all="ignore"):
        for kernel in watched("kernels", kernels):
            if text := compare(kernel, makers[kernel.name], run, 1):
                found.append(f"{kernel.name}: {text[:300]}")
    return found


def _moved(kernel: Kernel) -> Kernel:
    return dataclasses.replace(
        kernel, args=tuple(dataclasses.replace(b, device=DEVICE) for b in kernel.args)
    )


def _collides(kernel: Kernel) -> bool:
    """Whether several points store to one element, where the last one wins: any of them may, on a
    GPU."""
    return any(isinstance(s, Store) and s.index_args and s.mode == "store" for s in kernel.stmts)


def _refused(kernel: Kernel) -> bool:
    try:
        emit_kernel(kernel, kernel.name)
    except Unsupported:
        return True
    return False


def _fails(kernel: Kernel, maker: Maker) -> bool:
    with np.errstate(all="ignore"):
        return bool(
            run_kernel(kernel, {k: a.copy() for k, a in maker.arrays.items()}, maker.dynamic)
        )


def long_rows(runner: Callable[[list[Kernel]], Callable[..., int]]) -> str:
    """log_softmax of rows that are read block by block, one of them nearly all -inf; what is wrong,
    or ""."""
    (i,), (r,) = loop_vars("i", (3,)), loop_vars("r", (20001,))
    x = node("load", (), Load("x", (i, r)), f32)
    off = node("sub", (x, node("acc", (), "peak", f32)))
    value = node("sub", (off, node("log", (node("acc", (), "sum", f32),))))
    stmts = (
        Reduce("peak", "max", x),
        Reduce("sum", "sum", node("exp", (off,))),
        Store("out", (i, r), value, True),
    )
    args = (strided("x", f32, (3, 20001)), strided("out", f32, (3, 20001)))
    kernel = Kernel("long_rows", (i,), (r,), stmts, args, ("out",), ())
    data = np.random.default_rng(0).standard_normal(60003).astype(np.float32) * 5
    data[20001:40002] = -np.inf
    data[20005] = 1.0
    mine = {"x": data, "out": np.zeros(60003, np.float32)}
    want = {"x": data, "out": np.zeros(60003, np.float32)}
    runner([kernel])(kernel, mine)
    run_kernel(kernel, want)
    same = np.allclose(mine["out"], want["out"], rtol=1e-6, atol=1e-5)
    return "" if same else f"{mine['out']} is not {want['out']}"


def main() -> None:
    """Command line: see the module's docstring."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    gpu = GPUS[sys.argv[3] if len(sys.argv) > 3 else "sm_80"]
    device = os.environ.get("TRITON_INTERPRET") != "1"
    with tempfile.TemporaryDirectory() as folder:
        if device:
            runner: Callable[[list[Kernel]], Callable[..., int]] = OnDevice
        else:
            from tests.triton_tools import Runner

            def runner(kernels: list[Kernel]) -> Callable[..., int]:
                return Runner(kernels, Path(folder), gpu)

        found = [f"long rows: {text}"] if (text := long_rows(runner)) else []
        found += wrong(range(first, first + count), runner, device)
    for text in found:
        print(text, flush=True)
    print(f"{count} kernels {'on a GPU' if device else 'interpreted'}, {len(found)} wrong")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
