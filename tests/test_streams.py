"""Streams that the user chose, up to the text of every target: graphs of fake CUDA tensors, in the
form in which AOTAutograd hands them over."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import graph_bytecode_inputs
from torch._functorch._aot_autograd import streams as torch_streams
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from plait import compat
from plait.compile import compile_graph
from plait.config import Config
from plait.graph.captured import Captured
from plait.graph.streams import order_streams
from plait.wrapper.cpp import make_cpp
from plait.wrapper.fx import make_fx as make_fx_graph
from plait.wrapper.instructions import (
    Alloc,
    CallExtern,
    Free,
    Launch,
    Partition,
    Place,
    Ref,
    Reuse,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.partition import partition
from plait.wrapper.program import Artifacts, CompileRecord
from plait.wrapper.python import make_python
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify
from plait.wrapper.walk import used
from tests.interpreted import on_gpu
from tests.test_cuda_programs import compile_only, of, pipeline  # noqa: F401

streams = torch.ops.streams
aten = torch.ops.aten
ours = pytest.mark.skipif(
    compat.streams.CALLERS_STREAM is None, reason="this torch runs all on one stream"
)


def graph_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphModule:
    with FakeTensorMode(), torch.no_grad():
        return make_fx(fn, compat.decompositions.decomposition_table())(*map(torch.empty, shapes))


def compiled(graph: GraphModule) -> CompileRecord:
    """The record of a graph whose tensors are said to be on a GPU."""
    captured = Captured(graph, "test", "inference")
    with on_gpu(graph):
        made: CompileRecord = pipeline.compile_graph(
            captured, Config(gpu_arch="sm_90", verify=True)
        ).record
    return made


def on(graph: GraphModule, stream: int, *names: str) -> GraphModule:
    """Gives nodes a stream."""
    for node in graph.graph.nodes:
        if node.name in names:
            node.meta["custom"] = {"stream": stream}
    return graph


def names_of(p: WrapperProgram) -> list[str]:
    """What happens on a GPU, in order."""
    out: list[str] = []
    for i in p.body:
        if isinstance(i, Launch):
            out.append(i.kernel[: i.kernel.rindex("_")].removeprefix("plait_"))
        elif isinstance(i, CallExtern):
            out.append(" ".join([i.op, *(str(a) for a in i.args if isinstance(a, int))]))
    return out


def prefetch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    streams.wait_stream(1, 0)
    z = (x * 2).sin()
    streams.record_event(2, 1)
    w = y.cos() + 1
    streams.wait_event(2, 0)
    return z + w


def wrapped(graph: GraphModule) -> GraphModule:
    """With control_deps around what orders streams, where torch has it."""
    if wrap := getattr(torch_streams, "wrap_all_sync_nodes_with_control_deps", None):
        wrap(graph)
        assert any("control_deps" in str(n.target) for n in graph.graph.nodes)
    return graph


@ours
@pytest.mark.parametrize("form", ["plain", "control_deps"])
def test_order_is_kept(compile_only: None, form: str) -> None:  # noqa: F811
    graph = on(graph_of(prefetch, (64, 64), (64, 64)), 1, "mul", "sin")
    made = compiled(wrapped(graph) if form == "control_deps" else graph)
    p = made.wrapper
    assert names_of(p) == [
        "streams::wait_stream 1 0",
        "streams::fork 0 1",
        "mul_sin",
        "streams::record_stream 1",
        "streams::record_event 2 1",
        "streams::fork 1 0",
        "cos_add",
        "streams::wait_event 2 0",
        "add",
        "streams::record_stream 0",
    ]
    assert made.fallback_reasons == {}
    assert read(text(p)) == p and encode(p) == encode(read(text(p)))
    source = make_python(p, {"cuda": "x.cubins"})
    assert "with rt.below_autograd(), rt.callers_stream():" in source
    assert "torch.ops.streams.fork" in source
    assert "raise SystemExit('test calls streams by number, which no file can hold')" in source
    assert "call('streams::fork', fence=True)(0, 1)" in make_cpp(p)


@ours
def test_the_fx_graph_says_it_too(compile_only: None) -> None:  # noqa: F811
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x @ x
        streams.record_event(2, 1)
        w = y @ y
        streams.wait_event(2, 0)
        return z @ w

    p = compiled(on(graph_of(fn, (256, 256), (256, 256)), 1, "mm")).wrapper
    gm = make_fx_graph(p, Artifacts({}))
    gm.graph.eliminate_dead_code()
    calls = [(str(n.target), *n.args) for n in gm.graph.nodes if "streams" in str(n.target)]
    assert [c for c in calls if "record_stream" not in c[0]] == [
        ("streams.fork.default", 0, 1), ("streams.record_event.default", 2, 1),
        ("streams.fork.default", 1, 0), ("streams.wait_event.default", 2, 0),
    ]  # fmt: skip


@ours
def test_what_is_equal_is_not_shared(compile_only: None) -> None:  # noqa: F811
    """Neither a value nor a copy that another stream made, nor does a kernel move over a fence."""

    def fn(x: torch.Tensor) -> Any:
        y = x.t()[:, ::2].t() @ x  # of a copy, which the second product would share
        streams.wait_event(3, 1)
        return y, x.exp(), x.exp() + 1, x.t()[:, ::2].t() @ x

    graph = on(graph_of(fn, (32, 32)), 1, "exp_1", "add")
    p = compiled(graph).wrapper
    assert sum("exp" in i.kernel for i in of(p, Launch)) == 2
    body = list(p.body)
    fence = body.index(CallExtern("streams::wait_event", (3, 1), (), (), fence=True))
    assert not any(isinstance(i, Launch) and "exp" in i.kernel for i in body[:fence])


@ours
def test_memory_is_the_allocators(compile_only: None) -> None:  # noqa: F811
    """Nothing lies in an arena or takes over what another stream may still read; every buffer that
    two streams use is known to the allocator before its end."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x.sin() @ x
        streams.wait_stream(1, 0)
        b = a.cos() @ a
        streams.wait_stream(0, 1)
        return (a.exp() @ b).sum(0)

    p = compiled(on(graph_of(fn, (64, 64)), 1, "cos", "mm_1")).wrapper
    assert not of(p, Reuse) and not of(p, Place)
    body = list(p.body)
    made = {i.name: "0" for i in of(p, Alloc)}
    now = "0"
    for i in body:
        if isinstance(i, CallExtern) and i.op == "streams::fork":
            now = str(i.args[1])
        elif isinstance(i, Alloc):
            made[i.name] = now
        elif isinstance(i, (Launch, CallExtern)) and not (
            isinstance(i, CallExtern) and i.op.startswith("streams::")
        ):
            for name in (n for n in used(i) if n in made and made[n] != now):
                record = CallExtern(
                    "streams::record_stream", (Ref(name), int(now)), (), (), fence=True
                )
                assert record in body and body.index(record) < body.index(Free(name))


