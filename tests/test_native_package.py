"""Packages below plait.package: what is written is what is loaded; damage of every kind gets an
error of its own."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait._native import Package, PackageError, checksum, write
from plait.errors import InputError, Unsupported
from plait.ir.expr import symbol
from plait.wrapper.instructions import Constant, SizeOf, Symbol, WrapperProgram
from plait.wrapper.native import encode
from plait.wrapper.package import Contents, PackageWriter, Variant
from tests.native_tools import (
    SOURCE,
    alloc,
    extern,
    launch,
    library,
    program,
    ret,
    tensor,
    write_package,
)
from tests.test_native_cuda import DRIVER

ROOT = Path(__file__).parent.parent
X = torch.randn(3, 4)
s0 = symbol("s0")


def variant(p: WrapperProgram, machine: str = "portable") -> Variant:
    return Variant(machine, encode(p), Path(library()).read_bytes())


def contents(**changes: object) -> Contents:
    """x + w + c of s0 x 4 elements."""
    p = program(
        (tensor("w", 3, 4), tensor("x", s0, 4)),
        Symbol("s0", SizeOf("x", "size", 0)),
        Constant("c", 0),
        alloc("t", s0, 4),
        alloc("o", s0, 4),
        launch("k_add", "x", "w", "t", n=4 * s0),
        launch("k_add", "t", "c", "o", n=4 * s0),
        ret("o"),
        n_constants=1,
    )
    made = Contents(
        name="f",
        inputs=(("bound", "w", None), ("tensor", 0, "f32", (("s0", 1, 3), 4), "contiguous", "cpu")),
        names=("x",),
        outputs=("sum",),
        results=(),
        single=True,
        weights={"w": torch.arange(12.0).view(3, 4)},
        constants=[torch.full((3, 4), 100.0)],
        variants=(variant(p),),
        python='{"a": 1}',
    )
    return replace(made, **changes)


def load(tmp_path: Path, c: Contents, **options: object) -> Package:
    write_package(tmp_path / "p.plait", c)
    return Package(str(tmp_path / "p.plait"), **options)


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    c = contents()
    p = load(tmp_path, c)
    x = torch.randn(2, 4)
    assert torch.equal(p.call(x), x + c.weights["w"][:2] + 100)
    assert torch.equal(p.call(x=x), p.call(x))
    assert (p.names, p.outputs, p.python, p.machine) == (("x",), ("sum",), '{"a": 1}', "portable")
    assert p.versions["torch"] == torch.__version__ and set(p.versions) == {
        "plait",
        "torch",
        "python",
    }
    for args, text in [
        ((torch.randn(4, 4),), r"input 'x': expected size at most 3 \(s0\) in dimension 0, got 4"),
        ((x.double(),), "input 'x': expected dtype float32, got float64"),
        ((3,), "input 'x': expected a tensor, got int"),
        ((), "input 'x' is missing"),
    ]:
        with pytest.raises(InputError, match=text):
            p.call(*args)


def test_weights_are_private_and_swapped_in_place(tmp_path: Path) -> None:
    p, other = load(tmp_path, contents()), Package(tmp_path / "p.plait", verify_weights=False)
    before = (tmp_path / "p.plait").read_bytes()
    x = torch.zeros(3, 4)
    p.weights["w"].fill_(1)
    assert torch.equal(p.call(x), torch.full((3, 4), 101.0))
    assert torch.equal(other.call(x), torch.arange(12.0).view(3, 4) + 100)
    assert (tmp_path / "p.plait").read_bytes() == before
    with torch.inference_mode():
        third = Package(str(tmp_path / "p.plait"))
    third.weights["w"].zero_()
    assert torch.equal(third.call(x), torch.full((3, 4), 100.0))
    w = p.weights["w"]
    del p
    assert w.sum() == 12  # memory outlives the package


def test_packages_beside_each_other_have_their_own_kernels(tmp_path: Path) -> None:
    (tmp_path / "k.cpp").write_text(
        SOURCE.replace("in(b, 0)[i] + in(b, 1)[i]", "in(b, 0)[i] - in(b, 1)[i]")
    )
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-o", tmp_path / "k.so", tmp_path / "k.cpp"], check=True
    )
    less = replace(contents().variants[0], kernels=(tmp_path / "k.so").read_bytes())
    packages = [load(tmp_path, contents(variants=(v,))) for v in (contents().variants[0], less)]
    w = torch.arange(12.0).view(3, 4)
    assert [
        torch.equal(p.call(w), want)
        for p, want in zip(packages, (2 * w + 100, -100 + 0 * w), strict=True)
    ] == [True] * 2


def test_equal_contents_give_equal_bytes(tmp_path: Path) -> None:
    write_package(tmp_path / "a", contents())
    write_package(tmp_path / "b", contents())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {f.name for f in tmp_path.iterdir()} == {"a", "b"}


def test_weights_that_went_ahead(tmp_path: Path) -> None:
    """They are in place, or are written once more."""
    base = torch.arange(100.0)
    c = contents(weights={"w": base[:12].view(3, 4)}, constants=[base[20:32].view(3, 4)])
    write_package(tmp_path / "p", c)
    other = torch.randn(5000)
    for early in (
        None,
        c.weights,
        {"w": torch.ones(3, 4)},
        {"w": base[:32]},
        {**c.weights, "v": other},
        {"v": other},
    ):
        with PackageWriter(tmp_path / "q", early) as writer:
            writer.finish(c)
        assert (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()
    with pytest.raises(Unsupported, match="'v', a Tensor of layout"):
        PackageWriter(tmp_path / "q", {"v": torch.eye(3).to_sparse()})
    with pytest.raises(KeyError), PackageWriter(tmp_path / "q", {"v": torch.ones(3 << 20)}):
        raise KeyError
    assert {f.name for f in tmp_path.iterdir()} == {"p", "q"}


def test_weights_that_share_memory_share_it(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    weights = {
        "w": base[500:512].view(3, 4),
        "v": base[504:514].view(5, 2).t(),
        "e": torch.empty(0, 3),
    }
    weights |= {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "z": torch.tensor([1 + 2j]).conj(),
        "s": torch.tensor(7),
    }
    p = load(tmp_path, contents(weights=weights))
    for name, want in weights.items():
        got = p.weights[name]
        assert torch.equal(got, want) and got.stride() == want.stride() and got.dtype == want.dtype
    p.weights["w"].zero_()
    assert (
        torch.equal(p.weights["v"].t().flatten()[:8], torch.zeros(8))
        and p.weights["v"][1, 4] == 513
    )
    assert (tmp_path / "p.plait").stat().st_size < 64 << 10
    with pytest.raises(Unsupported, match="'w', a Tensor of layout"):
        write_package(tmp_path / "q", contents(weights={"w": torch.eye(3).to_sparse()}))


def test_variants(tmp_path: Path) -> None:
    one = contents().variants[0]
    c = contents(
        variants=(replace(one, machine="avx512+sm_90"), replace(one, machine="ptx_80"), one)
    )
    write_package(tmp_path / "p", c)
    assert (tmp_path / "p").read_bytes().count(one.plan) == 1
    assert Package(str(tmp_path / "p")).machine == "portable"
    for machine, text in [
        ("ptx_80", "there is no GPU here that torch can use"),
        ("avx", "nothing for the machine 'avx'; the package is for avx512.sm_90, ptx_80, portable"),
    ]:
        with pytest.raises(PackageError, match=text):
            Package(str(tmp_path / "p"), machine=machine)
    with pytest.raises(PackageError, match="this CPU lacks neon; the package is for neon"):
        load(tmp_path, contents(variants=(replace(one, machine="neon"),)))
    with pytest.raises(PackageError, match="it was made for the CPU and is to run on cuda"):
        load(tmp_path, contents(), device="cuda")


def test_conditions_on_sizes(tmp_path: Path) -> None:
    even = ("x.shape[0] % 2 == 0", "size 0 0", "const 2", "mod", "const 0", "eq")
    p = load(tmp_path, contents(checks=(even,)))
    assert p.call(torch.zeros(2, 4)).shape == (2, 4)
    with pytest.raises(
        InputError, match=r"break a condition of the program, x.shape\[0\] % 2 == 0: x \[3, 4\]"
    ):
        p.call(torch.zeros(3, 4))


def test_conditions_on_strides(tmp_path: Path) -> None:
    x = torch.zeros(16)[2:14].view(3, 4)
    for fact, found in [("stride 0 0", 4), ("stride 0 1", 1), ("offset 0", 2), ("size 0 1", 4)]:
        p = load(tmp_path, contents(checks=(("c", fact, f"const {found}", "eq"),)))
        assert p.call(x).shape == x.shape
    checks = (("c", "stride 0 0", "offset 0", "mul", "stride 0 0", "lt"),)
    text = (
        r"strides break a condition of the program, c: "
        r"x \[3, 4\], x.stride\(0\) = 4, x.storage_offset\(\) = 2$"
    )
    with pytest.raises(InputError, match=text):
        load(tmp_path, contents(checks=checks)).call(x)


@pytest.mark.parametrize(
    "fact, text",
    [
        ("stride 0 2", "dimension 2 is out of range"),
        ("size 0 -1", "dimension -1 is out of range"),
        ("offset 0 1", "dimension 1 is out of range"),
        ("stride 1 0", "a condition reads what is no input"),
        ("int 0", "a condition reads what is no input"),
    ],
)
def test_conditions_on_what_no_input_has(tmp_path: Path, fact: str, text: str) -> None:
    with pytest.raises(PackageError, match=f"damaged section 'manifest': {text}"):
        load(tmp_path, contents(checks=(("c", fact),)))


def test_what_is_missing_has_a_name(tmp_path: Path) -> None:
    c = contents()
    p = program(
        (tensor("w", 3, 4), tensor("x", s0, 4)), extern("nowhere::op", outs=("o",)), ret("o")
    )
    for changes, text in [
        (
            {"variants": (variant(p),), "constants": ()},
            "no operator nowhere::op: load the library that defines 'nowhere'",
        ),
        (
            {"variants": (replace(c.variants[0], plan=b"no plan"),)},
            "section 'plan/portable': damaged plan",
        ),
        (
            {"variants": (replace(c.variants[0], kernels=b"no library"),)},
            "cannot load kernel library",
        ),
        ({"variants": (replace(c.variants[0], kernels=None),)}, "no kernel library was given"),
        ({"constants": ()}, "the program wants 1 constants and got 0"),
        ({"outputs": ()}, "a single result has one name"),
    ]:
        with pytest.raises(PackageError, match=text):
            load(tmp_path, replace(c, **changes))
    with pytest.raises(PackageError, match="cannot be opened: No such file"):
        Package(str(tmp_path / "nothing"))


def with_version(package: bytes, name: str, version: str) -> bytes:
    """Another version of the same length in the manifest, with right checksums."""
    table = len(package) - 80 * struct.unpack_from("<I", package, 12)[0]
    entry = package.index(b"manifest\0", table)
    start, nbytes = struct.unpack_from("<2Q", package, entry + 48)
    old = package.index(name.encode(), start) + len(name) + 8
    data = bytearray(package)
    data[old : old + len(version)] = version.encode()
    struct.pack_into("<Q", data, entry + 64, checksum([data[start : start + nbytes]]))
    struct.pack_into("<Q", data, 24, checksum([data[:24] + data[table:]]))
    return bytes(data)


def test_another_torch_is_refused(tmp_path: Path) -> None:
    write_package(tmp_path / "p", contents())
    (tmp_path / "q").write_bytes(with_version((tmp_path / "p").read_bytes(), "torch", "1.99."))
    with pytest.raises(
        PackageError, match=r"wrong version: it was written with torch 1\.99\..*, this is torch 2"
    ):
        Package(str(tmp_path / "q"))


def test_damaged_weights_are_found_unless_told_otherwise(tmp_path: Path) -> None:
    write_package(tmp_path / "p", contents(weights={"w": torch.full((3, 4), 123.0)}))
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "q").write_bytes(data.replace(struct.pack("<f", 123.0), struct.pack("<f", 124.0)))
    damaged, used_as_it_is = (Package(str(tmp_path / "q"), verify_weights=v) for v in (True, False))
    for use in (lambda p: p.call(X), lambda p: p.call(X), lambda p: p.weights, Package.verify):
        with pytest.raises(PackageError, match="q: damaged section 'weights'"):
            use(damaged)
    used_as_it_is.verify()
    assert (
        torch.equal(used_as_it_is.call(X)[0, :1], X[0, :1] + 124 + 100)
        and used_as_it_is.weights["w"][0, 0] == 124
    )


def test_damage_anywhere_in_weights_is_found_by_the_first_call(tmp_path: Path) -> None:
    """In weights of several pieces, which threads verify; each first call of several threads."""
    write_package(
        tmp_path / "p", contents(weights={"w": torch.ones(3, 4), "v": torch.ones(700_001)})
    )
    data = bytearray((tmp_path / "p").read_bytes())
    start, nbytes = struct.unpack_from("<2Q", data, data.rindex(b"weights\0") + 48)
    assert nbytes > 2 << 20
    for at in (0, 1 << 20, (2 << 20) - 1, nbytes - 1):
        data[start + at] ^= 1
        (tmp_path / f"q{at}").write_bytes(data)
        data[start + at] ^= 1
        p = Package(str(tmp_path / f"q{at}"))
        with ThreadPoolExecutor(4) as pool:
            errors = [f.exception() for f in [pool.submit(p.call, X) for _ in range(4)]]
        assert all("damaged section 'weights'" in str(e) for e in errors), at
    p = Package(str(tmp_path / "p"))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, X + 1 + 100) for y in pool.map(p.call, [X] * 4))


def test_weights_that_vanish_before_they_are_read(tmp_path: Path) -> None:
    """A file that was cut off in place is an error, not the end of the process."""
    write_package(
        tmp_path / "p", contents(weights={"w": torch.ones(3, 4), "v": torch.ones(700_001)})
    )
    p = Package(str(tmp_path / "p"))
    os.truncate(tmp_path / "p", 1 << 20)
    with pytest.raises(PackageError, match="the weights were cut off since it was opened"):
        p.call(X)


def reference_checksum(data: bytes) -> int:
    """As native/core/package.cpp describes it."""
    mask, prime = 2**64 - 1, 0x9E3779B97F4A7C15

    def stir(lane: int, word: int) -> int:
        x = lane ^ word
        return ((x << 29 | x >> 35) & mask) * prime & mask

    lanes = [1, 2, 3, 4]
    for k, (word,) in enumerate(struct.iter_unpack("<Q", data + bytes(-len(data) % 32))):
        lanes[k % 4] = stir(lanes[k % 4], word)
    h = len(data)
    for lane in lanes:
        h = stir(h, lane)
    h = (h ^ h >> 32) * prime & mask
    return h ^ h >> 29


def test_checksum() -> None:
    data = bytes(range(256)) * 5
    for n in (0, 1, 31, 32, 33, 1000):
        assert checksum([data[:n]]) == reference_checksum(data[:n])
        pieces = [data[:n], data[:70], data[:0], data[:n]]
        aligned = b"".join(p + bytes(-len(p) % 64) for p in pieces[:-1]) + pieces[-1]
        assert checksum(iter(pieces)) == reference_checksum(aligned)
    assert checksum([]) != checksum([bytes(1)]) != checksum([bytes(2)])
    assert checksum([memoryview(data)[3:40]]) == checksum([data[3:40]])
    with pytest.raises(TypeError):
        checksum([3])
    with pytest.raises(ZeroDivisionError):
        checksum(bytes(1 // n) for n in (1, 0))


def test_write(tmp_path: Path) -> None:
    """Pieces lie at the next multiple of 64; what cannot be written, or made, is an error."""
    pieces = [os.urandom(n) for n in (100, 0, 64, (9 << 20) + 5, 1)]
    with (tmp_path / "f").open("wb") as f:
        got = write(f.fileno(), 4096, iter(pieces))
    data = (tmp_path / "f").read_bytes()[4096:]
    sums = [checksum([data[k : k + (1 << 20)]]) for k in range(0, len(data), 1 << 20)]
    assert len(sums) == 10 and got == checksum([struct.pack("<10Q", *sums)])
    for piece in pieces:
        assert data[: len(piece)] == piece
        data = data[-(-len(piece) // 64) * 64 :]
    assert not data
    with (tmp_path / "f").open("rb") as f:
        with pytest.raises(OSError, match="Bad file descriptor"):
            write(f.fileno(), 0, pieces)
        with pytest.raises(ZeroDivisionError):
            write(f.fileno(), 0, (bytes(1 // n) for n in (0,)))


@pytest.mark.slow
def test_damage_under_a_sanitizer(tmp_path: Path) -> None:
    """Every length and nearly every byte of a package, and twenty thousand manifests, in a program
    of its own."""
    rich = contents(
        inputs=(
            *contents().inputs,
            ("symbol", "s0"),
            ("tensor", 1, "i64", (None, "n"), ("m", 1), "cuda:0"),
            ("tensor", 2, "u8", (), None, "cpu"),
        ),
        names=("x", "y", "z"),
        outputs=("a", "b"),
        results=(("program",), ("view", 1, True, None)),
        single=False,
        weights={"w": torch.ones(3, 4), "v": torch.ones(5)},
        variants=(
            Variant("portable", b"plan", b"kernels"),
            Variant("avx2+sm_90", b"plan", None, b"cubins"),
        ),
        checks=(
            ("even", "size 0 0", "const 2", "mod", "const 0", "eq"),
            ("apart", "stride 1 0", "offset 2", "add", "size 1 1", "lt"),
        ),
        folded=("old",),
        fixed=(
            (0, "n", None),
            (2, "m", True),
            (4, "k", 2.5),
            (5, "h", "up"),
            (6, "d", torch.float32),
        ),
    )
    write_package(tmp_path / "p", rich)
    core, binary = ROOT / "native" / "core", tmp_path / "native_package"
    sources = [
        ROOT / "tests" / "native_package.cpp",
        *(
            core / f"{n}.cpp"
            for n in ("checksum", "functions", "manifest", "package", "plan", "verify")
        ),
        *DRIVER,
    ]
    command = ["g++", "-std=c++20", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    folders = ["-I", str(ROOT / "native"), "-I", str(ROOT / "plait" / "include")]
    subprocess.run([*command, *folders, "-o", str(binary), *map(str, sources)], check=True)
    done = subprocess.run(
        [binary, "20000", "p"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 100 < int(done.stdout.split()[0]) < 10_000, done.stdout


def test_kernels_load_where_memory_files_are_not_allowed(tmp_path: Path) -> None:
    """A temporary file is used, and is gone afterwards."""
    load(tmp_path, contents())
    (tmp_path / "scratch").mkdir()
    block = """
import ctypes, sys, torch
from plait._native import Package
class Op(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_uint16), ("ops", ctypes.POINTER(Op))]
# memory files (system call 319) fail with EPERM
ops = (Op * 4)(
    Op(0x20, 0, 0, 0), Op(0x15, 0, 1, 319), Op(0x06, 0, 0, 0x50001), Op(0x06, 0, 0, 0x7FFF0000)
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, ops))) == 0
print(Package(sys.argv[1]).call(torch.zeros(1, 4)).sum().item())
"""
    env = {"TMPDIR": str(tmp_path / "scratch"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", block, str(tmp_path / "p.plait")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "406.0\n", done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []
