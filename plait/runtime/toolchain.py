"""The machine's C++ compiler and vector instructions, and the way from kernel source to a shared object.

`find_toolchain(cfg)` looks once; `Toolchain.compile(source, path)` writes a library that needs nothing but libc. Raises
ToolchainMissing where no compiler works, which becomes one warning and a fallback, and ToolchainError where it refuses
a source. Whether a compiler works is asked when a kernel fails, as that takes as long as building one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from plait.config import Config
from plait.errors import ToolchainError, UserError


class ToolchainMissing(ToolchainError):
    """No C++ compiler that works was found on this machine."""


@dataclass(frozen=True)
class Isa:
    """A set of vector instructions. lanes: of a vector of 32-bit elements. flags: for the compiler. sleef: whose SLEEF
    functions it calls ('' for none). cpu: flags that /proc/cpuinfo must show. libraries: linked last."""

    name: str
    lanes: int
    flags: tuple[str, ...]
    sleef: str
    cpu: frozenset[str] = field(default=frozenset())
    libraries: tuple[str, ...] = ()

    def lanes_of(self, nbytes: int) -> int:
        """Lanes of one register of a value with elements of that size: 64-bit values take two registers."""
        return self.lanes // 2 if nbytes == 8 else self.lanes


ISAS: dict[str, Isa] = {
    i.name: i
    for i in (
        Isa(
            "avx512", 16,
            ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
            "avx512", frozenset(("avx512f", "avx512dq", "avx512bw", "avx512vl", "fma", "f16c")),
        ),
        Isa("avx2", 8, ("-mavx2", "-mfma", "-mf16c"), "avx2", frozenset(("avx2", "fma", "f16c"))),
        Isa("portable", 4, (), "", libraries=("-lm",)),  # rounding is a call of libm before SSE4.1
    )
}  # fmt: skip

BASE_FLAGS = (
    "-std=c++17", "-shared", "-fPIC", "-pipe", "-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fwrapv", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti", "-nostdlib",
)  # fmt: skip

# What of -O2 makes kernels faster: as fast as all of it, in four fifths of its time.
_GCC_LEVEL_2 = ("-O1", "-fgcse", "-fpeephole2", "-frerun-cse-after-loop", "-fschedule-insns2")


@dataclass(frozen=True)
class Toolchain:
    """A C++ compiler. compiler: the command, quoted as for a shell. version: its first line of --version. isa: what it
    compiles for."""

    compiler: str
    version: str
    isa: Isa
    opt_level: int

    @property
    def flags(self) -> tuple[str, ...]:
        """Everything on the command line except files."""
        level: tuple[str, ...] = (f"-O{self.opt_level}",)
        if self.opt_level == 2 and "clang" not in self.version:
            level = _GCC_LEVEL_2
        return (*level, *BASE_FLAGS, *self.isa.flags)

    def compile(self, source: str, path: Path) -> None:
        """Writes the shared object of a source at path, whose folder it may use.

        Raises ToolchainError with the compiler's own words, ToolchainMissing (and is not found again) if it refuses
        every source, OSError if the folder is full.
        """
        refusal = self._refusal(source, path)
        if refusal is None:
            return
        path.with_suffix(".cpp").write_bytes(bytes(1 << 20))  # is there room at all?
        general = self._refusal('extern "C" int plait_probe() { return 0; }', path)
        if general is not None:
            _broken[self.compiler] = f"{self.compiler} cannot compile: {(general.splitlines() or ['no output'])[0]}"
            _find.cache_clear()
            raise ToolchainMissing(_broken[self.compiler])
        path.unlink()
        first = "\n".join(refusal.splitlines()[:20])
        raise ToolchainError(
            f"{self.compiler} refused a kernel:\n{first}",
            hint="PLAIT_DEBUG=4 writes the source; PLAIT_CXX chooses another compiler",
        )

    def _refusal(self, source: str, path: Path) -> str | None:
        """What the compiler says, if it writes no library at path."""
        cpp = path.with_suffix(".cpp")
        cpp.write_text(source)
        command = [*shlex.split(self.compiler), *self.flags, str(cpp), *self.isa.libraries, "-o", str(path)]
        env = {**os.environ, "TMPDIR": str(path.parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        return None if done.returncode == 0 and path.is_file() else done.stderr


_broken: dict[str, str] = {}
"""Compilers that answered and then refused every source, with what they said."""


def detect_isa(wanted: str = "auto", cpuinfo: str = "/proc/cpuinfo") -> Isa:
    """The widest instructions that this machine has, or those asked for, which it may lack."""
    if wanted != "auto":
        return ISAS[wanted]
    have = _cpu_flags(cpuinfo)
    return next(i for i in ISAS.values() if i.cpu <= have)


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
    return _find(cfg.cpp_compiler, os.environ.get("CXX", ""), os.environ.get("PATH", ""), cfg.isa, cfg.opt_level)


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
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        except OSError:  # no program, though it may be executed
            continue
        if done.returncode == 0:
            return Toolchain(compiler, done.stdout.partition("\n")[0], detect_isa(isa), opt_level)
    raise ToolchainMissing(
        f"no C++ compiler found (tried {'; '.join([', '.join(tried), *broken])})",
        hint="install g++ or clang++, or name one with PLAIT_CXX",
    )


def _command(name: str, path: str) -> list[str] | None:
    """The words of a command such as "ccache g++", the first with its folder; None if there is no such program."""
    try:
        words = [name] if shutil.which(name, path=path) else shlex.split(name)
    except ValueError:  # an open quote
        return None
    found = shutil.which(words[0], path=path) if words else None
    return [found, *words[1:]] if found else None
