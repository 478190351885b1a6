"""Control flow is structure of the program: its graphs are subprograms, in every stage and every
target."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan as torch_associative_scan
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.map import map as torch_map
from torch.fx.experimental.proxy_tensor import make_fx

import plait
import plait.capture.program as road
import plait.lower.graph as lowering
from plait.capture.checkpoints import run_by_eager
from plait.errors import InputError, InternalError, Unsupported
from plait.graph.write_out import write_out
from plait.ir.calls import Control, Extern, all_programs
from plait.ir.text import program_text, read_program
from plait.ir.verify import verify as verify_loops
from plait.lower.core import NoRule
from plait.schedule.plan import Kernel
from plait.schedule.text import plan_text, read_plan
from plait.wrapper import instructions as ins
from plait.wrapper.program import CompileRecord, Program, observers
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify
from tests.fuzz.flow import REGIONS, associative_scan, scan, while_loop
from tests.test_package_control import PROGRAMS

WRAPPERS = ("native", "python", "cpp", "fx")


@pytest.fixture
def records() -> Iterator[list[CompileRecord]]:
    """What is compiled meanwhile."""
    torch._dynamo.reset()
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    yield made
    observers.reset(token)


def compiled(fn: Callable[..., Any], wrapper: str = "native", **more: Any) -> Callable[..., Any]:
    options = {"wrapper": wrapper, "verify": True, **more}
    return torch.compile(fn, backend="plait", options=options)


def same(fn: Callable[..., Any], got: Callable[..., Any], *args: Any) -> None:
    """got does what fn does."""
    made = []
    for call in (fn, got):
        torch.manual_seed(0)
        made.append(pytree.tree_leaves(call(*args)))
    for want, have in zip(*made, strict=True):
        torch.testing.assert_close(have, want)


def calls_of(record: CompileRecord) -> list[ins.CallPrograms]:
    every = [i for p in all_programs(record.wrapper) for i in p.body]
    assert not any(isinstance(i, ins.CallPython) for i in every)
    return [i for i in every if isinstance(i, ins.CallPrograms)]


KINDS = {"repeat": "loop", "never": "loop", "count": "loop", "in_a_branch": "cond",
         "mapped": "scan", "scanned": "scan", "drawn": "cond", "nested": "call",
         "branch": "cond"}  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", KINDS)
def test_every_target_runs_it(name: str, wrapper: str, records: list[CompileRecord]) -> None:
    module = PROGRAMS[name]
    x = torch.randn(5, 4)
    with torch.no_grad():
        run = compiled(module, wrapper, eager_random=name == "drawn")
        for given in (x, x.abs(), -x.abs()):
            same(module, run, given)
        same(module, run, torch.randn(7, 4))  # sizes are symbols from here on
    found = calls_of(records[0])
    assert found[0].kind == KINDS[name]
    if name == "nested":  # one graph that is called twice is one program
        assert [c.programs for c in found] == [(0,), (0,)]
        assert len(records[0].wrapper.programs) == 1
    drawn = {"aten::rand_like"} if name == "drawn" else set()
    assert {step.what for step in records[0].ladder} == drawn
    assert any(isinstance(i, ins.Launch) for p in records[0].wrapper.programs for i in p.body)


def test_regions_are_written_out_for_cuda_graphs(records: list[CompileRecord]) -> None:
    module = PROGRAMS["nested"]
    with torch.no_grad():
        run = compiled(module, cuda_graphs=True)
        for x in (torch.randn(5, 4), torch.randn(5, 4), torch.randn(7, 4)):
            same(module, run, x)
    assert not calls_of(records[0]) and not records[0].wrapper.programs
    x = torch.randn(5, 4, requires_grad=True)
    (want,), (got,) = (torch.autograd.grad(f(x).sum(), x) for f in (module, run))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["in_a_branch", "scanned", "branch", "count"])
def test_texts_read_back(name: str, records: list[CompileRecord]) -> None:
    with torch.no_grad():
        compiled(PROGRAMS[name])(torch.randn(5, 4))
    plan, wrapper = records[0].plan, records[0].wrapper
    assert plan.programs and len(plan.programs) == len(wrapper.programs)
    assert read_program(program_text(plan.program)) == plan.program
    assert read_plan(plan_text(plan), plan.program) == plan
    assert read(text(wrapper)) == wrapper


@pytest.mark.parametrize(
    ("wrapper", "dynamic"), [*((wrapper, False) for wrapper in WRAPPERS), ("native", True)]
)
def test_gradients_go_through_a_loop(
    wrapper: str, dynamic: bool, records: list[CompileRecord]
) -> None:
    """Of any number of rounds: PyTorch's own gradients of no round are those of one."""

    def fn(x: Tensor, w: Tensor, n: Tensor) -> Tensor:
        def step(i: Tensor, x: Tensor) -> Any:
            inner = (torch.zeros_like(i), x)
            _, y = while_loop(lambda j, y: j < i, lambda j, y: (j + 1, (y * w).cos()), inner)
            return i + 1, (y @ w).tanh() + x

        made: Tensor = while_loop(lambda i, x: i < n, step, (torch.zeros_like(n), x))[1]
        return made

    torch.manual_seed(0)
    run = torch.compile(
        fn, backend="plait", dynamic=dynamic, options={"wrapper": wrapper, "strict": True}
    )
    for n in (0, 3, 1, 0):
        given = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        wanted = given[: 2 if n else 1]  # by itself no round leads to w
        want, got = (
            torch.autograd.grad(call(*given, torch.tensor(n)).square().sum(), wanted)
            for call in (fn, run)
        )
        torch.testing.assert_close(got, want)
    forward, backward = ({c.kind for c in calls_of(r)} for r in records)
    assert forward >= {"rounds"} and backward >= {"loop"}


