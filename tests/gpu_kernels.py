"""Random kernels on a GPU against the slow reference: `python -m tests.gpu_kernels FIRST COUNT [cpu]`.

A log_softmax of rows too long for a block comes first. With `cpu` they run in Triton's interpreter instead (set
TRITON_INTERPRET=1). Prints the seeds that differ and exits with 1 if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np

from plait.errors import Unsupported
from plait.ir.dtypes import f32
from plait.ir.loops import Load, loop_vars, node
from plait.schedule.plan import Kernel, Reduce, Store
from tests.fuzz_kernels import Maker, compare
from tests.kernel_tools import run_kernel, strided
from tests.triton_tools import Runner


def check(seed: int, folder: Path, device: str) -> str:
    """What is wrong with the kernel of a seed, or ""."""
    maker = Maker(seed)
    kernel = dataclasses.replace(maker.kernel(), name=f"fuzz_{seed}")
    for s in kernel.stmts:  # the order in which points combine is the device's
        if isinstance(s, Store) and s.mode == "add":
            maker.exact_of[s.buf] = False
    if _collides(kernel):
        return ""
    try:
        runner = Runner([kernel], folder, device)
    except Unsupported:
        return ""
    with np.errstate(all="ignore"):
        text = compare(kernel, maker, runner, 1)
    # A failed check would end the process's use of the device, so it is not compiled in there.
    return "" if device == "cuda" and text.startswith("check code 0") else text


def _collides(kernel: Kernel) -> bool:
    """Whether several points store to one element, where the last one wins: any of them may, on a GPU."""
    return any(isinstance(s, Store) and s.index_args and s.mode == "store" for s in kernel.stmts)


def long_rows(folder: Path, device: str) -> str:
    """log_softmax of rows that are read block by block, one of them nearly all -inf; what is wrong, or ""."""
    (i,), (r,) = loop_vars("i", (3,)), loop_vars("r", (20001,))
    x = node("load", (), Load("x", (i, r)), f32)
    off = node("sub", (x, node("acc", (), "peak", f32)))
    value = node("sub", (off, node("log", (node("acc", (), "sum", f32),))))
    stmts = (Reduce("peak", "max", x), Reduce("sum", "sum", node("exp", (off,))), Store("out", (i, r), value, True))
    args = (strided("x", f32, (3, 20001)), strided("out", f32, (3, 20001)))
    kernel = Kernel("long_rows", (i,), (r,), stmts, args, ("out",), ())
    data = np.random.default_rng(0).standard_normal(60003).astype(np.float32) * 5
    data[20001:40002] = -np.inf
    data[20005] = 1.0
    mine = {"x": data, "out": np.zeros(60003, np.float32)}
    want = {"x": data, "out": np.zeros(60003, np.float32)}
    Runner([kernel], folder, device)(kernel, mine)
    run_kernel(kernel, want)
    same = np.allclose(mine["out"], want["out"], rtol=1e-6, atol=1e-5)
    return "" if same else f"{mine['out']} is not {want['out']}"


def main() -> None:
    """Command line: see the module's docstring."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    device = "cpu" if "cpu" in sys.argv[3:] else "cuda"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        text = long_rows(Path(folder), device)
        if text:
            wrong += 1
            print(f"long rows: {text}", flush=True)
        for seed in range(first, first + count):
            text = check(seed, Path(folder), device)
            if text:
                wrong += 1
                print(f"seed {seed}: {text[:300]}", flush=True)
    print(f"{count} kernels on {device}, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
