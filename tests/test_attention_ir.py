"""Kernels of attention in the IR: their text reads back, and what is wrong with one is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import InternalError
from plait.ir import loops
from plait.ir.attention import Attention, Formula
from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import b1, bf16, f32, i64
from plait.ir.expr import contiguous_strides, symbol
from plait.ir.loops import Load, LoopProgram, cast, integer, node
from plait.ir.text import program_text, read_program
from plait.ir.verify import verify

B, H, I, J = (symbol(name, extent=n) for name, n in zip("bhij", (2, 4, 48, 80), strict=True))
SIZES = {"q": (2, 4, 48, 16), "k": (2, 4, 80, 16), "v": (2, 4, 80, 16), "bias": (4, 48, 80)}
SCORE = node("load", (), Load("score", ()), f32)
BIASED = Formula((B, H, I, J), SCORE + cast(node("load", (), Load("given0", (H, I, J)), bf16), f32))
CAUSAL = Formula((B, H, I, J), node("le", (integer(J), integer(I))))


def program(kernel: Attention, wanted: int = 2) -> LoopProgram:
    """A program of one launch."""
    given = {
        name: loops.Buffer(name, bf16, sizes, contiguous_strides(sizes), "cuda:0", True)
        for name, sizes in SIZES.items()
    }
    outs = {
        "out": loops.Buffer(
            "out", bf16, SIZES["q"], contiguous_strides(SIZES["q"]), "cuda:0", True
        ),
        "sums": loops.Buffer("sums", f32, (2, 4, 48), (192, 48, 1), "cuda:0", True),
    }
    args = [TensorArg(name, b.shape, b.strides, 0) for name, b in given.items()]
    call = Extern(
        tuple(outs)[:wanted], "higher_order::flex_attention", tuple(args), may_keep=False,
        kernel=kernel, fallback=False,
    )  # fmt: skip
    buffers = {**given, **dict(list(outs.items())[:wanted])}
    results = (TensorArg("out", SIZES["q"], contiguous_strides(SIZES["q"]), 0),)
    return LoopProgram(tuple(SIZES), buffers, {}, (call,), results, {}, (), {}, ())


KERNEL = Attention("attention_result.0", "result", BIASED, None, CAUSAL, 0.25, 0, (128, 128))


def test_text_reads_back() -> None:
    p = program(KERNEL)
    verify(p, "test")
    assert read_program(program_text(p)) == p


@pytest.mark.parametrize(
    ("kernel", "wanted", "said"),
    [
        (KERNEL, 1, "gives 1 result"),
        (replace(KERNEL, gives="queries"), 1, "unknown kind"),
        (replace(KERNEL, tables=3), 2, "unknown kind"),
        (replace(KERNEL, tables=1), 2, "no operand"),
        (replace(KERNEL, mask=replace(CAUSAL, body=node("load", (), Load("given1", ()), b1))), 2,
         "no operand"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(kernel: Attention, wanted: int, said: str) -> None:
    with pytest.raises(InternalError, match=said):
        verify(program(kernel, wanted), "test")


def test_a_formula_says_what_it_loads() -> None:
    assert BIASED.loaded == {"score", "given0"} and not BIASED.is_score
    assert Formula((B, H, I, J), SCORE).is_score
    assert CAUSAL.loaded == set() and CAUSAL.body.args[0].dtype == i64
