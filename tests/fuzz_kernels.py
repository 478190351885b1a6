"""Random kernels against the slow reference.

`python -m tests.fuzz_kernels SEED [ISA]` prints and runs the kernel of one seed, and if it is wrong
prints a program that runs it again; `python -m tests.fuzz_kernels --many FIRST COUNT` looks for
failures. Every value knows whether the reference must be met bit by bit (only correctly rounded
operations below it) or up to rounding; operations with jumps (comparisons, rounding, positions) are
only applied to the former.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.ir import interp
from plait.ir.dtypes import DTYPES, DType, b1, f32, f64, i64
from plait.ir.expr import Expr, Size, symbol
from plait.ir.loops import Buffer, Load, Node, apply, cast, const, loop_vars, node
from plait.ir.record import Recorder
from plait.kernel.null.run import run_kernel
from plait.log import watched
from plait.runtime.toolchain import ISAS, Isa
from plait.schedule.plan import Kernel, Reduce, Stmt, Store
from plait.schedule.text import kernel_text
from tests.kernel_tools import Loaded

EXTENTS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100, 129]
STORED = [
    "f32",
    "f32",
    "f32",
    "f64",
    "f16",
    "bf16",
    "i64",
    "i32",
    "i16",
    "i8",
    "u8",
    "b1",
    "u16",
    "u32",
    "u64",
]
SMOOTH = [
    "exp",
    "tanh",
    "sin",
    "cos",
    "erf",
    "expm1",
    "atan",
    "asinh",
    "log1p",
    "erfc",
    "sinh",
    "cosh",
    "exp2",
]
EXACT = [
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "neg",
    "abs",
    "sqrt",
    "truediv",
    "where",
    "floor",
    "round",
    "sign",
    "trunc",
    "ceil",
    "copysign",
]
WHOLE = [
    "add",
    "sub",
    "mul",
    "min",
    "max",
    "where",
    "and",
    "or",
    "xor",
    "not",
    "floordiv",
    "mod",
    "truncdiv",
    "rem",
    "shl",
    "shr",
]


@dataclass
class Value:
    """A node. exact: the reference has the same bits. full: it depends on inner axes."""

    node: Node
    exact: bool
    full: bool


class Maker:
    """Builds the kernel of one seed with its input arrays."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.np = np.random.default_rng(seed)
        self.ops = Recorder()
        self.buffers: list[Buffer] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.dynamic: dict[str, int] = {}
        self.exact_of: dict[str, bool] = {}

    def kernel(self) -> Kernel:
        """The kernel. Its arrays are in self.arrays, sizes in self.dynamic."""
        r = self.r
        n_vars, n_inner = r.choice([0, 1, 1, 2, 2, 3]), r.choice([0, 0, 1, 1, 1, 2])
        room = 20000
        sizes: list[Size] = []
        self.numbers: dict[Size, int] = {}
        for _ in range(n_vars + n_inner):
            n = r.choice([e for e in EXTENTS if e <= room])
            n = 0 if r.random() < 0.01 else n
            room //= max(1, n)
            size: Size = n
            if r.random() < 0.2:
                size = symbol(f"s{len(self.dynamic)}", 0, 1 << 40)
                self.dynamic[str(size)] = n
            self.numbers[size] = n
            sizes.append(size)
        self.vars = loop_vars("i", tuple(sizes[:n_vars]))
        self.rvars = loop_vars("r", tuple(sizes[n_vars:]))
        self.sizes = dict(zip((*self.vars, *self.rvars), sizes, strict=True))
        pool = [
            self.load(full=bool(self.rvars) and r.random() < 0.8) for _ in range(r.randint(1, 3))
        ]
        stmts: list[Stmt] = []
        sequential = False
        for k in range(r.choice([0, 1, 1, 2]) if self.rvars else 0):
            self.grow(pool, r.randint(0, 4))
            self.reduction(f"acc{k}", pool, stmts)
        self.grow(pool, r.randint(1, 6))
        if self.rvars and len(self.rvars) == 1 and r.random() < 0.15:
            self.scan(pool, stmts)
        for k in range(r.randint(1, 3)):
            if r.random() < 0.1 and self.vars:
                sequential |= self.scatter(k, pool, stmts)
            else:
                self.store(k, r.choice(pool[-4:]), stmts)
        names = [symbol(s, 0, 1 << 40) for s in self.dynamic]
        outs = tuple(s.buf for s in stmts if isinstance(s, Store))
        return Kernel(
            "fuzz",
            self.vars,
            self.rvars,
            tuple(stmts),
            tuple(self.buffers),
            outs,
            tuple(names),
            sequential,
        )

    # --------------------------------------------------------------------------------------- memory
    def number(self, e: Size) -> int:
        return e if isinstance(e, int) else self.numbers[e]

    def memory(self, d: DType, n: int) -> np.ndarray:
        """n random elements; floats have few distinct exponents so that sums are tame."""
        if d == b1:
            return self.np.integers(0, 2, n).astype(bool)
        if d.is_float:
            return interp.to_memory(self.np.uniform(-2, 2, n).astype(np.float64), d)
        low = 0 if d.kind == "u" else -8
        x = self.np.integers(low, 9, n)
        if self.r.random() < 0.2:
            wild = self.np.integers(0, 1 << 62, n).view(np.int64)
            return (wild << 1 ^ wild).astype(interp.memory_type(d))
        return x.astype(interp.memory_type(d))

    def buffer(self, d: DType, shape: list[Size], fill: bool) -> Buffer:
        """A buffer with strides in a random order of dimensions, sometimes padded or broadcast
        (inputs only)."""
        r = self.r
        strides: list[Size] = [0] * len(shape)
        order = list(range(len(shape)))
        if r.random() < 0.4:
            r.shuffle(order)
        step: Size = 1 if r.random() < 0.9 else 2
        for k in order[::-1]:
            if fill and r.random() < 0.08:
                continue
            strides[k] = step
            step = step * (1 if shape[k] == 0 else shape[k])
            if r.random() < 0.05:
                step = step * 2 + 3
        b = Buffer(f"{'in' if fill else 'out'}{len(self.buffers)}", d, tuple(shape), tuple(strides))
        self.buffers.append(b)
        last = sum(
            (self.number(n) - 1) * self.value(s) for n, s in zip(b.shape, b.strides, strict=True)
        )
        n = max(1, last + 1)
        self.arrays[b.name] = self.memory(d, n) if fill else np.zeros(n, interp.memory_type(d))
        return b

    def value(self, e: Size) -> int:
        return int(interp.Evaluation((), self.dynamic, {}, {}).integer(e, ()))

    # --------------------------------------------------------------------------------------- values
    def load(self, full: bool) -> Value:
        r = self.r
        d = DTYPES[r.choice(STORED)]
        axes = list(self.vars) + (list(self.rvars) if full else [])
        axes = [a for a in axes if r.random() < 0.85]
        index: list[Size] = []
        shape: list[Size] = []
        for a in axes:
            n = self.sizes[a]
            how = r.random()
            if how < 0.06 and isinstance(n, int) and n > 0:
                index.append(a * -1 + (n - 1))
                shape.append(n)
            elif how < 0.1:
                index.append(a // 3)
                shape.append((n + 2) // 3)
                self.numbers[shape[-1]] = (self.number(n) + 2) // 3
            elif how < 0.14:
                index.append(a % 4)
                shape.append(4)
                self.numbers[4] = 4
            elif how < 0.17 and isinstance(n, int):
                index.append(a * 2 + 1)
                shape.append(2 * n + 1)
                self.numbers[2 * n + 1] = 2 * n + 1
            else:
                index.append(a)
                shape.append(n)
        full = any(a in self.rvars for a in axes)
        if axes and r.random() < 0.1:
            return self.indirect(d, index, shape, axes)
        b = self.buffer(d, shape, True)
        if axes and r.random() < 0.15:
            return self.part(axes, lambda _: self.ops.load(b.name, tuple(index), d))
        return self.computable(Value(self.ops.load(b.name, tuple(index), d), True, full))

    def part(self, axes: list[Expr], read: Callable[[Node], Node]) -> Value:
        """What `read` gives at the first points along one of the axes, where its argument holds,
        and 1 at the others."""
        a = self.r.choice(axes)
        mask = apply(
            "lt", self.ops.index(a), self.ops.const(max(1, self.number(self.sizes[a]) // 2), i64)
        )
        found = self.ops.kept(self.ops.masked(mask, lambda: read(mask), 1))
        return self.computable(Value(found, True, any(b in self.rvars for b in axes)))

    def indirect(self, d: DType, index: list[Size], shape: list[Size], axes: list[Expr]) -> Value:
        """A gather through an index buffer, or from one place of it under a check; now and then an
        index is out of range."""
        n = self.r.choice([1, 5, 40])
        self.numbers[n] = n
        where = self.buffer(i64, shape, True)
        bad = self.r.random() < 0.1
        old = self.arrays[where.name]
        self.arrays[where.name] = self.np.integers(-n, n + (1 if bad else 0), old.size).astype(
            np.int64
        )
        table = self.buffer(d, [n], True)

        at = self.ops.load(where.name, tuple(index), i64)

        def read(mask: Node | None = None) -> Node:
            """Where the mask does not hold, the index is out of range."""
            given = at if mask is None else apply("where", mask, at, self.ops.const(-99, i64))
            k = self.ops.checked(given, n)
            return self.ops.load(table.name, (k if n > 1 else 0,), d)

        if self.r.random() < 0.5:
            return self.part(axes, read)
        found = self.ops.kept(read()) if n == 1 else read()
        return self.computable(Value(found, True, any(a in self.rvars for a in axes)))

    def computable(self, v: Value) -> Value:
        """Arithmetic is on f32, f64, integers and bools."""
        if v.node.dtype.name in ("f16", "bf16"):
            return Value(cast(v.node, f32), v.exact, v.full)
        return v

    def grow(self, pool: list[Value], n: int) -> None:
        """Adds n values made from the pool."""
        for _ in range(n):
            pool.append(self.step(pool))

    def step(self, pool: list[Value]) -> Value:
        r = self.r
        a = r.choice(pool)
        d = a.node.dtype
        how = r.random()
        if how < 0.08 and (self.vars or self.rvars):
            axis = r.choice([*self.vars, *self.rvars])
            return Value(self.ops.index(axis * 3 + 1), True, axis in self.rvars)
        if how < 0.2:
            to = DTYPES[r.choice(["f32", "f64", "i64", "i32", "u8", "b1", "f16", "bf16", "i8"])]
            if not a.exact and (to.kind != "f" or to.nbytes < 4):
                return a
            x = a.node
            if x.dtype.is_float and to.kind in "iu":
                x = apply(
                    "min",
                    apply("max", x, const(-50.0 if to.kind == "i" else 0.0, x.dtype)),
                    const(50.0, x.dtype),
                )
                x = apply("where", apply("isnan", x), const(1.0, x.dtype), x)
            return self.computable(Value(cast(x, to), a.exact, a.full))
        if d.is_float and how < 0.45:
            x = apply("max", apply("min", a.node, const(3.0, d)), const(-0.9, d))
            return Value(apply(r.choice(SMOOTH), x), False, a.full)
        b = self.partner(a, pool)
        both, full = a.exact and b.exact, a.full or b.full
        if d == b1:
            return Value(
                apply(r.choice(["and", "or", "xor", "eq", "lt", "max", "ge"]), a.node, b.node),
                both,
                full,
            )
        if both and how < 0.55:
            c = apply(r.choice(["lt", "le", "eq", "ne", "gt", "ge"]), a.node, b.node)
            return Value(c if r.random() < 0.3 else apply("where", c, a.node, b.node), True, full)
        if d.is_float:
            op = r.choice(EXACT if both else ["add", "sub", "mul", "neg", "abs", "min", "max"])
        else:
            op = r.choice(WHOLE)
        if op in ("neg", "abs", "sqrt", "floor", "round", "sign", "trunc", "ceil", "not"):
            x = apply("abs", a.node) if op == "sqrt" else a.node
            return Value(apply(op, x), a.exact, a.full)
        if op == "where":
            return (
                Value(apply("where", apply("gt", a.node, const(0, d)), a.node, b.node), both, full)
                if both
                else a
            )
        return Value(apply(op, a.node, b.node), both, full)

    def partner(self, a: Value, pool: list[Value]) -> Value:
        """Another value of a's dtype."""
        same = [v for v in pool if v.node.dtype == a.node.dtype]
        if self.r.random() < 0.3:
            c = (
                self.r.choice([0, 1, 2, 3, -1, 0.5])
                if a.node.dtype.is_float
                else self.r.choice([0, 1, 2, 3, 7])
            )
            return Value(const(c, a.node.dtype), True, False)
        return self.r.choice(same)

    # ----------------------------------------------------------------------------------- statements
    def reduction(self, name: str, pool: list[Value], stmts: list[Stmt]) -> None:
        r = self.r
        v = r.choice(pool[-3:])
        d = v.node.dtype
        empty = any(self.number(self.sizes[a]) == 0 for a in self.rvars)
        if d == b1:
            kind = r.choice(["any", "all"])
        elif d.is_float:
            kind = r.choice(
                ["sum", "max", "min", "welford"]
                + (["argmax", "argmin"] if v.exact and not empty else [])
            )
        else:
            kind = r.choice(
                ["sum", "prod", "max", "min", "xor"] + ([] if empty else ["argmax", "argmin"])
            )
        stmts.append(Reduce(name, kind, v.node))
        out = i64 if kind.startswith("arg") else d
        suffixes = [".mean", ".m2", ".count"] if kind == "welford" else [""]
        exact = v.exact and not (d.is_float and kind in ("sum", "welford"))
        for suffix in suffixes:
            pool.append(Value(node("acc", (), name + suffix, out), exact, False))

    def scan(self, pool: list[Value], stmts: list[Stmt]) -> None:
        v = self.r.choice([p for p in pool if p.node.dtype != b1] or pool)
        if v.node.dtype == b1:
            return
        kind = self.r.choice(["sum", "max", "min"])
        stmts.append(Reduce("run", kind, v.node, running=True))
        pool.append(
            Value(node("acc", (), "run", v.node.dtype), v.exact and not v.node.dtype.is_float, True)
        )

    def store(self, k: int, v: Value, stmts: list[Stmt]) -> None:
        full = v.full or (bool(self.rvars) and self.r.random() < 0.3)
        axes = [*self.vars, *(self.rvars if full else ())]
        x, d = v.node, v.node.dtype
        if d == f32 and v.exact and self.r.random() < 0.2:
            d = DTYPES[self.r.choice(["f16", "bf16"])]
            x = cast(x, d)
        b = self.buffer(d, [self.sizes[a] for a in axes], False)
        self.exact_of[b.name] = v.exact
        stmts.append(Store(b.name, tuple(axes), x, full or not self.rvars))

    def scatter(self, k: int, pool: list[Value], stmts: list[Stmt]) -> bool:
        """An update of a small buffer at data-dependent places, in order."""
        v = self.r.choice(pool[-4:])
        if v.node.dtype == b1 or self.rvars:
            self.store(k, v, stmts)
            return False
        n = 6
        self.numbers[n] = n
        where = self.buffer(i64, [self.sizes[a] for a in self.vars], True)
        self.arrays[where.name] = self.np.integers(0, n, self.arrays[where.name].size).astype(
            np.int64
        )
        b = self.buffer(v.node.dtype, [n], False)
        self.exact_of[b.name] = v.exact
        at = symbol("$0", extent=n)
        arg = node("load", (), Load(where.name, tuple(self.vars)), i64)
        mode = self.r.choice(["add", "store", "max"])
        stmts.append(Store(b.name, (at,), v.node, True, mode, (arg,)))
        return True


def check(seed: int, isa: Isa, folder: Path, threads: int = 1, show: bool = False) -> str:
    """'' if the kernel of this seed does what the reference does, else what went wrong."""
    maker = Maker(seed)
    kernel = maker.kernel()
    if show:
        print(kernel_text(kernel))
        print({b.name: (b.dtype, b.shape, b.strides) for b in kernel.args}, maker.dynamic)
    loaded = Loaded([kernel], isa, folder)
    if show:
        text = loaded.source.text
        print(text[text.index('extern "C" i64') :])
    return compare(kernel, maker, loaded, threads)


def compare(kernel: Kernel, maker: Maker, loaded: Loaded, threads: int) -> str:
    """Runs both and compares every output."""
    mine = {k: a.copy() for k, a in maker.arrays.items()}
    want = {k: a.copy() for k, a in maker.arrays.items()}
    truth = {k: a.copy() for k, a in maker.arrays.items()}
    got = loaded(kernel, mine, maker.dynamic, 1 if kernel.sequential else threads)
    failed = run_kernel(kernel, want, maker.dynamic)
    if bool(got) != bool(failed):
        return f"check code {got}, the reference says {failed}"
    if failed:
        return ""
    wide_types = {s.buf: np.float64 for s in kernel.stmts if isinstance(s, Store)}
    for name in wide_types:
        if maker.exact_of[name]:
            if not same(mine[name], want[name]):
                return f"{name}: {mine[name]} is not {want[name]}"
        elif not close(mine[name], want[name]):
            return (
                f"{name} differs by {worst(mine[name], want[name])}: {mine[name]} and {want[name]}"
            )
    del truth
    return ""


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, but any NaN equals any NaN and -0 equals 0."""
    if a.dtype == np.uint16 or a.dtype.kind != "f":
        nan = (a & 0x7FFF) > 0x7F80 if a.dtype == np.uint16 else np.zeros(a.shape, bool)
        return bool(
            ((a == b) | (nan & ((b & 0x7FFF) > 0x7F80) if a.dtype == np.uint16 else (a == b))).all()
        )
    return bool(np.array_equal(a, b, equal_nan=True))


def worst(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.nanmax(np.abs(a.astype(np.float64) - b)))


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Within rounding errors that a long sum and a few ill-conditioned steps may leave."""
    with np.errstate(all="ignore"):
        rough = 2e-3 if a.dtype == np.float32 else 1e-4 if a.dtype == np.float64 else 0.05
        scale = max(
            1.0, float(np.nanmax(np.abs(b.astype(np.float64)[np.isfinite(b)]), initial=0.0))
        )
        finite = np.isfinite(a) & np.isfinite(b)
        if not (np.isfinite(a) == np.isfinite(b)).all() and scale < 1e30:
            return False
        return bool((np.abs(a.astype(np.float64) - b)[finite] <= rough * scale).all())


def main() -> None:
    """Command line: see the module's docstring."""
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "--many":
            first, count = int(sys.argv[2]), int(sys.argv[3])
            isas = sys.argv[4:] or ["avx512"]
            for seed in watched("kernels", range(first, first + count)):
                for name in isas:
                    try:
                        wrong = check(seed, ISAS[name], Path(folder), threads=1 + seed % 3)
                    except Exception as error:  # noqa: BLE001  (a crash is a finding too)
                        wrong = f"{type(error).__name__}: {str(error)[:1500]}"
                    if wrong:
                        print(
                            f"python -m tests.fuzz_kernels {seed} {name}\n  {wrong}"[:1200],
                            flush=True,
                        )
            return
        seed, isa = int(sys.argv[1]), (sys.argv[2:] or ["avx512"])[0]
        wrong = check(seed, ISAS[isa], Path(folder), show=True)
        print(f"{wrong}\n\n{repro(seed, isa)}" if wrong else "as the reference")


def repro(seed: int, isa: str, threads: int = 1) -> str:
    """The kernel of a seed with its inputs as a program to paste into a file and run."""
    from tests.repro import kernel_repro

    maker = Maker(seed)
    kernel = maker.kernel()
    return kernel_repro(kernel, maker.arrays, maker.dynamic, maker.exact_of, isa, threads)


if __name__ == "__main__":
    main()


__all__ = ["Expr", "Maker", "check", "compare", "f64"]
