"""`plait.compile`: programs against eager, what it checks and how it says so, state, dynamic sizes,
signatures."""

from __future__ import annotations

import copy
import functools
import gc
import math
import operator
import pickle
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops.map import map as hop_map
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim
from torch.fx.experimental.sym_node import SymNode
from torch.testing._internal.two_tensor import TwoTensor

import plait
from plait.capture.sources import source_of
from plait.capture.trace import trace
from plait.config import Config
from plait.errors import InputError, Unsupported, UserError
from tests.against_eager import sharing, tree_equal

X = torch.linspace(-1, 1, 24).view(4, 6)
Y = torch.linspace(1, 2, 24).view(4, 6)


def agrees(fn: Callable[..., Any], *calls: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """plait.compile on the first call's arguments, compared with eager on all of them."""
    run = plait.compile(fn, calls[0], **kwargs)
    for args in calls:
        with torch.no_grad():
            want = fn(*args)
        for _ in range(2):
            out = run(*args)
            tree_equal(out, want, "result")
            assert sharing(args, out) == sharing(args, want)
    return run


CASES: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "pointwise": (lambda x, y: (x + y).tanh(), (X, Y)),
    "matmul": (lambda x, y: F.gelu(x @ y.t()).softmax(-1), (X, Y)),
    "tuple": (lambda x, y: (x + y, x - y), (X, Y)),
    "list": (lambda x, y: [x + y, x - y], (X, Y)),
    "one-tuple": (lambda x: (x + 1,), (X,)),
    "nested": (lambda x, y: {"a": [x + y, (x * y,)], "b": None, "c": 3}, (X, Y)),
    "nested arguments": (lambda d: d["a"] * d["b"][0] + d["b"][1], ({"a": X, "b": [Y, 2.0]},)),
    "constants among arguments": (lambda x, n, flag: x * n if flag else x, (X, 3, True)),
    "None among arguments": (lambda x, m: x if m is None else x * m, (X, None)),
    "view of input": (lambda x: x.t(), (X,)),
    "input": (lambda x: x, (X,)),
    "size": (lambda x: (x.shape[0], x.sum()), (X,)),
    "constant tensor": (lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6]), (X,)),
    "no inputs": (lambda: torch.ones(3) * 2, ()),
    "zero elements": (lambda x: (x + 1).sum(0), (torch.ones(0, 6),)),
    "complex": (lambda x: torch.fft.rfft(x).abs(), (X,)),
    "transposed input": (lambda x: x + 1, (X.t(),)),
    "one input twice": (lambda x, y: x * y, (X, X)),
    "no grad inside": (lambda x: x.detach().exp(), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str) -> None:
    fn, args = CASES[name]
    agrees(fn, args)


@pytest.mark.parametrize("name", ["pointwise", "matmul", "nested", "view of input"])
def test_agrees_with_eager_as_python(name: str) -> None:
    fn, args = CASES[name]
    agrees(fn, args, options={"wrapper": "python"})


class Scaled:
    def __call__(self, x: Tensor, by: float = 2.0) -> Tensor:
        return x * by


BUILTINS: dict[str, Callable[..., Any]] = {
    "function": torch.add,
    "method": Tensor.add,
    "operator": operator.add,
    "overload": torch.ops.aten.add.Tensor,
    "overloads": torch.ops.aten.add,
    "partial": functools.partial(torch.add, alpha=2),
}


@pytest.mark.parametrize("name", BUILTINS)
def test_what_is_not_written_in_python_compiles(name: str) -> None:
    agrees(BUILTINS[name], (X, Y))
    with pytest.raises(InputError, match=r"input '.*': expected size"):
        plait.compile(BUILTINS[name], (X, Y))(X, Y[:1])


def test_a_callable_object_keeps_its_names() -> None:
    run = plait.compile(Scaled(), {"x": X, "by": 3.0})
    assert torch.equal(run(x=X, by=3.0), X * 3)
    with pytest.raises(InputError, match="input 'x'"):
        run(x=X[:1], by=3.0)


