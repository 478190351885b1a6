"""`plait doctor`: what of this machine, its settings and its caches costs speed or does not work.

    plait doctor            a line for each thing that was looked at
    plait doctor --json     the same as data
    plait doctor --triton   looks at Triton where there is no GPU too

A check is a function of `CHECKS`: it gets a `Machine`, whose files and variables tests replace, and
tells findings. One that raises is told as broken, and the others go on. Nothing is changed. The
exit status is 1 if something is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from plait import config
from plait.config import Config
from plait.errors import ToolchainError, UserError
from plait.runtime.process import run
from plait.runtime.store import in_scratch
from plait.runtime.toolchain import ISAS, check_isa, detect_isa, find_toolchain
from plait.runtime.trust import Untrusted
from plait.tools.cache import fault_of, stores

OK, SLOW, BROKEN = "ok", "costs speed", "broken"
TORCH = ((2, 11), (2, 14))
"""The versions of torch that plait works with: from the first, below the second."""
TRITON = (3, 6)
"""The first version of Triton that plait works with."""
CAPABILITY = (8, 0)
"""Of the oldest GPUs of NVIDIA's that plait has kernels for."""
READ_NBYTES = 256 << 20
"""So much of the caches is read, what was used last first."""
FREE_NBYTES = 1 << 30
"""Less memory or disk than that makes compiles fail sooner or later."""


