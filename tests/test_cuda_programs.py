"""Programs for a GPU, compiled on a machine without one: graphs of fake CUDA tensors, up to the
bytes of the plan."""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks import row_tiles_gpu
from plait import compat
from plait.config import Config
from plait.errors import UserError
from plait.graph.captured import Captured
from plait.ir.calls import Extern
from plait.ir.expr import numel
from plait.ir.loops import Alias
from plait.kernel.triton.dialects import GPUS, NVIDIA, gpu_of
from plait.pipelines import split_joint
from plait.runtime.cubin import Cubin, pack
from plait.runtime.load import LoadError, load
from plait.schedule.layout import unaligned
from plait.schedule.plan import Kernel
from plait.tools.bits import rows_line
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    CallExtern,
    CallPrograms,
    Copy,
    DefineKernel,
    Launch,
    Partition,
    Place,
    Return,
    TensorInput,
    View,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.partition import partition as cut_for_graphs
from plait.wrapper.program import CompileRecord
from plait.wrapper.python import make_python
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify
from tests.interpreted import on_gpu

aten = torch.ops.aten
pipeline = importlib.import_module("plait.compile")
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")
without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the message is another one with CUDA"
)


class _NotLoaded:
    boxed = None


@pytest.fixture
def compile_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pipeline without its ends: nothing is built, nothing is loaded."""
    monkeypatch.setattr("plait.kernel.triton.target.triton_version", lambda: "3.6.0")
    monkeypatch.setattr(pipeline, "_build", lambda sources, cfg: {})
    monkeypatch.setattr(pipeline, "WRAPPERS", {"native": lambda *args: _NotLoaded()})
    yield


def record(
    fn: Callable[..., Any], *args: torch.Tensor, mode: FakeTensorMode, **options: Any
) -> CompileRecord:
    with mode, torch.no_grad():
        graph = make_fx(torch.func.functionalize(fn), compat.decompositions.decomposition_table())(
            *args
        )
    cfg = Config(gpu_arch="sm_90", verify=True, **options)
    return pipeline.compile_graph(Captured(graph, "test", "inference"), cfg).record


def fakes(
    *shapes: Sequence[int], device: str = "cuda", dtype: torch.dtype = torch.float32
) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    mode = FakeTensorMode()
    with mode:
        return mode, [torch.empty(tuple(s), device=device, dtype=dtype) for s in shapes]


def of(program: WrapperProgram, kind: type) -> list[Any]:
    return [i for i in program.body if isinstance(i, kind)]


def test_everything_is_on_the_device(compile_only: None) -> None:
    mode, (x, w) = fakes((64, 128), (128,))
    made = record(lambda x, w: F.layer_norm(F.gelu(x + w), (128,), w).sum(0), x, w, mode=mode)
    p = made.wrapper
    assert {i.device for i in p.inputs if isinstance(i, TensorInput)} == {"cuda:0"}
    assert {i.device for i in of(p, Alloc) + of(p, Arena) + of(p, DefineKernel)} == {"cuda:0"}
    assert all(isinstance(i.grid, int) and i.grid > 0 for i in of(p, Launch))
    assert read(text(p)) == p and encode(p) == encode(read(text(p)))
    assert "rt.GpuKernel(libraries['cuda']" in make_python(p, {"cuda": "x.cubins"})
    assert made.kernel_source.count("@triton.jit\ndef plait_") == len(
        {i.kernel for i in of(p, Launch)}
    )


def test_control_flow_takes_numbers_of_the_host_as_they_are(compile_only: None) -> None:
    """Its graphs were traced with them there: a counter of the host stays on it."""

    def counted(x: torch.Tensor, w: torch.Tensor) -> Any:
        n = torch.zeros((), dtype=torch.int64)
        body = lambda x, n, w: ((x @ w).tanh(), n + 1)
        return torch.ops.higher_order.while_loop(lambda x, n, w: n < 4, body, (x, n), (w,))

    with FakeTensorMode(shape_env=ShapeEnv()):
        given = [torch.empty(8, 8, device="cuda") for _ in range(2)]
    graph = compat.tracing.trace_values(counted, given, {})
    cfg = Config(gpu_arch="sm_90", verify=True)
    p = pipeline.compile_graph(Captured(graph, "test", "inference"), cfg).record.wrapper
    (call,) = of(p, CallPrograms)
    devices = {
        i.name: i.device for i in (*p.inputs, *p.body) if isinstance(i, (TensorInput, Alloc))
    }
    for q in p.programs:
        assert [devices[a.name] for a in call.args] == [i.device for i in q.inputs]


def test_regions_are_built_once_and_recorded_whole(compile_only: None) -> None:
    """Each call launches the region's kernels, which are those of one call; an argument that begins
    between two addresses of 16 bytes is copied first."""

    def made_of(n: int) -> CompileRecord:
        mode, (x, w, longer) = fakes((64, 128), (128, 128), (64 * 128 + 1,))
        with mode:
            body = make_fx(lambda x, w: (F.softmax(x @ w, -1) + x, (x * w.sum(0)).sum(-1)))(x, w)
        graph = Graph()

        def add(target: Any, *args: Any) -> Node:
            node = graph.call_function(target, args)
            given = [a.meta.get("val") if isinstance(a, Node) else a for a in args]
            with mode:
                node.meta["val"] = body(*given[2:]) if target is invoke else target(*given)
            return node

        inputs = [graph.placeholder(name) for name in ("x", "w", "longer")]
        for node, val in zip(inputs, (x, w, longer), strict=True):
            node.meta["val"] = val
        invoke, region = torch.ops.higher_order.invoke_subgraph, graph.get_attr("region")
        y, weight, long = inputs
        odd = add(aten.as_strided.default, long, [64, 128], [128, 1], 1)
        results = [add(operator.getitem, add(invoke, region, "region", odd, weight), 1)]
        for _ in range(n):
            y = add(operator.getitem, add(invoke, region, "region", y, weight), 0)
        graph.output((y, *results))
        module = GraphModule({"region": body}, graph)
        cfg = Config(gpu_arch="sm_90", verify=True, cuda_graphs=True)
        return pipeline.compile_graph(Captured(module, "test", "inference"), cfg).record

    two, eight = made_of(2), made_of(8)
    p = eight.wrapper
    assert not of(p, CallPrograms) and not p.programs
    assert [i.recorded for i in of(p, Partition)] == [False, True]
    assert len(of(p, Copy)) == 1
    assert len(of(p, Launch)) - len(of(two.wrapper, Launch)) == 6 * 2
    assert of(p, DefineKernel) == of(two.wrapper, DefineKernel)
    assert eight.kernel_source == two.kernel_source
    assert read(text(p)) == p and encode(p) == encode(read(text(p)))


@pytest.mark.parametrize("shape", [(0, 1), (3, 0), (2, 3)])
def test_copies_at_the_end_are_on_the_device(shape: tuple[int, ...], compile_only: None) -> None:
    """Those of nothing read no buffer that would tell."""
    mode, (x,) = fakes(shape)
    with mode:
        y = torch.empty(4)
    made = record(
        lambda x, y: (x.clone(), x.t().clone(), x.expand(2, *x.shape).clone(), y + 1),
        x,
        y,
        mode=mode,
    )
    assert [i.device for i in of(made.wrapper, Alloc)].count("cpu") == 1


PTX = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

namespace, path, name, types, pointers = {"__name__": "kernels"}, *sys.argv[1:]
exec(compile(open(path).read(), path, "exec"), namespace)
kernel, types = namespace[name], json.loads(types)
aligned = {(k,): [["tt.divisibility", 16]] for k in range(int(pointers))}
source = ASTSource(kernel, dict(zip(kernel.arg_names, types)), {}, aligned)
print(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1}).asm["ptx"])
"""