def test_models_know_that_they_are_traced() -> None:
    def fn(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() and torch.compiler.is_exporting() else x

    assert torch.equal(plait.compile(fn, (X,))(X), X + 1)
    assert torch.equal(fn(X), X)


def test_flat_signatures_are_the_native_callable_itself() -> None:
    from plait import _native

    for name in ("pointwise", "matmul", "tuple", "one-tuple", "one input twice"):
        fn, args = CASES[name]
        assert isinstance(plait.compile(fn, args), _native.Bound), name


def test_one_input_twice_is_two_inputs() -> None:
    run = plait.compile(lambda x, y: x * y, (X, X))
    torch.testing.assert_close(run(X, Y), X * Y)


def test_a_number_that_a_result_nobody_reads_tells() -> None:
    compiled = plait.compile(lambda x: x.nonzero().shape[0], (torch.tensor([1.0, 0.0, 2.0]),))
    assert [compiled(torch.tensor(v)) for v in ([1.0, 0.0, 2.0], [0.0] * 3, [1.0] * 3)] == [2, 0, 3]


def test_keywords() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    run = plait.compile(fn, (X, Y))
    torch.testing.assert_close(run(x=X, y=Y), X - Y)
    torch.testing.assert_close(run(X, y=Y), X - Y)
    run = plait.compile(fn, {"x": X, "y": Y})
    torch.testing.assert_close(run(y=Y, x=X), X - Y)


# -------------------------------------------------------------------------------------------- state
def test_modules_and_changes_of_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    run = agrees(model, (X,))
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(run(X), model(X).detach())
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    torch.testing.assert_close(run(X), model(X).detach())


def test_results_require_no_grad() -> None:
    run = plait.compile(nn.Linear(6, 3), (X,))
    assert not run(X).requires_grad and torch.is_grad_enabled()


def test_buffers_are_written_back() -> None:
    eager = nn.BatchNorm1d(6)
    model = copy.deepcopy(eager)
    run = plait.compile(model, (X,))
    assert int(model.num_batches_tracked) == 0, "compiling must not run the model"
    for _ in range(3):
        torch.testing.assert_close(run(X), eager(X).detach())
    tree_equal(dict(model.named_buffers()), dict(eager.named_buffers()), "buffer")


def test_mutated_arguments_are_written_back() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2

    x = X.clone()
    run = plait.compile(fn, (x, Y))
    assert torch.equal(x, X)
    torch.testing.assert_close(run(x, Y), (X + Y) * 2)
    torch.testing.assert_close(x, X + Y)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.embed(i))

    agrees(Tied(), (torch.tensor([1, 2]),))


def test_dropout_in_training_mode() -> None:
    run = plait.compile(nn.Dropout(0.5), (torch.ones(1000),))
    a, b = run(torch.ones(1000)), run(torch.ones(1000))
    assert set(a.tolist()) == {0.0, 2.0} and not torch.equal(a, b)


def test_transformer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    agrees(model, (torch.randn(2, 5, 32),))


# ------------------------------------------------------------------------------------ dynamic sizes
def test_dynamic_batch() -> None:
    batch = Dim("batch", min=2, max=64)
    run = agrees(
        lambda x, w: F.softmax(x @ w, -1),
        *((torch.randn(n, 6), X.t()) for n in (4, 2, 64)),
        dynamic_shapes={"x": {0: batch}, "w": None},
    )
    with pytest.raises(InputError, match="65"):
        run(torch.randn(65, 6), X.t())
    with pytest.raises(InputError, match=r"'x'.*expected size 6 in dimension 1, got 7"):
        run(torch.randn(4, 7), X.t())


def test_one_dim_in_two_inputs_must_agree() -> None:
    n = Dim("n")
    run = agrees(
        lambda x, y: x + y, (X, Y), (X[:2], Y[:2]), dynamic_shapes={"x": {0: n}, "y": {0: n}}
    )
    with pytest.raises(InputError, match="'y'"):
        run(X, Y[:2])


def test_derived_dimension() -> None:
    half = Dim("half")
    run = agrees(
        lambda x, y: x[: y.shape[0]] + y,
        *((torch.randn(2 * n, 3), torch.randn(n, 3)) for n in (4, 5)),
        dynamic_shapes={"x": {0: 2 * half}, "y": {0: half}},
    )
    with pytest.raises(InputError, match="sizes break a condition of the program"):
        run(torch.randn(9, 3), torch.randn(4, 3))


def test_derived_dimension_without_its_root() -> None:
    def pairs(x: Tensor) -> Tensor:
        return x.view(-1, 2, 3).sum(1)

    half = Dim("half", min=3, max=8)
    run = agrees(
        pairs, *((torch.randn(2 * n, 3),) for n in (4, 3, 8)), dynamic_shapes=({0: 2 * half},)
    )
    for n, condition in (
        (9, "(x.shape[0] % 2) == 0"),
        (4, "x.shape[0] >= 6"),
        (18, "x.shape[0] <= 16"),
    ):
        with pytest.raises(
            InputError,
            match=re.escape(f"break a condition of the program, {condition}: x ({n}, 3)"),
        ):
            run(torch.randn(n, 3))


def test_derived_dimensions_of_one_root_that_is_no_size() -> None:
    def fn(x: Tensor, d: dict[str, Tensor]) -> Tensor:
        return x.view(2, -1).sum(0) + d["y"].view(3, -1).sum(0) + d["z"][1:].view(2, -1).sum(0)

    h = Dim("h")
    run = agrees(
        fn,
        *(
            (torch.randn(2 * n), {"y": torch.randn(3 * n), "z": torch.randn(2 * n + 1)})
            for n in (4, 7)
        ),
        dynamic_shapes={"x": {0: 2 * h}, "d": {"y": (3 * h,), "z": {0: 2 * h + 1}}},
    )
    with pytest.raises(InputError, match=re.escape("(d['y'].shape[0] // 3) == (x.shape[0] // 2)")):
        run(torch.randn(8), {"y": torch.randn(15), "z": torch.randn(9)})


