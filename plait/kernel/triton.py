"""The Triton target: a kernel -> a Python module with one Triton function, and what a launch of it needs.

The module stands alone (a reader can import and run it) and depends on the kernel's data alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from plait.config import Config
from plait.errors import Unsupported, UserError
from plait.ir.loops import Load, walk
from plait.ir.ops import ATOMICS
from plait.ir.sizes import Size, bounds, ceildiv, mul
from plait.kernel.same import structure, symbol_for
from plait.kernel.space import Space, linear_space
from plait.kernel.target import Source
from plait.kernel.triton_body import Writer
from plait.kernel.triton_ops import POINTERS, SPECIAL_ROWS, TABLE, prelude_for
from plait.kernel.triton_tiles import Tile, plan_tile
from plait.runtime.cubin import Job, get_or_build_pack
from plait.runtime.store import Built
from plait.schedule.plan import Kernel, Store

_HEAD = """import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

"""


@dataclass(frozen=True)
class TritonKernel:
    """One kernel of a GPU program.

    text: a module that defines function `name`. signature: Triton's type of each argument: pointers in the order of
    Kernel.args, then one i64 a size symbol. grid: number of programs, an expression over the size symbols.
    checks: it holds run-time checks, which are compiled in with debug=True. aligned: positions of pointers that are
    multiples of 16.
    """

    name: str
    text: str
    signature: Mapping[str, str]
    grid: Size
    num_warps: int
    num_stages: int
    checks: bool
    aligned: tuple[int, ...] = ()


class TritonTarget:
    """Triton kernels for NVIDIA GPUs."""

    name = "triton"
    table: Mapping[str, object] = {**TABLE, **SPECIAL_ROWS}

    def emit(self, kernels: Sequence[Kernel], unaligned: Set[str], cfg: Config) -> Source:
        """A module a kernel."""
        shared: dict[object, TritonKernel] = {}
        taken: set[str] = set()
        units: dict[str, TritonKernel] = {}
        for k in kernels:
            aligned = tuple(n for n, b in enumerate(k.args) if b.name not in unaligned)
            key = structure(k), aligned
            if key not in shared:
                shared[key] = replace(emit_kernel(k, symbol_for(k.name, taken)), aligned=aligned)
            units[k.name] = shared[key]
        text = "\n\n".join(unit.text for unit in shared.values())
        capability = compute_capability(kernels[0].device, cfg)
        jobs = tuple(_job(unit, capability) for unit in shared.values())
        return Source(text, {n: u.name for n, u in units.items()}, {n: u.grid for n, u in units.items()}, jobs)

    def build(self, source: Source, cfg: Config) -> Built:
        """A pack of cubins."""
        return get_or_build_pack(source.units, cfg)


def _job(unit: TritonKernel, capability: int) -> Job:
    return Job(
        name=unit.name,
        text=unit.text,
        signature=unit.signature,
        capability=capability,
        num_warps=unit.num_warps,
        num_stages=unit.num_stages,
        aligned=unit.aligned,
        checks=unit.checks,
    )


def compute_capability(device: str, cfg: Config) -> int:
    """What kernels for a device are compiled for: 90 for sm_90. Raises UserError for an option that is no such name."""
    if cfg.gpu_arch == "auto":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if not re.fullmatch(r"sm_\d+", cfg.gpu_arch):
        raise UserError(f"option 'gpu_arch' is {cfg.gpu_arch!r}", hint="auto, or a name such as sm_90")
    return int(cfg.gpu_arch[3:])


def emit_kernel(kernel: Kernel, symbol: str) -> TritonKernel:
    """The module of one kernel. Raises Unsupported where points collide in a way that Triton has no atomic for."""
    dtypes = {b.name: b.dtype.name for b in kernel.args}
    for s in kernel.stmts:
        if not isinstance(s, Store) or s.mode == "store":
            continue
        if dtypes[s.buf] not in ATOMICS.get(s.mode, ()):
            raise Unsupported(f"a scatter that combines {dtypes[s.buf]} by '{s.mode}' on a GPU")
    space = linear_space(kernel)
    tile = plan_tile(space)
    names = {str(e): f"s{k}" for k, e in enumerate(kernel.sizes)}
    wide = _is_wide(space, tile)
    writer = Writer(space, tile, wide, names)
    lines = writer.write()
    if not wide:
        lines = [f"{s} = {s}.to(tl.int32)" for s in names.values()] + lines
    pointers = [f"p{k}" for k in range(len(kernel.args))]
    body = "".join(f"    {line}\n" for line in lines)
    # Through Triton's own launcher a size of 1 would become a constant without a type.
    plain = f"(do_not_specialize={[*names.values()]})" if names else ""
    function = f"@triton.jit{plain}\ndef {symbol}({', '.join((*pointers, *names.values()))}):\n{body}"
    prelude = prelude_for(function)
    text = _HEAD + "\n" + (f"{prelude}\n\n" if prelude else "") + function
    signature = {
        **{p: POINTERS[b.dtype.name] for p, b in zip(pointers, kernel.args, strict=True)},
        **dict.fromkeys(names.values(), "i64"),
    }
    grid: Size = 1
    for g in tile.outer:
        grid = mul(grid, ceildiv(g.points, g.block))
    return TritonKernel(symbol, text, signature, grid, tile.num_warps, tile.num_stages, writer.checks)


def _is_wide(space: Space, tile: Tile) -> bool:
    """Whether some index may leave 32 bits."""
    limit = 2**31 - 1
    exprs: list[Size] = [mul(g.points, 1) + g.block for g in tile.groups]
    exprs += [ceildiv(g.points, g.block) * g.block for g in tile.groups]
    for n in walk(space.roots()):
        if n.op == "load":
            assert isinstance(n.attr, Load)
            exprs.append(n.attr.index[0])
    exprs += [s.index[0] for s in space.stmts if isinstance(s, Store)]
    return any(not (-limit <= low and high <= limit) for low, high in map(bounds, exprs))
