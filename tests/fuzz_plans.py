"""Runs damaged plans: `python -m tests.fuzz_plans COUNT [--sanitized] [--write]`.

Programs of every instruction, and what the compiler makes of small models, are damaged behind a
right checksum (`plan_damage.py`), loaded, and called if they load. Their kernels only read the
pointers and sizes that they declare. A run ends well with a result or one of a few errors; every
tensor that comes out of it, or that a Python callable is handed, must lie in its storage. Plans run
in a process of their own, which names the seed it is at, so that a crash or a hang is a finding
like others. `--sanitized` runs an executor built with AddressSanitizer and UBSan. What was found is
kept below build/fuzz, by executor and sources: a run that is cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait.ir.calls import all_programs
from plait.ir.dtypes import b1, f32, f64, i64
from plait.ir.expr import Size, compare, evaluate, smax, symbol
from plait.log import progress
from plait.runtime.load import LoadError, PlanError, Program, load
from plait.wrapper import instructions as ins
from plait.wrapper.instructions import ListOf, Literal, Ref, ValueOf, WrapperProgram
from plait.wrapper.native import encode
from tests import plan_damage
from tests.native_tools import alloc, extern, launch, program, ret, tensor
from tests.sanitized import ROOT, environment

REPORT = ROOT / "benchmarks" / "results" / "fuzz.md"
FORMAT = Literal("memory_format", "contiguous_format")
HEADING = "## Damaged plans"
HANG_S = 120
ROOM = 512 << 20  # bytes of address space that plans may ask for
REFUSED = (PlanError, LoadError)
FAILED = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    MemoryError,
    NotImplementedError,
    AttributeError,
)
"""What a call may raise: what the executor and torch's operators do. AttributeError: a dtype or a
layout that torch has not."""


@dataclass(frozen=True)
class Base:
    """An undamaged program that runs with args. kernels: name, pointers and sizes of each."""

    plan: bytes
    layout: plan_damage.Layout
    args: tuple[Any, ...]
    constants: tuple[torch.Tensor, ...]
    n_callables: int
    kernels: tuple[tuple[str, int, int], ...]

    def fresh_args(self) -> list[Any]:
        """Copies: programs change what they are given."""
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in self.args]


def base(p: WrapperProgram, args: Sequence[Any], constants: tuple[torch.Tensor, ...] = ()) -> Base:
    """The program as what is damaged."""
    plan = encode(p)
    kernels = tuple(
        (i.name, i.n_args, i.n_sizes)
        for nested in all_programs(p)
        for i in nested.body
        if isinstance(i, ins.DefineKernel)
    )
    return Base(plan, plan_damage.read(plan), tuple(args), constants, p.n_callables, kernels)


# ----------------------------------------------------------------------------------------- programs
def _everything() -> Base:
    """Constants and symbols, an arena, views and reuse, operators, Python, a kernel with sizes."""
    s0, n = symbol("s0"), symbol("n")
    inputs = (ins.SymbolInput("n"), tensor("x", s0, 4), tensor("y", 4, 4), ins.OpaqueInput("g"))
    p = program(
        inputs,
        ins.Symbol("s0", ins.SizeOf("x", "size", 0)),
        ins.AssertScalar(compare("le", s0, 100), "at most 100"),
        ins.AssertSizeStride("y", f32, (4, 4), (4, 1)),
        ins.AssertAlignment("y", 4),
        ins.Arena("m", 4096),
        ins.Place("p", "m", 64, f32, (4, 4), (4, 1)),
        ins.Place("q", "m", n // 1 * 64, f32, (4,), (1,)),
        ins.Fill("q", Literal("bool", "True")),
        ins.CallExtern(
            "aten::mm.out", (Ref("y"), Ref("y")), (("out", Ref("p")),), (), ("p",), may_keep=False
        ),
        ins.View("v", "p", f32, (2, 4), (4, 1), 8),
        alloc("o", s0, 4),
        launch("k_inc", "x", "o", n=4 * s0),
        ins.CheckFinite("v", "mm"),
        ins.Constant("c", 0),
        alloc("a", 16),
        launch("k_add", "v", "c", "a", n=8),
        ins.Reuse("b", "a", f32, (4, 4), (4, 1)),
        ins.Fill("b", Literal("float", "0x1p+0")),
        ins.CallPython(
            0,
            "hook",
            (Ref("x"), Ref("b"), ListOf((1, Literal("str", "s"), Literal("none")))),
            (("k", Literal("complex", "0x1p+0 0x1p+1")),),
            (None,),
        ),
        ins.Copy("y", "b", bump=False),
        ins.Free("b"),
        ins.BumpVersion("y"),
        ins.CallExtern("aten::topk", (Ref("o"), 2), (), ("t", None)),
        ins.Return((Ref("o"), Ref("t"), s0 * 2 - 1, Literal("none"), Literal("float", "0x1p+0"))),
        n_constants=1,
        n_callables=1,
    )
    return base(p, (5, torch.randn(3, 4), torch.randn(4, 4), None), (torch.zeros(8),))


def _programs() -> Base:
    """Subprograms: a branch, a scan, a call within a call. No loop, which damage makes endless."""
    n, x = symbol("n"), tensor("x", 4, 4)
    copied = ins.AssertSizeStride("x", f32, (4, 4), (4, 1), copies=True)
    branch = program(
        (x, ins.SymbolInput("n")),
        copied,
        ins.Constant("c", 0),
        alloc("y", 4, 4),
        launch("k_inc", "x", "y", n=n * 4),
        extern("aten::add.Tensor", Ref("y"), Ref("c"), outs=("z",)),
        ins.AssertSizeStride("z", f32, (4, 4), (4, 1)),
        ins.Return((Ref("z"), n + 1)),
        n_constants=1,
    )
    row = program(
        (x, tensor("v", 4)),
        copied,
        extern("aten::add.Tensor", Ref("x"), Ref("v"), outs=("s",)),
        extern("aten::sum", Ref("s"), outs=("o",)),
        ins.Return((Ref("s"), Ref("o"))),
    )
    inner = program((x,), copied, ins.CallPython(0, "hook", (Ref("x"),), (), ("a", None)),
                    ins.Return((Ref("a"),)), n_callables=1)  # fmt: skip
    outer = program(
        (x,), ins.CallPrograms("call", (0,), 0, 0, "inner", (Ref("x"),), ("a",)),
        ins.Return((Ref("a"), Literal("none"))), n_callables=1,
    )  # fmt: skip
    whole = program(
        (x, tensor("p", dtype=b1), ins.SymbolInput("n")),
        ins.CallPrograms("cond", (0, 1), 0, 0, "cond", (Ref("p"), Ref("x"), n), ("y", "m")),
        ins.AssertSizeStride("y", f32, (4, 4), (4, 1), copies=True),
        ins.CallPrograms("scan", (2,), 1, 1, "scan", (Ref("y"), Ref("x")), ("s", "o")),
        ins.AssertSizeStride("s", f32, (4, 4), (4, 1), copies=True),
        ins.CallPrograms("call", (3,), 0, 0, "call", (Ref("s"),), ("a", None)),
        ins.Return((Ref("s"), Ref("o"), Ref("a"), symbol("m"))),
        n_constants=1,
        n_callables=1,
    )
    nested = (branch, branch, row, replace(outer, programs=(inner,)))
    args = (torch.randn(4, 4), torch.tensor(True), 3)
    return base(replace(whole, programs=nested), args, (torch.zeros(4),))


def _views() -> Base:
    """Views of inputs, results, allocations and constants, at constant and varying places, seen and
    returned."""
    k, s0 = symbol("k"), symbol("s0")
    p = program(
        (tensor("x", s0, 8), tensor("w", 64, dtype=i64), ins.SymbolInput("k")),
        ins.Symbol("s0", ins.SizeOf("x", "size", 0)),
        ins.Symbol("s1", ins.SizeOf("x", "stride", 0)),
        ins.Symbol("s2", ins.SizeOf("x", "offset", 0)),
        ins.Symbol("s3", symbol("s0") * symbol("s1") + symbol("s2")),
        ins.View("row", "x", f32, (8,), (1,), k * 8),
        ins.View("first", "x", f32, (2, 3), (8, 2), 1),
        ins.View("part", "x", f32, (s0 - 1, 8), (8, 1), 8),
        ins.View("tail", "w", i64, (16,), (2,), 32),
        ins.View("whole", "w", i64, (32,), (1,), 16, relative=False),
        alloc("o", s0, 8),
        launch("k_add", "part", "first", "o", n=s0 * 8),
        ins.View("low", "o", f32, (s0, 4), (8, 1), 4),
        alloc("fixed", 4, 8),
        launch("k_inc", "row", "fixed", n=8),
        ins.View("inner", "fixed", f32, (2, 8), (8, 1), 8),
        extern("aten::neg", Ref("inner"), outs=("r",)),
        ins.View("rv", "r", f32, (8,), (1,), 8),
        ins.Constant("c", 1),
        ins.View("cv", "c", f32, (3,), (2,), 1),
        ins.CallPython(
            0, "look", (Ref("row"), Ref("rv"), Ref("cv"), Ref("tail")), (), ("given", "count")
        ),
        ins.AssertScalar(compare("lt", k, symbol("s0")), "k"),
        ins.Return(
            (
                *map(Ref, ("row", "first", "part", "whole", "low", "inner", "rv", "given")),
                symbol("count"),
            )
        ),
        n_constants=2,
        n_callables=1,
    )
    constants = (torch.zeros(4), torch.randn(8))
    return base(p, (torch.randn(5, 8), torch.arange(64), 2), constants)


def _products() -> Base:
    """Products on bare pointers, with given and with made results, and by the other roads."""
    m = symbol("m")
    p = program(
        (tensor("x", m, 6), tensor("w", 6, 5), tensor("b", 5), tensor("d", 3, 4, 4, dtype=f64)),
        ins.Symbol("m", ins.SizeOf("x", "size", 0)),
        ins.Arena("a", m * 5 * 4 + 1024),
        ins.Place("p", "a", 1024, f32, (m, 5), (5, 1)),
        extern("aten::mm", Ref("x"), Ref("w"), outs=("xw",)),
        ins.CallExtern(
            "aten::mm.out", (Ref("x"), Ref("w")), (("out", Ref("p")),), (), ("p",), may_keep=False
        ),
        ins.CallExtern(
            "aten::addmm",
            (Ref("b"), Ref("x"), Ref("w")),
            (("alpha", Literal("float", "0x1p+1")),),
            ("z",),
        ),
        alloc("o", m, 5),
        ins.CallExtern(
            "aten::addmm.out",
            (Ref("b"), Ref("x"), Ref("w")),
            (("out", Ref("o")),),
            (),
            ("o",),
            may_keep=False,
        ),
        ins.View("wt", "w", f32, (5, 6), (1, 5), 0),
        ins.CallExtern("aten::mm", (Ref("p"), Ref("wt")), (), ("back",), may_keep=False),
        alloc("e", 3, 4, 4, dtype=f64),
        ins.CallExtern(
            "aten::bmm.out", (Ref("d"), Ref("d")), (("out", Ref("e")),), (), ("e",), may_keep=False
        ),
        extern("aten::baddbmm", Ref("e"), Ref("d"), Ref("d"), outs=("f",)),
        extern("aten::linear", Ref("x"), Ref("wt"), Ref("b"), outs=("l",)),
        ret("xw", "z", "o", "back", "e", "f", "l"),
    )
    return base(
        p,
        (
            torch.randn(7, 6),
            torch.randn(6, 5),
            torch.randn(5),
            torch.randn(3, 4, 4, dtype=torch.float64),
        ),
    )


def _operators() -> Base:
    """Operands of every kind, results of every kind, numbers that operators and kernels give."""
    n = symbol("n")
    p = program(
        (tensor("x", 6, n), tensor("i", 4, dtype=i64), ins.OpaqueInput("g"), ins.SymbolInput("k")),
        ins.Symbol("n", ins.SizeOf("x", "size", 1)),
        ins.Partition(False, "nothing to record"),
        extern(
            "aten::index.Tensor", Ref("x"), ListOf((Ref("i"), Literal("none"))), outs=("picked",)
        ),
        extern("aten::split.Tensor", Ref("x"), 2, 0, outs=("p0", "p1", "p2")),
        extern("aten::cat", ListOf((Ref("p0"), Ref("p2"))), 1, outs=("joined",)),
        extern("aten::permute", Ref("x"), ListOf((1, 0)), outs=("turned",)),
        extern("aten::as_strided", Ref("x"), ListOf((2, n)), ListOf((n, 1)), n, outs=("strided",)),
        extern("aten::_to_copy", Ref("x"), dtype=Literal("dtype", "f64"), outs=("wide",)),
        extern(
            "aten::full",
            ListOf((2, n)),
            Literal("float", "0x1.8p+0"),
            dtype=Literal("dtype", "f64"),
            device=Literal("device", "cpu"),
            layout=Literal("layout", "strided"),
            outs=("full",),
        ),
        extern("aten::contiguous", Ref("turned"), memory_format=FORMAT, outs=("c",)),
        extern("aten::nonzero", Ref("x"), outs=("nz",)),
        ins.Symbol("u", ins.SizeOf("nz", "size", 0)),
        ins.AssertScalar(compare("le", symbol("u"), n * 6), "as many as there are"),
        alloc("sized", smax(symbol("u"), 1), 2),
        ins.Fill("sized", symbol("u")),
        extern("aten::sum", Ref("i"), outs=("total",)),
        ins.Symbol("t", ins.ItemOf("total")),
        alloc("flag", 1, dtype=f64),
        ins.Fill("flag", Literal("float", "0x1p-1")),
        ins.CallExtern("aten::add_.Tensor", (Ref("sized"), 1), (), (None,)),
        extern("aten::embedding", Ref("x"), Ref("i"), outs=("e",)),
        extern("aten::_local_scalar_dense", Ref("total"), outs=("item",)),
        ins.CallPython(
            0, "two", (Ref("joined"), Literal("dtype", "f32"), Ref("g")), (), ("y0", None)
        ),
        ins.CallPython(1, "none", (Ref("sized"), ListOf((ListOf((n, 2)),))), (("axis", 1),), ()),
        ins.Return(
            (
                Ref("picked"),
                Ref("p1"),
                Ref("strided"),
                Ref("wide"),
                Ref("full"),
                Ref("c"),
                Ref("sized"),
                Ref("e"),
                ValueOf("flag"),
                symbol("item") + symbol("t") + symbol("k"),
                Literal("bool", "True"),
                Ref("y0"),
                Ref("g"),
            )
        ),
        n_callables=2,
    )
    return base(p, (torch.randn(6, 5), torch.tensor([0, 3, 5, 1]), None, 9))


def _compiled() -> Iterator[Base]:
    """What the compiler makes of small models: inference and training, with fixed and with dynamic
    sizes."""
    from plait.wrapper.program import CompileRecord, observers

    made: list[CompileRecord] = []
    mlp = torch.nn.Sequential(
        torch.nn.Linear(48, 40), torch.nn.GELU(), torch.nn.LayerNorm(40), torch.nn.Dropout(0.1)
    )
    conv = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    )
    attention = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    table = torch.nn.Embedding(20, 8)
    token = observers.set((made.append,))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(
        False
    )  # ATen's attention divides by sizes and heads of 0
    try:
        for module, x, dynamic in (
            (mlp, torch.randn(24, 48), True),
            (conv, torch.randn(2, 3, 12, 12), False),
            (attention, torch.randn(2, 5, 16), True),
        ):
            torch._dynamo.reset()
            if dynamic:
                torch._dynamo.mark_dynamic(x, 0)
            with sdpa_kernel(SDPBackend.MATH):
                torch.compile(module, backend="plait")(x).sum().backward()
                with torch.no_grad():
                    torch.compile(module.eval(), backend="plait")(x)
        with torch.no_grad():
            torch.compile(lambda i: table(i).cumsum(0).sort().values, backend="plait")(
                torch.ones(4, 3).long()
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        observers.reset(token)
    for record in made:
        yield base(record.wrapper, _arguments(record.wrapper))


def _arguments(p: WrapperProgram) -> list[Any]:
    """Arguments of the sizes that the program's inputs have where every symbol is 24."""
    values: dict[str, int] = {}

    def at(size: Size) -> int:
        return evaluate(size, _Sizes(values))

    out: list[Any] = []
    for i in p.inputs:
        match i:
            case ins.TensorInput():
                dtype = getattr(
                    torch,
                    {"f32": "float32", "i64": "int64", "b1": "bool", "u8": "uint8"}[i.dtype.name],
                )
                x = torch.rand(tuple(map(at, i.shape))).to(dtype)
                out.append(
                    torch.empty_strided(x.shape, tuple(map(at, i.strides)), dtype=dtype).copy_(x)
                )
            case ins.SymbolInput():
                out.append(24)
            case ins.OpaqueInput():
                out.append(None)
    return out


