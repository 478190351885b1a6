"""Every instruction × every target: all do what a slow reference interpreter does, bit by bit."""

from __future__ import annotations

import functools
import math
import operator
import subprocess
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import Config
from plait.ir import expr
from plait.ir.checks import OUT_OF_RANGE, ZERO_DIVISION
from plait.ir.dtypes import b1, c64, f32, f64, i32, i64, opaque
from plait.ir.expr import Size, smax, smin, symbol
from plait.pipelines import run_passes
from plait.runtime.load import load
from plait.wrapper import instructions as ins
from plait.wrapper.cpp import build_cpp, make_cpp
from plait.wrapper.fx import load_program, make_fx
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    AssertAlignment,
    AssertScalar,
    AssertSizeStride,
    BumpVersion,
    CallExtern,
    CallPrograms,
    CallPython,
    CheckFinite,
    Constant,
    Copy,
    DefineKernel,
    Fill,
    Free,
    Hook,
    Instr,
    ItemOf,
    Launch,
    ListOf,
    Literal,
    Note,
    OpaqueInput,
    Partition,
    Place,
    Ref,
    Return,
    Reuse,
    SizeOf,
    Symbol,
    SymbolInput,
    TensorInput,
    View,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.program import Artifacts
from plait.wrapper.python import load_python, make_python
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify
from tests.wrapper_reference import interpret

SOURCE = """
typedef long long i64;
#define KERNEL extern "C" long long
static void share(i64 n, i64 tid, i64 nt, i64& lo, i64& hi) {
  lo = n * tid / nt;
  hi = n * (tid + 1) / nt;
}
KERNEL k_double(i64 tid, i64 nt, void* const* b, const i64* s) {  // y = 2x
  const float* x = (const float*)b[0]; float* y = (float*)b[1];
  i64 lo, hi; share(s[0], tid, nt, lo, hi);
  for (i64 i = lo; i < hi; ++i) y[i] = 2 * x[i];
  return 0;
}
KERNEL k_add(i64 tid, i64 nt, void* const* b, const i64* s) {  // z = x + y
  const float *x = (const float*)b[0], *y = (const float*)b[1]; float* z = (float*)b[2];
  i64 lo, hi; share(s[0], tid, nt, lo, hi);
  for (i64 i = lo; i < hi; ++i) z[i] = x[i] + y[i];
  return 0;
}
KERNEL k_divide(i64 tid, i64 nt, void* const* b, const i64* s) { return *(const i64*)b[0] == 0; }
KERNEL k_check(i64 tid, i64 nt, void* const* b, const i64* s) {
  return *(const i64*)b[0] < s[0] ? 0 : 3;
}
#define TAKES extern "C" const int
TAKES k_double_takes[] = {2, 1}, k_add_takes[] = {3, 1};
TAKES k_divide_takes[] = {1, 0}, k_check_takes[] = {1, 1};
"""


def _double(t: list[torch.Tensor], s: list[int]) -> int:
    flat(t[1], s[0]).copy_(flat(t[0], s[0]) * 2)
    return 0


def _add(t: list[torch.Tensor], s: list[int]) -> int:
    flat(t[2], s[0]).copy_(flat(t[0], s[0]) + flat(t[1], s[0]))
    return 0


def flat(t: torch.Tensor, n: int) -> torch.Tensor:
    return t.data.as_strided((n,), (1,))  # .data: a kernel does not know of autograd's versions


MEANINGS = {
    "k_double": _double,
    "k_add": _add,
    "k_divide": lambda t, s: int(int(t[0]) == 0),
    "k_check": lambda t, s: 0 if int(t[0]) < s[0] else 3,
}
KERNELS = (
    DefineKernel("k_double", 2, 1),
    DefineKernel("k_add", 3, 1),
    DefineKernel("k_divide", 1, 0, (ZERO_DIVISION,)),
    DefineKernel("k_check", 1, 1, (OUT_OF_RANGE, ZERO_DIVISION, OUT_OF_RANGE)),
)
s0 = symbol("s0", lo=1)
INF = float("inf")
u0 = symbol("u0", lo=-INF)


@dataclass(frozen=True)
class Case:
    """A program, its inputs, and the part of an error message if it must fail. programs: inputs
    and body of each subprogram."""

    inputs: tuple[ins.Input, ...]
    body: tuple[Instr, ...]
    args: Callable[[], Sequence[object]]
    constants: Sequence[torch.Tensor] = ()
    callables: Sequence[Callable[..., object]] = ()
    fails: str = ""
    error: type[Exception] = RuntimeError
    programs: tuple[tuple[tuple[ins.Input, ...], tuple[Instr, ...]], ...] = ()

    @property
    def program(self) -> WrapperProgram:
        def made(name: str, inputs: Any, body: Any, *more: Any) -> WrapperProgram:
            used = {i.kernel for i in body if isinstance(i, Launch)}
            kernels = tuple(k for k in KERNELS if k.name in used)
            tables = len(self.constants), len(self.callables)
            return WrapperProgram(name, inputs, kernels + body, *tables, *more)

        programs = tuple(made(f"case.{k}", *p) for k, p in enumerate(self.programs))
        return made("case", self.inputs, self.body, None, (), programs)


