"""Reductions of rows and columns, short and too long for a block, against the slow reference.

`python -m tests.gpu_rows` runs them on a GPU, built and launched as those of a program are; with
TRITON_INTERPRET=1 they run in Triton's interpreter instead. Prints what differs and exits with 1 if
anything does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from plait.ir.dtypes import DType, bf16, f32, f64, i64
from plait.ir.expr import Expr, Size, evaluate, numel, symbol
from plait.ir.loops import Buffer, Load, Node, cast, const, loop_vars, node, walk
from plait.kernel.null.run import run_kernel
from plait.log import watched
from plait.schedule.plan import Kernel, Reduce, Stmt, Store, part_of
from tests.gpu_kernels import OnDevice
from tests.kernel_tools import strided

ROWS = 3
PARTS = 4


def _acc(name: str, d: DType) -> Node:
    return node("acc", (), name, d)


def layer_norm(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """(x - mean) / sqrt(m2 / n + 1e-5)."""
    n = node("acc", (), "w.count", d)
    var = node("add", (node("truediv", (_acc("w.m2", d), n)), const(1e-5, d)))
    value = node("truediv", (node("sub", (x, _acc("w.mean", d))), node("sqrt", (var,))))
    return (Reduce("w", "welford", x),), value


def spread(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """The sum of squared distances from twice the sum of x, which is not its mean."""
    off = node("sub", (x, node("mul", (_acc("s", d), const(2.0, d)))))
    return (Reduce("s", "sum", x), Reduce("q", "sum", node("mul", (off, off)))), _acc("q", d)


def fourth_power(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """x less the sum of ((x - a)^2 - b)^2: a comes of a sum of x, b of one of (x - a)^2."""
    a, b = (node("mul", (_acc(n, d), const(0.01, d))) for n in "sq")
    square = node("mul", (node("sub", (x, a)),) * 2)
    off = node("sub", (square, b))
    values = {"s": x, "q": square, "p": node("mul", (off, off))}
    sums = tuple(Reduce(name, "sum", value) for name, value in values.items())
    return sums, node("sub", (x, _acc("p", d)))


def softmax(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """exp(x - max x) / sum."""
    e = node("exp", (node("sub", (x, _acc("peak", d))),))
    return (Reduce("peak", "max", x), Reduce("sum", "sum", e)), node("truediv", (e, _acc("sum", d)))


def exp_sum(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """The sum of exp(x - max x)."""
    return softmax(x, d)[0], _acc("sum", d)


def choice(x: Node, d: DType, at: int = 5) -> tuple[tuple[Stmt, ...], Node]:
    """(2 at one place, else 0) less exp(x) times the sum of that: the gradient of a
    cross-entropy."""
    load = next(n for n in walk((x,)) if n.op == "load")
    assert isinstance(load.attr, Load)
    here = node("eq", (node("index", (), load.attr.index[1], i64), const(at, i64)))
    one = node("where", (here, const(2.0, d), const(0.0, d)))
    return (Reduce("s", "sum", one),), node(
        "sub", (one, node("mul", (node("exp", (x,)), _acc("s", d))))
    )


def gate(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """x * (1 + tanh x), and its sum."""
    value = node("mul", (x, node("add", (const(1.0, d), node("tanh", (x,))))))
    return (Reduce("s", "sum", value),), value


def near(x: Node, d: DType) -> tuple[tuple[Stmt, ...], Node]:
    """What shows in 16 bits only: (1 + erf x) tanh x / (1 + exp -x) + exp(-x^2) / (x^2 + 2),
    rounded on the way, and less a sum."""
    square = node("mul", (x, x))
    one = node("mul", (node("add", (node("erf", (x,)), const(1.0, d))), node("tanh", (x,))))
    one = node("truediv", (one, node("add", (const(1.0, d), node("exp", (node("neg", (x,)),))))))
    two = node(
        "truediv", (node("exp", (node("neg", (square,)),)), node("add", (square, const(2.0, d))))
    )
    value = node("add", (cast(cast(one, bf16), d), two))
    return (Reduce("s", "sum", two),), node(
        "sub", (value, node("mul", (_acc("s", d), const(1e-6, d))))
    )


CASES = {
    "gate": (gate, f32, f32),
    "near_bf16": (near, bf16, f32),
    "choice": (choice, f32, f32),
    "choice_bf16": (choice, bf16, f32),
    "choice_outside": (lambda x, d: choice(x, d, -1), bf16, f32),
    "layer_norm": (layer_norm, f32, f32),
    "layer_norm_f64": (layer_norm, f64, f64),
    "layer_norm_bf16": (layer_norm, bf16, f32),
    "spread": (spread, f32, f32),
    "fourth_power": (fourth_power, f32, f32),
    "softmax": (softmax, f32, f32),
    "softmax_bf16": (softmax, bf16, f32),
    "exp_sum": (exp_sum, f32, f32),
}


def kernel_of(name: str, length: Size, pitch: int = 0) -> Kernel:
    """One of the cases over rows of a length. pitch: from a row to the next, if not that."""
    make, kept, d = CASES[name]
    (i,), (r,) = loop_vars("i", (ROWS,)), loop_vars("r", (length,))
    x = cast(node("load", (), Load("x", (i, r)), kept), d)
    stmts, value = make(x, d)
    args = tuple(Buffer(n, kept, (ROWS, length), (pitch or length, 1)) for n in ("x", "out"))
    return Kernel(
        name,
        (i,),
        (r,),
        (*stmts, Store("out", (i, r), cast(value, kept), True)),
        args,
        ("out",),
        (),
    )


def columns(
    length: int, width: int, kept: DType, runner: Callable[[list[Kernel]], Callable[..., int]]
) -> str:
    """Sums of columns, by chunks of rows, of x and of x less a mean a row; what is wrong, or ""."""
    (c, i), (r,) = loop_vars("i", (ROWS, width)), loop_vars("r", (length,))
    x = cast(node("load", (), Load("x", (c, r, i)), kept), f32)
    off = node("sub", (x, node("load", (), Load("mean", (c, r)), f32)))
    stmts: list[Stmt] = [Reduce("s", "sum", x), Reduce("q", "sum", node("mul", (off, off)))]
    stmts += [Store(out, (c, i), _acc(out, f32), False) for out in ("s", "q")]
    shapes = {
        "x": (ROWS, length, width),
        "mean": (ROWS, length),
        "s": (ROWS, width),
        "q": (ROWS, width),
    }
    args = tuple(strided(n, kept if n == "x" else f32, shape) for n, shape in shapes.items())
    kernel = Kernel("columns", (c, i), (r,), tuple(stmts), args, ("s", "q"), ())
    random = np.random.default_rng(1)
    data = {
        n: random.standard_normal(int(np.prod(shape))).astype(np.float32)
        for n, shape in shapes.items()
    }
    if kept == bf16:
        data["x"] = (data["x"].view(np.uint32) >> 16).astype(np.uint16)
    mine, want = ({n: a.copy() for n, a in data.items()} for _ in range(2))
    runner([kernel])(kernel, mine)
    run_kernel(kernel, want)
    same = all(np.allclose(mine[n], want[n], rtol=1e-5, atol=1e-3) for n in ("s", "q"))
    return "" if same else f"columns of {length} x {width} {kept}: {mine['s']} is not {want['s']}"


def walked(
    length: int,
    rows: tuple[Size, Size],
    kept: DType,
    runner: Callable[[list[Kernel]], Callable[..., int]],
    **sizes: int,
) -> str:
    """Sums of columns by PARTS programs that walk rows, each beside the row's own: what is wrong,
    or ""."""
    (i, c), (r,) = loop_vars("i", rows), loop_vars("r", (length,))
    x = cast(node("load", (), Load("x", (i, c, r)), kept), f32)
    y = node("mul", (x, node("load", (), Load("weight", (r,)), f32)))
    off = node(
        "sub", (y, node("mul", (_acc("s", f32), node("load", (), Load("scale", (c,)), f32))))
    )
    stmts: list[Stmt] = [Reduce("s", "sum", y), Reduce("q", "sum", node("mul", (off, x)))]
    stmts += [Store("out", (i, c, r), cast(node("mul", (off, _acc("q", f32))), kept), True)]
    stmts += [
        Store("q", (i, c), _acc("q", f32), False),
        Store("a", (part_of(PARTS), r), off, True, "sum"),
    ]
    stmts += [Store("b", (part_of(PARTS), r), x, True, "sum")]
    whole, sums = (*rows, length), (PARTS, length)
    shapes = {
        "x": whole,
        "weight": (length,),
        "scale": rows[1:],
        "out": whole,
        "q": rows,
        "a": sums,
        "b": sums,
    }
    args = tuple(strided(n, kept if shape == whole else f32, shape) for n, shape in shapes.items())
    symbols = tuple(n for n in rows if isinstance(n, Expr))
    kernel = Kernel("walked", (i, c), (r,), tuple(stmts), args, ("out", "q", "a", "b"), symbols)
    random = np.random.default_rng(3)
    data = {
        n: random.standard_normal(evaluate(numel(shape), sizes)).astype(np.float32)
        for n, shape in shapes.items()
    }
    data["scale"] /= length
    if kept == bf16:
        data |= {n: (data[n].view(np.uint32) >> 16).astype(np.uint16) for n in ("x", "out")}
    mine, want = ({n: a.copy() for n, a in data.items()} for _ in range(2))
    runner([kernel])(kernel, mine, sizes)
    run_kernel(kernel, want, sizes)
    rtol = 1e-2 if kept == bf16 else 1e-4
    wrong = [
        n
        for n in ("out", "q", "a", "b")
        if not np.allclose(_wide(mine[n]), _wide(want[n]), rtol, 1e-2)
    ]
    return f"{wrong} of {rows} rows of {length} {kept} walked" if wrong else ""


def check(
    name: str,
    length: int,
    runner: Callable[[list[Kernel]], Callable[..., int]],
    pitch: int = 0,
    told: bool = False,
) -> str:
    """What is wrong with one case, or "". told: a call tells the length."""
    n, sizes = symbol("n", lo=0), {"n": length} if told else {}
    kernel = kernel_of(name, n if told else length, pitch)
    kernel, pitch = replace(kernel, sizes=(n,) if told else ()), pitch or length
    kept = CASES[name][1]
    data = np.random.default_rng(0).standard_normal(ROWS * pitch)
    if "choice" not in name:
        data[pitch : 2 * pitch] += 1000  # a mean far from 0
    if kept == bf16:
        x = (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        empty = np.zeros(ROWS * pitch, np.uint16)
    else:
        x = data.astype(np.float64 if kept == f64 else np.float32)
        empty = np.zeros_like(x)
    mine, want = {"x": x, "out": empty.copy()}, {"x": x, "out": empty.copy()}
    runner([kernel])(kernel, mine, sizes)
    run_kernel(kernel, want, sizes)
    got, reference = (_wide(a["out"]).reshape(ROWS, pitch) for a in (mine, want))
    rtol = {"f64": 1e-12, "f32": 1e-4, "bf16": 8e-3}[kept.name]
    scale = np.abs(reference).max(1, keepdims=True) + 1e-30
    off = (np.abs(got - reference) / scale).max()
    return "" if off <= rtol else f"{name} of {length}: off by {off}"


def extremes(name: str, length: int, runner: Callable[[list[Kernel]], Callable[..., int]]) -> str:
    """What is wrong with rows of -inf, of one huge number and of a NaN, or ""."""
    kernel = kernel_of(name, length)
    x = np.random.default_rng(2).standard_normal((ROWS, length)).astype(np.float32)
    x[0], x[1], x[2, length // 2] = -np.inf, 1e20, np.nan
    mine, want = ({"x": x.ravel(), "out": np.zeros(x.size, np.float32)} for _ in range(2))
    with np.errstate(all="ignore"):
        runner([kernel])(kernel, mine)
        run_kernel(kernel, want)
    # A row without a spread is divided by the rounding of its mean, which may be as large as what
    # is left of it.
    atol = 1.01 if name == "layer_norm" else 1e-6
    same = np.allclose(mine["out"], want["out"], rtol=1e-4, atol=atol, equal_nan=True)
    got = mine["out"].reshape(ROWS, length)[:, 0]
    return (
        ""
        if same
        else f"{name} of {length}: {got} of extreme rows is not "
        f"{want['out'].reshape(ROWS, length)[:, 0]}"
    )


def shares(length: int, runner: Callable[[list[Kernel]], Callable[..., int]]) -> str:
    """A softmax that is kept in 16 bits and used, another quotient by its sum beside it; what is
    wrong, or ""."""
    (i,), (r,) = loop_vars("i", (ROWS,)), loop_vars("r", (length,))
    x = cast(node("load", (), Load("x", (i, r)), bf16), f32)
    stmts, share = softmax(x, f32)
    used = node("mul", (cast(cast(share, bf16), f32), x))
    kept = {"share": share, "used": used, "other": node("truediv", (x, share.args[1]))}
    stmts = (*stmts, *(Store(n, (i, r), cast(value, bf16), True) for n, value in kept.items()))
    args = tuple(strided(n, bf16, (ROWS, length)) for n in ("x", *kept))
    kernel = Kernel("shares", (i,), (r,), stmts, args, tuple(kept), ())
    data = np.random.default_rng(4).standard_normal(ROWS * length).astype(np.float32)
    x16 = (data.view(np.uint32) >> 16).astype(np.uint16)
    mine, want = ({"x": x16} | {n: np.zeros_like(x16) for n in kept} for _ in range(2))
    runner([kernel])(kernel, mine)
    run_kernel(kernel, want)
    wrong = [n for n in kept if not np.allclose(_wide(mine[n]), _wide(want[n]), rtol=8e-3, atol=0)]
    return f"{wrong} of a softmax of {length}" if wrong else ""


def positions(
    shape: tuple[int, int, int], d: DType, runner: Callable[[list[Kernel]], Callable[..., int]]
) -> str:
    """Positions of extremes over the middle axis: of ties, of NaNs, of nothing but infinities; what
    is wrong, or ""."""
    (c, i), (r,) = loop_vars("i", (shape[0], shape[2])), loop_vars("r", (shape[1],))
    x = cast(node("load", (), Load("x", (c, r, i)), d), f32 if d == bf16 else d)
    outs = {"least": "argmin", "most": "argmax"}
    stmts: list[Stmt] = [Reduce(n, kind, x) for n, kind in outs.items()]
    stmts += [Store(n, (c, i), node("acc", (), n, i64), False) for n in outs]
    result = (shape[0], shape[2])
    args = (strided("x", d, shape), *(strided(n, i64, result) for n in outs))
    kernel = Kernel("positions", (c, i), (r,), tuple(stmts), args, tuple(outs), ())
    data = np.random.default_rng(5).integers(-9, 9, shape).astype(np.int64 if d == i64 else "f4")
    if d != i64:
        data[0, :, :] = np.inf
        data[1, :, 0] = -np.inf
        data[1, shape[1] // 2 :: 7, -1] = -np.nan
        data[1, ::3, 1 % shape[2]] = -0.0
    if d == bf16:
        data = (data.view(np.uint32) >> 16).astype(np.uint16)
    mine, want = (
        {"x": data.ravel(), **{n: np.zeros(shape[0] * shape[2], np.int64) for n in outs}}
        for _ in range(2)
    )
    runner([kernel])(kernel, mine)
    run_kernel(kernel, want)
    wrong = [n for n in outs if not np.array_equal(mine[n], want[n])]
    return f"{wrong} of {shape} {d}" if wrong else ""


def column_softmax(
    shape: tuple[int, int, int], runner: Callable[[list[Kernel]], Callable[..., int]]
) -> str:
    """exp(x - max x) / sum over the middle axis, of nothing but -inf and of a NaN too; what is
    wrong, or ""."""
    (c, i), (r,) = loop_vars("i", (shape[0], shape[2])), loop_vars("r", (shape[1],))
    stmts, value = softmax(node("load", (), Load("x", (c, r, i)), f32), f32)
    args = tuple(strided(n, f32, shape) for n in ("x", "out"))
    kernel = Kernel(
        "columns", (c, i), (r,), (*stmts, Store("out", (c, r, i), value, True)), args, ("out",), ()
    )
    x = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    x[0, :, 0], x[1, shape[1] // 2, 1], x[1, 1:, 2] = -np.inf, np.nan, -np.inf
    mine, want = ({"x": x.ravel(), "out": np.zeros(x.size, np.float32)} for _ in range(2))
    with np.errstate(all="ignore"):
        runner([kernel])(kernel, mine)
        run_kernel(kernel, want)
    same = np.allclose(mine["out"], want["out"], rtol=1e-4, atol=1e-6, equal_nan=True)
    return "" if same else f"a softmax over the middle of {shape}"


def _wide(a: np.ndarray) -> np.ndarray:
    return (a.astype(np.uint32) << 16).view(np.float32) if a.dtype == np.uint16 else a


def main() -> None:
    """Command line: see the module's docstring."""
    with tempfile.TemporaryDirectory() as folder:
        if os.environ.get("TRITON_INTERPRET") != "1":
            runner: Callable[[list[Kernel]], Callable[..., int]] = OnDevice
        else:
            from tests.triton_tools import Runner

            def runner(kernels: list[Kernel]) -> Callable[..., int]:
                return Runner(kernels, Path(folder))

        jobs: list[Callable[[], str]] = [
            partial(check, name, length, runner)
            for name in CASES
            for length in (700, 40000, 65536 + 1)
        ]
        jobs += [partial(check, name, 40003, runner, 40008) for name in CASES]
        jobs += [
            partial(check, name, n, runner, told=True)
            for name in ("layer_norm", "softmax", "exp_sum")
            for n in (1, 1087, 5001)
        ]
        jobs += [partial(shares, n, runner) for n in (700, 40000)]
        jobs += [
            partial(extremes, name, n, runner)
            for name in ("layer_norm", "softmax", "exp_sum")
            for n in (700, 40000)
        ]
        for d in (f32, bf16):  # in equal parts and unequal ones
            jobs += [
                partial(walked, n, (k, 3), d, runner)
                for n, k in ((70, 20), (300, 7), (2048, 4), (2048, 5))
            ]
            jobs += [
                partial(walked, n, (symbol("s", lo=1), 3), d, runner, s=s)
                for n, s in ((300, 9), (2048, 5), (70, 1))
            ]
        jobs += [
            partial(columns, *shape, d, runner)
            for d in (f32, bf16)
            for shape in ((70, 64), (300, 100), (2000, 192))
        ]
        jobs += [
            partial(positions, shape, d, runner)
            for d in (f32, i64, bf16)
            for shape in ((2, 300, 17), (2, 300, 1), (2, 20003, 1))
        ]
        jobs += [partial(column_softmax, shape, runner) for shape in ((2, 2100, 20), (2, 2048, 64))]
        some = jobs[:: int((sys.argv[1:] or "1")[0])]
        found = [job() for job in watched("reductions", some)]
    wrong = [text for text in found if text]
    print("\n".join([*wrong, f"{len(found)} reductions, {len(wrong)} wrong"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
