"""Packages: `plait.package` writes them, `plait.load` runs them in processes that have no
compiler."""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim, export

import plait
from plait._native import Package as NativePackage
from plait.compat import size_checks
from plait.errors import InputError, Unsupported, UserError
from plait.runtime import signature as signatures
from plait.runtime.package import Package
from plait.runtime.signature import VALUE, Signature
from plait.runtime.toolchain import ISAS
from plait.wrapper.package import Contents, PackageWriter
from tests.against_eager import tree_equal
from tests.package_programs import PROGRAMS, X, convolutions

ROOT = Path(__file__).parent.parent
MLP = PROGRAMS["mlp"]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROGRAMS[name].build().train(PROGRAMS[name].training)


def dynamic(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The first size of every tensor varies."""
    n = Dim("n", min=2, max=6)
    shapes = pytree.tree_map(lambda x: {0: n} if isinstance(x, Tensor) else None, (args, kwargs))
    return dict(inspect.signature(module.forward).bind(*shapes[0], **shapes[1]).arguments)


def packaged(path: Path, module: nn.Module, *args: Any, **options: Any) -> plait.Package:
    plait.package(module, path, args, **options)
    return plait.load(path)


def contents(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Contents:
    """What plait.package would write."""
    seen: list[Contents] = []
    with monkeypatch.context() as m:
        m.setattr(PackageWriter, "finish", lambda self, c: seen.append(c))
        plait.package(*args, **options)
    return seen[0]


def in_new_process(code: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    return subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **paths, **env},
    )


@pytest.mark.parametrize("sizes", [pytest.param("fixed", marks=pytest.mark.slow), "dynamic"])
def test_packages_run_without_the_compiler(tmp_path: Path, sizes: str) -> None:
    for name, program in PROGRAMS.items():
        module = made(name)
        args, kwargs = program.call(4)
        shapes = dynamic(module, args, kwargs) if sizes == "dynamic" else None
        source: Any = module
        if kwargs:  # what takes positional and keyword arguments comes as an exported program
            source = export(module, args, kwargs, dynamic_shapes=shapes)
            plait.package(source, tmp_path / f"{name}.plait")
        else:
            plait.package(source, tmp_path / f"{name}.plait", args, shapes)
        cases = []
        for n in (4, 4, 2, 6) if shapes else (4, 4):
            args, kwargs = program.call(n)
            with torch.no_grad():
                cases.append((args, kwargs, module(*args, **kwargs)))
        torch.save(cases, tmp_path / f"{name}.pt")
    # Nothing is written anywhere: there need be no folder for it.
    nowhere = dict.fromkeys(("HOME", "PLAIT_CACHE_DIR"), "/nonexistent")
    done = in_new_process(["tests/package_programs.py", str(tmp_path)], **nowhere)
    assert done.stdout == "all agree\n", done.stderr


def test_what_a_package_tells(tmp_path: Path) -> None:
    module = made("mlp")
    loaded = packaged(tmp_path / "p.plait", module, X[:4])
    assert loaded.inputs == ("input",) and loaded.outputs == ("result",)
    assert set(loaded.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (
        loaded.versions["torch"] == torch.__version__
        and loaded.versions["plait"] == plait.__version__
    )
    assert loaded.machine in ISAS
    assert repr(loaded) == f"<plait package for {loaded.machine}: input -> result>"
    with pytest.raises(TypeError):
        loaded.weights["0.bias"] = torch.zeros(32)  # type: ignore[index]


def test_equal_programs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plait.package(made("mlp"), tmp_path / name, (X[:4],))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_machine_of_a_package_runs(tmp_path: Path) -> None:
    module = made("transformer")
    path = tmp_path / "p.plait"
    (x,), _ = PROGRAMS["transformer"].call(3)
    plait.package(module, path, (x,))
    best = plait.load(path)
    with torch.no_grad():
        want = module(x)
    ran = set()
    for name in ISAS:
        try:
            loaded = plait.load(path, machine=name)
        except plait.PackageError as error:
            assert name != "portable" and name in str(error)  # this machine lacks it
            continue
        ran.add(name)
        assert loaded.machine == name
        torch.testing.assert_close(loaded(x), want)
    assert best.machine == next(name for name in ISAS if name in ran)


def test_kernels_for_machines_are_different_and_plans_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = contents(monkeypatch, made("mlp"), "unused", (X[:4],), machines=["portable", "avx512"])
    assert [v.machine for v in c.variants] == ["avx512", "portable"]  # the best first
    assert c.variants[0].plan is c.variants[1].plan
    assert c.variants[0].kernels is not None and c.variants[0].kernels != c.variants[1].kernels
    c = contents(monkeypatch, made("mlp"), "unused", (X[:4],), options={"isa": "avx2"})
    assert [v.machine for v in c.variants] == ["avx2"]
    c = contents(
        monkeypatch, made("product alone"), "unused", (X[:4],), options={"small_matmul_flops": 0}
    )
    assert [v.machine for v in c.variants] == ["portable"] and c.variants[0].kernels is None


def test_threads_share_a_package(tmp_path: Path) -> None:
    module = made("transformer")
    loaded = packaged(tmp_path / "p.plait", module, *PROGRAMS["transformer"].call(3)[0])
    inputs = [torch.randn(3, 3, 16) for _ in range(8)]
    with torch.no_grad():
        wanted = [module(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for got, want in zip(threads.map(loaded, inputs * 8), wanted * 8, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "fn, args",
    [
        (lambda x: x.sort(), (X,)),
        (lambda x: {"a": [x.max(0), (x.sort(), 2)], "b": torch.linalg.slogdet(x[:6, :6])}, (X,)),
        (
            lambda s, m: s.values + s.indices * m["m"].values,
            (X.sort(), {"m": X.max(1, keepdim=True)}),
        ),
    ],
)
def test_named_results_of_torch_go_in_and_out(
    tmp_path: Path, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    plait.package(fn, tmp_path / "p.plait", args, machines=["portable"])
    want = fn(*args)
    for program in (plait.compile(fn, args), plait.load(tmp_path / "p.plait")):
        got = program(*args)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(want))


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_calls_that_change_state_come_one_after_another(tmp_path: Path, wrapper: str) -> None:
    """As eager's: none is lost, and each sees the count it made. x is so large that calls give the
    GIL up."""
    module, x = made("state"), torch.ones(64, 4096)
    if wrapper == "native":
        programs = [packaged(tmp_path / "p.plait", module, x), plait.compile(made("state"), (x,))]
    else:
        programs = [plait.compile(made("state"), (x,), options={"wrapper": "python"})]
    for program in programs:
        start = threading.Barrier(8)

        def count(_: int, program: Any = program, start: threading.Barrier = start) -> list[float]:
            start.wait()
            return [program(x)[0, 0].item() for _ in range(200)]

        with ThreadPoolExecutor(8) as threads:
            seen = [n for counted in threads.map(count, range(8)) for n in counted]
        assert sorted(seen) == list(range(1, 1601))


def damaged_json(text: str) -> Iterator[str]:
    """The text with each of its values exchanged or left out, one at a time, and cut or changed
    bytes."""

    def variants(value: Any) -> Iterator[Any]:
        yield from (x for x in (None, 7, "x", [], {}, [["value"]], True) if x != value)
        if isinstance(value, list):
            for k, item in enumerate(value):
                yield value[:k] + value[k + 1 :]
                yield from (value[:k] + [v] + value[k + 1 :] for v in variants(item))
        if isinstance(value, dict):
            for key, item in value.items():
                yield {k: v for k, v in value.items() if k != key}
                yield from ({**value, key: v} for v in variants(item))

    yield from (json.dumps(v) for v in variants(json.loads(text)))
    yield from (text[:k] for k in range(0, len(text), 17))
    yield from (text[:k] + "\x00" + text[k + 1 :] for k in range(0, len(text), 13))


def test_damage_to_how_arguments_are_nested_is_an_error_of_plait(tmp_path: Path) -> None:
    def fn(x: Tensor, y: dict[str, Tensor], n: int, s: str) -> dict[str, Any]:
        return {"sum": x + y["a"] * n, "same": (x * 2, 3.5, s)}

    path = tmp_path / "p.plait"
    args = (X[:4], {"a": X[:4]}, 3, "s")
    plait.package(fn, path, args, machines=["portable"])
    native = NativePackage(str(path))
    refused = taken = 0
    for text in damaged_json(native.python):
        given = SimpleNamespace(
            call=native.call,
            python=text,
            names=native.names,
            outputs=native.outputs,
            weights={},
            folded=(),
            machine="",
            versions={},
        )
        try:
            loaded = Package(given, str(path))  # type: ignore[arg-type]
        except plait.PackageError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        taken += 1
        with contextlib.suppress(plait.InputError):
            loaded(*args)
    assert refused > 200 and taken > 20, (refused, taken)


def test_many_loads_at_once(tmp_path: Path) -> None:
    module = made("mlp")
    path = tmp_path / "p.plait"
    plait.package(module, path, (X[:4],))
    with ThreadPoolExecutor(4) as threads:
        loads = list(threads.map(lambda _: plait.load(path), range(16)))
    with torch.no_grad():
        for loaded in loads:
            torch.testing.assert_close(loaded(X[:4]), module(X[:4]))
    loads[0].weights["0.bias"].zero_()
    assert loads[1].weights["0.bias"].any()  # each has weights of its own


def test_weights_are_exchanged_in_place(tmp_path: Path) -> None:
    path = tmp_path / "p.plait"
    loaded = packaged(path, made("mlp"), X[:4])
    before = hashlib.sha256(path.read_bytes()).digest()
    other = PROGRAMS["mlp"].build()
    loaded.load_weights(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(loaded(X[:4]), other(X[:4]))
    assert hashlib.sha256(path.read_bytes()).digest() == before
    weight = torch.zeros(32, 16)
    for wrong, text in [
        ({"nothing": weight}, "there is no weight 'nothing'"),
        (
            {"0.weight": weight.t()},
            r"weight '0.weight': expected torch.float32 of sizes \(32, 16\), got .*\(16, 32\)",
        ),
        ({"0.weight": weight.double()}, "got torch.float64"),
        ({"0.weight": 3}, "expected a tensor, got int"),
    ]:
        with pytest.raises(UserError, match=text):
            loaded.load_weights({"0.bias": torch.ones(32), **wrong})
    assert torch.equal(loaded.weights["0.bias"], other[0].bias)  # nothing was changed


def test_state_is_the_process_s_own(tmp_path: Path) -> None:
    path = tmp_path / "p.plait"
    first, second = packaged(path, made("state"), X), plait.load(path)
    assert [float(first(X)[0, 0]) for _ in range(3)] == [-1, -2, -3]
    assert float(second(X)[0, 0]) == -1 and float(plait.load(path)(X)[0, 0]) == -1


def test_wrong_inputs_are_named_as_by_compile(tmp_path: Path) -> None:
    args, kwargs = PROGRAMS["nested"].call(4)
    module = made("nested")
    plait.package(export(module, args, kwargs), tmp_path / "p.plait")
    for call in (plait.load(tmp_path / "p.plait"), plait.compile(export(module, args, kwargs))):
        for wrong, text in [
            (({"a": X[:3]}, 3), r"input 'x\['a'\]': expected size 4 in dimension 0, got 3"),
            (({"a": X[:4]}, 4), "input 'n': the program was compiled for 3, got 4"),
            (({"b": X[:4]}, 3), "arguments are nested as"),
            (({"a": X[:4].double()}, 3), "expected dtype float32, got float64"),
        ]:
            with pytest.raises(InputError, match=text):
                call(*wrong, **kwargs)


def test_conditions_on_sizes_are_checked(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.view(2, -1) + y

    n = Dim("n", min=2, max=8)
    plait.package(
        Halves(),
        tmp_path / "p.plait",
        (torch.ones(8), torch.ones(4)),
        dynamic_shapes=({0: 2 * n}, {0: n}),
    )
    loaded = plait.load(tmp_path / "p.plait")
    assert torch.equal(loaded(torch.ones(6), torch.ones(3)), torch.full((2, 3), 2.0))
    with pytest.raises(InputError, match="sizes break a condition of the program"):
        loaded(torch.ones(6), torch.ones(4))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1)


def where_it_begins(x: Tensor) -> Tensor:
    return x * 2 if x.storage_offset() % 3 == 1 else x * 3


@pytest.mark.parametrize(
    ("fn", "example", "fits", "breaks", "condition", "found"),
    [
        (Flat(), X[:6, :4], X[:3, :5], X[:3], "x.stride(0) != x.shape[1]", "stride(0) = 16"),
        (
            Flat(),
            X[:, :8:2],
            X[:3, :10:2],
            X,
            "x.stride(0) != (x.shape[1]*x.stride(1))",
            "stride(1) = 1",
        ),
        (
            where_it_begins,
            X[2:, 2:],
            X[1:, 3:],
            X,
            "(x.storage_offset() % 3) == 1",
            "storage_offset() = 0",
        ),
    ],
)
def test_conditions_on_strides_are_checked(
    tmp_path: Path,
    fn: Any,
    example: Tensor,
    fits: Tensor,
    breaks: Tensor,
    condition: str,
    found: str,
) -> None:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    plait.package(fn, tmp_path / "p.plait", (example,), shapes, machines="portable")
    for call in (plait.load(tmp_path / "p.plait"), plait.compile(fn, (example,), shapes)):
        assert torch.equal(call(fits), fn(fits))
        text = (
            f"strides break a condition of the program, .*{re.escape(condition)}.*: x .*, "
            f"x.{re.escape(found)}$"
        )
        with pytest.raises(InputError, match=text):
            call(breaks)


def test_a_condition_beyond_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_checks, "_postfix", lambda *_: None)
    line = inspect.getsourcelines(Flat)[1] + 2
    text = rf"needs sizes with x.stride(.|\n)*at test_package.py:{line}\n.*try: plait.compile"
    with pytest.raises(Unsupported, match=text):
        plait.package(Flat(), tmp_path / "p", (X[:6, :4],), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))


@pytest.mark.parametrize("name", ["convolutions", "mlp"])
def test_folding_agrees_and_locks_weights(tmp_path: Path, name: str) -> None:
    module = made(name)
    (x,), _ = PROGRAMS[name].call(2)
    loaded = packaged(tmp_path / "p.plait", module, x, fold=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x))
    if name == "mlp":  # nothing depends on weights alone
        assert set(loaded.weights) == set(module.state_dict())
        return
    assert set(loaded.weights) == {"1.num_batches_tracked", "4.num_batches_tracked"}
    with pytest.raises(
        UserError, match=r"weight '0.weight' was folded into the program\n.*fold=False"
    ):
        loaded.load_weights(module.state_dict())


class Prepared(nn.Module):
    """Values of weights alone: small, large, written, returned."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.table, self.used = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.seen.add_(1)
        scaled = x * (self.w.exp().sum(0) + self.used[0]) + self.used[1] * self.seen.cos()
        large = (self.table[None, :, :] * torch.ones(64, 1, 1).cos()).sum(-1)
        both = self.table.tanh()
        grown = both.repeat(256, 8).cos().sum(1) * x[0, 0] + both.exp().sum() + x.sum() * both[0, 0]
        return scaled, large, grown, self.w.tanh()


def test_what_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Prepared().eval()
    want = copy.deepcopy(module)
    c = contents(monkeypatch, module, "unused", (torch.ones(3, 8),), fold=True)
    assert set(c.folded) == {"w", "table", "used"} and set(c.weights) == {"seen"}
    loaded = packaged(tmp_path / "p.plait", module, torch.ones(3, 8), fold=True)
    for _ in range(2):
        first = loaded(torch.ones(3, 8))
        with torch.no_grad():
            torch.testing.assert_close(first, want(torch.ones(3, 8)))
        first[3].zero_()  # a result is no memory of the program


def test_folding_takes_no_more_memory_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cat([self.w.exp()] * 256).sin()

    c = contents(monkeypatch, Repeated(), "unused", (torch.ones(64),), fold=True)
    assert [t.shape for t in c.constants] == [(64, 64)] and c.folded == ("w",)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda data: b"", "truncated|not a package|no package"),
    "text": (lambda data: b"no package at all" * 20, "not a package|no package"),
    "truncated": (lambda data: data[:-5000], "truncated"),
    "version": (lambda data: data[:8] + b"\x63" + data[9:], "version"),
    "last byte": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.plait"
    plait.package(made("mlp"), path, (X[:4],))
    change, text = DAMAGE[kind]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(plait.PackageError, match=text):
        plait.load(path)


