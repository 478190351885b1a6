"""Plan bytes: damaged ones are refused with a clear error and never crash; equal programs give equal bytes."""

from __future__ import annotations

import random
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

from plait.errors import Unsupported
from plait.ir.dtypes import f32, i64
from plait.ir.sizes import compare, floordiv, symbol
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
    Fill,
    Free,
    Input,
    Instr,
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
from tests.native_tools import launch, library, program, tensor

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
        Place("q", "m", floordiv(n, 1) * 64, f32, (4,), (1,)),
        CallExtern("aten::mm.out", (Ref("y"), Ref("y")), (("out", Ref("p")),), (), ("p",), may_keep=False),
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
            new = rng.choice((rng.choice(interesting), old + rng.choice((-1, 1)), rng.randrange(64)))
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


def test_damaged_programs_without_kernels_never_crash_when_called():
    """Without kernels nothing reads a bare pointer: whatever loads may also be called."""
    s0 = symbol("s0")
    p = program(
        (tensor("x", s0, 4), SymbolInput("n")),
        Symbol("s0", SizeOf("x", "size", 0)),
        Arena("m", 1024),
        Place("p", "m", 64, f32, (4, 4), (4, 1)),
        Fill("p", 3),
        Alloc("o", f32, (s0, 4), (4, 1)),
        Copy("o", "x", bump=False),
        CallExtern("aten::sum", (Ref("o"),), (), ("t",)),
        View("v", "o", f32, (2,), (1,), 2),
        Return((Ref("t"), Ref("v"), s0 + symbol("n"))),
    )
    x = torch.randn(3, 4)
    called = 0
    for damaged in corruptions(encode(p), 3000, seed=3):
        try:
            prog = load(damaged, {})
        except (PlanError, LoadError):
            continue
        try:
            prog(x, 1)
            called += 1
        except (RuntimeError, TypeError, MemoryError):
            continue
    assert called > 50


def test_a_hundred_thousand_damaged_plans_under_a_sanitizer(tmp_path: Path):
    """The reader and the verifier as a program of their own, on plans of every instruction and of real graphs."""
    core, program = ROOT / "native" / "core", tmp_path / "native_plans"
    sources = [ROOT / "tests" / "native_plans.cpp", core / "plan.cpp", core / "verify.cpp"]
    command = ["g++", "-std=c++20", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    subprocess.run([*command, "-I", str(ROOT / "native"), "-o", str(program), *map(str, sources)], check=True)
    files = []
    for k, p in enumerate((rich_program(), *real_programs())):
        files.append(tmp_path / f"{k}.plan")
        files[-1].write_bytes(encode(p))
    done = subprocess.run([program, "100000", *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 100 < int(done.stdout.split()[0]) < 50_000, done.stdout


def real_programs() -> list[WrapperProgram]:
    """What the compiler makes of a small model: inference, both halves of training, dynamic sizes."""
    made: list[CompileRecord] = []
    model = torch.nn.Sequential(torch.nn.Linear(48, 40), torch.nn.GELU(), torch.nn.LayerNorm(40), torch.nn.Dropout(0.1))
    token = observers.set((made.append,))
    try:
        torch.compile(model, backend="plait", dynamic=True)(torch.randn(24, 48)).sum().backward()
        with torch.no_grad():
            torch.compile(model, backend="plait")(torch.randn(24, 48))
    finally:
        observers.reset(token)
    return [r.wrapper for r in made]


X = TensorInput("x", f32, (4,), (1,))


@pytest.mark.parametrize(
    "inputs, body, text",
    [
        ((X,), (Return((Ref("x"),)), Return(())), "Return is not the last"),
        ((X,), (Free("x"), Return((Ref("x"),))), "'x' is used after it was freed"),
        ((X,), (Free("x"), Free("x"), Return(())), "'x' is used after it was freed"),
        ((SymbolInput("n"), SymbolInput("n")), (Return(()),), "symbol 'n' is defined twice"),
        ((), (Return((symbol("n"),)),), "before it is defined"),
        ((X,), (Arena("m", 64), Place("p", "m", 4, f32, (16,), (1,)), Return(())), "'p' reaches beyond its memory"),
        ((X,), (Arena("m", 64), Place("p", "m", 2, f32, (4,), (1,)), Return(())), "'p' has a wrong offset"),
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
        ((X,), (Reuse("b", "x", f32, (4,), (1,)), Return(())), "'x' was not allocated by this program"),
        ((X,), (Alloc("a", f32, (-4,), (1,)), Return(())), "a size is negative"),
        ((X,), (Alloc("a", f32, (1 << 40, 1 << 40), (1 << 40, 1)), Return(())), "too large"),
        ((X,), (Return((Ref("x"), ListOf(()))),), "a list is returned"),
        ((X,), (Return((ValueOf("x"),)),), "'x' is no float and no bool"),
        ((X,), (Fill("x", ValueOf("x")), Return(())), "a value is no operand of a call"),
    ],
)
def test_verifier(inputs: tuple[Input, ...], body: tuple[Instr, ...], text: str):
    with pytest.raises(PlanError, match=text):
        load(encode(program(inputs, *body)), {})


def test_dtypes_that_plans_do_not_know_are_refused_by_the_writer():
    call = CallExtern("aten::to", (Ref("x"), Literal("dtype", "float8_e4m3fn")), (), ("y",))
    with pytest.raises(Unsupported, match="float8_e4m3fn"):
        encode(program((X,), call, Return((Ref("y"),))))


def test_wide_integers_are_refused_by_the_writer():
    with pytest.raises(ValueError, match="more than 64 bits"):
        encode(program((), Return((1 << 64,))))
