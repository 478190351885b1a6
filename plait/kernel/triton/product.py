"""Kernels of products: the template `templates/product.py` with constants, and what is computed of
a product, before it.

In: an `Extern` with a `Product`. Out: the same with a `UserKernel`, which all that follows knows
how to tune, compile, store and launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.ir.calls import Extern, Operator, Rival, TensorArg, UserKernel, Variant
from plait.ir.expr import Size, ceildiv, free_symbols, product, total
from plait.ir.loops import Buffer, Load, Pointwise, exprs_of, is_arg, walk
from plait.ir.product import PARTNER, PRODUCT, Cut, Product
from plait.kernel.triton.dialects import DIALECTS, Dialect, shared_nbytes
from plait.kernel.triton.formulas import operand_of, results_of
from plait.kernel.triton.template import Writer, size_text, tuple_text
from plait.runtime.cubin import Gpu
from plait.schedule.deps import extent, node_cost

_LEAST_TILE = 16  # rows and columns that tensor cores take
_STAGES = 5
"""Of a loop, where memory holds them: measured on an H200 (benchmarks/products_gpu.py)."""
_CONVERTING = 3  # programs of a multiprocessor, which is busy while others wait for memory
_SPARE = 4 << 10  # bytes that a kernel needs beside them
_BARRIERS = 1 << 10  # bytes beside those of steps and results, where programs load by descriptors
_LEAST_PIECE = 64
"""Columns of a tile that are finished at once, at least: a line of memory of 16-bit numbers."""
_FINISH_NBYTES = 12 << 10  # in which 4 warps turn a tile before they store it
_KERNEL_US = 1.5  # of one that is small, in a CUDA graph
_VENDORS_OPS = {
    "mm": frozenset(("load", "cast")),
    "_int_mm": frozenset(("load", "cast")),
    "addmm": frozenset(("load", "cast", "add", "mul", "const")),
    "_addmm_activation": frozenset(("load", "cast", "const", "add", "mul", "max", "tanh")),
}
"""Of what an operator's results are computed, those of relu and gelu too."""
_WIDE = 64  # rows of the left factor that tensor cores want
_BRIEF_NBYTES = 8 << 20  # of a factor that is read in about the time of a launch
_UNIT = 8
"""Numbers of 16 bits that are written at once."""
_LINE = 16  # bytes of which the rows of what a descriptor loads lie a multiple apart
_GROUP_NBYTES, _LEAST_GROUP = 8 << 20, 8
_LARGE_TILES = (
    (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4),
    (64, 256, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 128, 8, 3),
)  # fmt: skip
"""Rows, columns and depth of their tiles, warps and stages that are worth measuring. Depth is of
numbers of 16 bits."""
_DESCRIBED_TILES = (
    (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 5),
)  # fmt: skip
"""The same of programs that load by descriptors."""
_MANY_STAGES, _FEW_COLUMNS = 6, 32
"""Stages of small tiles that walk along all of k, and columns from which on they have 4 warps, not
2: 16 x 2048 x 5632 takes 10.2 us so, and 13.6 by 4 warps and 4 stages (H200)."""
_FEW_TURNS = 4
"""Stages of two steps each, where the two of factors in two parts overlap: 1 x 768 x 3072 takes 24
us so, and 30 by one step at a time (H200)."""
_MOST_WARPS = 8  # of a tile: 2048 x 768 x 3072 takes 18 us so, and 55 by 4 (H200)
# Up to so long sums, two programs a multiprocessor are faster than one that stays: what is computed
# behind a sum takes long beside it, and the other one sums meanwhile. 2048 x 2304 x 768 takes 17.8
# us so, and 19.3 by programs that stay; 1024 x 5632 x 2048 takes 41.6 and 37.1 (H200). Of results
# that cost so many cycles, sums may be twice as long: the two products of silu(gate) * up, 4096 x
# 5632 x 2048, take 305 us so, and 310.
_BRIEF_DEPTH, _PAIRED_STAGES, _LONG_RESULT = 1024, 3, 8
_IN_TWO_STAGES, _IN_TWO_REGISTERS = 3, 128
"""Where numbers of factors are taken for two: stages, and registers of a thread, so that several
programs share a multiprocessor: 1024 x 2048 x 5632 takes 250 us so, 324 else, and 467 by the
vendor's kernel without tensor cores (H200)."""
_NARROW = 128  # columns of large tiles that programs take one after the other, if they write slowly
_OTHERS = (
    (64, 256, 4), (32, 256, 4), (128, 256, 4), (64, 512, 4), (32, 512, 4), (64, 256, 8),
    (128, 128, 4), (128, 256, 8),
)  # fmt: skip
"""Columns of tiles, bytes of a step along k of numbers of 16 bits and more, and warps, that were
the best of some shape on an H200."""


