"""The text of wrapper programs reads back to the same program, and is stable."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest

from plait.ir.calls import CONTROL_KINDS
from plait.ir.checks import ERRORS, Check
from plait.ir.dtypes import DTYPES, f32
from plait.ir.expr import Size, bounds, compare, smax, smin, symbol
from plait.ir.expr.text import TextError
from plait.wrapper import instructions as ins
from plait.wrapper.spec import FIELDS, Kind
from plait.wrapper.text import read, text

SYMBOLS = [
    symbol("s0", lo=2),
    symbol("s1"),
    symbol("s1", lo=float("-inf")),  # one name, two ranges
    symbol("u0", lo=-3, hi=77),
    symbol("zero-or-one", hi=1),
    symbol("i0", extent=8),
    symbol("i1", extent=symbol("s0", lo=2)),
    symbol("buf1", lo=1),  # named like a tensor
]
NAMES = ["buf0", "buf1", "view", "min", "ref", "lambda", "x.y", "_", "s0", "None", "inf"]


class Random:
    """Random instructions; nothing about them is legal but their types."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)

    def size(self, depth: int = 2) -> Size:
        if depth == 0 or self.r.random() < 0.3:
            return self.r.choice([*SYMBOLS, self.r.randint(-9, 9)])
        a, b = self.size(depth - 1), self.size(depth - 1)
        positive = smax(b, 1)
        made = [
            lambda: a + b, lambda: a * b, lambda: a // positive,
            lambda: a % positive, lambda: smin(a, b), lambda: smax(a, b),
            lambda: compare(self.r.choice(["eq", "ne", "lt", "le"]), a, b),
        ]  # fmt: skip
        return self.r.choice(made)()

    def sizes(self, n: int | None = None) -> tuple[Size, ...]:
        return tuple(self.size() for _ in range(self.r.randint(0, 3) if n is None else n))

    def name(self) -> str:
        return self.r.choice(NAMES)

    def names(self) -> tuple[str, ...]:
        return tuple(self.name() for _ in range(self.r.randint(0, 3)))

    def checks(self) -> tuple[Check, ...]:
        return tuple(Check(self.r.choice(ERRORS), self.name()) for _ in range(self.r.randint(0, 3)))

    def operand(self, depth: int = 2) -> ins.Operand:
        literals = [
            ("none", ""), ("bool", "True"), ("bool", "yes"), ("float", (0.1).hex()),
            ("float", "inf"), ("float", "nan"), ("float", (-0.0).hex()), ("float", (-2.5).hex()),
            ("float", "1.5"), ("str", "it's \"quoted\"\n"), ("complex", "1 2"), ("dtype", "f32"),
            ("device", "cuda:0"), ("layout", "strided"), ("memory_format", "preserve_format"),
        ]  # fmt: skip
        kinds = [
            lambda: ins.Ref(self.name()),
            lambda: ins.Literal(*self.r.choice(literals)),
            self.size,
        ]
        if depth:
            kinds.append(
                lambda: ins.ListOf(
                    tuple(self.operand(depth - 1) for _ in range(self.r.randint(0, 3)))
                )
            )
        return self.r.choice(kinds)()

    def many(self, make: Callable[[], object], most: int = 3) -> tuple[object, ...]:
        return tuple(make() for _ in range(self.r.randint(0, most)))

    def source(self) -> object:
        sources = [
            lambda: ins.SizeOf(
                self.name(), self.r.choice(["size", "stride", "offset"]), self.r.randint(0, 3)
            ),
            lambda: ins.ItemOf(self.name()),
            self.size,
        ]
        return self.r.choice(sources)()

    def keywords(self) -> object:
        keys = self.r.sample(["out", "from", "dim", "into", "op", "a b"], self.r.randint(0, 4))
        return tuple((k, self.operand()) for k in keys)

    def field(self, kind: Kind) -> object:
        number = lambda: self.r.randint(0, 99)
        makers: dict[Kind, Callable[[], object]] = {
            Kind.SOURCE: self.source,
            Kind.SHAPE: lambda: self.sizes(self.rank),
            Kind.STRIDES: lambda: self.sizes(self.rank),
            Kind.RESULTS: lambda: self.many(lambda: self.r.choice([None, self.name()])),
            Kind.KEYWORDS: self.keywords,
            Kind.OPERANDS: lambda: self.many(self.operand),
            Kind.OUTPUTS: lambda: self.many(self.operand),
            Kind.OPERAND: self.operand,
            Kind.SIZE: self.size,
            Kind.CONDITION: self.size,
            Kind.SIZES: self.sizes,
            Kind.ALL_USED: self.names,
            Kind.FLAG: lambda: self.r.random() < 0.5,
            Kind.FOR_PASSES: lambda: self.r.random() < 0.5,
            Kind.INT: number,
            Kind.CONSTANT: number,
            Kind.CALLABLE: number,
            Kind.CHECKS: self.checks,
            Kind.CONTROL: lambda: self.r.choice(CONTROL_KINDS),
            Kind.PROGRAMS: lambda: self.many(number),
            Kind.DTYPE: lambda: self.r.choice(list(DTYPES.values())),
        }
        return makers.get(kind, self.name)()

    def instruction(self, cls: type) -> object:
        self.rank = self.r.randint(0, 3)
        return cls(**{name: self.field(kind) for name, kind in FIELDS[cls]})

    def program(self, classes: tuple[type, ...], depth: int = 2) -> ins.WrapperProgram:
        signature = (ins.TensorInput, ins.SymbolInput, ins.OpaqueInput)
        return ins.WrapperProgram(
            name=self.name(),
            inputs=tuple(self.instruction(self.r.choice(signature)) for _ in range(3)),  # type: ignore[misc]
            body=tuple(self.instruction(c) for c in classes),  # type: ignore[misc]
            n_constants=self.r.randint(0, 2),
            n_callables=self.r.randint(0, 2),
            origins=(("k0", "model.py:3 relu"),) * self.r.randint(0, 1),
            programs=self.many(lambda: self.program(classes[-3:], depth - 1), depth),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("cls", ins.INSTRUCTIONS, ids=lambda c: c.__name__)
def test_every_instruction_reads_back(cls: type) -> None:
    for seed in range(150):
        p = Random(seed).program((cls,))
        assert read(text(p)) == p, f"seed={seed}\n{text(p)}"


def test_whole_programs_read_back_and_print_alike() -> None:
    for seed in range(40):
        p = Random(seed).program(tuple(ins.INSTRUCTIONS))
        again = read(text(p))
        assert again == p, f"seed={seed}\n{text(p)}"
        assert text(again) == text(p)


def test_symbols_keep_their_ranges() -> None:
    a, b = symbol("s0", lo=2, hi=64), symbol("s0")
    p = ins.WrapperProgram("g", (), (ins.Return((a, b)),))
    (back,) = read(text(p)).body
    assert isinstance(back, ins.Return)
    assert [bounds(v) for v in back.values] == [(2, 64), (0, float("inf"))]  # type: ignore[arg-type]


def test_the_text_is_readable() -> None:
    s0 = symbol("s0", lo=2)
    p = ins.WrapperProgram(
        "g",
        (ins.TensorInput("x", f32, (s0, 8), (8, 1)),),
        (
            ins.Symbol("s0", ins.SizeOf("x", "size", 0)),
            ins.DefineKernel("plait_relu", 2, 1),
            ins.Alloc("buf0", f32, (s0, 8), (8, 1)),
            ins.Launch("plait_relu", ("x", "buf0"), (s0,), ("buf0",), s0 * 8, barrier=False),
            ins.CallExtern(
                "aten::mul.Tensor",
                (ins.Ref("buf0"), ins.Literal("float", (0.5).hex())),
                (),
                ("buf1",),
            ),
            ins.Return((ins.Ref("buf1"), s0 * 2)),
        ),
    )
    assert text(p).splitlines() == [
        "program('g')",
        "s0 = symbol(lo=2)",
        "",
        "x = tensor_input(f32[s0, 8] @ (8, 1))",
        "",
        "s0 = read(x, 'size', 0)",
        "kernel('plait_relu', 2, 1)",
        "buf0 = alloc(f32[s0, 8] @ (8, 1))",
        "launch('plait_relu', (x, buf0), (s0,), (buf0,), 8*s0, barrier=False)",
        "buf1, = call('aten::mul.Tensor')(buf0, 0.5)",
        "return (buf1, 2*s0)",
    ]


def test_every_field_has_a_kind() -> None:
    for cls in (*ins.INSTRUCTIONS, *ins.INPUTS):
        assert [name for name, _ in FIELDS[cls]] == [f.name for f in fields(cls)]
    with pytest.raises(TypeError, match=r"Unmarked\.of has no kind"):
        FIELDS[Unmarked]


@dataclass(frozen=True)
class Unmarked:
    of: str


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("program('g')\nx = alloc(f33[2] @ (1,))", "line 2, column 10: expected an element type"),
        (
            "program('g')\nlaunch('k', (x,), (1/2,), (), 0)",
            "expected an integer expression, got 1 / 2",
        ),
        ("program('g')\nfrobnicate(x)", "expected an instruction, got frobnicate(x)"),
        ("program('g')\nfree(x, y)", "expected no other arguments than name, got y"),
        ("program('g')\nfree(x, at=1)", "expected no other arguments than name, got 1"),
        ("x = alloc(f32[2] @ (1,))", "expected program(...)"),
    ],
)
def test_a_wrong_text_is_refused_with_its_place(source: str, message: str) -> None:
    with pytest.raises(TextError) as e:
        read(source)
    assert message in str(e.value)
