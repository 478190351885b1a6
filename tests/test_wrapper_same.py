"""Models, random graphs and what programs are made of besides kernels: the same bits from native,
Python and C++, and what eager gives from FX, each target without the executor (see
`one_target.only`)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.against_eager import same
from tests.fuzz.check import check, passes, with_road
from tests.fuzz.make import generate
from tests.fuzz.program import Program
from tests.models import MODELS
from tests.one_target import only, outcome, same_bits

SLOW = partial(pytest.param, marks=pytest.mark.slow)
hops = torch._higher_order_ops


# ------------------------------------------------------------------------------------------- models
def mlp() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


ALL = {**MODELS, "mlp": (mlp, lambda n: torch.randn(n, 8))}
FAST = {
    ("python", "unet", False, True), ("python", "bert", True, False), ("python", "mlp", True, True),
    ("cpp", "unet", False, True), ("cpp", "gpt2", True, False), ("cpp", "mlp", True, True),
}  # fmt: skip


@cache
def of_model(target: str, name: str, dynamic: bool, training: bool) -> list[Any]:
    make, inputs = ALL[name]
    torch.manual_seed(0)
    model = make().train(training)
    calls = [lambda n=n: [_marked(inputs(n), dynamic)] for n in ((2, 3) if dynamic else (2,))]
    return outcome(target, model, calls, None, training, model)


def _marked(x: Tensor, dynamic: bool) -> Tensor:
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    return x


MODEL_CASES = [
    (t, n, d, g)
    for t in ("python", "cpp")
    for n in ALL
    for d in (False, True)
    for g in (False, True)
]


@pytest.mark.parametrize(
    ("target", "name", "dynamic", "training"), [c if c in FAST else SLOW(*c) for c in MODEL_CASES]
)
def test_models_have_the_bits_of_native(
    target: str, name: str, dynamic: bool, training: bool
) -> None:
    same_bits(
        of_model(target, name, dynamic, training), of_model("native", name, dynamic, training)
    )


# ------------------------------------------------------------------------------------ random graphs
N_GRAPHS = [*range(2), *map(SLOW, range(2, 20))]


@cache
def nth(n: int) -> Program:
    """The n-th random program whose calls eager runs to their end, with one that plait compiles."""
    seeds = itertools.count() if n == 0 else itertools.count(nth(n - 1).seed + 1)
    return next(p for p in map(generate, seeds) if _runs(p))


def _runs(p: Program) -> bool:
    scope = scope_of(p)
    try:
        for call in scope["CALLS"]:
            scope["f"](*scope["inputs"](call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(with_road(p, way="compile", threads=1)).graphs > 0
    except Exception:  # noqa: BLE001 - what eager refuses has no bits to compare
        return False


def scope_of(p: Program) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(p.source(), f"<fuzz {p.seed}>", "exec"), scope)
    return scope


@cache
def of_graph(target: str, n: int) -> list[Any]:
    p = nth(n)
    scope = scope_of(p)
    calls = [partial(scope["inputs"], call) for call in scope["CALLS"]]
    return outcome(target, scope["f"], calls, bool(p.road.dynamic), p.road.grad == "backward")


@pytest.mark.parametrize("n", N_GRAPHS)
@pytest.mark.parametrize("target", ["python", "cpp"])
def test_random_graphs_have_the_bits_of_native(target: str, n: int) -> None:
    same_bits(of_graph(target, n), of_graph("native", n))


@pytest.mark.parametrize("n", N_GRAPHS)
def test_random_graphs_in_fx(n: int) -> None:
    p = with_road(nth(n), way="compile", wrapper="fx", threads=1)
    with only("fx"):
        passes(p)


# -------------------------------------------------------------------------------------------- calls
@torch.library.custom_op("plait_same::scale_", mutates_args=("x",))
def scale_(x: Tensor, by: float) -> Tensor:
    x.mul_(by)
    return x.sum(0)


@scale_.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("plait_same::split", mutates_args=())
def split(x: Tensor, at: int) -> list[Tensor]:
    return [x[:at].clone(), x[at:] * 2]


@split.register_fake
def _(x: Tensor, at: int) -> list[Tensor]:
    return [x.new_empty((at, *x.shape[1:])), x.new_empty((x.shape[0] - at, *x.shape[1:]))]


printed: list[float] = []


@torch.library.custom_op("plait_same::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    printed.append(float(x.sum()))
    return x.clone()


@note.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library._register_effectful_op(note._opoverload, hops.effects.EffectType.ORDERED)


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return x.sin() * 2


def mutated_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    s = scale_(y, 0.5)  # of memory that nobody else sees: in place
    return y + 1, s


def mutated_and_kept(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.exp()
    z = y.sin()
    scale_(x, 3.0)  # an argument
    scale_(y.view(-1), 2.0)  # through a view
    return y, z, x + 1


def effects(x: Tensor) -> Tensor:
    note(x)  # whose result nobody wants
    y = note(x * 2) + 1
    note(y.sin())
    return y


def many_constants(x: Tensor) -> Tensor:
    even = torch.tensor(list(range(2, 40, 2)))
    return x[:, :1] * even + torch.tensor([[0.5], [1.5], [-2.0], [7.0]])[: x.shape[0]].sum()


def numbers(
    x: Tensor, n: int, scale: float, flag: bool, nothing: None, word: str
) -> tuple[Any, ...]:
    y = x * scale if flag and nothing is None else x
    return y.repeat(n, 1), n + 1, scale * 2, not flag, None, word + "!", x.shape[0] * n


CALLS: dict[str, Callable[..., Any]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,)) * 2,
    "while_loop": lambda x: hops.while_loop(
        lambda i, x: i.sum() < 3,
        lambda i, x: (i + 1, x * 2),
        (x.new_zeros(1, dtype=torch.int64), x),
    ),
    "scan": lambda x: hops.scan(lambda c, y: (c + y, (c * y).clone()), torch.zeros(6), x),
    "associative_scan": lambda x: (
        hops.associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic") * 2
    ),
    "map": lambda x: hops.map(lambda a: a * 2 + 1, x).sum(0),
    "nested regions": lambda x: region(region(x)) + 1,
    "custom operator": lambda x: [y + 1 for y in split(x.exp(), 1)],
    "mutates an intermediate": mutated_inside,
    "mutates an argument and a view": mutated_and_kept,
    "effect tokens": effects,
    "constants of Python data": many_constants,
    "numbers": numbers,
}
NUMBERS = (2, 0.5, True, None, "abc")


@cache
def of_call(target: str, name: str, dynamic: bool) -> list[Any]:
    fn = CALLS[name]
    calls = [partial(arguments, name, n) for n in (4, 3 if dynamic else 4)]
    return outcome(target, fn, calls, dynamic, False)


def arguments(name: str, n: int) -> Sequence[Any]:
    x = torch.linspace(-1, 1.2, n * 6).view(n, 6)
    return (x, *NUMBERS) if name == "numbers" else (x,)


EXPENSIVE = ("associative_scan", "while_loop")


@pytest.mark.parametrize("dynamic", [SLOW(False), True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [SLOW(n) if n in EXPENSIVE else n for n in CALLS])
@pytest.mark.parametrize("target", [SLOW("native"), "python", "cpp", "fx"])
def test_calls(target: str, name: str, dynamic: bool) -> None:
    of_native = of_call("native", name, dynamic)
    printed.clear()
    if target in ("native", "fx"):
        with only(target):
            same(CALLS[name], partial(arguments, name, 4), dynamic=dynamic, calls=1)
    else:
        same_bits(of_call(target, name, dynamic), of_native)
    if name == "effect tokens":
        x = arguments(name, 3 if dynamic and target in ("python", "cpp") else 4)[
            0
        ]  # of the last call
        want = [float(t.sum()) for t in (x, x * 2, (x * 2 + 1).sin())]
        assert printed[-3:] == pytest.approx(want) and len(printed) % 3 == 0