def test_a_missing_file_is_a_package_error(tmp_path: Path) -> None:
    with pytest.raises(plait.PackageError, match="cannot be opened"):
        plait.load(tmp_path / "nowhere")


def test_an_operator_that_a_process_lacks_is_named(tmp_path: Path) -> None:
    with torch.library._scoped_library("plait_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        loaded = packaged(tmp_path / "p.plait", OfOurs(), X)
        assert torch.equal(loaded(X), X * 2)
    done = in_new_process(["-c", f"import plait; plait.load({str(tmp_path / 'p.plait')!r})"])
    assert "PackageError" in done.stderr and "plait_test::twice" in done.stderr


class OfOurs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.plait_test.twice(x)
        return result


Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = 1


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a namedtuple": (lambda x: Pair(x, x + 1), (X,), "whose results are nested as .*Pair"),
    "an enum": (lambda x, c: x, (X, Colour.RED), "argument 'c' is <Colour.RED: 1>"),
    "keys that are no text": (lambda x: {(1, 2): x}, (X,), "results are nested"),
}


@pytest.mark.parametrize(
    "compiler", [plait.compile, lambda fn, args: plait.package(fn, "unused", args)]
)
def test_what_cannot_be_traced_names_what_was_called(compiler: Callable[..., Any]) -> None:
    who = "plait.compile" if compiler is plait.compile else "plait.package"
    for fn, args in [
        (lambda x: x * x.sum().item() if x.sum().item() > 0 else x, (X,)),
        (lambda x: x.sum(), (X.to_sparse(),)),
        (lambda x: [object()], (X,)),
    ]:
        with pytest.raises(Unsupported, match=f"^{who} "):
            compiler(fn, args)
    with pytest.raises(ZeroDivisionError) as error:
        compiler(lambda x: x / (1 // 0), (X,))
    assert error.value.__notes__[0].startswith(f"raised while {who} traced")


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_python_is_refused(tmp_path: Path, name: str) -> None:
    fn, args, text = REFUSED[name]
    with pytest.raises(Unsupported, match=text):
        plait.package(fn, tmp_path / "p.plait", args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"options": {"wrapper": "cpp"}}, "knows no option wrapper='cpp'"),
        ({"mode": "reduce-overhead"}, "knows no option cuda_graphs=True"),
        ({"machines": ["sse"]}, "knows no machine 'sse'\n.*avx512"),
        ({"machines": ["sm_999"]}, "knows no machine 'sm_999'\n.*one of avx512, .* sm_90, sm_100"),
        ({"machines": ["avx2", "sm_91"]}, "knows no machine 'sm_91'"),
        ({"machines": ["ptx_81"]}, "knows no machine 'ptx_81'"),
        ({"options": {"gpu_arch": "sm_1"}}, "knows no machine 'sm_1'"),
        ({"machines": "sse"}, "knows no machine 'sse'\n"),
        ({"machines": ["avx2", 3]}, "knows no machine 3\n"),
        ({"machines": 3}, "knows no machine 3\n"),
        ({"device": "gpu"}, "there is no device 'gpu'\n.*cuda:1"),
        ({"device": 2.5}, "there is no device 2.5\n.*cuda:1"),
        (
            {"device": "xpu"},
            "a package for the device xpu: plait has kernels for cpu and cuda only",
        ),
        ({"machines": ["ptx_90"]}, "PTX for 90 runs on no newer GPU\n.*ptx_89"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        plait.package(made("mlp"), tmp_path / "p.plait", (X[:4],), **options)


def test_one_machine_needs_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    c = contents(monkeypatch, made("mlp"), "unused", (X[:4],), machines="avx2")
    assert [v.machine for v in c.variants] == ["avx2"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (None, "takes the path of a file to write, got NoneType\n.*try: "),
        (3, "takes the path of a file to write, got int\n"),
        ("", "cannot write to '.': it is a folder\n.*'model.plait'"),
        ("{}", "cannot write to '{}': it is a folder\n.*'{}/model.plait'"),
        ("{}/none/x", "cannot write to '{}/none/x': there is no folder '{}/none'\n.*make the"),
        ("{}/file/x", "cannot write to '{}/file/x': there is no folder '{}/file'\n"),
        ("{}/" + "x" * 300, "cannot write to .*: File name too long\n"),
        ("{}/x\0y", "cannot write to .*: its name contains a NUL\n"),
        ("/proc/x", "cannot write to '/proc/x': .*\n.*try: a path where you may write"),
    ],
)
def test_where_no_package_can_be_written(tmp_path: Path, path: Any, text: str) -> None:
    (tmp_path / "file").touch()
    place = path.format(tmp_path) if isinstance(path, str) else path
    with pytest.raises(UserError, match="plait.package " + text.replace("{}", str(tmp_path))):
        plait.package(lambda x: 1 / 0, place, (X,))  # said before anything is traced


@pytest.mark.parametrize("as_given", [str, os.fsencode, Path])
def test_paths_of_every_sort(tmp_path: Path, as_given: Callable[[str], Any]) -> None:
    path = as_given(str(tmp_path / "p.plait"))
    plait.package(lambda x: x + 1, path, (X,), machines="portable")
    assert torch.equal(plait.load(path)(X), X + 1)


@pytest.mark.parametrize(
    ("path", "options", "text"),
    [
        (None, {}, "takes the path of a package, got NoneType\n.*plait.load"),
        (3, {}, "takes the path of a package, got int\n"),
        ("a\0b", {}, "the name of .* contains a NUL"),
        ("p", {"machine": 3}, "takes the name of one machine, got machine=3\n"),
        ("p", {"machine": ["avx2"]}, r"takes the name of one machine, got machine=\['avx2'\]\n"),
    ],
)
def test_what_load_does_not_take(path: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        plait.load(path, **options)


ABSENT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "encoder": (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (torch.randn(2, 5, 8),),
    ),
    "contiguous": (lambda x: x.t().contiguous(memory_format=torch.contiguous_format) + 1, (X[:4],)),
    "nonzero": (lambda x: (x.nonzero(), x.nonzero(as_tuple=True)[0], ~(x > 0)), (X[:4],)),
    "gru": (nn.GRU(8, 4).eval(), (torch.randn(2, 5, 8),)),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", ABSENT)
def test_a_package_for_a_device_that_is_not_here(tmp_path: Path, name: str) -> None:
    fn, args = ABSENT[name]
    plait.package(fn, tmp_path / "p.plait", args, device="cuda", options={"kernels": False})
    assert (tmp_path / "p.plait").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_model_that_asks_the_device_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported,
        match=r"for cuda:0 of a model that asks the device(.|\n)*test_package.py(.|\n)*x\.device",
    ):
        plait.package(lambda x: x.cuda() + 1, tmp_path / "p.plait", (X[:4],), device="cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cell", [nn.GRU, nn.RNN])
def test_a_recurrent_layer_of_varying_length(tmp_path: Path, cell: type[nn.RNNBase]) -> None:
    model, x, t = cell(4, 5).eval(), torch.randn(7, 2, 4), torch.export.Dim("t", max=64)
    plait.package(model, tmp_path / "p.plait", (x,), ({0: t},))
    for make in (plait.compile(model, (x,), ({0: t},)), plait.load(tmp_path / "p.plait")):
        for given in (x, x[1:], x[:1]):
            torch.testing.assert_close(make(given), model(given))


def test_a_loop_over_a_size_that_varies(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x[0]
        for row in x[1:]:
            y = y.sin() + row
        return y

    x, t = torch.randn(7, 2, 4), torch.export.Dim("t", max=64)
    text = "it is traced for t = 7 alone, .* a loop(.|\n)*compile once for each"
    for make in (
        plait.compile,
        lambda *args: plait.package(args[0], tmp_path / "p.plait", *args[1:]),
    ):
        with pytest.raises(UserError, match=text):
            make(fn, (x,), ({0: t},))
    fixed = plait.compile(fn, (x,), ({0: torch.export.Dim.AUTO},))  # as it likes
    torch.testing.assert_close(fixed(x), fn(x))
    with pytest.raises(InputError, match=r"x.shape\[0\] == 7"):
        fixed(x[1:])


def test_weights_need_values(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="weight 'weight' has no values"):
        plait.package(
            nn.Linear(4, 4, device="meta"), tmp_path / "p.plait", (torch.ones(2, 4, device="meta"),)
        )


def test_results_that_are_views_of_inputs_and_weights(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.arange(6.0).view(2, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x, x.t()[1:], self.w[1], x + 1

    x = torch.randn(4, 3)
    loaded = packaged(tmp_path / "p.plait", Views(), x)
    got = loaded(x)
    tree_equal(got, Views()(x), "result")
    assert got[0] is x and got[1]._base is x
    got[2].fill_(7)
    assert float(loaded.weights["w"][1, 0]) == 7


@dataclass
class Query:
    x: Tensor
    rows: int
    scale: float
    how: str | None = None


torch.export.register_dataclass(Query, serialized_type_name="tests.test_package.Query")


class Answer(nn.Module):
    def forward(self, query: Query, more: dict[str, tuple[Tensor, int]]) -> Query:
        y, by = more["y"]
        assert query.how == "fast"
        return Query(
            query.x[: query.rows] * query.scale + y * by, query.rows, query.scale, query.how
        )


def test_arguments_that_are_no_tensors(tmp_path: Path) -> None:
    """Ints that vary, constants, and classes that torch was told of, for both ways to compile."""

    def call(
        fn: Callable[..., Any],
        x: Tensor,
        rows: Any,
        scale: Any = 0.5,
        how: Any = "fast",
        by: Any = 3,
    ) -> Any:
        return fn(Query(x, rows, scale, how), {"y": (X[0], by)})

    args = (Query(X, 3, 0.5, "fast"), {"y": (X[0], 3)})
    shapes = {
        "query": [{0: Dim("n", min=2, max=20)}, Dim.DYNAMIC, None, None],
        "more": {"y": (None, None)},
    }
    exported = export(Answer(), args, dynamic_shapes=shapes)
    for number, (source, *given) in enumerate([(Answer(), args, shapes), (exported, None, None)]):
        path = tmp_path / f"{number}.plait"
        plait.package(source, path, *given)
        python = plait.compile(source, *given, options={"wrapper": "python"})
        for fn in (plait.load(path), plait.compile(source, *given), python):
            for x, rows in ((X, 3), (X[:4], 2), (torch.ones(12, 16), 12)):
                got, want = call(fn, x, rows), call(Answer(), x, rows)
                torch.testing.assert_close(got.x, want.x)
                assert (got.rows, got.scale, got.how) == (rows, 0.5, "fast")
            for change, text in [
                (
                    {"rows": 7},
                    "sizes break a condition of the program, .*query.rows <= query.x.shape",
                ),
                ({"rows": -1}, "query.rows"),
                (
                    {"rows": True},
                    "query.rows': expected an int, got bool|condition .* query.rows True",
                ),
                (
                    {"scale": 0.25},
                    "input 'query.scale': the program was compiled for 0.5, got 0.25",
                ),
                (
                    {"how": "slow"},
                    "input 'query.how': the program was compiled for 'fast', got 'slow'",
                ),
                ({"by": 4}, r"input 'more\['y'\]\[1\]': the program was compiled for 3, got 4"),
            ]:
                with pytest.raises(InputError, match=text):
                    call(fn, **{"x": X, "rows": 3, **change})
    done = in_new_process(["-c", f"import plait; plait.load({str(path)!r})"])
    assert "PackageError" in done.stderr and "import it" in done.stderr and "Query" in done.stderr


def test_an_int_that_cannot_vary_is_named(tmp_path: Path) -> None:
    def fixed(x: Tensor, n: int) -> Tensor:
        return x * (2 if n == 3 else 5)

    for compiler in (plait.compile, lambda fn, *args: plait.package(fn, tmp_path / "p", *args)):
        with pytest.raises(
            UserError, match="contradicts the program: it needs 3 for an int that may vary"
        ):
            compiler(fixed, (X, 3), (None, Dim.AUTO))


def test_signatures_survive_json() -> None:
    values = (
        VALUE,
        None,
        True,
        3,
        2.5,
        float("inf"),
        1j,
        "text",
        b"\0",
        torch.float16,
        torch.strided,
        torch.device("cpu"),
    )
    spec = pytree.tree_structure((tuple(range(len(values))), {}))
    names = tuple(f"x{k}" for k in range(len(values)))
    signature = Signature(spec, values, names, len(values), (), spec, values)
    again = signatures.read(signatures.dump(signature))
    assert again == signature and [type(x) for x in again.leaves] == [type(x) for x in values]


def test_an_exported_program_has_its_sizes(tmp_path: Path) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor, by: int) -> Tensor:
            return x.sum() * by + y

    n = Dim("n", min=2, max=9)
    shapes = ({0: n}, {1: 2 * n + 1}, None)
    program = export(Both(), (torch.ones(4), torch.ones(2, 9), 3), dynamic_shapes=shapes)
    plait.package(program, tmp_path / "p.plait")
    for call in (plait.compile(program), plait.load(tmp_path / "p.plait")):
        assert torch.equal(call(torch.ones(5), torch.ones(2, 11), 3), torch.full((2, 11), 16.0))
        with pytest.raises(InputError, match=r"size at most 9"):
            call(torch.ones(10), torch.ones(2, 21), 3)
        with pytest.raises(InputError, match="sizes break a condition"):
            call(torch.ones(5), torch.ones(2, 12), 3)
    with pytest.raises(UserError, match="takes no dynamic_shapes"):
        plait.compile(program, dynamic_shapes=shapes)


def test_convolutions_of_an_exported_program_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(convolutions().eval(), (torch.ones(2, 3, 8, 8),))
    assert "0.weight" in contents(monkeypatch, program, "unused", fold=True).folded
