"""What Triton is given and what it makes: `Job`, a source with what decides how it is compiled, and
`Cubin`, a compiled kernel with everything that a launch needs besides its arguments.

`cubin_pool.py` makes cubins of jobs. `pack` and `unpack` write and read the file of cubins that
programs load. Nothing here needs a GPU or imports Triton.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from plait.runtime.store import key_of
from plait.runtime.toolchain import ToolchainMissing

WORKER = Path(__file__).parent / "triton_worker.py"
_VARIABLES = (
    "TRITON_",
    "PTXAS_",
    "NVPTX_",
    "MLIR_",
    "LLVM_",
    "DISABLE_LLVM_",
    "DISABLE_PTXAS_",
    "DISABLE_MMA_",
    "AMDGCN_",
)
_OTHER_VARIABLES = {
    "TRITON_HOME", "TRITON_INTERPRET", "TRITON_CACHE_MANAGER", "TRITON_CACHE_AUTOTUNING",
    "TRITON_PRINT_AUTOTUNING", "TRITON_LIBCUDA_PATH", "TRITON_STORE_BINARY_ONLY",
    "TRITON_DISABLE_LINE_INFO",
}  # fmt: skip

NUMBERS = {"enable_reflect_ftz": False}
"""The option that has Triton's library of functions keep subnormal numbers, as eager's kernels
do."""


_SHARED_KB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227,
    103: 227, 120: 99, 121: 99,
}  # fmt: skip
"""Memory that a program may have for all its threads, by the number of NVIDIA's architecture."""


class Gpu(NamedTuple):
    """What a kernel is compiled for.

    backend, arch, lanes: as Triton's GPUTarget has them: ("cuda", 90, 32), ("hip", "gfx942", 64).
    image: the stage that the driver loads: "cubin", "hsaco", or "ptx", the assembler's input, which
        the driver of any newer GPU takes too.
    joins: a product and a sum may become one operation, which rounds once.
    """

    backend: str
    arch: int | str
    lanes: int
    image: str
    joins: bool = True

    @property
    def name(self) -> str:
        """Such as sm_90 or gfx942."""
        return f"sm_{self.arch}" if isinstance(self.arch, int) else self.arch

    @property
    def most_shared(self) -> int | None:
        """Bytes of memory that a program may have for all its threads; None: it is not known."""
        most = _SHARED_KB.get(self.arch) if isinstance(self.arch, int) else None
        return None if most is None else most << 10


SM_90 = Gpu("cuda", 90, 32, "cubin")


@dataclass(frozen=True)
class Job:
    """One kernel to compile. text: a module that defines function `name`. signature: Triton's type
    of each argument. aligned: positions of pointers that are multiples of 16. checks: it holds
    run-time checks, which are compiled in with debug=True. early: it may start before what is ahead
    of it in its stream has ended, for which it waits (programmatic dependent launch). options: what
    the compiler is told beside, or in the place of that."""

    name: str
    text: str
    signature: Mapping[str, str]
    gpu: Gpu
    num_warps: int
    num_stages: int = 1
    aligned: tuple[int, ...] = ()
    checks: bool = False
    early: bool = False
    options: tuple[tuple[str, bool | int | str | None], ...] = ()

    def frame(self) -> str:
        """The job as a worker reads it, with what this process's environment tells the compiler."""
        options = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "debug": self.checks,
            "sanitize_overflow": False, "launch_pdl": self.early, **NUMBERS,
            **({} if self.gpu.joins else {"enable_fp_fusion": False}),
            **dict(self.options),
        }  # fmt: skip
        facts = {
            "name": self.name, "text": self.text, "signature": dict(self.signature),
            "target": self.gpu[:3], "aligned": list(self.aligned), "options": options,
            "env": compiler_variables(), "image": self.gpu.image,
        }  # fmt: skip
        return json.dumps(facts, sort_keys=True)

    def key(self) -> str:
        """The name of its result in the store."""
        return key_of_frame(self.frame())


def key_of_frame(frame: str) -> str:
    """The name in the store of what a frame of a job makes."""
    named = (v for k, v in compiler_variables().items() if k.endswith("_PATH"))
    return key_of((frame, *_compiler(), *map(_size, named)))


def compiler_variables() -> dict[str, str]:
    """What of the environment may change the compiler's output."""
    return {
        k: v
        for k, v in os.environ.items()
        if k.startswith(_VARIABLES) and not k.endswith("_DIR") and k not in _OTHER_VARIABLES
    }


