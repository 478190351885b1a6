"""The ladder: what becomes of programs that plait cannot compile, that nothing changes in what they
compute, and that each step is told; `strict` raises instead. Errors of the user, and of the program
itself, stay what they are."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch.utils._sympy.functions import FloorDiv

import plait
from plait import extend, pipelines
from plait.capture import backend, dynamo, ladder, program
from plait.errors import InexpressibleSize, InternalError, Unsupported, UserError, warn_once
from plait.graph.captured import Captured
from plait.lower import core, size_rules
from plait.lower.core import RULES
from plait.tools.report import Report
from tests.against_eager import same

WRAPPERS = ("native", "python", "cpp", "fx")
pipeline = importlib.import_module("plait.compile")


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_STRICT")
    warn_once.cache_clear()


def fail(*args: object, **kwargs: object) -> Any:
    raise KeyError("a mistake of ours")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """failing("forward", ...): graphs of these kinds are damaged by a clean-up pass, which then
    fails."""

    def make(*kinds: str) -> None:
        clean = pipeline.clean_graph

        def damage(captured: Captured, cfg: Any) -> Captured:
            if captured.kind not in kinds:
                return clean(captured, cfg)
            graph = captured.graph.graph
            for n in graph.nodes:
                if n.op == "call_function" and n.all_input_nodes:
                    n.replace_all_uses_with(n.all_input_nodes[0])
            graph.eliminate_dead_code()
            return fail()

        monkeypatch.setattr(pipeline, "clean_graph", damage)

    return make


class Net(nn.Module):
    """A training step with a buffer that changes, random numbers and a shape that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.dropout(self.a(self.norm(x)).relu(), 0.25, True)
        return self.b(y) * x.shape[0]