class _Sizes(dict[str, int]):
    def __missing__(self, name: str) -> int:
        return 24


@dataclass(frozen=True)
class Corpus:
    """Programs to damage, each of which runs as it is, and a library of kernels for them."""

    bases: list[Base]
    library: str


def corpus(folder: Path) -> Corpus:
    """All programs; the library goes into the folder."""
    found = [_everything(), _programs(), _views(), _products(), _operators(), *_compiled()]
    missing = {*plan_damage.INSTRUCTIONS, *plan_damage.TABLES} - {
        w.part for b in found for w in b.layout.meaning
    }
    assert not missing, f"no program has {missing}"
    made = Corpus(found, _null_library(sorted({k for b in found for k in b.kernels}), folder))
    for b in found:
        bind(b, b.plan, made.library)(*b.fresh_args())
    return made


def _null_library(kernels: Sequence[tuple[str, int, int]], folder: Path) -> str:
    """Kernels that read the pointers and sizes that they declare, and nothing else."""
    body = (
        "uint64_t a = 0; for (int k = 0; k < {}; ++k) a += (uint64_t)b[k]; for (int k = 0; k < "
        "{}; ++k) a += s[k];"
    )
    lines = ["#include <stdint.h>", "volatile uint64_t seen;"]
    for name, n_args, n_sizes in kernels:
        lines.append(f'extern "C" const int32_t {name}_takes[2] = {{{n_args}, {n_sizes}}};')
        lines.append(
            f'extern "C" int64_t {name}(int64_t, int64_t, void* const* b, const int64_t* s) {{'
        )
        lines.append(f"{body.format(n_args, n_sizes)} seen = a; return 0; }}")
    source, target = folder / "null.cpp", folder / "null.so"
    source.write_text("\n".join(lines))
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", str(target), str(source)], check=True, timeout=60
    )
    return str(target)