@lru_cache
def _compiler() -> tuple[str, ...]:
    """What compiles: Triton, what we make of it, and the assemblers that come with it."""
    spec = find_spec("triton")
    tools = Path((spec and spec.origin) or "").parent / "backends" / "nvidia" / "bin"
    return (
        triton_version(),
        WORKER.read_text(),
        *(_size(tools / name) for name in ("ptxas", "ptxas-blackwell")),
    )


def _size(file: str | Path) -> str:
    """Tells one version of a program from another, and is the same on every machine."""
    try:
        return str(Path(file).stat().st_size)
    except OSError:
        return ""


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel. symbol: its entry point. num_warps: after compilation, which may change
    it. shared: bytes of dynamic shared memory. global_scratch, profile_scratch: bytes a program and
    alignment of the two pointers that follow the arguments. cooperative, pdl: attributes that a
    launch must set. descriptors: how a launch makes tensor maps
    (triton_launch/src/specialize.h)."""

    image: bytes
    symbol: str
    num_warps: int
    num_ctas: int
    shared: int
    global_scratch: tuple[int, int]
    profile_scratch: tuple[int, int]
    cooperative: bool
    pdl: bool
    descriptors: str = ""

    def to_bytes(self) -> bytes:
        """One line of JSON, then the image."""
        facts = {k: v for k, v in vars(self).items() if k != "image"}
        return json.dumps(facts).encode() + b"\n" + self.image

    @staticmethod
    def from_bytes(data: bytes) -> Cubin:
        """What to_bytes wrote."""
        head, _, image = data.partition(b"\n")
        return Cubin.of(json.loads(head), image)

    @staticmethod
    def of(facts: Mapping[str, Any], image: bytes) -> Cubin:
        """A worker's answer."""
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()
        }
        return Cubin(image=image, **known)


@lru_cache
def triton_version() -> str:
    """The version of the installed Triton, without importing it. Raises ToolchainMissing if there
    is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ToolchainMissing("Triton is not installed", hint="pip install triton") from None


_PACK = struct.Struct("<12q")
PACK_VERSION = 2


def pack(cubins: Mapping[str, Cubin], texts: Mapping[str, str] | None = None) -> bytes:
    """Kernels by name, and texts by name, as one file; native/core/cubins.cpp says how and reads
    it. A kernel's descriptors are the text of its name."""
    parts = [b"PLAITCUB", struct.pack("<2q", PACK_VERSION, len(cubins))]
    for name, c in cubins.items():
        words = (name.encode(), c.symbol.encode(), c.image)
        facts = (
            c.num_warps,
            c.num_ctas,
            c.shared,
            *c.global_scratch,
            *c.profile_scratch,
            c.cooperative,
            c.pdl,
        )
        parts += [_PACK.pack(*map(len, words), *facts), *words]
    texts = {
        **(texts or {}),
        **{name: c.descriptors for name, c in cubins.items() if c.descriptors},
    }
    parts.append(struct.pack("<q", len(texts)))
    for name, text in texts.items():
        pair = (name.encode(), text.encode())
        parts += [struct.pack("<2q", *map(len, pair)), *pair]
    return b"".join(parts)


def unpack(data: bytes) -> tuple[dict[str, Cubin], dict[str, str]]:
    """The kernels and texts that pack was given. Raises ValueError for what is no such file, or
    damaged."""
    stream = BytesIO(data)

    def words(n: int) -> tuple[int, ...]:
        found = struct.unpack(f"<{n}q", read_exactly(stream, 8 * n))
        if min(found) < 0:
            raise EOFError
        return found

    try:
        if read_exactly(stream, 8) != b"PLAITCUB" or words(1) != (PACK_VERSION,):
            raise ValueError("no kernel file of this version")
        cubins, texts = {}, {}
        for _ in range(*words(1)):
            sizes = words(12)
            name, symbol, image = (read_exactly(stream, n) for n in sizes[:3])
            warps, ctas, shared, *scratch, cooperative, pdl = sizes[3:]
            cubins[name.decode()] = Cubin(
                image, symbol.decode(), warps, ctas, shared, (scratch[0], scratch[1]),
                (scratch[2], scratch[3]), bool(cooperative), bool(pdl),
            )  # fmt: skip
        for _ in range(*words(1)):
            name, text = (read_exactly(stream, n) for n in words(2))
            texts[name.decode()] = text.decode()
        cubins = {name: replace(c, descriptors=texts.pop(name, "")) for name, c in cubins.items()}
    except (EOFError, UnicodeDecodeError):
        raise ValueError("a damaged kernel file") from None
    return cubins, texts


def read_exactly(source: BinaryIO | Any, n: int) -> bytes:
    """The next n bytes. Raises EOFError if there are fewer."""
    data: bytes = source.read(n)
    if len(data) < n:
        raise EOFError
    return data
