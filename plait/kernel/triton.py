"""The Triton target: a kernel -> a Python module with one Triton function, and what a launch of it needs.

The module stands alone (a reader can import and run it) and depends on the kernel's data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import Unsupported
from plait.ir.loops import Load, walk
from plait.ir.sizes import Size, bounds, ceildiv, mul
from plait.kernel.space import Space, linear_space
from plait.kernel.triton_body import Writer
from plait.kernel.triton_ops import POINTERS, SPECIAL_ROWS, TABLE, prelude_for
from plait.kernel.triton_tiles import Tile, plan_tile
from plait.schedule.plan import Kernel, Store

_HEAD = """import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

"""
ATOMICS: dict[str, tuple[str, ...]] = {
    "add": ("f16", "bf16", "f32", "f64", "i32", "i64", "u32", "u64"),
    "min": ("i32", "i64", "u32", "u64", "f32", "f64"),
    "max": ("i32", "i64", "u32", "u64", "f32", "f64"),
}
"""How points that collide may combine: mode of a store -> dtypes that the device has an atomic for."""


@dataclass(frozen=True)
class TritonKernel:
    """One kernel of a GPU program.

    text: a module that defines function `name`. signature: Triton's type of each argument: pointers in the order of
    Kernel.args, then one i64 a size symbol. grid: number of programs, an expression over the size symbols.
    checks: it holds run-time checks, which are compiled in with debug=True.
    """

    name: str
    text: str
    signature: Mapping[str, str]
    grid: Size
    num_warps: int
    num_stages: int
    checks: bool


class TritonTarget:
    """Triton kernels for NVIDIA GPUs."""

    name = "triton"
    table: Mapping[str, object] = {**TABLE, **SPECIAL_ROWS}


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
