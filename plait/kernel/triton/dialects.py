"""What differs between makers of GPUs in a Triton kernel: a row for each. The emitter asks the row,
never for a maker.

ROCm's torch calls its devices "cuda" too: the option gpu_arch, or the device itself, tells which
row is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plait.config import Config
from plait.errors import UserError
from plait.runtime.cubin import Gpu
from plait.runtime.tune import gpu_name


@dataclass(frozen=True)
class Dialect:
    """A maker's row.

    library: Triton's module of the functions that its compiler has for these GPUs.
    begins: how names of its GPUs begin, as native/core/drivers has them.
    gpu: what Triton's compiler calls the GPU of a name.
    known: names of those that the compiler has code for; of two that run here the last is better.
    instructions: helper functions of a GPU that are one instruction (ops.py has the others).
    wait: how a kernel waits for the one ahead of it in its stream.
    release: how it lets the next one come beside it, which waits for its end all the same.
    first_early: the first of the GPUs whose kernels can do so, as Triton numbers them, or None.
    first_float8: the first of those with instructions for floats of 8 bits, or None.
    """

    library: str
    begins: tuple[str, ...]
    gpu: Callable[[str], Gpu]
    known: tuple[str, ...]
    instructions: Callable[[Gpu], Mapping[str, str]]
    wait: str = ""
    release: str = ""
    first_early: int | None = None
    first_float8: int | None = None

    @property
    def head(self) -> str:
        """The first lines of a module."""
        return (
            f"import triton\nimport triton.language as tl\nfrom {self.library} import libdevice\n\n"
        )

    def starts_early(self, gpu: Gpu) -> bool:
        """Whether kernels can be launched before the one ahead of them has ended."""
        return _is_since(self.first_early, gpu)

    def has_descriptors(self, gpu: Gpu) -> bool:
        """Whether tiles can be loaded by descriptors of tensors."""
        return _is_since(self.first_early, gpu)  # Hopper has both

    def converts_float8(self, gpu: Gpu) -> bool:
        """Whether there are instructions that make floats of 8 bits and take them apart."""
        return _is_since(self.first_float8, gpu)

    def rounds_to_tf32(self, gpu: Gpu) -> bool:
        """Whether there is an instruction that rounds to TF32, which tensor cores multiply."""
        return "p_tf32" in self.instructions(gpu)


def _is_since(first: int | None, gpu: Gpu) -> bool:
    return first is not None and isinstance(gpu.arch, int) and gpu.arch >= first


def _nvidia(name: str) -> Gpu:
    kind, _, number = name.partition("_")
    return Gpu("cuda", int(number), 32, "ptx" if kind == "ptx" else "cubin")


def _amd(name: str) -> Gpu:
    return Gpu("hip", name, 64 if name.startswith("gfx9") else 32, "hsaco")


_AS_BF16 = "def p_as_bf16(x):\n    return x.to(tl.bfloat16).to(tl.float32)\n"

# The instructions give the largest number for larger ones, and know one NaN. One number at a time,
# and as 32 bits: of a pair of codes, the second of which is shifted down beside the first, ptxas
# 12.8 takes the second from a register that nothing was written to.
_ONE_CODE = """def p_one_{kind}(x):
    code = tl.inline_asm_elementwise(
        "{{ .reg .b16 c; cvt.rn.satfinite.{kind}x2.f32 c, 0f00000000, $1; cvt.u32.u16 $0, c; }}",
        "=r,f", [x], tl.int32, True, 1,
    )
    return (code & 0xFF).to(tl.uint8)
"""
_FOUR_CODES = """def p_four_{kind}(x):
    return tl.inline_asm_elementwise(
        "{{ .reg .b16 low, high; cvt.rn.satfinite.{kind}x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.{kind}x2.f32 high, $4, $3; mov.b32 $0, {{low, high}}; }}",
        "=r,f,f,f,f", [x], tl.uint8, True, 4,
    )
"""
_FOUR_INTEGERS = """def p_four_{kind}8(x):
    return tl.inline_asm_elementwise(
        "{{ .reg .b32 a, b, c, d; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; "
        "cvt.rni.s32.f32 c, $3; cvt.rni.s32.f32 d, $4; cvt.pack.sat.{asm}8.s32.b32 c, d, c, 0; "
        "cvt.pack.sat.{asm}8.s32.b32 $0, b, a, c; }}",
        "=r,f,f,f,f", [x], tl.{name}8, True, 4,
    )
"""
_NVIDIA_HELPERS = {
    "p_ex2": """def p_ex2(x):
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
""",
    "p_rcp": """def p_rcp(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
""",
    # The compiler may not see that half of a number will do, since ptxas (12.8 to 13.0) is
    # wrong there: it takes neg.s16 and abs.s16 of -32768 for 32768 where the result is widened,
    # and adds 0 where only half of a pair of sums with a constant is used.
    "p_low_half": """def p_low_half(x):
    wide = x.to(tl.int32)
    return tl.inline_asm_elementwise("cvt.u16.u32 $0, $1;", "=h,r", [wide], tl.int16, True, 1)
""",
    "p_as_bf16": """def p_as_bf16(x):
    both = tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x], tl.int32, True, 1
    )
    return both.to(tl.float32, bitcast=True)