def test_tensors_that_are_kept_for_a_stream_live_that_long(compile_only: None) -> None:  # noqa: F811
    """As backward passes of torch have it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x.sin() @ x
        b = a.cos() @ x
        streams.record_stream(a, 1)
        streams.sync_dealloc(2, 0, a)
        return b

    body = list(compiled(graph_of(fn, (64, 64))).wrapper.body)
    *_, last = (i for i in body if isinstance(i, CallExtern) and i.op == "streams::sync_dealloc")
    (kept,) = (a for a in last.args if isinstance(a, Ref))
    assert CallExtern("streams::record_stream", (kept, 1), (), (), fence=True) in body
    assert body.index(Free(kept.name)) == body.index(last) + 1


@ours
def test_new_values_of_inputs_come_last(compile_only: None) -> None:  # noqa: F811
    """They are written by the caller's stream, which waits for the others, and these for it."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.sin()
        w = y + 1
        x.copy_(z)
        return w

    p = compiled(on(graph_of(fn, (8,), (8,)), 1, "sin", "copy_")).wrapper
    assert [n for n in names_of(p) if "record" not in n][-3:] == [
        "add",
        "streams::wait_stream 0 1",
        "streams::wait_stream 1 0",
    ]
    kinds = [type(i).__name__ for i in p.body]
    waits = [
        k
        for k, i in enumerate(p.body)
        if isinstance(i, CallExtern) and i.op == "streams::wait_stream"
    ]
    assert waits[0] < kinds.index("Copy") < waits[1]


@ours
def test_copies_to_the_host_and_calls_without_results_are_work() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.ops.plait_test_streams.fill(x)
        return x.cpu()

    with FakeTensorMode(), torch.no_grad():
        graph = make_fx(fn, compat.decompositions.decomposition_table())(
            torch.empty(8, device="cuda")
        )
    order_streams(on(graph, 1, "fill", "_to_copy"))
    calls = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    assert calls == ["fork_default", "fill", "_to_copy", "fork_default_1"]


