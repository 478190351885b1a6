"""Every row of the op table as compiled C++, against the reference meaning: special values, every
dtype, every instruction set."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.ir import interp
from plait.ir.dtypes import DTYPES, LOOP_DTYPES, DType, b1, f32, i64
from plait.ir.loops import Buffer, apply, cast, const, loop_vars, node
from plait.ir.ops import OPS, SPECIAL
from plait.ir.record import Recorder
from plait.ir.reductions import REDUCTIONS
from plait.kernel.cpu.target import CppTarget, emit_library
from plait.kernel.null.run import run_kernel
from plait.kernel.null.target import NullTarget
from plait.runtime.philox import philox_words
from plait.runtime.toolchain import ISAS, Isa
from plait.schedule.plan import Kernel, Store
from tests.kernel_tools import Loaded, strided, usable_isas

INEXACT = {
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log10": 1, "log1p": 1, "sin": 1,
    "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1, "sinh": 1, "cosh": 1, "tanh": 1,
    "asinh": 1, "acosh": 1, "atanh": 1, "erf": 1, "erfc": 1.5,
    "lgamma": 1, "pow": 1, "atan2": 1, "hypot": 1, "rsqrt": 1.5,
}  # fmt: skip
N = 83  # not a multiple of any vector length


def test_every_target_covers_every_op() -> None:
    for target in (NullTarget(), CppTarget()):
        assert target.table.keys() == OPS.keys() | SPECIAL.keys(), target.name


def test_the_reference_covers_every_op() -> None:
    assert interp.EVALUATE.keys() == OPS.keys()


def dtypes_of(op: str) -> list[DType]:
    kinds = OPS[op].on
    names = [
        d
        for d in DTYPES.values()
        if d in LOOP_DTYPES and d.kind in kinds and d.name not in ("f16", "bf16")
    ]
    return [i64] if op == "philox" else names


def specials(d: DType) -> list[float]:
    if d == b1:
        return [0, 1]
    if d.is_int:
        low, high = REDUCTIONS["max"].identity(d), REDUCTIONS["min"].identity(d)
        return [
            0,
            1,
            2,
            3,
            7,
            low,
            high,
            low + 1,
            high - 1,
            *([-1, -2, -7] if d.kind == "i" else []),
        ]
    return [
        0.0,
        -0.0,
        1,
        -1,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        3,
        1e-3,
        88,
        -88,
        1e5,
        -1e5,
        np.inf,
        -np.inf,
        np.nan,
    ]


def inputs(op: str, d: DType) -> list[np.ndarray]:
    """Arguments of the op: special values against each other, then random ones."""
    arity, rng = OPS[op].arity, np.random.default_rng(7)
    pool = np.array(specials(d), interp.numpy_type(d))
    if d.is_float and op not in (
        "fmod",
        "pymod",
    ):  # SLEEF's fmod, which eager calls too, fails on subnormal divisors
        pool = np.append(pool, pool.dtype.type(1e-40 if d == f32 else 1e-310))
    rows = [
        np.array(x, dtype=pool.dtype)
        for x in zip(*itertools.islice(itertools.product(pool, repeat=arity), 400), strict=True)
    ]
    n = N - len(rows[0]) % N
    for k in range(arity):
        if d == b1:
            more = rng.integers(0, 2, n).astype(bool)
        elif d.is_int:
            more = (
                rng.integers(0, 1 << 62, n).astype(pool.dtype)
                if k == 0
                else rng.integers(0, 40, n).astype(pool.dtype)
            )
        else:
            more = (rng.uniform(-4, 4, n) * 10.0 ** rng.integers(-3, 2, n)).astype(pool.dtype)
        rows[k] = np.concatenate([rows[k], more])
    if op == "philox":
        rows[2] = rng.integers(0, 4, len(rows[2]))
    return rows


def op_kernel(op: str, d: DType, n: int) -> Kernel:
    ops = Recorder()
    (i,) = loop_vars("i", (n,))
    kinds = [b1 if op == "where" and k == 0 else d for k in range(OPS[op].arity)]
    args = [ops.load(f"a{k}", (i,), t) for k, t in enumerate(kinds)]
    x = apply(op, *args)
    buffers = [strided(f"a{k}", t, (n,)) for k, t in enumerate(kinds)] + [
        strided("out", x.dtype, (n,))
    ]
    return Kernel(
        f"{op}_{d.name}", (i,), (), (Store("out", (i,), x, True),), tuple(buffers), ("out",), ()
    )


def reference(op: str, rows: list[np.ndarray], wide: bool) -> np.ndarray:
    args = [r.astype(np.float64) if wide and r.dtype.kind == "f" else r for r in rows]
    with np.errstate(all="ignore"):
        return np.asarray(interp.EVALUATE[op](*args))


def check_exact(got: np.ndarray, want: np.ndarray, rows: list[np.ndarray]) -> None:
    equal = (got == want) | ((got != got) & (want != want))
    assert equal.all(), [(r[~equal][:3]) for r in rows] + [got[~equal][:3], want[~equal][:3]]


def check_ulps(op: str, got: np.ndarray, rows: list[np.ndarray], extra: float) -> None:
    """Within the error class of the op: got may be off the double result by INEXACT[op] ulp (and a
    little)."""
    truth = reference(op, rows, wide=True)
    with np.errstate(all="ignore"):
        narrow = truth.astype(got.dtype)
        ulp = np.spacing(np.abs(narrow)).astype(np.float64)
        off = np.abs(got.astype(np.float64) - truth) / ulp
    # SLEEF's lgamma is 1 ulp of max(|result|, 1) near its zeros, as eager's is.
    allowed = (
        extra
        + INEXACT[op]
        + (0.1 if got.dtype == np.float32 else 2.5)
        + (2e8 if op == "lgamma" else 0)
    )
    special = ~np.isfinite(narrow)
    wrong = np.where(
        special, ~((got == narrow) | (np.isnan(got) & np.isnan(narrow))), off > allowed
    )
    if op == "pow":
        wrong &= np.isfinite(rows[0]) & np.isfinite(rows[1])
    assert not wrong.any(), [r[wrong][:4] for r in rows] + [got[wrong][:4], truth[wrong][:4]]


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
@pytest.mark.parametrize("group", range(4))
def test_ops(isa: Isa, group: int, tmp_path: Path) -> None:
    cases = [(op, d) for op in OPS for d in dtypes_of(op)][group::4]
    rows = {case: inputs(*case) for case in cases}
    for op, d in cases:
        if op == "where":
            rows[op, d][0] = np.arange(len(rows[op, d][0])) % 3 == 0
    kernels = [op_kernel(op, d, len(rows[op, d][0])) for op, d in cases]
    loaded = Loaded(kernels, isa, tmp_path, opt_level=1)
    wrong = []
    for (op, d), kernel in zip(cases, kernels, strict=True):
        arrays = {f"a{k}": r.copy() for k, r in enumerate(rows[op, d])}
        arrays["out"] = np.zeros(len(rows[op, d][0]), interp.memory_type(kernel.args[-1].dtype))
        assert loaded(kernel, arrays) == 0
        try:
            if op in INEXACT:
                check_ulps(
                    op, arrays["out"], rows[op, d], 0.0 if isa.sleef else 1.0
                )  # libm is a little worse
            elif op == "fma" and d.name == "f64":
                np.testing.assert_allclose(
                    arrays["out"], reference(op, rows[op, d], False), rtol=1e-12
                )
            else:
                check_exact(arrays["out"], reference(op, rows[op, d], False), rows[op, d])
        except AssertionError as error:
            wrong.append(f"{op} on {d} ({isa.name}): {str(error)[:600]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_division_near_multiples(isa: Isa, op: str, tmp_path: Path) -> None:
    """Quotients of 64-bit integers of every size, next to whole numbers, where f64 would round up
    to them."""
    kernel, rng = op_kernel(op, i64, 4096), np.random.default_rng(0)
    loaded = Loaded([kernel], isa, tmp_path)
    for bits in (3, 20, 31, 50, 51, 52, 53, 62):
        b = rng.integers(1, 1 << rng.integers(1, bits, 4096), dtype=np.int64) * rng.choice(
            [-1, 1], 4096
        )
        a = rng.integers(-(1 << bits), 1 << bits, 4096, dtype=np.int64) // b * b + rng.integers(
            -1, 2, 4096
        )
        out = np.zeros_like(a)
        assert loaded(kernel, {"a0": a, "a1": b, "out": out}) == 0
        np.testing.assert_array_equal(out, a // b if op == "floordiv" else a % b, err_msg=str(bits))


def test_division_of_vectors_is_not_lane_by_lane() -> None:
    assert (
        "cvt_i64_f64(a) / cvt_i64_f64(b)"
        in emit_library([op_kernel("mod", i64, 64)], ISAS["avx512"]).text
    )


def cast_values(src: DType, dst: DType) -> np.ndarray:
    """Elements of src that have a defined value in dst."""
    pool = np.array([x for x in specials(src) if not (src.is_float and abs(x) > 200)], np.float64)
    if src.is_float:
        pool = np.concatenate(
            [pool, np.array([65504, 65520, 1e-7, 6e-8, 3e-5, 0.1, 1 / 3, 2049, 4097])]
        )
        if dst.is_float or dst == b1:
            pool = np.concatenate([pool, [np.nan, np.inf, -np.inf, 1e30]])
        else:
            pool = pool[np.isfinite(pool) & (np.abs(pool) < 100)]
            pool = pool[pool >= 0] if dst.kind == "u" else pool
        return interp.to_memory(np.resize(pool, N), src)
    return np.resize(np.array(specials(src), interp.numpy_type(src)), N)


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
def test_casts(isa: Isa, tmp_path: Path) -> None:
    kinds = sorted(LOOP_DTYPES, key=lambda d: d.name)
    (i,) = loop_vars("i", (N,))
    kernels, values = [], []
    for src, dst in itertools.product(kinds, kinds):
        x = cast(Recorder().load("a", (i,), src), dst)
        buffers = (strided("a", src, (N,)), strided("out", dst, (N,)))
        kernels.append(
            Kernel(
                f"{src}_to_{dst}", (i,), (), (Store("out", (i,), x, True),), buffers, ("out",), ()
            )
        )
        values.append(cast_values(src, dst))
    loaded = Loaded(kernels, isa, tmp_path, opt_level=1)
    for kernel, x in zip(kernels, values, strict=True):
        out = np.zeros(N, interp.memory_type(kernel.args[1].dtype))
        want = {"a": x, "out": out.copy()}
        loaded(kernel, {"a": x, "out": out})
        run_kernel(kernel, want)
        d = kernel.args[1].dtype
        got_values, want_values = interp.from_memory(out, d), interp.from_memory(want["out"], d)
        equal = (got_values == want_values) | (
            (got_values != got_values) & (want_values != want_values)
        )
        assert equal.all(), (
            kernel.name,
            interp.from_memory(x, kernel.args[0].dtype)[~equal],
            got_values[~equal],
            want_values[~equal],
        )


@pytest.mark.parametrize("isa", usable_isas(), ids=lambda i: i.name)
def test_bitcasts_and_half_arithmetic(isa: Isa, tmp_path: Path) -> None:
    (i,) = loop_vars("i", (N,))
    ops = Recorder()
    rng = np.random.default_rng(3)

    def one(name: str, body: object, src: DType, dst: DType) -> Kernel:
        buffers = (strided("a", src, (N,)), strided("out", dst, (N,)))
        return Kernel(name, (i,), (), (Store("out", (i,), body, True),), buffers, ("out",), ())  # type: ignore[arg-type]

    pairs = [
        ("f32", "i32"),
        ("i32", "f32"),
        ("f64", "i64"),
        ("i64", "f64"),
        ("bf16", "i16"),
        ("f16", "u16"),
        ("u8", "i8"),
    ]
    kernels = [
        one(
            f"{s}_as_{d}",
            ops.bitcast(ops.load("a", (i,), DTYPES[s]), DTYPES[d]),
            DTYPES[s],
            DTYPES[d],
        )
        for s, d in pairs
    ]
    for name in ("bf16", "f16"):
        d = DTYPES[name]
        x = ops.load("a", (i,), d)
        kernels.append(one(f"add_{name}", node("add", (x, const(1.5, d))), d, d))
        kernels.append(one(f"gt_{name}", node("gt", (x, const(0.1, d))), d, b1))
        kernels.append(
            one(
                f"where_{name}",
                node("where", (node("gt", (x, const(0.1, d))), x, const(-1.0, d))),
                d,
                d,
            )
        )
    loaded = Loaded(kernels, isa, tmp_path, opt_level=1)
    for kernel in kernels:
        src, dst = kernel.args[0].dtype, kernel.args[1].dtype
        x = (
            interp.to_memory(rng.normal(size=N), src)
            if src.is_float
            else rng.integers(0, 200, N).astype(interp.memory_type(src))
        )
        out, want = np.zeros(N, interp.memory_type(dst)), np.zeros(N, interp.memory_type(dst))
        loaded(kernel, {"a": x, "out": out})
        run_kernel(kernel, {"a": x, "out": want})
        np.testing.assert_array_equal(out, want, err_msg=kernel.name)


def test_philox_is_the_documented_one() -> None:
    index = torch.arange(50, dtype=torch.int64) + (1 << 33)
    words = philox_words(torch.tensor(0x1234567812345678), index, 5)
    for k in range(4):
        got = interp.EVALUATE["philox"](
            np.int64(0x1234567812345678), index.numpy(), np.int64(5 << 2 | k)
        )
        np.testing.assert_array_equal(got, words[k].numpy())


def test_a_buffer_is_not_needed_for_constants(tmp_path: Path) -> None:
    (i,) = loop_vars("i", (5,))
    out = Buffer("out", f32, (5,), (1,))
    kernel = Kernel(
        "fill", (i,), (), (Store("out", (i,), const(2.5, f32), True),), (out,), ("out",), ()
    )
    for isa in usable_isas():
        array = np.zeros(5, np.float32)
        Loaded([kernel], isa, tmp_path)(kernel, {"out": array})
        assert (array == 2.5).all()


@pytest.mark.parametrize("by", [6.0, -1.1, 49.0, 1.9999999, 2.0, 1e10])
@pytest.mark.parametrize("isa", usable_isas(), ids=lambda isa: isa.name)
def test_division_by_constants(by: float, isa: Isa) -> None:
    """Bit for bit what division gives, but for the last bit of quotients that are almost 0."""
    import plait

    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([float("inf"), float("nan"), 0.0, 3.4e38, 1e-45, 2e-38, 49 * 3.0])
    x = torch.cat([bits.to(torch.int32).view(torch.float32), odd, -odd])
    got, wanted = plait.compile(lambda x: x / by, (x,), options={"isa": isa.name})(x), x / by
    few = (wanted.abs() < 2.0**-100) & (x != 0)
    near = (got.view(torch.int32) - wanted.view(torch.int32)).abs() <= few.int()
    assert (near | (got.isnan() & wanted.isnan())).all()