@dataclass(frozen=True, slots=True)
class _Version:
    """A way to cut a product.

    warps: how many compute a tile
    stages: of the loop, as memory holds them; 0: as many as it holds, or, where the right matrix is
        made, leaving room for other programs
    aligned: rows that start anywhere are written where they are aligned, by tiles of every so
        manieth row
    described: programs stay, take one tile after the other, and load by descriptors
    at_once: steps along k of one turn of the loop
    """

    cut: Cut
    warps: int = 4
    stages: int = 0
    aligned: bool = False
    described: bool = False
    at_once: int = 1


def _group(cut: Cut, high: Size, row_nbytes: Size) -> int:
    """How many rows of tiles share what they load of the right factor: as many as the cache holds
    of the left one, beside tiles of the right one."""
    if not isinstance(high, int) or not isinstance(row_nbytes, int):
        return _LEAST_GROUP
    return max(1, min(high, max(_LEAST_GROUP, _GROUP_NBYTES // (cut.rows * row_nbytes))))


@dataclass(frozen=True, slots=True)
class Around:
    """What a kernel of a product can rely on.

    waits: the next kernel on its stream waits for its end
    aligned: its factors start at multiples of 16 bytes
    multiprocessors: of the device
    by_row: its rows keep their bits: large tiles are as they are fastest, with whatever behind
    """

    waits: bool = False
    aligned: bool = False
    multiprocessors: int = 132
    by_row: bool = False


def write_product(
    call: Extern, buffers: Mapping[str, Buffer], gpu: Gpu, around: Around, tunes: bool = False
) -> Extern:
    """The call, of a kernel whose text is known. tunes: in several versions."""
    return _Writer(call, buffers, gpu, around=around, tunes=tunes).written()


@dataclass
class _Writer(Writer):
    """One kernel of a product. tunes: it is to be measured in several versions."""

    around: Around = Around()
    tunes: bool = False

    @property
    def product(self) -> Product:
        """What it computes."""
        assert isinstance(self.call.kernel, Product), self.call
        return self.call.kernel

    def kernel(self) -> UserKernel:
        """The template with constants and formulas before it."""
        left, stored, *given = self.tensors
        (*batch, m, k), n = left.shape, extent(self.product.results[0].vars[-1])
        batch = [self._cut.matrices] if self._cut.matrices else batch
        self.sizes += self._asked()
        names = {str(e): f"given[{len(given) + at}]" for at, e in enumerate(self.sizes)}
        by_row = self.around.by_row
        finish, checks = results_of(self.product, given, self.outs, names, False, by_row)
        cut, dialect, right = self._cut, DIALECTS[self.gpu.backend], self.product.right
        made = ""
        if right is not None:
            float8, edge = dialect.converts_float8(self.gpu), self.tunes or n % cut.columns != 0
            made = operand_of(right, stored, given, names, cut.depth, edge, float8)
        sizes, versions = (product(batch), m, n, k), self._versions()
        if any(v.aligned for v in versions):
            finish += f"\n\n{results_of(self.product, given, self.outs, names, True, by_row)[0]}"
        variants = tuple(self._variant(v, sizes, checks) for v in versions)
        more = ["described_product"] if any(v.described for v in versions) else []
        text = self.module_text(self._tf32, (finish, made), "product", *more)
        rival, cold = (self._rival(), (1,)) if self.tunes else (None, ())
        return UserKernel(self.product.name, text, self.pointers(), variants, rival, cold)

    def _asked(self) -> list[Size]:
        """Sizes that only a call tells: of what results are computed with, and where they lie."""
        made = [r for r in (*self.product.results, self.product.right) if r is not None]
        asked: list[Size] = [e for r in made for n in walk((r.body,)) for e in exprs_of(n)]
        asked += (e for r in made for e in r.index or ())
        asked += (e for x in (*self.tensors[1:], *self.outs) for e in (*x.shape, *x.strides))
        own = {v.symbol for r in made for v in r.vars}
        found = {a.expr for e in asked for a in free_symbols(e) if a not in own and not is_arg(a)}
        return sorted(found - {*self.sizes}, key=str)

    def _rival(self) -> Rival | None:
        """What may be faster; None: the vendor has no such product."""
        operator, right = self.product.operator, self.product.right
        if operator is None or right is not None:
            return None
        if self._cut.parts > 1:  # a kernel behind it adds them up
            return Rival(operator, 0, -_KERNEL_US)
        if operator.is_followed:
            return Rival(operator)
        return Rival(operator, self._beside_nbytes(operator))

    def _beside_nbytes(self, operator: Operator) -> int:
        """Bytes that a kernel beside the operator moves; 0 if it needs none."""
        results, (left, right, *others) = self.product.results, self.tensors
        nodes = [n for r in results for n in walk((r.body,))]
        given = {n.attr.buf for n in nodes if isinstance(n.attr, Load)} - {PRODUCT, PARTNER}
        made = sum(map(self._nbytes, self.outs))
        columns = right.shape[-1]
        if (
            len(results) == 1
            and {n.op for n in nodes} <= _VENDORS_OPS[operator.name]
            and len(given) <= min(operator.dims, 1)
            and self._is_flat(results[0], self.outs[0])
            and (self._is_whole or self.dtype(self.outs[0]) == self.dtype(left))
        ):  # from rows that are aligned to rows without gaps
            return 2 * made if isinstance(columns, int) and columns % _UNIT else 0
        shape = (*left.shape[:-1], columns)
        itself = self._nbytes(replace(left, shape=shape))
        read = sum(map(self._nbytes, others)) - (itself if operator.dims > 1 else 0)
        return made + itself + max(0, read)

    def _nbytes(self, x: TensorArg) -> int:
        """Bytes of a tensor; 0 where its size is not known."""
        size = product(x.shape)
        return size * self.buffers[x.buf].dtype.nbytes if isinstance(size, int) else 0

    def _is_flat(self, r: Pointwise, out: TensorArg) -> bool:
        """Whether a result lies as the product does, row by row without gaps."""
        _, b, i, j = r.vars
        m, n = extent(i), extent(j)
        at = total(e * s for e, s in zip(r.index or (), out.strides, strict=True))
        return at in (i * n + j, (b * m + i) * n + j)

    @property
    def _cut(self) -> Cut:
        """How it is cut, as planned."""
        assert isinstance(self.product.how, Cut), self.product
        return self.product.how

    @property
    def _is_whole(self) -> bool:
        """Whether factors are integers of 8 bits."""
        return self.dtype(self.tensors[0]) == "i8"

    @property
    def _tf32(self) -> int:
        """As of `Cut`, where the device has what rounds."""
        able = DIALECTS[self.gpu.backend].rounds_to_tf32(self.gpu)
        return self._cut.tf32 if able else 0

    @property
    def _factor_nbytes(self) -> int:
        """Bytes of a number of a factor."""
        return self.buffers[self.tensors[0].buf].dtype.nbytes

    def _versions(self) -> list[_Version]:
        """Ways to cut it for which a multiprocessor has room: as planned, then others that are
        worth measuring. Where it has room for none of them, narrower and lower than planned."""
        wanted = self._wanted()
        if found := [v for v in wanted if self._fits(v)]:
            return found
        v = replace(wanted[0], described=False, aligned=False)
        while not self._fits(v) and max(v.cut.rows, v.cut.columns) > _LEAST_TILE:
            side = "columns" if v.cut.columns >= v.cut.rows else "rows"
            v = replace(v, cut=replace(v.cut, **{side: getattr(v.cut, side) // 2}))
        return [v]

    def _wanted(self) -> list[_Version]:
        """Ways to cut it, the one that is planned first. The right matrix is made a step of one
        depth at a time."""
        cut, made = self._cut, self.product.right is not None
        if self._tf32 == 3 and cut.rows >= _WIDE:
            return [_Version(cut, _MOST_WARPS if cut.is_large else 4, _IN_TWO_STAGES)]
        if cut.is_large:
            return self._large()
        if self.around.by_row and not made:
            if self._tf32 == 3 and cut.columns == _FEW_COLUMNS:
                return [_Version(cut, 4, _FEW_TURNS, at_once=2)]
            return [_Version(cut, 2 if cut.columns < _FEW_COLUMNS else 4, _MANY_STAGES)]
        found = [_Version(cut)]
        stages, m = _STAGES if made else 0, self.tensors[0].shape[-2]
        many = isinstance(m, int) and m > _WIDE and not made and cut.parts == 1
        if self.tunes and not cut.matrices:  # whose ends nobody knows
            found += (
                _Version(replace(cut, rows=rows, columns=columns, depth=depth), warps, stages)
                for rows in {cut.rows: 0, cut.rows if many else min(cut.rows, 32): 0}
                for columns, nbytes, warps in _OTHERS
                for depth in (nbytes // max(2, self._factor_nbytes),)
                if columns <= 2 * cut.columns and (not made or depth == cut.depth)
            )
            if many:
                found += self._large()
        return list(dict.fromkeys(found))

    def _large(self) -> list[_Version]:
        """Ways to cut a product of large tiles."""
        cut, nbytes, able = self._cut, self._factor_nbytes, self._is_described()
        if self.around.by_row and not able:  # wide tiles are slow otherwise
            cut = replace(cut, columns=min(cut.columns, _NARROW))
        tiles = [(*tile, True) for tile in _DESCRIBED_TILES if able]
        tiles += ((*tile, False) for tile in _LARGE_TILES)
        found = []
        for rows, columns, depth, warps, stages, described in tiles:
            shape = replace(cut, rows=rows, columns=columns, depth=2 * depth // nbytes)
            v = _Version(shape, warps, stages, described=described)
            found.append(v)
            if not described and self._kinds(shape) > 1:
                found.append(replace(v, aligned=True))
        n = self.tensors[1].shape[-1]
        # Where each number is written by itself, the next tile's loads should be under way.
        slow = cut.columns == _NARROW and isinstance(n, int) and n % 2 == 1
        if self.around.by_row:
            far = able and (cut.columns > _NARROW or self._are_many(cut))
            if far and cut.columns == _NARROW and self._is_brief():
                return [_Version(cut, _MOST_WARPS, _PAIRED_STAGES)]
            found.sort(key=lambda v: (v.cut != cut, v.described != far, v.warps != _MOST_WARPS))
        else:
            found.sort(key=lambda v: (v.cut != cut, v.described != slow))
        return found if self.tunes else found[:1]

    def _are_many(self, cut: Cut) -> bool:
        """Whether there are more tiles than multiprocessors: programs that stay are faster then.
        1024 x 5632 x 2048 takes 38 us so, and 44 by others; 2048 x 768 x 768, of 96 tiles, 8.7 us
        and 6.7 (H200)."""
        m, n = self.tensors[0].shape[0], self.tensors[1].shape[1]
        tiles = product((ceildiv(m, cut.rows), ceildiv(n, cut.columns)))
        return isinstance(tiles, int) and tiles > self.around.multiprocessors

    def _is_brief(self) -> bool:
        """Whether two programs share a multiprocessor: sums are short, and no second matrix is read
        behind them, for which registers are too few."""
        k, bodies = self.tensors[0].shape[-1], [r.body for r in self.product.results]
        vectors = all(sum(s != 0 for s in x.strides) < 2 for x in self.tensors[2:])
        long = sum(map(node_cost, walk(bodies))) >= _LONG_RESULT
        return isinstance(k, int) and k <= _BRIEF_DEPTH * (1 + long) and vectors

    def _is_described(self) -> bool:
        """Whether programs can load the factors by descriptors. Tensor cores take rows of the right
        one as they lie if numbers have 16 bits."""
        left, right = self.tensors[:2]
        known = [n for n in (*left.shape, *left.strides, *right.strides) if isinstance(n, int)]
        if len(left.shape) != 2 or len(known) != 6 or not isinstance(right.shape[1], int):
            return False
        _, _, row, one, down, along = known
        far = one == 1 and (down == 1 or (along == 1 and self._factor_nbytes == 2))
        even = all(n and n * self._factor_nbytes % _LINE == 0 for n in (row, max(down, along)))
        able = DIALECTS[self.gpu.backend].has_descriptors(self.gpu) and self._cut.parts == 1
        plain = self.product.right is None and not self.product.half and not self._tf32
        return able and far and even and self.around.aligned and plain

    def _kinds(self, cut: Cut) -> int:
        """How many rows of the results follow each other that differ in alignment, where tiles can
        have rows of one kind each; else 1."""
        left, right = self.tensors[:2]
        m, n = left.shape[-2], extent(self.product.results[0].vars[-1])
        if len(left.shape) != 2 or not isinstance(m, int) or not isinstance(n, int):
            return 1
        if self.product.half or self.product.parts:
            return 1
        kinds = _UNIT // math.gcd(n, _UNIT)
        flat = all(
            self._is_flat(r, out) and self.buffers[out.buf].dtype.nbytes > 1
            for r, out in zip(self.product.results, self.outs, strict=True)
        )
        far = right.strides[0] == 1 and self.product.right is None and cut.parts == 1
        return kinds if flat and far and m >= kinds * cut.rows else 1

    def _variant(self, v: _Version, sizes: Sequence[Size], checks: bool) -> Variant:
        """One way to launch it. sizes: products, rows, columns and terms of a sum."""
        (batch, m, n, k), cut, dialect = sizes, v.cut, DIALECTS[self.gpu.backend]
        width, kinds = self._factor_nbytes, self._kinds(cut) if v.aligned else 1
        step = (cut.rows + cut.columns) * cut.depth * v.at_once * width
        high = ceildiv(m, cut.rows * kinds) * kinds
        wide = ceildiv(n + (_UNIT - 1 if kinds > 1 else 0), cut.columns)
        grid = product((batch, high, wide, cut.parts))
        many = isinstance(m, int) and m > _WIDE
        shared = many and isinstance(grid, int) and grid > self.around.multiprocessors
        stages = self._stages(v, step, 2 if shared else 1)
        constants: dict[str, int | str] = {
            "rows": cut.rows, "columns": cut.columns, "depth": cut.depth, "stages": stages,
            "whole": self._is_whole, "group": _group(cut, high, k * width),
        }  # fmt: skip
        if v.described:
            fits = shared_nbytes(self.gpu) // (stages * step + _FINISH_NBYTES)
            assert isinstance(grid, int), "sizes are known"
            grid = min(grid, self.around.multiprocessors * max(1, min(fits, 8 // v.warps)))
            across = self.tensors[1].strides[0] != 1
            constants |= {"piece": self._piece(v, stages), "across": across}
        else:
            constants |= {
                "kinds": kinds, "parts": cut.parts, "half": self.product.half,
                "matrices": cut.matrices, "tf32": self._tf32, "turned": self._is_turned(cut),
                "at_once": v.at_once,
                "row_edge": m % (cut.rows * kinds) != 0,
                "column_edge": kinds == 1 and n % cut.columns != 0,
                "depth_edge": k % (cut.depth * v.at_once) != 0,
                "made": self.product.right is not None,
            }  # fmt: skip
        options = {
            "num_warps": v.warps, "num_stages": stages, "sanitize_overflow": False,
            "enable_reflect_ftz": False, "debug": checks,
        }  # fmt: skip
        if self._tf32 == 3:
            options["maxnreg"] = _IN_TWO_REGISTERS
        name = "described_product" if v.described else "product"
        call = f"{name}({self._arguments((m, n, k), constants)})"
        if dialect.starts_early(self.gpu):  # before the first access to memory
            options["launch_pdl"] = True
            call = "\n    ".join([dialect.wait, *self._release(dialect), call])
        return Variant(call, tuple(sorted(options.items())), grid)

    def _is_turned(self, cut: Cut) -> bool:
        """Whether tiles are computed transposed: tensor cores want many rows of the left factor,
        take the right one in few columns, and one that is made or in two parts by columns: 2048 x
        768 x 3072 takes 128 us so, and 257 else (H200)."""
        made = self.product.right is not None
        across = self._tf32 == 3 and self.tensors[1].strides[-1] == 1
        return cut.columns >= _WIDE and (cut.rows < _WIDE or made or across)

    def _stages(self, v: _Version, step: int, programs: int) -> int:
        """Steps whose factors are on their way at once. step: bytes of one. programs: of a
        multiprocessor, which are to find room."""
        space, codes = shared_nbytes(self.gpu), v.cut.columns * v.cut.depth
        if self.product.right is not None and not v.stages:  # of which one tile is made
            width = self._factor_nbytes
            space, step = space // _CONVERTING - width * codes, step - (width - 1) * codes
        elif not v.stages:  # 2048 x 768 x 768 takes 7.7 us so, and 10.2 with one (H200)
            space //= programs
        taken = _BARRIERS + self._finish_nbytes(v, _LEAST_PIECE) if v.described else _SPARE
        return max(1, min(v.stages or _STAGES, (space - taken) // step))

    def _fits(self, v: _Version) -> bool:
        """Whether a multiprocessor has room for a program: for a step, or what results pass
        through. Where loads are under way meanwhile, for the next step and for results besides."""
        space, cut = shared_nbytes(self.gpu), v.cut
        step = (cut.rows + cut.columns) * cut.depth * self._factor_nbytes
        if v.described:
            return 2 * step + self._finish_nbytes(v, _LEAST_PIECE) + _BARRIERS <= space
        return max(step, self._finish_nbytes(v, cut.columns)) + _SPARE <= space

    def _piece(self, v: _Version, stages: int) -> int:
        """Columns of a tile that are finished at once: as many as there is room for beside
        steps."""
        step = (v.cut.rows + v.cut.columns) * v.cut.depth * self._factor_nbytes
        space, piece = shared_nbytes(self.gpu) - stages * step - _BARRIERS, v.cut.columns
        while piece > _LEAST_PIECE and self._finish_nbytes(v, piece) > space:
            piece //= 2
        return piece

    def _finish_nbytes(self, v: _Version, columns: int) -> int:
        """Bytes that so many columns of a tile of results pass through at most, where threads that
        store them, or load what is computed with them, have others than those that sum."""
        return v.cut.rows * columns * self._widest

    @property
    def _widest(self) -> int:
        """Bytes of the widest number that a tile has one of for each of its sums."""
        widest = [4, *(self.buffers[x.buf].dtype.nbytes for x in self.outs)]
        for r in self.product.results:
            own = {v.symbol for v in r.vars[-2:]}
            loads = ((n, n.attr) for n in walk((r.body,)) if isinstance(n.attr, Load))
            for n, load in loads:
                if n.args or own <= {a for e in load.index for a in free_symbols(e)}:
                    widest.append(n.dtype.nbytes)
        return max(widest)

    def _release(self, dialect: Dialect) -> list[str]:
        """What lets the next kernel come beside this one: where this is over so soon that coming
        counts. Programs that come early crowd where there is room first, which costs a kernel that
        takes long more than that."""
        factors = [self.buffers[x.buf].dtype.nbytes * product(x.shape) for x in self.tensors[:2]]
        few = all(isinstance(n, int) and n <= _BRIEF_NBYTES for n in factors)
        return [dialect.release] if self.around.waits and few else []

    def _arguments(self, sizes: Sequence[Size], constants: Mapping[str, int | str]) -> str:
        """What the template's function is called with."""
        n_given = len(self.tensors) - 2
        given = [f"p{at + 2}" for at in range(n_given)]
        outs = [f"p{len(self.tensors) + at}" for at in range(len(self.outs))]
        strides = [self._strides(x) for x in self.tensors[:2]]
        if self.product.right is not None:
            strides[1] = "(0, 0, 0)"
        lengths = [size_text(e, self.sizes, "tl.int32") for e in sizes]
        given += (f"s{at}" for at in range(len(self.sizes)))
        args = ("p0", "p1", tuple_text(given), tuple_text(outs), *strides, *lengths)
        args += tuple(f"{name}={x!r}" for name, x in constants.items())
        return ", ".join(args)

    def _strides(self, x: TensorArg) -> str:
        """The strides of a matrix, or of a batch of them."""
        strides = x.strides if len(x.strides) == 3 else (0, *x.strides)
        return tuple_text([size_text(s, self.sizes) for s in strides])
