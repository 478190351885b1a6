"""The Triton target: a kernel -> a Python module with one Triton function, and what a launch of it
needs.

The module stands alone (a reader can import and run it) and depends on the kernel's data alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import torch

from plait.config import Config
from plait.devices import facts_of
from plait.errors import InternalError, Unsupported
from plait.ir.calls import Extern, TensorArg
from plait.ir.expr import Size, bounds, ceildiv
from plait.ir.loops import Alias, Buffer, Load, exprs_of, walk
from plait.ir.ops import ATOMICS
from plait.ir.product import Product
from plait.kernel.target import Choices, Forms, Machines, Measured, Source, Target, Unaligned
from plait.kernel.triton.attention import write_attention
from plait.kernel.triton.body import BodyPrinter
from plait.kernel.triton.by_length import Tiles, hints_at, size_of, tiles_by_length
from plait.kernel.triton.dialects import DIALECTS, GPUS, gpu_of
from plait.kernel.triton.ops import POINTERS, SPECIAL_ROWS, TABLE, prelude_for
from plait.kernel.triton.parts import choose_part
from plait.kernel.triton.plan_body import plan_body
from plait.kernel.triton.product import Around, write_product
from plait.kernel.triton.tiles import BUSY, Tile, plan_tile, share_tile
from plait.kernel.triton.tune import candidates, describe
from plait.kernel.triton.user import TritonKernel, contest_of, unit_of
from plait.kernel.triton.verify_body import faults_of_body
from plait.runtime.cubin import Gpu, Job, triton_version
from plait.runtime.cubin_pool import get_or_build_pack
from plait.runtime.store import Built
from plait.runtime.tune import Contest, Scratch, tune
from plait.schedule.cost import hint
from plait.schedule.dedup import LENGTH, structure, symbol_for
from plait.schedule.deps import extent
from plait.schedule.layout import unaligned
from plait.schedule.legalize import legalize
from plait.schedule.legalize.drop_picks import drop_picks
from plait.schedule.legalize.linear import LinearKernel, trip_count
from plait.schedule.legalize.unmask_loads import unmask_loads
from plait.schedule.plan import Kernel, Plan, Store, UserLaunch, device_of

WARP = 32
"""Lanes of the warps that tiles are planned with."""


class TritonTarget(Target):
    """Triton kernels for GPUs of any maker that has a dialect."""

    name = "triton"
    table: Mapping[str, object] = {**TABLE, **SPECIAL_ROWS}

    def find_tools(self, cfg: Config) -> None:
        """Triton, which brings its assembler."""
        triton_version()

    def machines(self, devices: Set[str], cfg: Config) -> Machines:
        """What each GPU is, how many programs fill it, and whether rows keep their bits."""
        rows = cfg.batch_invariant
        return {d: (gpu_of(d, cfg), busy_of(d, cfg), rows) for d in devices}

    def measure(
        self, kernels: Sequence[Kernel], unaligned: Unaligned, machines: Machines, cfg: Config
    ) -> Measured:
        """The fastest tile of each kernel that has several, on the device at hand."""
        _, distinct, symbols = _distinct(kernels, unaligned, machines)
        spaces = {key: _space(k, by_row=key.by_row) for key, k in distinct.items()}
        tiles = {key: _tiles(k, spaces[key], key.busy) for key, k in distinct.items()}
        forms = {x: _tiles_by_size(k, spaces[x], x.busy, tiles[x][0]) for x, k in distinct.items()}
        contests: dict[tuple[Key, int], Contest] = {}
        for key, k in distinct.items():
            if len(tiles[key]) > 1:
                contests[key, 0] = _contest(k, symbols[key], key, tiles[key])
            for n in forms[key].buckets:
                if at := hints_at(k, forms[key].length, n):
                    contests[key, n] = _contest(at, symbols[key], key, forms[key].for_rows(n))
        outcomes = dict(zip(contests, tune(list(contests.values()), cfg), strict=True))
        choices: dict[str, Tile | Tiles] = {}
        for key, k in distinct.items():
            best = {n: o.choice for (of, n), o in outcomes.items() if of is key and not o.reason}
            found = tiles[key][best.pop(0, 0)]
            if len(forms[key].tiles) > 1:
                choices[k.name] = forms[key].measured(best, found)
            elif (key, 0) in outcomes:
                choices[k.name] = found
        notes = (
            f"{symbols[key]}{f' for rows up to {n}' if n else ''}: {o.text(contests[key, n])}"
            for (key, n), o in outcomes.items()
        )
        return Measured(choices, tuple(notes))

    def emit(
        self,
        kernels: Sequence[Kernel],
        unaligned: Unaligned,
        machines: Machines,
        choices: Choices,
        verifies: bool,
    ) -> Source:
        """A module a kernel. choices: tiles other than the planned ones."""
        keys, distinct, symbols = _distinct(kernels, unaligned, machines)
        taken = set(symbols.values())
        spaces = {key: _space(k, verifies, key.by_row) for key, k in distinct.items()}
        tiles = {
            key: _tiles_by_size(k, spaces[key], key.busy, choices.get(k.name))
            for key, k in distinct.items()
        }
        made = {
            key: [
                _unit(k, symbol, key, tile, verifies, spaces[key])
                for symbol, tile in tiles[key].named(symbols[key], taken)
            ]
            for key, k in distinct.items()
        }
        units = {k.name: made[key] for k, key in zip(kernels, keys, strict=True)}
        every = tuple(unit for several in made.values() for unit in several)
        return Source(
            text="\n\n".join(unit.text for unit in every),
            entry_points={n: u[-1].name for n, u in units.items()},
            grids={n: u[-1].grid for n, u in units.items()},
            units=every,
            forms={
                k.name: Forms(tiles[key].pick, tuple((u.name, u.grid) for u in made[key]))
                for k, key in zip(kernels, keys, strict=True)
                if len(made[key]) > 1
            },
        )

    def write_template(self, plan: Plan, call: Extern, machines: Machines, tunes: bool) -> Extern:
        """The call of a kernel of attention, or of a product, with its text."""
        device = device_of(plan, call)
        gpu, busy, by_row = machines[device]
        if isinstance(call.kernel, Product):
            anywhere, each = unaligned(plan), facts_of(device).programs
            factors = [a for a in call.args if isinstance(a, TensorArg)][:2]
            fits = all(a.buf not in anywhere and a.offset == 0 for a in factors)
            around = Around(_is_waited_for(plan, call), fits, busy // each, by_row)
            return write_product(call, plan.buffers, gpu, around, tunes and not by_row)
        return write_attention(call, plan.buffers, gpu)

    def measure_users(
        self, launches: Sequence[UserLaunch], machines: Machines, cfg: Config
    ) -> Measured:
        """The fastest variant of each kernel that has several, on the device at hand."""
        several = [u for u in launches if len(u.kernel.variants) > 1]
        contests = [contest_of(u, machines[u.device][0]) for u in several]
        outcomes = tune(contests, cfg)
        choices: dict[str, int] = {}
        notes, lost = [], []
        for u, o, c in zip(several, outcomes, contests, strict=True):
            n, name = len(u.kernel.variants), u.kernel.name
            notes.append(f"{name}: {o.text(c)}")
            choices[name] = o.choice
            if o.choice == n:  # what it would be where the operator cannot be called
                choices[name] = min(range(n), key=o.us.__getitem__) if o.us else 0
                lost.append(name)
        return Measured(choices, tuple(notes), tuple(lost))

    def emit_users(
        self, launches: Sequence[UserLaunch], machines: Machines, choices: Choices
    ) -> Source:
        """A module a kernel."""
        made = {
            u.kernel.name: unit_of(
                u, u.kernel.variants[choices.get(u.kernel.name, 0)], machines[u.device][0]
            )
            for u in launches
        }
        units = {unit.name: unit for unit in made.values()}
        return Source(
            text="\n\n".join(unit.text for unit in units.values()),
            entry_points={n: u.name for n, u in made.items()},
            grids={n: u.grid for n, u in made.items()},
            units=tuple(units.values()),
        )

    def build(self, source: Source, cfg: Config) -> Built:
        """A pack of cubins."""
        return get_or_build_pack(source.units, cfg)


def _is_waited_for(plan: Plan, call: Extern) -> bool:
    """Whether what a program puts on the stream next, behind a call, is a kernel of ours, which
    waits for the call's. One of others may be launched early and have nothing to wait for, so that
    who waits for it does not wait for this call."""
    at = next(k for k, s in enumerate(plan.steps) if s is call)
    follower = next((s for s in plan.steps[at + 1 :] if not isinstance(s, Alias)), None)
    if isinstance(follower, Kernel):  # of known sizes: one without points is not launched
        return follower.device == device_of(plan, call) and not follower.sizes
    return isinstance(follower, Extern) and isinstance(follower.kernel, Product)


class Key(NamedTuple):
    """What kernels share their module by: their structure, which pointers are aligned, and the
    device, what it is and how many programs fill it, and whether rows keep their bits."""

    structure: object
    aligned: tuple[int, ...]
    device: str
    gpu: Gpu
    busy: int
    by_row: bool


def _distinct(
    kernels: Sequence[Kernel], unaligned: Unaligned, machines: Machines
) -> tuple[list[Key], dict[Key, Kernel], dict[Key, str]]:
    """The key of each kernel; the first kernel of each key, in order; and their symbols."""
    keys: list[Key] = []
    distinct: dict[Key, Kernel] = {}
    for k in kernels:
        aligned = tuple(n for n, b in enumerate(k.args) if b.name not in unaligned[k.name])
        keys.append(Key(structure(k), aligned, k.device, *machines[k.device]))
        distinct.setdefault(keys[-1], k)
    taken: set[str] = set()
    return keys, distinct, {key: symbol_for(k.name, taken) for key, k in distinct.items()}


def busy_of(device: str, cfg: Config) -> int:
    """Programs that fill the device that kernels are for, which is at hand unless cfg names
    another."""
    if cfg.gpu_arch != "auto":
        return BUSY
    found = torch.cuda.get_device_properties(device)
    return facts_of(device).busy(found.multi_processor_count)


def _unit(
    kernel: Kernel,
    symbol: str,
    key: Key,
    tile: Tile | None,
    verifies: bool = False,
    linear: LinearKernel | None = None,
) -> TritonKernel:
    return replace(
        emit_kernel(kernel, symbol, tile, verifies, key.gpu, key.busy, linear), aligned=key.aligned
    )


def _contest(kernel: Kernel, symbol: str, key: Key, tiles: Sequence[Tile]) -> Contest:
    hints = kernel.hint_of

    def version(k: int) -> tuple[Job, int]:
        # Buffers have no values here that checks would pass; what they guard reads element 0 then.
        unit = replace(_unit(kernel, symbol, key, tiles[k]), checks=False)
        return unit, hint(unit.grid, hints)

    buffers = tuple(Scratch(b.dtype.name, _span(b, hints) * b.dtype.nbytes) for b in kernel.args)
    sizes = tuple(hint(e, hints) for e in kernel.sizes)
    return Contest(tuple(map(describe, tiles)), version, buffers, sizes, kernel.device)


def _span(b: Buffer, hints: Mapping[str, int]) -> int:
    """Elements from a buffer's first to its last."""
    pairs = [(hint(n, hints), hint(s, hints)) for n, s in zip(b.shape, b.strides, strict=True)]
    return 1 + sum(max(n - 1, 0) * s for n, s in pairs)


