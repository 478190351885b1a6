"""Every way to store, as kernels with what must come out: mode x what moves with the lane x region
x dtype.

`TRITON_INTERPRET=1 python -m tests.store_cells` runs those that Triton has in its interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from plait.ir.dtypes import DTYPES, DType, b1, f32, i64
from plait.ir.expr import Expr, symbol
from plait.ir.loops import Node, apply, loop_vars, node
from plait.ir.ops import ATOMICS
from plait.ir.record import Recorder
from plait.kernel.null.run import run_kernel
from plait.kernel.stores import STORES
from plait.log import watched
from plait.schedule.plan import Kernel, Reduce, Store
from tests.kernel_tools import strided

MOVES = ("neither", "value", "index", "both")
PLACES = (
    "row",
    "anywhere",
)  # where an index that moves goes: along memory, or where other data say
MASKS = ("none", "same", "moves")
LENGTHS = (0, 1, 15, 16, 33)
DTYPE_NAMES = ("f32", "f64", "bf16", "f16", "i64", "i32", "u8", "i8", "b1")
WIDTH = 40
Arrays = dict[str, np.ndarray]


def at_page_end(values: np.ndarray) -> np.ndarray:
    """A copy that ends where readable memory does; none of it is readable where it is empty."""
    page = mmap.PAGESIZE
    room = -(-values.nbytes // page) * page
    memory = mmap.mmap(-1, room + page)
    view = np.frombuffer(memory, np.uint8)
    if mprotect(view.ctypes.data + room, page) != 0:
        raise OSError("mprotect failed")
    out = view[room - values.nbytes : room].view(values.dtype)
    out[:] = values.ravel()
    return out


def mprotect(address: int, nbytes: int) -> int:
    """Forbids every access."""
    return int(ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0))


def store_kernel(
    name: str, d: DType, mode: str, moves: str, place: str, mask: str, n: int, dynamic: bool = False
) -> Kernel:
    """out[i, at] (mode)= x for 2 x n points (i, j); at and x of the row i, or also of j where they
    move."""
    i, j = loop_vars("i", (2, symbol("s", 0, 1 << 20) if dynamic else n))
    ops = Recorder()
    value = ops.load("x", (i, j if moves in ("value", "both") else 0), d)
    at: Expr | Node = j
    if moves in ("neither", "value"):
        at = ops.checked(ops.load("where", (i, 0), i64), WIDTH, wrap=False)
    elif place == "anywhere":
        at = ops.checked(ops.load("where", (i, j), i64), WIDTH, wrap=False)
    index, args = ops.take_args((i, at))
    on = None if mask == "none" else ops.load("on", (i, j if mask == "moves" else 0), b1)
    wide = j.symbol.extent if j.symbol is not None else n
    shape = (2, n if wide is None else wide)
    buffers = (
        strided("x", d, shape), strided("where", i64, shape), strided("on", b1, shape),
        strided("out", d, (2, WIDTH)),
    )  # fmt: skip
    used = {"x", "out", *(("where",) if args else ()), *(("on",) if on is not None else ())}
    bufs = tuple(b for b in buffers if b.name in used)
    sizes = (symbol("s", 0, 1 << 20),) if dynamic else ()
    store = Store("out", index, value, True, mode, args, on)
    return Kernel(name, (i, j), (), (store,), bufs, ("out",), sizes, True)


def sums_kernel(inner: int) -> Kernel:
    """out[i] = the sum of x[where[0]] * y[i] over n x 3 points, or 3 x n."""
    n = symbol("s", 0, 1 << 20)
    (i,) = loop_vars("i", (20,))
    ops = Recorder()
    at = ops.checked(ops.load("where", (0,), i64), 4, wrap=False)
    value = apply("mul", ops.load("x", (at,), f32), ops.load("y", (i,), f32))
    total = node("acc", (), "a", f32)
    stmts = (Reduce("a", "sum", value), Store("out", (i,), total, False))
    buffers = (
        strided("where", i64, (n,)), strided("x", f32, (4,)), strided("y", f32, (20,)),
        strided("out", f32, (20,)),
    )  # fmt: skip
    rvars = loop_vars("r", (3, n) if inner else (n, 3))
    return Kernel(f"sums{inner}", (i,), rvars, stmts, buffers, ("out",), (n,))


def data(d: DType, n: int) -> Arrays:
    """Whole numbers, so that sums and products are exact in every dtype; rows of n points."""
    rng = np.random.default_rng(n)
    numbers = rng.choice([1, 2], 2 * n, p=[0.9, 0.1])
    if d == b1:
        values = numbers > 1
        out = rng.random(2 * WIDTH) > 0.5
    elif d.name == "bf16":
        values = np.where(numbers > 1, 0x4000, 0x3F80).astype(np.uint16)  # the bits of 2 and 1
        out = np.full(2 * WIDTH, 0x3F80, np.uint16)
    else:
        kind = np.dtype({"f": "float", "i": "int", "u": "uint"}[d.name[0]] + d.name[1:])
        values, out = numbers.astype(kind), np.ones(2 * WIDTH, kind)
    where = rng.integers(0, 3, 2 * n)
    return {"x": values, "where": where, "on": rng.random(2 * n) > 0.4, "out": out}


def cells(d: DType) -> Iterator[tuple[Kernel, tuple[int, ...]]]:
    """Kernels, and the lengths of rows to run them on."""
    for mode, moves, place, mask in itertools.product(STORES, MOVES, PLACES, MASKS):
        if place == "anywhere" and moves in ("neither", "value"):
            continue
        if mode == "add" and d == b1:  # lowered to max
            continue
        name = f"{mode}_{moves}_{place}_{mask}_{d.name}"
        yield store_kernel(name, d, mode, moves, place, mask, 0, True), LENGTHS
        for n in (0, 33):
            yield store_kernel(f"{name}_{n}", d, mode, moves, place, mask, n), (n,)


def wanted(kernel: Kernel, arrays: Arrays, n: int) -> np.ndarray:
    """What a store one point after the other leaves."""
    mine = {k: a.copy() for k, a in arrays.items()}
    assert run_kernel(kernel, mine, {"s": n}) == 0
    return mine["out"]


def main() -> None:
    """Command line: see the module's docstring."""
    from tests.triton_tools import Runner

    wrong, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("f32", "i32", "i64"):
            for kernel, lengths in watched(f"stores of {name}", [*cells(DTYPES[name])]):
                (store,) = kernel.stmts
                assert isinstance(store, Store)
                if store.mode != "store" and name not in ATOMICS.get(store.mode, ()):
                    continue
                if store.mode == "store" and store.index_args:
                    continue  # of several values for one element any may stay
                runner = Runner([kernel], Path(folder))
                for n in lengths:
                    arrays = data(DTYPES[name], n)
                    want = wanted(kernel, arrays, n)
                    runner(kernel, arrays, {"s": n})
                    count += 1
                    if not np.array_equal(arrays["out"], want):
                        wrong.append(f"{kernel.name} on {n}")
        for kernel in (sums_kernel(0), sums_kernel(1)):  # the index is out of range
            x, out = np.ones(20, np.float32), np.full(20, 7, np.float32)
            arrays = {"where": np.array([99]), "x": x, "y": x, "out": out}
            failed = Runner([kernel], Path(folder))(kernel, arrays, {"s": 0})
            if failed or out.any():
                wrong.append(kernel.name)
    for name in wrong:
        print(name)
    print(f"{count} stores interpreted, {len(wrong)} wrong")
    sys.exit(1 if wrong or not count else 0)


if __name__ == "__main__":
    main()
