"""The FX target: graphs that are called, interpreted, cleaned, copied and pickled do what the
reference does; models against eager; what the graph of a GPU program is made of; compilers out of
tree."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import runpy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F

import plait
from plait import compat
from plait.errors import UserError
from plait.ir.dtypes import f32
from plait.kernel.target import Source
from plait.runtime.cubin import SM_90, Job
from plait.wrapper import fx, fxnodes
from plait.wrapper.instructions import (
    AssertAlignment,
    AssertScalar,
    AssertSizeStride,
    CheckFinite,
    DefineKernel,
    Launch,
    Return,
    Symbol,
    TensorInput,
    WrapperProgram,
)
from plait.wrapper.program import Artifacts, CompileRecord
from plait.wrapper.text import read
from tests import test_frontend_cases, test_lower_extern, test_memory, test_models, warm
from tests.against_eager import same
from tests.instruction_table import example
from tests.models import MODELS
from tests.one_target import only
from tests.test_cuda_programs import compile_only, fakes, pipeline, record  # noqa: F401  (a fixture)
from tests.test_interpreted import needs_triton, passes
from tests.test_wrapper_targets import CASES, MEANINGS, Case, compare, interpret, library, seeded  # noqa: F401

ATEN, PLAIT = torch.ops.aten, torch.ops.plait
SLOW = partial(pytest.param, marks=pytest.mark.slow)


def sample(*names: str, of: Iterable[str] = MODELS) -> list[Any]:
    """All, those that are not named under `slow`."""
    return [name if name in names else SLOW(name) for name in of]


@pytest.fixture
def made() -> Iterator[list[CompileRecord]]:
    """Every graph is compiled to FX, and plait's executor is not there. Gives the record of
    each."""
    with only("fx") as records:
        yield records


# ----------------------------------------------------------------------------- graphs by themselves
def cleaned(module: GraphModule) -> GraphModule:
    """After torch.fx removed what it takes for dead."""
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


WAYS: dict[str, Callable[[GraphModule], Callable[..., Any]]] = {
    "called": lambda module: module,
    "interpreted": lambda module: Interpreter(module).run,
    "cleaned": cleaned,
    "copied": copy.deepcopy,
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
}


def graph_of(case: Case, library: str) -> GraphModule:  # noqa: F811
    return fx.make_fx(case.program, Artifacts({"cpu": library}, case.constants, case.callables))


@pytest.mark.parametrize(
    ("name", "way"),
    [(n, w) for n, c in CASES.items() for w in WAYS if w != "pickled" or not c.callables],
)
def test_graphs_do_what_the_reference_does(name: str, way: str, library: str) -> None:  # noqa: F811
    case = CASES[name]
    run = WAYS[way](graph_of(case, library))
    with torch.no_grad():
        if case.fails:
            with pytest.raises(case.error) as got:
                run(*case.args())
            assert case.fails in str(got.value)
            return
        given, expected = seeded(case), seeded(case)
        want = interpret(case.program, expected, MEANINGS, case.constants, case.callables)
        have = run(*given)
    if way in ("copied", "pickled"):  # constants are copies
        for k, b in enumerate(want):
            have = (*have[:k], b, *have[k + 1 :]) if any(b is c for c in case.constants) else have
    compare(tuple(have), want)
    compare(tuple(given), tuple(expected))


def test_what_can_fail_is_never_dead() -> None:
    program = read("""
