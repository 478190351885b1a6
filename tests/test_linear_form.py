"""The linear form of kernels: what its passes promise, and the verifier that sees a broken rule."""

from __future__ import annotations

import pytest

from plait.errors import InternalError
from plait.ir.dtypes import f16
from plait.ir.loops import Buffer, Load, loop_vars, node
from plait.schedule.legalize import legalize, verify_linear
from plait.schedule.legalize.expand_reductions import expand_reductions
from plait.schedule.legalize.linearize import linearize
from plait.schedule.plan import Kernel, Reduce, Store
from tests.fuzz_kernels import Maker


def test_kernels_obey_the_rules_of_all_passes() -> None:
    for seed in range(40):
        legalize(Maker(seed).kernel(), verifies=True)


def test_the_verifier_sees_which_pass_was_left_out() -> None:
    i, j, r = loop_vars("i", (4, 2)) + loop_vars("r", (8,))
    x = node("load", (), Load("x", (i, j, r)), f16)
    stmts = (Reduce("s", "sum", x), Store("out", (i, j), node("acc", (), "s", f16), False))
    buffers = (Buffer("x", f16, (4, 2, 8), (16, 8, 1)), Buffer("out", f16, (4, 2), (2, 1)))
    linear = linearize(Kernel("k", (i, j), (r,), stmts, buffers, ("out",), ()))
    with pytest.raises(InternalError, match="the sum 's' of f16"):
        verify_linear(linear)
    with pytest.raises(InternalError, match="axes i0 and i1 that all accesses walk as one"):
        verify_linear(expand_reductions(linear))
