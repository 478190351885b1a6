"""`plait doctor`: each check with findings that are made up, and what the command prints."""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.__main__ import main
from plait.config import Config, flags
from plait.errors import ToolchainError
from plait.runtime.store import LIBRARIES, Store, key_of
from plait.tools import doctor
from plait.tools.doctor import BROKEN, OK, SLOW, Finding, Machine

FLAGS = {"avx512": "avx512f avx512dq avx512bw avx512vl avx2 fma f16c", "avx2": "avx2 fma f16c"}


def made(root: Path, files: dict[str, str] | None = None, **environ: str) -> Machine:
    """A machine of these files and variables alone."""
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root, {"PLAIT_CACHE_DIR": str(root / "caches"), **environ})


def states(check: Callable[[Machine], doctor.Findings], machine: Machine) -> list[str]:
    return [f.state for f in check(machine)]


# ------------------------------------------------------------------------------------ versions
@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", BROKEN), ("2.11.0", OK), ("2.13.0+cpu", OK), ("2.14.0a0", BROKEN)],
)
def test_torch(version: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert states(doctor.python_and_torch, made(tmp_path)) == [state, OK]


def test_the_range_of_torch_is_that_of_the_package() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text)
    assert found is not None
    low, below, high, above = map(int, found.groups())
    assert ((low, below), (high, above)) == doctor.TORCH


def test_an_extension_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plait

    monkeypatch.delattr(plait, "_native", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "plait._native", None)
    assert states(doctor.python_and_torch, made(tmp_path)) == [OK, BROKEN]


class Tools:
    """A compiler. writes: makes its library."""

    compiler, version = "c++", "c++ 12"

    def __init__(self, writes: Callable[[str, Path], None]) -> None:
        self._writes = writes

    def compile(self, source: str, path: Path, symbols: object) -> None:
        self._writes(source, path)


def refuses(source: str, path: Path) -> None:
    raise ToolchainError("c++ refused a kernel")


def writes_nonsense(source: str, path: Path) -> None:
    path.write_text("no library")