def states(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def trained(
    fn: Callable[..., torch.Tensor], net: nn.Module, before: Any, x: torch.Tensor
) -> list[torch.Tensor]:
    net.load_state_dict(before)
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    y = fn(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    found = [y.detach(), x.grad, *(g.clone() for g in grads), *states(net).values()]
    net.zero_grad()
    return found


def explained(fn: Callable[..., Any], *args: Any, **options: Any) -> Report:
    return plait.explain(fn, *args, options=options, quiet=True)


# -------------------------------------------------------------------------------------------- eager
STAGES = (
    "clean_graph",
    "lower_graph",
    "schedule",
    "make_kernels",
    "_build",
    "build",
    "run_passes",
    "observe",
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_stage_that_fails_leaves_the_graph_to_eager(
    stage: str, wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, stage, fail)
    net, x = Net(), torch.randn(6, 12)
    before, fn = (
        states(net),
        torch.compile(Net.forward, backend="plait", options={"wrapper": wrapper}),
    )
    with pytest.warns(
        UserWarning, match=r"eager runs a graph: bug in plait: .*a mistake of ours.*PLAIT_DEBUG_DIR"
    ):
        got = trained(lambda x: fn(net, x), net, before, x)
    torch.testing.assert_close(got, trained(net, net, before, x), rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(
            torch.compile(torch.sin, backend="plait", options={"wrapper": wrapper})(x), x.sin()
        )


def test_what_tracing_refuses_within_the_compiler_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operators of control flow raise a class of Dynamo's: it is no word for Dynamo here."""

    def refuse(*_: object, **__: object) -> None:
        raise UncapturedHigherOrderOpError("Expected carried_inputs to have the same strides")

    monkeypatch.setattr(pipeline, "lower_graph", refuse)
    with pytest.warns(UserWarning, match=r"eager runs a graph: .*UncapturedHigherOrderOpError"):
        assert torch.equal(
            torch.compile(torch.cos, backend="plait")(torch.ones(3)), torch.ones(3).cos()
        )


LOADS = ("native", "python", "cpp", "fx")


@pytest.mark.parametrize("wrapper", LOADS)
def test_a_target_that_fails_leaves_the_graph_to_eager(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pipeline.WRAPPERS, wrapper, fail)
    fn = torch.compile(lambda x: x.sin() * 2, backend="plait", options={"wrapper": wrapper})
    with pytest.warns(UserWarning, match="eager runs a graph"):
        assert torch.equal(fn(torch.ones(3)), torch.ones(3).sin() * 2)


@pytest.mark.parametrize(
    "name",
    ["simplify_masks", "split_joint", "compat.tracing.aot_compile", "DirectGraph", "TrainingGraph"],
)
def test_what_fails_around_the_pipeline_leaves_the_graph_to_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *owners, attribute = name.split(".")
    holder = reduce(getattr, owners, backend)
    if attribute.endswith("Graph"):
        holder, attribute = getattr(backend, attribute), "around"
    if attribute == "split_joint":
        holder = pipelines
    monkeypatch.setattr(holder, attribute, fail)
    net, x = Net(), torch.randn(6, 12)
    before, fn = states(net), torch.compile(net, backend="plait")
    if name == "DirectGraph":
        assert torch.equal(torch.compile(torch.sin, backend="plait")(x), x.sin())
        return
    want = trained(net, net, before, x)
    torch.testing.assert_close(trained(fn, net, before, x), want, rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [("forward",), ("backward",), ("forward", "backward")])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_whose_graphs_are_left_to_eager(
    kinds: tuple[str, ...], wrapper: str, dynamic: bool, failing: Callable[..., None]
) -> None:
    """Without dynamic sizes the backward graph is compiled at the first backward pass, else with
    the forward graph."""
    model = nn.Sequential(
        nn.BatchNorm1d(12), nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4)
    ).double()
    scaled = lambda x: model(x) * x.shape[0]
    before = states(model)
    failing(*kinds)
    fn = torch.compile(
        scaled, backend="plait", dynamic=dynamic or None, options={"wrapper": wrapper}
    )
    for n in (6, 6, 9):
        x = torch.randn(n, 12, dtype=torch.float64)
        want = trained(scaled, model, before, x)
        torch.testing.assert_close(trained(fn, model, before, x), want, rtol=1e-10, atol=1e-12)


def test_a_backward_graph_by_eager_runs_again_and_under_autocast(
    failing: Callable[..., None],
) -> None:
    failing("backward")
    w = torch.randn(8, 8, requires_grad=True)
    other = w.detach().clone().requires_grad_()
    fn = lambda x, w: torch.dropout((x @ w).exp(), 0.5, True).sum()
    compiled = torch.compile(fn, backend="plait", options={"eager_random": True})
    x = torch.randn(4, 8)
    results = []
    for f, p in ((fn, w), (compiled, other)):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = f(x, p)
            y.backward(retain_graph=True)
            y.backward()
        results.append((y, p.grad))
    torch.testing.assert_close(results[1], results[0])


def test_a_backward_graph_by_eager_is_told(failing: Callable[..., None]) -> None:
    failing("backward")
    report = explained(lambda x: x.sin() * 2, torch.randn(5, requires_grad=True))
    assert [(g.kind, g.target) for g in report.graphs] == [
        ("forward", "native"),
        ("backward", "eager"),
    ]
    (step,) = report.ladder
    assert step.rung == "eager" and "KeyError: 'a mistake of ours'" in step.reason
    name = report.graphs[1].name
    assert f"\n{name}: {report.graphs[1].aten_ops} operators, run by eager\n" in report.text
    assert (
        f"\ngraphs that eager runs:\n  {name}: the graph: bug in plait: compiling it failed"
        in report.text
    )
    assert f"\n  eager: {step.line}" in report.details


def changed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.mul_(2)
    y[1:].add_(x[:-1])
    return x, x[1:], y.view(-1), x + y, torch.rand_like(x)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_mutation_aliases_and_random_numbers_by_eager(
    wrapper: str, failing: Callable[..., None]
) -> None:
    failing("inference")
    fn = torch.compile(changed, backend="plait", options={"wrapper": wrapper})
    for _ in range(2):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        given, mine = (x.clone(), y.clone()), (x.clone(), y.clone())
        torch.manual_seed(7)
        want = changed(*given)
        torch.manual_seed(7)
        got = fn(*mine)
        torch.testing.assert_close((*got, *mine), (*want, *given), rtol=0, atol=0)
        assert got[0] is mine[0] and got[1]._base is mine[0]
        assert got[2].untyped_storage().data_ptr() == mine[1].untyped_storage().data_ptr()
        assert [t._version for t in mine] == [t._version for t in given]


def test_autocast_by_eager(failing: Callable[..., None]) -> None:
    failing("inference", "forward", "backward")

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        return y.float() @ x

    x = torch.randn(4, 4)
    assert torch.equal(torch.compile(inside, backend="plait")(x), inside(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.compile(lambda x: x @ x, backend="plait")(x)
    assert got.dtype == torch.bfloat16


def test_gradients_of_gradients_by_eager(failing: Callable[..., None]) -> None:
    failing("forward")
    x = torch.randn(5, requires_grad=True)
    (g,) = torch.autograd.grad(
        torch.compile(lambda x: x.sin().sum(), backend="plait")(x), x, create_graph=True
    )
    (gg,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(gg, -x.sin())


def test_reduce_overhead_by_eager(failing: Callable[..., None]) -> None:
    failing("forward", "backward")
    x = torch.randn(5, requires_grad=True)
    fn = torch.compile(lambda x: x.sin() * 2, backend="plait", mode="reduce-overhead")
    fn(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2)


def test_errors_of_the_program_are_eagers_own(failing: Callable[..., None]) -> None:
    failing("inference")
    fn = lambda x, i: x[i] * 2
    x, i = torch.randn(4), torch.tensor([9])
    compiled = torch.compile(fn, backend="plait")
    with pytest.raises(IndexError) as want:
        fn(x, i)
    with pytest.raises(IndexError) as got:
        compiled(x, i)
    assert str(got.value) == str(want.value)


def test_an_exception_in_a_backward_graph_by_eager_is_its_own(failing: Callable[..., None]) -> None:
    @torch.library.custom_op("plait_ladder::refuses", mutates_args=())
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("not today")

    refuses.register_fake(torch.empty_like)

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return refuses(g)

    failing("backward")
    y = torch.compile(lambda x: Passes.apply(x) + 1, backend="plait")(
        torch.randn(3, requires_grad=True)
    )
    with pytest.raises(ArithmeticError, match=r"^not today$"):
        y.sum().backward()


# ------------------------------------------------------------------------------- memory of inputs
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_inputs_that_share_memory_beside_a_write(dynamic: bool) -> None:
    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 9).view(3, 3)
        return x, x.t()

    def parts() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 13)
        return x[:9].view(3, 3), x[4:].view(3, 3)

    fn = lambda x, y: (x.add_(1) * y, x[1:], y.t())
    for make in (pair, parts):
        same(fn, make, dynamic=dynamic)


# ------------------------------------------------------------------------------------------- strict
def test_strict_raises(failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    failing("inference", "backward")
    with pytest.raises(InternalError, match="a mistake of ours"):
        torch.compile(torch.sin, backend="plait", options={"strict": True})(torch.ones(2))
    y = torch.compile(torch.sin, backend="plait", options={"strict": True})(
        torch.ones(2, requires_grad=True)
    )
    with pytest.raises(InternalError, match="a mistake of ours"):
        y.sum().backward()
    monkeypatch.setenv("PLAIT_STRICT", "1")
    with pytest.raises(InternalError, match="a mistake of ours"):
        torch.compile(torch.cos, backend="plait")(torch.ones(2))
    assert torch.compile(torch.cos, backend="plait", options={"strict": False})(
        torch.zeros(2)
    ).tolist() == [1, 1]


def test_there_is_no_eager_without_dynamo(failing: Callable[..., None], tmp_path: Any) -> None:
    failing("inference")
    with pytest.raises(InternalError, match="a mistake of ours"):
        plait.compile(torch.sin, (torch.ones(2),))
    with pytest.raises(InternalError, match="a mistake of ours"):
        plait.package(torch.sin, tmp_path / "p.plait", (torch.ones(2),))


def test_mistakes_of_the_caller_are_raised() -> None:
    with pytest.raises(UserError, match="unknown option"):
        torch.compile(torch.sin, backend="plait", options={"stric": True})(torch.ones(2))


def test_the_message_names_the_debug_folder(failing: Callable[..., None], tmp_path: Any) -> None:
    failing("inference")
    with pytest.warns(UserWarning, match=rf"report it with the folder {tmp_path}/inference_\d+"):
        torch.compile(torch.sin, backend="plait", options={"debug_dir": str(tmp_path)})(
            torch.ones(2)
        )


def test_equal_steps_are_warned_of_once(
    failing: Callable[..., None], recwarn: pytest.WarningsRecorder
) -> None:
    failing("inference")
    for fn in (torch.sin, torch.cos):
        torch.compile(fn, backend="plait")(torch.ones(2))
    assert sum("eager runs a graph" in str(w.message) for w in recwarn) == 1


# -------------------------------------------------------------------------------------------- sizes
@pytest.fixture
def no_division(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are n // k have no expression."""

    def refuse(e: Any, sub: Any) -> Any:
        raise Unsupported(f"a size that is {e}")

    monkeypatch.setitem(size_rules.RULES, FloorDiv, refuse)


def halves(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0] // 2, 2).sum(0) * x.sum()


def counted(made: list[int]) -> Callable[..., Any]:
    def compile_with(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        made.append(1)
        return backend.plait_backend(gm, inputs, **kwargs)

    return compile_with


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("training", [False, True])
def test_a_size_without_expression_is_guarded(
    wrapper: str, training: bool, no_division: None
) -> None:
    made: list[int] = []
    fn = torch.compile(halves, backend=counted(made), dynamic=True, options={"wrapper": wrapper})
    for n, compiled in ((6, 1), (8, 2), (6, 2), (10, 3), (8, 3)):
        x, y = (torch.arange(1.0, n + 1).requires_grad_(training) for _ in range(2))
        got, want = fn(x), halves(y)
        torch.testing.assert_close(got, want)
        if training:
            got.sum().backward()
            want.sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
        assert len(made) == compiled, n


def test_a_size_without_expression_in_the_backward_graph_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is compiled early, since it saves a size."""
    made: list[int] = []
    compile_graph = program.compile_graph
    refused: set[int] = set()

    def refuse_once(captured: Captured, *args: Any) -> Any:
        found = [n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"]
        sizes = [v for v in found if isinstance(v, torch.SymInt) and v.node.expr.is_symbol]
        if captured.kind == "backward" and sizes:
            refused.add(len(made))
            raise InexpressibleSize("a size of ours", symbols=(str(sizes[0].node.expr),))
        return compile_graph(captured, *args)

    monkeypatch.setattr(program, "compile_graph", refuse_once)
    fn = torch.compile(halves, backend=counted(made), dynamic=True)
    for n, compiled in ((6, 1), (8, 2), (6, 2)):
        x, y = (torch.arange(1.0, n + 1).requires_grad_() for _ in range(2))
        fn(x).sum().backward()
        halves(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert len(made) == compiled
    assert refused == {1, 2}


def test_a_size_that_must_vary_or_is_known_too_late_leaves_the_graph_to_eager(
    no_division: None,
) -> None:
    x = torch.randn(6)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.warns(UserWarning, match=r"eager runs a graph: .*a size that is"):
        torch.testing.assert_close(torch.compile(halves, backend="plait")(x), halves(x))

    def found(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(x.nonzero().shape[0] // 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.compile(found, backend="plait")(torch.ones(7)).shape == (3,)


def test_the_last_compile_of_a_function_serves_all_sizes(no_division: None) -> None:
    made: list[int] = []
    fn = torch.compile(halves, backend=counted(made), dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=3):
        for n, compiled in ((6, 1), (8, 2), (10, 3), (12, 3), (14, 3), (8, 3)):
            x = torch.randn(n)
            torch.testing.assert_close(fn(x), halves(x))
            assert len(made) == compiled


def test_guards_are_not_made_when_it_is_too_late(no_division: None) -> None:
    """A backward graph that is compiled in the backward pass cannot guard any more."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    x = torch.randn(6, requires_grad=True)
    y = torch.compile(fn, backend="plait", dynamic=True)(x)
    assert dynamo.specialise(("s0",)) is None  # no compilation under way
    y.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_specialised_sizes_are_told(no_division: None, recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(6)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    report = explained(halves, x)
    (step,) = report.ladder
    assert (
        step.rung == "specialise" and step.what.endswith(" = 6") and "test_ladder.py:" in step.where
    )
    assert f"  {report.graphs[0].name}: {step.line}\n" in report.text
    assert f"  specialise: {step.line}" in report.details
    recwarn.clear()
    fn = torch.compile(halves, backend="plait", dynamic=True)
    for n in (6, 8, 10):
        fn(torch.randn(n))
    told = {str(w.message) for w in recwarn if "anew for each value of a size" in str(w.message)}
    assert len(told) == 1


def test_strict_and_plait_compile_refuse_a_size(no_division: None) -> None:
    with pytest.raises(Unsupported, match=r"a size that is"):
        torch.compile(halves, backend="plait", dynamic=True, options={"strict": True})(
            torch.randn(6)
        )
    with pytest.raises(Unsupported, match=r"a size that is"):
        plait.compile(halves, (torch.randn(6),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


# ---------------------------------------------------------------------------------------- operators
def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x * 2,)) + 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_unknown_higher_order_operator_runs_as_python(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RULES, torch.ops.higher_order.cond)
    for x in (torch.ones(3), -torch.ones(3)):
        got = torch.compile(branch, backend="plait", options={"wrapper": wrapper})(x)
        torch.testing.assert_close(got, branch(x))
    with torch.no_grad():
        torch.testing.assert_close(
            plait.compile(branch, (torch.ones(3),))(-torch.ones(3)), branch(-torch.ones(3))
        )
    with pytest.raises(Unsupported, match="no lowering for cond"):
        torch.compile(branch, backend="plait", options={"wrapper": wrapper, "strict": True})(
            torch.ones(3)
        )


def by_rule(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A function with an operator whose rule records a loop and then raises error."""
    op = torch.ops.aten.special_airy_ai.default
    monkeypatch.setattr(core, "RULES", dict(RULES))
    monkeypatch.setattr("plait.lower.calls.RULES", core.RULES)

    @extend.lowering(op)
    def rule(ctx: core.Lowering, x: core.View) -> core.View:
        ctx.pointwise(x.shape, x.dtype, lambda ops, i: x.load(ops, i))
        raise error

    return lambda x: op(x * 2) + 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rule_with_a_bug_is_told_and_passed_over(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, x = by_rule(KeyError("a mistake of ours"), monkeypatch), torch.randn(9)
    told = r"bug in plait: the rule of aten\.special_airy_ai\.default failed with KeyError\('a"
    options = {"wrapper": wrapper}
    with pytest.warns(UserWarning, match=told + r".*\(test_ladder\.py:\d+, in rule\)"):
        got = torch.compile(fn, backend="plait", options=options)(x)
    torch.testing.assert_close(got, fn(x))
    with pytest.raises(InternalError, match=told) as raised:
        torch.compile(fn, backend="plait", options=options | {"strict": True})(x)
    assert str(raised.value).count("bug in plait") == 1
    assert "test_ladder.py" in raised.value.where


def test_a_rule_that_declines_is_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, x = by_rule(core.NoRule("not today"), monkeypatch), torch.randn(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strict in (False, True):
            got = torch.compile(fn, backend="plait", options={"strict": strict})(x)
            torch.testing.assert_close(got, fn(x))
    report = explained(fn, x)
    assert [(s.rung, s.what, s.reason) for s in report.ladder] == [
        ("aten", "aten::special_airy_ai", "not today")
    ]
    assert report.kernels == 2  # what the rule recorded is gone


def hinted(x: torch.Tensor) -> Any:
    op = torch.ops.higher_order.hints_wrapper
    return op(lambda x: x.sin(), (x * 2,), {}, hints={"k": 1}) + 1


def test_operators_that_run_as_python_are_told() -> None:
    with pytest.warns(UserWarning, match=r"plait calls higher_order::hints_wrapper: runs as Pyth"):
        report = explained(hinted, torch.ones(3))
    assert [(s.rung, s.what) for s in report.ladder] == [("python", "higher_order::hints_wrapper")]
    assert "test_ladder.py:" in report.ladder[0].where
    assert report.fallbacks == {"higher_order::hints_wrapper": 1}


def test_a_call_of_aten_is_told_and_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    report = explained(lambda x: x.sinh(), torch.ones(3, dtype=torch.complex64))
    (step,) = report.ladder
    assert (step.rung, step.what) == ("aten", "aten::sinh") and step.where.startswith(
        "test_ladder.py:"
    )
    assert not [w for w in recwarn if str(w.message).startswith("plait")]


# ------------------------------------------------------------------------------------------- Dynamo
def test_what_dynamo_leaves_to_eager_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def often(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    few = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False)
    with few, caplog.at_level(logging.WARNING, logger="plait"):
        fn = torch.compile(often, backend="plait", dynamic=False)
        for n in range(2, 6):
            fn(torch.ones(n))
    (found,) = [line for line in dynamo.left_to_eager if "often" in line]
    assert "test_ladder.py" in found and "torch._dynamo.config.recompile_limit" in found
    assert any(
        "Dynamo leaves to eager" in r.getMessage() and "often" in r.getMessage()
        for r in caplog.records
    )
    report = explained(lambda x: x + 1, torch.ones(2))
    assert (
        found in report.left_to_eager
        and f"functions that Dynamo leaves to eager from now on:\n  {found}" in (report.text)
    )


def test_functions_that_break_in_a_loop_are_told() -> None:
    """Dynamo makes no graph of them, not even before the loop."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    def looping(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        for _ in range(2):
            x = step(x)
        return x.tanh()

    report = explained(looping, torch.ones(2))
    (found,) = [line for line in report.left_to_eager if line.startswith("looping (test_ladder.py")]
    assert found.endswith("Call to `torch._dynamo.graph_break()`, graph break in loop")
    assert f"\n  {found}" in report.text.partition("leaves to eager from now on:")[2]
    assert {op for g in report.graphs for op in ("exp", "tanh") if op in g.kernel_source} == set()
    assert explained(looping, torch.ones(2)).left_to_eager.count(found) == 1


def test_a_graph_as_it_came() -> None:
    gm = torch.fx.symbolic_trace(lambda x, y: (x + y, [x * 2, None]))
    kept, text = ladder.AsItCame(gm), str(gm.graph)
    for n in gm.graph.nodes:
        if n.op == "call_function":
            n.args = (1, 2)
    assert str(kept.module().graph) == text != str(gm.graph)
    one = torch.ones(2)
    assert kept.module()(one, one)[1][0].tolist() == [2, 2]