@dataclass(frozen=True)
class Finding:
    """A line. what: was looked at. found: what there is. state: OK, SLOW or BROKEN. do: what would
    help, or ""."""

    what: str
    found: str
    state: str = OK
    do: str = ""


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Machine:
    """What checks look at. root: of its files. environ: variables. triton: whether Triton is looked
    at where there is no GPU."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    triton: bool = False

    @property
    def cfg(self) -> Config:
        """What the variables say that plait knows; the usual, where one of them says nothing."""
        found = {r.env: self.environ[r.env] for r in config.flags() if r.env in self.environ}
        with suppress(UserError):
            return Config.from_env(found)
        return Config()

    def read(self, path: str) -> str:
        """A file below the root, without blanks around; "" where there is none."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """That a file holds; None where there is none, or a word such as `max`."""
        text = self.read(path)
        return int(text) if text.lstrip("-").isdecimal() else None


# ------------------------------------------------------------------------------------ versions
def python_and_torch(_: Machine) -> Findings:
    """Whether this torch is one that plait works with, and the extension module loads beside it."""
    version = torch.__version__
    low, high = (".".join(map(str, v)) for v in TORCH)
    found = f"torch {version}, Python {sys.version.split()[0]}"
    if not TORCH[0] <= _numbers(version) < TORCH[1]:
        yield Finding("torch", found, BROKEN, f"install torch from {low} on, below {high}")
    else:
        yield Finding("torch", found)
    try:
        from plait import _native
    except ImportError as error:
        yield Finding("extension", str(error), BROKEN, "install plait again, for this torch")
    else:
        yield Finding("extension", f"{Path(str(_native.__file__)).name} loads")


def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(int("".join(c for c in p if c.isdigit()) or 0) for p in version.split(".")[:2])


SOURCE = (
    'extern "C" void plait_doctor(float* x, long n) { for (long i = 0; i < n; i++) x[i] *= 2; }'
)


def compiler(machine: Machine) -> Findings:
    """The C++ compiler: builds a small kernel, which runs."""
    do = "install g++ (12 is best) or clang++, or name one with PLAIT_CXX"
    try:
        tools = find_toolchain(machine.cfg)
    except ToolchainError as error:
        yield Finding("C++ compiler", error.line, BROKEN, do)
        return
    numbers = (ctypes.c_float * 3)(1, 2, 3)

    def build(folder: Path) -> float:
        with tempfile.TemporaryDirectory(prefix="plait-doctor-", dir=folder) as own:
            path = Path(own, "kernel.so")
            start = time.perf_counter()
            tools.compile(SOURCE, path, ("plait_doctor",))
            seconds = time.perf_counter() - start
            ctypes.CDLL(str(path)).plait_doctor(numbers, ctypes.c_long(3))
        return seconds

    try:
        seconds = in_scratch(build)
    except (ToolchainError, OSError) as error:
        said = error.line if isinstance(error, ToolchainError) else str(error)
        yield Finding("C++ compiler", f"{tools.compiler}: {said}", BROKEN, do)
        return
    if list(numbers) != [2, 4, 6]:
        yield Finding("C++ compiler", f"{tools.compiler}: a kernel computes wrongly", BROKEN, do)
    elif seconds > 2.0:
        do = "is the folder for temporary files on a network? TMPDIR names another"
        yield Finding("C++ compiler", f"{tools.version}: {seconds:.1f} s a kernel", SLOW, do)
    else:
        yield Finding("C++ compiler", f"{tools.version}: a kernel in {seconds:.2f} s, which runs")


# ------------------------------------------------------------------------------------ processor
def vectors(machine: Machine) -> Findings:
    """The vector instructions of kernels, against those that there are."""
    cpuinfo, wanted = str(machine.root / "proc/cpuinfo"), machine.cfg.isa
    used, best = detect_isa(wanted, cpuinfo), detect_isa("auto", cpuinfo)
    try:
        check_isa(machine.cfg, cpuinfo)
    except UserError as error:
        yield Finding("vectors", error.line, BROKEN, "unset PLAIT_ISA")
        return
    widths = list(ISAS)
    if widths.index(used.name) > widths.index(best.name):
        found = f"{used.name} is used, though there is {best.name}"
        yield Finding("vectors", found, SLOW, "unset PLAIT_ISA")
    elif best.name == "portable":
        yield Finding("vectors", "no AVX2", SLOW, "a machine from 2013 on has it")
    else:
        yield Finding("vectors", f"{used.name}, the widest here")


def _cpus(machine: Machine) -> tuple[int, float | None]:
    """The processors that this process may run on, and how many of them its control group may use
    at a time, None for all."""
    quota = None
    words = machine.read("sys/fs/cgroup/cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        quota = int(words[0]) / int(words[1])
    old, period = (machine.number(f"sys/fs/cgroup/cpu/cpu.cfs_{n}_us") for n in ("quota", "period"))
    if old is not None and period and old > 0:
        quota = old / period
    return len(os.sched_getaffinity(0)), quota


def threads(machine: Machine) -> Findings:
    """Threads against the processors that this process has."""
    n, (cpus, quota) = torch.get_num_threads(), _cpus(machine)
    limit = cpus if quota is None else min(cpus, quota)
    named = machine.environ.get("OMP_NUM_THREADS", "")
    local = machine.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(local) if local.isdecimal() else 1
    found = f"{n} threads on {cpus} processors"
    if quota is not None:
        found += f", of which the container may use {quota:g}"
    if named:
        found += f", OMP_NUM_THREADS={named}"
    if n > limit:
        good = f"OMP_NUM_THREADS={max(1, int(limit))}"
        yield Finding("threads", found, SLOW, f"{good}: threads that wait for each other's turn")
    elif ranks > 1 and n * ranks > limit:
        good = f"OMP_NUM_THREADS={max(1, int(limit // ranks))}"
        yield Finding("threads", f"{ranks} ranks here, each with {found}", SLOW, good)
    elif named.isdecimal() and ranks == 1 and 2 * n < limit:
        yield Finding("threads", found, SLOW, "unset OMP_NUM_THREADS, unless others need the rest")
    else:
        yield Finding("threads", found)


def clock(machine: Machine) -> Findings:
    """The clock's governor, and whether it may go up."""
    base = "sys/devices/system/cpu"
    governor = machine.read(f"{base}/cpu0/cpufreq/scaling_governor")
    driver = machine.read(f"{base}/cpu0/cpufreq/scaling_driver")
    turbo_off = machine.number(f"{base}/intel_pstate/no_turbo") == 1
    turbo_off = turbo_off or machine.number(f"{base}/cpufreq/boost") == 0
    if not governor and not turbo_off:
        yield Finding("clock", "the machine does not show it")
        return
    found = f"governor {governor or '?'}" + (f" ({driver})" if driver else "")
    by_itself = driver.startswith(("intel_pstate", "amd-pstate-epp", "amd_pstate_epp"))
    if governor in ("powersave", "conservative") and not by_itself:
        yield Finding("clock", found, SLOW, "cpupower frequency-set -g performance")
    elif turbo_off:
        do = f"echo 0 > /{base}/intel_pstate/no_turbo, or 1 > /{base}/cpufreq/boost"
        yield Finding("clock", f"{found}, turbo is off", SLOW, do)
    else:
        yield Finding("clock", found)