program('checks')
s0 = symbol(lo=2)
x = tensor_input(f32[s0] @ (1,))
s0 = read(x, 'size', 0)
require((s0 < 4096), 'at most 4095')
require_layout(x, f32[s0] @ (1,))
require_aligned(x, 16)
require_finite(x, 'model.py:31')
bump_version(x)
return ()
""")
    module = cleaned(fx.make_fx(program, Artifacts({})))
    called = [n.target for n in module.graph.nodes if n.op == "call_function"]
    checks = (PLAIT.require_layout, PLAIT.require_aligned, PLAIT.require_finite, PLAIT.bump_version)
    want = [
        ATEN.sym_size.int,
        operator.lt,
        torch.sym_ite,
        ATEN._assert_scalar.default,
        *(c.default for c in checks),
    ]
    assert called == want
    asserts = (AssertScalar, AssertSizeStride, AssertAlignment, CheckFinite)
    assert {type(i) for i in program.body} >= set(asserts)


def test_every_integer_is_computed_once() -> None:
    p = example()
    module = fx.make_fx(p, Artifacts({"cpu": "k.so"}, [torch.ones(8, 8)], [print, print]))
    integers = [
        n for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt | torch.SymBool)
    ]
    computed = [(n.target, n.args) for n in integers if n.op == "call_function"]
    assert len(computed) == len(set(computed)) >= 3
    assert any(len(n.users) > 3 for n in integers)  # shared
    assert {type(i) for i in p.body} >= {Symbol, Return}


def test_the_code_reads_well() -> None:
    module = fx.make_fx(
        example(), Artifacts({"cpu": "k.so"}, [torch.ones(8, 8)], [print, print], hints={"s0": 5})
    )
    text = module.print_readable(print_output=False)
    assert "# Annotation: {'note': 'model.py:31: aten.relu'} File: model.py:31 in aten.relu" in text
    assert "torch.ops.plait.launch.default('k.so', 'plait_relu', [x], [buf0], [], [s0]" in text
    assert 'buf0: "f32[s0, 8]" = torch.empty_strided([s0, 8], [8, 1], dtype = torch.float32' in text
    sizes = [n.meta["val"] for n in module.graph.nodes if n.target is ATEN.sym_size.int]
    assert [(str(v), v.node.hint) for v in sizes] == [("s0", 5)]


def test_names_may_be_any() -> None:
    p = read("""
program('g')
lambda_ = symbol('lambda', lo=2)
ref['lambda'] = int_input()
torch = tensor_input(f32[4] @ (1,))
inputs = tensor_input(f32[4] @ (1,))
ref['9 lives'] = tensor_input(f32[4] @ (1,))
self = alloc(f32[4] @ (1,))
copy(self, torch, bump=False)
return (self, torch, inputs, ref['9 lives'], lambda_ + 1)
""")
    x, y, z = torch.randn(4), torch.randn(4), torch.randn(4)
    for run in (fx.make_fx(p, Artifacts({})), fx.load_program(p, Artifacts({}))):
        out = run(5, x, y, z)
        assert (
            torch.equal(out[0], x) and out[1] is x and out[2] is y and out[3] is z and out[4] == 6
        )


def test_operators_that_python_cannot_spell() -> None:
    p = read("""
program('g')
x = tensor_input(f32[4] @ (1,))
y, = call('aten::random.from')(x, 3, to=5)
return (y, complex('inf -0x0.0p+0'))
""")
    y, number = fx.make_fx(p, Artifacts({}))(torch.zeros(4))
    assert set(y.tolist()) <= {3.0, 4.0} and str(number) == "(inf-0j)"


def test_a_missing_kernel_is_told_when_the_program_is_loaded(library: str) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match="kernel plait_relu is not in library"):
        fx.load_program(example(), Artifacts({"cpu": library}, [torch.ones(8, 8)], [print, print]))


# ----------------------------------------------------------------------------------------- programs
class Checked(Interpreter):
    """Compares every node's value with its meta['val']."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.checked = 0

    def run_node(self, n: Node) -> Any:
        out, val = super().run_node(n), n.meta.get("val")
        if isinstance(out, Tensor):
            assert isinstance(val, Tensor), n.format_node()
            assert (out.dtype, out.device) == (val.dtype, val.device)
            for have, want in zip(
                (*out.shape, *out.stride()), (*val.shape, *val.stride()), strict=True
            ):
                assert isinstance(want, int) or want.node.hint is not None
                assert have == (want if isinstance(want, int) else want.node.hint), n.format_node()
        elif isinstance(val, torch.SymInt):
            assert out == val.node.hint
        self.checked += val is not None
        return out


@pytest.mark.parametrize("dynamic", [False, True])
def test_values_of_nodes_are_what_runs(dynamic: bool) -> None:
    interpreters: list[Checked] = []

    class Checking(plait.FxCompiler):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            gm.graph.lint()
            interpreters.append(Checked(gm))
            return interpreters[-1].run

    model = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.GELU(), nn.Linear(14, 6), nn.LayerNorm(6), nn.BatchNorm1d(8)
    )
    x = torch.randn(3, 4, 16)
    torch.compile(model, backend=Checking(), dynamic=dynamic)(x).softmax(
        -1
    ).square().mean().backward()
    assert [type(i.module).__name__.split("_")[0] for i in interpreters] == ["forward", "backward"]
    assert all(i.checked > 15 for i in interpreters)


