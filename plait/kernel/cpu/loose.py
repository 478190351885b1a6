"""Products with matrices that are not packed as C++: a thread packs a panel of one, a stretch of
its rows at a time, and multiplies rows by it while it is in a core's cache.

Comes in: what is known of a loose `Product`. Goes out: the text of a function, which shares tiles
with products of packed matrices (`packed_shared.py`): rows and panels are widened to float32. Where
the machine multiplies pairs of bfloat16 numbers, these have tiles of their own, and a row of a
panel has two of the matrix. What an element is the sum of, and in which order, follows from the
depth alone: not from how many rows there are, nor from where in a tile one is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.ir.dtypes import DTYPES, DType, bf16, f32
from plait.kernel.cpu.expr import memory, vector_cast
from plait.kernel.cpu.packed import Writer, tile_of
from plait.kernel.cpu.packed_shared import LINE, filled, indented, stretch_of, turned, walk_texts
from plait.kernel.cpu.simd.arithmetic import WITH_PAIRS
from plait.runtime.toolchain import Isa

_LONGEST_SUM = 256
"""So many products, or pairs of them, are added up one after the other: errors are vendors', a
panel stays near."""
_MOST_SUM = _LONGEST_SUM * 3 // 2
_FEW_ROWS, _SHORT = 64, 128
"""Where rows are few, panels of pairs hold so many rows of the matrix: the next one comes from
memory sooner. No bit depends on it: sums go on where they were."""
WIDEST = 80
"""Columns of a panel, at most."""
_ROWS_NUMBERS = 1 << 15
"""Sums of rows that wait for the next stretch: 128 KiB."""
_MOST_ROWS = 192
"""So many rows share a panel that was packed: more take the sums out of the cache."""

_TYPES = """\
typedef void pairs_tile(
    const u16* const* rows, i64 length, const u32* b, i64 width, bool more, vf32* sums);