def ptx_of(file: Path, kernel: str, types: Sequence[str], pointers: int) -> str:
    """The code of a kernel whose first arguments are aligned pointers."""
    command = [sys.executable, "-c", PTX, str(file), kernel, json.dumps(types), str(pointers)]
    env = {**os.environ, "PYTHONPATH": str(TRITON), "TRITON_CACHE_DIR": str(file.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


WIDENED = r"(?:abs|neg)\.s16\s+(%rs\d+),[^;]*;.*cvt\.s64\.s16\s+%rd\d+, \1;"


@needs_triton
@pytest.mark.parametrize(
    ("fn", "dtypes", "wrong"),
    [
        (
            lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[1].to(torch.int16),
            ("*fp32", "*i16"),
            r"add\.s16x2",
        ),
        (lambda x: (-x).sum(-1), ("*i16", "*i64"), WIDENED),
        (lambda x: (0 - x).sum(-1), ("*i16", "*i64"), WIDENED),
        (lambda x: (x * -1).sum(-1), ("*i16", "*i64"), WIDENED),
        (lambda x: x.abs().sum(-1), ("*i16", "*i64"), WIDENED),
    ],
    ids=["positions", "minus", "from nothing", "times -1", "abs"],
)
@pytest.mark.parametrize("opaque", [True, False])
def test_16_bits_are_half_of_32(
    opaque: bool, fn: Callable[[torch.Tensor], torch.Tensor], dtypes: tuple[str, ...], wrong: str,
    compile_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """What ptxas gets wrong in 16 bits is not in the code where the compiler may not see that they
    would do."""
    if not opaque:
        text = "def p_low_half(x):\n    return x.to(tl.int16)\n"
        monkeypatch.setitem(NVIDIA.instructions(GPUS["sm_90"]), "p_low_half", text)
    mode, (x,) = fakes((1, 2, 64, 8), dtype=torch.int16 if dtypes[0] == "*i16" else torch.float32)
    made = record(fn, x, mode=mode)
    (launch,) = of(made.wrapper, Launch)
    (tmp_path / "kernel.py").write_text(made.kernel_source)
    ptx = ptx_of(tmp_path / "kernel.py", launch.kernel, dtypes, len(dtypes))
    assert bool(re.search(wrong, ptx, re.DOTALL)) != opaque


MIXED = [(16 * k, 8) if k % 2 else (7 * k + 1,) for k in range(1, 41)]


def test_many_updates_are_a_few_launches(compile_only: None) -> None:
    """Programs of a launch are dealt out to the tensors, by blocks of 1,024 points."""
    mode, given = fakes(*MIXED, *MIXED)
    n = len(MIXED)
    made = record(lambda *x: torch._foreach_add(x[:n], x[n:], alpha=0.5), *given, mode=mode)
    launches = of(made.wrapper, Launch)
    assert len(launches) == 2, launches
    sizes = sorted(math.prod(s) for s in MIXED)
    for launch in launches:
        lengths, ends = launch.sizes[: n // 2], launch.sizes[n // 2 :]
        unit = 16 if max(lengths) * 16 == sizes[-1] else 1
        assert ends[-1] == launch.grid == sum(-(-k * unit // 1024) for k in lengths)
    assert sum(len(launch.args) for launch in launches) == 3 * n
    assert made.kernel_source.count("@triton.jit") == 2


@needs_triton
def test_updates_of_whole_vectors(compile_only: None, tmp_path: Path) -> None:
    """Lengths that are multiples of 16 keep vectors, whatever part a program works at."""
    shapes = [(16 * k, 8) for k in range(1, 12)]
    mode, given = fakes(*shapes, *shapes)
    n = len(shapes)
    made = record(lambda *x: torch._foreach_add(x[:n], x[n:]), *given, mode=mode)
    (launch,) = of(made.wrapper, Launch)
    (tmp_path / "kernel.py").write_text(made.kernel_source)
    types = [*["*fp32"] * len(launch.args), *["i64"] * len(launch.sizes)]
    ptx = ptx_of(tmp_path / "kernel.py", launch.kernel, types, len(launch.args))
    # A block of 1,024 points of two tensors, in one warp.
    assert len(re.findall(r"ld\.global\.v4", ptx)) == 16 and "ld.global.b32" not in ptx


def test_devices_stay_apart(compile_only: None) -> None:
    mode, (x,) = fakes((8,))
    with mode:
        y = torch.empty(8)
    made = record(lambda x, y: (x + 1, y * 2, x.cpu() + y), x, y, mode=mode)
    kernels = [s for s in made.plan.steps if isinstance(s, Kernel)]
    assert sorted(k.device for k in kernels) == ["cpu", "cuda:0"]
    assert [i.op for i in of(made.wrapper, CallExtern)] == ["aten::_to_copy"]
    assert made.fallback_reasons == {}


def test_two_gpus(compile_only: None) -> None:
    """Equal kernels on both have a name each; no part is recorded."""
    mode = FakeTensorMode()
    with mode:
        x, y = torch.empty(256, 256, device="cuda:0"), torch.empty(256, 256, device="cuda:1")
    made = record(lambda x, y: ((x.sin() @ x).to("cuda:1"), y.sin() @ y), x, y, mode=mode)
    defines = of(made.wrapper, DefineKernel)
    assert len({i.name for i in defines}) == 2
    assert sorted(i.device for i in defines) == ["cuda:0", "cuda:1"]
    cut = cut_for_graphs(made.wrapper, [])
    (part,) = of(cut, Partition)
    assert not part.recorded and "cuda:0, cuda:1" in part.reason
    verify(cut)
    assert made.fallback_reasons == {}


def test_a_number_on_the_host_is_copied_once(compile_only: None) -> None:
    mode, (x,) = fakes((8, 8))
    with mode:
        s = torch.empty(())
    made = record(lambda x, s: (torch.sin(x * s) @ x) * s, x, s, mode=mode)
    copies = [e for e in made.plan.steps if isinstance(e, Extern) and e.op == "aten::_to_copy"]
    assert len(copies) == 1 and not copies[0].fallback


def test_quotients_by_a_number_are_products_with_its_reciprocal(compile_only: None) -> None:
    """As eager's kernels on a GPU have it: 34 / 9 is 3.7777780. A tensor there divides. The
    reciprocal of a Python number is rounded once, but for floors and the like."""
    mode, (x, y, one) = fakes((8,), (8,), ())
    with mode:
        s = torch.empty(())
    one_over = r"(\w+) = tl\.full\(\[\], 1\.0, tl\.float32\)[\s\S]*tl\.div_rn\(\1, "
    by: dict[str, tuple[Callable[..., Any], int]] = {
        "true": (lambda a, b: a / b, 1),
        "floor": (lambda a, b: a // b, 2),
        "trunc": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), 1),
        "none": (lambda a, b: torch.div(a, b, rounding_mode=None), 1),
        "of integers": (lambda a, b: a.long() / b, 1),
    }
    for name, (fn, n) in by.items():
        for b, by_number in ((9, True), (9.5, True), (s, True), (y, False), (one, False)):
            given = (x, b) if isinstance(b, torch.Tensor) else (x,)
            made = record(_with(fn, b), *given, mode=mode)
            divisions = made.kernel_source.count("tl.div_rn(")
            if not isinstance(b, torch.Tensor) and name not in ("floor", "trunc"):
                assert divisions == 0 and repr(1.0 / b) in made.kernel_source, (
                    name,
                    b,
                    made.kernel_source,
                )
                continue
            assert bool(re.search(one_over, made.kernel_source)) is by_number, (name, b)
            assert divisions == (1 if by_number else n), (name, b, made.kernel_source)


def _with(fn: Callable[..., Any], b: Any) -> Callable[..., Any]:
    return (lambda x, b: fn(x, b)) if isinstance(b, torch.Tensor) else (lambda x: fn(x, b))


def test_a_factor_from_the_host_is_not_rounded_to_half(compile_only: None) -> None:
    """It is no tensor to eager's kernels."""
    mode, (x, one) = fakes((8,), ())
    with mode:
        x, s = x.bfloat16(), torch.empty(())
    for op in (torch.mul, torch.div, torch.add):
        sources = [record(_with(op, b), x, b, mode=mode).kernel_source for b in (s, one)]
        assert ["= p_as_bf16(" in source for source in sources] == [False, True], op


@pytest.mark.parametrize("length", [100, 100_000])
def test_of_two_zeros_the_later_is_the_running_extreme(compile_only: None, length: int) -> None:
    """Hardware takes -0.0 for less than 0.0; eager's scans take them for equal."""
    mode, (x,) = fakes((3, length))
    for op, helper in ((torch.cummin, "p_min_last"), (torch.cummax, "p_max_last")):
        source = record(_with(op, 1), x, mode=mode).kernel_source
        assert re.search(rf"tl.associative_scan\(\w+, 1, {helper}\)", source)
        assert "tl.minimum" not in source.rpartition("def ")[2] and "_nan" not in source
        assert ("p_at(" in source) is (length > 10_000)


def test_a_copy_outlives_the_rule_that_declines(compile_only: None) -> None:
    """Its readers share it: what the first of them takes back must not be the copy."""
    mode, (x,) = fakes((8,))
    with mode:
        at = torch.empty(4, dtype=torch.int64, device="cuda")
        s = torch.empty((), dtype=torch.int8)

    def fn(x: torch.Tensor, at: torch.Tensor, s: torch.Tensor) -> Any:
        y = x.to(torch.int8)
        return y.index_put((at,), s, accumulate=True), y + s

    made = record(fn, x, at, s, mode=mode)
    assert list(made.fallback_reasons) == ["aten::index_put"]
    copies = [e for e in made.plan.steps if isinstance(e, Extern) and e.op == "aten::_to_copy"]
    assert len(copies) == 1


def test_parts_of_a_long_sum_are_on_the_device(compile_only: None) -> None:
    mode, (x,) = fakes((1000, 3001))
    made = record(lambda x: (x.sum(), x.argmax()), x, mode=mode)
    assert {b.device for b in made.plan.buffers.values()} == {"cuda:0"}
    assert {k.device for k in made.plan.steps if isinstance(k, Kernel)} == {"cuda:0"}


def test_deviations_of_a_sum_that_another_pass_rescales(compile_only: None) -> None:
    """The sum of exponentials follows their maximum from block to block; what is left of its mean
    needs it whole, so it has a pass of its own. So many rows are not cut in two, and so long ones
    not kept."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        e = (x - x.amax(1, True)).exp()
        return (e - e.mean(1, True)).square().sum(1)

    mode, (x,) = fakes((4096, 40_000))
    made = record(fn, x, mode=mode)
    assert sum(isinstance(k, Kernel) for k in made.plan.steps) == 1
    assert made.ladder == ()


@pytest.mark.parametrize("fn, twice", [(torch.sigmoid, True), (lambda x: x**3.3, False)])
def test_what_an_operator_parts_is_computed_twice(
    fn: Callable[[torch.Tensor], torch.Tensor], twice: bool, compile_only: None
) -> None:
    """Where that is less work than writing it and reading it back."""

    def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        value = fn(gate)
        return ((x + value) @ x) * value * gate

    mode, given = fakes((512, 512), (512, 512))
    made = record(gated, *given, mode=mode)
    kernels = [k for k in made.plan.steps if isinstance(k, Kernel)]
    assert [len(k.args) for k in kernels] == ([3, 3] if twice else [4, 4])


def test_random_numbers_have_a_seed_of_the_device(compile_only: None) -> None:
    mode, (x,) = fakes((64,))
    made = record(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), x, mode=mode)
    calls = of(made.wrapper, CallExtern)
    assert [c.op for c in calls] == ["plait::seed"] and calls[0].args[0].text == "cuda:0"


def test_what_collides_without_an_atomic_is_a_call(compile_only: None) -> None:
    mode, (x,) = fakes((16,))
    with mode:
        at = torch.empty(4, dtype=torch.int64, device="cuda")
        source = torch.empty(4, dtype=torch.int8, device="cuda")
    scatter = record(
        lambda x, i, s: x.to(torch.int8).scatter_reduce(0, i, s, "prod"), x, at, source, mode=mode
    )
    assert any("on a GPU" in why for why in scatter.fallback_reasons.values())
    assert (
        record(lambda x, i: x.index_add(0, i, x.narrow(0, 0, 4)), x, at, mode=mode).fallback_reasons
        == {}
    )


def test_views_with_an_offset_are_unaligned(compile_only: None) -> None:
    mode, (x,) = fakes((64,))
    made = record(lambda x: (x * 2).as_strided((8,), (1,), 3) + x.narrow(0, 0, 8), x, mode=mode)
    views = [s.out for s in made.plan.steps if isinstance(s, Alias)]
    assert unaligned(made.plan) == frozenset(views)


def test_capability() -> None:
    assert gpu_of("cuda:0", Config(gpu_arch="sm_100")) == GPUS["sm_100"]
    with pytest.raises(UserError, match="gpu_arch"):
        gpu_of("cuda:0", Config(gpu_arch="hopper"))


@without_cuda
def test_without_a_gpu_loading_says_so(compile_only: None) -> None:
    mode, (x,) = fakes((8,))
    plan = encode(record(lambda x: x + 1, x, mode=mode).wrapper)
    with pytest.raises(LoadError, match="built without CUDA"):
        load(plan, {})


@without_cuda
def test_the_file_of_cubins_is_checked(compile_only: None, tmp_path: Path) -> None:
    mode, (x,) = fakes((8,))
    plan = encode(record(lambda x: x + 1, x, mode=mode).wrapper)
    cubin = Cubin(b"image", "symbol", 4, 1, 0, (0, 1), (0, 1), False, False)
    data = pack({"a": cubin, "b": cubin})
    path = tmp_path / "k.cubins"
    for bad in (
        b"",
        data[:7],
        data[:-1],
        b"X" + data[1:],
        data[:16] + struct.pack("<q", 3) + data[24:],
    ):
        path.write_bytes(bad)
        with pytest.raises(LoadError, match=r"kernel file|k\.cubins"):
            load(plan, {"cuda": str(path)})
    path.write_bytes(data)
    with pytest.raises(LoadError, match="built without CUDA"):
        load(plan, {"cuda": str(path)})


def _half(*shapes: tuple[int, ...]) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    mode = FakeTensorMode()
    with mode:
        return mode, [torch.empty(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _strides(p: WrapperProgram, width: int) -> set[tuple[Any, ...]]:
    """Of row-major matrices of rows of this length."""
    made = [
        i
        for i in p.body
        if isinstance(i, (Alloc, Place, View)) and len(i.shape) == 2 and i.shape[-1] == width
    ]
    return {i.strides for i in made if i.strides[-1] == 1}


def test_odd_rows_of_large_products_are_padded(compile_only: None) -> None:
    """An output head: its logits are written with aligned rows, and so are their gradients."""
    mode, (x, w) = _half((512, 64), (50257, 64))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.log_softmax((x @ w.t()).float(), -1).sum()

    def backward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.relu(x @ w.t()) * 2) @ w

    for fn in (loss, backward):  # whose second product is a kernel of ours
        p = record(fn, x, w, mode=mode).wrapper
        assert _strides(p, 50257) == {(50264, 1)}
        assert len(of(p, CallExtern)) == 1
    mode, (x, w) = _half((2048, 1024), (20001, 1024))
    for tuned in (False, True):
        p = record(backward, x, w, mode=mode, autotune=tuned).wrapper
        assert len(of(p, CallExtern)) == 2, "what cannot be measured is as without tuning"
        made = [i for i in p.body if isinstance(i, (Alloc, Place)) and i.shape[-1] > 20000]
        assert made and {i.strides[0] for i in made} == {20008}


def test_rows_of_what_leaves_the_graph_are_padded_where_a_copy_costs_little(
    compile_only: None,
) -> None:
    def head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.t()).view(8, 64, 50257)

    def operand(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.tanh()
        return y @ w.t(), y.view(-1)

    odd, even = (50257, 1), (50264, 1)
    # The caller gets eager's strides: written by a kernel of ours, or copied from padded rows.
    for inner, calls, strides in ((64, 1, set()), (768, 0, {odd}), (4096, 1, {odd, even})):
        mode, (x, w) = _half((512, inner), (50257, inner))
        p = record(head, x, w, mode=mode).wrapper
        assert (len(of(p, CallExtern)), len(of(p, Launch))) == (calls, inner > 64)
        assert _strides(p, 50257) == strides
    mode, (x, w) = _half((2048, 4096), (50257, 4096))  # so many rows are computed in parts
    p = record(lambda x, w: (x @ w.t()).view(8, 256, 50257), x, w, mode=mode).wrapper
    assert not of(p, Launch) and not _strides(p, 50257)
    for cols, longer in ((64, set()), (768, {(1008, 1)})):  # sums of odd length end in zeros
        mode, (x, w) = _half((512, 1001), (cols, 1001))
        p = record(operand, x, w, mode=mode).wrapper
        assert _strides(p, 1001) == {(1001, 1)} and _strides(p, 1008) == longer


def test_padded_rows_are_written_in_place_outside_an_arena(compile_only: None) -> None:
    """A product whose memory the arena would only make larger: what the operator made by itself
    would have eager's strides, and be copied."""
    mode, (x, w, c) = _half((4096, 4096), (30522, 4096), (4096, 30522))
    head = lambda x, w, c: torch.addmm(c, F.layer_norm(x, (4096,)), w.t())
    p = record(head, x, w, c, mode=mode).wrapper
    assert [i.op for i in of(p, CallExtern)] == ["aten::addmm.out"]
    assert (30528, 1) in _strides(p, 30522)


def test_odd_rows_of_an_argument_are_copied_once_where_that_pays(compile_only: None) -> None:
    """The gradient of an output head that another graph has made."""

    def fn(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        rows = g.view(2048, 50257)
        return rows.t() @ x, rows @ w

    for n, launches in ((768, 2), (64, 0)):  # the weights, as the gradient, end in zeros
        mode, (g, x, w) = _half((4, 512, 50257), (2048, n), (50257, n))
        p = record(fn, g, x, w, mode=mode).wrapper
        assert len(of(p, Launch)) == launches and len(of(p, CallExtern)) == 2
        assert _strides(p, 50264 if launches else 50257) == {(50264 if launches else 50257, 1)}


def test_short_rows_are_not_padded(compile_only: None) -> None:
    mode, (x, w) = _half((200000, 256), (256, 1))
    p = record(lambda x, w: (x @ w).relu(), x, w, mode=mode).wrapper
    assert _strides(p, 1) == {(1, 1)}


def test_a_bias_in_float32_is_added_by_a_kernel(compile_only: None) -> None:
    mode, (x, w, b) = fakes((4096, 1024), (1024, 1024), (1024,))

    def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    p = record(linear, x, w, b, mode=mode).wrapper
    assert [i.op for i in of(p, CallExtern)] == ["aten::mm.out"] and len(of(p, Launch)) == 1
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        p = record(linear, x, w, b, mode=mode).wrapper
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert [i.op for i in of(p, CallExtern)] == ["aten::addmm.out"]


def test_a_reduction_of_nothing_reads_nothing(compile_only: None) -> None:
    mode, (x, w) = fakes((5, 0), (0, 7))
    made = record(lambda x, w: (x @ w + 1, x.sum(1), x.prod(1), x.any(1)), x, w, mode=mode)
    assert "tl.load" not in made.kernel_source


def test_precision_may_be_chosen_by_the_newer_switches(compile_only: None) -> None:
    """Where these were used, torch refuses to answer for the older ones."""
    mode, (x, w, b) = fakes((4096, 1024), (1024, 1024), (1024,))
    (image, filters), cuda, cudnn = (
        fakes((2, 8, 16, 16), (8, 8, 3, 3))[1],
        torch.backends.cuda,
        torch.backends.cudnn,
    )
    before = cuda.matmul.fp32_precision, cudnn.conv.fp32_precision
    try:
        for precision, bias_op in (("tf32", "aten::addmm.out"), ("ieee", "aten::mm.out")):
            cuda.matmul.fp32_precision = cudnn.conv.fp32_precision = precision
            p = record(lambda x, w, b: F.linear(x, w, b).relu(), x, w, b, mode=mode).wrapper
            assert [i.op for i in of(p, CallExtern)] == [bias_op]
            p = record(F.conv2d, image, filters, mode=image.fake_mode).wrapper
            assert bool(of(p, Launch)) == (precision == "tf32")  # an operand with its channels last
    finally:
        cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = before


def test_only_calls_with_eagers_bits_are_eagers_own(compile_only: None) -> None:
    """cuBLASLt computes others on a GPU, which has other kernels for odd lengths."""
    mode, xs = fakes((64, 512), (512, 50257))
    for numerics in ("default", "eager"):
        (call,) = of(record(torch.mm, *xs, mode=mode, numerics=numerics).wrapper, CallExtern)
        assert call.as_eager == (numerics == "eager"), call


@pytest.mark.parametrize(
    ("rows", "depth", "then", "raced"),
    [(4096, 512, F.silu, True), (4096, 4096, torch.t, False), (128, 4096, torch.t, True)],
)
def test_long_products_that_nothing_follows_are_not_raced(
    rows: int, depth: int, then: Any, raced: bool, compile_only: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kernels of ours measure better than they are, when a device has to spare power."""
    seen: list[Any] = []

    def tuned(contests: list[Any], cfg: Config) -> list[Any]:
        seen.extend(c for c in contests if c.rival)
        return [c.unmeasured("not now") for c in contests]

    monkeypatch.setattr("plait.kernel.triton.target.tune", tuned)
    mode, (x, w) = fakes((rows, depth), (6144, depth), dtype=torch.bfloat16)
    record(lambda x, w: then(F.linear(x, w)), x, w, mode=mode, autotune=True)
    assert bool(seen) == raced


def test_products_of_what_is_moved_need_no_copy(compile_only: None) -> None:
    """Where both products of a linear layer's gradient read it, its kernel writes it once, as they
    want it."""
    mode, (x, w, g) = fakes((8, 200, 256), (256, 128), (1600, 128))

    def fn(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
        y = x.tanh().transpose(0, 1).reshape(1600, 256)
        return y.t() @ g, y @ w, y.sum(0)

    made = record(fn, x, w, g, mode=mode)
    large = [b for k in _kernels(made) for b in k.args if b.name in k.outs and b.shape == x.shape]
    assert [b.strides for b in large] == [(256, 8 * 256, 1)]
    assert (
        sum(numel(b.shape) for k in _kernels(made) for b in k.args if b.name in k.outs)
        < 1.1 * x.numel()
    )


def test_the_gradients_of_a_norm_read_the_rows_once(compile_only: None) -> None:
    """Sums of rows and of columns and what is made of them are one kernel; a short one adds up the
    programs' sums."""
    mode, (dy, x, w, mean, rstd) = fakes(
        (4, 1024, 768), (4, 1024, 768), (768,), (4, 1024, 1), (4, 1024, 1)
    )

    def fn(
        dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
    ) -> Any:
        return aten.native_layer_norm_backward(dy, x, (768,), mean, rstd, w, w, [True, True, True])

    made = record(fn, dy, x, w, mean, rstd, mode=mode)
    walk, last = _kernels(made)
    assert walk.grid == 512 and numel(last.args[0].shape) == 512 * 768
    assert "for offset in tl.range(0, 8, 1, num_stages=" in made.kernel_source


def test_a_row_s_program_looks_up_what_its_loss_needs(compile_only: None) -> None:
    mode, (x, y) = fakes((1048, 3000), (1048,))
    with mode:
        y = y.long()
    made = record(lambda x, y: torch.nn.functional.cross_entropy(x, y), x, y, mode=mode)
    rows, last = _kernels(made)
    assert (
        len(rows.outs) == 1 and rows.grid == 1048 and all(numel(b.shape) <= 1048 for b in last.args)
    )


def _kernels(made: CompileRecord) -> list[Kernel]:
    return [k for k in made.plan.steps if isinstance(k, Kernel)]


def test_log_softmax_is_made_again_from_its_input() -> None:
    """What is saved for the backward pass of a cross-entropy is the logits and two numbers a
    row."""
    logits, target = torch.randn(64, 300, dtype=torch.bfloat16), torch.randint(300, (64,))

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
        x, t = primals
        p = aten._log_softmax(x.float().relu(), 1, False)
        loss, weight = aten.nll_loss_forward(p, t, None, 1, -100)
        dp = aten.nll_loss_backward(tangents[0], p, t, None, 1, -100, weight)
        return [loss, aten._log_softmax_backward_data(dp, p, 1, torch.float32), None]

    given = [[logits, target], [torch.tensor(3.0)]]
    traced = make_fx(joint, compat.decompositions.decomposition_table(), "fake")(*given)
    with on_gpu(traced):
        forward, backward = split_joint(Config(), traced, given, num_fwd_outputs=1)
    loss, *saved = forward(logits, target)
    assert sum(s.numel() * s.element_size() for s in saved) < logits.numel() * 2 + 64 * 4 * 8
    found = backward(*saved, given[1][0])[0]
    x = logits.double().relu().requires_grad_()
    want = F.cross_entropy(x, target)
    (grad,) = torch.autograd.grad(want, x, torch.tensor(3.0).double())
    torch.testing.assert_close(loss.double(), want.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), grad, atol=1e-6, rtol=1e-4)


def test_what_is_computed_along_rows_is_walked(compile_only: None) -> None:
    """Triton took minutes for a block that holds such rows."""
    mode, (x,) = fakes((2, 1))
    text = record(lambda x: x.expand(2, 5000).softmax(1), x, mode=mode).kernel_source
    turns = re.findall(r"in range\(0, 5000, (\d+)\)", text)
    assert turns and all(2 * int(n) > 5000 > int(n) for n in turns), text


def test_what_a_scan_carries_of_one_row_is_a_number(compile_only: None) -> None:
    mode, (x,) = fakes((1,))
    text = record(lambda x: x.expand(100_000).cumsum(0), x, mode=mode).kernel_source
    scan = text.split("associative_scan")[1]
    assert "tl.reduce(" in scan and "[:, None]" not in scan, text


def test_rows_that_are_normed_and_rotated_are_one_kernel(compile_only: None) -> None:
    """As queries and keys of Qwen3 and Gemma 3: what a row's halves are rotated into is computed
    from the row again, and waits for no kernel of its own."""
    mode, (x, w, cos, sin) = fakes((2, 512, 16, 128), (128,), (512, 1, 128), (512, 1, 128))

    def rotated(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        w, cos, sin = given
        y = w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )
        a, b = y.chunk(2, -1)
        return y * cos + torch.cat((-b, a), -1) * sin

    given = [t.to(torch.bfloat16) for t in (x, w, cos, sin)]
    made = record(rotated, *given, mode=mode)
    assert len(of(made.wrapper, Launch)) == 1


def test_what_an_operator_reads_a_copy_of_keeps_a_free_layout(compile_only: None) -> None:
    """The gradient of a bias, of what is computed from channels-last tensors: a sum of columns,
    which is cut for all of the device, and not of rows that nothing has."""
    mode, (dy, x, w) = fakes((8, 256, 56, 56), (8, 256, 56, 56), (256, 256, 3, 3))
    last = torch.channels_last
    with mode:
        given = [t.to(torch.bfloat16, memory_format=last) for t in (dy, x, w)]

    def fn(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = (dy.float() * x).to(dy.dtype, memory_format=torch.contiguous_format)
        one = [1, 1]
        made = aten.convolution_backward(
            grad, x, w, [256], one, one, one, False, [0, 0], 1, [True, True, False]
        )
        return made[0], made[1], grad.sum((0, 2, 3))

    made = record(fn, *given, mode=mode)
    first, second = _kernels(made)
    assert first.grid > 500 and len(first.outs) == 2 and len(second.args) == 2


@pytest.mark.parametrize("turned", [False, True])
def test_operands_of_products_lie_as_what_they_are_made_of(
    compile_only: None, turned: bool
) -> None:
    """Eager's result of a concatenation has its rows in order; both products, and the sum, read it
    as the sequences lie that it is made of."""
    n = 256 if turned else 128
    shapes = (4, 512, 64), (4, 512, n - 64), (n, 64), (2048, 64)
    mode, (a, b, w, x) = fakes(*shapes, dtype=torch.bfloat16)
    with mode:
        a, b = a.permute(0, 2, 1), b.permute(0, 2, 1)

    def fn(a: Any, b: Any, w: Any, x: Any) -> Any:
        joined = torch.cat([b, a] if turned else [a, b], 1)
        rows = joined.permute(0, 2, 1).reshape(-1, n)
        return joined.sum((0, 2)), rows @ w, rows.t() @ x

    made = record(fn, a, b, w, x, mode=mode)
    wide = [i for i in of(made.wrapper, Place) if i.shape == (4, n, 512)]
    assert [i.strides for i in wide] == [(512 * n, 1, n)]
    others = [i for i in of(made.wrapper, Place) + of(made.wrapper, Alloc) if i not in wide]
    assert all(math.prod(i.shape) < 4 * n * 512 for i in others)


def test_sums_of_products_of_matrices_are_calls(compile_only: None) -> None:
    """Of a state space model written in PyTorch: scores, what they weigh, states, and gradients of
    scores."""

    def step(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = (c.unsqueeze(2) * b.unsqueeze(1)).sum(-1)
        weighed = (scores.unsqueeze(-1) * x.unsqueeze(1)).sum(2)
        states = (b.unsqueeze(-2) * x.unsqueeze(-1)).sum(1)
        spread = scores.unsqueeze(-1).expand(-1, -1, -1, -1, c.shape[-1])
        of_b = (spread * c.unsqueeze(2)).sum([1], True)
        of_c = (spread * b.unsqueeze(1)).sum([2], True)
        return weighed, states, of_b.squeeze(1), of_c.squeeze(2)

    mode, args = fakes((8, 128, 16, 64), (8, 128, 16, 64), (8, 128, 16, 32))
    made = record(step, *args, mode=mode)
    assert [i.op for i in of(made.wrapper, CallExtern)] == ["aten::bmm"] * 5
    assert "sum" not in "".join(i.kernel for i in of(made.wrapper, Launch))


@pytest.mark.parametrize("replaced", ["activation", "patches"])
def test_views_of_what_a_pass_replaced_share_its_memory(compile_only: None, replaced: str) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        made = aten.relu(aten.addmm(b, x, w))
        return made, aten.slice.Tensor(made, 0, 1, 100)

    def embedded(x: torch.Tensor, w: torch.Tensor) -> Any:
        made = aten.convolution(x, w, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
        return made, aten.slice.Tensor(made, 0, 1, 100)

    fn, shapes = {
        "activation": (layer, [(128, 256), (256, 512), (512,)]),
        "patches": (embedded, [(8, 3, 32, 32), (256, 3, 4, 4)]),
    }[replaced]
    mode, args = fakes(*shapes, dtype=torch.bfloat16)
    program = record(fn, *args, mode=mode).wrapper
    whole, part = of(program, Return)[0].values
    (view,) = (i for i in of(program, View) if i.name == part.name)
    assert (view.base, view.offset) == (whole.name, math.prod(view.shape[1:]))


def test_steps_of_a_recurrence_are_few_kernels(compile_only: None) -> None:
    """More than on a CPU may be one kernel, fewer where each step reads more places."""

    def weighted(x: torch.Tensor) -> torch.Tensor:
        rows, (a, b, c) = x.unbind(1), x.new_zeros(3, 4, 256).unbind(0)
        out = []
        for row in rows:
            top = torch.maximum(c, row)
            e, f = torch.exp(c - top), torch.exp(row - top)
            a, b, c = e * a + f * row, e * b + f, top
            out.append((a / b).half())
        return torch.stack(out, 1)

    def many_places(x: torch.Tensor) -> torch.Tensor:
        h, out = x.new_zeros(4, 256), []
        for k in range(x.shape[1] // 4):
            for j in range(3):
                h = h * x.select(1, 4 * k + j) + x.select(1, 4 * k + j + 1)
            out.append(h.half())
        return torch.stack(out, 1)

    for fn, length, most in ((weighted, 24, 1), (many_places, 64, 1), (many_places, 256, 4)):
        mode, (x,) = fakes((4, length, 256))
        plan = record(fn, x, mode=mode).plan
        n = sum(isinstance(s, Kernel) for s in plan.steps)
        assert n == most, (fn.__name__, length)


def test_calls_that_rows_are_not_promised_their_bits_of(compile_only: None) -> None:
    """What a library does with more rows it does not say. The order of a sum, and of one that runs
    along a row, follows from the row."""
    for fn, told in ((lambda x: x.logcumsumexp(-1), True), (lambda x: x.cumsum(-1), False)):
        mode, (x,) = fakes((7, 300))
        made = record(fn, x, mode=mode, batch_invariant=True)
        assert ("not promised for calls of aten.logcumsumexp" in rows_line(made)) == told
    mode, (x, w) = fakes((3, 8, 9, 9), (16, 8, 3, 3))
    assert "not promised" not in rows_line(record(F.conv2d, x, w, mode=mode, batch_invariant=True))


@pytest.mark.parametrize(
    ("stays", "dtype"), [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)]
)
def test_the_benchmark_of_tiles_sets_them(
    stays: bool, dtype: torch.dtype, compile_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = (row_tiles_gpu.lowered, "_row_tile"), (row_tiles_gpu.written._Writer, "_versions")
    for owner, name in owners:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back
    row_tiles_gpu.by_tile(row_tiles_gpu.plain, (64, 256, 8, 4), stays, "", dtype)
    mode, xs = fakes((2048, 768), (3072, 768), (3072,), (2048, 3072), dtype=dtype)
    made = record(row_tiles_gpu.plain, *xs, mode=mode, batch_invariant=True).kernel_source
    assert ("described_product(p0" in made) is stays
    depth = 64 if dtype == torch.bfloat16 else 32
    assert f"rows=64, columns=256, depth={depth}, stages=4" in made
    row_tiles_gpu.by_tile(row_tiles_gpu.plain, (64, 128, 4, 2, 4), False, "", dtype)
    made = record(row_tiles_gpu.plain, *xs, mode=mode, batch_invariant=True).kernel_source
    assert "columns=128" in made and "at_once=4" in made


def finishes(fn: Callable[..., Any], *shapes: Sequence[int]) -> list[str]:
    """What follows the sums of each kernel of a product."""
    mode, xs = fakes(*shapes, dtype=torch.bfloat16)
    made = record(fn, *xs, mode=mode, batch_invariant=True).kernel_source
    return [text.partition("\n\n")[0] for text in made.split("def finish(")[1:]]


@pytest.mark.parametrize("in_turn", [True, False])
def test_each_of_two_large_products_finishes_its_own(in_turn: bool, compile_only: None) -> None:
    """The gate of a network is a function of one alone: its kernel is not the longer for it."""

    def gated(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if in_turn:
            return F.silu(F.linear(x, a)) * F.linear(x, b)
        y = F.linear(x, b)
        return F.silu(F.linear(x, a)) * y

    first, second = finishes(gated, (1024, 512), (3072, 512), (3072, 512))
    if in_turn:
        assert "exp" in first and "given[" not in first and "outs[1]" not in first
        assert "exp" not in second and second.count("tl.load(given") == 1
    else:  # the other is known: one kernel does all that is left
        assert "exp" not in first and "exp" in second and second.count("tl.load(given") == 1


def test_what_others_read_of_a_product_stays_with_what_reads_both(compile_only: None) -> None:
    """It is stored anyway, so that a second result would be one more."""

    def kept(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate = F.linear(x, a)
        y = F.silu(gate) * F.linear(x, b)
        return y, gate.sum(0)

    first, second = finishes(kept, (1024, 512), (3072, 512), (3072, 512))
    assert "exp" not in first and "exp" in second and "outs[1]" not in first