def x6() -> list[torch.Tensor]:
    return [torch.arange(6.0) - 2.5]


def tensor(
    name: str = "x",
    dtype: Any = f32,
    shape: tuple[Size, ...] = (6,),
    strides: tuple[Size, ...] = (1,),
) -> ins.Input:
    return TensorInput(name, dtype, shape, strides)


def double(src: str, dst: str, n: Size = 6, **more: Any) -> Launch:
    return Launch("k_double", (src, dst), (n,), (dst,), n * 2, **more)


def add(a: str, b: str, dst: str, n: Size = 6, **more: Any) -> Launch:
    return Launch("k_add", (a, b, dst), (n,), (dst,), n * 2, **more)


def alloc(name: str, n: Size = 6) -> Alloc:
    return Alloc(name, f32, (n,), (1,))


def looked(name: str, shape: tuple[Size, ...] = (6,), dtype: Any = f32) -> AssertSizeStride:
    """What stands behind the layout of a call's result."""
    strides = tuple(
        math.prod(n for n in shape[k + 1 :] if isinstance(n, int)) for k in range(len(shape))
    )
    return AssertSizeStride(name, dtype, shape, strides, "the call")


def give(*names: str) -> Return:
    return Return(tuple(Ref(n) for n in names))


X = (tensor(),)
ROOM = Arena("room", 128)
AT0, AT64 = Place("a", "room", 0, f32, (6,), (1,)), Place("b", "room", 64, f32, (6,), (1,))


def with_value(x: torch.Tensor, *, alpha: float) -> tuple[torch.Tensor, torch.Tensor, None]:
    assert not torch.is_grad_enabled()
    return x * alpha, x + 1, None


LABEL = 'k_double (model.py:3 "é\\n")'


KINDS = tuple(
    Literal(*k) for k in (("none",), ("bool", "True"), ("float", "inf"), ("float", (0.1).hex()))
)


def looks(node: str, label: str, t: torch.Tensor) -> None:
    assert (node, label) == ("dou-ble", LABEL)
    assert t.tolist() == [-5, -3, -1, 1, 3, 5]