"""
_MEMORY = f"""\
static thread_local f32 loose_panel[{_MOST_SUM * WIDEST}] __attribute__((aligned(64)));
static thread_local vf32 loose_sums[{_ROWS_NUMBERS} / LANES];
static thread_local vf32 loose_parts[({_FEW_ROWS} + MOST_ROWS) * {WIDEST} / LANES];
"""
_WIDE_MEMORY = f"static thread_local f32 loose_rows[MOST_ROWS * {_MOST_SUM}];\n"
# Packs a panel from `at` on, so many rows of columns, of which `left` exist. next: where the one
# after it begins, which comes from far memory meanwhile: a few rows are multiplied sooner than
# that. HELD: rows of the matrix in a row of a panel.
_PACK = """\
static void turn_NAME( // LANES columns, and as many rows of the panel
    const TYPE* from, i64 right, i64 columns, i64 numbers, f32* into, i64 span) {
ROWS
}
__attribute__((noinline)) static void pack_NAME(
    const void* matrix, i64 at, i64 next, i64 down, i64 right, i64 count, i64 left, void* panel,
    i64 span) {
  const TYPE* from = (const TYPE*)matrix + at;
  const TYPE* far = (const TYPE*)matrix + next;
  f32* into = (f32*)panel;
  if (right == 1) {
    for (i64 k = 0; k < count; k += HELD, from += HELD * down, far += HELD * down, into += span) {
      for (i64 i = 0; i < HELD; ++i)
        for (i64 j = 0; j < span; j += A_LINE) __builtin_prefetch(far + i * down + j, 0, 2);
      for (i64 j = 0; j < span; j += LANES) {
ROW
      }
    }
    return;
  }
  for (i64 j = 0; j < span; j += LANES)
    for (i64 k = 0; k < count; k += HELD * LANES) {
      if (k % A_LINE == 0)
        for (i64 i = j; i < j + LANES; ++i) __builtin_prefetch(far + i * right + k, 0, 2);
      turn_NAME(
          from + j * right + k, right, left - j, count - k, into + k / HELD * span + j, span);
    }
}
"""
_ROW = "st_f32(into + j, lanes_NAME(from + j, left - j));"
# Behind an odd number of rows there is one of zeros.
_ROW_OF_PAIRS = """\
const vu32 first = cvt_u16_u32(ldn_u16(from + j, left - j));
const vu16 second = k + 1 < count ? ldn_u16(from + down + j, left - j) : vu16{};
st_u32((u32*)into + j, first | cvt_u16_u32(second) << 16);"""
_LANES = """\
static inline vf32 lanes_NAME(const TYPE* p, i64 n) { // of n numbers
  if (n >= LANES) return WHOLE;
  return PART;
}
"""
_LANES_OF_PAIRS = """\
static inline vf32 lanes_pairs(const u16* p, i64 n) { // of n numbers
  if (n >= 2 * LANES) return ld_f32((const f32*)p);
  u16 pairs[2 * LANES];
  st_u16(pairs, ldn_u16(p, n));
  st_u16(pairs + LANES, ldn_u16(p + LANES, n - LANES));
  return ld_f32((const f32*)pairs);
}
static inline u32 pair_at(const u16* p) {
  u32 x;
  __builtin_memcpy(&x, p, 4);
  return x;
}
"""
# of: rows that each matrix is for. apart, down, right: how far matrices, their rows and columns lie
# apart. Rows are shared out in whole tiles. each: so many numbers are added up before sums are
# added to those of numbers before them. few: so many are in a panel where rows are few.
_WALK = """\
__attribute__((noinline)) static i64 packed_loose_NAME(
    i64 tid, i64 nthreads, void* const* bufs, i64 given, const i64* down_, epilogue* finish,
    KIND* make, i64 tall, i64 vectors, i64 span, i64 few, i64 each, i64 depth,
    i64 columns, i64 rows, i64 of, i64 apart, i64 down, i64 right) {
  const TYPE* const x = (const TYPE*)bufs[0];
  const i64 panels = (columns + span - 1) / span, matrices = of > 0 ? rows / of : 0;
  const i64 able = MOST_SHARED < SUMS / span ? MOST_SHARED : SUMS / span, most = able / tall;
  const i64 tiles = (of + tall - 1) / tall, fewest = (tiles + most - 1) / most;
  const i64 wanted = 4 * nthreads, units_ = matrices * panels;
  i64 blocks = fewest;
  if (units_ * blocks < wanted && units_ > 0) { // few: rows are shared out
    const i64 parts = (wanted + units_ - 1) / units_;
    blocks = parts < tiles ? parts : tiles;
    blocks = blocks > fewest ? blocks : fewest;
  }
  const i64 deep = of > FEW ? each : few;
  const i64 units = units_ * blocks, end = units * (tid + 1) / nthreads;
  for (i64 unit = units * tid / nthreads; unit < end; ++unit) {
    const i64 block = unit % blocks, panel = unit / blocks % panels;
    const i64 matrix = unit / blocks / panels, begin = panel * span, left = columns - begin;
    const i64 first = tiles * block / blocks * tall, until = tiles * (block + 1) / blocks * tall;
    const i64 last = until < of ? until : of, then = (unit + 1) / blocks;
    for (i64 from = 0, some; from < depth; from += some) {
      const i64 since = from / each * each, stop = since + each < depth ? since + each : depth;
      some = stop - from < deep ? stop - from : deep;
      const i64 at = matrix * apart + from * down + begin * right;
      const i64 next = from + some < depth ? at + some * down
                                           : then / panels * apart + then % panels * span * right;
      pack_NAME(bufs[1], at, next, down, right, some, left, loose_panel, span);
      vf32* waiting = loose_sums;
      for (i64 m = first; m < last; m += tall) {
        const i64 count = last - m < tall ? last - m : tall, row = matrix * of + m;
        const TYPE* lines[MOST_ROWS];
        for (i64 i = 0; i < tall; ++i) lines[i] = x + (row + (i < count ? i : 0)) * depth + from;
WIDEN
        for (i64 n = 0; n < span && n < left; n += vectors * LANES) {
          const f32* const b = loose_panel + n;
          vf32 own[TILE];
          vf32* const sums = deep == each ? own : loose_parts + (waiting - loose_sums);
          make(MADE_OF, sums);
          for (i64 k = 0; from + some == stop && k < tall * vectors; ++k)
            waiting[k] = since > 0 ? waiting[k] + sums[k] : sums[k];
          if (from + some == depth)
            finish(bufs, down_, waiting, vectors, count, row, begin + n, vectors, columns);
          waiting += tall * vectors;
        }
      }
    }
  }
  return 0;
}
"""
_WIDEN = f"""\
const f32* wide[MOST_ROWS];
for (i64 i = 0; i < tall; ++i) {{
  f32* const into = loose_rows + (i < count ? i : 0) * {_MOST_SUM};
  for (i64 k = 0; k < some && i < count; k += LANES) {{
    __builtin_prefetch(lines[i] + tall * depth + k);
    st_f32(into + k, lanes_NAME(lines[i] + k, some - k));
  }}
  wide[i] = into;
}}
"""
_MADE_OF = "lines, 1, some, b, span, b, 0"
_MADE_OF_PAIRS = "lines, some, (const u32*)b, span, from > since"


@dataclass(frozen=True)
class _Kind:
    """What a panel holds of matrices of a dtype.

    held: rows of the matrix in one of a panel
    lanes: what loads numbers that lie side by side
    row: what packs LANES columns of such a row
    widen: what makes numbers of the left matrix such that tiles take them
    tile, made_of: the type of tiles, and what one is given
    """

    dtype: DType
    held: int
    lanes: str
    row: str
    widen: str
    tile: str
    made_of: str


_PAIRS = _Kind(bf16, 2, _LANES_OF_PAIRS, _ROW_OF_PAIRS, "", "pairs_tile", _MADE_OF_PAIRS)


def _kind(d: DType) -> _Kind:
    """Of numbers that are computed with in float32."""
    t = memory(d)
    (whole,), (part,) = (vector_cast((x,), d, f32) for x in (f"ld_{t}(p)", f"ldn_{t}(p, n)"))
    lanes = _LANES.replace("WHOLE", whole).replace("PART", part)
    if d == f32:
        return _Kind(d, 1, lanes, _ROW, "", "tile", _MADE_OF)
    return _Kind(d, 1, lanes, _ROW, _WIDEN, "tile", _MADE_OF.replace("lines", "wide"))


@dataclass
class LooseWriter(Writer):
    """One such product. factors: the dtype of its matrices."""

    factors: DType = f32

    def _call(self) -> tuple[str, str]:
        p, (*_, of) = self.packed, self.sizes
        tile = tile_of(p, of, self.isa)
        in_pairs = self.factors == bf16 and self.isa.bf16_pairs
        name, held = ("pairs", 2) if in_pairs else (self.factors.name, 1)
        each = stretch_of(p.depth, _LONGEST_SUM * held)
        each += each % held
        make = f"pairs_{tile.rows}x{tile.vectors}" if in_pairs else str(tile)
        numbers = (
            tile.rows,
            tile.vectors,
            p.width,
            min(each, _SHORT) if in_pairs else each,
            each,
            p.depth,
            p.columns,
        )
        strides = self.tensors[1].strides
        steps = (*(0,) * (3 - len(strides)), *strides)
        told = ", ".join((make, *map(str, numbers), self.given_sizes(), *map(str, steps)))
        return "", f"packed_loose_{name}({told})"


def loose_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """What such functions share."""
    names = sorted({n for text in texts for n in re.findall(r"\bpacked_loose_(\w+)\(", text)})
    tiles = {(int(r), int(v)) for t in texts for r, v in re.findall(r"\bpairs_(\d+)x(\d+)", t)}
    own = [_TYPES, _MEMORY]
    if {*names} & {"bf16", "f16"}:
        own.append(_WIDE_MEMORY)
    own += (text for name in names for text in _functions(name, isa))
    own += (_tile_of_pairs(*tile, isa) for tile in sorted(tiles))
    return [*walk_texts(texts, isa), *(filled(text, isa) for text in own)]


def _functions(name: str, isa: Isa) -> list[str]:
    """What loads numbers, what packs panels, and the walk over tiles, of matrices of one kind."""
    kind = _PAIRS if name == "pairs" else _kind(DTYPES[name])
    lines = [
        f"const vf32 r{i} = columns > {i} ? lanes_NAME(from + {i} * right, numbers) : vf32{{}};"
        for i in range(isa.lanes)
    ]
    exchange, made = turned([f"r{i}" for i in range(isa.lanes)])
    stores = (
        f"if (numbers > {kind.held * i}) st_f32(into + {i} * span, {x});"
        for i, x in enumerate(made)
    )
    parts = {
        "ROWS": "\n".join((*lines, *exchange, *stores)), "ROW": kind.row, "WIDEN": kind.widen,
        "MADE_OF": kind.made_of, "KIND": kind.tile, "TYPE": memory(kind.dtype), "HELD": kind.held,
        "FEW": _FEW_ROWS, "A_LINE": 4 * LINE // kind.dtype.nbytes, "MOST_SHARED": _MOST_ROWS,
        "SUMS": _ROWS_NUMBERS,
    }  # fmt: skip
    return [_with(text, parts).replace("NAME", name) for text in (kind.lanes, _PACK, _WALK)]


def _with(text: str, parts: Mapping[str, object]) -> str:
    """A text with what stands for names: lines for one that stands alone."""
    for name, part in parts.items():

        def placed(found: re.Match[str], part: object = part) -> str:
            return "".join(f"{found[1]}{line}\n" for line in str(part).splitlines())

        text = re.sub(rf"^( *){name}\n", placed, text, flags=re.M)
        text = re.sub(rf"\b{name}\b", str(part), text)
    return text


def _tile_of_pairs(rows: int, vectors: int, isa: Isa) -> str:
    """Sums of products of numbers of rows with the rows of a panel of pairs. The last number of an
    odd length is one of a pair with 0."""
    sums = [(i, v) for i in range(rows) for v in range(vectors)]

    def step(pair: str) -> list[str]:
        out = [f"const vu32 b{v} = ld_u32(b + {v * isa.lanes});" for v in range(vectors)]
        for i in range(rows):
            out.append(f"const vu32 a{i} = splat_u32({pair.format(f'r{i}')});")
            out += [f"c{i}_{v} = sum_pairs(c{i}_{v}, a{i}, b{v});" for v in range(vectors)]
        return out

    lines = [f"vf32 {', '.join(f'c{i}_{v} = splat_f32(0.0f)' for i, v in sums)};", "if (more) {"]
    lines += [*(f"c{i}_{v} = sums[{k}];" for k, (i, v) in enumerate(sums)), "}"]
    lines += [f"const u16* const r{i} = rows[{i}];" for i in range(rows)]
    lines += [
        "i64 k = 0;",
        "for (; k + 1 < length; k += 2, b += width) {",
        *step("pair_at({} + k)"),
    ]
    lines += ["}", "if (k < length) {", *step("{}[k]"), "}"]
    lines += [f"sums[{k}] = c{i}_{v};" for k, (i, v) in enumerate(sums)]
    head = (
        f"__attribute__((noinline)) {WITH_PAIRS} static void pairs_{rows}x{vectors}(\n"
        "    const u16* const* rows, i64 length, const u32* b, i64 width, bool more, vf32* sums)"
    )
    return f"{head} {{\n{indented(lines)}}}\n"