@pytest.mark.parametrize("name", sample("bert", "unet", "resnet"))
def test_inference(name: str, made: list[CompileRecord]) -> None:
    test_models.test_inference(name)


@pytest.mark.parametrize("dynamic", [None, SLOW(True)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", sample("bert", "unet"))
def test_training_step(name: str, dynamic: bool | None, made: list[CompileRecord]) -> None:
    test_models.trains_as_eager(name, *test_models.build(name), dynamic=dynamic)
    assert {r.kind for r in made} == {"forward", "backward"}


@pytest.mark.parametrize("name", sample("vit"))
def test_dynamic_batch(name: str, made: list[CompileRecord]) -> None:
    test_models.test_dynamic_batch(name)


CALLERS = {**test_frontend_cases.BOTH, **test_frontend_cases.NO_GRAD}
del CALLERS["input returned"]  # of which Dynamo makes no graph
USUAL = (
    "size among results", "constant tensor", "two inputs swapped", "conjugated argument",
    "negated argument", "None among results",
)  # fmt: skip


@pytest.mark.parametrize("name", sample(*USUAL, of=CALLERS))
def test_callers_see_what_eager_shows(name: str, made: list[CompileRecord]) -> None:
    same(*CALLERS[name])


def test_control_flow_is_in_the_graph() -> None:
    graphs: list[GraphModule] = []

    class Seeing(plait.FxCompiler):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            graphs.append(gm)
            return copy.deepcopy(gm)

    for name in ("cond", "while"):
        torch._dynamo.reset()
        same(
            getattr(test_lower_extern, f"_{name}"),
            lambda: [torch.linspace(-1, 2, 12).view(3, 4)],
            other=torch.compile(getattr(test_lower_extern, f"_{name}"), backend=Seeing()),
        )
        (node,) = (
            n
            for n in graphs[-1].graph.nodes
            if isinstance(n.target, torch._ops.HigherOrderOperator)
        )
        bodies = [n for n in node.all_input_nodes if n.op == "get_attr"]
        assert node.target.__name__.startswith(name) and len(bodies) == 2
        assert all(isinstance(graphs[-1].get_submodule(n.target), GraphModule) for n in bodies)


def test_without_dynamo(made: list[CompileRecord]) -> None:
    n = torch.export.Dim("n")
    run = plait.compile(
        lambda x: x.exp().sum(0), (torch.randn(4, 3),), dynamic_shapes={"x": {0: n}}
    )
    x = torch.randn(7, 3)
    torch.testing.assert_close(run(x), x.exp().sum(0))


# ------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("name", sample("pw", of=("pw", "tf6")))
@pytest.mark.parametrize(
    "mode", [test_memory.infer, test_memory.step], ids=["inference", "training"]
)
def test_peak(name: str, mode: Callable[..., object], made: list[CompileRecord]) -> None:
    make, data = test_memory.CASES[name]
    test_memory.compare_peaks(make, mode, data())


def test_inputs_and_intermediates_die_after_their_last_use() -> None:
    refs: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def look(x: Tensor) -> Tensor:
        alive.append([r() is not None for r in refs])
        y = x + 1
        refs.append(weakref.ref(y))
        return y

    program = read("""
program('chain', n_callables=1)
x = tensor_input(f32[4] @ (1,))
a, = call_python(0, 'look')(x)
b, = call_python(0, 'look')(a)
c, = call_python(0, 'look')(b)
return (c,)
""")
    x = torch.zeros(4)
    refs.append(weakref.ref(x))
    args: list[object] = [x]
    del x
    fx.load_program(program, Artifacts({}, callables=[look])).boxed(args)
    assert args == [] and alive == [[True], [False, True], [False, False, True]]


# --------------------------------------------------------------------------------------------- GPUs
class Function:
    """Stands for a Triton function where there is no Triton."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text


@pytest.fixture
def gpu_graphs(compile_only: None, monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:  # noqa: F811
    """The FX graphs of what `record` compiles."""
    graphs: list[GraphModule] = []

    class Loaded:
        boxed = None

    def target(program: WrapperProgram, parts: Artifacts) -> Any:
        graphs.append(fx.make_fx(program, parts))
        return Loaded()

    monkeypatch.setattr(fxnodes, "triton_function", Function)
    monkeypatch.setattr(pipeline, "WRAPPERS", {"native": target})
    return graphs


def launches(module: GraphModule) -> list[Node]:
    launch, _ = compat.tracing.triton_operator()
    return [n for n in module.graph.nodes if n.target is launch]


def test_triton_kernels_are_in_the_graph(gpu_graphs: list[GraphModule]) -> None:
    mode, (x, w) = fakes((64, 128), (128,))
    source = record(
        lambda x, w: F.layer_norm(F.gelu(x + w), (128,), w).sum(0), x, w, mode=mode
    ).kernel_source
    (module,) = gpu_graphs
    _, table = compat.tracing.triton_operator()
    found = launches(module)
    assert len(found) >= 2 and launches(cleaned(module)) == found
    for node in found:
        kernel = table.get_kernel(node.kwargs["kernel_idx"])
        assert kernel.text in source and f"def {kernel.name}(" in kernel.text
        assert set(table.get_constant_args(node.kwargs["constant_args_idx"])) >= {
            "num_warps",
            "num_stages",
        }
        ((grid, *rest),) = node.kwargs["grid"]
        assert grid > 0 and rest == [1, 1]
        head = kernel.text.partition(f"def {kernel.name}(")[2].partition(")")[0]
        assert ", ".join(node.kwargs["kwargs"]) == head
        assert all(
            v.meta["val"].device == torch.device("cuda:0") for v in node.kwargs["kwargs"].values()
        )
    made = [n for n in module.graph.nodes if n.target is torch.empty_strided]
    assert made and all(n.kwargs["device"] == torch.device("cuda:0") for n in made)
    # The device is chosen once, before the first kernel, and given back after the last.
    chosen = [
        n
        for n in module.graph.nodes
        if n.target in (torch.cuda.current_device, torch.cuda.set_device)
    ]
    assert [n.target.__name__ for n in chosen] == ["current_device", "set_device", "set_device"]
    assert chosen[1].args == (torch.device("cuda:0"),) and chosen[2].args == (chosen[0],)
    assert chosen[1] < found[0] and found[-1] < chosen[2]


def test_sizes_of_triton_kernels_are_nodes(gpu_graphs: list[GraphModule]) -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    host = mode.from_tensor(torch.empty(48, 8), symbolic_context=context)
    with mode:
        x = torch.empty_strided(host.shape, host.stride(), device="cuda")
    record(lambda x: (x + 1).relu(), x, mode=mode)
    (node,) = launches(gpu_graphs[0])
    grid, size = node.kwargs["grid"][0][0], node.kwargs["kwargs"]["s0"]
    assert isinstance(grid, Node) and grid.meta["val"].node.hint >= 1
    assert size.target is ATEN.sym_size.int and size.meta["val"].node.hint == 48


def test_every_gpu_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("k", "", {"p0": "*fp32"}, SM_90, num_warps=8, checks=True)
    inputs = tuple(TensorInput(f"x{k}", f32, (8,), (1,), f"cuda:{k}") for k in range(2))
    kernels = [DefineKernel(f"k{k}", 1, 0, device=f"cuda:{k}") for k in range(2)]
    starts = [Launch(f"k{k}", (f"x{k}",), (), (f"x{k}",), 1, grid=3) for k in (0, 0, 1, 0)]
    program = WrapperProgram("two", inputs, (*kernels, *starts, Return(())))
    source = Source("", {}, units=(replace(job, name="k0"), replace(job, name="k1")))
    monkeypatch.setattr(fxnodes, "triton_function", Function)
    module = fx.make_fx(program, Artifacts({}, sources={"cuda": source}))
    order = [n.args[0] for n in module.graph.nodes if n.target is torch.cuda.set_device]
    before = next(n for n in module.graph.nodes if n.target is torch.cuda.current_device)
    assert order == [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:0"), before]
    _, table = compat.tracing.triton_operator()
    options = table.get_constant_args(launches(module)[0].kwargs["constant_args_idx"])
    of_checks = {"debug": True, "sanitize_overflow": False}
    assert options == {"num_warps": 8, "num_stages": 1, "enable_reflect_ftz": False, **of_checks}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["graphs", "models"])
def test_in_the_interpreter(suite: str, tmp_path: Path) -> None:
    """PyTorch's operator launches our kernels, which Triton interprets on the CPU."""
    files = ("tests/test_fuzz_graphs.py", "tests/test_frontend_cases.py")
    some_graphs = "test_random_graphs and 1 or negated or conjugated or complex"
    samples = {
        "graphs": ([*files, "-m", "slow or not slow", "-k", some_graphs], 24),
        "models": (["tests/test_models.py", "-k", "step and bert or dynamic and vit"], 2),
    }
    passes(*samples[suite], tmp_path, timeout=300, TRITON_INTERPRET="1", PLAIT_WRAPPER="fx")


@needs_triton
def test_triton_reads_functions_without_a_file(tmp_path: Path) -> None:
    code = """
from plait.runtime.fxops import triton_function
text = (
    "import triton\\nimport triton.language as tl\\n\\n"
    "@triton.jit\\ndef f(p0):\\n    tl.store(p0, 1)\\n"
)
f = triton_function("f", text)
assert f is triton_function("f", text) and f.arg_names == ["p0"] and "tl.store(p0, 1)" in f.src
"""
    path = os.pathsep.join([str(Path(sys.prefix) / "triton"), str(Path(__file__).parent.parent)])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    done = warm.run("-c", code, env=env)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------- compilers out of tree
def test_a_compiler_gets_both_halves_and_may_take_its_inputs_in_a_list() -> None:
    seen: list[str] = []

    class Boxed(plait.FxCompiler):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            seen.append(type(gm).__name__.split("_")[0])

            def run(args: list[Any]) -> Any:
                given = list(args)
                args.clear()
                return gm(*given)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

    make, inputs = MODELS["unet"]
    model = make()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend=Boxed(), options={"opt_level": 1})
    x = inputs(2)
    for f in (model, compiled):
        f(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert seen == ["forward", "backward", "inference"]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    toy = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "toy_accelerator.py"))
    assert toy["main"]() == 0
    printed = capsys.readouterr().out
    for part in (
        "forward_",
        "backward_",
        "inference_",
        "kernel  r",
        "held 0.",
        "every result is as close",
    ):
        assert part in printed
    with pytest.raises(
        UserError, match=r"NotImplementedError: the machine has no unit for .*empty_strided"
    ):
        machine = toy["Toy"]()
        toy["UNITS"].pop(torch.empty_strided)
        torch.compile(lambda x: x + 1, backend=machine)(torch.ones(2))