# ------------------------------------------------------------------------------------------ running
class Escaped(AssertionError):
    """A tensor reaches beyond its storage."""


def look(x: Any) -> None:
    """Reads all of a tensor, which must lie in its storage."""
    if isinstance(x, (list, tuple)):
        for item in x:
            look(item)
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.numel() == 0:
        return
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    if x.storage_offset() < 0 or (last + 1) * x.itemsize > x.untyped_storage().nbytes():
        raise Escaped(f"sizes {tuple(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}")
    if x.numel() < 1 << 20:
        x.clone()


def _python(*args: Any, **kwargs: Any) -> Any:
    look(args)
    return torch.ones(3), 4


def bind(b: Base, plan: bytes, library: str) -> Program:
    """The program of these bytes in the place of the base's."""
    return load(plan, {"cpu": library}, b.constants, [_python] * b.n_callables)


def run_one(b: Base, seed: int, library: str) -> tuple[list[str], str]:
    """The parts of the plan that were damaged, and what became of it."""
    rng = random.Random(seed)
    plan, parts = plan_damage.damage(b.plan, b.layout, rng)
    try:
        prog = bind(b, plan, library)
    except REFUSED:
        return parts, "refused"
    outcome = "failed"
    for call in (prog, lambda *args: prog.boxed(list(args)), prog):
        args = b.fresh_args()
        try:
            out = call(*args)
        except FAILED:
            continue
        look(out)
        look(args)
        outcome = "ran"
    return parts, outcome