@pytest.mark.parametrize("how", [refuses, writes_nonsense])
def test_a_compiler_that_fails(
    how: Callable[[str, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_toolchain", lambda cfg: Tools(how))
    (found,) = doctor.compiler(made(tmp_path))
    assert found.state == BROKEN and "PLAIT_CXX" in found.do


def test_no_compiler(tmp_path: Path) -> None:
    (found,) = doctor.compiler(made(tmp_path, PLAIT_CXX="/nowhere/c++"))
    assert found.state == BROKEN and "no C++ compiler" in found.found


@pytest.mark.parametrize(("seconds", "state"), [(0.1, OK), (5.0, SLOW)])
def test_a_compiler_that_works(
    seconds: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((0.0, seconds))
    monkeypatch.setattr(doctor, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    assert states(doctor.compiler, made(tmp_path)) == [state]


def test_kernels_that_compute_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SOURCE", doctor.SOURCE.replace("*= 2", "*= 3"))
    (found,) = doctor.compiler(made(tmp_path))
    assert found.state == BROKEN and "computes wrongly" in found.found


# ------------------------------------------------------------------------------------ processor
@pytest.mark.parametrize(
    ("has", "isa", "state"),
    [
        ("avx512", "auto", OK), ("avx512", "avx512", OK), ("avx512", "avx2", SLOW),
        ("avx2", "auto", OK), ("avx2", "portable", SLOW), ("avx2", "avx512", BROKEN),
        ("", "auto", SLOW),
    ],
)  # fmt: skip
def test_vectors(has: str, isa: str, state: str, tmp_path: Path) -> None:
    text = f"processor: 0\nflags : fpu {FLAGS.get(has, '')}\n"
    machine = made(tmp_path, {"proc/cpuinfo": text}, PLAIT_ISA=isa)
    assert states(doctor.vectors, machine) == [state]


@pytest.mark.parametrize(
    ("threads", "cpus", "files", "environ", "state", "do"),
    [
        (8, 8, {}, {}, OK, ""),
        (4, 8, {}, {}, OK, ""),
        (8, 4, {}, {}, SLOW, "OMP_NUM_THREADS=4"),
        (8, 8, {"sys/fs/cgroup/cpu.max": "200000 100000"}, {}, SLOW, "OMP_NUM_THREADS=2"),
        (8, 8, {"sys/fs/cgroup/cpu.max": "max 100000"}, {}, OK, ""),
        (8, 8, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, {}, SLOW, "OMP_NUM_THREADS=1"),
        (8, 8, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, {}, OK, ""),
        (8, 8, {}, {"LOCAL_WORLD_SIZE": "4"}, SLOW, "OMP_NUM_THREADS=2"),
        (2, 8, {}, {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "2"}, OK, ""),
        (1, 8, {}, {"OMP_NUM_THREADS": "1"}, SLOW, "unset OMP_NUM_THREADS"),
        (4, 8, {}, {"OMP_NUM_THREADS": "4"}, OK, ""),
    ],
)  # fmt: skip
def test_threads(
    threads: int, cpus: int, files: dict[str, str], environ: dict[str, str], state: str, do: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    (found,) = doctor.threads(made(tmp_path, files, **environ))
    assert found.state == state and found.do.startswith(do) and f"{threads} threads" in found.found


CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({}, OK),
        ({"cpu0/cpufreq/scaling_governor": "performance"}, OK),
        ({"cpu0/cpufreq/scaling_governor": "powersave"}, SLOW),
        ({"cpu0/cpufreq/scaling_governor": "powersave",
          "cpu0/cpufreq/scaling_driver": "intel_pstate"}, OK),
        ({"intel_pstate/no_turbo": "1"}, SLOW),
        ({"intel_pstate/no_turbo": "0"}, OK),
        ({"cpu0/cpufreq/scaling_governor": "performance", "cpufreq/boost": "0"}, SLOW),
    ],
)  # fmt: skip
def test_clock(files: dict[str, str], state: str, tmp_path: Path) -> None:
    machine = made(tmp_path, {f"{CPU}/{name}": text for name, text in files.items()})
    assert states(doctor.clock, machine) == [state]


HUGE = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, [OK, OK]),
        ({HUGE: "always madvise [never]"}, [SLOW, OK]),
        ({HUGE: "always [madvise] never"}, [OK, OK]),
        ({"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB"}, [OK, OK]),
        ({"proc/meminfo": "MemAvailable: 500000 kB"}, [OK, SLOW]),
        ({"proc/meminfo": "MemAvailable: 8000000 kB", "sys/fs/cgroup/memory.max": "2147483648",
          "sys/fs/cgroup/memory.current": "2000000000"}, [OK, SLOW]),
        ({"proc/meminfo": "MemAvailable: 8000000 kB", "sys/fs/cgroup/memory.max": "max"}, [OK, OK]),
    ],
)  # fmt: skip
def test_memory(files: dict[str, str], wanted: list[str], tmp_path: Path) -> None:
    assert states(doctor.memory, made(tmp_path, files)) == wanted


def test_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [f.do for f in doctor.numbers(made(tmp_path))] == ["", ""]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "'high'" in list(doctor.numbers(made(tmp_path)))[1].do
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert [f.state for f in doctor.numbers(made(tmp_path))] == [OK, OK]


# ------------------------------------------------------------------------------------ GPUs
DRIVER = {"proc/driver/nvidia/version": "NVRM version: 570.1\nGCC 12"}


@pytest.mark.parametrize(
    ("files", "cuda", "state", "word"),
    [
        ({}, None, OK, "none"),
        ({}, "12.8", OK, "none"),
        (DRIVER, None, SLOW, "built for CPUs"),
        (DRIVER, "12.8", SLOW, "570.1"),
        ({"dev/nvidia0": ""}, None, SLOW, "built for CPUs"),
    ],
)
def test_no_gpu(
    files: dict[str, str], cuda: str | None, state: str, word: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (found,) = doctor.gpus(made(tmp_path, files))
    assert found.state == state and word in found.found


def with_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    def facts(k: int) -> object:
        major, minor = capabilities[k]
        return types.SimpleNamespace(name="G", major=major, minor=minor, total_memory=80 << 30)

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)


def smi(folder: Path, text: str) -> str:
    """A folder for PATH with a program that prints a text."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return f"{folder}:/bin:/usr/bin"


@pytest.mark.parametrize(
    ("says", "wanted"),
    [
        ("echo '0, Enabled, Not Active, Not Active'", [OK]),
        ("echo '0, Disabled, Not Active, Not Active'", [SLOW]),
        (
            "echo '0, Enabled, Active, Not Active'; echo '1, Enabled, Not Active, Active'",
            [SLOW] * 2,
        ),
        ("echo '0, [N/A], [N/A], [N/A]'", [OK]),
        ("echo No devices were found; exit 6", []),
    ],
)
def test_gpus(
    says: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, (9, 0), (7, 5))
    machine = made(tmp_path, PATH=smi(tmp_path / "bin", says))
    assert states(doctor.gpus, machine) == [OK, BROKEN, *wanted]


@pytest.mark.parametrize(
    ("asked", "there", "version", "wanted"),
    [
        (False, False, "3.6.0", []), (True, False, "3.6.0", [OK]), (False, True, "3.6.0", [OK]),
        (True, False, "3.5.1", [BROKEN]), (True, False, "", [BROKEN]),
    ],
)  # fmt: skip
def test_triton(
    asked: bool, there: bool, version: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str) -> str:
        if not version:
            raise doctor.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(doctor.metadata, "version", of)
    monkeypatch.setitem(__import__("sys").modules, "triton", types.ModuleType("triton"))
    assert states(doctor.triton, Machine(triton=asked)) == wanted


# ------------------------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("PLAIT_DEBUG", "2", SLOW), ("PLAIT_DEBUG", "0", OK), ("PLAIT_DEBUG", "", OK),
        ("PLAIT_DEBUG", "many", BROKEN), ("PLAIT_DEBUGS", "1", BROKEN), ("PLAIT_FUSION", "0", SLOW),
        ("PLAIT_FUSION", "1", OK), ("PLAIT_OPT_LEVEL", "1", SLOW), ("PLAIT_OPT_LEVEL", "3", OK),
        ("PLAIT_WRAPPER", "python", SLOW), ("PLAIT_NAN_ASSERTS", "1", SLOW),
    ],
)  # fmt: skip
def test_variables(name: str, value: str, state: str) -> None:
    (found,) = doctor.variables(Machine(environ={name: value, "HOME": "/"}))
    assert found.state == state and name in found.found
    assert bool(found.do) == (state != OK)


def test_options_that_cost_are_options() -> None:
    rows = {row.name: row for row in flags()}
    for name, costs in doctor._COSTLY.items():
        assert not costs(rows[name].default), name


def test_no_variables() -> None:
    assert states(doctor.variables, Machine(environ={})) == [OK]


def test_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    off = Machine(environ={"TORCHDYNAMO_DISABLE": "1"})
    assert states(doctor.dynamo, off) == [BROKEN]
    assert states(doctor.dynamo, Machine(environ={"TORCHDYNAMO_DISABLE": "0"})) == [OK]
    with torch._dynamo.config.patch(recompile_limit=2):
        assert states(doctor.dynamo, Machine(environ={})) == [SLOW]


# ------------------------------------------------------------------------------------ caches
def filled(machine: Machine, n: int) -> list[Path]:
    store = Store.of(machine.cfg, LIBRARIES)
    return [store.put(key_of((str(k),)), bytes(1000)).path for k in range(n)]


def plenty(monkeypatch: pytest.MonkeyPatch, free: int = 1 << 40) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty(monkeypatch)
    machine = made(tmp_path)
    assert states(doctor.caches, machine) == [OK]  # there is no folder yet
    paths = filled(machine, 3)
    size, whole = doctor.caches(machine)
    assert size.found.startswith("3 files") and whole.found.startswith("3 of 3 entries")
    paths[1].write_bytes(b"x")
    size, bad = doctor.caches(machine)
    assert (size.state, bad.state, bad.do) == (OK, BROKEN, "plait cache verify --remove")
    assert str(paths[1]) in bad.found and "1 are bad" in bad.found


def test_large_caches_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty(monkeypatch)
    monkeypatch.setattr(doctor, "READ_NBYTES", 2500)
    machine = made(tmp_path)
    for k, path in enumerate(filled(machine, 4)):
        os.utime(path, (k, k))
        if k == 0:
            path.write_bytes(bytes(1200))
            os.utime(path, (k, k))
    _, found = doctor.caches(machine)
    assert (found.state, found.found) == (OK, "2 of 4 entries were read, all are whole")


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = made(tmp_path)
    filled(machine, 2)
    plenty(monkeypatch, free=1000)
    size, _ = doctor.caches(machine)
    assert size.state == SLOW and "prune" in size.do
    plenty(monkeypatch)
    small = made(tmp_path, PLAIT_CACHE_MB="0")
    size, _ = doctor.caches(small)
    assert size.state == SLOW and "libraries" in size.found


def test_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = made(tmp_path)
    filled(machine, 1)
    (tmp_path / "caches" / "kernels").chmod(0o777)
    (found,) = doctor.caches(machine)
    assert found.state == BROKEN and "chmod" in found.do


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plenty(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(doctor.os, "access", lambda *_: False)
        assert states(doctor.caches, made(tmp_path)) == [SLOW, OK]
    facts = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(doctor.os, "statvfs", lambda _: facts)
    assert states(doctor.caches, made(tmp_path)) == [SLOW, OK]


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, OK), ({"PLAIT_WARM_START": "0"}, SLOW), ({"PLAIT_DEBUG": "3"}, SLOW),
        ({"PLAIT_DEBUG": "1"}, OK), ({"PLAIT_WRAPPER": "cpp"}, SLOW),
    ],
)  # fmt: skip
def test_warm_starts(environ: dict[str, str], state: str, tmp_path: Path) -> None:
    assert states(doctor.warm_starts, made(tmp_path, **environ)) == [state]


# ------------------------------------------------------------------------------------ all of them
def test_a_check_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    def looks_wrong(_: Machine) -> doctor.Findings:
        yield Finding("first", "is there")
        raise ValueError("no such thing")

    found = doctor.examine(made(tmp_path), (looks_wrong, doctor.warm_starts))
    assert [f.state for f in found] == [OK, BROKEN, OK]
    assert found[1].what == "looks wrong" and "ValueError: no such thing" in found[1].found


def test_a_variable_that_says_nothing_leaves_the_usual(tmp_path: Path) -> None:
    assert made(tmp_path, PLAIT_DEBUG="many").cfg == Config()
    assert made(tmp_path, PLAIT_DEBUG="2", PLAIT_OF_NO_USE="1").cfg.debug == 2


FOUND = (Finding("one", "is good"), Finding("two", "is slow", SLOW, "do that"))
BAD = Finding("three", "[bold]is bad", BROKEN, "do this")


def says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *found: Finding,
    arguments: tuple[str, ...] = (),
) -> tuple[int, str]:  # fmt: skip
    monkeypatch.setattr(doctor, "examine", lambda machine: list(found))
    status: Any = 0
    try:
        main(["doctor", *arguments])
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr().out


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = says(capsys, monkeypatch, *FOUND)
    assert status == 0
    assert [line.split() for line in out.splitlines()] == [
        ["ok", "one", "is", "good"],
        ["costs", "speed", "two", "is", "slow"],
        ["->", "do", "that"],
        ["1", "ok,", "1", "cost", "speed,", "0", "broken"],
    ]
    assert says(capsys, monkeypatch, *FOUND, BAD)[0] == 1


def test_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = says(capsys, monkeypatch, *FOUND, BAD, arguments=("--json",))
    assert status == 1
    assert json.loads(out)[1] == {
        "what": "two", "found": "is slow", "state": SLOW, "do": "do that"
    }  # fmt: skip
    assert len(json.loads(out)) == 3


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    status, out = says(capsys, monkeypatch, *FOUND, BAD)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert status == 1 and "[bold]is bad" in plain and "-> do this" in plain
    assert "1 ok, 1 cost speed, 1 broken" in plain


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is, no check fails of itself."""
    found = doctor.examine(Machine())
    assert len(found) >= len(doctor.CHECKS) - 1
    assert not any("the check itself fails" in f.found for f in found)
