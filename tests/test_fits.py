"""Sizes, dimensions, dtypes and numbers that do not fit: plait does as eager does, where fake
tensors say nothing."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.errors import OperandError
from tests.error_inputs import caught_as, kind_of, raised
from tests.opinfo_tools import Case
from tests.sweep import _op, all_cases
from tests.unfit import changed, compare_unfit, lost, unfit_table

warnings.filterwarnings("ignore", category=UserWarning)
aten = torch.ops.aten
Program = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
HALF, DOUBLE = torch.float16, torch.float64


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def rows(n: int) -> torch.Tensor:
    return torch.arange(float(n))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def ways(fn: Callable[..., Any]) -> list[Callable[..., Any]]:
    """How a program is compiled and called: with sizes as numbers and as symbols, and ahead."""
    how = [torch.compile(fn, backend="plait", dynamic=dynamic) for dynamic in (False, True)]
    return [*how, lambda *args: plait.compile(fn, args)(*args)]


_MASKED = aten._unsafe_masked_index_put_accumulate
REFUSED: dict[str, Program] = {
    # dimensions
    "softmax": (lambda x: x.softmax(2), (ones(3),)),
    "softmin": (lambda x: F.softmin(x, 2), (ones(3),)),
    "log_softmax": (lambda x: x.log_softmax(-4), (ones(3),)),
    "cummax": (lambda x: x.cummax(1), (ones(),)),
    "cummin": (lambda x: x.cummin(-7), (ones(),)),
    "select": (lambda x: x.select(-2, 0), (ones(5),)),
    "select of nothing": (lambda x: x.select(0, -1), (ones(0, 0),)),
    "select beyond the end": (lambda x: x.select(1, 1), (ones(2, 1),)),
    "index_select": (lambda x, i: x.index_select(-7, i), (ones(), zeros(1))),
    "select_scatter": (lambda x, y: x.select_scatter(y, -7, 0), (ones(3, 3), ones(3))),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, -7), (ones(3, 3), ones(3, 3))),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y), (ones(3), ones(3))),
    "index_reduce": (
        lambda x, i, y: x.index_reduce(-7, i, y, "amax"),
        (ones(3, 3), zeros(3), ones(3, 3)),
    ),
    # sizes
    "one index of nothing": (torch.take_along_dim, (ones(0, 5), zeros(2, 2))),
    "two indices of one": (lambda x, i: x.index_select(0, i), (ones(), zeros(2))),
    "no index of one": (lambda x, i: x.index_select(0, i), (ones(), zeros(0))),
    "index_reduce of one": (
        lambda x, i, y: x.index_reduce(0, i, y, "amax"),
        (ones(), zeros(2), ones()),
    ),
    "index_reduce by one": (
        lambda x, i, y: x.index_reduce(0, i, y, "mean"),
        (ones(1), zeros(1), ones()),
    ),
    "index_add of other rows": (
        lambda x, i, y: x.index_add(-1, i, y),
        (ones(0, 5), zeros(5), ones(5, 5)),
    ),
    "memory beyond a result": (lambda x: (x + 1).as_strided((2,), (1,), 9), (ones(6),)),
    "elements beyond a result": (lambda x: (x + 1).as_strided((3,), (2,), 2) * 2, (ones(6),)),
    "more than a result": (lambda x: (x + 1).as_strided((x.shape[0],), (2,)), (ones(6),)),
    "beyond the numbers of a range": (
        lambda x: torch.arange(x.shape[0] // 3).as_strided((2,), (1,), 1),
        (ones(6),),
    ),
    "beyond bits": (lambda x: (x + 1).view(torch.int16).as_strided((7,), (2,)) + 1, (ones(6),)),
    "a copy from beyond a result": (
        lambda x: torch.as_strided_copy(x + 1, (2,), (1,), 9),
        (ones(6),),
    ),
    "a copy from beyond a part": (
        lambda x: torch.as_strided_copy(x[2:], (x.shape[0],), (1,)),
        (ones(6),),
    ),
    "index_add to nothing": (lambda x, i, y: x.index_add(0, i, y), (ones(0), zeros(1), ones(1))),
    "indices that do not fit": (
        lambda x, m, i, j, y: _MASKED(x, m, [i, j], y),
        (ones(5, 5), ones(4, 3) > 0, zeros(4, 1), zeros(0, 3), ones(4, 3)),
    ),
    "binary_cross_entropy": (F.binary_cross_entropy, (ones(2, 2), ones(2, 2), ones(1, 2, 2))),
    "with logits": (F.binary_cross_entropy_with_logits, (ones(1, 2), ones(1, 2), ones(2, 2))),
    "with positive weight": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        (ones(1, 2), ones(1, 2), ones(2, 2)),
    ),
    "soft_margin_loss": (F.soft_margin_loss, (ones(5), ones(5, 5))),
    "nll_loss2d": (F.nll_loss, (ones(2, 3, 2, 3), zeros(2, 2, 2))),
    "nll_loss2d's weight": (F.nll_loss, (ones(2, 3, 2, 2), zeros(2, 2, 2), ones(2))),
    "pad that takes away too much": (lambda x: F.pad(x, (-2, 3)), (ones(2, 1),)),
    "pad that takes away at the end": (lambda x: F.pad(x, (3, -2)), (ones(2, 1),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 3), (ones(0, 1, 7, 6),)),
    "nearest, no pixel": (lambda x: F.interpolate(x, size=0), (ones(2, 3, 4),)),
    "bilinear, no pixel": (
        lambda x: F.interpolate(x, size=0, mode="bilinear"),
        (ones(2, 3, 4, 4),),
    ),
    "bicubic of no pixel": (
        lambda x: F.interpolate(x, size=3, mode="bicubic"),
        (ones(2, 3, 0, 4),),
    ),
    "unfold": (lambda x: F.unfold(x, 2, 1, -1), (ones(1, 2, 5, 5),)),
    "group_norm": (
        lambda x, w: torch.native_group_norm(x, w, None, 0, 2, 1, 1, 1e-5),
        (ones(0, 2), ones(1)),
    ),
    "batch norm of nothing": (
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
        (ones(0, 3, 4),),
    ),
    "addmv": (lambda x, a, b: torch.addmv(x, a, b, beta=0), (zeros(3), zeros(4, 5), zeros(5))),
    "no repeats": (
        lambda x, n: x.repeat_interleave(n, output_size=0),
        (ones(3), torch.tensor([1, 2, 0])),
    ),
    "_softmax_backward_data": (
        lambda g, y: aten._softmax_backward_data(g, y, 0, torch.float32),
        (ones(1, 4), ones(5, 4)),
    ),
    # numbers
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=-1.0), (ones(3), ones(3))),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 0), (ones(3),)),
    "less a bool, several times": (lambda x: torch.sub(x, True, alpha=2), (ones(3),)),
    "in place less a bool": (lambda x: x.clone().sub_(True), (ones(3),)),
    "less a condition of sizes": (lambda x: x - (x.shape[0] > 1), (ones(3),)),
    "less a bool of a tensor": (lambda x, y: x - y.item(), (ones(3), ones() > 0)),
    "half a bool": (lambda x: torch.add(x, x, alpha=0.5), (ones(3) > 0,)),
    "baddbmm": (lambda x, y: torch.baddbmm(x, y, y, alpha=1j), (ones(1, 2, 2), ones(1, 2, 2))),
    "a bool times numbers": (lambda x, y: torch.sub(x, y, alpha=True), (zeros(3), zeros(3))),
    # strides
    "isin of few, transposed": (lambda x, y: torch.isin(x, y.t()), (zeros(8), zeros(3, 4))),
    "isin of few with gaps": (
        lambda x, y: torch.isin(x, y[:, :2], invert=True),
        (zeros(9), zeros(2, 5)),
    ),
    "isin of a number": (lambda y: torch.isin(3, y.t()), (zeros(3, 3),)),
    "group norm of rows apart": (
        lambda x: torch.native_group_norm(x.mT, None, None, 2, 4, 3, 2, 1e-5)[0],
        (ones(2, 3, 4),),
    ),
    # dtypes
    "nearest of integers": (lambda x: F.interpolate(x, size=3), (zeros(2, 3, 4),)),
    "bilinear of integers": (
        lambda x: F.interpolate(x, size=3, mode="bilinear"),
        (zeros(2, 3, 4, 4),),
    ),
    "trilinear of bools": (
        lambda x: F.interpolate(x, size=3, mode="trilinear"),
        (ones(2, 3, 4, 4, 4) > 0,),
    ),
    "hardshrink": (F.hardshrink, (zeros(3),)),
    "multi_margin_loss": (F.multi_margin_loss, (zeros(4, 5), zeros(4))),
    "multi_margin_loss of half": (F.multi_margin_loss, (ones(4, 5, dtype=HALF), zeros(4))),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (ones(4, 5), zeros(4, 5) > 0)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (zeros(2, 3),)),
    "reflection of bools": (lambda x: F.pad(x, (1,) * 4, "reflect"), (ones(1, 1, 5, 5) > 0,)),
    "cumsum in bools": (lambda x: x.cumsum(0, dtype=torch.bool), (ones(3) > 0,)),
    "bitwise_not": (torch.bitwise_not, (ones(3),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_as_eager_refuses_it(name: str) -> None:
    fn, given = REFUSED[name]
    want = raised(lambda xs: fn(*xs), given)
    assert want is not None
    for compiled in ways(fn):
        got = raised(lambda xs, f=compiled: f(*xs), given)
        assert got is not None and caught_as(got, kind_of(want)), f"eager {want!r}, plait {got!r}"


RESULTS: dict[str, Program] = {
    "isin of more, transposed": (lambda x, y: torch.isin(x, y.t()), (zeros(8), zeros(7, 2))),
    "isin of gaps that are copied": (lambda x, y: torch.isin(x, y[:, :2]), (ones(9), zeros(2, 5))),
    "isin of one row, transposed": (
        lambda x, y: torch.isin(x.t(), y.t()),
        (zeros(8, 2), zeros(1, 9)),
    ),
    "isin among a cube": (torch.isin, (ones(2, 33, 33), ones(2, 33, 33))),
    "addr": (torch.addr, (ones(dtype=DOUBLE), torch.randn(3), torch.randn(4))),
    "addr of a row": (torch.addr, (torch.randn(4), torch.randn(3), torch.randn(4))),
    "huber_loss": (F.huber_loss, (torch.randn(9).half(), torch.randn(9))),
    "soft_margin_loss": (F.soft_margin_loss, (torch.randn(9).half(), torch.randn(9))),
    "binary_cross_entropy": (
        F.binary_cross_entropy,
        (torch.rand(9), torch.rand(9), torch.rand(9, dtype=DOUBLE)),
    ),
    "native_dropout_backward": (
        lambda g, m: aten.native_dropout_backward(g, m, 2.0),
        (torch.randn(9), ones(9, dtype=DOUBLE)),
    ),
    "native_layer_norm": (
        lambda x, w: torch.native_layer_norm(x, [5], w, None, 1e-5),
        (torch.randn(3, 5).half(), torch.rand(5)),
    ),
    "native_group_norm": (
        lambda x, w: torch.native_group_norm(x, w, None, 2, 4, 9, 2, 1e-5),
        (torch.randn(2, 4, 9).half(), torch.rand(4)),
    ),
    "native_group_norm, reshaped": (
        lambda x, w: torch.native_group_norm(x, w, None, 1, 3, 2, 1, 1e-5),
        (torch.randn(2, 1, 3), torch.rand(3)),
    ),
    "native_batch_norm": (
        lambda x, w: torch.native_batch_norm(x, w, w, w + 1, w + 2, True, 0.1, 1e-5),
        (torch.randn(3, 4).half(), torch.rand(4)),
    ),
    "native_batch_norm without training": (
        lambda x, w: torch.native_batch_norm(x, w, w, w, w + 1, False, 0.1, 1e-5),
        (torch.randn(3, 4).half(), torch.rand(4)),
    ),
    "pixel_unshuffle of nothing": (lambda x: F.pixel_unshuffle(x, 3), (ones(0, 1, 6, 6),)),
    "batch_norm of nothing": (
        lambda x: F.batch_norm(x, None, None, training=True),
        (ones(0, 3, 4),),
    ),
    "no repeats of anything": (
        lambda x, n: x.repeat_interleave(n, output_size=0),
        (ones(3), zeros(3)),
    ),
    "index_select of one": (lambda x, i: x.index_select(0, i), (ones(), zeros(1))),
    "index_add of nothing": (
        lambda x, i, y: x.index_add(0, i, y),
        (ones(4, 0), zeros(1), ones(1, 0)),
    ),
    "a weight that fits": (
        F.binary_cross_entropy,
        (torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)),
    ),
    "a bool times bools": (lambda x: torch.add(x, x, alpha=True), (ones(3) > 0,)),
    "nan_to_num": (
        lambda x: torch.nan_to_num(x.conj(), 2.0, neginf=-1.0),
        (torch.complex(ones(3) * float("nan"), torch.tensor([0.5, float("inf"), -float("inf")])),),
    ),
    "group_norm of no channels": (lambda x: F.group_norm(x, 2), (ones(2, 0, 5),)),
    "bytes": (lambda x: F.interpolate(x, size=5), (torch.arange(12).reshape(1, 1, 3, 4).byte(),)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_dtypes_and_sizes_of_results_are_eagers(name: str) -> None:
    fn, given = RESULTS[name]
    want = fn(*given)
    for compiled in ways(fn):
        torch.testing.assert_close(compiled(*given), want, atol=2e-3, rtol=2e-3)


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add, "sub": operator.sub, "rsub": torch.rsub, "mul": operator.mul,
    "div": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "pow": operator.pow, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "left": torch.bitwise_left_shift, "right": torch.bitwise_right_shift, "eq": operator.eq,
    "lt": operator.lt, "clamp": torch.clamp, "clamp_max": torch.clamp_max, "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py, "lerp": lambda x, y: torch.lerp(x, x + x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, x, value=y), "where": lambda x,
    y: torch.where(x == 1, y, x),
}  # fmt: skip


@pytest.mark.parametrize("name", _NUMBERS)
def test_numbers_beside_tensors_are_refused_or_promoted_as_eager_does(name: str) -> None:
    dtypes = (torch.bool, torch.uint8, torch.int64, torch.float32)
    for dtype, number, first in itertools.product(dtypes, (True, 2, 2.5, 1j), (False, True)):
        x = ones(3, dtype=dtype)

        def fn(x: torch.Tensor, number: Any = number, first: bool = first) -> torch.Tensor:
            made: torch.Tensor = _NUMBERS[name](*((number, x) if first else (x, number)))
            return made

        want = raised(lambda xs, f=fn: f(*xs), (x,))
        if isinstance(want, TypeError):
            continue  # there is no such overload
        if want is None:
            torch.testing.assert_close(plait.compile(fn, (x,))(x), fn(x))
            continue
        got = raised(lambda xs, f=fn: plait.compile(f, xs)(*xs), (x,))
        said = f"{dtype} {number} {first}: eager {want!r}, plait {got!r}"
        assert got is not None and caught_as(got, kind_of(want)), said


_ELEMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "masked_fill": lambda x, n: x.masked_fill(x == 1, n),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((2,), n),
    "add": lambda x, n: torch.add(x, x, alpha=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "pow": torch.pow,
    "where": lambda x, n: torch.where(x == 1, n, x),
    "clamp": lambda x, n: x.clamp(max=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "compare": torch.lt,
    "multiply": torch.mul,
}


@pytest.mark.parametrize("name", _ELEMENTS)
def test_numbers_that_elements_cannot_hold_are_refused_as_eager_refuses_them(name: str) -> None:
    numbers = (-1, 300, 2**40, 1e300, float("inf"))
    for dtype, number in itertools.product((torch.uint8, HALF), numbers):
        x = ones(3, dtype=dtype)

        def fn(x: torch.Tensor, number: Any = number) -> torch.Tensor:
            made: torch.Tensor = _ELEMENTS[name](x, number)
            return made

        want = raised(lambda xs, f=fn: f(*xs), (x,))
        got = raised(lambda xs, f=fn: plait.compile(f, xs)(*xs), (x,))
        said = f"{dtype} {number}: eager {want!r}, plait {got!r}"
        assert (want is None) == (got is None), said
        assert want is None or caught_as(got, kind_of(want)), said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["layer", "group", "batch"])
def test_norms_of_half_with_single_weights_train(norm: str, dtype: torch.dtype) -> None:
    made: dict[str, Callable[..., torch.Tensor]] = {
        "layer": lambda x, w: F.layer_norm(x, (4,), w, w),
        "group": lambda x, w: F.group_norm(x, 2, w, w),
        "batch": lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
    }
    fn = made[norm]
    grads = []
    for f in (fn, torch.compile(fn, backend="plait")):
        torch.manual_seed(0)
        x, w = torch.randn(8, 4).to(dtype).requires_grad_(), torch.rand(4, requires_grad=True)
        out = f(x, w)
        (out.float() * torch.arange(4.0)).sum().backward()
        grads.append((out, x.grad, w.grad))
    torch.testing.assert_close(grads[1], grads[0], atol=3e-2, rtol=3e-2)


# ----------------------------------------------------------------------------- sizes found in a run
def _found(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, i[i >= 0])


def test_sizes_found_in_a_run_are_looked_at_when_it_runs() -> None:
    one = torch.tensor([-1, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(_found, backend="plait", fullgraph=True)
        for program in (compiled, plait.compile(_found, (ones(), one))):
            assert torch.equal(program(ones(), one), ones())
            for several in (zeros(2), zeros(2) - 1):
                with pytest.raises(RuntimeError):
                    program(ones(), several)


def test_a_size_that_fits_no_more_is_refused() -> None:
    compiled = torch.compile(F.soft_margin_loss, backend="plait", dynamic=True)
    compiled(ones(3, 4), ones(4))
    compiled(ones(5, 4), ones(4))
    with pytest.raises(OperandError):
        compiled(ones(4), ones(6, 4))


BEYOND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "memory": lambda x: (x + 1).as_strided((3,), (2,), 1),
    "elements": lambda x: (x + 1).as_strided((3,), (2,), 1) * 2,
    "bits": lambda x: (x + 1).view(torch.int16).as_strided((6,), (2,), 1),
    "a copy": lambda x: torch.as_strided_copy(x + 1, (3,), (2,), 1),
    "no elements": lambda x: (x + 1).as_strided((0,), (2,), 100),
    "a part": lambda x: torch.as_strided_copy((x + 1)[1:], (2,), (x.shape[0] - 3,)),
}


@pytest.mark.parametrize("road", ["dynamo", "direct", "package"])
@pytest.mark.parametrize("name", BEYOND)
def test_memory_is_looked_at_for_sizes_that_vary(name: str, road: str, tmp_path: Path) -> None:
    fn, shapes = BEYOND[name], ({0: torch.export.Dim.AUTO},)
    if road == "dynamo":
        run: Callable[..., Any] = torch.compile(fn, backend="plait", dynamic=True)
    elif road == "direct":
        run = plait.compile(fn, (rows(8),), shapes)
    else:
        plait.package(fn, tmp_path / "p", (rows(8),), shapes)
        run = plait.load(tmp_path / "p")
    for n in (8, 6, 5, 9, 7):
        want = raised(lambda xs: fn(*xs), (rows(n),))
        got = raised(lambda xs: run(*xs), (rows(n),))
        if want is None:
            assert got is None and torch.equal(run(rows(n)), fn(rows(n)))
        else:
            assert got is not None and caught_as(got, kind_of(want)), f"eager {want!r}, {got!r}"


# ---------------------------------------------------------------------------------------- the sweep
def test_changes_of_a_sample() -> None:
    leaves = [ones(2, 3), 3, 0.5, True, "mean", zeros(2)]
    found = [what for what, _ in changed(Case(lambda x: x, leaves, None, [0, 5]))]  # type: ignore[arg-type]
    assert {
        "leaf 0 narrow 0",
        "leaf 0 empty 1",
        "leaf 1 3 -> -7",
        "leaf 2 0.5 -> nan",
        "leaf 5 + 9",
    } <= set(found)
    assert not [w for w in found if w.startswith(("leaf 3", "leaf 4"))]


@pytest.mark.parametrize("name", ["cummax", "nn.functional.smooth_l1_loss"])
def test_no_changed_sample_goes_otherwise(name: str) -> None:
    got = compare_unfit(_op(name), torch.float32)
    assert got["asked"] > 0 and got["rows"] == []


def test_the_table_counts_crashes() -> None:
    text = unfit_table(
        {"a/bool": lost("the process ended with -11"), "b/bool": {"asked": 3, "rows": []}}, 7
    )
    assert (
        "| 3 | 0 | 0 | 1 |" in text
        and "the process ended with -11" in text
        and "| b/bool | 3 | 0 | 0 | 0 |" in text
    )
    assert "of 2 ops and dtypes out of 7" in text
    assert "unfit/cummax/float32" in set(all_cases(["unfit"]))