def emit_kernel(
    kernel: Kernel,
    symbol: str,
    tile: Tile | None = None,
    verifies: bool = False,
    gpu: Gpu = GPUS["sm_80"],
    busy: int = BUSY,
    linear: LinearKernel | None = None,
) -> TritonKernel:
    """The module of one kernel. tile: other than the one planned for a device that `busy` programs
    fill. verifies: what was decided is checked before it is printed. linear: the kernel over one
    index, where it is known. Raises Unsupported where points collide in a way that Triton has no
    atomic for."""
    dtypes = {b.name: b.dtype.name for b in kernel.args}
    for s in kernel.stmts:
        if not isinstance(s, Store) or s.mode in ("store", "sum"):
            continue
        if dtypes[s.buf] not in ATOMICS.get(s.mode, ()):
            raise Unsupported(f"a scatter that combines {dtypes[s.buf]} by '{s.mode}' on a GPU")
    linear = linear or _space(kernel, verifies)
    tile = tile or _planned(kernel, linear, busy)
    sizes = [f"s{k}" for k in range(len(kernel.sizes))]
    names = (
        {LENGTH: LENGTH} if kernel.parts else dict(zip(map(str, kernel.sizes), sizes, strict=True))
    )
    index_type = "tl.int64" if _is_wide(linear, tile) else "tl.int32"
    dialect = DIALECTS[gpu.backend]
    plan = plan_body(linear, tile, index_type, names, dialect.converts_float8(gpu))
    if verifies and (faults := faults_of_body(plan)):
        raise InternalError(f"kernel {kernel.name} {faults[0]}")
    lines, checks = BodyPrinter(plan).print()
    pointers = [f"{'all' if kernel.parts else 'p'}{k}" for k in range(len(kernel.args))]
    start = choose_part(kernel, pointers, sizes) if kernel.parts else []
    # Triton's own launcher hands small numbers over in 32 bits, ours all in 64.
    start += [f"{s} = {s}.to({index_type})" for s in names.values()]
    if tile.unit > 1:
        length = names[str(size_of(trip_count(linear.rvars)))]
        start.append(f"{length} = {length} // {tile.unit} * {tile.unit}")  # as the compiler sees it
    program = "program" if kernel.parts else "tl.program_id(0)"
    lines = [*start, f"pid = {program}.to({index_type})", *lines]
    early = dialect.starts_early(gpu)
    if early:  # before the first access to memory
        lines.insert(0, dialect.wait)
    body = "".join(f"    {line}\n" for line in lines)
    # Through Triton's own launcher a size of 1 would become a constant without a type.
    plain = f"(do_not_specialize={sizes})" if sizes else ""
    function = f"@triton.jit{plain}\ndef {symbol}({', '.join((*pointers, *sizes))}):\n{body}"
    prelude = prelude_for(function, dialect.instructions(gpu))
    text = dialect.head + "\n" + (f"{prelude}\n\n" if prelude else "") + function
    signature = {
        **{p: POINTERS[b.dtype.name] for p, b in zip(pointers, kernel.args, strict=True)},
        **dict.fromkeys(sizes, "i64"),
    }
    warps = max(tile.num_warps * WARP // gpu.lanes, 1)
    job = (symbol, text, signature, gpu, warps, tile.num_stages)
    grid = kernel.sizes[-1] if kernel.parts else tile.grid
    return TritonKernel(*job, checks=checks, early=early, grid=grid)


def _space(kernel: Kernel, verifies: bool = False, by_row: bool = False) -> LinearKernel:
    # Parts are alike: one is written.
    linear = unmask_loads(drop_picks(legalize(kernel.nests[0], verifies)))
    return replace(linear, by_row=by_row)


def _planned(kernel: Kernel, linear: LinearKernel, busy: int) -> Tile:
    share = facts_of(kernel.device).share
    return share_tile(linear, share) if kernel.parts else plan_tile(linear, busy)


def _tiles(kernel: Kernel, linear: LinearKernel, busy: int) -> tuple[Tile, ...]:
    """Those that are worth measuring: of parts, blocks are shares."""
    return (_planned(kernel, linear, busy),) if kernel.parts else candidates(linear, busy)


def _tiles_by_size(
    kernel: Kernel, linear: LinearKernel, busy: int, chosen: Tile | Tiles | None
) -> Tiles:
    """The tiles that a kernel is written with; None stands for the planned one. chosen: those that
    measuring found, the one for any size, or None."""
    if isinstance(chosen, Tiles):
        return chosen
    if all(isinstance(extent(r), int) for r in kernel.rvars):
        return Tiles(0, (chosen,))
    found = tiles_by_length(linear, kernel.hint_of, busy)
    return replace(found, tiles=(*found.tiles[:-1], chosen))


def _is_wide(linear: LinearKernel, tile: Tile) -> bool:
    """Whether some index may leave 32 bits."""
    limit = 2**31 - 1
    exprs: list[Size] = [g.points + g.block for g in tile.groups]
    exprs += [ceildiv(g.points, g.block) * g.block for g in tile.groups]
    for n in walk(linear.roots()):
        if n.op == "load":
            assert isinstance(n.attr, Load), n
            exprs.append(n.attr.index[0])
        elif not isinstance(n.attr, int):  # an index may be a value, such as the bits of a float
            exprs += exprs_of(n)
    exprs += [s.index[0] for s in linear.stmts if isinstance(s, Store)]
    parts = {part for e in exprs for part in _parts(e)}
    return any(not (-limit <= low and high <= limit) for low, high in map(bounds, parts))


def _parts(e: Size) -> Iterator[Size]:
    """All that is computed on the way to e, e included: `x // 8` may be small where x is not."""
    yield e
    for mono, _ in () if isinstance(e, int) else e.terms:
        for atom in mono:
            if atom.kind == "sym":
                yield atom.expr
            else:
                yield from _parts(atom.a)
                yield from _parts(atom.b)
