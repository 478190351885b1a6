"""Triton kernels from C++ (triton_launch/src): specialization against Triton's own, launches
against a driver that writes down what it is told, threads, packs and the process that compiles.

What needs Triton runs in a process that has it on its path: `python -m
triton_launch.tests.test_jit NAME FOLDER`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import include_paths

from plait.errors import UserError
from plait.runtime.cubin import Cubin, pack
from plait.runtime.triton_worker import load_module
from plait.tools.pack import triton_pack
from tests import warm
from triton_launch.functions import describe, module_of
from triton_launch.specialization import Callee, DType, read_specialization, write_item, write_value

HERE = Path(__file__).parent
LAUNCH = HERE.parent
ROOT = LAUNCH.parent
TRITON = Path(sys.prefix) / "triton"
SRC, CORE = LAUNCH / "src", ROOT / "native" / "core"
INCLUDES = [f"-I{folder / 'include'}" for folder in (LAUNCH, ROOT / "plait")]
FLAGS = [
    "g++", "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
    "-pthread", "-I", str(ROOT / "native"), *INCLUDES,
]  # fmt: skip
LAUNCHER = "".join(f'#include "{file}"\n' for file in sorted(SRC.glob("*.cpp")))
"""All of src as one unit, whose headers are read once: what "-" names in SOURCES."""
DRIVER = (CORE / "cuda.cpp", CORE / "cubins.cpp", *sorted((CORE / "drivers").glob("*.cpp")))
SOURCES = (*DRIVER, "-x", "c++", "-")

LIBRARY = ROOT / "plait" / "lib" / "libplait_core.so"

SCALARS = ("fp16", "bf16", "fp32", "fp64")
INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
TORCH = {"float*": "float32", "int64*": "int64", "bool*": "bool", "bf16*": "bfloat16"}
DLPACK = {
    (2, 16): "float16",
    (2, 64): "float64",
    (0, 8): "int8",
    (1, 32): "uint32",
    (12, 8): "float8_e5m2",
    (10, 8): "float8_e4m3fn",
    (4, 16): "bfloat16",
    (6, 8): "bool",
}
DTYPES = (*("u1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"), *SCALARS)


def build(*args: str | Path, unit: str = LAUNCHER) -> None:
    """unit: what "-" names."""
    subprocess.run([*FLAGS, *map(str, args)], check=True, timeout=300, input=unit, text=True)


class Memory:
    """A tensor as Triton's specializer sees one."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


