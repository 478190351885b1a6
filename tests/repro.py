"""Repros of the fuzzers: complete programs as text, to paste into a file in the source tree and
run.

A fuzzer that finds something prints `kernel_repro(...)` or `program_repro(...)`; what is printed
calls `rerun_kernel` or `rerun_program` on the text of the kernel or program itself: it does not
depend on how the fuzzer makes them.
"""

from __future__ import annotations

import base64
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from plait.config import Config
from plait.devices import DEVICES
from plait.ir.loops import LoopProgram
from plait.ir.text import program_text, read_program
from plait.ir.verify import verify
from plait.pipelines import schedule
from plait.runtime.toolchain import ISAS
from plait.schedule.plan import Kernel
from plait.schedule.text import kernel_text, read_kernel
from tests.kernel_tools import Loaded
from tests.schedule_tools import check


@dataclass
class Given:
    """What a kernel is run on, under the names that the kernel fuzzer's Maker has."""

    arrays: dict[str, np.ndarray]
    dynamic: dict[str, int]
    exact_of: dict[str, bool]


def pack(x: np.ndarray) -> str:
    """The bytes of an array as text, `unpack` reads it."""
    return base64.b85encode(zlib.compress(np.ascontiguousarray(x).tobytes(), 9)).decode()


def unpack(dtype: str, text: str) -> np.ndarray:
    """The flat array that `pack` wrote."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype).copy()


def _array(x: np.ndarray) -> str:
    """An array as an expression: its values where they are few and have an exact text, else
    packed."""
    if x.size <= 16 and x.dtype.kind in "iub":
        return f"np.array({x.tolist()}, {str(x.dtype)!r})"
    return f"unpack({str(x.dtype)!r}, {pack(x)!r})"


def kernel_repro(
    kernel: Kernel,
    arrays: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    exact: Mapping[str, bool],
    isa: str,
    threads: int = 1,
    opt_level: int = 2,
) -> str:
    """A program that runs a kernel on these arrays and compares it with the reference."""
    given = "\n".join(f"        {name!r}: {_array(x)}," for name, x in arrays.items())
    return f"""\
# Save as repro.py in the root of the source tree, then: python repro.py
import numpy as np
from tests.repro import rerun_kernel, unpack

rerun_kernel(
    '''
{kernel_text(kernel).replace(chr(92), chr(92) * 2)}''',
    arrays={{
{given}
    }},
    sizes={dict(sizes)!r},
    exact={dict(exact)!r},
    isa={isa!r}, threads={threads}, opt_level={opt_level},
)
"""


def rerun_kernel(
    text: str,
    arrays: dict[str, np.ndarray],
    sizes: dict[str, int],
    exact: dict[str, bool],
    isa: str,
    threads: int,
    opt_level: int,
) -> None:
    """Runs what `kernel_repro` wrote. Raises AssertionError where the kernel is wrong."""
    from tests.fuzz_kernels import compare

    kernel = read_kernel(text)
    with tempfile.TemporaryDirectory() as folder:
        loaded = Loaded([kernel], ISAS[isa], Path(folder), opt_level)
        wrong = compare(kernel, Given(arrays, sizes, exact), loaded, threads)  # type: ignore[arg-type]
    assert not wrong, wrong
    print("as the reference")


def program_repro(
    program: LoopProgram,
    sizes: Mapping[str, int],
    seed: int,
    split: Mapping[str, int] | None = None,
) -> str:
    """A program that schedules a loop program and compares the plan with the unfused program.

    sizes: values of the size symbols; seed: of the inputs; split: what was changed in the rates
    of CPUs in plait/devices.py."""
    return f"""\
# Save as repro.py in the root of the source tree, then: python repro.py
from tests.repro import rerun_program

rerun_program(
    '''
{program_text(program).replace(chr(92), chr(92) * 2)}''',
    sizes={dict(sizes)!r}, seed={seed}, split={dict(split or {})!r},
)
"""


def rerun_program(text: str, sizes: dict[str, int], seed: int, split: dict[str, int]) -> None:
    """Runs what `program_repro` wrote. Raises AssertionError where the plan is wrong, InternalError
    where it is illegal."""
    program = read_program(text)
    verify(program, "repro")
    cpu = DEVICES["cpu"]
    changed = replace(cpu, rates=replace(cpu.rates, **split))  # type: ignore[arg-type]
    with patch.dict(DEVICES, cpu=changed):
        plan = schedule(program, Config())
    check(plan, program, sizes, seed)
    print("the plan computes what the program says")