@pytest.mark.parametrize("n", [0, 1])
def test_an_example_that_torch_takes_for_the_only_size(n: int) -> None:
    with pytest.raises(UserError, match=f"of dimension 0, which is {n} in the example"):
        plait.compile(lambda x: x.sin(), (M[:n],), ({0: Dim.DYNAMIC},))


def test_automatic_dimension_with_a_condition() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.view(-1, 3, 2) + 1 if x.shape[0] % 3 == 0 else x

    run = agrees(
        fn, (torch.randn(6, 4),), (torch.randn(9, 4),), dynamic_shapes={"x": {0: Dim.AUTO}}
    )
    with pytest.raises(InputError, match="sizes break a condition of the program"):
        run(torch.randn(7, 4))


def test_arguments_of_another_kind_where_there_are_conditions() -> None:
    def fn(x: Tensor, n: int) -> Tensor:
        return x.view(x.shape[1], -1) * n if n % 3 == 1 else x

    x, auto = X[:, :3].clone(), Dim.AUTO
    run = plait.compile(fn, (x, 4), dynamic_shapes={"x": {0: auto, 1: auto}, "n": auto})
    assert torch.equal(run(x, n=7), fn(x, 7))
    for args, named, text in [
        ((3, 4), {}, "input 'x': expected a tensor, got int"),
        ((X[0], 4), {}, "input 'x': expected 2 dimensions, got 1"),
        ((x, X), {}, "input 'n': expected an int, got Tensor"),
        ((x,), {}, "input 'n' is missing"),
        ((x, 4), {"m": 4}, "there is no input 'm'"),
        ((x[:, :0], 4), {}, r"sizes break a condition of the program, .* x \(4, 0\), n 4"),
    ]:
        with pytest.raises(InputError, match=text):
            run(*args, **named)


M = torch.arange(48.0).view(6, 8)


@pytest.mark.parametrize(
    ("asks", "example", "fits", "breaks", "condition"),
    [
        (lambda x: x.shape[0] == 1, M, M[:2], M[:1], "x.shape[0] != 1"),
        (lambda x: x.shape[0] != 0, M, M[:1], M[:0], "x.shape[0] != 0"),
        (lambda x: not x.shape[0], M, M[:1], M[:0], "x.shape[0] != 0"),
        (lambda x: x.numel() > 8, M, M[:2], M[:1], "8*x.shape[0] > 8"),
        (lambda x: max(x.shape[0], 1) == 3, M, M[:1], M[:0], "x.shape[0] >= 1"),
        (lambda x: x.stride(1) == 1, M[:, :6:2], M[:2, :8:3], M[:2, :3], "x.stride(1) != 1"),
        (lambda x: x.stride(0) == 8, M[:, 2:5], M[:2, 3:6], M[:, :3].clone(), "x.stride(0) == 8"),
        (
            lambda x: x.is_contiguous(),
            M[:, :6:2],
            M[:2, :3],
            M[:1, :3],
            "not (x.stride(1) == 1 and (",
        ),
        (
            lambda x: x.t().is_contiguous(),
            M[:, :4].t(),
            M[:, :5].t(),
            M.t(),
            "x.stride(1) != x.shape[0]",
        ),
        (lambda x: x.storage_offset() == 0, M[:4], M[:3], M[1:], "x.storage_offset() == 0"),
        (
            lambda x: x[1:].storage_offset() == 16,
            M[1:4],
            M[1:5],
            M,
            "(8 + x.storage_offset()) == 16",
        ),
    ],
)
def test_what_a_program_asks_of_sizes_and_strides_holds_at_calls(
    asks: Callable[[Tensor], bool], example: Tensor, fits: Tensor, breaks: Tensor, condition: str
) -> None:
    """Also where a size or stride is 0 or 1, which tracing takes for 2 or more."""

    def fn(x: Tensor) -> Tensor:
        return x * 2 if asks(x) else x * 3

    run = agrees(fn, (example,), (fits,), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(InputError, match=re.escape(condition)):
        run(breaks)


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args)


def changed(x: Tensor, y: Tensor) -> Tensor:
    """x, once y, which may be a view of it, is written."""
    y.add_(1)
    return x


