"""The verifier of loop programs: a legal program passes; each broken rule is named together with
the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from plait.errors import InternalError
from plait.ir.calls import Extern, TensorArg
from plait.ir.dtypes import b1, bf16, f32, i64
from plait.ir.expr import compare, contiguous_strides, symbol
from plait.ir.loops import (
    Alias,
    Assert,
    Buffer,
    Item,
    Load,
    LoopProgram,
    Mutate,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    apply,
    arg_symbol,
    const,
    loop_vars,
    node,
)
from plait.ir.verify import verify
from tests.interned import stay

N = symbol("s0", lo=2)
I = loop_vars("i", (N, 4))
R = loop_vars("r", (4,))


def _load(buf: str, *index: Any) -> Any:
    return node("load", (), Load(buf, tuple(index)), f32)


def program() -> LoopProgram:
    """y = x * 2; z = sum(y, 1); a scatter, an alias and an output."""
    buffers = {
        name: Buffer(name, dtype, shape, contiguous_strides(shape))
        for name, dtype, shape in (
            ("x", f32, (N, 4)), ("at", i64, (N,)), ("y", f32, (N, 4)), ("z", f32, (N,)),
            ("w", f32, (N, 4)), ("a", f32, (4, N)),
        )
    }  # fmt: skip
    index = node("load", (), Load("at", (I[0],)), i64)
    return LoopProgram(
        inputs=("x", "at", ("sym", "s0")),
        buffers=buffers,
        constants={},
        ops=(
            Pointwise("y", I, apply("mul", _load("x", *I), const(2.0, f32))),
            Reduction(("z",), I[:1], R, "sum", _load("y", I[0], R[0])),
            Scatter("w", "y", I, (arg_symbol(0, N), I[1]), (index,), _load("x", *I), "add"),
            Alias("a", "w", 0),
            Assert(compare("le", 3, N), "too small"),
        ),
        outputs=(TensorArg("a", (4, N), (N, 1), 0), N),
        symbols={"s0": None},
    )


def test_a_legal_program_passes() -> None:
    verify(program(), "test")


def _op(k: int, **changes: Any) -> Callable[[LoopProgram], LoopProgram]:
    def change(p: LoopProgram) -> LoopProgram:
        ops = list(p.ops)
        ops[k] = replace(ops[k], **changes)
        return replace(p, ops=tuple(ops))

    return change


def _add(*ops: Any) -> Callable[[LoopProgram], LoopProgram]:
    return lambda p: replace(p, ops=(*p.ops, *ops))


def _buffer(key: str, **changes: Any) -> Callable[[LoopProgram], LoopProgram]:
    return lambda p: replace(p, buffers={**p.buffers, key: replace(p.buffers[key], **changes)})


J = loop_vars("j", (N,))
HALF = node("add", (const(1.0, bf16), const(1.0, bf16)))

BROKEN: dict[str, tuple[Callable[[LoopProgram], LoopProgram], str]] = {
    "unknown buffer": (_op(0, out="nobody"), "nobody"),
    "read before defined": (lambda p: replace(p, ops=p.ops[1:]), "read before it is defined"),
    "defined twice": (_add(program().ops[0]), "defined twice"),
    "wrong name": (_buffer("y", name="q"), "under the name y"),
    "rank of strides": (_buffer("y", strides=(1,)), "under the name y"),
    "rank of a load": (_op(0, body=_load("x", I[0])), "1 indices"),
    "dtype of a load": (
        _op(0, body=node("load", (), Load("at", (I[0],)), f32)),
        "a load of f32 from",
    ),
    "dtype of the body": (_op(0, body=const(1, i64)), "the body gives i64"),
    "extents": (_op(0, vars=loop_vars("i", (N, 5))), "range over"),
    "a piece beyond its buffer": (_op(0, index=(I[0], I[1] + 3)), "beyond the shape"),
    "same variable twice": (_op(0, vars=(I[0], I[0])), "not distinct"),
    "foreign variable": (
        _op(0, body=_load("x", J[0], 0)),
        "neither a loop variable nor a size symbol",
    ),
    "half arithmetic": (_op(0, body=node("cast", (HALF,), None, f32)), "add on bf16"),
    "node dtype": (
        _op(0, body=node("add", (_load("x", *I), _load("x", *I)), None, b1)),
        "the op table says f32",
    ),
    "arity": (
        _op(0, body=node("neg", (_load("x", *I), _load("x", *I)), None, f32)),
        "neg with 2 arguments",
    ),
    "unknown op": (_op(0, body=node("dance", (), None, f32)), "no op dance"),
    "kind of dtype": (_op(0, body=node("not", (_load("x", *I),), None, f32)), "not on f32"),
    "bitcast": (
        _op(0, body=node("bitcast", (const(1, i64),), None, f32)),
        "a bitcast of i64 to f32",
    ),
    "mask": (
        _op(0, body=node("load", (const(1, i64),), Load("x", I, True), f32)),
        "without a mask",
    ),
    "arguments": (
        _op(0, body=node("load", (const(1, i64),), Load("x", I), f32)),
        "with 1 arguments",
    ),
    "reduction kind": (_op(1, kind="median"), "no reduction median"),
    "reduction results": (_op(1, outs=("z", None)), "2 results of sum"),
    "any over floats": (_op(1, kind="any"), "any over f32"),
    "scatter mode": (_op(2, mode="sub"), "scatter (sub)"),
    "scatter rank": (_op(2, index=(arg_symbol(0, N),)), "1 indices"),
    "scatter mask": (_op(2, mask=const(1, i64)), "a mask of i64"),
    "scan kind": (_add(Scan(("q",), I, 1, "median", _load("x", *I))), "scan median"),
    "item": (_add(Item("u0", "at")), "u0 is no symbol"),
    "assert": (_add(Assert(symbol("u1"), "")), "the symbol u1"),
    "mutate": (_add(Mutate("y", "w")), "cannot take the value"),
    "operand": (
        _add(Extern((None,), "aten::sin", (TensorArg("q", (), (), 0),))),
        "q is read before",
    ),
    "operand strides": (
        _add(Extern((None,), "aten::sin", (TensorArg("x", (N,), (), 0),))),
        "operand",
    ),
    "extern symbol": (
        _add(Extern((None,), "aten::numel", (), symbols=((0, "u0"),))),
        "u0 is no symbol",
    ),
    "int input": (lambda p: replace(p, inputs=(*p.inputs, ("sym", "s9"))), "s9 is no symbol"),
    "output": (lambda p: replace(p, outputs=(TensorArg("q", (), (), 0),)), "q is read before"),
    "donated": (lambda p: replace(p, donated=("y",)), "donated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_named(name: str) -> None:
    change, text = BROKEN[name]
    with pytest.raises(InternalError) as error:
        verify(change(program()), "some pass")
    assert "after some pass" in error.value.what and text in error.value.what


nodes_stay = stay()