CASES: dict[str, Case] = {
    "launch": Case(X, (alloc("y"), double("x", "y"), give("y")), x6),
    "launch twice": Case(
        X,
        (
            alloc("y"),
            alloc("z"),
            double("x", "y", barrier=False),
            add("x", "y", "z"),
            give("z", "y"),
        ),
        x6,
    ),
    "launch alone": Case(X, (alloc("y"), double("x", "y", parallel=False), give("y")), x6),
    "launch large": Case(
        (tensor(shape=(4000000,)),),
        (alloc("y", 4000000), double("x", "y", 4000000), give("y")),
        lambda: [torch.randn(4000000)],
    ),
    "launch fails": Case(
        (tensor("k", i64, (), ()),),
        (Launch("k_check", ("k",), (5,), (), 1), give("k")),
        lambda: [torch.tensor(5)],
        fails="index out of range in self (in kernel k_check)",
        error=IndexError,
    ),
    "launch fails with another error": Case(
        (tensor("k", i64, (), ()),),
        (Launch("k_divide", ("k",), (), (), 1), give("k")),
        lambda: [torch.tensor(0)],
        fails=r"ZeroDivisionError (in kernel k_divide)",
    ),
    "launch passes a check": Case(
        (tensor("k", i64, (), ()),),
        (Launch("k_check", ("k",), (5,), (), 1), give("k")),
        lambda: [torch.tensor(4)],
    ),
    "sizes and strides": Case(
        (tensor(shape=(s0, symbol("s1")), strides=(symbol("t0"), 2)),),
        (
            Symbol("s0", SizeOf("x", "size", 0)),
            Symbol("s1", SizeOf("x", "size", 1)),
            Symbol("t0", SizeOf("x", "stride", 0)),
            Symbol("o0", SizeOf("x", "offset", 0)),
            Symbol("n", s0 * symbol("s1")),
            Return((s0, symbol("s1"), symbol("t0"), symbol("o0"), symbol("n"), Ref("x"))),
        ),
        lambda: [torch.randn(60)[4:].as_strided((3, 4), (12, 2), 4)],
    ),
    "every expression": Case(
        (SymbolInput("s0"), SymbolInput("u0")),
        (
            Return(
                (
                    s0 * 3 - u0 * 2 + 1,
                    u0 // s0,
                    u0 % s0,
                    smin(s0, u0),
                    smax(s0, u0),
                    s0 * u0 * u0,
                    *(expr.compare(op, s0, u0) for op in ("eq", "ne", "lt", "le")),
                    (u0 * s0 + 3) // 7 * u0 - 5,
                    -4,
                )
            ),
        ),
        lambda: [5, -13],
    ),
    "dynamic launch": Case(
        (tensor(shape=(s0,)),),
        (
            Symbol("s0", SizeOf("x", "size", 0)),
            alloc("y", s0),
            double("x", "y", s0),
            Return((Ref("y"), s0 * 2)),
        ),
        lambda: [torch.randn(17)],
    ),
    "item": Case(
        (tensor("k", i64, (), ()), tensor("q", b1, (1,), (1,))),
        (
            Symbol("u0", ItemOf("k")),
            Symbol("u1", ItemOf("q")),
            Return((u0 + 1, symbol("u1", lo=-INF))),
        ),
        lambda: [torch.tensor(-41), torch.tensor([True])],
    ),
    "item of a kernel's result": Case(
        X,
        (
            alloc("y"),
            double("x", "y"),
            View("first", "y", f32, (), (), 4),
            Symbol("u0", ItemOf("first")),
            Return((u0,)),
        ),
        x6,
    ),
    "assert holds": Case(
        (SymbolInput("s0"),),
        (AssertScalar(expr.compare("lt", s0, 9), "no"), Return((s0,))),
        lambda: [8],
    ),
    "assert fails": Case(
        (SymbolInput("s0"),),
        (AssertScalar(expr.compare("lt", s0, 9), "s0 must be < 9"), Return((s0,))),
        lambda: [9],
        fails="s0 must be < 9",
    ),
    "layout holds": Case(
        (tensor(shape=(2, 1, 3), strides=(3, 3, 1)),),
        (AssertSizeStride("x", f32, (2, 1, 3), (3, 77, 1)), give("x")),
        lambda: [torch.randn(2, 1, 3)],
    ),
    "layout of no elements": Case(
        (tensor(shape=(0, 3), strides=(3, 1)),),
        (AssertSizeStride("x", f32, (0, 3), (9, 9)), give("x")),
        lambda: [torch.randn(0, 3)],
    ),
    "layout fails": Case(
        X,
        (AssertSizeStride("x", f32, (6,), (2,)), give("x")),
        x6,
        fails="'x' has sizes [6] and strides [1], expected [6] and [2]",
    ),
    "layout of another dtype": Case(
        X,
        (AssertSizeStride("x", i32, (6,), (1,)), give("x")),
        x6,
        fails="'x' has dtype float32, expected int32",
    ),
    "layout of a dtype that nobody knows": Case(
        X, (AssertSizeStride("x", opaque, (6,), (1,)), give("x")), x6
    ),
    "layout of another rank": Case(
        X,
        (AssertSizeStride("x", f32, (6, 1), (1, 1)), give("x")),
        x6,
        fails="'x' has sizes [6] and strides [1], expected [6, 1] and [1, 1]",
    ),
    "aligned": Case(X, (AssertAlignment("x", 16), give("x")), x6),
    "not aligned": Case(
        X,
        (View("y", "x", f32, (5,), (1,), 1), AssertAlignment("y", 16), give("y")),
        x6,
        fails="'y' is not aligned to 16 bytes",
    ),
    "finite": Case(X, (CheckFinite("x", "model.py:3"), give("x")), x6),
    "integers are finite": Case(
        (tensor(dtype=i64),), (CheckFinite("x", "model.py:3"), give("x")), lambda: [torch.arange(6)]
    ),
    "not finite": Case(
        X,
        (CheckFinite("x", "model.py:3"), give("x")),
        lambda: [torch.tensor([0, 1, float("nan"), 0, 0, 0])],
        fails="'x' holds a NaN or an infinity, computed by model.py:3",
    ),
    "an infinity, which may be": Case(
        X,
        (CheckFinite("x", "model.py:3", infinities=False), give("x")),
        lambda: [torch.tensor([0, 1, float("inf"), 0, 0, 0])],
    ),
    "a NaN, which may not": Case(
        X,
        (CheckFinite("x", "model.py:3", infinities=False), give("x")),
        lambda: [torch.tensor([0, 1, float("nan"), 0, 0, 0])],
        fails="'x' holds a NaN, computed by model.py:3",
    ),
    "arena": Case(
        X,
        (
            ROOM,
            AT0,
            double("x", "a"),
            AT64,
            double("a", "b"),
            Free("a"),
            alloc("y"),
            add("b", "x", "y"),
            Free("b"),
            give("y"),
        ),
        x6,
    ),
    "arena again": Case(  # b takes the bytes of a, which is dead
        X,
        (
            ROOM,
            AT0,
            double("x", "a"),
            alloc("y"),
            double("a", "y"),
            Free("a"),
            replace(AT64, offset=0),
            double("y", "b"),
            alloc("z"),
            double("b", "z"),
            give("z", "y"),
        ),
        x6,
    ),
    "arena in place": Case(
        X,
        (
            ROOM,
            AT0,
            double("x", "a"),
            replace(AT64, offset=0),
            double("a", "b"),
            Free("a"),
            alloc("y"),
            double("b", "y"),
            give("y"),
        ),
        x6,
    ),
    "dynamic arena": Case(
        (tensor(shape=(s0,)),),
        (
            Symbol("s0", SizeOf("x", "size", 0)),
            Arena("room", s0 * 8),
            Place("a", "room", 0, f32, (s0,), (1,)),
            double("x", "a", s0),
            Place("b", "room", s0 * 4, f32, (s0,), (1,)),
            double("a", "b", s0),
            alloc("y", s0),
            add("a", "b", "y", s0),
            give("y"),
        ),
        lambda: [torch.randn(33)],
    ),
    "arena and an op": Case(
        X,
        (
            ROOM,
            AT0,
            double("x", "a"),
            CallExtern("aten::neg", (Ref("a"),), (), ("y",), may_keep=False),
            looked("y"),
            Free("a"),
            give("y"),
        ),
        x6,
    ),
    "op into an arena": Case(
        X,
        (
            ROOM,
            AT0,
            CallExtern("aten::neg.out", (Ref("x"),), (("out", Ref("a")),), (), ("a",), False),
            alloc("y"),
            double("a", "y"),
            give("y"),
        ),
        x6,
    ),
    "strided alloc": Case(
        (tensor(shape=(2, 3), strides=(3, 1)),),
        (Alloc("y", f32, (2, 3), (1, 2)), Copy("y", "x", bump=False), give("y")),
        lambda: [torch.randn(2, 3)],
    ),
    "empty alloc": Case(X, (Alloc("y", f32, (0, 3), (3, 1)), give("y")), x6),
    "reuse": Case(
        X,
        (
            alloc("y"),
            double("x", "y"),
            Reuse("z", "y", f32, (6,), (1,)),
            double("y", "z"),
            Free("y"),
            give("z"),
        ),
        x6,
    ),
    "reuse as another type": Case(
        X,
        (
            alloc("y"),
            double("x", "y"),
            CallExtern("aten::sum", (Ref("y"),), (), ("t",)),
            looked("t", ()),
            Reuse("z", "y", i32, (2, 2), (2, 1)),
            Fill("z", 7),
            give("z", "t"),
        ),
        x6,
    ),
    "free": Case(
        X,
        (
            alloc("y"),
            double("x", "y"),
            Free("x"),
            alloc("z"),
            double("y", "z"),
            Free("y"),
            give("z"),
        ),
        x6,
    ),
    "view of an input": Case(X, (View("y", "x", f32, (2, 2), (1, 2), 1), give("y", "x")), x6),
    "view of a result": Case(
        X,
        (
            alloc("y"),
            double("x", "y"),
            View("z", "y", f32, (3, 2), (2, 1), 0),
            View("w", "z", f32, (2,), (2,), 1),
            give("z", "w"),
        ),
        x6,
    ),
    "view as another type": Case(
        X,
        (View("y", "x", i32, (5,), (1,), 1), View("z", "x", i64, (2,), (1,), 1), give("y", "z")),
        x6,
    ),
    "view from the storage's start": Case(
        X,
        (
            View("y", "x", f32, (6,), (1,), 1, relative=False),
            View("z", "x", f32, (6,), (1,), 0),
            give("y", "z"),
        ),
        lambda: [torch.randn(12)[4:10]],
    ),
    "kernel on a view": Case(
        X, (View("y", "x", f32, (4,), (1,), 2), alloc("z", 4), double("y", "z", 4), give("z")), x6
    ),
    "dynamic view": Case(
        (tensor(shape=(s0,)),),
        (
            Symbol("s0", SizeOf("x", "size", 0)),
            View("y", "x", f32, (s0 - 1,), (1,), 1),
            alloc("z", s0 - 1),
            double("y", "z", s0 - 1),
            give("z", "y"),
        ),
        lambda: [torch.randn(9)],
    ),
    "constant": Case(
        X,
        (Constant("c", 1), alloc("y"), add("x", "c", "y"), give("y", "c")),
        x6,
        constants=[torch.zeros(1), torch.ones(6)],
    ),
    "extern by position": Case(
        X,
        (CallExtern("aten::mul.Tensor", (Ref("x"), Ref("x")), (), ("y",)), looked("y"), give("y")),
        x6,
    ),
    "extern with every operand": Case(
        X,
        (
            CallExtern(
                "aten::sum.dim_IntList",
                (Ref("x"), ListOf((0,)), Literal("bool", "True")),
                (("dtype", Literal("dtype", "f64")),),
                ("a",),
            ),
            looked("a", (1,), f64),
            CallExtern(
                "aten::clamp",
                (Ref("x"), Literal("float", (-1.5).hex()), Literal("none")),
                (),
                ("b",),
            ),
            looked("b", (6,)),
            CallExtern("aten::cat", (ListOf((Ref("x"), Ref("b"))),), (("dim", 0),), ("c",)),
            looked("c", (12,)),
            CallExtern(
                "aten::clone",
                (Ref("c"),),
                (("memory_format", Literal("memory_format", "contiguous_format")),),
                ("d",),
            ),
            looked("d", (12,)),
            CallExtern(
                "aten::zeros",
                (ListOf((2, 3)),),
                (
                    ("dtype", Literal("dtype", "c64")),
                    ("layout", Literal("layout", "strided")),
                    ("device", Literal("device", "cpu")),
                    ("pin_memory", Literal("bool", "False")),
                ),
                ("e",),
            ),
            looked("e", (2, 3), c64),
            CallExtern(
                "aten::add.Scalar",
                (Ref("e"), Literal("complex", f"{(1.5).hex()} {(-2.0).hex()}")),
                (),
                ("f",),
            ),
            looked("f", (2, 3), c64),
            CallExtern(
                "aten::gelu", (Ref("x"),), (("approximate", Literal("str", "tanh")),), ("g",)
            ),
            looked("g", (6,)),
            CallExtern("aten::add.Tensor", (Ref("x"), Ref("b")), (("alpha", 3),), ("h",)),
            looked("h", (6,)),
            CallExtern("aten::index.Tensor", (Ref("g"), ListOf((Ref("i"),))), (), ("j",)),
            looked("j", (2,)),
            give("a", "b", "c", "d", "f", "g", "h", "j"),
        ),
        lambda: [*x6(), torch.tensor([3, 1])],
    ),
    "extern with several results": Case(
        X,
        (
            CallExtern(
                "aten::sort", (Ref("x"),), (("descending", Literal("bool", "True")),), (None, "i")
            ),
            looked("i", dtype=i64),
            give("i"),
        ),
        x6,
    ),
    "extern with a list of results": Case(
        X,
        (
            CallExtern("aten::split.Tensor", (Ref("x"), 4), (), ("a", "b")),
            looked("a", (4,)),
            looked("b", (2,)),
            give("b", "a"),
        ),
        x6,
    ),
    "extern with an int result": Case(
        X,
        (
            CallExtern("aten::sym_numel", (Ref("x"),), (), ("u0",)),
            alloc("y", u0),
            double("x", "y", u0),
            Return((Ref("y"), u0 * 2)),
        ),
        x6,
    ),
    "extern for its effect": Case(
        X, (CallExtern("aten::mul_.Scalar", (Ref("x"), 3), (), ()), give("x")), x6
    ),
    "extern that returns its argument": Case(
        X,
        (
            CallExtern("aten::view", (Ref("x"), ListOf((2, 3))), (), ("y",)),
            looked("y", (2, 3)),
            give("y", "x"),
        ),
        x6,
    ),
    "extern into memory": Case(
        X,
        (
            alloc("y"),
            CallExtern("aten::exp.out", (Ref("x"),), (("out", Ref("y")),), (), ("y",), False),
            give("y"),
        ),
        x6,
    ),
    "matrix product": Case(
        (tensor(shape=(2, 3), strides=(3, 1)),),
        (
            View("t", "x", f32, (3, 2), (1, 3), 0),
            CallExtern("aten::mm", (Ref("x"), Ref("t")), (), ("y",), may_keep=False),
            looked("y", (2, 2)),
            give("y"),
        ),
        lambda: [torch.randn(2, 3)],
    ),
    "python": Case(
        (*X, OpaqueInput("o")),
        (
            CallPython(
                0, "f", (Ref("x"),), (("alpha", Literal("float", (0.5).hex())),), ("a", "b", None)
            ),
            looked("a"),
            looked("b"),
            CallPython(1, "g", (Ref("o"), ListOf((Ref("a"),))), (), ("c",)),
            looked("c"),
            give("a", "b", "c", "o"),
        ),
        lambda: [*x6(), "an object"],
        callables=[with_value, lambda o, ts: ts[0] * len(o)],
    ),
    "condition": Case(
        (*X, tensor("p", b1, (), ())),
        (
            CallPrograms("cond", (0, 1), 0, 0, "cond", (Ref("p"), Ref("x"), 3), ("a", "s1")),
            looked("a"),
            Return((Ref("a"), symbol("s1", lo=-INF))),
        ),
        lambda: [*x6(), torch.tensor(True)],
        programs=(
            ((*X, SymbolInput("s0")), (alloc("y"), double("x", "y"), Return((Ref("y"), s0 * 2)))),
            ((*X, SymbolInput("s0")), (alloc("y"), double("x", "y"), Return((Ref("y"), s0)))),
        ),
    ),
    "condition on an int, results unused": Case(
        (*X, SymbolInput("s0")),
        (
            CallPrograms("cond", (1, 0), 0, 0, "cond", (s0 - 1, Ref("x")), (None, "b")),
            looked("b"),
            give("b"),
        ),
        lambda: [*x6(), 1],
        constants=[torch.arange(6.0)],
        programs=(
            (
                X,
                (
                    Constant("w", 0),
                    alloc("y"),
                    add("x", "w", "y"),
                    alloc("z"),
                    double("y", "z"),
                    Free("y"),
                    give("z", "z"),
                ),
            ),
            (X, (give("x", "x"),)),
        ),
    ),
    "loop": Case(
        (*X, SymbolInput("s0")),
        (
            CallPrograms("loop", (0, 1), 2, 0, "while", (s0, Ref("x"), 9), ("s1", "y")),
            looked("y"),
            Return((Ref("y"), symbol("s1", lo=-INF))),
        ),
        lambda: [*x6(), 2],
        programs=(
            (
                (SymbolInput("s0"), *X, SymbolInput("s1")),
                (Return((expr.compare("lt", s0, symbol("s1", lo=1)),)),),
            ),
            (
                (SymbolInput("s0"), *X, SymbolInput("s1")),
                (alloc("y"), double("x", "y"), Return((s0 + 3, Ref("y")))),
            ),
        ),
    ),
    "loop that never runs": Case(
        X,
        (
            CallPrograms("loop", (0, 1), 1, 0, "while", (Ref("x"),), ("y",)),
            looked("y"),
            give("x", "y"),
        ),
        x6,
        programs=((X, (Return((0,)),)), (X, (give("x"),))),
    ),
    "rounds": Case(
        (tensor("i", i64, (), ()), *X),
        (
            CallPrograms("rounds", (0, 1), 2, 0, "while", (Ref("i"), Ref("x")), ("j", "y")),
            looked("j", (3,), i64),
            looked("y", (3, 6)),
            give("y", "j"),
        ),
        lambda: [torch.tensor(2), *x6()],
        programs=(
            (
                (tensor("i", i64, (), ()), *X),
                (Symbol("u0", ItemOf("i")), Return((expr.compare("lt", u0, 9),))),
            ),
            (
                (tensor("i", i64, (), ()), *X),
                (
                    CallExtern("aten::add.Scalar", (Ref("i"), 3), (), ("j",)),
                    looked("j", (), i64),
                    alloc("y"),
                    double("x", "y"),
                    give("j", "y"),
                ),
            ),
        ),
    ),
    "rounds without one": Case(
        X,
        (
            CallPrograms("rounds", (0, 1), 1, 0, "while", (Ref("x"),), ("y",)),
            looked("y", (1, 6)),
            give("x", "y"),
        ),
        x6,
        programs=((X, (Return((0,)),)), (X, (give("x"),))),
    ),
    "scan, its slices apart": Case(
        (*X, tensor("v", f32, (6, 4), (1, 6))),
        (
            View("t", "v", f32, (4, 6), (6, 1), 0),
            CallPrograms("scan", (0,), 1, 2, "scan", (Ref("x"), Ref("t"), Ref("t"), 5), ("s", "o")),
            looked("s"),
            looked("o", (4, 6)),
            give("s", "o"),
        ),
        lambda: [*x6(), torch.arange(24.0).view(4, 6).t()],
        programs=(
            (
                (*X, tensor("v"), tensor("w"), SymbolInput("s0")),
                (
                    AssertSizeStride("v", f32, (6,), (1,), copies=True),
                    alloc("a"),
                    add("x", "v", "a"),
                    alloc("b"),
                    add("a", "w", "b"),
                    give("a", "b"),
                ),
            ),
        ),
    ),
    "a subprogram that copies, and calls Python": Case(
        (tensor("x", f32, (2, 3), (1, 2)),),
        (CallPrograms("call", (0,), 0, 0, "call", (Ref("x"),), ("y",)), looked("y"), give("y")),
        lambda: [torch.arange(6.0).view(3, 2).t()],
        callables=[lambda x: x + 1],
        programs=(
            (
                (tensor("x", f32, (2, 3), (3, 1)),),
                (
                    AssertSizeStride("x", f32, (2, 3), (3, 1), copies=True),
                    View("f", "x", f32, (6,), (1,), 0),
                    alloc("y"),
                    double("f", "y"),
                    CallPython(0, "f", (Ref("y"),), (), ("z",)),
                    looked("z"),
                    give("z"),
                ),
            ),
        ),
    ),
    "hook": Case(
        X,
        (
            ROOM,
            AT0,
            double("x", "a"),
            Hook("a", 0, "dou-ble", LABEL),
            alloc("y"),
            double("a", "y"),
            give("y"),
        ),
        x6,
        callables=[looks],
    ),
    "copy": Case(
        (*X, tensor("v")),
        (alloc("y"), double("x", "y"), Copy("v", "y"), give("y")),
        lambda: [*x6(), torch.zeros(6)],
    ),
    "copy converts": Case(
        (*X, tensor("v", i64, (2, 6), (6, 1))),
        (Copy("v", "x"), give("v")),
        lambda: [*x6(), torch.zeros(2, 6, dtype=torch.int64)],
    ),
    "copy quietly": Case(
        (*X, tensor("v")), (Copy("v", "x", bump=False), give()), lambda: [*x6(), torch.zeros(6)]
    ),
    "bump": Case(X, (double("x", "x"), BumpVersion("x"), give("x")), x6),
    "partition": Case(
        X,
        (Partition(False, "first"), double("x", "x"), Partition(True), double("x", "x"), give("x")),
        x6,
    ),
    "fill": Case(
        X,
        (
            alloc("y"),
            Fill("y", Literal("float", (2.5).hex())),
            alloc("z"),
            Fill("z", 3),
            Alloc("q", b1, (2,), (1,)),
            Fill("q", Literal("bool", "True")),
            give("y", "z", "q"),
        ),
        x6,
    ),
    "note": Case(X, (Note("model.py:3: relu\nand more"), give("x")), x6),
    "return": Case(
        (tensor(), OpaqueInput("o"), SymbolInput("s0")),
        (Return((Ref("x"), Ref("x"), Literal("none"), s0 + 1, 7, Ref("o"))),),
        lambda: [*x6(), None, 4],
    ),
    "arguments that are no tensors": Case(
        (*X, *map(OpaqueInput, "abcdefg"), SymbolInput("s0"), SymbolInput("u0")),
        (
            CallExtern("aten::add.Scalar", (Ref("x"), Ref("a"), Ref("b")), (), ("p",)),
            looked("p"),
            CallExtern("aten::clamp", (Ref("p"), Ref("c"), Ref("a")), (), ("q",)),
            looked("q"),
            CallExtern("aten::sum.dim_IntList", (Ref("q"), ListOf((0,)), Ref("d")), (), ("r",)),
            looked("r", (1,)),
            CallExtern(
                "aten::bernoulli.p",
                (Ref("x"), Literal("float", (0.5).hex())),
                (("generator", Ref("e")),),
                ("s",),
            ),
            looked("s"),
            CallExtern("aten::gelu", (Ref("q"),), (("approximate", Ref("f")),), ("t",)),
            looked("t"),
            CallPython(0, "f", (Ref("g"), Ref("t"), s0), (("more", Ref("a")),), ("v",)),
            looked("v"),
            Return((*map(Ref, "pqrstvabcdfg"), s0 * u0, u0, *KINDS)),
        ),
        lambda: [
            *x6(),
            2.5,
            2,
            None,
            True,
            torch.Generator().manual_seed(3),
            "tanh",
            {"k": 0.5},
            7,
            -(2**62) // 7,
        ],
        callables=[lambda g, t, n, more: t * g["k"] + n * more],
    ),
    "several results that are no tensors": Case(
        (OpaqueInput("a"), OpaqueInput("b"), tensor("x", i64, (), ())),
        (Return((Ref("a"), Ref("a"), Ref("b"), Literal("none"), Ref("x"))),),
        lambda: [1 << 80, [float("inf")], torch.tensor(3)],
    ),
    "nothing": Case((), (Return(()),), list),
}
CASES["extern with every operand"] = replace(
    CASES["extern with every operand"], inputs=(tensor(), tensor("i", i64, (2,), (1,)))
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "k.cpp").write_text(SOURCE)
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "k.cpp", "-o", "k.so"], cwd=folder, check=True
    )
    return str(folder / "k.so")