""",
    **{
        f"p_four_{kind}8": _FOUR_INTEGERS.format(kind=kind, asm=asm, name=name)
        for kind, asm, name in (("i", "s", "int"), ("u", "u", "uint"))
    },
    # Tensor cores cut off what they are given.
    "p_tf32": """def p_tf32(x):
    bits = tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.int32, True, 1
    )
    return bits.to(tl.float32, bitcast=True)
""",
    "p_nearest": """def p_nearest(x):
    return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], tl.int32, True, 1)
""",
    **{
        f"p_{name}_{kind}": text.format(kind=kind)
        for kind in ("e4m3", "e5m2")
        for name, text in (("one", _ONE_CODE), ("four", _FOUR_CODES))
    },
    "p_number_of_e4m3": """def p_number_of_e4m3(x):
    return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
""",
    "p_number_of_e5m2": """def p_number_of_e5m2(x):
    return x.to(tl.float8e5, bitcast=True).to(tl.float32)
""",
}


# GPUs before sm_80 have no instructions that round to bfloat16 and TF32.
_EARLY_HELPERS = {**_NVIDIA_HELPERS, "p_as_bf16": _AS_BF16}
del _EARLY_HELPERS["p_tf32"]
# The assembler ends the process at a number that it does not know.
_CAPABILITIES = (70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)
NVIDIA = Dialect(
    library="triton.language.extra.cuda",
    begins=("sm_", "ptx_"),
    gpu=_nvidia,
    known=tuple(f"{kind}_{n}" for kind in ("ptx", "sm") for n in _CAPABILITIES),
    instructions=lambda gpu: _NVIDIA_HELPERS if _is_since(80, gpu) else _EARLY_HELPERS,
    wait="tl.extra.cuda.gdc_wait()",
    release="tl.extra.cuda.gdc_launch_dependents()",
    first_early=90,
    first_float8=89,
)
_CLAMPED = """def p_four_{kind}8(x):
    whole = tl.where(x == x, tl.minimum(tl.maximum(libdevice.nearbyint(x), {low}.0), {high}.0), 0.0)
    return whole.to(tl.{name}8)
"""
_AMD_HELPERS = {
    "p_ex2": "def p_ex2(x):\n    return tl.exp2(x)\n",
    "p_rcp": "def p_rcp(x):\n    return 1.0 / x\n",
    "p_low_half": "def p_low_half(x):\n    return x.to(tl.int32).to(tl.int16)\n",
    "p_four_i8": _CLAMPED.format(kind="i", low=-128, high=127, name="int"),
    "p_four_u8": _CLAMPED.format(kind="u", low=0, high=255, name="uint"),
    "p_nearest": """def p_nearest(x):
    return tl.where(x == x, libdevice.nearbyint(x), 0.0).to(tl.int32)
""",
    "p_as_bf16": _AS_BF16,
}
AMD = Dialect(
    library="triton.language.extra.hip",
    begins=("gfx",),
    gpu=_amd,
    known=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"),
    instructions=lambda gpu: _AMD_HELPERS,
)
DIALECTS = {"cuda": NVIDIA, "hip": AMD}
"""By Triton's name of the compiler."""
GPUS: Mapping[str, Gpu] = {name: d.gpu(name) for d in DIALECTS.values() for name in d.known}
"""All that kernels can be compiled for, by name."""


LEAST_SHARED = 64 << 10
"""Bytes of memory that the programs of a multiprocessor share on every GPU."""
LEAST_NVIDIA = 99 << 10
"""The same of NVIDIA's that are known, but for the first one with tensor cores."""


def shared_nbytes(gpu: Gpu) -> int:
    """Bytes of memory that the programs of a multiprocessor share, at least."""
    least = LEAST_NVIDIA if isinstance(gpu.arch, int) else LEAST_SHARED
    return gpu.most_shared or least


def gpu_of(device: str, cfg: Config) -> Gpu:
    """What kernels for a device are compiled for: the device at hand, which may be newer than what
    is known here, or what the option names. Raises UserError for an option that is no such name."""
    return _gpu_of(device, cfg)._replace(joins=not (cfg.keeps_bits or cfg.batch_invariant))


def _gpu_of(device: str, cfg: Config) -> Gpu:
    if cfg.gpu_arch == "auto":
        name = gpu_name(device)
        return next(d for d in DIALECTS.values() if name.startswith(d.begins)).gpu(name)
    if cfg.gpu_arch not in GPUS:
        hint = f"one of auto, {', '.join(GPUS)}"
        raise UserError(f"option 'gpu_arch' is {cfg.gpu_arch!r}", hint=hint)
    return GPUS[cfg.gpu_arch]
