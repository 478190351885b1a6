"""Warm starts: what is put around programs, and that a second start needs no compiler.

A new process is played: Dynamo forgets all, functions and modules are made anew."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import plait
from plait.capture.recompiles import of_process
from plait.capture.warm import frames, graphs
from plait.capture.warm.operators import Formulas
from tests import warm as processes

MODULE = "a_users_module"
OPTIONS = {"warm_start": True, "strict": True}


@pytest.fixture
def started(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Gives what became of the frames since it was last asked: "warm", "kept" or why not."""
    monkeypatch.setenv("PLAIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(frames, "EXTENDED", [])  # whatever other tests have registered
    torch._dynamo.reset()
    frames.outcomes.clear()

    def since() -> list[str]:
        found = [o.how for o in frames.outcomes]
        frames.outcomes.clear()
        return found

    yield since
    sys.modules.pop(MODULE, None)
    torch._dynamo.reset()


def made(text: str, **names: Any) -> dict[str, Any]:
    """What a text defines, as a new process would have it."""
    torch._dynamo.reset()
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    scope = vars(module)
    scope.update(names, torch=torch)
    exec(text, scope)
    return scope


def both(
    text: str, started: Callable[[], list[str]], *args: Any, **options: Any
) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The function f of a text and its compiled form, in a process and the next one; the second
    one starts warm."""
    for how in ("kept", "warm"):
        f = made(text)["f"]
        yield f, torch.compile(f, backend="plait", options={**OPTIONS, **options})
        assert started() == [how]


PLAIN = "def f(x, y):\n    return (x * y).relu().sum(1), y + 1"


def test_a_program_of_its_own(started: Callable[[], list[str]]) -> None:
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    for f, g in both(PLAIN, started):
        for _ in range(2):
            torch.testing.assert_close(g(x, y), f(x, y))


def test_views_and_written_arguments(started: Callable[[], list[str]]) -> None:
    text = "def f(x, y):\n    x.mul_(2)\n    return x[1:], y.t(), y, x + y"
    for f, g in both(text, started):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        x2, y2 = x.clone(), y.clone()
        got, want = g(x, y), f(x2, y2)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x, x2)
        assert got[0]._base is x and got[2] is y


@pytest.mark.parametrize("retained", [False, True])
def test_training(started: Callable[[], list[str]], retained: bool) -> None:
    text = "def f(x, w):\n    return torch.tanh(x @ w).sum(), w.exp()"
    for f, g in both(text, started):
        x = torch.randn(6, 4, requires_grad=True)
        w = torch.randn(4, 3, requires_grad=True)
        grads = []
        for call in (f, g):
            loss = call(x, w)[0]
            if retained:
                torch.autograd.grad(loss, (x, w), retain_graph=True)
            grads.append(torch.autograd.grad(loss, (x, w)))
        torch.testing.assert_close(*grads)


def test_gradients_that_kernels_cannot_read(started: Callable[[], list[str]]) -> None:
    text = "def f(x):\n    return x.sin() * x"
    x, v = torch.randn(3, requires_grad=True), torch.eye(3)
    for f, g in both(text, started, strict=False):
        got, want = (
            torch.autograd.grad(call(x), x, v, is_grads_batched=True)[0] for call in (g, f)
        )
        torch.testing.assert_close(got, want)


def test_eager_takes_tangents(started: Callable[[], list[str]]) -> None:
    from torch.autograd import forward_ad

    x, t = torch.randn(5), torch.randn(5)
    for f, g in both("def f(x):\n    return (x.sin() * 2, x > 0)", started, strict=False):
        g(x)
        with forward_ad.dual_level():
            got, want = (
                forward_ad.unpack_dual(call(forward_ad.make_dual(x, t))[0]) for call in (g, f)
            )
        torch.testing.assert_close(got.primal, want.primal)
        if got.tangent is not None:
            torch.testing.assert_close(got.tangent, want.tangent)


def test_sizes_that_vary(started: Callable[[], list[str]]) -> None:
    text = "def f(x, n):\n    return (x * n).sum(0) + x.shape[0]"
    for want in (["kept", "kept"], ["warm", "warm"]):
        f = made(text)["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS)
        for n in (5, 6, 7, 9):
            torch.testing.assert_close(g(torch.ones(n, 3), 2), f(torch.ones(n, 3), 2))
        assert started() == want
        torch.testing.assert_close(g(torch.ones(1, 3), 2), f(torch.ones(1, 3), 2))
        assert started() == [want[0]]


def test_two_models_of_one_class(started: Callable[[], list[str]]) -> None:
    """One entry serves both: they run the same code with weights of their own."""
    for how in (["kept", "warm"], ["warm", "warm"]):
        torch._dynamo.reset()
        nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        fast = [torch.compile(n, backend="plait", options=OPTIONS) for n in nets]
        x = torch.randn(2, 4)
        for _ in range(2):
            for n, g in zip(nets, fast, strict=True):
                torch.testing.assert_close(g(x), n(x))
        assert started() in (how, how[:1])


def test_guards_hold_after_a_warm_start(started: Callable[[], list[str]]) -> None:
    """What changes in the process is seen as after a compile."""
    text = "k = 2\ndef f(x):\n    return x * k + d['a']\nd = {'a': 1.0}"
    for how in ("kept", "warm"):
        scope = made(text)
        f = scope["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS)
        x = torch.ones(3)
        assert g(x).tolist() == f(x).tolist() == [3, 3, 3] and started() == [how]
        scope["k"] = 5
        assert g(x).tolist() == [6, 6, 6]
        scope["d"]["a"] = 2.0
        assert g(x).tolist() == [7, 7, 7]
        started()
        assert "kept" not in started()
        with torch.no_grad():
            assert g(x.double()).dtype == torch.float64
        started()


BREAKS = """
import torch
k = 2.0
def help(x):
    x = x * k
    torch._dynamo.graph_break()
    return x + 1.0
def f(x):
    a = x.sin()
    def inner(b):
        return a * b + k
    with torch.no_grad():
        z = inner(x)
        torch._dynamo.graph_break()
        z = inner(z) + 1
    z = help(z)
    if z.sum().item() > 100:
        z = z * 3
    else:
        z = z - 3
    return inner(x) * z
"""


def test_graph_breaks(started: Callable[[], list[str]]) -> None:
    """What is left of a frame starts warm as well: in a function that is called, in a context, with
    cells, on both sides of a branch on a value."""
    x = torch.randn(5, requires_grad=True)
    for how in ("kept", "warm"):
        f = made(BREAKS)["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS)
        got, want = g(x), f(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (got, want)))
        found = started()
        assert set(found) <= {how, "skipped"} and found.count(how) > 5, found


def test_what_is_left_after_a_miss(started: Callable[[], list[str]]) -> None:
    """What came out of an entry breaks again where no entry serves it: Dynamo goes on from there,
    also where the frame's own entry is one for other values."""
    text = BREAKS.replace("z = help(z)", "z = help(z * n)").replace("f(x)", "f(x, n)")
    for n, how in ((2, "kept"), (2, "warm"), (3, "kept")):
        scope = made(text)
        g = torch.compile(scope["f"], backend="plait", options=OPTIONS)
        x = torch.full((5,), float(n))
        torch.testing.assert_close(g(x, n), scope["f"](x, n))
        assert how in started()
        scope["k"] = 7.0
        torch.testing.assert_close(g(x, n), scope["f"](x, n))
        torch.testing.assert_close(g(x * 100, n), scope["f"](x * 100, n))
        started()


def test_edits_before_and_after_a_break(started: Callable[[], list[str]]) -> None:
    """Each frame stands for what it runs; the result is that of the text."""
    x = torch.ones(3)
    edits = [("x * k", "x * k * k"), ("z - 3", "z - 4"), ("inner(z) + 1", "inner(z)"), ("", "")]
    assert check_break(BREAKS, x, started)
    for before, after in edits:
        assert check_break(BREAKS.replace(before, after), x, started) == bool(before)


def check_break(text: str, x: torch.Tensor, started: Callable[[], list[str]]) -> bool:
    """Whether a frame of the text was compiled."""
    f = made(text)["f"]
    torch.testing.assert_close(torch.compile(f, backend="plait", options=OPTIONS)(x), f(x))
    return "kept" in started()


def test_processes_with_breaks(tmp_path: Any) -> None:
    """Real ones."""
    program = tmp_path / "program.py"
    program.write_text(f"""{BREAKS}
import plait
from plait.capture.recompiles import of_process
from plait.capture.warm import frames, graphs
if __name__ == "__main__":
    plait.warm_start({str(tmp_path)!r})
    torch.manual_seed(0)
    print(torch.compile(f, backend="plait")(torch.randn(3)).tolist())
    print({{o.how for o in frames.outcomes}})
""")
    runs = [processes.run(program, env=dict(os.environ)) for _ in range(2)]
    (first, kept), (second, warm) = (r.stdout.splitlines()[-2:] for r in runs)
    assert first == second and "kept" in kept and "warm" in warm and "kept" not in warm, runs


OPERATOR = """
import torch
k = 2.0
def help(g):
    return g * k
@torch.library.custom_op("warmtest::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 1.0
@op.register_fake
def fake(x):
    return torch.empty_like(x)
@torch.library.custom_op("warmtest::inner", mutates_args=())
def inner(x: torch.Tensor) -> torch.Tensor:
    return x.cos()
@inner.register_fake
def fake(x):
    return torch.empty_like(x)
def setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
def backward(ctx, g):
    return help(g) * torch.ops.warmtest.inner(*ctx.saved_tensors)
op.register_autograd(backward, setup_context=setup)
def f(x):
    return op(x * 2) + 1
"""


OPERATOR_EDITS = {
    "k = 2.0": ("k = 2.0", "warm"),
    "x.sin() * 1.0": ("x.sin() * 5.0", "warm"),
    "x.cos()": ("x.cos() * 2", "warm"),
    "g * k": ("g * k * k", "kept"),
    "k = 2.0\n": ("k = 3.0\n", "kept"),
    "help(g) *": ("help(g) +", "kept"),
    "torch.empty_like(x)": ("x.new_empty(x.shape)", "kept"),
    "(ctx, inputs, output):": ("(ctx, inputs, output):\n    ctx.a = 1", "kept"),
    "(x: torch.Tensor)": ("(x: torch.Tensor, n: int = 1)", "kept"),
}


def test_operators_of_users(started: Callable[[], list[str]]) -> None:
    """A program calls the kernels that are there; of the rest each function counts."""
    x = torch.randn(4, requires_grad=True)
    for before, (after, how) in {"": ("", "kept"), **OPERATOR_EDITS}.items():
        f = made(OPERATOR.replace(before, after) if before else OPERATOR)["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS)
        got, want = g(x), f(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (got, want)))
        assert started() == [how], before


MUTATING = """
import torch
@torch.library.custom_op("warmtest::write", mutates_args=("x",))
def write(x: torch.Tensor, k: float) -> None:
    x.mul_(k)
def f(x):
    write(x, 3.0)
    return x + 1
"""
FAILS = """
import torch
@torch.library.custom_op("warmtest::odd", mutates_args=())
def odd(x: torch.Tensor) -> torch.Tensor:
    return x * 2
@odd.register_fake
def fake(x):
    return torch.empty_like(x)
def backward(ctx, g):
    assert torch._guards.detect_fake_mode((g,)) is None
    return g * 2
odd.register_autograd(backward)
def f(x):
    return odd(x.sin())
"""


def test_operators_that_write(started: Callable[[], list[str]]) -> None:
    for f, g in both(MUTATING, started):
        x, y = torch.ones(3), torch.ones(3)
        torch.testing.assert_close(g(x), f(y))
        torch.testing.assert_close(x, y)


def test_graphs_that_eager_runs(started: Callable[[], list[str]]) -> None:
    """Nothing is kept of a graph that could not be compiled."""
    for _ in range(2):
        f = made(FAILS)["f"]
        g = torch.compile(f, backend="plait", options={**OPTIONS, "strict": False})
        x = torch.ones(3, requires_grad=True)
        torch.testing.assert_close(g(x), f(x))
        assert started() == ["a graph that eager runs"]


def test_fakes_that_were_called() -> None:
    """PyTorch notes the first call of a fake implementation: the next process has made none."""
    with torch.library._scoped_library("warmtest_fakes", "FRAGMENT") as lib:
        lib.define("op(Tensor x) -> Tensor")
        torch.library.register_fake("warmtest_fakes::op", lambda x: torch.empty_like(x), lib=lib)
        op = torch.ops.warmtest_fakes.op.default
        before = Formulas().of(op)
        op(torch.ones(3, device="meta"))
        assert Formulas().of(op) == before


HIGHER_ORDER = {
    "kinds": (
        "z = torch.nn.functional.softmax(x[..., 1:, None], 1, dtype=torch.float64)\n"
        "    z = z.clamp(max=float('inf')).contiguous(memory_format=torch.contiguous_format)\n"
        "    y = torch.zeros(3, 4, device=torch.device('cpu'), layout=torch.strided)\n"
        "    return z.to(torch.float32) * w[::2, :3].sum() + y * torch.finfo(x.dtype).eps"
    ),
    "cond": "return torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x.sin(), (x,))",
    "while_loop": (
        "return torch._higher_order_ops.while_loop(lambda i, x: i < 3, "
        "lambda i, x: (i + 1, x * 2), (torch.tensor(0), x.detach()))[1] * x"
    ),
    "region": "return block(block(x, w), w)",
    "checkpoint": "return checkpoint(lambda a: (a.sin() * w).cos(), x, use_reentrant=False)",
    "function": "return Twice.apply(x) + w",
    "vmap": "return torch.vmap(lambda a: a.sin() * 2)(x)",
    "grad": "return torch.func.grad(lambda a: (a.sin() * w).sum())(x.detach()) * x",
}
AROUND = """
import torch
from torch.utils.checkpoint import checkpoint
w = torch.eye(4) + 1
@torch.compiler.nested_compile_region
def block(x, w):
    return (x @ w).relu()
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]
def f(x):
    """


@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_operators_of_higher_order(name: str, started: Callable[[], list[str]]) -> None:
    """Forward, backward, and their graphs as eager reads them in the next process; and arguments of
    all kinds."""
    x = torch.randn(4, 4, requires_grad=True)
    text = AROUND + HIGHER_ORDER[name]
    made(text)["f"](x)  # the first torch.vmap registers kernels
    for f, g in both(text, started):
        got, want = g(x), f(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (got, want)))

    def check(gm: Any, args: Any) -> Any:
        again = graphs.Eager(graphs.source_data(gm))
        with torch.no_grad():
            torch.testing.assert_close(again(*args), gm(*args))
        return gm.forward

    torch.compile(made(text)["f"], backend=check)(x)