def native(case: Case, program: WrapperProgram, library: str) -> Any:
    return load(encode(program), {"cpu": library}, case.constants, case.callables)


def python(case: Case, program: WrapperProgram, library: str) -> Any:
    return load_python(make_python(program, {}), {"cpu": library}, case.constants, case.callables)


@functools.cache
def in_cpp() -> tuple[str, dict[str, str]]:
    """All programs in one library, which takes the time of a few: its path, and the entry of each
    program's text."""
    programs = {text(p): p for c in CASES.values() for p in (c.program, run_passes(c.program))}
    entries = {t: f"plait_run_{k}" for k, t in enumerate(programs)}
    sources = [make_cpp(p, entries[t]) for t, p in programs.items()]
    include = '#include "plait/wrapper.h"'
    source = "".join([sources[0], *(t.replace(include, "") for t in sources[1:])])
    return str(build_cpp(source, Config.from_env())), entries


def cpp(case: Case, program: WrapperProgram, library: str) -> Any:
    path, entries = in_cpp()
    return load(
        encode(program),
        {"cpu": library},
        case.constants,
        case.callables,
        path,
        entries[text(program)],
    )


def fx(case: Case, program: WrapperProgram, library: str) -> Any:
    return load_program(program, Artifacts({"cpu": library}, case.constants, case.callables))