def memory(machine: Machine) -> Findings:
    """Large pages, and the memory that a container leaves."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    huge = next((w[1:-1] for w in machine.read(path).split() if w.startswith("[")), "")
    if huge == "never":
        yield Finding("large pages", huge, SLOW, f"echo madvise > /{path}")
    else:
        yield Finding("large pages", huge or "the machine does not show them")
    rows = (line.split() for line in machine.read("proc/meminfo").splitlines())
    free = next((int(w[1]) << 10 for w in rows if w[0] == "MemAvailable:"), None)
    limit, used = (machine.number(f"sys/fs/cgroup/memory.{n}") for n in ("max", "current"))
    found = f"{_gib(free)} free" if free is not None else "the machine does not show it"
    if limit is not None:
        left = limit - (used or 0)
        found += f"; the container may have {_gib(limit)}, of which {_gib(left)} are left"
        free = left if free is None else min(free, left)
    if free is not None and free < FREE_NBYTES:
        do = "compilers that are killed leave operators to PyTorch: free some, or raise the limit"
        yield Finding("memory", found, SLOW, do)
    else:
        yield Finding("memory", found)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def numbers(_: Machine) -> Findings:
    """How torch computes: what it does with tiny numbers, and products in float32."""
    tiny = float(torch.tensor([1e-40]).mul(0.5)) != 0.0
    kept = "are kept, as eager keeps them" if tiny else "count as zero (set_flush_denormal)"
    yield Finding("denormals", f"numbers below 1e-38 {kept}")
    precision = torch.get_float32_matmul_precision()
    found = f"products of float32: {precision!r}"
    if torch.cuda.is_available():
        found += f", convolutions by TF32: {torch.backends.cudnn.allow_tf32}"
        if precision == "highest":
            do = "if 3 digits are enough: torch.set_float32_matmul_precision('high')"
            yield Finding("precision", found, do=do)
            return
    yield Finding("precision", found)


# ------------------------------------------------------------------------------------ GPUs
def gpus(machine: Machine) -> Findings:
    """The driver and the devices, and whether this torch has code for them."""
    driver = machine.read("proc/driver/nvidia/version").partition("\n")[0]
    there = bool(driver) or (machine.root / "dev/nvidia0").exists()
    if not torch.cuda.is_available():
        if there and torch.version.cuda is None:
            do = "install a torch that is built for CUDA"
            yield Finding("GPU", "one is there, but this torch is built for CPUs", SLOW, do)
        elif there:
            do = "nvidia-smi says more; is CUDA_VISIBLE_DEVICES empty, or the driver too old?"
            yield Finding("GPU", f"torch finds none, though there is a driver: {driver}", SLOW, do)
        else:
            yield Finding("GPU", "none")
        return
    for k in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(k)
        found = f"{facts.name}, sm_{facts.major}{facts.minor}, {_gib(facts.total_memory)}"
        if torch.version.hip is None and (facts.major, facts.minor) < CAPABILITY:
            do = "plait has kernels for sm_80 and newer: ask for device='cpu', or eager"
            yield Finding(f"GPU {k}", found, BROKEN, do)
        else:
            yield Finding(f"GPU {k}", found)
    yield from _gpu_clocks(machine)


_QUERY = ("index", "persistence_mode", "clocks_throttle_reasons.hw_slowdown",
          "clocks_throttle_reasons.sw_thermal_slowdown")  # fmt: skip


def _gpu_clocks(machine: Machine) -> Findings:
    """What nvidia-smi says of clocks, where it is there and answers."""
    command = shutil.which("nvidia-smi", path=machine.environ.get("PATH", ""))
    if command is None:
        return
    done = run([command, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"], 10.0)
    for line in done.output.splitlines() if done.code == 0 else ():
        index, persistent, *slow = (word.strip() for word in line.split(","))
        if "Active" in slow:
            do = "it is too hot, or has too little power: cool it, or wait"
            yield Finding(f"GPU {index}'s clock", "slowed down", SLOW, do)
        elif persistent == "Disabled":
            do = "nvidia-smi -pm 1: the first use in a process takes seconds without"
            yield Finding(f"GPU {index}'s clock", "persistence mode is off", SLOW, do)
        else:
            yield Finding(f"GPU {index}'s clock", "not slowed down, persistence mode is on")


def triton(machine: Machine) -> Findings:
    """Triton, where kernels of a GPU need it or somebody asks."""
    if not (torch.cuda.is_available() or machine.triton):
        return
    do = f"install triton {'.'.join(map(str, TRITON))} or newer"
    try:
        version = metadata.version("triton")
        __import__("triton")
    except (metadata.PackageNotFoundError, ImportError) as error:
        yield Finding("Triton", f"it does not import: {error}", BROKEN, do)
        return
    old = _numbers(version) < TRITON
    yield Finding("Triton", version, BROKEN if old else OK, do if old else "")


# ------------------------------------------------------------------------------------ settings
_COSTLY: Mapping[str, Callable[[Any], bool]] = {
    "debug": lambda v: v > 0,
    "debug_dir": bool,
    "report_to": bool,
    "verify": bool,
    "nan_asserts": bool,
    "finite_asserts": bool,
    "kernels": lambda v: not v,
    "fusion": lambda v: not v,
    "memory_planning": lambda v: not v,
    "opt_level": lambda v: v < Config.opt_level,
    "wrapper": lambda v: v != "native",
}
"""Options and the values with which they cost speed."""


def variables(machine: Machine) -> Findings:
    """Variables that plait reads, and those that look so."""
    rows = {row.env: row for row in config.flags()}
    named = sorted(name for name in machine.environ if name.startswith("PLAIT_"))
    for name in named:
        text = machine.environ[name]
        found = f"{name}={text}"
        if name not in rows:
            yield Finding(
                "variable", found, BROKEN, "plait reads no such variable: is it spelled so?"
            )
            continue
        try:
            value = rows[name].parse(text) if text else rows[name].default
        except UserError as error:
            yield Finding("variable", error.line, BROKEN, f"unset {name}")
            continue
        if _COSTLY.get(rows[name].name, lambda _: False)(value):
            yield Finding("variable", found, SLOW, f"unset {name}: {rows[name].doc}")
        else:
            yield Finding("variable", found)
    if not named:
        yield Finding("variables", "none that plait reads is set")


_OFF = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def dynamo(machine: Machine) -> Findings:
    """Whether torch.compile compiles, and how often one function."""
    off = [name for name in _OFF if machine.environ.get(name, "") == "1"]
    if off:
        yield Finding(
            "torch.compile", f"{off[0]}=1: nothing is compiled", BROKEN, f"unset {off[0]}"
        )
        return
    import torch._dynamo.config as settings

    limit = settings.recompile_limit
    found = f"up to {limit} times a function (torch._dynamo.config.recompile_limit)"
    if limit < 8:
        do = "8 is usual: calls of other kinds than the first ones run by eager"
        yield Finding("torch.compile", found, SLOW, do)
    else:
        yield Finding("torch.compile", found)


# ------------------------------------------------------------------------------------ caches
def caches(machine: Machine) -> Findings:
    """The folder of caches: whose it is, its size and room, and whether its entries are whole."""
    cfg = machine.cfg
    folder = Path(cfg.cache_dir).expanduser()
    try:
        found = stores(cfg)
    except Untrusted as error:
        do = f"others could change what you run, so nothing in it is: chmod go-w {folder}"
        yield Finding("caches", str(error.strerror), BROKEN, do)
        return
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        do = "each process compiles anew: name another folder with PLAIT_CACHE_DIR"
        yield Finding("caches", f"{there} cannot be written", SLOW, do)
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        do = "kernels do not load from it: name another folder with PLAIT_CACHE_DIR"
        yield Finding("caches", f"nothing in {there} may be executed", SLOW, do)
    free = shutil.disk_usage(there).free
    files = {kind: store.files() for kind, store in found.items()}
    nbytes = {kind: sum(f.nbytes for f in listed) for kind, listed in files.items()}
    n = sum(map(len, files.values()))
    said = f"{n} files, {sum(nbytes.values()) / 2**20:.0f} MiB in {folder}, {_gib(free)} free"
    full = [kind.name for kind, size in nbytes.items() if size > 0.95 * (cfg.cache_mb << 20)]
    if free < FREE_NBYTES:
        yield Finding("caches", said, SLOW, "make room: plait cache prune --older-than 30d")
    elif full:
        do = f"what was used longest ago goes: PLAIT_CACHE_MB={2 * cfg.cache_mb} keeps it"
        yield Finding("caches", f"{said}; as large as they may be: {', '.join(full)}", SLOW, do)
    else:
        yield Finding("caches", said)
    pairs = [(store, f) for kind, store in found.items() for f in files[kind] if f.is_entry]
    pairs.sort(key=lambda pair: -pair[1].used)
    sizes = accumulate(f.nbytes for _, f in pairs)
    read = [pair for pair, size in zip(pairs, sizes, strict=True) if size <= READ_NBYTES]
    bad = [why for why in (fault_of(store, file) for store, file in read) if why]
    looked = f"{len(read)} of {len(pairs)} entries were read"
    if bad:
        do = "plait cache verify --remove"
        yield Finding("entries", f"{looked}, {len(bad)} are bad ({bad[0]})", BROKEN, do)
    elif pairs:
        yield Finding("entries", f"{looked}, all are whole")


def warm_starts(machine: Machine) -> Findings:
    """Whether compiles are kept for the next process."""
    cfg = machine.cfg
    if not cfg.warm_start:
        do = "unset PLAIT_WARM_START: each process traces anew"
        yield Finding("warm starts", "off", SLOW, do)
    elif cfg.wrapper != "native" or cfg.debug_dir or cfg.debug > 1:
        do = "they need the native wrapper and PLAIT_DEBUG of at most 1"
        yield Finding("warm starts", "off, for another variable", SLOW, do)
    else:
        yield Finding("warm starts", "on")


# ------------------------------------------------------------------------------------ all of them
CHECKS: Sequence[Callable[[Machine], Findings]] = (
    python_and_torch, compiler, vectors, threads, clock, memory, numbers, gpus, triton, dynamo,
    variables, caches, warm_starts,
)  # fmt: skip


def examine(
    machine: Machine, checks: Sequence[Callable[[Machine], Findings]] = CHECKS
) -> list[Finding]:
    """What the checks find, in their order."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(machine)
        except Exception as error:  # noqa: BLE001 - the others are to be heard
            said = f"the check itself fails: {type(error).__name__}: {error}"
            found.append(
                Finding(check.__name__.replace("_", " "), said, BROKEN, "please report it")
            )
    return found


