"""Nanoseconds a call of the native executor on hand-written programs, beside eager and the bare
costs of Python.

Usage: python benchmarks/native_call.py. Each figure is the best of many short rounds; kernels do
next to nothing, so what is left is the executor: argument checks, output allocation, dispatch.
benchmarks/cpp_target.py has the C++ target.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from plait._native import Training
from plait.ir.dtypes import f32
from plait.ir.expr import symbol
from plait.runtime.load import Bound, Program
from plait.wrapper.instructions import (
    Arena,
    CallExtern,
    Place,
    Ref,
    SizeOf,
    Symbol,
    View,
    WrapperProgram,
)
from tests.native_tools import alloc, build, extern, launch, program, ret, tensor

ROUNDS, CALLS = 400, 500


def measure(call: Callable[[], object]) -> float:
    """Best nanoseconds a call; the loop itself is subtracted."""

    def once(body: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            body()
        return (time.perf_counter_ns() - start) / CALLS

    empty = min(once(lambda: None) for _ in range(ROUNDS))
    return min(once(call) for _ in range(ROUNDS)) - empty


def spec(arg: int, *shape: int) -> tuple[object, ...]:
    """How Bound is told of a tensor argument."""
    return ("tensor", arg, "f32", shape, "contiguous", "cpu")


Build = Callable[[WrapperProgram], Program]


def add_sum(build: Build = build) -> Program:
    """(x + y).sum() on 8x8 as one launch."""
    body = (alloc("o"), launch("k_sum", "x", "o", n=64), ret("o"))
    return build(program((tensor("x", 8, 8), tensor("y", 8, 8)), *body))


def chain(n: int, build: Build = build) -> Program:
    """n kernels through an arena."""
    body = [Arena("m", 4096)]
    name = "x"
    for k in range(n):
        body += [Place(f"a{k}", "m", 64 * k, f32, (4,), (1,)), launch("k_inc", name, f"a{k}", n=4)]
        name = f"a{k}"
    return build(
        program((tensor("x", 4),), *body, alloc("o", 4), launch("k_inc", name, "o", n=4), ret("o"))
    )


def tiny_mlp() -> Program:
    """16-32-4 with four parameters, two matmuls written as kernels."""
    inputs = (
        tensor("w1", 32, 16),
        tensor("b1", 32),
        tensor("w2", 4, 32),
        tensor("b2", 4),
        tensor("x", 1, 16),
    )
    body = (
        Arena("m", 256),
        Place("h", "m", 0, f32, (1, 32), (32, 1)),
        launch("k_add", "b1", "w1", "h", n=32),
        alloc("o", 1, 4),
        launch("k_add", "h", "w2", "o", n=4),
        ret("o"),
    )
    return build(program(inputs, *body))


def linear(op: str, build: Build = build) -> Program:
    """x @ w.t() (+ b) into an output."""
    inputs = (tensor("x", 4, 16), tensor("w", 8, 16), tensor("b", 8))
    view = View("t", "w", f32, (16, 8), (1, 16), 0)
    if op == "addmm":
        call = CallExtern(
            "aten::addmm.out",
            (Ref("b"), Ref("x"), Ref("t")),
            (("out", Ref("o")),),
            (),
            ("o",),
            False,
        )
    elif op == "mm":
        call = CallExtern(
            "aten::mm.out", (Ref("x"), Ref("t")), (("out", Ref("o")),), (), ("o",), False
        )
    else:
        return build(
            program(inputs, view, extern("aten::mm", Ref("x"), Ref("t"), outs=("o",)), ret("o"))
        )
    return build(program(inputs, view, alloc("o", 4, 8), call, ret("o")))


def dynamic(build: Build = build) -> Program:
    """x + 1 with a symbolic size."""
    s0 = symbol("s0")
    body = (
        Symbol("s0", SizeOf("x", "size", 0)),
        alloc("o", s0, 8),
        launch("k_inc", "x", "o", n=8 * s0),
        ret("o"),
    )
    return build(program((tensor("x", s0, 8),), *body))


def trained() -> Training:
    """x + 1 with a backward program, and x saved for it."""
    forward = build(
        program((tensor("x", 4),), alloc("o", 4), launch("k_inc", "x", "o", n=4), ret("o", "x"))
    )
    inputs = (tensor("x", 4), tensor("t", 4))
    backward = build(program(inputs, alloc("g", 4), launch("k_inc", "t", "g", n=4), ret("g")))
    layout = ((4,), (1,))
    return Training(
        forward,
        forward,
        lambda _: backward,
        lambda given: backward(*given),
        (True,),
        1,
        0,
        (layout,),
        ((0, (0,)),),
        False,
        (),
        (),
        False,
    )


def main() -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    prog = add_sum()
    single = Bound(prog, [spec(0, 8, 8), spec(1, 8, 8)], ["x", "y"], True)
    print(f"{'eager (x + y).sum()':44s} {measure(lambda: (x + y).sum()):8.0f}")
    print(f"{'eager torch.empty(())':44s} {measure(lambda: torch.empty(())):8.0f}")
    print(f"{'(x + y).sum() 8x8, Program':44s} {measure(lambda: prog(x, y)):8.0f}")
    print(f"{'(x + y).sum() 8x8, Bound':44s} {measure(lambda: single(x, y)):8.0f}")
    boxed = prog.boxed
    print(f"{'(x + y).sum() 8x8, boxed':44s} {measure(lambda: boxed([x, y])):8.0f}")
    row = torch.randn(1, 16)
    parameters = [torch.randn(32, 16), torch.randn(32), torch.randn(4, 32), torch.randn(4)]
    mlp = Bound(tiny_mlp(), [*(("bound", "p", p) for p in parameters), spec(0, 1, 16)], ["x"], True)
    print(f"{'tiny-mlp in two kernels, Bound':44s} {measure(lambda: mlp(row)):8.0f}")
    v = torch.randn(4)
    few, many = chain(1), chain(31)
    t_few, t_many = measure(lambda: few(v)), measure(lambda: many(v))
    print(f"{'chain of 2 kernels in an arena':44s} {t_few:8.0f}")
    print(f"{'each further kernel':44s} {(t_many - t_few) / 30:8.1f}")
    step, leaf, ones = trained(), torch.randn(4, requires_grad=True), torch.ones(4)

    def backward() -> None:
        torch.autograd.grad(step(leaf)[0], leaf, ones)

    def eager() -> None:
        torch.autograd.grad(leaf * leaf, leaf, ones)

    with torch.enable_grad():
        print(
            f"{'one kernel with a backward pass, forward':44s} {measure(lambda: step(leaf)):8.0f}"
        )
        print(f"{'the same, forward and backward':44s} {measure(backward):8.0f}")
        print(f"{'eager leaf * leaf, forward and backward':44s} {measure(eager):8.0f}")
    dyn = dynamic()
    print(f"{'dynamic x + 1':44s} {measure(lambda: dyn(x)):8.0f}")
    a, w, b = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    print(f"{'eager F.linear':44s} {measure(lambda: torch.nn.functional.linear(a, w, b)):8.0f}")
    for op in ("mm", "addmm", "boxed mm"):
        p = linear(op)
        print(f"{op + ' 4x16x8 of a transposed view':44s} {measure(lambda p=p: p(a, w, b)):8.0f}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