TARGETS = {"native": native, "python": python, "cpp": cpp, "fx": fx}


def test_every_instruction_is_in_a_case() -> None:
    covered = {type(i) for c in CASES.values() for i in c.program.body}
    assert covered == set(ins.INSTRUCTIONS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("boxed", [False, True], ids=["call", "boxed"])
def test_target_does_what_the_reference_does(
    name: str, target: str, boxed: bool, library: str
) -> None:
    case = CASES[name]
    program = case.program
    verify(program)
    compiled = TARGETS[target](case, program, library)
    if case.fails:
        with pytest.raises(case.error) as expected:
            interpret(program, case.args(), MEANINGS, case.constants, case.callables)
        with pytest.raises(case.error) as got:
            compiled(*case.args())
        assert case.fails in str(expected.value)
        assert case.fails in str(got.value)
        return
    for _ in range(2):  # the second call meets warm frames and arenas
        given, expected_args = seeded(case), seeded(case)
        want = interpret(program, expected_args, MEANINGS, case.constants, case.callables)
        if boxed:
            assert compiled.boxed._boxed_call
            handed = list(given)
            have = compiled.boxed(handed)
            assert handed == []
        else:
            have = compiled(*given)
        compare(have, want)
        compare(tuple(given), tuple(expected_args))
        if not any(
            isinstance(i, CallExtern) or (isinstance(i, Copy) and not i.bump) for i in program.body
        ):
            assert versions(given) == versions(expected_args)


def seeded(case: Case) -> list[object]:
    torch.manual_seed(0)
    return list(case.args())


def versions(args: Sequence[object]) -> list[int]:
    return [a._version for a in args if isinstance(a, torch.Tensor)]


def compare(have: tuple[object, ...], want: tuple[object, ...]) -> None:
    assert len(have) == len(want)
    for a, b in zip(have, want, strict=True):
        if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
            a, b = a.get_state(), b.get_state()
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b) and a == b
            continue
        assert isinstance(a, torch.Tensor)
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert same_bits(a, b)
    for k, x in enumerate(want):  # an output that is returned twice is one tensor
        assert [x is y for y in want] == [have[k] is y for y in have] or not isinstance(
            x, torch.Tensor
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.clone().view(size), b.clone().view(size))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_passes_keep_the_meaning(name: str, target: str, library: str) -> None:
    case = CASES[name]
    program = run_passes(case.program, check=True)
    compiled = TARGETS[target](case, read(text(program)), library)
    if case.fails:
        with pytest.raises(case.error) as got:
            compiled(*case.args())
        assert case.fails in str(got.value)
        return
    want = interpret(case.program, seeded(case), MEANINGS, case.constants, case.callables)
    compare(compiled(*seeded(case)), want)


