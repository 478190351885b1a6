"""Products with matrices that are not packed as C++: a thread packs a panel of one, a stretch of
its rows at a time, and multiplies rows by it while it is in a core's cache.

Comes in: what is known of a loose `Product`. Goes out: the text of a function, which shares tiles
with products of packed matrices (`packed_shared.py`). What an element is the sum of, and in which
order, follows from the depth alone: not from how many rows there are, nor from where in a tile one
is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.ir.dtypes import DType, bf16, f16, f32
from plait.kernel.cpu.expr import memory, vector_cast
from plait.kernel.cpu.packed import Writer, tile_of
from plait.kernel.cpu.packed_shared import filled, indented, stretch_of, turned, walk_texts
from plait.runtime.toolchain import Isa

DTYPES = (f32, bf16, f16)
"""Of right matrices."""
_LONGEST_SUM = 256
"""So many products are added up one after the other: errors are vendors', a panel stays near."""
WIDEST = 80
"""Columns of a panel, at most."""
_ROWS_NUMBERS = 1 << 15
"""Sums of rows that wait for the next stretch: 128 KiB."""
_MOST_ROWS = 192
"""So many rows share a panel that was packed: more take the sums out of the cache."""

_TYPES = """\
typedef void pack(
    const void* matrix, i64 at, i64 down, i64 right, i64 count, i64 left, f32* into, i64 span);
"""
_MEMORY = f"""\
static thread_local f32 loose_panel[{_LONGEST_SUM * 3 // 2 * WIDEST}] __attribute__((aligned(64)));
static thread_local vf32 loose_sums[{_ROWS_NUMBERS} / LANES];
"""
_PACK = """\
__attribute__((noinline)) static void pack_NAME( // so many rows of columns, of which `left` exist
    const void* matrix, i64 at, i64 down, i64 right, i64 count, i64 left, f32* into, i64 span) {
  const TYPE* const from = (const TYPE*)matrix + at;
  if (right == 1) {
    for (i64 k = 0; k < count; ++k)
      for (i64 j = 0; j < span; j += LANES)
        st_f32(into + k * span + j, LOADED(from + k * down + j, left - j));
    return;
  }
  for (i64 j = 0; j < span; j += LANES)
    for (i64 k = 0; k < count; k += LANES)
      turn_NAME(from + j * right + k, right, left - j, count - k, into + k * span + j, span);
}
"""
_TURN = """\
static void turn_NAME( // LANES columns, and as many numbers of each
    const TYPE* from, i64 right, i64 columns, i64 numbers, f32* into, i64 span) {
ROWS
}
"""
# of: rows that each matrix is for. apart, down, right: how far matrices, their rows and columns lie
# apart.
_WALK = """\
__attribute__((noinline)) static i64 packed_loose(
    i64 tid, i64 nthreads, void* const* bufs, i64 given, const i64* down_, epilogue* finish,
    tile* make, pack* packs, i64 tall, i64 vectors, i64 span, i64 each, i64 depth, i64 columns,
    i64 rows, i64 of, i64 apart, i64 down, i64 right) {
  const f32* const x = (const f32*)bufs[0];
  const i64 panels = (columns + span - 1) / span, matrices = of > 0 ? rows / of : 0;
  const i64 able = MOST_SHARED < SUMS / span ? MOST_SHARED : SUMS / span;
  i64 most = able / tall * tall, blocks = (of + most - 1) / most;
  const i64 wanted = 4 * nthreads, units_ = matrices * panels;
  if (units_ * blocks < wanted && units_ > 0) { // few: rows are shared out
    const i64 parts = (wanted + units_ - 1) / units_, tiles = (of + tall - 1) / tall;
    blocks = parts < tiles ? parts : tiles;
    blocks = blocks > (of + most - 1) / most ? blocks : (of + most - 1) / most;
  }
  const i64 units = units_ * blocks, end = units * (tid + 1) / nthreads;
  for (i64 unit = units * tid / nthreads; unit < end; ++unit) {
    const i64 block = unit % blocks, panel = unit / blocks % panels;
    const i64 matrix = unit / blocks / panels;
    const i64 first = of * block / blocks, last = of * (block + 1) / blocks;
    const i64 begin = panel * span, left = columns - begin;
    for (i64 from = 0; from < depth; from += each) {
      const i64 some = depth - from < each ? depth - from : each;
      packs(bufs[1], matrix * apart + from * down + begin * right, down, right, some, left,
            loose_panel, span);
      vf32* waiting = loose_sums;
      for (i64 m = first; m < last; m += tall) {
        const i64 count = last - m < tall ? last - m : tall, row = matrix * of + m;
        const f32* lines[MOST_ROWS];
        for (i64 i = 0; i < tall; ++i) lines[i] = x + (row + (i < count ? i : 0)) * depth + from;
        for (i64 n = 0; n < span && n < left; n += vectors * LANES) {
          const f32* const b = loose_panel + n;
          vf32 sums[TILE];
          make(lines, 1, some, b, span, b, 0, sums);
          for (i64 k = 0; from > 0 && k < tall * vectors; ++k) sums[k] = waiting[k] + sums[k];
          if (from + some < depth)
            for (i64 k = 0; k < tall * vectors; ++k) waiting[k] = sums[k];
          else
            finish(bufs, down_, sums, vectors, count, row, begin + n, vectors, columns);
          waiting += tall * vectors;
        }
      }
    }
  }
  return 0;
}
"""


