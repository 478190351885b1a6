"""The configuration of one compilation: one frozen dataclass, one row a flag.

A row holds type, default, environment name, documentation and whether the flag is part of cache
keys; options, environment, docs and keys are all derived from the rows. Values come from the
environment first and then from `options={...}` and `mode=...` of torch.compile. Nothing else in
plait reads the environment for settings.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.errors import UserError, warn_once

WRAPPERS = {
    "native": "plait.wrapper.native",
    "python": "plait.wrapper.python",
    "cpp": "plait.wrapper.cpp",
    "fx": "plait.wrapper.fx",
}
"""The wrapper targets: the module of each, whose `load_program` makes a program run."""

EXTENDED: list[str] = []
"""What code from outside the tree has registered through `extend.py`."""


def flag(
    default: Any, *, doc: str, env: str = "", in_key: bool = True, choices: tuple[Any, ...] = ()
) -> Any:
    """One row of the table. env: environment variable, "" for PLAIT_<NAME>. in_key: the flag
    changes what is built."""
    return dataclasses.field(
        default=default, metadata={"doc": doc, "env": env, "in_key": in_key, "choices": choices}
    )


@dataclass(frozen=True)
class Config:
    """All flags. Build one with `Config.from_env()` and refine it with `with_options`."""

    # -- looking inside
    debug: int = flag(
        0,
        doc=(
            "0 silent, 1 stages and times, 2 kernels, 3 fusion reasons, 4 generated source, 5 IR "
            "after every pass"
        ),
        in_key=False,
        choices=(0, 1, 2, 3, 4, 5),
    )
    debug_dir: str = flag(
        "",
        doc=(
            "folder for one debug folder a graph (%p: the process's number); '' writes none unless "
            "debug >= 4 (then plait_debug)"
        ),
        in_key=False,
    )
    report_to: str = flag(
        "",
        doc="folder that is told of all compiles; `plait report` sets it and makes a page of that",
        in_key=False,
    )
    verify: bool = flag(
        False, doc="check the IR between passes (also on when debug >= 1)", in_key=False
    )
    strict: bool = flag(
        False,
        doc=(
            "raise an error where else an unknown higher-order operator runs as Python, a rule "
            "that has a bug is passed over, a size is specialised, or eager runs"
        ),
        in_key=False,
    )
    # -- where and with what
    cache_dir: str = flag("~/.cache/plait", doc="built kernels live here", in_key=False)
    cache_mb: int = flag(
        512,
        doc="MiB of each kind of what is kept there above which what was used longest ago goes",
        in_key=False,
    )
    cache_remote: str = flag(
        "",
        doc=(
            "URL of an object store that shares built kernels: what it holds is run, so only those "
            "whom you trust may write to it"
        ),
        in_key=False,
    )
    build_once: bool = flag(
        True,
        doc="processes and threads that want the same kernels at once wait for one that builds",
        in_key=False,
    )
    while_building: str = flag(
        "wait",
        doc=(
            "what calls do while torch.compile's kernels are being built, by this process or "
            "another: they wait, or eager runs them"
        ),
        in_key=False,
        choices=("wait", "eager"),
    )
    trust: str = flag(
        "",
        doc=(
            "user ids and folders, ':' between them, whose cached files are loaded beside yours "
            "and root's"
        ),
        in_key=False,
    )
    warm_start: bool = flag(
        True,
        doc=(
            "keep what torch.compile came to, and take it in the next process, without a trace, "
            "where all that the trace relied on is the same"
        ),
        in_key=False,
    )
    wrapper: str = flag(
        "native",
        doc="what runs the program: the native executor, generated Python or C++, or an FX graph",
        choices=tuple(WRAPPERS),
    )
    isa: str = flag(
        "auto",
        doc="vector instructions of CPU kernels",
        choices=("auto", "avx512", "avx2", "portable"),
    )
    gpu_arch: str = flag(
        "auto",
        doc=(
            "what GPU kernels are compiled for: auto (the device at hand) or a name such as "
            "sm_90, ptx_80 or gfx942"
        ),
    )
    cpp_compiler: str = flag(
        "", env="PLAIT_CXX", doc="C++ compiler for kernels; '' finds g++ or clang++"
    )
    compiler_seconds: int = flag(
        300,
        doc="how long a compiler may work on a library or a GPU kernel before it is ended",
        in_key=False,
    )
    opt_level: int = flag(2, doc="-O level for kernels", choices=(0, 1, 2, 3))
    # -- what the compiler does
    kernels: bool = flag(
        True,
        doc="make kernels; False runs every op as a call of ATen, as on a machine without compiler",
    )
    fusion: bool = flag(True, doc="fuse loops")
    max_recompute: int = flag(
        8,
        doc=(
            "arithmetic operations that may be repeated for each extra reader when a producer is "
            "inlined"
        ),
    )
    max_fusion_reads: int = flag(16, doc="buffers that one kernel may read before fusion stops")
    small_matmul_flops: int = flag(
        20480,
        doc=(
            "matrix products of at most this many flops become loops of ours, fused with their "
            "neighbours"
        ),
    )
    cuda_graphs: bool = flag(
        False,
        doc=(
            "record the GPU's work of a program as CUDA graphs at its second call and replay them "
            "from then on"
        ),
    )
    autotune: bool = flag(
        False,
        doc=(
            "measure several versions of each GPU kernel and keep the fastest; what was found is "
            "kept on disk"
        ),
    )
    eager_random: bool = flag(
        False,
        doc=(
            "leave random operators to torch, which draws eager's numbers; they are not fused or "
            "recomputed then"
        ),
    )
    numerics: str = flag(
        "default",
        doc=(
            "how results round: default, as eager rounds every operator, whose sums and functions "
            "may end in other bits; eager, eager's bits; precise, without rounding between "
            "operators of 16 bits that become one kernel"
        ),
        choices=("default", "eager", "precise"),
    )
    batch_invariant: bool = flag(
        False,
        doc=(
            "a row of a batch has the same bits whatever rows are beside it, and however many; "
            "nothing is chosen by how many there are"
        ),
    )
    memory_planning: bool = flag(
        True, doc="place intermediates in a pooled arena and reuse dying buffers"
    )
    without: str = flag(
        "",
        doc=(
            "passes that are left out, ',' between their names, to find which of them is at fault "
            "(plait.bisect does); fuse:3 leaves out what that pass decides after its third decision"
        ),
    )
    # -- what a program checks at every call
    size_asserts: bool = flag(
        False, doc="dtype, sizes and strides of arguments are what was compiled for"
    )
    alignment_asserts: bool = flag(
        False,
        doc=(
            "addresses of arguments and of operators' results are aligned: 16 bytes on a GPU, "
            "else an element"
        ),
    )
    nan_asserts: bool = flag(
        False,
        doc="no argument, intermediate or result holds a NaN; names the kernel that made the first",
    )
    finite_asserts: bool = flag(
        False, doc="nor an infinity, which masks of attention may hold for good reason"
    )

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> Config:
        """The defaults, overridden by the environment, where an empty value is none. Raises
        UserError for a value that does not parse, warns of a name that no flag has."""
        env = os.environ if environ is None else environ
        found: dict[str, Any] = {}
        for row in flags():
            text = env.get(row.env)
            if text:
                found[row.name] = row.parse(text)
        known = [row.env for row in flags()]
        unknown = sorted(name for name in env if name.startswith("PLAIT_") and name not in known)
        if unknown:
            warn_once(
                f"plait knows no environment variable {', '.join(unknown)}: it reads "
                f"{', '.join(known)}"
            )
        return Config(**found).settled() if found else _DEFAULT

    def with_options(
        self, options: Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Config:
        """This configuration with a mode's settings and then the options on top.

        Raises UserError for an unknown mode or option, listing the known ones, and for a value of a
        wrong type.
        """
        changes: dict[str, Any] = {}
        if mode is not None:
            if not isinstance(mode, str) or mode not in MODES:
                raise UserError(f"unknown mode {mode!r}", hint=f"one of {', '.join(MODES)}")
            changes.update(MODES[mode])
        if not isinstance(options or {}, Mapping):
            raise UserError(
                f"options must be a mapping of names to values, got {options!r}",
                hint='{"opt_level": 3}',
            )
        rows = {row.name: row for row in flags()}
        for name, value in (options or {}).items():
            if name not in rows:
                raise UserError(
                    f"unknown option {name!r} for backend 'plait'", hint=f"one of {', '.join(rows)}"
                )
            changes[name] = rows[name].check(value, f"option {name!r}")
        return dataclasses.replace(self, **changes).settled() if changes else self

    def settled(self) -> Config:
        """This configuration without what another flag forbids: what is measured depends on how
        many rows there are. Raises UserError for flags that contradict each other."""
        if not self.batch_invariant:
            return self
        if self.numerics != "default":
            raise UserError(
                f"options 'batch_invariant' and 'numerics' = {self.numerics!r}",
                hint="one of the two: eager's own bits, and where 'precise' rounds, depend on how "
                "many rows there are",
            )
        return dataclasses.replace(self, autotune=False)

    @property
    def keeps_bits(self) -> bool:
        """Whether results have eager's bits."""
        return self.numerics == "eager"

    @property
    def draws_as_eager(self) -> bool:
        """Whether torch draws the random numbers."""
        return self.eager_random or self.keeps_bits

    @property
    def verifies(self) -> bool:
        """Whether the IR is checked between passes."""
        return self.verify or self.debug >= 1

    def key(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of every flag that changes what is built, in order of declaration."""
        return tuple((row.name, getattr(self, row.name)) for row in flags() if row.in_key)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {
        "cuda_graphs": True
    },  # on a CPU the default wrapper has no overhead left to reduce
    "max-autotune": {"cuda_graphs": True, "opt_level": 3, "autotune": True},
    "max-autotune-no-cudagraphs": {"opt_level": 3, "autotune": True},
}

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Row:
    """One flag as data. types: the types that a value may have."""

    name: str
    default: Any
    types: tuple[type, ...]
    env: str
    doc: str
    in_key: bool
    choices: tuple[Any, ...]

    def check(self, value: Any, what: str) -> Any:
        """value itself if the flag may hold it, else UserError. A bool is not taken for an int."""
        if type(value) not in self.types:
            names = " or ".join(t.__name__ for t in self.types)
            raise UserError(
                f"{what} must be {names}, got {value!r} ({type(value).__name__})", hint=self.example
            )
        if self.choices and value not in self.choices:
            raise UserError(f"{what} is {value!r}", hint=self.example)
        return value

    @property
    def example(self) -> str:
        """Values that the flag may have."""
        return (
            f"one of {', '.join(map(repr, self.choices))}"
            if self.choices
            else f"{self.default!r}, the default"
        )

    def parse(self, text: str) -> Any:
        """The value that an environment variable spells."""
        what = f"environment variable {self.env}"
        if bool in self.types:
            if text.lower() not in _TRUE + _FALSE:
                raise UserError(f"{what} is {text!r}", hint="0 or 1")
            return text.lower() in _TRUE
        if int in self.types:
            try:
                return self.check(int(text), what)
            except ValueError:
                raise UserError(f"{what} is {text!r}, not an integer", hint=self.example) from None
        return self.check(text, what)


@lru_cache(maxsize=1)
def flags() -> tuple[Row, ...]:
    """All flags as data, in the order of `Config`."""
    hints = typing.get_type_hints(Config)
    rows = []
    for f in dataclasses.fields(Config):
        types = (hints[f.name],)
        m = f.metadata
        env = m["env"] or f"PLAIT_{f.name.upper()}"
        rows.append(Row(f.name, f.default, types, env, m["doc"], m["in_key"], m["choices"]))
    return tuple(rows)


_DEFAULT = Config()


def warm_start(folder: str | os.PathLike[str] = "") -> None:
    """From now on torch.compile with plait starts warm, in this process and in those that it
    starts, whatever PLAIT_WARM_START says. folder: of all caches, where it is not the usual one.
    """
    os.environ["PLAIT_WARM_START"] = "1"
    if folder:
        os.environ["PLAIT_CACHE_DIR"] = os.fspath(folder)


def list_modes() -> list[str]:
    """The modes that `torch.compile(mode=...)` and `plait.compile(mode=...)` take."""
    return list(MODES)


def list_options() -> dict[str, str]:
    """Every option with its default, environment variable and meaning."""
    return {row.name: f"{row.doc} (default {row.default!r}, {row.env})" for row in flags()}