def text(found: Sequence[Finding]) -> str:
    """A line for each, and what to do under those that need it."""
    lines = []
    for f in found:
        lines.append(f"{f.state:11}  {f.what:14}  {f.found}")
        if f.do:
            lines.append(f"{'':29}-> {f.do}")
    return "\n".join([*lines, summary(found)])


def summary(found: Sequence[Finding]) -> str:
    """The last line."""
    n = {state: sum(f.state == state for f in found) for state in (OK, SLOW, BROKEN)}
    return f"{n[OK]} ok, {n[SLOW]} cost speed, {n[BROKEN]} broken"


def _show(found: Sequence[Finding]) -> None:
    """The same as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {OK: "green", SLOW: "yellow", BROKEN: "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for f in found:
        told = Text(f.found)
        if f.do:
            told.append(f"\n-> {f.do}", styles[f.state])
        table.add_row(Text(f.state, styles[f.state]), Text(f.what), told)
    out = Console(highlight=False)
    out.print(table)
    out.print(summary(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="plait doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="as data")
    parser.add_argument("--triton", action="store_true", help="look at Triton without a GPU too")
    given = parser.parse_args(arguments)
    found = examine(Machine(triton=given.triton))
    if given.json:
        print(json.dumps([asdict(f) for f in found], indent=2))
    elif sys.stdout.isatty():
        _show(found)
    else:
        print(text(found))
    if any(f.state == BROKEN for f in found):
        sys.exit(1)