def test_control_flow_over_a_stride_that_varies_says_what_to_do() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return torch.cond((y > 0).any(), lambda x, y: x + y, lambda x, y: x * y, (x, y))

    auto = torch.export.Dim.AUTO
    given = torch.randn(2)[::2], torch.randn(8)
    with pytest.raises(Unsupported, match=r"(?s)control flow a tensor of size 1.*clone"):
        plait.compile(fn, given, ({0: auto}, {0: auto}))
    run = plait.compile(lambda x, y: fn(x.clone(), y), given, ({0: auto}, {0: auto}))
    torch.testing.assert_close(run(*given), fn(*given))


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_memory_of_what_bodies_are_given_and_give(wrapper: str) -> None:
    """Expanded tensors come as they are seen, and a copy of a part lies in memory of its own."""

    def fn(x: Tensor) -> Tensor:
        made: Tensor = torch.cond(
            x.sum() > 0,
            lambda x: torch.stack([x, x.as_strided((5, 4), (0, 1)).t()]).sin()[1].clone(),
            lambda x: x.clone(),
            (x,),
        )
        return made

    torch._dynamo.reset()
    x = torch.arange(4.0)[:, None].expand(4, 5)
    with torch.no_grad():
        got = compiled(fn, wrapper)(x)
    torch.testing.assert_close(got, x.sin())
    assert (got.storage_offset(), got.untyped_storage().nbytes()) == (0, 80)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_go_through_a_branch(wrapper: str, records: list[CompileRecord]) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def one(y: Tensor) -> Tensor:
                return self.a(y).tanh()

            def other(y: Tensor) -> Tensor:
                return self.b(y) * 2

            chosen: Tensor = torch.cond(x.mean() > 0, one, other, (x,))
            return chosen.sin()

    torch.manual_seed(0)
    module = Gate()
    run = compiled(module, wrapper)
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        grads = []
        for call in (module, run):
            module.zero_grad()
            x = x.detach().requires_grad_()
            call(x).sum().backward()
            grads.append([x.grad, *(p.grad for p in module.parameters())])
        for want, have in zip(*grads, strict=True):
            torch.testing.assert_close(have, want)
    assert [r.kind for r in records] == ["forward", "backward"]
    assert all(calls_of(r) for r in records)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_go_through_a_branch_on_a_size(
    wrapper: str, records: list[CompileRecord]
) -> None:
    """The backward graph is given the condition."""

    def fn(x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.shape[0] > 6, torch.sin, torch.exp, (x * 2,))
        return chosen

    run = torch.compile(fn, backend="plait", dynamic=True, options={"wrapper": wrapper})
    for n in (5, 8, 6, 9):
        x = torch.randn(n, 4, requires_grad=True)
        (want,), (got,) = (torch.autograd.grad(call(x).sum(), x) for call in (fn, run))
        torch.testing.assert_close(got, want)
    assert [r.kind for r in records] == ["forward", "backward"]


