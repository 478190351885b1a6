"""What eager refuses, plait refuses with the same kind of error before a kernel runs; what eager
runs, it runs.

Eager is the oracle: the list in `plait/graph/eager_dtypes.txt` only saves questions to it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import plait
import plait.lower
from plait.errors import OperandError, Unsupported, UserError
from plait.graph.refuse import LIST, Taken, check_dtypes, read_list
from plait.lower.core import RULES
from plait.lower.graph import load_rules
from tests.eager_dtypes import DTYPES, Call, by_operator, mixed, ops, recorded, uniform
from tests.error_inputs import ALIKE, caught_as, compare, is_torchs_own, kind_of, raised
from tests.opinfo_tools import name_of

warnings.filterwarnings("ignore", category=UserWarning)

TAKEN = read_list(LIST.read_text())
F16, BF16, F32, F64, I32, I64 = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
)  # fmt: skip


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# ------------------------------------------------------------------------------- the list, by eager
# A question with zeros as pivots or lengths is in vain: these are calls of ATen, which refuses when
# it runs.
IN_VAIN = ("aten.linalg_ldl_solve", "aten.linalg_lu_solve", "aten.lu_unpack", "aten.segment_reduce")


def variants(call: Call, taken: Taken) -> Iterator[Call]:
    """The call in other dtypes: all alike, one apart, other indices."""
    for dtype in DTYPES:
        yield uniform(call, taken.others, dtype)
    for one in (F16, F64, I64, torch.bool):
        yield from mixed(call, taken.others, one, F32)
    yield from mixed(call, taken.others, F32, BF16)
    for name in taken.others:
        for dtype in (
            (I32, F32) if name == "indices" else (torch.bool, torch.uint8, I32, F32)
        ):  # no masks
            yield call.cast(lambda n, _, x, name=name, dtype=dtype: dtype if n == name else x.dtype)


def refused(call: Call, taken: Taken) -> Exception | None:
    try:
        check_dtypes(call.op, taken, call.args, call.kwargs)
    except OperandError as error:
        return error
    return None


def disagreements(found: list[Call]) -> list[str]:
    """Where plait refuses what eager runs, or the other way round, or by another class of error."""
    out = []
    for name, calls in by_operator(found).items():
        taken = TAKEN.get(name)
        for call in calls if taken is not None and not name.startswith(IN_VAIN) else ():
            assert taken is not None
            call = call.filled()
            if call.error() is not None:
                continue  # ones are no good
            for changed in variants(call, taken):
                want, got = changed.error(), refused(changed, taken)
                if (want is None) != (got is None) or (
                    want is not None and not caught_as(got, kind_of(want))
                ):
                    dtypes = [str(x.dtype) for _, x in changed.tensors()]
                    out.append(f"{name} {dtypes}: eager {want!r}, plait {got!r}")
    return out


SOME = (
    "addmm",
    "index_add",
    "nn.functional.layer_norm",
    "nn.functional.conv2d",
    "lerp",
    "sub",
    "argmax",
    "nn.functional.nll_loss",
    "index_put",
    "nn.functional.batch_norm",
    "gather",
    "div.floor_rounding",
)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.slow] * (name_of(op) not in SOME), id=name_of(op))
        for op in ops()
    ],
)
def test_dtypes_are_refused_as_eager_refuses_them(op: Any) -> None:
    found = disagreements(list(recorded(op, 4)))
    assert not found, "\n".join(found[:10])


def test_operators_that_are_asked_about_in_vain_are_calls_of_aten() -> None:
    load_rules()
    called = (Path(plait.lower.__file__).parent / "extern_ops.txt").read_text()
    for name in (n for n in TAKEN if n.startswith(IN_VAIN)):
        _, packet, overload = name.split(".")
        assert (
            getattr(getattr(torch.ops.aten, packet), overload) not in RULES
            or f"aten::{packet}\n" in called
        )


def test_the_plainest_index_is_no_mask() -> None:
    """Masks of zeros select nothing: whatever is put there eager refuses, and the question would be
    in vain."""
    assert TAKEN["aten.index_put.default"].others["indices"][-1] == I64
    for index in (i4, i4.int(), i4.float()):
        given = (ones(4), [index], ones(4, dtype=F64))
        with pytest.raises(OperandError, match="index_put"):
            check_dtypes(
                torch.ops.aten.index_put.default, TAKEN["aten.index_put.default"], given, {}
            )


def test_a_question_that_is_in_vain_for_another_reason_is_an_answer() -> None:
    """No dtype of an index selects from nothing, but eager looks at the dtype first."""
    given = (ones(0, 3), 0, ones(4))
    with pytest.raises(OperandError, match="index_select"):
        check_dtypes(
            torch.ops.aten.index_select.default, TAKEN["aten.index_select.default"], given, {}
        )


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "mm": (torch.mm, ((3, 4), (4, 5)), "addmm_cuda"),
    "addmm": (torch.addmm, ((5,), (3, 4), (4, 5)), "addmm_cuda"),
    "addbmm": (torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5)), "addmm_cuda"),
    "linear": (F.linear, ((2, 3, 4), (5, 4), (5,)), "addmm_cuda"),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 5)), "baddbmm_cuda"),
    "baddbmm": (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (2, 4, 5)), "baddbmm_cuda"),
    "einsum": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        ((2, 3, 4), (2, 4, 5)),
        "baddbmm_cuda",
    ),
    "mv": (torch.mv, ((3, 4), (4,)), "addmv_impl_cuda"),
    "addmv": (torch.addmv, ((3,), (3, 4), (4,)), "addmv_impl_cuda"),
    "dot": (torch.dot, ((4,), (4,)), "dot"),
    "vdot": (torch.vdot, ((4,), (4,)), "dot"),
}
"""Products, shapes of their operands, and what eager calls their kernels on a GPU."""


class Checked(TorchDispatchMode):
    """Looks at dtypes as tracing does, at each operator that is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in TAKEN:
            check_dtypes(func, TAKEN[str(func)], args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_integers_on_a_gpu_are_refused_without_one(name: str) -> None:
    fn, shapes, kernel = PRODUCTS[name]

    def multiplied(dtype: torch.dtype, device: str) -> None:
        with FakeTensorMode():
            given = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
            with Checked():
                fn(*given)

    words = {torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", I32: "Int", I64: "Long"}
    for dtype, word in words.items():
        with pytest.raises(
            OperandError, match=f"\"{kernel}\" not implemented for '{word}'"
        ) as caught:
            multiplied(dtype, "cuda")
        assert isinstance(caught.value, NotImplementedError)
        multiplied(dtype, "cpu")
    for dtype in (F16, BF16, F32, F64):
        multiplied(dtype, "cuda")


def test_empty_products_of_integers_on_a_gpu_are_not_refused() -> None:
    with FakeTensorMode():
        empty, full, none = (torch.empty(n, 4, dtype=I64, device="cuda") for n in (0, 3, 0))
        with Checked():
            assert torch.mm(empty, full.t()).shape == (0, 3)
            assert torch.mm(empty.t(), none).shape == (4, 4)


def test_the_list_is_of_operators() -> None:
    assert len(TAKEN) > 200
    found = torch.ops.aten
    assert all(hasattr(getattr(found, name.split(".")[1]), name.split(".")[2]) for name in TAKEN)
    assert {name_of(op) for op in ops()} >= set(SOME)


# ----------------------------------------------------------------------------------- whole programs
i4 = torch.arange(4)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "int @ float": (lambda a, b: a @ b, (ones(3, 4, dtype=I64), ones(4, 5))),
    "f32 @ f16": (lambda a, b: a @ b, (ones(3, 4), ones(4, 5, dtype=F16))),
    "f32 @ f64": (lambda a, b: a @ b, (ones(3, 4), ones(4, 5, dtype=F64))),
    "bool @ bool": (lambda a, b: a @ b, (ones(3, 4).bool(), ones(4, 5).bool())),
    "half weight": (F.linear, (ones(3, 4), ones(5, 4, dtype=F16))),
    "half bias": (F.linear, (ones(3, 4), ones(5, 4), ones(5, dtype=F16))),
    "addmm": (torch.addmm, (ones(5, dtype=F64), ones(3, 4), ones(4, 5))),
    "mv": (lambda a, b: a @ b, (ones(3, 4), ones(4, dtype=F16))),
    "probabilities above 1": (F.binary_cross_entropy, (ones(4) * 2, ones(4))),
    "targets above 1": (F.binary_cross_entropy, (ones(4), ones(4) * 2)),
    "rows of nothing": (lambda x, i: x.index_select(1, i), (ones(0, 0), i4)),
    "dot": (lambda a, b: a @ b, (ones(4), ones(4, dtype=F64))),
    "bmm": (torch.bmm, (ones(2, 3, 4), ones(2, 4, 5, dtype=F64))),
    "baddbmm": (torch.baddbmm, (ones(2, 3, 5, dtype=F64), ones(2, 3, 4), ones(2, 4, 5))),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (ones(3, 4), ones(4, 5, dtype=F64))),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w), (ones(3, 4), ones(4, dtype=F16))),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (ones(3, 4, 2), ones(4, dtype=F64))),
    "batch_norm": (
        lambda x, m, v: F.batch_norm(x, m, v),
        (ones(3, 4), ones(4, dtype=F64), ones(4, dtype=F64)),
    ),
    "batch_norm in training": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        (ones(3, 4), ones(4, dtype=F16), ones(4, dtype=F16)),
    ),
    "conv": (F.conv2d, (ones(1, 2, 4, 4), ones(3, 2, 1, 1), ones(3, dtype=F64))),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (ones(4), i4, ones(4, dtype=F64))),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (ones(4), i4, ones(4, dtype=F16))),
    "index_put": (lambda x, i, s: x.index_put((i,), s), (ones(4), i4, ones(4, dtype=F64))),
    "mask of another size": (
        lambda x, m: x.index_put((m,), torch.tensor(3.0)),
        (ones(100, 4), ones(8).bool()),
    ),
    "mask that is longer": (
        lambda x, m: x.index_put((m,), torch.tensor(3.0)),
        (ones(1, 4), ones(8).bool()),
    ),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), (ones(4), i4.int())),
    "index_select": (lambda x, i: x.index_select(0, i), (ones(4), i4.float())),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), (ones(4), i4, ones(4, dtype=F64))),
    "gather": (lambda x, i: x.gather(0, i), (ones(4), i4.float())),
    "embedding": (F.embedding, (i4.float(), ones(4, 3))),
    "cdist": (torch.cdist, (ones(3, 4), ones(5, 4, dtype=F64))),
    "cross_entropy": (F.cross_entropy, (ones(4, 3), torch.ones(4, dtype=I32))),
    "softmax of integers": (lambda x: x.softmax(0), (i4,)),
    "argmax of bool": (lambda x: x.argmax(), (ones(4).bool(),)),
    "sub of bool": (lambda x, y: x - y, (ones(4).bool(), ones(4))),
    "lerp": (lambda x, y: x.lerp(y, 0.5), (ones(4), ones(4, dtype=F64))),
    "attention": (
        F.scaled_dot_product_attention,
        (ones(1, 1, 3, 4), ones(1, 1, 3, 4, dtype=F16), ones(1, 1, 3, 4)),
    ),
    "foreach": (lambda x, y: torch._foreach_lerp([x], [y], 0.5), (ones(4), ones(4, dtype=F64))),
    "add to an expanded tensor": (lambda x: x.expand(3, 4).add_(1), (ones(4),)),
    "+= to an expanded tensor": (lambda x: x.expand(3, 4).__iadd__(1), (ones(4),)),
    "copy that overlaps": (lambda x: x[1:].copy_(x[:-1]), (ones(4),)),
    "assignment that overlaps": (lambda x: x.__setitem__(slice(1, None), x[:-1]), (ones(4),)),
    "scatter that overlaps": (lambda x, i: x.scatter_(0, i, x[1:]), (ones(4), i4[:3])),
    "out that overlaps": (lambda x: torch.add(x[1:], 1, out=x[:-1]), (ones(4),)),
    "product of integers by a float": (lambda x: x.mul_(2.5), (i4,)),
    "product of a value": (lambda x: (x + 1).mul_(2.5), (i4,)),
    "product of bools by an integer": (lambda x: x.mul_(2), (i4 > 1,)),
    "sum of integers and floats": (lambda x, y: x.add_(y), (i4, ones(4))),
    "*= of integers": (lambda x, y: x.__imul__(y), (i4, ones(4))),
    "sum of floats and a complex number": (lambda x: x.add_(1j), (ones(4),)),
    "sum of floats and complex numbers": (
        lambda x, y: x.add_(y),
        (ones(4), ones(4, dtype=torch.complex64)),
    ),
    "product of a row": (lambda x: x[0].mul_(2.5), (i4.view(2, 2),)),
    "product of a part": (lambda x: x[1:].__imul__(2.5), (i4,)),
    "product of a transposed matrix": (lambda x: x.t().mul_(2.5), (i4.view(2, 2),)),
    "product by a number that is found": (lambda x, y: x.mul_(y.sum().item()), (i4, ones(4))),
    "addcmul of integers": (lambda x, y: x.addcmul_(y, y), (i4, ones(4))),
    "foreach of integers": (lambda x: torch._foreach_mul_([x, x + 1], 2.5), (i4,)),
    "operator by name": (lambda x: torch.ops.aten.mul_.Scalar(x, 2.5), (i4,)),
    "running sum of bools": (lambda x: x.cumsum_(0), (i4 > 1,)),
    "logit of integers": (lambda x: x.logit_(), (i4,)),
    "ldexp of integers": (lambda x, y: x.ldexp_(y), (i4, i4)),
    "sum into integers": (lambda x, y: torch.add(x, y, out=x), (i4, ones(4))),
    "root into integers": (lambda x: torch.sqrt(x, out=x), (i4,)),
    "product into doubles": (
        lambda x, y: torch.mm(y, y, out=x),
        (ones(4, 4, dtype=F64), ones(4, 4)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_programs_are_refused_when_they_are_compiled(name: str) -> None:
    fn, given = REFUSED[name]
    want = raised(lambda xs: fn(*xs), given)
    assert want is not None
    got = raised(lambda xs: torch.compile(fn, backend="plait")(*xs), given)
    assert got is not None and caught_as(got, kind_of(want)), f"eager {want!r}, plait {got!r}"
    early = raised(lambda xs: plait.compile(fn, tuple(xs))(*xs), given)
    assert early is not None and caught_as(early, kind_of(want)), (
        f"eager {want!r}, plait.compile {early!r}"
    )


def test_a_refusal_says_where_and_why() -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * 2) @ b

    given = ones(3, 4), ones(4, 5, dtype=F16)
    line = program.__code__.co_firstlineno + 1
    text = rf"(?s)aten\.mm\.default\(self: float32, mat2: float16\): .*at test_refuse\.py:{line}"
    for compiled in (
        lambda: torch.compile(program, backend="plait")(*given),
        lambda: plait.compile(program, given),
    ):
        with pytest.raises(RuntimeError, match=text) as info:
            compiled()
        assert isinstance(info.value, OperandError) and isinstance(info.value, UserError)


def test_a_refused_write_says_where() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.expand(3, 4).mul_(2)

    where = re.escape(f"test_refuse.py:{program.__code__.co_firstlineno + 1}")
    with pytest.raises(OperandError, match=f"(?s)more than one element.*{where}"):
        torch.compile(program, backend="plait")(ones(4))
    with pytest.raises(OperandError, match=f"(?s)more than one element.*{where}"):
        plait.compile(program, (ones(4),))


def filled(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().expand(3, 4)
    y.fill_(5)
    return y + x


def windows(x: torch.Tensor) -> torch.Tensor:
    y = x.clone().as_strided((3, 2), (1, 1))
    y.mul_(2)
    return y + 0


@pytest.mark.parametrize("fn", [filled, windows])
def test_a_write_that_tracing_gets_wrong_is_no_wrong_number(fn: Callable[..., Any]) -> None:
    """Eager allows it; functionalised, the elements that share memory are changed more than once,
    or less often."""
    assert not torch.equal(fn(ones(4)), torch.compile(fn, backend="aot_eager")(ones(4)))
    try:
        got = torch.compile(fn, backend="plait")(ones(4))
    except Unsupported:
        return
    torch.testing.assert_close(got, fn(ones(4)))


@pytest.mark.parametrize("rows", [ones(2, 3, 5), ones(3, 2, 5).transpose(0, 1), ones(5)])
def test_a_bias_that_the_product_cannot_hold_is_refused(rows: torch.Tensor) -> None:
    """Eager adds it in place, inside `linear`."""
    given = rows.int(), ones(4, 5).int(), ones(1).half().expand(4)
    with pytest.raises(RuntimeError, match="can't be cast"):
        F.linear(*given)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.compile(F.linear, backend="plait")(*given)
    with pytest.raises(RuntimeError, match="can't be cast"):
        plait.compile(lambda x, w, b: F.linear(x, w, b), given)


def placed_later(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.as_strided((3, 2), (2, 1), 4) * 2


def written_at_its_place(x: torch.Tensor) -> torch.Tensor:
    y = x.as_strided((3, 2), (2, 1), 4)
    y.add_(1)
    return y * 2


def placed_before(x: torch.Tensor) -> torch.Tensor:
    y = x.as_strided((3, 2), (2, 1), storage_offset=0)[1:]
    x.add_(1)
    return y * 2


@pytest.mark.parametrize("fn", [placed_later, written_at_its_place, placed_before])
def test_a_place_in_memory_that_is_written_is_no_wrong_number(fn: Callable[..., Any]) -> None:
    """The input begins elsewhere in its storage; AOTAutograd counts from where it begins."""
    memory = torch.arange(24.0)
    expected, given = memory.clone(), memory.clone()
    want = fn(expected[3:15].view(3, 4))
    got = torch.compile(fn, backend="plait", options={"strict": False})(given[3:15].view(3, 4))
    assert torch.equal(got, want)
    assert torch.equal(given, expected)
    with pytest.raises(Unsupported, match="where it begins"):
        plait.compile(fn, (memory[3:15].view(3, 4),))


def of_a_part(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, 1, 1).add_(1)


def test_a_write_to_a_part_of_an_argument_whose_elements_share_memory() -> None:
    """Eager writes the part; a compiled program would have to write the whole argument back."""
    x = ones(1, 3).expand(5, 3)
    with pytest.raises(Unsupported, match="share memory"):
        plait.compile(of_a_part, (x,))
    torch.compile(of_a_part, backend="plait", options={"strict": False})(x)
    assert torch.equal(x, torch.full((5, 3), 2.0))


WINDOWS = {
    "gaps": lambda x: x.unfold(1, 1, 2).neg_(),
    "a rest": lambda x: x.unfold(1, 2, 2).mul_(3),
    "a view of them": lambda x: x.unfold(1, 2, 3)[0].zero_(),
    "assigned": lambda x: x.unfold(1, 1, 2).select(2, 0).__setitem__(0, 5.0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_write_to_windows_that_leave_elements_out(name: str) -> None:
    """PyTorch's tracing puts zeros between them."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        WINDOWS[name](x)
        return x * 2

    with pytest.raises(Unsupported, match="windows"):
        plait.compile(fn, (ones(3, 7),))
    given, mine = torch.arange(21.0).view(3, 7), torch.arange(21.0).view(3, 7)
    got = torch.compile(fn, backend="plait", options={"strict": False})(mine)
    assert torch.equal(got, fn(given)) and torch.equal(mine, given)


def to_windows_of_each_row(x: torch.Tensor) -> torch.Tensor:
    def fn(row: torch.Tensor) -> torch.Tensor:
        made = row.clone()
        made.unfold(0, 1, 2)[:, 0].neg_()
        return made

    return torch.vmap(fn)(x)


def test_a_write_to_windows_of_a_batch_that_leave_elements_out() -> None:
    x = torch.arange(21.0).view(3, 7)
    with pytest.raises(Unsupported, match="windows"):
        plait.compile(to_windows_of_each_row, (x,))
    with pytest.raises(Unsupported, match="windows"):
        torch.compile(to_windows_of_each_row, backend="plait")(x)
    got = torch.compile(to_windows_of_each_row, backend="plait", options={"strict": False})(x)
    assert torch.equal(got, to_windows_of_each_row(x))


WINDOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch": lambda x: torch.vmap(lambda row: row.unfold(0, 2, 1).prod(1).sum())(x),
    "gradient": lambda x: torch.func.grad(lambda x: x.unfold(0, 2, 1).prod(2).sum())(x),
    "batch of gradients": lambda x: torch.vmap(
        torch.func.grad(lambda row: row.unfold(0, 2, 1)[1:].prod(1).sum())
    )(x),
    "tangents": lambda x: torch.func.jvp(lambda x: x.unfold(0, 2, 1).prod(2), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_inside_of_transforms(name: str) -> None:
    x, fn = torch.randn(4, 5), WINDOWED[name]
    torch.testing.assert_close(torch.compile(fn, backend="plait")(x), fn(x))
    torch.testing.assert_close(plait.compile(fn, (x,))(x), fn(x))


def test_a_write_to_windows_that_have_all_elements() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.unfold(1, 2, 2).neg_()
        return x.unfold(1, 1, 2) + 1

    for run in (plait.compile(fn, (ones(3, 6),)), torch.compile(fn, backend="plait")):
        given, mine = torch.arange(18.0).view(3, 6), torch.arange(18.0).view(3, 6)
        assert torch.equal(run(mine), fn(given)) and torch.equal(mine, given)


def through_windows(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).unfold(0, 2, 1)
    y[:1].zero_()
    return y


def test_a_write_to_a_view_of_elements_that_share_memory() -> None:
    """The view has none itself. PyTorch's tracing refuses to write through it."""
    with pytest.raises(Unsupported, match="share memory"):
        plait.compile(through_windows, (ones(5),))
    got = torch.compile(through_windows, backend="plait", options={"strict": False})(ones(5))
    torch.testing.assert_close(got, through_windows(ones(5)))


@pytest.mark.parametrize("given", [ones(2, 3), ones(4, 3).int()])
def test_mistakes_without_dynamo_are_of_eagers_class(given: torch.Tensor) -> None:
    """Where tracing raises, eager says what it thinks of the example."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return ones(4)[x.sum(1) * 0.5]

    want = raised(lambda xs: fn(xs[0]), (given.clone(),))
    assert isinstance(want, IndexError)
    before = given.clone()
    with pytest.raises(IndexError, match="tensors used as indices") as caught:
        plait.compile(fn, (given,), ({0: torch.export.Dim.AUTO},))
    assert "raised while plait.compile traced fn, at " in str(caught.value.__notes__)
    assert torch.equal(given, before)


def autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return F.layer_norm(x @ w, (5,), torch.ones(5))


def shifted(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = y[1]
    y[2:].copy_(y[:2])
    y.mul_(y)
    return y


TAKES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "promotion": (lambda a, b, c: a * b + c - 1, (ones(4, dtype=F16), ones(4), i4)),
    "number of another dtype": (lambda a: a @ a * torch.tensor(2.0, dtype=F64), (ones(4, 4),)),
    "norm of bf16 with float32 weights": (
        lambda x, w: F.layer_norm(x, (4,), w, w),
        (ones(3, 4, dtype=BF16), ones(4)),
    ),
    "batch norm of bf16 with float32 state": (
        F.batch_norm,
        (ones(3, 4, dtype=BF16), ones(4), ones(4)),
    ),
    "autocast": (autocast, (ones(3, 4), ones(4, 5))),
    "int32 index": (lambda x, i: x[i] + x.index_select(0, i), (ones(4), i4.int())),
    "mask": (lambda x, m: torch.where(m, x, 0.0).masked_fill(~m, 2.0), (ones(4), i4 > 1)),
    "integer division": (lambda x: torch.div(x, 2, rounding_mode="floor") + x % 3, (i4,)),
    "element of another dtype": (
        lambda x, v: x.index_put((i4[:1],), v.to(x.dtype)),
        (ones(4), ones(dtype=F64)),
    ),
    "shift within a tensor": (shifted, (ones(4),)),
    "bits of what shares memory": (
        lambda x, y: (x & y) | (y | x),
        (ones(1, 3).bool().expand(4, 3), ones(4, 3).bool()),
    ),
    "index into nothing": (lambda x, i, s: x.index_add(1, i, s), (ones(4, 0), i4, ones(4, 4))),
    "part of one element": (
        lambda x, i: x.narrow(0, i.item(), 1).clone().cumsum_(0),
        (ones(1, 1).expand(5, 1), torch.tensor(2)),
    ),
    "shapes in place": (lambda x: x.expand(3, 4).detach().t_() + 1, (ones(4),)),
    "floats into integers": (
        lambda x, y: x.clone().copy_(y).masked_fill_(y > 0, 2.5),
        (i4, ones(4)),
    ),
    "an element of integers": (
        lambda x: x.clone().index_fill_(0, x[:1], 2.5).__setitem__(0, 7.5),
        (i4,),
    ),
    "comparison in place": (lambda x, y: x.clone().lt_(y).add_(1), (i4, ones(4))),
    "bools in place": (lambda x: x.clone().bitwise_and_(1 > 0).logical_or_(x), (i4 > 1,)),
    "halves in place": (
        lambda x, y: x.clone().add_(y).mul_(0.5).div_(i4 + 1),
        (ones(4, dtype=F16), ones(4)),
    ),
    "sum into floats": (lambda x, y: torch.add(x, x, out=y.clone()), (i4, ones(4))),
}


@pytest.mark.parametrize("name", TAKES)
def test_programs_that_eager_runs_are_run(name: str) -> None:
    fn, given = TAKES[name]
    torch.testing.assert_close(torch.compile(fn, backend="plait")(*given), fn(*given))
    torch.testing.assert_close(plait.compile(fn, given)(*given), fn(*given))


def test_asking_eager_draws_no_numbers_and_leaves_modes() -> None:
    """A question may be about a random operator."""
    torch.manual_seed(0)
    want = torch.normal(ones(4, dtype=F64), 1.0), torch.rand(2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError):
        check_dtypes(
            torch.ops.aten.normal.Tensor_float, TAKEN["aten.normal.Tensor_float"], (i4, 1.0), {}
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert want[0].dtype == F64


# --------------------------------------------------------------------------- PyTorch's wrong inputs
WRONG = [op for op in op_db if op.error_inputs_func is not None]
FEW = (
    "aminmax",
    "cat",
    "complex",
    "masked_scatter",
    "gather",
    "index_select",
    "nn.functional.conv2d",
    "nn.functional.hardtanh",
    "scatter_add",
    "take",
)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.slow] * (name_of(op) not in FEW), id=name_of(op))
        for op in WRONG
    ],
)
def test_error_inputs_are_refused_alike(op: Any) -> None:
    """Or as torch's own tracing comes to: the table of `python -m tests.sweep errors` lists
    those."""
    rows = compare(op)
    wrong = [row for row in rows if row["verdict"] != ALIKE and not is_torchs_own(row)]
    assert not wrong, wrong


def test_there_are_error_inputs() -> None:
    assert len(WRONG) > 200 and {name_of(op) for op in WRONG} >= set(FEW)
    assert all(compare(op) for op in WRONG if name_of(op) in ("gather", "cat"))
