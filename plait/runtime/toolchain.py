"""The machine's C++ compiler and vector instructions, and the way from kernel source to a shared
object.

`find_toolchain(cfg)` looks once; `Toolchain.compile(source, path)` writes a library that needs
nothing but libc. Raises ToolchainMissing where no compiler works, which becomes one warning and a
fallback, and ToolchainError where it refuses a source. Whether a compiler works is asked when a
kernel fails, as that takes as long as building one.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from plait.config import Config
from plait.errors import ToolchainError, UserError
from plait.runtime.process import run, run_all

# Far above what a build takes (0.02 to 0.4 s): chosen, not measured.
MAX_SECONDS = 300.0
PROBE_SECONDS = 30.0
"""How long a compiler may take for next to nothing, on a machine that has other things to do."""


class ToolchainMissing(ToolchainError):
    """No C++ compiler that works was found on this machine."""


class ToolchainFailed(ToolchainMissing):
    """A compiler that works did not come to an end with one source: for these kernels there is
    none."""


@dataclass(frozen=True)
class Isa:
    """A set of vector instructions. lanes: of a vector of 32-bit elements. flags: for the compiler.
    sleef: whose SLEEF functions it calls ('' for none). cpu: flags that /proc/cpuinfo must show.
    libraries: linked last. by_row: kernels give a row the same bits however many rows there are.
    bf16_pairs: this machine has an instruction that multiplies pairs of bfloat16 numbers and adds
    them up in float32; no machine has it that is asked for by name, where others may run."""

    name: str
    lanes: int
    flags: tuple[str, ...]
    sleef: str
    cpu: frozenset[str] = field(default=frozenset())
    libraries: tuple[str, ...] = ()
    by_row: bool = False
    bf16_pairs: bool = False

    @property
    def full_name(self) -> str:
        """With what of it not every machine has: programs of different ones may differ."""
        return f"{self.name}+bf16" if self.bf16_pairs else self.name

    def lanes_of(self, nbytes: int) -> int:
        """Lanes of one register of a value with elements of that size: 64-bit values take two
        registers."""
        return self.lanes // 2 if nbytes == 8 else self.lanes


ISAS: dict[str, Isa] = {
    i.name: i
    for i in (
        Isa(
            "avx512",
            16,
            (
                "-mavx512f",
                "-mavx512dq",
                "-mavx512bw",
                "-mavx512vl",
                "-mfma",
                "-mf16c",
                "-mprefer-vector-width=512",
            ),
            "avx512",
            frozenset(("avx512f", "avx512dq", "avx512bw", "avx512vl", "fma", "f16c")),
        ),
        Isa("avx2", 8, ("-mavx2", "-mfma", "-mf16c"), "avx2", frozenset(("avx2", "fma", "f16c"))),
        Isa("portable", 4, (), "", libraries=("-lm",)),  # rounding is a call of libm before SSE4.1
    )
}

NEXT_UNIT = "// The next translation unit\n"
"""Stands between the units of a source, which are compiled side by side."""
SHARED = "// The same for all libraries\n"
"""Begins a unit whose object is kept by itself."""
BASE_FLAGS = (
    "-std=c++17", "-shared", "-fPIC", "-pipe", "-w", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti",
    "-nostdlib",
)  # fmt: skip

# Choosing counters for a loop takes time with the cube of its addresses, which kernels have chosen
# already: 47 s for one that reads and writes at 1,500 places, 0.06 s without. Other loops are few
# that come near the bound.
_GCC = ("--param=iv-max-considered-uses=64",)

# What of -O2 makes kernels faster: as fast as all of it, in four fifths of its time.
_GCC_LEVEL_2 = ("-O1", "-fgcse", "-fpeephole2", "-frerun-cse-after-loop", "-fschedule-insns2")


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler. compiler: the command, quoted as for a shell. version: its first line of
    --version. isa: what it compiles for."""

    compiler: str
    version: str
    isa: Isa
    opt_level: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Everything on the command line except files."""
        level: tuple[str, ...] = (f"-O{self.opt_level}",)
        if "clang" not in self.version:
            level = (*(_GCC_LEVEL_2 if self.opt_level == 2 else level), *_GCC)
        return (*level, *BASE_FLAGS, *self.isa.flags)

    def compile(
        self,
        source: str,
        path: Path,
        symbols: Collection[str] = (),
        seconds: float = MAX_SECONDS,
        objects: Sequence[bytes] = (),
    ) -> None:
        """Writes the shared object of a source at path, whose folder it may use, or one of a
        single unit that is to be linked where path ends in .o. symbols: what must be in it.
        seconds: how long the compiler may take. objects: of other units.

        Raises ToolchainError with the compiler's own words; ToolchainMissing (and is not found
        again) if it fails for every source; ToolchainFailed if it works, but not for this one, and
        does not say why; OSError if the folder is full.
        """
        failure = self._attempt(source, path, symbols, seconds, objects)
        if failure is not None and failure.again:
            failure = self._attempt(source, path, symbols, seconds, objects)
        if failure is None:
            return
        path.with_suffix(".cpp").write_bytes(bytes(1 << 20))  # is there room at all?
        probe = 'extern "C" int plait_probe() { return 0; }'
        general = self._attempt(probe, path, ("plait_probe",), min(seconds, PROBE_SECONDS))
        if general is not None:
            first = (general.said.splitlines() or ["no output"])[0]
            _broken[self.compiler] = f"{self.compiler} cannot compile: {first}"
            _find.cache_clear()
            raise ToolchainMissing(_broken[self.compiler])
        path.unlink()
        if not failure.refused:
            raise ToolchainFailed(f"{self.compiler} made no library of a kernel: {failure.said}")
        first = "\n".join(failure.said.splitlines()[:20])
        raise ToolchainError(
            f"{self.compiler} refused a kernel:\n{first}",
            hint="PLAIT_DEBUG=4 writes the source; PLAIT_CXX chooses another compiler",
        )

    def _attempt(
        self,
        source: str,
        path: Path,
        symbols: Collection[str],
        seconds: float,
        objects: Sequence[bytes] = (),
    ) -> _Failure | None:
        """Why there is no library at path, or None."""
        path.unlink(missing_ok=True)
        command = [*shlex.split(self.compiler), *self.flags]
        env = {**os.environ, "TMPDIR": str(path.parent)}
        made = []
        for k, data in enumerate(objects):
            made.append(str(path.with_suffix(f".given{k}.o")))
            Path(made[-1]).write_bytes(data)
        files = []
        for k, unit in enumerate(source.split(NEXT_UNIT)):
            files.append(str(path.with_suffix(f".{k}.cpp")))
            Path(files[-1]).write_text(unit)
        whole = path.suffix != ".o"
        ends = [*made, *self.isa.libraries] if whole else ["-c"]
        if len(files) == 1:
            done = run([*command, *files, *ends, "-o", str(path)], seconds, env)
        else:
            parts = [f"{file}.o" for file in files]
            jobs = [[*command, "-c", f, "-o", o] for f, o in zip(files, parts, strict=True)]
            failed = (one for one in run_all(jobs, seconds, env) if one.code != 0)
            link = [*command, *parts, *ends, "-o", str(path)]
            done = next(failed, None) or run(link, seconds, env)
        if done.code is None:
            return _Failure(f"it took longer than {seconds:g} s (PLAIT_COMPILER_SECONDS)")
        if done.killed:
            return _Failure(f"it was killed (status {done.code})", again=True)
        if done.code != 0:
            return _Failure(done.errors, refused=True)
        flaw = "" if path.is_file() else "there is none"
        if whole and not flaw:
            flaw = flaw_of(str(path), symbols)
        return _Failure(f"what it wrote does not load: {flaw}", again=True) if flaw else None


@dataclass(frozen=True)
class _Failure:
    """Of a compiler. again: it may go better another time. refused: those are its own words."""

    said: str
    again: bool = False
    refused: bool = False


def flaw_of(library: str, symbols: Collection[str]) -> str:
    """Why a file is no library with these symbols, or ""."""
    try:
        opened = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    try:
        missing = [s for s in symbols if not hasattr(opened, s)]
    finally:
        _ctypes.dlclose(opened._handle)
    return f"it lacks {', '.join(missing)}" if missing else ""


_broken: dict[str, str] = {}
"""Compilers that answered and then failed for every source, with what they said."""


def detect_isa(wanted: str = "auto", cpuinfo: str = "/proc/cpuinfo") -> Isa:
    """The widest instructions that this machine has, or those asked for, which it may lack."""
    if wanted != "auto":
        return ISAS[wanted]
    have = _cpu_flags(cpuinfo)
    widest = next(i for i in ISAS.values() if i.cpu <= have)
    pairs = widest.name == "avx512" and "avx512_bf16" in have
    return replace(widest, bf16_pairs=True) if pairs else widest


def isa_of(full_name: str) -> str:
    """What to ask for to have the instructions of a machine that gave them this name: of another
    machine those that all have."""
    if full_name in ISAS:
        return full_name
    return "auto" if detect_isa().full_name == full_name else full_name.partition("+")[0]


def check_isa(cfg: Config, cpuinfo: str = "/proc/cpuinfo") -> None:
    """Raises UserError if the instructions that cfg names are none of this machine's."""
    missing = set() if cfg.isa == "auto" else ISAS[cfg.isa].cpu - _cpu_flags(cpuinfo)
    if missing:
        raise UserError(f"this machine has no {', '.join(sorted(missing))}", hint="isa='auto'")


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    try:
        text = Path(cpuinfo).read_text()
    except OSError:
        return frozenset()
    line = next((t for t in text.splitlines() if t.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def find_toolchain(cfg: Config) -> Toolchain:
    """The compiler that cfg names, else $CXX, c++, g++, clang++: the first that works.

    Each may have arguments. Raises ToolchainMissing."""
    return _find(
        cfg.cpp_compiler,
        os.environ.get("CXX", ""),
        os.environ.get("PATH", ""),
        cfg.isa,
        cfg.opt_level,
    )


@lru_cache(maxsize=8)
def _find(named: str, cxx: str, path: str, isa: str, opt_level: int) -> Toolchain:
    tried = [named] if named else [c for c in (cxx, "c++", "g++", "clang++") if c]
    broken = []
    for name in tried:
        command = _command(name, path)
        if command is None:
            continue
        compiler = shlex.join(command)
        if compiler in _broken:
            broken.append(_broken[compiler])
            continue
        try:
            done = run([*command, "--version"], PROBE_SECONDS)
        except OSError:  # no program, though it may be executed
            continue
        if done.code == 0:
            return Toolchain(compiler, done.output.partition("\n")[0], detect_isa(isa), opt_level)
    raise ToolchainMissing(
        f"no C++ compiler found (tried {'; '.join([', '.join(tried), *broken])})",
        hint="install g++ or clang++, or name one with PLAIT_CXX",
    )


def _command(name: str, path: str) -> list[str] | None:
    """The words of a command such as "ccache g++", the first with its folder; None if there is no
    such program."""
    try:
        words = [name] if shutil.which(name, path=path) else shlex.split(name)
    except ValueError:  # an open quote
        return None
    found = shutil.which(words[0], path=path) if words else None
    return [found, *words[1:]] if found else None
