"""Stores: every row of the table of stores on every instruction set, and empty loops that may not
read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.ir.dtypes import DTYPES
from plait.kernel.stores import STORES
from plait.runtime.toolchain import Isa
from tests import store_cells
from tests.kernel_tools import Loaded, usable_isas
from tests.test_triton_kernels import needs_triton, run

QUICK = ("bf16", "i64", "b1")  # and f32 on every instruction set
CELLS = [
    pytest.param(isa, d, marks=() if d == "f32" or (k == 0 and d in QUICK) else pytest.mark.slow)
    for k, isa in enumerate(usable_isas())
    for d in store_cells.DTYPE_NAMES
]


def test_the_table_is_whole() -> None:
    assert all(set(row) == set(store_cells.MOVES) for row in STORES.values())
    assert set(STORES) == {"store", "add", "mul", "min", "max"}


@pytest.mark.parametrize("isa, name", CELLS, ids=lambda p: getattr(p, "name", p))
def test_cells(isa: Isa, name: str, tmp_path: Path) -> None:
    """Body, masked tail and empty rows; memory that a kernel may not read is not readable."""
    found = list(store_cells.cells(DTYPES[name]))
    loaded = Loaded([kernel for kernel, _ in found], isa, tmp_path, opt_level=1)
    for kernel, lengths in found:
        for n in lengths:
            arrays = store_cells.data(DTYPES[name], n)
            want = store_cells.wanted(kernel, arrays, n)
            for threads in (1, 3):
                mine = {k: store_cells.at_page_end(a) for k, a in arrays.items()}
                assert loaded(kernel, mine, {"s": n}, threads) == 0
                case = f"{kernel.name} on {n}, {threads} threads"
                np.testing.assert_array_equal(mine["out"], want, err_msg=case)


@needs_triton
def test_cells_of_triton() -> None:
    out = run("-m", "tests.store_cells", TRITON_INTERPRET="1")
    assert " 0 wrong" in out


# ------------------------------------------------------------------------------ programs
def given(shape: tuple[int, ...], moves: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, or one of them for all places."""
    if moves:
        return torch.randint(1, 3, shape).to(dtype)
    return torch.full((), 2).to(dtype).expand(shape)


def places(shape: tuple[int, ...], moves: bool) -> torch.Tensor:
    """Positions below 5, or one of them for all places."""
    return torch.randint(0, 5, shape) if moves else torch.tensor(2).expand(shape)


def reduced(mode: str) -> Callable[..., torch.Tensor]:
    return lambda x, i, v: x.scatter_reduce(0, i, v, mode)


ALONG_ROWS = {
    "scatter": lambda x, i, v: x.scatter(0, i, v),
    "scatter_add": lambda x, i, v: x.scatter_add(0, i, v),
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "index_put": lambda x, i, v: x.index_put((i,), v, accumulate=True),
    "index_put_last": lambda x, i, v: x.index_put((i,), v),
    "index_reduce": lambda x, i, v: x.index_reduce(0, i, v, "prod"),
    **{m: reduced(m) for m in ("sum", "mean", "prod", "amin", "amax")},
}
SIZES = (0, 1, 15, 33, 1000)


