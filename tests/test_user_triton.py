"""Triton kernels of the user, in graphs on a CPU: see tests/user_triton.py. Triton is not imported
by this process."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

import pytest

from plait.ir.calls import pack_grid, unpack_grid
from plait.ir.expr import evaluate, symbol
from tests import warm

ROOT = Path(__file__).parent.parent
TRITON = Path(sys.prefix) / "triton"


@pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
@pytest.mark.parametrize(
    "program",
    [
        "user_triton",
        "user_triton_as_gpu rms_norm floats writes shared branches",
        pytest.param("user_triton_as_gpu", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_the_user_run(program: str) -> None:
    # Some programs go to eager, as they should.
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{TRITON}", "PLAIT_STRICT": "0"}
    if "as_gpu" in program:
        env["TRITON_INTERPRET"] = "1"  # as it will say itself
    done = warm.run("-m", *f"tests.{program}".split(), env=env, cwd=ROOT, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("passed all\n"), (
        done.stdout + done.stderr[-4000:]
    )


def test_a_grid_is_one_word() -> None:
    """Also one of symbols, which is 0 wherever nothing is to run."""
    symbols = [symbol(name) for name in "xyz"]
    word = pack_grid(*symbols)
    for grid in product((0, 1, 7, 2**31 - 1), (0, 1, 3, 65535), (0, 1, 2, 32767)):
        env = dict(zip("xyz", grid, strict=True))
        known, found = pack_grid(*grid), evaluate(word, env)
        assert 0 <= found < 2**63, grid
        if 0 in grid:
            assert (known, found) == (0, 0), grid
        else:
            assert unpack_grid(known) == grid, grid
            assert tuple(evaluate(e, env) for e in unpack_grid(word)) == grid, grid