CALLED = """
import torch
lib = torch.library.Library("warmtest", "FRAGMENT")
lib.define("made(Tensor x) -> Tensor")
lib.impl("made", lambda x: x * 2, "CompositeImplicitAutograd")
def f(x):
    return torch.ops.warmtest.made(x)
"""


DECIDES = """
import torch
from torch.utils import checkpoint as cp
def decide(ctx, op, *args, **kwargs):
    return cp.CheckpointPolicy.MUST_SAVE
def context():
    return cp.create_selective_checkpoint_contexts(decide)
def f(x):
    return cp.checkpoint(lambda a: a.sin().cos(), x, use_reentrant=False, context_fn=context)
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            CALLED,
            "the operator warmtest::made, whose code for CompositeImplicitAutograd nothing tells",
        ),
        (DECIDES, "a checkpoint that a function of Python decides on"),
    ],
    ids=["operator", "decides"],
)
def test_what_is_not_kept(text: str, why: str, started: Callable[[], list[str]]) -> None:
    """Each with its reason."""
    f = made(text)["f"]
    g = torch.compile(f, backend="plait", options=OPTIONS)
    torch.testing.assert_close(g(torch.ones(3)), f(torch.ones(3)))
    assert why in started()


def test_explain_tells(started: Callable[[], list[str]]) -> None:
    for _, g in both(PLAIN, started):
        g(torch.ones(2, 2), torch.ones(2, 2))
        report = plait.explain(lambda x: x + 1, torch.ones(2), quiet=True)
        assert report.starts[-1] in ("f: kept for the next process", "f: started warm")
        assert report.starts[-1] in report.text


def test_warm_start_of_a_process(
    started: Callable[[], list[str]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_WARM_START", "")  # so that both are as they were afterwards
    monkeypatch.setenv("PLAIT_CACHE_DIR", "")
    plait.warm_start(tmp_path / "here")
    for how in ("kept", "warm"):
        g = torch.compile(made(PLAIN)["f"], backend="plait")
        g(torch.ones(2, 2), torch.ones(2, 2))
        assert started() == [how]
    assert list((tmp_path / "here" / "warm").iterdir())


def test_recompiles_are_told(started: Callable[[], list[str]]) -> None:
    told = []
    for how, numbers in ("kept", (2, 3, 4)), ("warm", (2, 3)):
        of_process.found.clear()
        f = made("def f(x, n):\n    return x * n")["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS, dynamic=False)
        for n in numbers:
            torch.testing.assert_close(g(torch.ones(3), n), torch.full((3,), float(n)))
        assert started() == [how] * len(numbers)
        told.append([[g.text for g in r.guards] for r in of_process.found])
    raised = pytest.raises(torch._dynamo.exc.RecompileError)
    with torch._dynamo.config.patch(error_on_recompile=True), raised:
        g(torch.ones(3), 4)
    assert told == [[["n == 2"], ["n == 3", "n == 2"]], [["n == 2"]]]


def test_damaged_entries_are_compiled_again(
    started: Callable[[], list[str]], tmp_path: Any
) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for _, g in both(PLAIN, started):
        g(x, y)
    (entry,) = tmp_path.glob("warm/*/*.frame")
    data = entry.read_bytes()
    for damaged in (data[: len(data) // 2], data[:40] + b"\0" + data[41:], b""):
        entry.write_bytes(damaged)
        f = made(PLAIN)["f"]
        g = torch.compile(f, backend="plait", options=OPTIONS)
        torch.testing.assert_close(g(x, y), f(x, y))
        assert started() == ["kept"]


def test_kernels_that_are_gone(started: Callable[[], list[str]], tmp_path: Any) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for _, g in both(PLAIN, started):
        g(x, y)
    for library in tmp_path.glob("kernels/*/*.so"):
        library.unlink()
    f = made(PLAIN)["f"]
    g = torch.compile(f, backend="plait", options=OPTIONS)
    torch.testing.assert_close(g(x, y), f(x, y))
    assert started() == ["kept"]


def test_constants(started: Callable[[], list[str]]) -> None:
    text = "def f(x):\n    return x + torch.tensor([1.0, 2.0, 3.0]), torch.arange(3)"
    x = torch.randn(3)
    for f, g in both(text, started):
        torch.testing.assert_close(g(x), f(x))