@pytest.mark.parametrize(
    ("fn", "example", "fits", "breaks"),
    [
        (lambda x: x.t().reshape(-1), M, M[:2], M[:1]),
        (lambda x: (lambda y: (y, y.t().flatten(), y.sum()))(x * 2), M, M[:2], M[:1]),
        (lambda x: changed(x, x.t().ravel()).sum(), M, M[:3], M[:1]),
        (lambda x: (lambda y: changed(y, y.t().contiguous()) + y)(x * 2), M, M[:2], M[:1]),
        (lambda x: (lambda y: changed(y.t().reshape(-1), y))(x * 2), M, M[:2], M[:1]),
        (lambda x: x.reshape(-1), M[:, :4], M[:2, :5], M.view(8, 6)),
        (
            lambda x: changed(x, x[:, :, None].reshape(-1, 2)) * 2,
            M[:, :4],
            M[:2, :4],
            M.view(12, 4),
        ),
        (lambda x: x.t().reshape(-1) + x.t().contiguous().view(-1), M, M[:1], None),
        (lambda x: changed((x * 2).t().reshape(-1), (x * 3).t().reshape(-1)), M, M[:1], None),
    ],
)
@pytest.mark.parametrize("exported", [False, True])
def test_views_where_the_example_has_copies_are_seen(
    fn: Callable[[Tensor], Any],
    example: Tensor,
    fits: Tensor,
    breaks: Tensor | None,
    exported: bool,
) -> None:
    """Where it can be told which one it is, a call has the same as the example, or is refused."""
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO},)
    if exported:
        run = plait.compile(torch.export.export(Calls(fn), (example,), dynamic_shapes=(shapes,)))
    else:
        run = plait.compile(fn, (example,), shapes)
    for given in (example, fits):
        ours, eagers = (
            torch.empty_strided(given.shape, given.stride()).copy_(given) for _ in range(2)
        )
        torch.testing.assert_close(run(ours), fn(eagers), rtol=0, atol=0)
        assert torch.equal(ours, eagers)
    if breaks is not None:
        with pytest.raises(InputError, match=r"s break a condition of the program|expected stride"):
            run(breaks)


def shared_row(x: Tensor) -> Tensor:
    row = torch.arange(8.0)[None]
    if x.shape[0] != row.shape[0]:
        row = row.expand(x.shape[0], -1)
    return x + row * 2


def asked_in_vain(x: Tensor) -> Tensor:
    causal = x.shape[0] > 1 and x.dim() > 2
    return F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=causal)


def joined_if_several(x: Tensor) -> Tensor:
    rows = [x.cos(), torch.ones(1, 8)]
    return torch.cat(rows) if len(rows) > x.shape[0] else torch.cat(rows).contiguous()


@pytest.mark.parametrize("fn", [shared_row, asked_in_vain, joined_if_several])
def test_a_size_of_1_that_makes_no_difference_is_allowed(fn: Callable[[Tensor], Tensor]) -> None:
    agrees(fn, (M,), (M[:1],), (M[:3],), dynamic_shapes=({0: Dim.DYNAMIC},))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.cos() if x.shape[0] > 1 else x.sin(),
        lambda x: x.squeeze(0) if x.shape[0] == 1 else x,
        lambda x: torch.cat([x, x]) if x.shape[0] != 1 else torch.cat([x, x * 1]),
        lambda x: x + (torch.ones(8) if x.shape[0] == 1 else torch.zeros(8)),
    ],
)
def test_a_size_of_1_that_makes_a_difference_is_not(fn: Callable[[Tensor], Any]) -> None:
    run = plait.compile(fn, (M,), ({0: Dim.DYNAMIC},))
    with pytest.raises(InputError, match=r"x.shape\[0\] (!= 1|> 1|>= 2)|at least 2"):
        run(M[:1])
    tree_equal(run(M[:2]), fn(M[:2]), "result")


def test_an_integer_argument_may_be_0() -> None:
    """It is no size: a result behind it has elements, or has none."""
    x = torch.full((2,), 7.0)[::2]
    fn = lambda x, k: x[k:].view(torch.int32).clone()
    program = plait.compile(fn, (x, 0), ({0: Dim.AUTO}, Dim.AUTO))
    for k in (0, 1):
        assert torch.equal(program(x, k), fn(x, k))


def test_threads_that_trace_leave_torch_as_it_was() -> None:
    """The one that begins first ends first."""
    before = torch.compiler.is_compiling(), torch.SymBool.__bool__, SymNode.bool_, SymNode.eq
    inside, left = threading.Event(), threading.Event()

    def first(x: Tensor) -> Tensor:
        assert inside.wait(60)
        return x + 1

    def second(x: Tensor) -> Tensor:
        inside.set()
        assert left.wait(60)
        return x + 2

    with ThreadPoolExecutor(2) as threads:
        a, b = (threads.submit(plait.compile, fn, (X,)) for fn in (first, second))
        a.result()
        left.set()
        b.result()
    assert (
        torch.compiler.is_compiling(),
        torch.SymBool.__bool__,
        SymNode.bool_,
        SymNode.eq,
    ) == before


def doubled_and_turned(x: Tensor) -> Any:
    x.mul_(2)
    return x.t(), x[1:], x.sum()