class Wrong(plait.FxCompiler):
    def __init__(self, what: Any) -> None:
        self.what = what

    def compile_graph(self, gm: GraphModule) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


def test_mistakes_of_a_compiler_are_told() -> None:
    for compiler, message in (
        (Wrong(KeyError("conv")), "Wrong.compile_graph failed with KeyError: 'conv'"),
        (Wrong(3), "Wrong.compile_graph gave 3\n  try: return what runs the graph"),
        (
            plait.FxCompiler(),
            "FxCompiler.compile_graph failed with NotImplementedError: FxCompiler has to define",
        ),
        (Wrong(UserError("no such layout")), "no such layout"),
    ):
        torch._dynamo.reset()
        with pytest.raises(UserError) as error:
            torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
        assert message in str(error.value)
    with pytest.raises(UserError, match="unknown option 'wrappers'"):
        torch.compile(lambda x: x + 1, backend=Wrong(3), options={"wrappers": 1})(torch.ones(2))


def test_a_message_is_told_beyond_a_zero() -> None:
    """PyTorch's operator takes it for the end of the text."""
    program = read("""
program('checks')
n = int_input()
n = symbol()
require((n < 4), 'a\\x00b')
return ()
""")
    assert isinstance(program.body[0], AssertScalar) and program.body[0].message == "a\0b"
    with pytest.raises(RuntimeError, match=r"a\\0b"):
        fx.make_fx(program, Artifacts({}))(9)


def test_symbols_are_placeholders_with_hints_and_assertions_stay() -> None:
    graphs: list[GraphModule] = []

    class Cleaning(plait.FxCompiler):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            graphs.append(cleaned(gm))
            return gm

    def fn(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        torch._check(n < 100, lambda: "n is small")
        y = x.exp()
        return y.view(-1, 2)[1:], y.repeat(n, 1).cumsum(0)

    compiled = torch.compile(fn, backend=Cleaning(), dynamic=True)
    x = torch.randn(6, 4)
    for n in (3, 5):
        torch.testing.assert_close(compiled(x, n), fn(x, n))
    (graph,) = graphs
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    hints = [v.node.hint for v in inputs if isinstance(v, torch.SymInt)]
    assert 3 in hints and None not in hints
    targets = [n.target for n in graph.graph.nodes]
    assert ATEN._assert_scalar.default in targets and ATEN.as_strided.default in targets