def test_streams_of_graphs_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 would crash over a weak reference to one that has died."""
    stream = Named("a stream")
    alive = weakref.ref(stream)
    monkeypatch.setitem(graph_bytecode_inputs.index_to_external_object_weakref, 9, alive)
    monkeypatch.setattr(compat.streams, "BEFORE_2_13", True)
    monkeypatch.setattr(compat.streams, "_streams", {})
    graph = graph_of(lambda x: x.sin(), (8,))
    order_streams(graph)
    assert stream not in compat.streams._streams.values()
    order_streams(on(graph, 1, "sin"))
    del stream
    assert alive() is not None
    compat.streams._streams.clear()
    monkeypatch.setattr(compat.streams, "BEFORE_2_13", False)
    order_streams(on(graph_of(lambda x: x.sin(), (8,)), 1, "sin"))
    assert alive() is None


@pytest.mark.skipif(compat.versions.BEFORE_2_13, reason="this torch needs its streams to live")
@pytest.mark.parametrize("kind", [torch.Stream, torch.Event])
def test_a_weak_reference_to_a_stream_may_outlive_it(kind: type) -> None:
    """What compat takes for true of torch's own types."""
    alive = weakref.ref(kind(device="cpu"))
    assert alive() is None


def test_nothing_of_it_is_recorded(compile_only: None) -> None:  # noqa: F811
    p = compiled(graph_of(prefetch, (64, 64), (64, 64))).wrapper
    (part,) = of(partition(p, []), Partition)
    assert not part.recorded and part.reason == "it uses streams of its own"
    verify(partition(p, []))


def test_torch_that_loses_waits_runs_all_on_one_stream(
    compile_only: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat.streams, "CALLERS_STREAM", None)
    p = compiled(on(graph_of(prefetch, (64, 64), (64, 64)), 1, "mul", "sin")).wrapper
    fences = [n for n in names_of(p) if n.startswith("streams::")]
    assert fences == [
        "streams::wait_stream 1 0",
        "streams::record_event 2 1",
        "streams::wait_event 2 0",
    ]


# ----------------------------------------------------------------------------------------- on a CPU
LOG: list[str] = []


@torch.library.custom_op("plait_test_streams::say", mutates_args=())
def say(text: str) -> None:
    LOG.append(text)


say.register_fake(lambda text: None)


@torch.library.custom_op("plait_test_streams::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> None:
    x.fill_(1)


fill.register_fake(lambda x: None)
torch.fx.node.has_side_effect(torch.ops.plait_test_streams.say.default)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_control_deps_of_any_operator(wrapper: str) -> None:
    """What it wraps runs in its place, and its results are the subgraph's."""
    control = importlib.import_module("torch._inductor.fx_passes.control_dependencies")

    def fn(x: torch.Tensor) -> Any:
        torch.ops.plait_test_streams.say("first")
        y = x.sin()
        torch.ops.plait_test_streams.say("second")
        return y + 1, x.cos()

    graph = graph_of(fn, (8,))
    first, second = graph.graph.find_nodes(
        op="call_function", target=torch.ops.plait_test_streams.say.default
    )
    sin, cos = (
        graph.graph.find_nodes(op="call_function", target=t)[0]
        for t in (aten.sin.default, aten.cos.default)
    )
    control.preserve_node_ordering(graph.graph, {second: [sin], cos: [second, first]})
    assert "control_deps" in str(graph.graph)
    run = compile_graph(Captured(graph, "test", "inference"), Config(wrapper=wrapper, verify=True))
    x = torch.randn(8)
    LOG.clear()
    got = run.call(x)
    assert LOG == ["first", "second"]
    torch.testing.assert_close(got, (x.sin() + 1, x.cos()))


class Named:
    """A stream or an event of no device."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: Named) -> None:
        LOG.append(f"{stream.name} records {self.name}")

    def wait(self, stream: Named) -> None:
        LOG.append(f"{stream.name} waits for {self.name}")

    def wait_event(self, event: Named) -> None:  # as torch 2.11 has it
        event.wait(self)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx"])
def test_as_torch_compile_brings_it(
    wrapper: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("stream", "event"):
        name = f"_get_{kind}_by_index"
        monkeypatch.setattr(
            torch._dynamo.variables.streams, name, lambda k, kind=kind: Named(f"{kind}{k}")
        )

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x * 2).sin()
        streams.record_event(2, 1)
        w = y.cos() + z
        streams.wait_event(2, 0)
        return z * w

    torch._dynamo.reset()
    x, y = torch.randn(8, requires_grad=training), torch.randn(8)
    LOG.clear()
    got = torch.compile(fn, backend="plait", options={"wrapper": wrapper})(x, y)
    assert LOG == ["stream1 records event2", "stream0 waits for event2"]
    want = fn(x, y)
    torch.testing.assert_close(got, want)
    if training:
        torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x) for r in (got, want)))