@pytest.mark.parametrize("target", [native, python], ids=["native", "python"])
def test_nothing_to_scan(target: Callable[..., Any], library: str) -> None:
    """Eager refuses it, too."""
    body = (
        CallPrograms("scan", (0,), 0, 1, "scan", (Ref("v"),), ("o",)),
        looked("o", (0, 6)),
        give("o"),
    )
    case = Case(
        (tensor("v", f32, (0, 6), (6, 1)),),
        body,
        lambda: [torch.ones(0, 6)],
        programs=((X, (give("x"),)),),
    )
    with pytest.raises(RuntimeError, match="as many slices, at least one"):
        target(case, case.program, library)(*case.args())


def test_a_size_that_ten_kernels_use_is_computed_once() -> None:
    n, m = (s0 * symbol("s1", lo=1) + 7) // 8, s0 * 4 + 1
    launches = [
        step
        for k in range(10)
        for step in (alloc(f"y{k}", m), Launch("k_double", ("x", f"y{k}"), (n,), (f"y{k}",), m))
    ]
    p = run_passes(
        Case(
            (tensor(shape=(s0, symbol("s1", lo=1)), strides=(symbol("s1", lo=1), 1)),),
            (
                Symbol("s0", SizeOf("x", "size", 0)),
                Symbol("s1", SizeOf("x", "size", 1)),
                *launches,
                Return(tuple(Ref(f"y{k}") for k in range(10))),
            ),
            list,
        ).program,
        check=True,
    )
    python_text, cpp_text = make_python(p, {}), make_cpp(p)
    body = python_text[python_text.index("def call") : python_text.index("return call")]
    assert (body.count("// 8"), body.count("4*s0")) == (1, 1)
    assert (cpp_text.count("div("), cpp_text.count("Int(4)")) == (1, 1)
    made = [
        n.target
        for n in make_fx(p, Artifacts({"cpu": "k.so"})).graph.nodes
        if n.op == "call_function"
    ]
    assert (made.count(operator.floordiv), made.count(operator.mul)) == (1, 2)  # s0*s1 and 4*s0
    nodes = expressions(encode(p))
    assert len(nodes) == len(set(nodes)) and [op for op, _, _ in nodes].count(4) == 1  # a division


def expressions(plan: bytes) -> list[tuple[int, int, int]]:
    """The table of a plan: operator and operands of every expression (see native/core/plan.cpp)."""
    words = array("q", plan[32 : 32 + 8 * int.from_bytes(plan[24:32], "little")])
    at = 1 + 2 * words[0] + 4
    return [
        (words[k], words[k + 1], words[k + 2]) for k in range(at + 1, at + 1 + 3 * words[at], 3)
    ]