@dataclass
class Tally:
    """seed: the next one. counts: by part of the plan and outcome. findings: by seed, what
    happened."""

    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        if path.exists():
            data = json.loads(path.read_text())
            self.seed, self.counts, self.findings = (
                data["seed"],
                Counter(data["counts"]),
                data["findings"],
            )

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(vars(self)))
        beside.replace(path)


def work(made: Corpus, first: int, last: int, say: Callable[[str], object]) -> None:
    """Runs the seeds [first, last); says "at SEED" before each and what became of it after."""
    if (
        "LD_PRELOAD" not in os.environ
    ):  # the sanitizer reserves address space, and has a limit of its own
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for seed in range(first, last):
        say(f"at {seed}")
        try:
            parts, outcome = run_one(made.bases[seed % len(made.bases)], seed, made.library)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            say(f"bad {type(error).__name__}: {error}".replace("\n", " ")[:300])
        else:
            say(f"ok {outcome} {','.join(sorted(set(parts)))}")


def fuzz(
    count: int, sanitized: bool, state: Path | None = None, limit_s: float = float("inf")
) -> Tally:
    """Runs seeds up to count, going on from what `state` keeps, until limit_s have passed."""
    tally = Tally()
    if state is not None:
        tally.read(state)
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="plait_fuzz_") as folder:
        programs = Path(folder) / "programs"
        programs.write_bytes(pickle.dumps(corpus(Path(folder))))
        with progress("plans", count - tally.seed, prints=True) as one_more:
            while tally.seed < count and time.monotonic() < end:
                _follow(tally, programs, count, sanitized, state, end, one_more)
    if state is not None:
        tally.write(state)
    return tally


