"""Functions of sizes are computed at run time: every one in every target as Python computes it, and
in programs whose sizes change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import plait
from plait.ir.dtypes import i64
from plait.ir.expr import Size, call, evaluate, smax, smin, symbol
from plait.ir.loops import Buffer, LoopProgram, Pointwise, node
from plait.lower.float_nodes import to_word
from plait.lower.symbols import number_functions, to_size
from plait.lower.wide import take_out_wide
from plait.runtime.functions import FUNCTIONS, bits, number
from plait.wrapper.instructions import Return, SymbolInput, WrapperProgram
from plait.wrapper.program import Artifacts
from plait.wrapper.targets import TARGETS
from plait.wrapper.text import read, text
from plait.wrapper.verify import verify

INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    6,
    7,
    63,
    -7,
    100,
    2**31,
    2**53,
    2**53 + 1,
    2**62 + 1,
    2**63 - 1,
    -(2**63),
)
FLOATS = (
    0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -2.5, 1.0, -1.0, 0.1, 2.675, 3.14, 0.125, 700.0, 710.0, 1e18,
    1e300, -1e300, 2.0**63, -(2.0**63), 1e-320, math.inf, -math.inf,
)  # fmt: skip
OF_INTEGERS = (
    "bit_and",
    "bit_or",
    "bit_xor",
    "shift_left",
    "shift_right",
    "power",
    "real",
    "true_div",
)


def operands(name: str) -> Iterator[tuple[int, int]]:
    words = INTEGERS if name in OF_INTEGERS else tuple(map(bits, FLOATS))
    for a in words:
        for b in range(9) if name == "real_round" else words:
            if name not in ("power", "shift_left") or abs(b) < 200:
                yield a, b


def program(*names: str) -> WrapperProgram:
    a, b = (symbol(n, -math.inf) for n in "ab")
    calls = tuple(call(name, a, b) for name in names)
    made = WrapperProgram("p", (SymbolInput("a"), SymbolInput("b")), (Return(calls),))
    verify(made, after="the test")
    assert read(text(made)) == made
    return made


def value(name: str, a: int, b: int) -> int | None:
    try:
        return FUNCTIONS[name](a, b)
    except (ArithmeticError, ValueError):
        return None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_pythons(name: str, target: str) -> None:
    if target == "cpp" and name not in ("real_round", "true_div", "shift_left"):
        pytest.skip("C++ calls what native calls: one program has all, see below")
    run = TARGETS[target](program(name), Artifacts({}))
    for a, b in operands(name):
        want = value(name, a, b)
        if want is None:
            with pytest.raises((RuntimeError, ArithmeticError, ValueError)):
                run(a, b)
        else:
            assert list(run(a, b)) == [want], (name, a, b)


@pytest.mark.parametrize("target", TARGETS)
def test_one_program_of_all(target: str) -> None:
    """Words that are floats between 0 and 1, which every function takes as they are or as integers
    shifted by few."""
    names = [n for n in FUNCTIONS if n not in ("power", "shift_left", "shift_right", "real_round")]
    run = TARGETS[target](program(*names), Artifacts({}))
    for x, y in ((0.5, 0.25), (0.75, 1.0), (1.0, 0.1)):
        a, b = bits(x), bits(y)
        assert list(run(a, b)) == [FUNCTIONS[n](a, b) for n in names]


def zeros(x: Tensor, n: Any) -> Tensor:
    return torch.zeros(int(n)) + x.sum()


SIZES: dict[str, Callable[[Tensor, int], Any]] = {
    "int of sqrt": lambda x, n: zeros(x, math.sqrt(n)),
    "power of a half": lambda x, n: zeros(x, n**0.5),
    "scale": lambda x, n: x * n**0.5,
    "power of one and a half": lambda x, n: zeros(x, n**1.5),
    "log2": lambda x, n: zeros(x, math.log2(n) + 1),
    "sin": lambda x, n: zeros(x, 5 + 3 * math.sin(n)),
    "rounded half": lambda x, n: zeros(x, round(n / 2)),
    "rounded scalar": lambda x, n: x * round(n / 7, 2),
    "rounded size": lambda x, n: zeros(x, round(n / 7, 2) * 10),
    "power of a size": lambda x, n: zeros(x, 2 ** (n // 4)),
    "bits": lambda x, n: (zeros(x, n & 6), zeros(x, n | 6), zeros(x, n ^ 6)),
    "bits as numbers": lambda x, n: (
        x + torch.full((1,), float(n ^ 6)),
        torch.full((2,), (n & 6) / 4),
        zeros(x, (n | 6) / 2),
    ),
    "shifts": lambda x, n: (zeros(x, (n << 2) >> 1), zeros(x, 1 << (n // 8))),
    "quotient": lambda x, n: (x * (n / 7), zeros(x, math.ceil(n / 7)), zeros(x, math.trunc(n / 7))),
    "part": lambda x, n: zeros(x, math.floor(n * 0.3)),
    "compared": lambda x, n: x + 1 if n / 7 > 2.5 else x - 1,
    "at least": lambda x, n: zeros(x, max(2.5, n / 3)),
    "returned": lambda x, n: (x + 1, math.sqrt(n), int(n**0.5), n & 3),
    "window": lambda x, n: x[: int(n**0.5)] + 1,
    "patches": lambda x, n: (
        x[: int(math.sqrt(n)) ** 2].view(int(math.sqrt(n)), int(math.sqrt(n))).t() * 2
    ),
    "exp of log": lambda x, n: zeros(x, math.exp(math.log(n) / 2)),
}


def agree(fn: Callable[..., Any], compiled: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    for n in sizes:
        x = torch.linspace(0, 1, n)
        for g, w in zip(pytree.tree_leaves(compiled(x)), pytree.tree_leaves(fn(x)), strict=True):
            if isinstance(w, Tensor):
                torch.testing.assert_close(g, w)
            else:
                assert g == w and type(g) is type(w)


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("name", SIZES)
def test_in_functions_whose_sizes_change(name: str, wrapper: str) -> None:
    def fn(x: Tensor) -> Any:
        return SIZES[name](x, x.shape[0])

    compiled = torch.compile(fn, backend="plait", options={"wrapper": wrapper}, fullgraph=True)
    agree(fn, compiled, (9, 16, 25, 37, 50, 64))


@pytest.mark.parametrize("wrapper", ["cpp", "fx"])
def test_in_other_targets(wrapper: str) -> None:
    def fn(x: Tensor) -> Any:
        return [
            SIZES[k](x, x.shape[0])
            for k in ("int of sqrt", "bits", "shifts", "rounded size", "returned")
        ]

    agree(fn, torch.compile(fn, backend="plait", options={"wrapper": wrapper}), (9, 16, 25, 37, 50))


def test_in_training() -> None:
    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return (x[: int(n**0.5) ** 2].view(int(n**0.5), -1).cumsum(0) * (n / 7)).sum()

    compiled = torch.compile(fn, backend="plait")
    for n in (9, 16, 25, 37, 50):
        x, y = (torch.linspace(0, 1, n).requires_grad_() for _ in range(2))
        compiled(x).backward()
        fn(y).backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_divmod_of_a_size_without_dynamo() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        (whole, rest), (other, _) = divmod(x.shape[0], 3), divmod(50, x.shape[0])
        return x * whole + other, torch.zeros(rest + 2)

    agree(
        fn, plait.compile(fn, (torch.ones(5),), ({0: torch.export.Dim.AUTO},)), (9, 16, 25, 37, 50)
    )
    assert not hasattr(torch.SymInt, "__divmod__")


def test_without_dynamo_and_in_packages(tmp_path: Any) -> None:
    """Without Dynamo `int` and functions of `math` but rounding make numbers of sizes; where a
    function makes a size, torch.export guards that it is no 0 or 1, cannot solve that, and says
    that the size may not vary."""

    def fn(x: Tensor) -> Tensor:
        n = x.shape[0]
        return x * n**1.5 + (n & 6) - (n ^ 5) + round(n / 7, 2) + math.floor(n**0.5) * (n / 7)

    x = torch.linspace(0, 1, 30)
    shapes = ({0: torch.export.Dim("n", min=5, max=1000)},)
    agree(fn, plait.compile(fn, (x,), dynamic_shapes=shapes), (9, 16, 25, 37, 50))
    plait.package(fn, tmp_path / "a.plait", (x,), dynamic_shapes=shapes, machines=["portable"])
    agree(fn, plait.load(tmp_path / "a.plait"), (9, 16, 25, 37, 50))


PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "n ** 0.5": lambda n, m: n**0.5,
    "n ** 1.5": lambda n, m: n**1.5,
    "n ** (m % 4)": lambda n, m: n ** (m % 4),
    "2 ** (m % 40)": lambda n, m: 2 ** (m % 40),
    "sqrt": lambda n, m: torch.sym_sqrt(n),
    "n / m": lambda n, m: n / m,
    "int(n / m)": lambda n, m: math.trunc(n / m),
    "ceil": lambda n, m: math.ceil(n / m * 0.7),
    "floor": lambda n, m: math.floor(n * 0.3 + m / 7),
    "round": lambda n, m: round(n / m),
    "round to digits": lambda n, m: round(n / m, 2) * 3,
    "bits": lambda n, m: ((n & m) + (n | 6)) - (m ^ 5),
    "shifts": lambda n, m: (n << (m % 8)) + (n >> (m % 8)),
    "compared": lambda n, m: (n / m) < 1.5,
    "bounds": lambda n, m: torch.sym_max(n / m, 2.5),
}


@pytest.mark.parametrize("name", PYTHON)
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_expressions_of_symbols_are_pythons(name: str, n: int, m: int) -> None:
    """What tracing makes of Python's operators, as an expression of sizes, has Python's value."""
    want = PYTHON[name](n, m)
    made = traced(name)
    symbols = {"n": n, "m": m}
    for known, value in made[1]:
        symbols[known] = evaluate(value, symbols)
    got = evaluate(made[0], symbols)
    assert (number(got) if isinstance(want, float) else got) == want


@cache
def traced(name: str) -> tuple[Size, tuple[tuple[str, Size], ...]]:
    """The expression of symbols n and m, and what stands behind its own symbols. A float's is its
    word."""
    env = ShapeEnv()
    given = [
        env.create_symbol(30 + k, ConstantSource(s), DimDynamic.DYNAMIC, None)
        for k, s in enumerate("nm")
    ]
    n, m = (env.create_symintnode(s, hint=30 + k) for k, s in enumerate(given))
    functions = number_functions(env)
    made = PYTHON[name](n, m)
    size = to_word(made.node.expr, env) if isinstance(made, torch.SymFloat) else to_size(made)
    made_of = {k: value for k, (_, value) in functions.items()}
    behind = {**dict(zip((s.name for s in given), map(symbol, "nm"), strict=True)), **made_of}
    return size, tuple(behind.items())


def test_each_graph_numbers_its_functions() -> None:
    """A backward graph has the ShapeEnv of its forward graph; its program is the same whatever was
    compiled before. What is no function keeps its atom."""
    env = ShapeEnv()
    symbol = env.create_symbol(30, ConstantSource("n"), DimDynamic.DYNAMIC, None)
    n = env.create_symintnode(symbol, hint=30)
    some, low, size = n & 6, n & 3, to_size(n + 1)
    first = number_functions(env)
    assert [str(to_size(k)) for k in (some, low, low + 1)] == ["fn0", "fn1", "fn1 + 1"]
    again = number_functions(env)
    assert [str(to_size(k)) for k in (low + 1, some)] == ["fn0 + 1", "fn1"]
    assert to_size(n + 1) is size
    assert first["fn0"][1] == again["fn1"][1] != again["fn0"][1]


# ----------------------------------------------------------------------------------- beyond 64 bits
WIDE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "factor": lambda x, k: x * (k * k),
    "summand": lambda x, k: x + (k * k * k - k),
    "doubled": lambda x, k: x * (k * 2**31),
    "one more": lambda x, k: x + (k * 2**31 + 1),
    "filled": lambda x, k: torch.full((2,), k * k),
    "shifted": lambda x, k: x * (k << 40),
    "power": lambda x, k: x * k**3,
    "compared": lambda x, k: torch.where(x > k * k, x, 0),
    "to integers": lambda x, k: x.long() + k * k,
    "counted from": lambda x, k: torch.arange(k * k, k * k + 2) + x,
    "under a mask": lambda x, k: x.masked_fill(x > 0, k * k),
}


@pytest.mark.parametrize("wrapper", TARGETS)
def test_numbers_of_kernels_that_need_more_than_64_bits(wrapper: str) -> None:
    x, small, large = torch.ones(2), (3, 5, -4), 2**33
    for name, fn in WIDE.items():
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="plait", dynamic=True, options={"wrapper": wrapper})
        for k in small:
            torch.testing.assert_close(compiled(x, k), fn(x, k), msg=name)
        with pytest.raises(OverflowError):
            fn(x, large)
        with pytest.raises((RuntimeError, OverflowError), match=r"overflow|int too big|type 'List"):
            print(name, compiled(x, large))


@pytest.mark.parametrize("name", WIDE)
def test_numbers_of_tensors_that_need_more_than_64_bits(name: str) -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return WIDE[name](x, n.item())  # type: ignore[arg-type]

    x = torch.ones(2)
    compiled = plait.compile(fn, (x, torch.tensor(3)))
    torch.testing.assert_close(compiled(x, torch.tensor(5)), fn(x, torch.tensor(5)))
    with pytest.raises(RuntimeError, match="overflows"):
        compiled(x, torch.tensor(2**33))


ORDINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda x, y: x.mean((1, 2)) + x.var(),
    "number of elements": lambda x, y: x * x.numel() + y.sum() * (y.shape[0] * y.shape[1]),
    "pooled": lambda x, y: F.avg_pool2d(x, 2).relu().mean((1, 2)) * 3,
    "counted": lambda x, y: torch.arange(y.numel()) * 2 + 3 * y.shape[0],
    "square": lambda x, y: (y @ y.T).mean() + (y @ y.T).numel(),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_sizes_of_tensors_stay_in_kernels(name: str) -> None:
    programs: list[LoopProgram] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.lower.graph._check_symbols", programs.append)
        x, y = torch.randn(3, 8, 10), torch.randn(5, 6)
        compiled = torch.compile(ORDINARY[name], backend="plait", dynamic=True)
        torch.testing.assert_close(compiled(x, y), ORDINARY[name](x, y))
    assert programs and not [s for p in programs for s in p.symbols if s.startswith("wide")]


def test_what_is_taken_out_of_a_loop() -> None:
    n, k, i = symbol("n"), symbol("k", lo=-math.inf), symbol("i", extent=4)
    few = symbol("few", lo=0, hi=1000)
    symbols = dict.fromkeys(("n", "k", "few"))

    def taken(e: Size) -> tuple[str, list[str]]:
        loop = Pointwise("out", (i,), node("index", (), e, i64))
        (op,), values = take_out_wide([loop], [Buffer("x", i64, (n, 4), (4, 1))], symbols)
        assert isinstance(op, Pointwise)
        return str(op.body.attr), [str(v) for v in values.values()]

    for kept in (
        n,
        k,
        n * 3 + i,
        few * few * few,
        few * n,
        k * i,
        i * i,
        smin(n, k),
        k // 2 + i,
        k % 7,
    ):
        assert taken(kept) == (str(kept), []), kept
    assert taken(k * k) == ("wide0", ["k*k"])
    assert taken(k + 1) == ("wide0", ["k + 1"])
    assert taken(n * n + i) == ("i + wide0", ["n*n"])
    assert taken(k * k * i + 2 * k) == ("i*wide0 + wide1", ["k*k", "2*k"])
    assert taken((k * k + i) % 5) == ("((i + wide0) % 5)", ["k*k"])
    assert taken(smax(k * k, i)) == ("max(i, wide0)", ["k*k"])
