"""Plan bytes: damaged ones are refused with a clear error and never crash; equal programs give
equal bytes."""

from __future__ import annotations

import random
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.errors import Unsupported
from plait.ir.dtypes import f32, i64
from plait.ir.expr import compare, symbol
from plait.runtime.load import LoadError, PlanError, load
from plait.wrapper.instructions import (
    Alloc,
    Arena,
    AssertScalar,
    AssertSizeStride,
    CallExtern,
    CallPython,
    Constant,
    Copy,
    DefineKernel,
    Fill,
    Free,
    Input,
    Instr,
    Launch,
    ListOf,
    Literal,
    OpaqueInput,
    Place,
    Ref,
    Return,
    Reuse,
    SizeOf,
    Symbol,
    SymbolInput,
    TensorInput,
    ValueOf,
    View,
    WrapperProgram,
)
from plait.wrapper.native import encode
from plait.wrapper.program import CompileRecord, observers
from tests import fuzz_plans, plan_damage
from tests.native_tools import alloc, launch, library, program, ret, tensor

HEADER = 24
ROOT = Path(__file__).parent.parent


def rich_program():
    """Something of everything, with constants and with symbols."""
    s0, n = symbol("s0"), symbol("n")
    return program(
        (SymbolInput("n"), tensor("x", s0, 4), tensor("y", 4, 4), OpaqueInput("g")),
        Symbol("s0", SizeOf("x", "size", 0)),
        AssertScalar(compare("le", s0, 100), "at most 100"),
        AssertSizeStride("y", f32, (4, 4), (4, 1)),
        Arena("m", 4096),
        Place("p", "m", 64, f32, (4, 4), (4, 1)),
        Place("q", "m", n // 1 * 64, f32, (4,), (1,)),
        CallExtern(
            "aten::mm.out", (Ref("y"), Ref("y")), (("out", Ref("p")),), (), ("p",), may_keep=False
        ),
        View("v", "p", f32, (2, 4), (4, 1), 8),
        Alloc("o", f32, (s0, 4), (4, 1)),
        launch("k_inc", "x", "o", n=4 * s0),
        Constant("c", 0),
        Alloc("a", f32, (16,), (1,)),
        launch("k_add", "v", "c", "a", n=8),
        Reuse("b", "a", f32, (4, 4), (4, 1)),
        Fill("b", Literal("float", "0x1p+0")),
        CallPython(
            0,
            "hook",
            (Ref("x"), ListOf((1, Literal("str", "s"), Literal("none")))),
            (("k", Literal("complex", "0x1p+0 0x1p+1")),),
            (None,),
        ),
        Copy("y", "b", bump=False),
        Free("b"),
        CallExtern("aten::topk", (Ref("o"), 2), (), ("t", None)),
        Return((Ref("o"), Ref("t"), s0 * 2 - 1, Literal("none"))),
        n_constants=1,
        n_callables=1,
    )


def with_checksum(plan: bytes) -> bytes:
    payload = plan[HEADER:]
    return plan[:12] + struct.pack("<IQ", zlib.crc32(payload), len(payload)) + payload


def make(plan: bytes):
    return load(plan, {"cpu": library()}, [torch.zeros(8)], [lambda *args, **kwargs: None])


def test_the_undamaged_program_runs():
    x, y = torch.randn(3, 4), torch.randn(4, 4)
    o, t, n, none = make(encode(rich_program()))(5, x, y, None)
    assert torch.equal(o, x + 1) and torch.equal(t, (x + 1).topk(2)[0]) and n == 5 and none is None


def test_equal_programs_give_equal_bytes():
    assert encode(rich_program()) == encode(rich_program())


def test_header_is_checked():
    plan = encode(rich_program())
    for damaged, text in [
        (b"", "magic"),
        (plan[:10], "magic"),
        (b"X" + plan[1:], "magic"),
        (plan[:8] + b"\xff\0\0\0" + plan[12:], "version 255"),
        (plan[:-1], "promises"),
        (plan + b"\0", "promises"),
        (plan[:-1] + bytes([plan[-1] ^ 1]), "checksum"),
    ]:
        with pytest.raises(PlanError, match=text):
            make(damaged)


def test_every_single_byte_error_is_found():
    plan = encode(rich_program())
    rng = random.Random(1)
    for _ in range(500):
        i = rng.randrange(len(plan))
        damaged = bytearray(plan)
        damaged[i] ^= 1 << rng.randrange(8)
        with pytest.raises(PlanError):
            make(bytes(damaged))


def corruptions(plan: bytes, n: int, seed: int):
    """Plans with random damage and a right checksum: the verifier alone stands before them."""
    rng = random.Random(seed)
    n_words = struct.unpack_from("<q", plan, HEADER)[0]
    interesting = [-1, -(2**63), 2**63 - 1, 2**31, 2**31 - 1, 0, 1, 2, 7, 12, 64, 100, 1 << 40]
    for _ in range(n):
        damaged = bytearray(plan)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = HEADER + 8 * rng.randrange(n_words + 1)
            old = struct.unpack_from("<q", plan, at)[0]
            new = rng.choice(
                (rng.choice(interesting), old + rng.choice((-1, 1)), rng.randrange(64))
            )
            struct.pack_into("<q", damaged, at, max(-(2**63), min(2**63 - 1, new)))
        if rng.random() < 0.1:
            damaged = damaged[: HEADER + rng.randrange(len(damaged) - HEADER)]
        yield with_checksum(bytes(damaged))


def test_damage_behind_a_right_checksum_never_crashes():
    refused = loaded = 0
    for damaged in corruptions(encode(rich_program()), 5000, seed=2):
        try:
            make(damaged)
            loaded += 1
        except (PlanError, LoadError):
            refused += 1
    assert refused > 2000 and refused + loaded == 5000


def test_damaged_plans_run_without_a_crash():
    """Programs of every instruction, damaged and called in a process of their own."""
    tally = fuzz_plans.fuzz(1000, sanitized=False)
    assert tally.findings == {}
    assert tally.seed == 1000 and tally.counts["refused"] > 300 and tally.counts["ran"] > 200
    untouched = [
        p for p in plan_damage.INSTRUCTIONS if not any(k.startswith(f"{p} ") for k in tally.counts)
    ]
    assert untouched == []


@pytest.mark.slow
def test_a_hundred_thousand_damaged_plans_run_under_a_sanitizer():
    """Goes on where it stopped, for these sources."""
    tally = fuzz_plans.fuzz(100_000, sanitized=True, state=fuzz_plans.kept_at(sanitized=True))
    assert tally.findings == {} and tally.seed >= 100_000


@pytest.mark.slow
def test_damaged_plans_are_read_under_a_sanitizer(tmp_path: Path):
    """The reader and the verifier as a program of their own, on plans of every instruction and of
    real graphs."""
    core, program = ROOT / "native" / "core", tmp_path / "native_plans"
    sources = [
        ROOT / "tests" / "native_plans.cpp",
        *(core / f"{n}.cpp" for n in ("functions", "plan", "verify")),
    ]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-g1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
    ]
    subprocess.run(
        [*command, "-I", str(ROOT / "native"), "-o", str(program), *map(str, sources)], check=True
    )
    files = []
    for k, p in enumerate((rich_program(), *real_programs())):
        files.append(tmp_path / f"{k}.plan")
        files[-1].write_bytes(encode(p))
    done = subprocess.run([program, "20000", *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 20 < int(done.stdout.split()[0]) < 10_000, done.stdout


def real_programs() -> list[WrapperProgram]:
    """What the compiler makes of a small model: inference, both halves of training, dynamic
    sizes."""
    made: list[CompileRecord] = []
    model = torch.nn.Sequential(
        torch.nn.Linear(48, 40), torch.nn.GELU(), torch.nn.LayerNorm(40), torch.nn.Dropout(0.1)
    )
    token = observers.set((made.append,))
    try:
        torch.compile(model, backend="plait", dynamic=True)(torch.randn(24, 48)).sum().backward()
        with torch.no_grad():
            torch.compile(model, backend="plait")(torch.randn(24, 48))
    finally:
        observers.reset(token)
    return [r.wrapper for r in made]


X = TensorInput("x", f32, (4,), (1,))
ARENA = (Arena("m", 64), Place("p", "m", 0, f32, (4,), (1,)))


@pytest.mark.parametrize(
    "inputs, body, text",
    [
        ((X,), (Return((Ref("x"),)), Return(())), "Return is not the last"),
        ((X,), (Free("x"), Return((Ref("x"),))), "'x' is used after it was freed"),
        ((X,), (Free("x"), Free("x"), Return(())), "'x' is used after it was freed"),
        ((SymbolInput("n"), SymbolInput("n")), (Return(()),), "symbol 'n' is defined twice"),
        ((), (Return((symbol("n"),)),), "before it is defined"),
        (
            (X,),
            (Arena("m", 64), Place("p", "m", 4, f32, (16,), (1,)), Return(())),
            "'p' reaches beyond its memory",
        ),
        (
            (X,),
            (Arena("m", 64), Place("p", "m", 2, f32, (4,), (1,)), Return(())),
            "'p' has a wrong offset",
        ),
        ((X,), (Arena("m", -1), Return(())), "arena of -1 bytes"),
        (
            (X,),
            (Alloc("a", f32, (4,), (1,)), View("v", "a", f32, (4,), (1,), 1), Return(())),
            "'v' reaches beyond its memory",
        ),
        (
            (X,),
            (Alloc("a", f32, (4,), (1,)), Reuse("b", "a", i64, (4,), (1,)), Return(())),
            "'b' reaches beyond its memory",
        ),
        (
            (X,),
            (Reuse("b", "x", f32, (4,), (1,)), Return(())),
            "'x' was not allocated by this program",
        ),
        ((X,), (Alloc("a", f32, (-4,), (1,)), Return(())), "a size is negative"),
        ((X,), (Alloc("a", f32, (1 << 40, 1 << 40), (1 << 40, 1)), Return(())), "too large"),
        ((X,), (Return((Ref("x"), ListOf(()))),), "a list is returned"),
        ((X,), (Return((ValueOf("x"),)),), "'x' is no float and no bool"),
        ((X,), (*ARENA, Return((Ref("p"),))), "'p' lies in the arena and may be kept"),
        (
            (X,),
            (*ARENA, View("v", "p", f32, (2,), (1,), 0), Return((Ref("v"),))),
            "'v' lies in the arena",
        ),
        (
            (X,),
            (*ARENA, CallExtern("aten::neg", (Ref("p"),), (), ("y",)), Return(())),
            "'p' lies in the arena",
        ),
        (
            (X,),
            (
                *ARENA,
                CallExtern("own::op", (ListOf((Ref("p"),)),), (), ("y",), may_keep=False),
                Return(()),
            ),
            "'p' lies in the arena",
        ),
        ((X,), (View("v", "x", f32, (2,), (1,), 1 << 60), Return(())), "'v' has a wrong offset"),
        ((X,), (Alloc("a", f32, (1 << 40, 1 << 40), (0, 0)), Return(())), "too large"),
        ((X,), (Fill("x", ValueOf("x")), Return(())), "a value is no operand of a call"),
    ],
)
def test_verifier(inputs: tuple[Input, ...], body: tuple[Instr, ...], text: str):
    with pytest.raises(PlanError, match=text):
        load(encode(program(inputs, *body)), {})


S0 = symbol("s0")


@pytest.mark.parametrize(
    "inputs, body, args, text",
    [
        (
            (X,),
            (View("v", "x", f32, (3,), (2,), 0), ret("v")),
            [4],
            "'x' is smaller than what is read of it",
        ),
        (
            (tensor("x", S0),),
            (Symbol("s0", SizeOf("x", "size", 0)), View("v", "x", f32, (S0,), (1,), 1), ret("v")),
            [4],
            "'v' reaches beyond its memory",
        ),
        (
            (SymbolInput("k"), X),
            (View("v", "x", f32, (2,), (1,), symbol("k")), ret("v")),
            [3, 4],
            "'v' reaches beyond its memory",
        ),
        (
            (tensor("x", S0),),
            (
                Symbol("s0", SizeOf("x", "size", 0)),
                alloc("a", S0),
                View("v", "a", f32, (S0 * 2,), (1,), 0),
                alloc("o", S0),
                launch("k_inc", "v", "o", n=0),
                ret("o"),
            ),
            [4],
            "'v' reaches beyond its memory",
        ),
        (
            (X,),
            (
                CallExtern("aten::neg", (Ref("x"),), (), ("r",)),
                View("v", "r", f32, (4,), (1,), 2),
                ret("v"),
            ),
            [4],
            "'r' is smaller than what is read of it",
        ),
        (
            (X,),
            (
                alloc("o", 2),
                CallExtern(
                    "aten::neg.out", (Ref("x"),), (("out", Ref("o")),), (), ("o",), may_keep=False
                ),
                ret("o"),
            ),
            [4],
            "operator aten::neg.out gave 'o' other sizes",
        ),
        (
            (tensor("x", 8, 8), tensor("y", 8, 8)),
            (CallExtern("aten::mm", (Ref("x"), Ref("y")), (), ("r",)), ret("r")),
            [(2, 8), (4, 8)],
            "shapes cannot be multiplied",
        ),
    ],
)
def test_what_only_a_call_knows_is_checked_at_the_call(
    inputs: tuple[Input, ...], body: tuple[Instr, ...], args: list[int | tuple[int, ...]], text: str
):
    prog = load(encode(program(inputs, *body)), {"cpu": library()})
    given = [
        a if isinstance(i, SymbolInput) else torch.randn(a)
        for i, a in zip(inputs, args, strict=True)
    ]
    with pytest.raises(RuntimeError, match=text):
        prog(*given)


def test_a_kernel_that_takes_something_else_is_refused():
    body = (alloc("o", 4), launch("k_inc", "x", "o", n=4), ret("o"))
    p = program((X,), *body)
    (kernel,) = (i for i in p.body if isinstance(i, DefineKernel))
    fewer = replace(body[1], args=("o",)) if isinstance(body[1], Launch) else None
    damaged = replace(p, body=(replace(kernel, n_args=1), body[0], fewer, body[2]))
    with pytest.raises(
        LoadError, match="'k_inc' takes 2 tensors and 1 sizes, the program declares 1 and 1"
    ):
        load(encode(damaged), {"cpu": library()})


def test_dtypes_that_plans_do_not_know_are_refused_by_the_writer():
    call = CallExtern("aten::to", (Ref("x"), Literal("dtype", "float8_e4m3fn")), (), ("y",))
    with pytest.raises(Unsupported, match="float8_e4m3fn"):
        encode(program((X,), call, Return((Ref("y"),))))


def test_wide_integers_are_refused_by_the_writer():
    with pytest.raises(ValueError, match="more than 64 bits"):
        encode(program((), Return((1 << 64,))))