def _follow(
    tally: Tally, programs: Path, count: int, sanitized: bool, state: Path | None, end: float,
    one_more: Callable[[], None],
) -> None:  # fmt: skip
    """One process, to the end of the seeds or of itself."""
    command = [
        sys.executable,
        "-m",
        "tests.sanitized",
        "tests.fuzz_plans",
        "--work",
        str(tally.seed),
        str(count),
        str(programs),
    ]
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(sanitized),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert worker.stdout is not None
        alive = [time.monotonic()]
        watch = threading.Thread(target=_stop_hanging, args=(worker, alive), daemon=True)
        watch.start()
        at = None
        for line in worker.stdout:
            alive[0] = time.monotonic()
            kind, _, rest = line.rstrip("\n").partition(" ")
            if kind == "at":
                at = int(rest)
                continue
            _note(tally, at, kind, rest)
            one_more()
            at = None
            if state is not None and tally.seed % 1000 == 0:
                tally.write(state)
            if time.monotonic() > end:
                worker.kill()
                worker.wait()
                return
        worker.wait()
        errors.seek(0)
        words = errors.read()
    if at is None and worker.returncode != 0:
        raise RuntimeError(f"the process that runs plans ended:\n{words[-3000:]}")
    if at is not None:
        _note(tally, at, "bad", f"ended by {worker.returncode}: {_told(words)}")
        one_more()


