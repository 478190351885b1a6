"""Random kernels on a GPU against the slow reference: `python -m tests.gpu_kernels FIRST COUNT [cpu]`.

With `cpu` they run in Triton's interpreter instead (set TRITON_INTERPRET=1). Prints the seeds that differ and exits
with 1 if there is one.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np

from plait.errors import Unsupported
from plait.schedule.plan import Kernel, Store
from tests.fuzz_kernels import Maker, compare
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


def main() -> None:
    """Command line: see the module's docstring."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    device = "cpu" if "cpu" in sys.argv[3:] else "cuda"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            text = check(seed, Path(folder), device)
            if text:
                wrong += 1
                print(f"seed {seed}: {text[:300]}", flush=True)
    print(f"{count} kernels on {device}, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
