"""Kernels of attention in the IR: their text reads back, and what is wrong with one is said."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from plait.errors import InternalError
from plait.ir import loops
from plait.ir.attention import Attention, Formula, HostAttention
from plait.ir.calls import Extern, TensorArg, UserKernel
from plait.ir.dtypes import b1, bf16, f32, i64
from plait.ir.expr import contiguous_strides, symbol
from plait.ir.loops import Load, LoopProgram, cast, integer, node
from plait.ir.text import program_text, read_program
from plait.ir.verify import verify
from plait.kernel.triton.attention import write_attention
from plait.kernel.triton.dialects import GPUS, shared_nbytes
from plait.runtime.cubin import Gpu
from tests.interned import stay

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


def test_text_of_one_on_a_host_reads_back_and_what_is_wrong_with_it_is_said() -> None:
    p = program(KERNEL, 1)
    (call,) = p.ops
    assert isinstance(call, Extern)
    sizes = (2, 48, 80, *(0,) * 12)
    call = replace(call, args=(*call.args[:3], *sizes), kernel=HostAttention("heads", True, 0.1))
    p = replace(p, ops=(call,))
    verify(p, "test")
    assert read_program(program_text(p)) == p
    turned = replace(call.args[2], strides=(1, 2, 8, 640))
    for args, said in (
        ((*call.args[:2], *sizes), "other operands"),
        ((*call.args[:2], turned, *sizes), "does not lie"),
        (call.args[:-1], "other sizes"),
    ):
        with pytest.raises(InternalError, match=said):
            verify(replace(p, ops=(replace(call, args=args),)), "test")


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


@pytest.mark.parametrize("gpu", [g for g in GPUS.values() if isinstance(g.arch, int)], ids=str)
def test_blocks_fit_in_what_a_multiprocessor_has(gpu: Gpu) -> None:
    """Rows that stay and rows that move, of keys and values or of queries and gradients."""
    limit = shared_nbytes(gpu)
    for width, dtype, gives in product((64, 256), (bf16, f32), ("result", "queries", "keys")):
        sizes = (2, 4, 512, width)
        names = ("q", "k", "v", "grad", "along", "sums")[: 3 if gives == "result" else 6]
        outs = ("out", "more")[: 1 if gives == "queries" else 2]
        buffers = {
            n: loops.Buffer(n, dtype, sizes, contiguous_strides(sizes), "cuda:0", True)
            for n in (*names, *outs)
        }
        score, grad = (
            Formula((B, H, I, J), node("load", (), Load(name, ()), f32) * 2.0)
            for name in ("score", "grad")
        )
        kernel = Attention(
            "a", gives, score, None if gives == "result" else grad, None, 0.25, 0, (0, 0)
        )
        args = tuple(TensorArg(b.name, b.shape, b.strides, 0) for b in map(buffers.get, names) if b)
        call = Extern(outs, "x", args, may_keep=False, kernel=kernel, fallback=False)
        made = write_attention(call, buffers, gpu).kernel
        assert isinstance(made, UserKernel), made
        found = dict(re.findall(r"^(ROWS|COLUMNS): .*\((\d+)\)", made.text, re.MULTILINE))
        rows, columns = int(found["ROWS"]), int(found["COLUMNS"])
        stay, move = (columns, rows) if gives == "keys" else (rows, columns)
        needed = (stay * (1 if gives == "result" else 2) + 2 * move) * width * dtype.nbytes
        least = 8 if limit <= 64 << 10 and (width, dtype) == (256, f32) else 16
        enough = stay >= (16 if gives == "result" else least) and move >= 16
        assert enough and needed <= limit, (gives, width, dtype, needed)


nodes_stay = stay()