@dataclass
class LooseWriter(Writer):
    """One such product. right: the dtype of its right matrix."""

    right: DType = f32

    def _call(self) -> tuple[str, str]:
        p, (*_, of) = self.packed, self.sizes
        tile = tile_of(p, of, self.isa)
        strides = self.tensors[1].strides
        steps = ", ".join(map(str, (*(0,) * (3 - len(strides)), *strides)))
        numbers = (
            tile.rows,
            tile.vectors,
            p.width,
            stretch_of(p.depth, _LONGEST_SUM),
            p.depth,
            p.columns,
        )
        told = ", ".join(map(str, numbers))
        packs = f"pack_{self.right.name}"
        return "", f"packed_loose({tile}, {packs}, {told}, {self.given_sizes()}, {steps})"


def loose_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """What such functions share."""
    used = [d for d in DTYPES if any(f"pack_{d.name}" in text for text in texts)]
    numbers = {"MOST_SHARED": _MOST_ROWS, "SUMS": _ROWS_NUMBERS}
    walk = _WALK
    for name, number in numbers.items():
        walk = re.sub(rf"\b{name}\b", str(number), walk)
    own = [_TYPES, _MEMORY, *(text for d in used for text in _packs(d, isa)), walk]
    return [*walk_texts(texts, isa), *(filled(text, isa) for text in own)]


def _packs(d: DType, isa: Isa) -> tuple[str, str]:
    """What packs a panel of a matrix of this dtype."""
    t = memory(d)

    def loaded(place: str, left: str) -> str:
        (text,) = vector_cast((f"ldn_{t}({place}, {left})",), d, f32)
        return text

    n = isa.lanes
    lines = [
        f"const vf32 r{i} = columns > {i} ? {loaded(f'from + {i} * right', 'numbers')} : vf32{{}};"
        for i in range(n)
    ]
    exchange, names = turned([f"r{i}" for i in range(n)])
    stores = (f"if (numbers > {i}) st_f32(into + {i} * span, {x});" for i, x in enumerate(names))
    rows = indented([*lines, *exchange, *stores]).rstrip("\n")
    turn = _TURN.replace("ROWS", rows)
    pack = _PACK.replace(
        "LOADED(from + k * down + j, left - j)", loaded("from + k * down + j", "left - j")
    )
    made = (text.replace("NAME", d.name).replace("TYPE", t) for text in (turn, pack))
    return tuple(made)  # type: ignore[return-value]