def test_a_check_in_a_branch_of_a_package(tmp_path: Path) -> None:
    """Tracing checks the dtype of what a conversion that changes nothing is given."""

    class Sums(nn.Module):
        def forward(self, x: Tensor, positive: Tensor) -> Tensor:
            result: Tensor = torch.cond(
                positive, lambda x: x.cumsum(0).to(x.dtype), lambda x: x * 2, (x,)
            )
            return result

    x = torch.arange(6)
    plait.package(Sums(), tmp_path / "p.plait", (x, torch.tensor(True)))
    run = plait.load(tmp_path / "p.plait")
    for b in (torch.tensor(True), torch.tensor(False)):
        torch.testing.assert_close(run(x, b), Sums()(x, b))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_no_subprogram_runs_as_python_and_says_why(
    wrapper: str, records: list[CompileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of what was lowered before it was refused."""

    def refuse(*_: object) -> object:
        raise NoRule(f"refused for {wrapper}")

    monkeypatch.setattr("plait.lower.control_flow.results", refuse)
    module = PROGRAMS["branch"]
    words = f"higher_order::cond: runs as Python: refused for {wrapper}"
    with pytest.warns(UserWarning, match=words):
        run = compiled(module, wrapper)
        with torch.no_grad():
            for x in (torch.ones(5, 4), -torch.ones(5, 4)):
                torch.testing.assert_close(run(x), module(x))
    (record,) = records
    assert [i.label for i in record.wrapper.body if isinstance(i, ins.CallPython)] == [
        "higher_order::cond"
    ]
    assert record.wrapper.programs == ()


def test_finite_asserts_and_watch(records: list[CompileRecord]) -> None:
    def fn(x: Tensor) -> Tensor:
        result: Tensor = torch.cond(x.sum() > 0, lambda x: x.log(), lambda x: x + 1, (x * 2,))
        return result * 3

    seen: list[str] = []
    with torch.no_grad(), plait.watch(lambda node, label, t: seen.append(label)):
        run = torch.compile(fn, backend="plait", options={"finite_asserts": True})
        same(fn, run, torch.ones(4))
    assert any(label.startswith("higher_order::cond (") for label in seen)
    with pytest.raises(RuntimeError, match=r"higher_order::cond \(.*test_control_flow.py"):
        run(torch.tensor([0.0, 1.0, 1.0, 1.0]))


def fault(control: Control, n_operands: int, n_results: int) -> str:
    return control.fault(n_operands, [(2, 1), (2, 2), (2, 2)], n_results)


@pytest.mark.parametrize(
    ("control", "operands", "results", "words"),
    [
        (Control("if", (0,)), 2, 1, "unknown kind"),
        (Control("cond", (1,)), 3, 2, "a wrong number of programs"),
        (Control("call", (3,)), 2, 2, "a wrong number of programs"),
        (Control("call", (1,)), 3, 2, "other operands"),
        (Control("call", (0,)), 2, 2, "other results"),
        (Control("cond", (0, 1)), 3, 2, "other results"),
        (Control("cond", (1, 2)), 2, 2, "other operands"),
        (Control("call", (1,), 1), 2, 2, "carries or scans more"),
        (Control("loop", (0, 1), 2, 1), 2, 2, "carries or scans more"),
        (Control("loop", (1, 2), 2), 2, 2, "a condition with one result"),
        (Control("loop", (0, 1), 1), 2, 2, "a condition with one result"),
        (Control("scan", (1,), 1, 2), 2, 2, "carries or scans more"),
        (Control("scan", (1,), 1), 2, 2, "something to scan"),
        (Control("scan", (0,), 2, 0), 2, 1, "something to scan"),
    ],
)
def test_faults_have_words(control: Control, operands: int, results: int, words: str) -> None:
    assert words in fault(control, operands, results)


def test_verifiers_look_into_subprograms(records: list[CompileRecord]) -> None:
    for good in (Control("cond", (1, 2)), Control("loop", (0, 1), 2), Control("scan", (1,), 1, 1)):
        assert fault(good, 2 + (good.kind == "cond"), 2) == ""
    with torch.no_grad():
        compiled(PROGRAMS["in_a_branch"])(torch.randn(5, 4))
    loops, wrapper = records[0].plan.program, records[0].wrapper
    inner = replace(loops.programs[0], ops=())
    with pytest.raises(InternalError, match="is read before it is defined"):
        verify_loops(replace(loops, programs=(inner, *loops.programs[1:])), "damage")
    (call,) = (o for o in loops.ops if isinstance(o, Extern))
    assert call.control is not None
    wrong = replace(call, control=replace(call.control, programs=(0, 9)))
    with pytest.raises(InternalError, match="a wrong number of programs"):
        verify_loops(replace(loops, ops=tuple(wrong if o is call else o for o in loops.ops)), "x")
    nested = replace(wrapper.programs[0], body=wrapper.programs[0].body[-1:])
    with pytest.raises(InternalError, match="is used before it is defined"):
        verify(replace(wrapper, programs=(nested, *wrapper.programs[1:])))
    with pytest.raises(InternalError, match="the program has 1 subprograms"):
        verify(replace(wrapper, programs=wrapper.programs[:1]))


def test_results_of_a_region_are_its_own_to_look_after(records: list[CompileRecord]) -> None:
    """Nothing looks at them again, as long as their layout is numbers that the region decides."""
    torch._dynamo.reset()
    run = compiled(PROGRAMS["nested"])
    with torch.no_grad():
        for n in (5, 7):
            run(torch.randn(n, 4))
    known, symbolic = (r.wrapper for r in records)
    checks = [[i for i in p.body if isinstance(i, ins.AssertSizeStride)] for p in (known, symbolic)]
    assert not checks[0] and len(checks[1]) >= 2
    (inner,) = known.programs
    handed_on = replace(inner, body=(ins.Return((ins.Ref(inner.inputs[0].name),)),))
    with pytest.raises(InternalError, match="nothing stands behind the sizes of"):
        verify(replace(known, programs=(handed_on,)))


def test_a_region_looks_after_views_of_what_it_makes(records: list[CompileRecord]) -> None:
    """Such as the means of rows that a backward pass reads."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return REGIONS["norm"](REGIONS["norm"](x, y), y)

    torch.compile(fn, backend="plait")(torch.rand(2, 8, requires_grad=True), torch.rand(2, 8))
    (record,) = records
    assert any(isinstance(i, ins.View) for i in record.wrapper.programs[0].body)
    assert not any(isinstance(i, ins.AssertSizeStride) for i in record.wrapper.body)


def test_gradients_of_regions_that_eager_runs() -> None:
    """PyTorch's own operator fails there."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return REGIONS["soft"](x, y) + REGIONS["soft"](x, y)

    def grads(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        args = tuple(torch.rand(3, 4, requires_grad=True) for _ in range(2))
        return torch.autograd.grad(run(*args), args, torch.rand(3, 4))

    torch._dynamo.reset()
    run = torch.compile(fn, backend=lambda gm, _: run_by_eager(gm))
    torch.testing.assert_close(grads(run), grads(fn))


@pytest.mark.parametrize("n", [1, 2, 9, 16, 33])
def test_associative_scans_become_operators(n: int) -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> Any:
        return associative_scan_op(lambda a, b, c, d, w: (a * c, b + d + w), [x, y], (w,))

    args = torch.rand(n, 4), torch.rand(n, 4), (w := torch.rand(4))
    graph = make_fx(fn, tracing_mode="fake")(*args)
    assert write_out(graph) == 1
    assert all("val" in m.meta for m in graph.graph.nodes if m.op == "call_function")
    graph.recompile()
    (a, *x), (b, *y), _ = args
    want = [(a, b)]
    for c, d in zip(x, y, strict=True):
        a, b = a * c, b + d + w
        want.append((a, b))
    torch.testing.assert_close(graph(*args), tuple(map(torch.stack, zip(*want, strict=True))))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_associative_scans_of_varying_length(wrapper: str, records: list[CompileRecord]) -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> Any:
        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1] + w

        return associative_scan(combine, (x, y), 1, True, "pointwise")

    run = torch.compile(fn, backend="plait", dynamic=True, options={"wrapper": wrapper})
    for n in (5, 2, 8, 33):
        same(fn, run, torch.rand(3, n), torch.rand(n, 3).t(), torch.zeros(()))
    (record,) = records
    assert [c.kind for c in calls_of(record)] == ["loop"]
    body = record.wrapper.programs[1].body
    assert sum(isinstance(i, ins.Launch) for i in body) == 1  # a kernel a round


@pytest.mark.parametrize("dynamic", [False, True])
def test_associative_scans_lie_as_tracing_says(dynamic: bool) -> None:
    """Also where sizes are 1, and where slices lie in another order."""

    def fn(x: Tensor) -> Tensor:
        return associative_scan(torch.minimum, x, 1, False, "pointwise")

    run = torch.compile(fn, backend="plait", dynamic=dynamic)
    for x in (torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.rand(1, 3, 1)):
        same(fn, run, x)


def test_what_a_trial_finds_of_sizes_is_forgotten() -> None:
    """What a scan asks of its length has the other answer in a trace for lengths of 1."""

    def fn(x: Tensor) -> Tensor:
        sums = torch_associative_scan(torch.add, x, 0, combine_mode="generic")
        return torch_map(torch.neg, sums)

    run = plait.compile(fn, (torch.ones(5),), ({0: torch.export.Dim.AUTO},))
    assert run(torch.arange(5.0)).tolist() == [0, -1, -3, -6, -10]
    with pytest.raises(InputError, match="a condition of the program"):
        run(torch.ones(7))


def test_a_body_in_a_package_need_not_read_what_it_is_given(tmp_path: Path) -> None:
    def fn(c: Tensor, x: Tensor) -> Any:
        rows = scan(lambda c, x: (c + x, c * 2), c, x)[1]
        return scan(lambda c, x: (c + x[1], c * 2), c, (rows, x))

    args = torch.ones(()), torch.arange(3.0)
    plait.package(fn, tmp_path / "p.plait", args, machines=["portable"])
    same(fn, plait.load(tmp_path / "p.plait"), *args)


@pytest.mark.parametrize("train", [False, True])
def test_regions_are_compiled_once_however_often_they_are_called(
    train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lowered bodies and built kernels are as many for 12 calls as for 3; what is left, of the
    operands of each call, grows no faster than they do."""
    lowered: list[int] = []
    lower = lowering._lower
    compile_graph = road.compile_graph

    def counted(*args: Any) -> Any:
        lowered[-1] += 1
        return lower(*args)

    def work(n: int) -> tuple[int, int, int]:
        """Lowered graphs, kernels, and calls of plait's functions that compiling took."""
        torch._dynamo.reset()
        lowered.append(0)
        kernels = calls = 0

        def called(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and "/plait/" in frame.f_code.co_filename

        def profiled(*args: Any, **kwargs: Any) -> Program:
            nonlocal kernels
            sys.setprofile(called)
            try:
                made = compile_graph(*args, **kwargs)
            finally:
                sys.setprofile(None)
            kernels += sum(isinstance(s, Kernel) for p in all_programs(made.record.plan)
                           for s in p.steps)  # fmt: skip
            return made

        monkeypatch.setattr(road, "compile_graph", profiled)
        region = torch.compiler.nested_compile_region(lambda x, w, b: (x @ w + b).tanh() * x)

        def fn(x: Tensor, *weights: Tensor) -> Tensor:
            for w, b in zip(weights[:n], weights[n:], strict=True):
                x = region(x, w, b)
            return x

        shapes = [(4, 4)] * n + [(4,)] * n
        weights = [torch.rand(s, requires_grad=train) for s in shapes]
        run = torch.compile(fn, backend="plait", options={"verify": False})
        out = run(torch.rand(3, 4), *weights)
        if train:
            out.sum().backward()
        return lowered[-1], kernels, calls

    monkeypatch.setattr(lowering, "_lower", counted)
    work(12)  # what is imported or found once, whatever n is
    few, some, many = (work(n) for n in (3, 6, 12))
    assert few[:2] == some[:2] == many[:2]
    assert few[0] == (4 if train else 2)
    assert many[2] - some[2] < 2.1 * (some[2] - few[2])  # 2 would be a line, 4 a square