def _stop_hanging(worker: subprocess.Popen[str], alive: list[float]) -> None:
    while worker.poll() is None:
        time.sleep(1)
        if time.monotonic() - alive[0] > HANG_S:
            worker.kill()


def _note(tally: Tally, seed: int | None, kind: str, rest: str) -> None:
    assert seed is not None
    tally.seed = seed + 1
    if kind == "bad":
        tally.findings[str(seed)] = rest
        return
    outcome, _, parts = rest.partition(" ")
    tally.counts[outcome] += 1
    for part in parts.split(","):
        tally.counts[f"{part} {outcome}"] += 1


def _told(words: str) -> str:
    """The lines of a sanitizer's or Python's report that say what happened."""
    lines = [
        line
        for line in words.splitlines()
        if "ERROR" in line or "runtime error" in line or "Error" in line
    ]
    return " | ".join(lines or words.splitlines()[-3:])[:500]


def kept_at(sanitized: bool) -> Path:
    """Where the state of these sources is kept."""
    digest = hashlib.sha256()
    sources = [p for p in sorted((ROOT / "native").rglob("*")) if p.suffix in (".cpp", ".h")]
    for path in (*sources, ROOT / "tests" / "fuzz_plans.py", ROOT / "tests" / "plan_damage.py"):
        digest.update(path.read_bytes())
    name = "sanitized" if sanitized else "plain"
    return ROOT / "build" / "fuzz" / f"plans-{name}-{digest.hexdigest()[:16]}.json"