def some_int(rng: random.Random, bits: int, signed: bool) -> int:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    edges = [
        0,
        1,
        1,
        16,
        32,
        -16,
        2,
        low,
        high,
        high - 15,
        1 << 31,
        (1 << 31) - 1,
        -(1 << 31),
        -(1 << 31) - 1,
        1 << 63,
    ]
    near = rng.choice([*edges, rng.randint(low, high), 16 * rng.randint(low // 16, high // 16)])
    return min(max(near, low), high)


def some_address(rng: random.Random) -> int:
    return rng.choice([0, 16, 4096, 8, 4, 1 << 40, (1 << 40) + 8, 2 * rng.randint(0, 1 << 40)])


def argument(
    rng: random.Random, annotation: str, depth: int = 0
) -> tuple[str, Callable[[random.Random], Any]]:
    """What C++ is told of one argument's type, and a maker of (C++'s text, Python's object)."""
    import torch
    import triton.language as tl

    def integer(name: str) -> Any:
        def make(r: random.Random) -> Any:
            value = some_int(r, int(name[1:]), name[0] == "i")
            return f"{name} {value}", value

        return make

    def pointer(name: str) -> Any:
        def make(r: random.Random) -> Any:
            a = some_address(r)
            return f"{name} {a}", Memory(getattr(torch, TORCH[name]), a)

        return make

    def dlpack(code: int, bits: int) -> Any:
        def make(r: random.Random) -> Any:
            a = some_address(r)
            return f"dlpack {a} {code} {bits}", Memory(getattr(torch, DLPACK[code, bits]), a)

        return make

    def real(name: str) -> Any:
        def make(r: random.Random) -> Any:
            value = r.choice([0.0, 1.0, -0.0, 0.1, 1e300, 2.0**-149, float("inf"), r.gauss(0, 1)])
            if name == "f32":
                value = struct.unpack("<f", struct.pack("<f", min(value, 3e38)))[0]
            return f"{name} {value.hex()}", value

        return make

    def boolean(r: random.Random) -> Any:
        value = r.random() < 0.5
        return f"bool {int(value)}", value

    def maybe(r: random.Random) -> Any:
        value = None if r.random() < 0.3 else some_int(r, 64, True)
        return f"maybe {'none' if value is None else value}", value

    def text(r: random.Random) -> Any:
        value = r.choice(["", "ieee", "a,b(c)='%d'", "größer", "a|b;c"])
        return f"str {value or '-'}", value

    def dtype(r: random.Random) -> Any:
        k = r.randrange(len(DTYPES))
        return f"dtype {k + 1}", DType(DTYPES[k])

    def descriptor(r: random.Random) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        k, rank = r.randrange(len(DTYPES)), r.randrange(1, 6)
        block = [2 ** r.randrange(5) for _ in range(rank)]
        names = {
            "fp16": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
            "fp64": "float64",
            "u1": "bool",
        }
        dtype = getattr(
            torch, names.get(DTYPES[k]) or f"{'u' if DTYPES[k][0] == 'u' else ''}int{DTYPES[k][1:]}"
        )
        value = TensorDescriptor(Memory(dtype, 4096), [64] * rank, [64] * (rank - 1) + [1], block)
        return f"desc {k + 1} {'x'.join(map(str, block))}", value

    none = lambda r: ("none 0", None)
    function = lambda r: ("callee twice", twice())
    integers = [integer(n) for n in INTEGERS]
    reals = [real("f32"), real("f64")]
    pointers = [*map(pointer, TORCH), *(dlpack(*k) for k in DLPACK)]

    def nest(makers: Sequence[Any]) -> Any:
        def make(r: random.Random) -> Any:
            made = [m(r) for m in makers]
            return f"( {' '.join(m[0] for m in made)} )", tuple(m[1] for m in made)

        return make

    def constant(maker: Any) -> Any:
        def make(r: random.Random) -> Any:
            said, value = maker(r)
            return f"const {said}", tl.constexpr(value)

        return make

    if annotation == "constexpr":
        kinds = [*integers, *reals, boolean, maybe, text, dtype, none, function]
        if depth < 2:
            kinds.append(
                nest([argument(rng, annotation, depth + 1)[1] for _ in range(rng.randrange(3))])
            )
    elif annotation.lstrip("*k") in SCALARS and annotation[0] != "*":
        kinds = [*reals, *integers]
    elif annotation == "u1":
        kinds = [boolean]
    elif annotation.startswith("*"):
        kinds = [*pointers, none]
    elif annotation:
        kinds = integers
    else:
        kinds = [*integers, *reals, boolean, maybe, none, function, *pointers]
        kinds.append(constant(rng.choice([*integers, *reals, boolean])))
        if depth == 0:
            kinds.append(descriptor)
        if depth < 2:
            kinds.append(nest([argument(rng, "", depth + 1)[1] for _ in range(rng.randrange(4))]))
    return "", rng.choice(kinds)


@lru_cache
def twice() -> Any:
    """A @triton.jit function."""
    with tempfile.TemporaryDirectory() as name:
        return load_module("helpers", KERNELS, Path(name)).twice


def of_triton(kind: Any, attribute: Any, value: Any) -> str:
    """One item of Triton's specialization as we write it."""
    if isinstance(kind, tuple):
        return f"({','.join(of_triton(*x) for x in zip(kind, attribute, value, strict=True))})"
    if kind == "constexpr":
        value = getattr(value, "value", value)
        return f"={write_value(Callee('twice') if value is twice() else value)}"
    return kind.replace(", ", ",") + (":D" if attribute == "D" else "")


def specializes_as_triton(folder: Path) -> None:
    """Random signatures and arguments. Equal keys must have equal specializations, too."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    library = ctypes.CDLL(str(folder / "libspecialize.so"))
    library.plait_specialize.restype = ctypes.c_char_p
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    rng = random.Random(5)
    annotations = ["constexpr", "*fp32", "*ki8", "u1", *SCALARS, *INTEGERS]
    written = {
        "constexpr": "tl.constexpr",
        "u1": "'bool'",
        "fp32": "tl.float32",
        "i64": "tl.int64",
        "i32": "int",
    }
    defaults = {
        "constexpr": ["1024", "'a b'", "None", "(1, 2.5)", "tl.float32"],
        "": ["1", "16", "2.5", "None", "(1, 3)"],
    }
    text, makers = ["import triton", "import triton.language as tl"], []
    for k in range(100):
        parameters: list[str] = []
        chosen: list[tuple[Any, bool]] = []
        with_default = False
        for p in range(rng.randrange(1, 14)):
            annotation = rng.choice(annotations) if rng.random() < 0.5 else ""
            with_default = rng.random() < 0.1 or (with_default and annotation in defaults)
            with_default = with_default and annotation in defaults
            if parameters and "=" in parameters[-1] and not with_default:
                break
            note = f": {written.get(annotation, repr(annotation))}" if annotation else ""
            if not annotation and rng.random() < 0.1:
                note = ": tl.const"
            default = f" = {rng.choice(defaults[annotation])}" if with_default else ""
            parameters.append(f"p{p}{note}{default}")
            chosen.append((argument(rng, annotation)[1], with_default))
        n = len(parameters)
        some = lambda n=n: [rng.choice([i, f"p{i}"]) for i in range(n) if rng.random() < 0.15]
        text += [
            f"@triton.jit(do_not_specialize={some()}, do_not_specialize_on_alignment={some()})",
            f"def f{k}({', '.join(parameters)}):", "    pass",
        ]  # fmt: skip
        makers.append(chosen)
    module = load_module("functions", "\n".join(text) + "\n", folder)

    n_cases = n_equal = 0
    for k, chosen in enumerate(makers):
        fn = getattr(module, f"f{k}")
        binder = create_function_from_signature(fn.signature, fn.params, backend)
        signature = describe(fn).encode()
        seen: dict[tuple[str, str], str] = {}
        for _ in range(30):
            n_positional = rng.randrange(len(chosen) + 1)
            said, args, keywords = [], [], {}
            for i, (make, optional) in enumerate(chosen):
                if optional and i >= n_positional and rng.random() < 0.5:
                    continue
                words, value = make(rng)
                if i < n_positional:
                    said.append(words)
                    args.append(value)
                else:
                    first, *more = words.split(" ", 1)
                    said.append(
                        f"const p{i}= {' '.join(more)}" if first == "const" else f"p{i}= {words}"
                    )
                    keywords[f"p{i}"] = value
            bound, specialization, _ = binder(*args, **keywords)
            want = ",".join(
                of_triton(kind, attribute, bound[name])
                for name, (kind, attribute) in zip(bound, specialization, strict=True)
            )
            answer = library.plait_specialize(signature, "\n".join(said).encode()).decode()
            got, _, key = answer.partition("\n")
            assert got == want, f"{fn.signature}\n{said}\nwant {want}\ngot  {got}"
            assert ",".join(map(write_item, read_specialization(got))) == got
            types = " ".join(w.split()[0] + w.rpartition("=")[0] for w in said)
            n_equal += (types, key) in seen
            assert seen.setdefault((types, key), got) == got, f"{fn.signature}\n{said}\n{key}"
            n_cases += 1
    assert n_cases == 3000 and n_equal > 100, (n_cases, n_equal)


KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr = 1024):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def all_kinds(
    p, t, flag, kind: tl.constexpr, mode: tl.constexpr, pair: tl.constexpr, e: tl.float64,
    h: tl.float16,
):
    tl.static_assert(kind == tl.float16 and mode == "ieee" and pair[1] == 2 and t[2] is None)
    if flag:
        tl.store(p, (t[0] + t[1] + e).to(tl.int8))
    tl.store(p + 1, h.to(kind))


@triton.jit
def twice(v):
    return 2 * v


@triton.jit
def applies(x, fn: tl.constexpr):
    tl.store(x, fn(tl.load(x)))


@triton.jit
def wrong(x):
    tl.store(x, tl.no_such_function(x))


def not_jit(x):
    pass
"""

DECORATED = """\
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def configs(*warps):
    return [
        triton.Config({"BLOCK": b}, num_warps=w, num_stages=2) for b in (16, 256) for w in warps
    ]


@triton.autotune(configs(2, 8), key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) if EVEN else tl.load(x + i, i < n), i < n)


@triton.heuristics({
    "EVEN": lambda args: args["n"] > 100
    and args["n"] % 16 == 0
    and args["out"].dtype.itemsize == 4
})
@triton.autotune(configs(4), key=["EVEN"])
@triton.jit
def outer(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x) + EVEN)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.heuristics({
    "num_warps": lambda args: max(1, min(8, args["BLOCK"] // 32)),
    "MODE": lambda args: "a b",
})
@triton.jit
def warps(x, out, n, BLOCK: tl.constexpr, MODE: tl.constexpr, other=2.5):
    tl.store(out + tl.arange(0, BLOCK), tl.load(x) + other)


def few(configs, named, **keywords):
    assert "x" in named and "grid" in keywords
    n = named["n"] if "n" in named else keywords["n"]
    return [c for c in configs if c.kwargs["BLOCK"] <= n] or configs[:1]


@triton.autotune(configs(1, 8), key=["n"], prune_configs_by={"early_config_prune": few})
@triton.jit
def pruned(x, out, n, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x))


def model(n, out, BLOCK, num_warps, **keywords):
    return abs(n * out.element_size() - BLOCK) + num_warps


@triton.autotune(configs(1, 8), key=["n"], prune_configs_by={"perf_model": model, "top_k": 2})
@triton.jit
def modelled(x, out, n, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x))


@triton.autotune(configs(4), key=["n", "x"][:1], reset_to_zero=["out"], restore_value=["x"])
@triton.jit
def kept(x, out, n, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x))


@triton.autotune([triton.Config({}, pre_hook=lambda named: named["x"].fill_(1))], key=[])
@triton.jit
def hooked(x, n):
    pass


@triton.autotune(
    [triton.Config({"BLOCK": b}, pre_hook=lambda named: named["x"].zero_()) for b in (8, 16)],
    key=["n"],
)
@triton.jit
def clears(x, n, BLOCK: tl.constexpr):
    tl.atomic_add(x, BLOCK)


@triton.autotune(configs(1, 8), key=["n"], post_hook=lambda named, exception: None)
@triton.jit
def hooked_when_timed(x, n, BLOCK: tl.constexpr):
    pass


def set_block(named):
    if isinstance(named["d"], TensorDescriptor):
        named["d"].block_shape = [named["BLOCK"], 4]


@triton.autotune([triton.Config({"BLOCK": b}, pre_hook=set_block) for b in (8, 16)], key=["n"])
@triton.jit
def blocks(d, n, BLOCK: tl.constexpr):
    d.store([n, 0], d.load([0, 0]) + tl.zeros([BLOCK, 4], tl.float32))


@triton.heuristics({"BLOCK": lambda args: args["x"].shape[0]})
@triton.jit
def reads_shape(x, n, BLOCK: tl.constexpr):
    pass


@triton.autotune([triton.Config({"BLOCK": b}) for b in (1, 2, 4)], key=["n"])
@triton.jit
def refused(x, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 2)
    tl.store(x, BLOCK)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (1, 2)], key=["n"])
@triton.jit
def all_refused(x, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 2)
"""

ASKED = """\
none  [] sm_90
one *fp32:D [] sm_90
one *fp32 [] sm_90
one *fp8e5:D [] sm_90
one *bf16 [] sm_90
one i32 [] sm_90
one =1 [] sm_90
one i64:D [] sm_90
one u64:D [] sm_90
one fp32 [] sm_90
one u1 [] sm_90
one =None [] sm_90
one (*i32:D,(fp32,i32),(=1,u1)) [] sm_90
one =True [] sm_90
one =7 [] sm_90
one ='a%20b' [] sm_90
four i32,*u1:D,i32,fp32 [] sm_90
typed fp16,bf16,fp64,i8,*fp32 [] sm_90
typed fp16,bf16,fp64,i8,*fp32:D [] sm_90
typed fp16,bf16,fp64,i8:D,*fp32:D [] sm_90
defaults i32,i32:D,fp64,=1024,(i32,(=1,fp32)),=None [] sm_90
defaults i32,=1,fp64,=64,(i32,(=1,fp32)),=None [] sm_90
constants fp32,='ieee',=fp16,=(1,None,'x'),=0.5,=64 [] sm_90
constants fp32,='tf32',=fp16,=(1,None,'x'),=0.5,=64 [] sm_90
constants fp32,='tf32',=i8,=(1,None,'x'),=1.5,=32 [] sm_90
error: kernel nowhere: there is none [nowhere] -1
error: kernel one: argument 0 (x) is missing [one] 0
error: kernel one: it takes 1 arguments [one] -1
error: kernel one: there is no parameter y [one] -1
error: kernel one: two values for argument 0 (x) [one] 0
error: kernel one: argument 0 (x): a string, dtype or function is passed only to a tl.constexpr \
parameter [one] 0
error: kernel typed: argument 0 (h): a pointer for a parameter annotated fp16 [typed] 0
typed fp16,bf16,fp64,i8:D,*fp32 [] sm_90
error: kernel typed: argument 3 (i): a value that is annotated i8 does not fit [typed] 3
error: kernel typed: argument 3 (i): a float for a parameter annotated i8
  specialization: fp16,bf16,fp64, [typed] 3
error: kernel constants: argument 1 (s): a pointer cannot be a constant
  specialization: =1, [constants] 1
error: kernel opaque: argument 0 (x): its default ? cannot be passed to a kernel [opaque] 0
error: kernel one: argument 0 (x): Triton has no such dtype [one] 0
error: kernel one: argument 0 (x): a tensor that is not on a GPU [one] 0
error: kernel one: argument 0 (x): a tensor that is not on a GPU [one] 0
error: kernel typed: argument 4 (p): a tensor that is not on a GPU [typed] 4
error: kernel constants: argument 2 (d): Triton has no such dtype [constants] 2
constants fp32,=None,=fp16,=2,=0.5,=64 [] sm_90
"""
WORDS = {
    "one": "10, 8, 20, 42, 42, fffffffd, ffff, , , 10000000000, 8000000000000000, b2d05e00, "
    "3f800000, 40000000, 1, , 5, , 10 40000000 7 0, , , , 0",
    "four": "2 20 a 40400000, 3 30 f 40900000",
    "typed": "3c00 3f80 3fb999999999999a fb 0, 7bff 4040 401c000000000000 1 30, "
    "1 c000 3ff0000000000000 1 34, 3c00 3a83 0 10 40",
    "defaults": "2 10 3fe0000000000000 3 40200000, 2 3fe0000000000000 3 40200000",
    "constants": "40200000, 40200000, 40200000, 40200000, 40200000",
}
SAID = """\
k i32:D [] sm_90
k i32:D [a='b%20c';enable_fp_fusion=False;launch_cooperative_grid=True;launch_pdl=True;maxnreg=64;\
maxnreg_b=3;num_stages=2;num_warps=8] sm_90
k i32:D [num_warps=8] sm_90
error: kernel k: two values for option num_warps [k] -1
error: kernel k: k: a grid of 2147483648 programs is more than the device takes
  specialization: i32:D [k] -1
error: kernel k: k: a grid of 1 x 65536 x 1 programs is more than the device takes
  specialization: i32:D [k] -1
error: kernel k: k: a grid of 9223372036854775807 programs is more than the device takes
  specialization: i32:D [k] -1
error: kernel k: k: out of luck (719)
  specialization: i32:D [k] -1
k fp32 [] sm_90
error: kernel k: k: out of luck (719)
  specialization: fp32 [k] -1
big i32:D [] sm_90
scratch i32:D [] sm_90
allocate 200 by 128 on 7
allocate 20 by 1 on 7
free 0x800
free 0x800
error: kernel scratch: no 200 bytes of scratch memory; set_scratch() gives it some
  specialization: i32:D [scratch] -1
enter k k i32:D warps 4 grid 3 on 9
exit 1
enter k k i32:D warps 4 grid 4 on 8
exit 2
error: kernel late: it is not loaded yet and the stream is being captured: launch it once before
  specialization: i32 [late] -1
late i32 [] sm_90
error: kernel late: it is not loaded yet and the stream is being captured: launch it once before
  specialization: i32:D [late] -1
wrong i32 [] sm_90
error: kernel wrong: parameter 0 of the compiled kernel has 8 bytes, its type 4
  specialization: i32 [wrong] -1
"""
BOUND_SAID = """\
k *fp32:D,(i32,*fp32:D),i32,fp16,=2 [] sm_90
k *i8:D,(i32,*fp32:D),i32,fp16,=2 [] sm_90
error: kernel k: parameter 0 of the compiled kernel has 12 bytes, its type 8
  specialization: *i8:D,(i32,*fp32:D),i32,fp16,=2 [k] -1
k *i32,(i32,*fp32:D),i32,fp16,=2 [] sm_90
k *i32,(i32,*fp32:D),i32:D,fp16,=2 [] sm_90
k *i32,(i32,*fp32:D),i32:D,fp16,=16 [] sm_90
k *i32,(i32,*fp32:D),i32:D,fp16,=4 [] sm_90
error: kernel k: a launch with an empty grid is no node of a graph [k] -1
big i32:D [] sm_90
scratch i32:D [] sm_90
error: kernel scratch: a kernel with scratch memory, or a pre_hook that zeroes, \
is no node of its own: capture its launch [scratch] -1
p *fp32,*fp32:D,i32,i32,=64 [] sm_90
p *fp32:D,*fp32:D,i32,i32,=64 [] sm_90
p *fp32,*fp32:D,i32:D,i32,=64 [] sm_90
p *fp32:D,*fp32:D,i32:D,i32,=64 [] sm_90
p *fp32,*fp32:D,=1,i32,=64 [] sm_90
p *fp32:D,*fp32:D,=1,i32,=64 [] sm_90
6 kernels
13 hits 8 misses 6 compiled 6 loaded: p *fp32,*fp32:D,i32,i32,=64, \
before it *fp32,*fp32:D,=1,i32,=64
error: kernel p: they would be 729 kernels, 256 at most are prepared [p] -1
asked h heuristics0 n=5;*;@types=()
h i32,=5 [] sm_90
error: kernel h: a decorator decides by n: it cannot vary [h] -1
"""
BOUND_DONE = """\
retain 0
launch k grid 5 1 1 block 128 1 1 shared 0 stream 1 extra 0 first 16 10 5 20 7 3800 0 0
unload k
launch k grid 5 1 1 block 128 1 1 shared 0 stream 2 extra 0 first 64 40 5 20 7 4200 0 0
launch k grid 5 1 1 block 128 1 1 shared 0 stream 3 extra 0 first 64 40 6 30 7 4200 0 0
launch k grid 5 1 1 block 128 1 1 shared 0 stream 4 extra 0 first 8 8 6 30 7 4200 0 0
launch k grid 12 1 1 block 128 1 1 shared 0 stream 6 extra 0 first 8 8 6 30 10 4200 0 0
add to 9 behind 1 5: big grid 6 1 1 block 128 first 32
node 77 has attribute 2 1
node 77 has attribute 4 2
node 77 has attribute 5 1
node 77 of 11: big grid 6 1 1 block 128 1 1 shared 0 extra 0 kernel 0 context 0 first 48
launch p grid 1 1 1 block 128 1 1 shared 0 stream 0 extra 0 first 4 4 10 1 0 0
launch p grid 1 1 1 block 128 1 1 shared 0 stream 0 extra 0 first 4 4 10 2 10 0 0
launch p grid 1 1 1 block 128 1 1 shared 0 stream 17 extra 0 first 4 4 10 3 10 0 0
launch h grid 1 1 1 block 128 1 1 shared 0 stream 0 extra 0 first 5 5 0 0
"""
DECORATORS_ASKED = """\
error: kernel tuned: it is not tuned yet and the stream is being captured: launch it once before
  key: n=128;@types=(fp32);@gpu='Fake%20GPU' [tuned] -1
tuned *fp32:D,i32:D,i32,=64 [] sm_90
tuned *fp32:D,i32:D,i32,=16 [num_warps=8] sm_90
tuned *fp32:D,i32:D,i32,=32 [maxnreg=64;num_warps=8] sm_90
tuned *fp32:D,i32:D,i32,=8 [num_warps=3] sm_90
tuned *fp32:D,i32:D,i32,=128 [num_warps=64] sm_90
error: kernel tuned: argument 3 (B) is set by a decorator [tuned] 3
error: kernel tuned: option num_warps is set by a decorator [tuned] -1
error: kernel tuned: a grid asks for x, which is no integer
  specialization: *fp32:D,i32:D,i32,=16 [tuned] -1
error: kernel tuned: a grid asks for y, which is no parameter
  specialization: *fp32:D,i32:D,i32,=16 [tuned] -1
asked heuristic heuristics0 x=*fp32;n=16;*;@types=(fp32)
asked heuristic heuristics1 x=*fp32;n=16;*;B=8;num_warps=8;@types=(fp32)
heuristic *fp32:D,i32:D,=8,=True [num_warps=8] sm_90
asked heuristic heuristics0 x=*fp32;n=32;*;@types=(fp32)
asked heuristic heuristics0 x=*fp32;n=1;*;@types=(fp32)
asked heuristic heuristics1 x=*fp32;n=1;*;B=1;num_warps=1;@types=(fp32)
heuristic *fp32:D,=1,=1,=True [num_warps=1] sm_90
asked heuristic heuristics0 x=*fp64;n=1;*;@types=(fp64)
heuristic *fp64:D,=1,=1,=True [num_warps=1] sm_90
heuristic *i32:D,i32:D,=8,=True [num_warps=8] sm_90
heuristic (=None,*fp32:D),i32:D,=8,=True [num_warps=8] sm_90
asked both pruned0 x=*fp32;n=3;*;@types=(fp32);@gpu='Fake%20GPU'
asked both heuristics1 x=*fp32;n=3;*;B=2;num_warps=1;@types=(fp32);@gpu='Fake%20GPU'
asked both heuristics1 x=*fp32;n=3;*;B=4;num_warps=8;@types=(fp32);@gpu='Fake%20GPU'
error: kernel both: @triton.autotune resets or restores x, whose length is not known: \
pass a dense tensor or plait::triton::Pointer{data, dtype, nbytes} [both] -1
both *fp32:D,i32,=2,=None [num_warps=1] sm_90
both *fp32:D,i32,=4,=0.5 [num_warps=8] sm_90
asked outer heuristics0 x=*fp32;*;@types=(fp32)
error: kernel outer: @triton.autotune resets or restores x, whose length is not known: \
pass a dense tensor or plait::triton::Pointer{data, dtype, nbytes} [outer] -1
outer *fp32:D,=1,=(1,fp16) [num_warps=2] sm_90
outer *fp32:D,=2,=(1,fp16) [num_warps=8] sm_90
single *fp32:D,=7 [num_warps=2] sm_90
error: kernel tuned: no configuration is known for this key: \
a pack's table may have 'tuned @tuned0 n=65;@types=(fp32);@gpu='Fake%20GPU' -> B=64;num_warps=4'
  key: n=65;@types=(fp32);@gpu='Fake%20GPU' [tuned] -1
packed i32,=8 [] sm_90
error: kernel packed: no configuration is known for this key: \
a pack's table may have 'packed @tuned0 n=6;@types=();@gpu='Fake%20GPU' -> B=7'
  key: n=6;@types=();@gpu='Fake%20GPU' [packed] -1
asked heuristic heuristics0 x=*fp32;n=17;*;@types=(fp32)
error: kernel heuristic: a decorator's Python function must be asked and there is no Python: \
pack it with 'heuristic @heuristics0 x=*fp32;n=17;*;@types=(fp32)' [heuristic] -1
both @heuristics1 B=4 -> E=0.5
both @heuristics1 B=2;x=*fp32 -> E=None
both @pruned0 n=3;@types=(fp32);@gpu='Fake%20GPU' -> B=2;num_warps=1|B=4;num_warps=8
both @tuned0 n=3;gone=-;@types=(fp32);@gpu='Fake%20GPU' -> B=4;num_warps=8
both *fp32:D,i32,=4,=0.5 num_warps=8
heuristic @heuristics0 n=16 -> B=8;num_warps=8
heuristic @heuristics0 n=32 -> B=8;num_warps=8
heuristic @heuristics0 n=1;x=*fp32 -> B=1;num_warps=1
heuristic @heuristics0 n=1;x=*fp64 -> B=1;num_warps=1
heuristic @heuristics1 B=1;none=- -> E=True
heuristic @heuristics1 B=8;none=- -> E=True
heuristic (=None,*fp32:D),i32:D,=8,=True num_warps=8
heuristic *fp32:D,=1,=1,=True num_warps=1
heuristic *fp32:D,i32:D,=8,=True num_warps=8
heuristic *fp64:D,=1,=1,=True num_warps=1
heuristic *i32:D,i32:D,=8,=True num_warps=8
outer @heuristics0 x=*fp32 -> E=(1,fp16)
outer @tuned1 E=(1,fp16);@types=(fp32);@gpu='Fake%20GPU' -> B=2;num_warps=8
outer *fp32:D,=2,=(1,fp16) num_warps=8
packed @tuned0 n=5;@types=();@gpu='Fake%20GPU' -> B=8
packed i32,=8
single *fp32:D,=7 num_warps=2
tuned @tuned0 n=128;@types=(fp32);@gpu='Fake%20GPU' -> B=16;num_warps=8
tuned @tuned0 n=128;@types=(fp64);@gpu='Fake%20GPU' -> B=16;num_warps=8
tuned @tuned0 n=256;@types=(fp32);@gpu='Fake%20GPU' -> B=32;num_warps=8;maxnreg=64
tuned *fp32:D,i32:D,i32,=16 num_warps=8
tuned *fp32:D,i32:D,i32,=32 maxnreg=64;num_warps=8
tuned *fp32:D,i32:D,i32,=64
"""
DONE = """\
retain 0
launch k grid 7 5 3 block 128 1 1 shared 0 stream 0 extra 0 first 16 10 0 0
launch k grid 7 5 1 block 256 1 1 shared 0 stream 9 extra 0 first 16 10 0 0
launch k grid 2 1 1 block 128 1 1 shared 0 stream 9 extra 0 first 16 10 0 0
launch k grid 2 1 1 block 256 1 1 shared 0 stream 9 extra 0 first 16 10 0 0
launch k grid 1 1 1 block 128 1 1 shared 0 stream 13 extra 0 first 16 10 0 0
launch k grid 4 2 1 block 128 1 1 shared 0 stream 5 extra 0 first 32 20 0 0
launch k grid 4 2 1 block 128 1 1 shared 0 stream 0 extra 0 first 32 20 0 0
launch k grid 1 1 1 block 128 1 1 shared 0 stream 13 extra 0 first 1069547520 3fc00000 0 0
set big 9 100
set big 8 232448
set big 14 1
launch big grid 48 1 1 block 384 1 1 shared 100000 stream 0 extra 0 first 16 \
attribute 6 1 0 0 attribute 2 1 0 0 attribute 4 16 1 1 attribute 5 1 0 0 10 0 0
allocate 1200 on 6
allocate 120 on 6
launch scratch grid 6 2 1 block 128 1 1 shared 0 stream 6 extra 0 first 16 attribute 4 2 1 1 \
attribute 5 1 0 0 10 1000 2000
free 2000 on 6
free 1000 on 6
launch scratch grid 2 1 1 block 128 1 1 shared 0 stream 7 extra 0 first 16 attribute 4 2 1 1 \
attribute 5 1 0 0 10 800 800
launch k grid 3 1 1 block 128 1 1 shared 0 stream 9 extra 0 first 16 10 0 0
launch k grid 4 2 1 block 128 1 1 shared 0 stream 8 extra 0 first 32 20 0 0
launch k grid 4 2 1 block 128 1 1 shared 0 stream 8 extra 0 first 32 20 0 0
launch late grid 1 1 1 block 128 1 1 shared 0 stream 5 extra 0 first 2 2 0 0
launch late grid 1 1 1 block 128 1 1 shared 0 stream 17 extra 0 first 3 3 0 0
unload wrong
"""


def in_triton(name: str, folder: Path, *more: Path, fresh: bool = False) -> None:
    """fresh: in a process whose loader looks into the folder, and that has not imported torch."""
    path = os.pathsep.join((str(ROOT), str(TRITON)))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "triton")}
    env["LD_LIBRARY_PATH"] = str(folder)
    args = ["-m", "triton_launch.tests.test_jit", name, str(folder), *map(str, more)]
    if fresh:
        done = subprocess.run(
            [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
        )
    else:
        done = warm.run(*args, cwd=ROOT, env=env, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def run(folder: Path, *args: str | Path) -> tuple[str, list[str]]:
    """What the program says, and what the driver was told. A data race is an error."""
    log = folder / f"log-{args[0]}"
    log.unlink(missing_ok=True)
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_LOG": str(log),
        "FAKE_CUDA_WORDS": "1",
    }
    env["PLAIT_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [folder / "jit", *args], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "ThreadSanitizer" not in done.stderr, done.stdout + done.stderr
    return done.stdout, log.read_text(errors="replace").splitlines()


def test_files_of_kernels_replace_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path, modules = list(sys.path), dict(sys.modules)
    (tmp_path / "beside.py").write_text("x = 1\n")
    (tmp_path / "random.py").write_text("from beside import x\n")
    module = module_of(tmp_path / "random.py")
    assert (
        module.x == 1
        and sys.modules["random"] is random
        and module_of(tmp_path / "random.py") is module
    )
    assert sys.path == [*path, str(tmp_path)]
    package = tmp_path / "of_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("y = 2\n")
    (package / "first.py").write_text("from . import y\n")
    (package / "broken.py").write_text("raise ValueError('broken')\n")
    assert module_of(package / "first.py") is sys.modules["of_kernels.first"]
    with pytest.raises(ValueError, match="broken"):
        module_of(package / "broken.py")
    with pytest.raises(FileNotFoundError, match="no Python file"):
        module_of(tmp_path / "none.py")
    new = sys.modules.keys() - modules.keys()
    assert new == {"beside", "of_kernels", "of_kernels.first", module.__name__}
    for name in new:
        del sys.modules[name]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program and its driver."""
    folder = tmp_path_factory.mktemp("jit")
    build("-shared", "-fPIC", "-o", folder / "libcuda.so.1", ROOT / "tests" / "fake_cuda.cpp")
    build("-O0", "-fsanitize=thread", "-o", folder / "jit", HERE / "native_jit.cpp", *SOURCES)
    return folder


needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no Triton beside the environment")


@needs_triton
def test_specializes_as_triton(tmp_path: Path) -> None:
    rules = [SRC / f"{part}.cpp" for part in ("arguments", "signature", "specialize")]
    unit = "".join(f'#include "{file}"\n' for file in (HERE / "native_specialize.cpp", *rules))
    library = tmp_path / "libspecialize.so"
    build("-O0", "-shared", "-fPIC", "-o", library, "-x", "c++", "-", unit=unit)
    in_triton("specializes_as_triton", tmp_path)


def test_kinds_of_arguments(program: Path) -> None:
    said, done = run(program, "kinds")
    assert said == ASKED
    for kernel, words in WORDS.items():
        launched = [line.split() for line in done if line.startswith(f"launch {kernel} ")]
        got = [
            " ".join(line[line.index("first") + 2 : -2]) for line in launched
        ]  # the last two are scratch memory
        assert got == words.split(", "), kernel


def test_launches(program: Path) -> None:
    said, done = run(program, "launches")
    assert said == SAID
    assert done == DONE.splitlines()


def test_bound_launches_change(program: Path) -> None:
    said, done = run(program, "bound")
    assert said == BOUND_SAID
    assert done == BOUND_DONE.splitlines()


def test_each_context_has_its_handle(program: Path) -> None:
    said, done = run(program, "contexts")
    refused = "error: kernel k: another context is current than the one that it was bound in\n"
    assert said == "k i32:D [] sm_90\n" + 3 * f"{refused}  specialization: i32:D [k] -1\n"
    firsts = [line.split()[-3] for line in done if line.startswith("launch")]
    assert firsts == ["10", "20"] * 3 + ["30", "50", "50"]


def test_a_hit_allocates_nothing(program: Path) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": str(program)}
    done = subprocess.run(
        [program / "jit", "hits"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    cold, warm, _ = done.stdout.split(" allocations\n")
    assert int(cold) > 0 == int(warm)


def test_threads_compile_once(program: Path) -> None:
    said, done = run(program, "threads")
    assert said == (
        "dheuristics1 was asked 8 times\neheuristics1 was asked 8 times\n"
        "63 kernels, 14 keys tuned\n"
    )
    assert (
        sum(line.startswith("launch") and " stream 5 " in line for line in done) == 8 * 60 * 3 * 2
    )
    assert sum(line.startswith("launch") and " stream 6 " in line for line in done) > 8 * 60 * 2


def packs(folder: Path) -> None:
    """Kernels of a file from a process that compiles, and from a pack: real cubins, whose
    parameters the driver checks."""
    import plait.tools.pack

    (folder / "kernels.py").write_text(KERNELS)
    pointers = "*fp32:D,*fp32:D,*fp32:D"
    plait.tools.pack.main([
        str(folder / "kernels.py"), "-o", str(folder / "kernels.pack"), "--signatures",
        f"add_kernel {pointers}, i32, =1024 num_warps=4",
        f"add_kernel {pointers},i32:D,=512 num_warps = 8",
    ])  # fmt: skip
    assert "triton" not in sys.modules
    (python := folder / "a-python").write_text(
        f'#!/bin/sh\necho >> {folder}/started\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    said, done = run(folder, "real", python, folder / "kernels.py", folder / "kernels.pack")
    assert (
        folder / "started"
    ).read_text() == "\n\n"  # the program's, and that of the one that it forked
    launched = [line.split() for line in done if line.startswith("launch")]
    blocks = [(line[1], line[7], line[line.index("first") + 2 :]) for line in launched]
    three = ["10", "20", "30"]
    scratch = ["0", "0"]
    assert blocks == [
        ("add_kernel", "128", [*three, "64", *scratch]),
        ("add_kernel", "256", [*three, *scratch]),
        ("all_kinds", "128", ["10", "40000000", "5", "1", "3fe0000000000000", "4280", *scratch]),
        ("applies", "128", ["10", *scratch]),
        ("add_kernel", "128", [*three, "10", *scratch]),
        ("add_kernel", "128", [*three, "64", *scratch]),
        ("add_kernel", "256", [*three, "a0", *scratch]),
    ], blocks
    errors = said.split("error: ")[1:]
    starts = [
        "kernel applies: KeyError: 'thrice'",
        f"kernel nothing: AttributeError: {folder / 'kernels.py'} has no nothing",
        f"kernel not_jit: TypeError: not_jit of {folder}/kernels.py is no plain @triton.jit "
        "function: it is a function",
        "kernel wrong: triton.compiler.errors.CompilationError: ",
        "kernel add_kernel: ValueError: Triton has no option colour",
        "kernel add_kernel: FileNotFoundError: there is no Python file /nowhere.py",
        "kernel add_kernel: cannot run /nowhere/python: No such file or directory",
        "kernel add_kernel: the process that compiles kernels ended (/bin/false",
        f"kernel add_kernel: not in {folder}/kernels.pack for sm_90: "
        f"pack it with 'add_kernel {pointers},i32:D,=1024' and --arch 90\n",
        f"kernel other: it is not in {folder}/kernels.pack",
        f"kernel (all of a pack): {folder}/kernels.py is no kernel file of this version",
    ]
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(start), error
    assert (
        "no_such_function" in errors[3]
        and "specialization: *fp32:D" in errors[3]
        and "Traceback" in errors[3]
    )

    # Errors of packing say what was packed, and then what Python said.
    for signature, start in (
        (
            "add_kernel *fp32, =64 num_warps=2",
            "add_kernel *fp32,=64 num_warps=2 (sm_90): ValueError: add_kernel has 5",
        ),
        ("nothing i32", f"nothing: AttributeError: {folder / 'kernels.py'} has no nothing\n"),
    ):
        with pytest.raises(UserError) as error:
            triton_pack(folder / "no.pack", folder / "kernels.py", [signature])
        said = str(error.value)
        assert said.startswith(start) and "\nTraceback" in said and "try:" not in said, said

    # What was launched makes a pack.
    listed = folder / "kernels.pack.list"
    assert listed.read_text().splitlines() == [
        f"add_kernel {pointers},=1,=1024 num_warps=8", f"add_kernel {pointers},i32,=1024",
        "all_kinds *i8:D,(fp32,i32,=None),u1,=fp16,='ieee',=(1,2),fp64,fp16",
        "applies *fp32:D,=@twice",
    ]  # fmt: skip
    output = str(folder / "all.pack")
    plait.tools.pack.main([str(folder / "kernels.py"), "-o", output, "--signatures", f"@{listed}"])
    assert b"applies|*fp32:D,=@twice||90" in Path(output).read_bytes()


@needs_triton
def test_packs(program: Path) -> None:
    in_triton("packs", program, fresh=True)


def of_python(folder: Path) -> list[str]:
    """What Triton's own decorators choose on a device that takes as long as the fake one."""
    import torch
    import triton
    from triton.runtime.autotuner import Autotuner

    module = load_module("decorated", DECORATED, folder)
    ran: list[Any] = []

    def cost(call: Callable[[], None], quantiles: object) -> list[float]:
        call()
        meta = ran.pop()
        return [
            1 + abs(32 * meta["num_warps"] - 256) + 10 * abs(-(-meta["n"] // meta["BLOCK"]) - 8)
        ] * 3

    chosen = []
    for name in ("tuned", "outer", "warps", "pruned", "modelled", "kept"):
        layer = fn = getattr(module, name)
        while not isinstance(layer, triton.runtime.jit.JITFunction):
            if isinstance(layer, Autotuner):
                layer.do_bench = cost
            layer = layer.fn
        names = layer.arg_names
        layer.run = lambda *args, names=names, **keywords: ran.append(
            dict(zip(names, args, strict=False), **keywords)
        )
        for n in (1, 128, 1000, 2048, 128, 1):
            x, out = (
                torch.zeros(64),
                torch.zeros(64, dtype=torch.float16 if n == 128 else torch.float32),
            )
            fn[(1,)](x, out, n) if n == 128 else fn[(1,)](x, n=n, out=out)
            meta = ran.pop()
            grid = -(-n // meta["BLOCK"])
            values = [str(meta[p.name]) for p in layer.params if p.is_constexpr]
            chosen.append(f"{name} {' '.join(values)} {grid} {meta['num_warps']}")
        assert not ran
    return chosen


def decorators(folder: Path) -> None:
    """Decorators of a file as Triton's Python has them: found by a process, on disk and in a
    pack."""
    import plait.tools.pack

    file = folder / "decorated.py"
    file.write_text(DECORATED)
    want = of_python(folder)

    def got(said: str) -> list[str]:
        lines = []
        for line in said.split("\nerror: ")[0].splitlines():
            name, specialization, *more = line.split()
            constants = [
                item.value
                for item in read_specialization(specialization)
                if item.type == "constexpr"
            ]
            keep = constants[1:] if "=1," in specialization else constants  # n, where it is 1
            lines.append(" ".join([name, *map(str, keep), *more]))
        return lines

    os.environ["PLAIT_TRITON_RECORD"] = str(record := folder / "record")
    said, done = run(folder, "chosen", sys.executable, file, "-")
    del os.environ["PLAIT_TRITON_RECORD"]
    assert got(said) == want
    starts = [
        "kernel hooked: AttributeError: C++ tells a decorator's function the dtype of a tensor, "
        "not its fill_",
        "kernel hooked_when_timed: its @triton.autotune has a pre_hook or post_hook, Python "
        "functions that C++ cannot",
        "kernel reads_shape: AttributeError: C++ tells a decorator's function the dtype of a "
        "tensor, not its shape",
        "no error",
        "kernel clears: a pre_hook zeroes x, whose length is not known: pass a dense tensor or "
        "plait::triton::Pointer",
        "kernel clears: a tensor that a pre_hook zeroes cannot be set: bind again",
        "kernel clears: a kernel with scratch memory, or a pre_hook that zeroes, is no node of "
        "its own",
        "kernel all_refused: triton.compiler.errors.CompileTimeAssertionFailure: ",
    ]
    errors = re.split(r"(?:^|\n)(?:error: )?(?=kernel \w+: |no error)", said)[1:]
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(start), said
    assert said.endswith("\nblocks tensordesc<fp32[8,4]>,i32,=8 1 4\n")
    n_timed = sum(line.startswith("launch") for line in done)
    again, done = run(folder, "chosen", sys.executable, file, "-")
    assert got(again) == want
    assert sum(line.startswith("launch") for line in done) == len(want) + 4 < n_timed
    assert [line for line in done if line.startswith("fill 0 256 ")] == [
        "fill 0 256 on 5",
        "fill 0 256 on 6",
    ]

    listed = Path(f"{file}.list").read_text().splitlines()
    assert set(listed) < set(record.read_text().splitlines())
    output = str(folder / "decorated.pack")
    plait.tools.pack.main([str(file), "-o", output, "--signatures", f"@{record}"])
    said, done = run(folder, "chosen", "/bin/false", "/nowhere", output)
    assert got(said) == want and sum(line.startswith("launch") for line in done) == len(want)

    # With all configurations, a pack is enough to tune anew.
    shutil.rmtree(folder / "cache")
    undecided = [x for x in record.read_text().splitlines() if " @tuned" not in x]
    plait.tools.pack.main([str(file), "-o", output, "--all-configs", "--signatures", *undecided])
    said, done = run(folder, "chosen", "/bin/false", "/nowhere", output)
    assert got(said) == want and sum(line.startswith("launch") for line in done) > 2 * len(want)

    # What a pack lacks is asked for in words that make it.
    lines = [x for x in listed if "n=2048" not in x]
    table = folder / "table"
    table.write_text("\n".join(lines))
    kernels = [x for x in lines if " @" not in x]
    plait.tools.pack.main(
        [str(file), "-o", output, "--tune-table", str(table), "--signatures", *kernels]
    )
    missing = subprocess.run(
        [folder / "jit", "chosen", "/bin/false", "/nowhere", output], capture_output=True,
        text=True, env={**os.environ, "LD_LIBRARY_PATH": str(folder)}, timeout=60,
    )  # fmt: skip
    question = re.search(r"pack it with '(tuned @heuristics1 .*)'", missing.stderr)
    assert question is not None, missing.stderr
    plait.tools.pack.main([str(file), "-o", output, "--signatures", question[1]])
    assert b">heuristics1 n=2048;BLOCK=" in Path(output).read_bytes()


MEETING = """

import time
from pathlib import Path


def meeting(mine, other):
    def name_of(specialization):  # asked when it is compiled
        Path(__file__).with_name(mine).touch()
        end = time.monotonic() + 60
        while not Path(__file__).with_name(other).exists():
            assert time.monotonic() < end, "the other one is not compiled at the same time"
            time.sleep(0.01)
        return mine

    return name_of


@triton.jit(repr=meeting("meets_a", "meets_b"))
def meets_a(x):
    tl.store(x, 1)


@triton.jit(repr=meeting("meets_b", "meets_a"))
def meets_b(x):
    tl.store(x, 1)
"""


def python(folder: Path) -> None:
    """The Python of a program's own process compiles, whoever holds its lock; and processes compile
    at once."""
    (folder / "python").mkdir()
    (file := folder / "python" / "kernels.py").write_text(KERNELS + MEETING)
    library = Path(sysconfig.get_config_var("LIBDIR")) / sysconfig.get_config_var("INSTSONAME")
    os.environ["PYTHONHOME"] = sys.base_prefix
    said, done = run(folder, "python", library, file, sys.executable)
    errors = said.split("error: ")[1:]
    starts = [
        "kernel add_kernel: there is no Python in this process that compiles kernels",
        "kernel wrong: triton.compiler.errors.CompilationError: ",
        "kernel wrong: FileNotFoundError: there is no Python file /nowhere.py",
    ]
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(start), error
    assert "Traceback" in errors[1] and "no_such_function" in errors[1]
    assert sum(line.startswith("launch add_kernel") for line in done) == 5
    assert sum(line.startswith("launch meets") for line in done) == 2


LOADED = """
#include <plait/triton.h>
using namespace plait::triton;
extern "C" bool add(const char* file, long n) try {
  auto* p = reinterpret_cast<float*>(16);
  jit(file, "add_kernel", embedded())[{2}](p, p, p, n);
  return true;
} catch (const Error&) {
  return false;
}
"""


def loaded(folder: Path) -> None:
    """A library that a Python program loads; some of its threads keep Python's lock when they call
    it."""
    (file := folder / "kernels.py").write_text(KERNELS)
    (folder / "loaded.cpp").write_text(LOADED)
    (folder / "libcuda.so.1").symlink_to(Path(sys.argv[3]))
    build(
        "-shared",
        "-fPIC",
        "-o",
        folder / "loaded.so",
        folder / "loaded.cpp",
        LIBRARY,
        f"-Wl,-rpath,{LIBRARY.parent}",
    )
    keeping, giving = (kind(str(folder / "loaded.so")).add for kind in (ctypes.PyDLL, ctypes.CDLL))
    done: list[bool] = []

    def calls(add: Any) -> None:
        add.restype = ctypes.c_bool
        done.extend(add(str(file).encode(), n) for n in (1, 2, 16))

    threads = [
        threading.Thread(target=calls, args=(add,)) for add in (keeping, giving, keeping, giving)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 12


@needs_triton
@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="Python has no shared library"
)
def test_python_in_the_process(program: Path) -> None:
    in_triton("python", program)


@needs_triton
@pytest.mark.skipif(not LIBRARY.exists(), reason="libplait_core is not built")
def test_python_loads_a_library(program: Path, tmp_path: Path) -> None:
    in_triton("loaded", tmp_path, program / "libcuda.so.1", fresh=True)


DESCRIBED = """\
import triton
import triton.language as tl


@triton.jit
def copy(x, out, shapes):
    out.store([0] * len(out.shape), out.load([0] * len(out.shape)))
    tl.store(shapes + x.shape[0], x.load([0] * len(x.shape)).numel)
"""
DESCRIPTOR_ERRORS = (
    ["0 (x), a tensor descriptor: its base is not a multiple of 16"]
    + ["0 (x), a tensor descriptor: its strides are not multiples of 16 bytes"]
    + [
        "0 (x), a tensor descriptor: its last stride is not 1",
        "0 (x), a tensor descriptor: its shape is not positive",
    ]
    + ["0 (x): a descriptor's shape, strides and block shape have the same 1 to 5 dimensions"] * 4
    + ["0 (x), a tensor descriptor: only floating-point elements can be padded with nan"]
    + ["0 (x): a tensor descriptor in a tuple", "0 (x): a tensor descriptor cannot be a constant"]
)


def descriptors(folder: Path) -> None:
    """Tensor descriptors as Triton's launcher hands them to a kernel: maps, or fields on older
    GPUs."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import make_tensordesc_arg
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    (folder / "described.py").write_text(DESCRIBED)
    fn = load_module("described", DESCRIBED, folder).copy
    x = TensorDescriptor(Memory(torch.float16, 4112), [100, 64], [80, 1], [16, 32])
    out = TensorDescriptor(
        Memory(torch.float16, 8192), [7, 3, 128], [512, 128, 1], [1, 1, 64], "nan"
    )
    flat = TensorDescriptor(Memory(torch.float8_e5m2, 16), [1000], [1], [256])

    class Utils:
        """What encodes a map: it writes down what for."""

        maps: list[str]

        def fill_tma_descriptor(
            self,
            base: int,
            swizzle: int,
            size: int,
            kind: int,
            block: Any,
            shape: Any,
            strides: Any,
            nan: int,
        ) -> str:
            steps = [size * s for s in reversed(strides[:-1])]
            last = shape[0] * (steps[-1] if steps else size)
            sides = zip(reversed(shape), [*steps, last], reversed(block), strict=True)
            text = " ".join(f"({n} {s} {b} 1)" for n, s, b in sides)
            self.maps.append(f"type {kind} base {base:#x} swizzle {swizzle} fill {nan} 02 {text}")
            return f"{len(self.maps):x}"

    class Driver:
        utils = Utils()

    triton.runtime.driver.set_active(Driver())
    types = {id(x): ("fp16[16, 32]", "fp16[1, 1, 64]"), id(flat): ("fp8e5[256]", "fp8e5[256]")}
    for major in (8, 9):
        Utils.maps, want = [], []

        def launch(a: Any, b: Any, major: int = major, want: list[str] = want) -> None:
            signature = {
                n: f"tensordesc<{t}>" for n, t in zip(("x", "out"), types[id(a)], strict=True)
            }
            source = ASTSource(
                fn, {**signature, "shapes": "*i64"}, {}, {(2,): [["tt.divisibility", 16]]}
            )
            made = triton.compile(source, GPUTarget("cuda", 10 * major, 32), {"num_warps": 4})
            metas = made.metadata.tensordesc_meta or [None, None]
            words = [
                w for d, m in zip((a, b), metas, strict=True) for w in make_tensordesc_arg(d, m)
            ]
            hexed = [w if isinstance(w, str) else f"{getattr(w, 'address', w):x}" for w in words]
            want.append(" ".join([*hexed, "40"]))

        for pair in ((x, out), (x, out), (flat, flat)):
            launch(*pair)
        want.insert(1, want[1])  # what is bound is launched twice
        os.environ["FAKE_CUDA_CAPABILITY"] = str(major)
        said, done = run(folder, "descriptors", sys.executable, folder / "described.py")
        launched = [line.split() for line in done if line.startswith("launch")]
        assert [" ".join(line[line.index("first") + 2 : -2]) for line in launched] == want
        maps = [line.split(" ", 2)[2] for line in done if line.startswith("map")]
        good = [m for m in maps if m in Utils.maps]
        assert good[: len(Utils.maps)] == Utils.maps and (major == 9) == bool(good)
        assert (
            re.findall(r"error: kernel copy: argument (.*?)(?:, a block's.*| \[copy] 0)?\n", said)
            == DESCRIPTOR_ERRORS
        ), said


@needs_triton
def test_descriptors(program: Path) -> None:
    in_triton("descriptors", program)


@needs_triton
def test_decorators(program: Path) -> None:
    in_triton("decorators", program)


def test_what_decorators_are_asked(program: Path) -> None:
    said, done = run(program, "decorated")
    assert said == DECORATORS_ASKED
    assert sum(line.startswith("launch tuned") for line in done) == 43
    assert sum(line.startswith("fill 0 40 ") for line in done) == 9
    _, done = run(program, "decorated")  # another process times nothing again
    assert sum(line.startswith("launch tuned") for line in done) == 7
    shutil.rmtree(program / "cache")
    (program / "cache").touch()  # where nothing can be written, the process knows it alone
    try:
        said, done = run(program, "decorated")
    finally:
        (program / "cache").unlink()
    assert said == DECORATORS_ASKED and sum(line.startswith("launch tuned") for line in done) == 43


@pytest.mark.slow
def test_damaged_packs_under_a_sanitizer(tmp_path: Path) -> None:
    build("-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", ROOT / "tests" / "fake_cuda.cpp")
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-fno-sanitize=vptr")
    build(*flags, "-o", tmp_path / "jit", HERE / "native_jit.cpp", *SOURCES)
    images = {
        "plain|*fp32:D,i32|": "4 0 8 4", "tuned|*fp32:D,i32,=64|": "4 0 8 4",
        "tuned|*fp32:D,i32,=8|num_warps=8": "4 0 8 4",
        "described|tensordesc<fp32[8,8]>,tensordesc<fp32[8,8]>|": "12 0 128 4 4 8 8 128 4 4 8 8",
    }  # fmt: skip
    texts = {
        "plain": "num_warps=4\nx|||\nn|||",
        "described": "num_warps=4\nx|||\ny|||",
        "tuned": "num_warps=4\nx|||\nn|||\nBLOCK||c|\n#s\n@autotune|n|x||\n"
        "+BLOCK=64\n+BLOCK=8;num_warps=8\n"
        ">tuned0 n=7;@types=(fp32);@gpu='Fake%20GPU' -> BLOCK=64",
    }
    kernels = {}
    for key, sizes in images.items():
        name = key.partition("|")[0]
        cubin = Cubin(
            f"{name} {sizes}".encode(),
            name,
            8 if key.endswith("=8") else 4,
            1,
            0,
            (0, 1),
            (0, 1),
            False,
            False,
        )
        kernels[f"{key}|90"] = dataclasses.replace(
            cubin, descriptors="0,4,7,0,8x8;0,4,7,0,8x8" if "desc" in key else ""
        )
    (tmp_path / "whole.pack").write_bytes(pack(kernels, texts))
    said, done = run(tmp_path, "damaged", tmp_path / "whole.pack", tmp_path / "damaged.pack")
    assert said == "refused\n" and sum(line.startswith("launch described") for line in done) > 100


@pytest.mark.parametrize(
    "signature",
    [
        "add i33",
        "add i32,",
        "add (i32",
        "add =x",
        "add i32:16",
        "add *fp32:D i32",
        "add i32 warps=(1",
    ],
)
def test_unreadable_signatures(signature: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        triton_pack(tmp_path / "pack", "nowhere.py", [signature])


def test_torch_adapter(tmp_path: Path) -> None:
    source = tmp_path / "adapter.cpp"
    source.write_text(
        "#include <plait/triton_torch.h>\n"
        "void f(plait::triton::Kernel k, const at::Tensor& t, c10::Half* h, const "
        "std::optional<at::Tensor>& o) {\n  k[{1}](t, h, o, t.scalar_type());\n}\n"
    )
    folders = include_paths()
    build("-fsyntax-only", *(x for f in folders for x in ("-isystem", f)), source)


def test_the_page_compiles(tmp_path: Path) -> None:
    blocks = re.findall(r"```cpp\n(.*?)```", (LAUNCH / "README.md").read_text(), re.DOTALL)
    source = tmp_path / "page.cpp"
    source.write_text("".join(blocks))
    build("-fsyntax-only", "-Werror", source)


@pytest.mark.skipif(not LIBRARY.exists(), reason="libplait_core is not built")
def test_the_library(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(user LANGUAGES CXX)\n"
        "find_package(plait REQUIRED COMPONENTS core)\nadd_executable(user user.cpp)\n"
        "target_link_libraries(user PRIVATE plait::core)\n"
    )
    (tmp_path / "user.cpp").write_text(
        "#include <plait/triton.h>\n#include <cstdio>\n"
        'int main() {\n  try {\n    plait::triton::from_pack("nowhere", "k")[{1}](1);\n'
        '  } catch (const plait::triton::Error& e) {\n    std::printf("%s", e.what());\n  }\n}\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = [
        f"-DCMAKE_PREFIX_PATH={ROOT / 'plait' / 'lib' / 'cmake'}",
        "-DCMAKE_BUILD_TYPE=Debug",
    ]
    for command in (
        ["-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", *options],
        ["--build", tmp_path / "build"],
    ):
        subprocess.run(
            ["cmake", *command], env={**os.environ, "PATH": path}, check=True, timeout=120
        )
    done = subprocess.run([tmp_path / "build" / "user"], capture_output=True, text=True, check=True)
    assert done.stdout == "kernel (all of a pack): cannot read kernel file nowhere"


CASES = {
    f.__name__: f for f in (specializes_as_triton, packs, decorators, descriptors, python, loaded)
}

if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