@pytest.mark.parametrize("name", ALONG_ROWS)
@pytest.mark.parametrize("move", store_cells.MOVES)
def test_programs(name: str, move: str) -> None:
    """Every operator that writes at computed places, with indices and values that are expanded or
    not."""
    fn = ALONG_ROWS[name]
    dtypes = [torch.float32, torch.int64, torch.bool, torch.bfloat16]
    if name in ("mean", "index_reduce"):
        dtypes = dtypes[:2]
    for dtype in dtypes:
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="plait")
        for n in SIZES:
            n = min(n, 33) if name in ("prod", "index_reduce") or dtype == torch.bfloat16 else n
            x = torch.ones(5).to(dtype)
            i, v = (
                places((n,), move in ("index", "both")),
                given((n,), move in ("value", "both"), dtype),
            )
            if name in ("scatter", "index_put_last") and move == "both":
                i = torch.randperm(5)[: min(n, 5)]
                v = v[: len(i)]
            torch.testing.assert_close(compiled(x, i, v), fn(x, i, v), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["scatter_add", "index_add", "index_put", "sum", "mean", "prod", "amin", "amax"]
)
@pytest.mark.parametrize("move", store_cells.MOVES)
def test_gradients_of_programs(name: str, move: str) -> None:
    def loss(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (ALONG_ROWS[name](x, i, v) * torch.arange(5)).sum()

    compiled = torch.compile(loss, backend="plait")
    for n in (0, 1, 33):
        i = places((n,), move in ("index", "both"))
        found = []
        for f in (loss, compiled):
            x, v = torch.arange(1.0, 6).requires_grad_(), torch.full((), 2.0).requires_grad_()
            w = torch.full((n,), 1.5).requires_grad_()
            f(x, i, w if move in ("value", "both") else v.expand(n)).backward()
            found.append((x.grad, v.grad, w.grad))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("fn", [
    lambda x, i, n: x[i.expand(n)],
    lambda x, i, n: x.gather(0, i.expand(n)),
    lambda x, i, n: x[i.expand(3, n)] * 2,
    lambda x, i, n: x.index_select(0, i.expand(n)).exp(),
    lambda x, i, n: torch.nn.functional.embedding(i.expand(n), x.view(-1, 1).expand(-1, 4)),
    lambda x, i, n: x.take(i.expand(n, 2)),
], ids=["index", "gather", "rows", "index_select", "embedding", "take"])  # fmt: skip
def test_gradients_of_reads(fn: Callable[..., torch.Tensor]) -> None:

    def loss(x: torch.Tensor, i: torch.Tensor, n: int) -> torch.Tensor:
        return fn(x, i, n).sum()

    compiled = torch.compile(loss, backend="plait")
    for n in (0, 1, 16, 100):
        found = []
        for f in (loss, compiled):
            x = torch.arange(8.0).requires_grad_()
            f(x, torch.tensor(2), n).backward()
            found.append(x.grad)
        torch.testing.assert_close(found[1], found[0])


def test_an_expanded_target_has_elements_of_its_own() -> None:
    def fn(i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(()).expand(16).scatter_add(0, i, torch.ones(40))

    i = torch.arange(40) % 7
    torch.testing.assert_close(torch.compile(fn, backend="plait")(i), fn(i))


# ------------------------------------------------------------------------------ empty loops
def edges(i: torch.Tensor) -> torch.Tensor:
    values = torch.ones(i.shape[0], 4)
    return torch.zeros(5, 4).scatter_add(0, i.view(-1, 1).expand(-1, 4), values)


def put(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_put_((i,), v)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_without_edges(dynamic: bool) -> None:
    compiled = torch.compile(edges, backend="plait", dynamic=dynamic)
    for n in (7, 0, 40):
        i = torch.arange(n) % 5
        torch.testing.assert_close(compiled(i), edges(i))


@pytest.mark.parametrize("shape", [(17, 0, 16), (0, 17, 16), (17, 16, 0), (4, 0)])
def test_writes_in_place_of_nothing(shape: tuple[int, ...]) -> None:
    compiled = torch.compile(put, backend="plait")
    for rows in (0, 3):
        i = torch.arange(rows) if shape[0] else torch.arange(0)
        x, v = torch.zeros(shape), torch.ones(len(i), *shape[1:])
        assert compiled(x, i, v).shape == put(x, i, v).shape


def unlike(m: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sums over as many points as m has, of what does not depend on them."""
    found = m.nonzero().squeeze(1)
    rows = x[i.view(-1, 1).expand(-1, found.shape[0])]
    return rows.sum(1) + rows.sum() + x[found].sum()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sums_of_nothing_check_nothing() -> None:
    """As in eager, an index that no point uses may be out of range."""
    compiled = torch.compile(unlike, backend="plait", dynamic=True)
    x = torch.randn(5)
    for m, i in (
        (torch.ones(3) > 0, torch.arange(4)),
        (torch.zeros(3) > 0, torch.tensor([1, 99, 2])),
    ):
        torch.testing.assert_close(compiled(m, i, x), unlike(m, i, x))


@pytest.mark.parametrize("isa, inner", [(isa, k) for isa in usable_isas() for k in (0, 1)])
def test_sums_over_nothing_read_nothing(isa: Isa, inner: int, tmp_path: Path) -> None:
    """No load and no check for n = 0."""
    kernel = store_cells.sums_kernel(inner)
    loaded = Loaded([kernel], isa, tmp_path)
    x, y = np.arange(4, dtype=np.float32), np.ones(20, np.float32)
    for size in (0, 2):
        where = store_cells.at_page_end(np.full(size, 3, np.int64))
        out = np.full(20, 7, np.float32)
        assert loaded(kernel, {"where": where, "x": x, "y": y, "out": out}, {"s": size}) == 0
        np.testing.assert_array_equal(out, 9.0 * size)