def doubled_in_another_shape(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.reshape(-1)


def changed_in_part(x: Tensor) -> Any:
    x[1:].add_(1)
    return x[0], x.flatten()


def changed_through_views(x: Tensor) -> Any:
    x.t().mul_(3)
    return x.chunk(2, 1), x.view(torch.int32), x.expand(2, *x.shape)


@pytest.mark.parametrize(
    "fn", [doubled_and_turned, doubled_in_another_shape, changed_in_part, changed_through_views]
)
@pytest.mark.parametrize(
    "given",
    [
        lambda x: x[:4, ::2],
        lambda x: x[:4, :6].t(),
        lambda x: x[2:5, 3:9],
        lambda x: x[1:4],
        lambda x: x.view(2, 3, 4, 10).permute(0, 3, 1, 2)[:, :4].reshape(8, 12)[:, ::3],
    ],
    ids=["gaps", "transposed", "a part", "from a row on", "copied"],
)
@pytest.mark.parametrize("shapes", [None, ({0: Dim.DYNAMIC},)], ids=["fixed", "dynamic"])
def test_results_in_inputs_that_are_written(
    fn: Any, given: Callable[[Tensor], Tensor], shapes: Any
) -> None:
    """They lie where eager's do, however their input lies."""
    x, y, z = (given(torch.arange(240.0).view(10, 24)) for _ in range(3))
    call = plait.compile(fn, (x,), shapes)
    out, want = call(y), fn(z)
    tree_equal((out, y), (want, z), "result")
    assert sharing((y,), out) == sharing((z,), want)
    places = [[t.storage_offset() for t in pytree.tree_leaves(tree)] for tree in (out, want)]
    assert places[0] == places[1]


@pytest.mark.parametrize(
    "value, other", [(-0.0, 0.0), (0.0, -0.0), (complex(1, -0.0), 1 + 0j), (math.nan, 1.0)]
)
def test_numbers_among_arguments_are_the_same_numbers(value: Any, other: Any) -> None:
    run = agrees(lambda x, v: x * v, (X, value))
    with pytest.raises(InputError, match="the program was compiled for"):
        run(X, other)


def test_a_script_module_inside_is_refused() -> None:
    module = nn.Sequential(nn.ReLU(), torch.jit.script(nn.ReLU()))
    with pytest.raises(Unsupported, match="of which '1' is a ScriptModule"):
        plait.compile(module, (X,))


def test_size_as_a_result() -> None:
    agrees(lambda x: (x.shape[0] * 2, x + 1), (X,), (X[:3],), dynamic_shapes={"x": {0: Dim("n")}})


class Beside(torch.nn.Module):
    """A size that is known only when the parameter is met."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[int, Tensor]:
        return x.shape[0], x + self.weight


def test_a_size_that_becomes_known_as_a_result() -> None:
    x = torch.arange(3.0)
    n, y = plait.compile(Beside(), (x,), ({0: Dim.AUTO},))(x)
    assert n == 3 and torch.equal(y, x + 1)


def test_dynamic_shapes_that_contradict() -> None:
    with pytest.raises(UserError, match="dynamic_shapes contradicts the program"):
        plait.compile(lambda x: x.view(2, 2, 6) + 1, (X,), dynamic_shapes={"x": {0: Dim("n")}})
    for wrong in ({"z": {0: Dim("n")}}, ({5: Dim("n")},), "batch", 3, ({0: Dim("n")}, None)):
        with pytest.raises(UserError, match="dynamic_shapes does not fit"):
            plait.compile(lambda x: x, (X,), dynamic_shapes=wrong)


def bumps(run: Callable[..., Any], x: Tensor, *buffers: Tensor) -> list[int]:
    """By how much a call of run raises the autograd version of each tensor that it may change."""
    before = [t._version for t in (x, *buffers)]
    run(x)
    return [t._version - was for t, was in zip((x, *buffers), before, strict=True)]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))  # type: ignore[operator]
        x.mul_(2)
        return x + self.seen + self.kept


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_mutated_inputs_and_buffers_get_a_new_version(wrapper: str) -> None:
    module = Counts()
    run = plait.compile(module, (X.clone(),), options={"wrapper": wrapper})
    with torch.no_grad():
        eager = bumps(module, X.clone(), *module.buffers())
    assert eager == [1, 0, 1]
    assert bumps(run, X.clone(), *module.buffers()) == eager


def test_autograd_sees_that_a_saved_input_was_changed() -> None:
    run = plait.compile(lambda x: x.mul_(2).sum(), (X.clone(),))
    w, x = torch.ones(4, 6, requires_grad=True), X.clone()
    loss = (w * x).sum()
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


SAME_MEMORY: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "two views": lambda x: (y := x + 1, (y.view(-1), y.view(-1)))[1],
    "value and view": lambda x: (y := x + 1, y.view_as(y)),
    "value and detached": lambda x: (y := x + 1, y.detach(), y),
    "one value twice": lambda x: (y := x + 1, y),
    "one view twice": lambda x: (y := (x + 1).t(), y),
    "two views of an input": lambda x: (x.view(-1), x.view(-1)),
    "input and view": lambda x: (x, x.view_as(x), x),
    "transposed twice": lambda x: (y := x.exp(), y.t(), y.t(), y.t().t()),
    "only a view of an input": lambda x: (x.view_as(x),),
    "changed in place": lambda x: (x.clone().add_(1), (y := x.exp()).view_as(y), y),
}  # fmt: skip


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("name", SAME_MEMORY)
def test_results_are_the_same_objects_as_in_eager(name: str, wrapper: str) -> None:
    fn = SAME_MEMORY[name]
    run = agrees(fn, (X,), options={"wrapper": wrapper})
    given, wanted = (X, *run(X)), (X, *fn(X))
    pairs = [(i, j) for i in range(len(given)) for j in range(i)]
    assert [given[i] is given[j] for i, j in pairs] == [wanted[i] is wanted[j] for i, j in pairs]


# ----------------------------------------------------------------------------------- wrong promises
@torch.library.custom_op("plait_export::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return (x + 1).t().contiguous().t()


@torch.library.custom_op("plait_export::shorter", mutates_args=())
def shorter(x: Tensor) -> Tensor:
    return x[:1].clone()


@torch.library.custom_op("plait_export::wider", mutates_args=())
def wider(x: Tensor) -> Tensor:
    return x.double()


@torch.library.custom_op("plait_export::positives", mutates_args=())
def positives(x: Tensor, extra: int) -> Tensor:
    rows = x[x[:, 0] > 0]
    return torch.cat([rows, rows[:, :extra]], 1)


turned.register_fake(torch.empty_like)
shorter.register_fake(torch.empty_like)
wider.register_fake(torch.empty_like)


@positives.register_fake
def _(x: Tensor, extra: int) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize(
    ("op", "message"),
    [
        (shorter, r"has sizes \[1, 6\] .* expected \[4, 6\]"),
        (wider, "has dtype float64, expected float32"),
        (lambda x: positives(x, 2), r"has sizes \[2, 8\] .* expected \[2, 6\] and \[6, 1\]"),
    ],
)
def test_custom_ops_that_break_their_promise_are_found_out(
    op: Callable[[Tensor], Tensor], message: str, wrapper: str
) -> None:
    run = plait.compile(lambda x: op(x) * 2, (X,), options={"wrapper": wrapper})
    with pytest.raises(RuntimeError, match=message):
        run(X)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_results_with_other_strides_than_promised_are_copied(wrapper: str) -> None:
    run = plait.compile(lambda x: (turned(x), turned(x) * 2), (X,), options={"wrapper": wrapper})
    for got, want in zip(run(X), (turned(X), turned(X) * 2), strict=True):
        assert torch.equal(got, want) and got.is_contiguous()


def test_custom_ops_whose_sizes_depend_on_data() -> None:
    def fn(x: Tensor) -> Tensor:
        return positives(x, 0) * 2

    agrees(
        fn, (X,), (-X.flip(0),), (X.abs() + 1,), (-X.abs() - 1,), (X.abs() - X[:, :1].abs().mean(),)
    )


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize(
    "data", [torch.ones(3, 2), torch.ones(3), torch.ones(6, 3).t(), torch.ones(3, 6).double()]
)  # fmt: skip
def test_parameters_must_keep_their_layout(data: Tensor, wrapper: str) -> None:
    module = nn.Linear(6, 3)
    run = plait.compile(module, (X,), options={"wrapper": wrapper})
    module.weight.data = torch.ones(3, 6)
    torch.testing.assert_close(run(X), module(X).detach())
    module.weight.data = data
    now = (
        r"buffer 'weight': its data is now float\d\d on cpu with sizes "
        rf"\[{str(list(data.shape))[1:-1]}\]"
    )
    with pytest.raises(InputError, match=now):
        run(X)


# ---------------------------------------------------------------------------------------- bad calls
@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X[:3], Y), "input 'x': expected size 4 in dimension 0, got 3"),
        ((X, Y.double()), "input 'y': expected dtype float32, got float64"),
        ((X[0], Y), "input 'x': expected 2 dimensions, got 1"),
        ((X.view(6, 4).t(), Y), "input 'x': expected stride 6 in dimension 0, got 1"),
        ((X, 3), "input 'y': expected a tensor, got int"),
        ((X,), "input 'y' is missing"),
        ((X, Y, X), "expected 2 inputs, got 3"),
        ((X, Y.to("meta")), "input 'y': expected a plain tensor on device cpu, got one on meta"),
        (
            (X, Y.to_sparse()),
            r"input 'y': expected a plain tensor, got one of layout torch\.sparse_coo",
        ),
        ((X, TwoTensor(Y, Y)), "input 'y': expected a plain tensor, got one of class TwoTensor"),
    ],
)
def test_wrong_inputs_are_named(args: Sequence[Any], message: str, wrapper: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    run = plait.compile(fn, (X, Y), options={"wrapper": wrapper})
    with pytest.raises(InputError, match=message):
        run(*args)
    torch.testing.assert_close(run(X, Y), X + Y)


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_wrong_keyword(wrapper: str) -> None:
    run = plait.compile(lambda x, y: x + y, (X, Y), options={"wrapper": wrapper})
    with pytest.raises(InputError, match="'z'"):
        run(X, z=Y)


def test_wrong_constant() -> None:
    run = plait.compile(lambda x, n: x * n, (X, 3))
    with pytest.raises(InputError, match="input 'n': the program was compiled for 3, got 4"):
        run(X, 4)
    with pytest.raises(InputError, match="compiled for None, got a Tensor\n"):
        plait.compile(lambda x, y: x if y is None else x + y, (X, None))(X, X)


def test_constants_that_equal_the_example() -> None:
    agrees(lambda x, a: x.nan_to_num() * 2 if a != a else x, (X, float("nan")))
    agrees(lambda x, dtype, device: x.to(dtype).to(device), (X, torch.float64, X.device))
    with pytest.raises(InputError, match="compiled for nan, got 2"):
        plait.compile(lambda x, a: x, (X, float("nan")))(X, 2.0)


def test_wrong_nesting() -> None:
    run = plait.compile(lambda d: d["a"] + 1, ({"a": X},))
    with pytest.raises(InputError, match="arguments are nested as"):
        run({"b": X})


def test_wrong_uses_of_compile() -> None:
    with pytest.raises(UserError, match="needs a function or module, got int"):
        plait.compile(3, (X,))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="example_inputs must be a tuple"):
        plait.compile(nn.ReLU(), 3)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match="example_inputs do not fit Linear: too many positional arguments"
    ):
        plait.compile(nn.Linear(6, 3), (X, X))
    with pytest.raises(UserError, match="unknown option 'fast'"):
        plait.compile(nn.Linear(6, 3), (X,), options={"fast": True})
    with pytest.raises(UserError, match="needs a function or module, got the class Linear"):
        plait.compile(nn.Linear, (6, 3))
    with pytest.raises(UserError, match=r"plait\.compile of what plait\.compile returned"):
        plait.compile(plait.compile(nn.Linear(6, 3), (X,)), (X,))
    with pytest.raises(
        UserError, match=r"argument 'd.lock' is an object of class lock(.|\n)*register_dataclass"
    ):
        plait.compile(lambda x, d: x, (X, Opaque(X)))


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x, self.lock = x, threading.Lock()


def test_results_that_may_hold_tensors_are_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"a result of .*, an object of class lock \(at \['a'\]\[1\].lock\)"
    ):
        plait.compile(lambda x: {"a": (x, Opaque(x + 1))}, (X,))


def test_changes_of_captured_tensors_are_refused() -> None:
    kept = X.clone()
    for fn in (lambda x: kept.add_(x), lambda x: (kept.add_(1), x + 1)[1]):
        with pytest.raises(
            Unsupported, match="changes a tensor which is neither argument nor parameter nor buffer"
        ):
            plait.compile(fn, (Y,))


IN_A_CLOSURE = nn.Linear(6, 6)
LOOPS: dict[str, Callable[[Tensor], Any]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, IN_A_CLOSURE, lambda y: IN_A_CLOSURE(y) * 2, (x,)),
    "while": lambda x: while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, IN_A_CLOSURE(y)), (torch.tensor(0), x)
    ),
    "map": lambda x: hop_map(lambda y: IN_A_CLOSURE(y), x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_control_flow_takes_a_module_from_a_closure(name: str) -> None:
    fn = LOOPS[name]
    run = plait.compile(fn, (X,))
    for change in (None, lambda: IN_A_CLOSURE.weight.mul_(0.5), _another_weight):
        with torch.no_grad():
            if change is not None:
                change()
            for x in (Y, -Y):
                torch.testing.assert_close(run(x), fn(x))


def _another_weight() -> None:
    IN_A_CLOSURE.weight = nn.Parameter(torch.randn(6, 6) / 6)


def test_compiled_things_inside_are_refused() -> None:
    inner, outer = plait.compile(nn.Linear(6, 3), (X,)), nn.Linear(6, 3)
    with pytest.raises(
        Unsupported,
        match=rf"calls what plait.compile returned\n  at {__file__}:\d+\n  try: .*__wrapped",
    ):
        plait.compile(lambda x: inner(x) + 1, (X,))
    outer.forward = inner  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match="a Linear whose forward is a Bound, not Python"):
        plait.compile(outer, (X,))


def test_errors_of_the_function_itself_come_out_with_its_line() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        return y @ y

    line = fn.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as info:
        plait.compile(fn, (X,))
    assert info.value.__notes__ == [f"raised while plait.compile traced fn, at {__file__}:{line}"]
    with pytest.raises(ZeroDivisionError):
        plait.compile(lambda x: 1 / 0, (X,))


def test_what_is_returned_tells_what_it_is() -> None:
    model = nn.Linear(6, 3)
    for wrapper in ("native", "python"):
        run: Any = plait.compile(model, (X,), options={"wrapper": wrapper})
        assert run.__wrapped__ is model and run.record.target == wrapper
        assert "training or evaluation mode, autocast" in run.__doc__
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match=r"what plait\.compile returns cannot be copied or pickled"
            ):
                copied(run)
    nested: Any = plait.compile(lambda x: {"y": x + 1}, (X,))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(nested)


def test_what_is_returned_can_be_kept_by_its_module() -> None:
    model: Any = nn.Linear(6, 3)
    model.fast = plait.compile(model, (X,))
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("kernels", [True, False])
def test_autocast_is_that_of_the_compilation(wrapper: str, kernels: bool) -> None:
    def compiled() -> Callable[..., Any]:
        return plait.compile(model, (X,), options={"wrapper": wrapper, "kernels": kernels})

    model = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3))
    plain = compiled()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast, want = compiled(), model(X)
        assert (
            torch.equal(cast(X), want)
            and torch.equal(plain(X), plain(X.clone()))
            and plain(X).dtype == X.dtype
        )
        inside = plain(X)
    assert torch.equal(plain(X), inside) and cast(X).dtype == torch.bfloat16


def test_what_cannot_be_traced() -> None:
    with pytest.raises(Unsupported, match=r"plait\.compile cannot trace"):
        plait.compile(lambda x: x if x.sum() > 0 else -x, (X,))
    with pytest.raises(
        Unsupported, match=r"argument 'x': .* this is one of layout torch\.sparse_coo"
    ):
        plait.compile(lambda x: x * 2, (X.to_sparse(),))


def test_sparse_results() -> None:
    assert torch.equal(plait.compile(lambda x: (x + 1).to_sparse(), (X,))(X).to_dense(), X + 1)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_recurrent_layer_gets_rows_in_order(bidirectional: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.LSTM(16, 32, 2, batch_first=True, bidirectional=bidirectional).eval()
    x = torch.randn(3, 7, 16)
    compiled = plait.compile(layer, (x,))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def sine(x: Tensor) -> Tensor:
    return (x * 2).sin()


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(sine(x)) + 1


@pytest.mark.parametrize("kind", ["module", "function", "partial function", "object"])
def test_nodes_name_the_lines_that_dynamo_names(kind: str) -> None:
    """Those of the code that is traced, and of nothing that called the compiler."""
    module = Outer()
    fns = {"module": module, "partial function": functools.partial(module.forward)}
    fns |= {"function": lambda x: module(x), "object": types.MethodType(Outer.forward, module)}
    graph = trace(*source_of(fns[kind], (torch.ones(3),), None, "a test"), "a test", Config()).graph
    found = [n.meta["stack_trace"] for n in graph.graph.nodes if n.op == "call_function"]
    assert "return (x * 2).sin()" in found[0] and "self.lin(sine(x)) + 1" in found[0]
    assert found[0] == found[1] != found[-1] and "return self.lin(sine(x)) + 1" in found[-1]
    assert "nn/modules/linear.py" in "".join(found)
    frames = re.findall(r'File "(.*)", line \d+, in (.*)', "".join(found))
    assert {file for file, _ in frames} == {__file__, torch.nn.modules.linear.__file__}
    assert "test_nodes_name_the_lines_that_dynamo_names" not in {name for _, name in frames}
    graphs: list[torch.fx.GraphModule] = []
    torch.compile(fns[kind], backend=lambda gm, _: graphs.append(gm) or gm)(torch.ones(3))
    theirs = [n.meta["stack_trace"] for n in graphs[0].graph.nodes if n.op == "call_function"]
    ends = [re.findall(r"line (\d+), in (\w+)", x)[-1] for x in (theirs[0], theirs[-1])]
    assert ends == [re.findall(r"line (\d+), in (\w+)", x)[-1] for x in (found[0], found[-1])]


@pytest.mark.parametrize(
    "layer", [torch.nn.MaxPool2d(2), torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)]
)
def test_sizes_of_an_exported_program_that_some_of_a_range_do_not_fit(
    layer: torch.nn.Module,
) -> None:
    """Dim.AUTO leaves it to guards which do."""
    auto = torch.export.Dim.AUTO
    program = torch.export.export(
        layer, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: auto, 2: auto, 3: auto},)
    )
    call = plait.compile(program)
    for wide in (10, 1) if isinstance(layer, nn.Conv2d) else (10,):
        x = torch.randn(3, 3, 12, wide)
        torch.testing.assert_close(call(x), layer(x))
    with pytest.raises(InputError, match="size"):
        call(torch.randn(3, 3, 12, 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_attention_of_no_rows_keys_or_heads(wrapper: str, causal: bool) -> None:
    """ATen's kernel for a CPU divides by their numbers: a call ended the process."""

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k * 2, is_causal=causal) + 1

    every = dict.fromkeys(range(4), Dim.AUTO)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 7, 8)
    call = plait.compile(fn, (q, k), (every, every), options={"wrapper": wrapper})
    for batch, heads, rows, keys in ((2, 4, 0, 7), (2, 4, 6, 0), (2, 0, 6, 7), (0, 4, 6, 7),
                                     (1, 1, 1, 1), (3, 2, 5, 9)):  # fmt: skip
        q, k = torch.randn(batch, heads, rows, 8), torch.randn(batch, heads, keys, 8)
        torch.testing.assert_close(call(q, k), fn(q, k))