# ------------------------------------------------------------------------------------------- report
def section(tally: Tally, sanitized: bool) -> str:
    """The section of the report."""
    under = "AddressSanitizer and UBSan" if sanitized else "no sanitizer"
    c = tally.counts
    lines = [
        HEADING,
        "",
        f"`python -m tests.fuzz_plans {tally.seed}{' --sanitized' if sanitized else ''} --write`, "
        f"seeds 0 to {tally.seed - 1}, under {under}: {len(tally.findings)} crashes, hangs or "
        "tensors beyond their storage.",
        f"{c['refused']} plans were refused when they were loaded, {c['failed']} raised an error "
        "when they were",
        f"called, {c['ran']} ran (each twice from arguments and once boxed).",
        "",
        "| damaged part of the plan | refused | failed | ran |",
        "|---|---|---|---|",
    ]
    for part in (*plan_damage.TABLES, *plan_damage.INSTRUCTIONS, "body", "bytes"):
        lines.append(
            f"| {part} | "
            + " | ".join(str(c[f"{part} {o}"]) for o in ("refused", "failed", "ran"))
            + " |"
        )
    return "\n".join(lines) + "\n"


def write_section(text: str) -> None:
    """Puts the section in its place in the report, which other fuzzers write too."""
    old = REPORT.read_text() if REPORT.exists() else "# Fuzzing\n"
    before, _, after = old.partition(HEADING)
    rest = after.partition("\n## ")[2]
    REPORT.write_text(before.rstrip("\n") + "\n\n" + text + (f"\n## {rest}" if rest else ""))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--sanitized", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--work", nargs=3)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    if given.work:
        first, last, programs = given.work
        made = pickle.loads(Path(programs).read_bytes())
        work(made, int(first), int(last), lambda line: print(line, flush=True))
        return 0
    tally = fuzz(given.count, given.sanitized, kept_at(given.sanitized), given.seconds)
    if given.write:
        write_section(section(tally, given.sanitized))
    print(section(tally, given.sanitized))
    for seed, what in tally.findings.items():
        print(seed, what)
    return bool(tally.findings)


if __name__ == "__main__":
    from tests import fuzz_plans  # what is pickled belongs to the module by its name

    sys.exit(fuzz_plans.main())
