"""Which graphs Dynamo may call as they are or behind a native epilogue, that every other one gets
AOTAutograd's runtime wrapper, and that the epilogue does what eager does."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from plait import _native
from plait.capture.backend import plait_backend
from tests.against_eager import same, unchecked

ROADS = {
    types.FunctionType: "wrapped",
    _native.Program: "direct",
    _native.Direct: "epilogue",
    _native.Training: "training",
}


def road(
    fn: Callable[..., Any], args: Sequence[Any], grad: bool = False, **kwargs: Any
) -> list[str]:
    """How every graph that fn(*args) compiles is called: a value of ROADS."""
    roads: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        out: Any = plait_backend(gm, inputs)
        roads.append(ROADS[type(unchecked(out))])
        return out

    with torch.set_grad_enabled(grad):
        torch.compile(fn, backend=backend, **kwargs)(*args)
    return roads


def batch_norm() -> Callable[..., Any]:
    return torch.nn.BatchNorm1d(6).train()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1).sum(),
        lambda x: (x + 1, None, x * 2),
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: torch.rand_like(x) + x,
        lambda x: torch.nn.functional.linear(x, x),
        batch_norm(),
    ],
)
def test_direct(fn: Callable[..., Any]) -> None:
    assert road(fn, (torch.randn(4, 6),)) == ["direct"]


def mutate(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def mutate_with_view(x: Tensor, v: Tensor) -> Tensor:
    x.mul_(2)
    return v + 1


def resize(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (1, 2))


def views() -> Sequence[Any]:
    x = torch.randn(4, 6)
    return x, x[1:]


def subclass() -> Sequence[Any]:
    from torch.testing._internal.two_tensor import TwoTensor

    return (TwoTensor(torch.randn(4), torch.randn(4)),)


def mutate_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return x.t(), x + 1


@pytest.mark.parametrize(
    ("fn", "make"),
    [
        (mutate_with_view, views),
        (lambda x: x * 2, subclass),
        (lambda x: x.conj(), lambda: (torch.randn(4, dtype=torch.complex64),)),
        (lambda x: (x.detach(), x + 1), lambda: (torch.randn(4, 6),)),
    ],
    ids=["synthetic base", "subclass", "conjugated view", "detached"],
)
def test_wrapped(fn: Callable[..., Any], make: Callable[[], Sequence[Any]]) -> None:
    assert road(fn, make()) == ["wrapped"]


# ----------------------------------------------------------------------------------------- epilogue
@pytest.mark.parametrize(
    "fn", [lambda x: x.view(torch.int32), mutate_and_view], ids=["other elements", "changed"]
)
def test_views_of_changed_memory_and_of_other_elements(fn: Callable[..., Any]) -> None:
    assert road(fn, (torch.randn(4, 6),)) == ["epilogue"]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: x.t(),
    "slice and result": lambda x: (x[1:], x + 1),
    "strided slice": lambda x: (x[::2, 1:4].t(), x.sum()),
    "as_strided": resize,
    "expanded": lambda x: (x[:, :, None].expand(-1, -1, 3), None, 3),
    "two views": lambda x: (x[0], x[1], x.view(-1)),
    "alias": lambda x: (x.view_as(x), x.sin()),
    "unfolded": lambda x: x.unfold(1, 3, 2),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(VIEWS))
def test_views_of_inputs_are_eagers(name: str, dynamic: bool, mode: Callable[[], Any]) -> None:
    fn = VIEWS[name]
    made: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(plait_backend(gm, inputs))
        return made[-1]

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    big = torch.arange(60.0)
    for x in (big[12:36].view(4, 6), torch.randn(4, 6)):
        with mode():
            want, got = fn(x), compiled(x)
        for w, g in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True):
            if not isinstance(w, Tensor):
                assert g == w
                continue
            torch.testing.assert_close(g, w, check_stride=True)
            assert g.is_inference() == w.is_inference()
            assert g._is_view() == w._is_view() and g._base is w._base
            if not w._is_view():
                continue
            assert g.data_ptr() == w.data_ptr() and g.storage_offset() == w.storage_offset()
            before = g._version
            x.add_(1)
            assert g._version == x._version == before + 1
            torch.testing.assert_close(g, w)
    assert {type(unchecked(m)) for m in made} == {_native.Direct}


def test_a_view_of_a_parameter_under_no_grad() -> None:
    lin = torch.nn.Linear(4, 6)
    fn = torch.compile(lambda x: (lin.weight.t(), lin(x)), backend="plait")
    with torch.no_grad():
        view, _ = fn(torch.randn(2, 4))
        want = lin.weight.t()
    assert view._base is lin.weight and view.requires_grad == want.requires_grad
    assert view.grad_fn is None and want.grad_fn is None


def test_writing_through_a_returned_view() -> None:
    x = torch.zeros(4, 6)
    with torch.no_grad():
        view = torch.compile(lambda x: (x[1], x + 1), backend="plait")(x)[0]
        view.fill_(7)
    assert x[1].eq(7).all() and x.sum() == 42


def test_a_lazily_negated_view_goes_through_the_wrapper() -> None:
    z = torch.randn(4, 6, dtype=torch.complex64)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:], x + 1

    same(fn, lambda: (z.conj().imag,))


def test_dynamic_dimensions_are_marked() -> None:
    fn = lambda x: (x + 1, x.sum(), x[1:])
    assert road(fn, (torch.randn(4, 6),), dynamic=True) == ["epilogue"]
    outs = []
    for backend in ("plait", "aot_eager"):
        torch._dynamo.reset()
        x = torch.randn(4, 6)
        with torch.no_grad():
            outs.append(torch.compile(fn, backend=backend, dynamic=True)(x))
    names = [n for n in dir(outs[1][0]) if n.startswith("_dynamo_")]
    assert names
    for name in names:
        for got, want in zip(*outs, strict=True):
            assert (getattr(got, name, None) or set()) == (getattr(want, name, None) or set())


def test_marks_spare_the_next_graph_a_compilation() -> None:
    graphs = 0

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return plait_backend(gm, inputs)

    def fn(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiled = torch.compile(fn, backend=backend)
    with torch.no_grad():
        for n in (3, 4, 5):
            x = torch.randn(n, 2)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), fn(x))
    assert graphs == 2


# ----------------------------------------------------------------------------------------- the rest
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (y := x + 1, y.t()),
        lambda x: ((y := x.sin())[0], y[1]),
        lambda x: (y := x.exp().view(-1), y[:3]),
    ],
)
def test_views_of_an_intermediate_are_direct_and_share_memory(fn: Callable[..., Any]) -> None:
    """Without gradients AOTAutograd leaves such views to the graph."""
    assert road(fn, (torch.randn(4, 6),)) == ["direct"]
    same(fn, lambda: (torch.linspace(0, 1, 24).view(4, 6),))


def test_dynamic_inputs_with_a_static_result_are_direct() -> None:
    assert road(lambda x: (x + 1).sum(), (torch.randn(4, 6),), dynamic=True) == ["direct"]


def test_training_is_native() -> None:
    assert road(torch.sin, (torch.randn(3, requires_grad=True),), grad=True) == ["training"]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("plait_test", "FRAGMENT") as lib:
        yield lib


@pytest.mark.parametrize("strict", [False, True])
def test_custom_op_is_checked_at_its_first_call(
    library: torch.library.Library, strict: bool
) -> None:
    """It returns its input, which its schema does not say: torch warns, once, or raises where it is
    told to."""
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CompositeExplicitAutograd")
    torch.library.register_fake("plait_test::same", torch.empty_like, lib=library)
    op = torch.ops.plait_test.same.default
    made: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(plait_backend(gm, inputs))
        return made[-1]

    fn = torch.compile(lambda x: op(x) + 1, backend=backend)
    x = torch.randn(4)
    # torch's own default depends on whether a variable `CI` is set.
    with torch.no_grad(), torch._functorch.config.patch(error_on_custom_op_aliasing=strict):
        if strict:
            with pytest.raises(RuntimeError, match="plait_test::same"):
                fn(x)
        else:
            with pytest.warns(UserWarning, match="plait_test::same"):
                torch.testing.assert_close(fn(x), x + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(fn(x), x + 1)
    assert type(unchecked(made[0])) is _native.Direct


def test_custom_op_whose_first_call_fails_is_checked_at_the_next(
    library: torch.library.Library,
) -> None:
    calls: list[int] = []

    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")
        return x * 2

    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", twice, "CompositeExplicitAutograd")
    torch.library.register_fake("plait_test::twice", torch.empty_like, lib=library)
    op = torch.ops.plait_test.twice.default
    fn = torch.compile(lambda x: op(x) + 1, backend="plait")
    x = torch.randn(4)
    with torch.no_grad():
        with pytest.raises(ValueError, match="not yet"):
            fn(x)
        for _ in range(2):
            torch.testing.assert_close(fn(x), x * 2 + 1)


def test_an_epilogue_that_does_not_fit_is_refused() -> None:
    made: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made.append(plait_backend(gm, inputs))
        return made[-1]

    with torch.no_grad():
        torch.compile(lambda x: (x[1:], x + 1), backend=backend)(torch.randn(4, 6))
    program = unchecked(made[0]).program
    view, own = ("view", 0, False, 0), ("program",)
    _native.Direct(program, print, (view, own), (), False)
    for results, marks, text in (
        ((view,), (), "outputs"),
        ((("view", 1, False, 0), own), (), "argument 1"),
        ((("input", -1), own), (), "argument -1"),
        ((("other",), own), (), "a result is"),
        ((view, own), ((2, "a", frozenset()),), "result 2"),
    ):
        with pytest.raises(_native.LoadError, match=text):
            _native.Direct(program, print, results, marks, False)


def test_fake_first_call_is_wrapped() -> None:
    from torch._guards import TracingContext

    from plait import compat

    class Meta:
        num_mutated_inp_runtime_indices = num_intermediate_bases = 0
        tokens: dict[Any, Any] = {}  # noqa: RUF012
        is_rng_op_functionalized = False
        output_info: tuple[Any, ...] = ()
        grad_enabled_mutation = None

    gm = torch.fx.symbolic_trace(lambda x: -x)
    assert compat.autograd.wrapper_reason(gm, Meta()) == ""
    for name in ("tokens", "is_rng_op_functionalized", "num_intermediate_bases"):
        changed = Meta()
        setattr(changed, name, 1)
        assert compat.autograd.wrapper_reason(gm, changed) != "", name
    changed = Meta()
    changed.grad_enabled_mutation = False  # type: ignore[assignment]
    assert compat.autograd.wrapper_reason(gm, changed) == "the graph switches grad mode"
    context = TracingContext(None)
    context.fakify_first_call = True
    with torch._guards.tracing(context):
        assert compat.autograd.wrapper_reason(gm, Meta()) == "the first call is fake"


def test_deduplicated_inputs() -> None:
    x = torch.randn(4, 6)
    same(lambda a, b: (a * b, a + 1), lambda: (x, x))


def test_mutation_in_a_direct_graph_bumps_versions_once_seen_by_autograd() -> None:
    x = torch.randn(4)
    assert road(mutate, (x,)) == ["direct"]
    y = torch.randn(4)
    fn = torch.compile(mutate, backend="plait")
    with torch.no_grad():
        fn(y)
        before = y._version
        fn(y)
    assert y._version > before


def test_batch_norm_buffers_of_a_direct_graph_bump() -> None:
    bn = torch.nn.BatchNorm1d(6)
    fn = torch.compile(bn, backend="plait")
    with torch.no_grad():
        fn(torch.randn(4, 6))
        before = bn.running_mean._version
        fn(torch.randn(4, 6))
    assert bn.running_mean._version > before


def test_result_shared_by_two_outputs_stays_shared() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y

    out = torch.compile(fn, backend="plait")(torch.ones(3))
    assert out[0] is out[1]
