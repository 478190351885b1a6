"""Convolutions of 3x3 by Winograd's method as C++: four results are made of sixteen products a
channel instead of thirty-six.

A tile is 4x4 points of the image and the 2x2 results in its middle. Its points become 16 sums of
points; for each of these, the sums of tiles times the same sums of the filters are a product of
matrices; results are sums of 9 of the 16 products. With rows of B, G and A as in `_IN` and so on:
result = A'[(G filter G') * (B' points B)]A.

Points that are infinite or no numbers would reach results that they are no part of: the tiles that
are transformed together with one are computed point by point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.kernel.cpu.packed import Writer, tile_of
from plait.kernel.cpu.packed_shared import LARGEST_TILE, MOST_ROWS, NEAR_NBYTES, filled, walk_texts
from plait.runtime.packed import DEEPEST
from plait.runtime.toolchain import Isa

MOST_BLOCKS = 4
"""Of rows of tiles that meet a matrix one after the other."""
_HEAD = """\
static thread_local f32 winograd_memory[{memory}] __attribute__((aligned(64)));
static const f32 winograd_zeros[{deepest}] = {{}};
"""
_IN = """\
static bool winograd_in( // sums of points of tiles; whether all are finite
    const f32* x, i64 from, i64 to, i64 down, i64 across, i64 height, i64 width, i64 top, i64 side,
    i64 depth, i64 apart) {
  vf32 seen = splat_f32(0.0f);
  for (i64 t = from; t < to; ++t) {
    const i64 y = t / across % down * 2 - top, z = t % across * 2 - side;
    const f32* const image = x + t / (across * down) * height * width * depth;
    const f32* p[16];
    for (i64 i = 0; i < 16; ++i) {
      const i64 h = y + i / 4, w = z + i % 4;
      const bool within = (u64)h < (u64)height && (u64)w < (u64)width;
      p[i] = within ? image + (h * width + w) * depth : winograd_zeros;
    }
    f32* into = winograd_memory + (t - from) * depth;
    i64 c = 0;
    for (; c + LANES <= depth; c += LANES, into += LANES) {
WHOLE
    }
    if (c < depth) {
PART
    }
  }
  for (i64 k = 0; k < LANES; ++k) if (seen[k] != seen[k]) return false;
  return true;
}
"""
_OUT = """\
static void winograd_out( // adds a row of products to results
    const vf32* sums, i64 count, i64 n, i64 i, vf32* made) {
  for (i64 k = 0; k < count; ++k) {
    const vf32 s1 = sums[n + k], s2 = sums[2 * n + k];
    const vf32 a = sums[k] + s1 + s2, b = s1 - s2 - sums[3 * n + k];
    if (i == 0) made[k] = a, made[n + k] = b;
    if (i == 1) made[2 * n + k] = a, made[3 * n + k] = b;
    if (i == 2) made[2 * n + k] -= a, made[3 * n + k] -= b;
    if (i == 3) made[2 * n + k] -= a, made[3 * n + k] -= b;
    if (i == 1 || i == 2) made[k] += a, made[n + k] += b;
  }
}
"""
_POINTS = """\
static void winograd_points( // a tile's results, point by point, of the sums of filters
    const f32* x, i64 t, i64 down, i64 across, i64 height, i64 width, i64 top, i64 side, i64 depth,
    const f32* b, i64 columns, i64 vectors, i64 apart, vf32* made) {
  const f32* const image = x + t / (across * down) * height * width * depth;
  for (i64 k = 0; k < 4 * vectors; ++k) {
    const i64 y = t / across % down * 2 - top + k / vectors / 2;
    const i64 z = t % across * 2 - side + k / vectors % 2;
    const f32* const own = b + k % vectors * LANES;
    vf32 sum = splat_f32(0.0f);
    for (i64 tap = 0; tap < 9; ++tap) {
      const i64 h = y + tap / 3, w = z + tap % 3;
      const i64 i = tap / 3 + (tap > 5), j = tap % 3 + (tap % 3 > 1);
      if ((u64)h >= (u64)height || (u64)w >= (u64)width) continue;
      const f32* const point = image + (h * width + w) * depth;
      const f32* g = own + (4 * i + j) * depth * columns;
      const i64 right = depth * columns, below = 4 * right;
      for (i64 c = 0; c < depth; ++c, g += columns) {
        vf32 f = ld_f32(g);
        if (i == 1) f -= ld_f32(g + below);
        if (j == 1) f -= ld_f32(g + right);
        if (i == 1 && j == 1) f += ld_f32(g + below + right);
        sum = v_fma_f32(splat_f32(point[c]), f, sum);
      }
    }
    made[k / vectors * apart + k % vectors] = sum;
  }
}
"""


def winograd_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """What the functions of such convolutions share."""
    memory = max(NEAR_NBYTES >> 2, _room(DEEPEST, max(MOST_ROWS.values())))  # a block at least
    head = _HEAD.format(memory=memory, deepest=DEEPEST)
    whole, part = ("\n".join(_sums_of_points(part)) for part in (False, True))
    inside = _IN.replace("WHOLE", whole).replace("PART", part)
    walk = _WALK.replace("ROOM", str(4 * MOST_BLOCKS * LARGEST_TILE))
    own = [filled(text, isa) for text in (head, inside, _OUT, _POINTS, walk)]
    return [*walk_texts(texts, isa), *own]


def _sums_of_points(part: bool) -> list[str]:
    """The sums of a tile's points, of a vector of channels: of rows, then of these."""
    load, store, left = ("ldn", "stn", ", depth - c") if part else ("ld", "st", "")
    lines = [f"const vf32 d{k} = {load}_f32(p[{k}] + c{left});" for k in range(16)]
    for j in range(4):
        a, b, c, d = (f"d{4 * i + j}" for i in range(4))
        for i, total in enumerate((f"{a} - {c}", f"{b} + {c}", f"{c} - {b}", f"{b} - {d}")):
            lines.append(f"const vf32 s{4 * i + j} = {total};")
    for i in range(4):
        a, b, c, d = (f"s{4 * i + j}" for j in range(4))
        for j, total in enumerate((f"{a} - {c}", f"{b} + {c}", f"{c} - {b}", f"{b} - {d}")):
            k = 4 * i + j
            lines.append(f"const vf32 v{k} = {total};")
            lines.append(f"seen = v_fma_f32(v{k}, splat_f32(0.0f), seen);")
            lines.append(f"{store}_f32(into + {k} * apart, v{k}{left});")
    return ["      " + line for line in lines]


def _room(depth: int, tiles: int) -> int:
    """Numbers of the sums of so many tiles."""
    return 16 * depth * tiles


# The walk over tiles. So many as are near are transformed before their products are made.
_WALK = """\
static i64 packed_winograd(
    i64 tid, i64 nthreads, void* const* bufs, i64 given, const i64* down, epilogue* finish,
    tile* make, i64 tall, i64 vectors, i64 span, i64 near, i64 top, i64 side, i64 depth,
    i64 columns, i64 rows, i64 height, i64 width, i64 high, i64 wide) {
  const f32* const x = (const f32*)bufs[0];
  const f32* const panels = (const f32*)bufs[1];
  const i64 below = (high + 1) / 2, across = (wide + 1) / 2;
  const i64 tiles = rows / (high * wide) * below * across, blocks = (tiles + tall - 1) / tall;
  const i64 n_panels = (columns + span - 1) / span;
  const i64 all = blocks * n_panels, end = all * (tid + 1) / nthreads;
  const i64 size = tall * vectors, apart = near * size, far = near * tall * depth;
  i64 have = -1, first = 0;
  bool finite = true;
  for (i64 job = all * tid / nthreads, some; job < end; job += some) {
    const i64 part = job / (near * n_panels), rest = job % (near * n_panels);
    const i64 left = blocks - part * near, most = left < near ? left : near;
    const i64 panel = rest / most, block = part * near + rest % most;
    some = most - rest % most < end - job ? most - rest % most : end - job;
    const i64 m = tiles * block / blocks, until = tiles * (block + some) / blocks;
    if (part != have) {
      have = part;
      first = tiles * (part * near) / blocks;
      const i64 last = tiles * (part * near + most) / blocks;
      finite = winograd_in(
          x, first, last, below, across, height, width, top, side, depth, far);
    }
    const i64 step = (span - 1 + some) / some;
    const i64 last = (panel + 1) * span < columns ? (panel + 1) * span : columns;
    for (i64 n = panel * span; n < last; n += vectors * LANES) {
      const f32* b = panels + panel * 16 * depth * span + n % span;
      vf32 sums[ROOM], results[ROOM];
      for (i64 i = 0; i < 16 && finite; ++i, b += depth * span) {
        for (i64 q = 0; q < some; ++q) {
          const i64 from = tiles * (block + q) / blocks;
          const i64 count = tiles * (block + q + 1) / blocks - from;
          const f32* lines[MOST_ROWS];
          const f32* const line = winograd_memory + i * far + (from - first) * depth;
          for (i64 j = 0; j < tall; ++j) lines[j] = line + (j < count ? j : 0) * depth;
          make(lines, 1, depth, b, span, b + (span + q * step) * depth, step,
               sums + i % 4 * apart + q * size);
        }
        if (i % 4 == 3) winograd_out(sums, some * size, apart, i / 4, results);
      }
      for (i64 t = m, q = 0, i = 0; t < until; ++t) {
        vf32* const made = results + q * size + i * vectors;
        if (!finite)
          winograd_points(x, t, below, across, height, width, top, side, depth, b, span, vectors,
                          apart, made);
        for (i64 k = 0; k < 4; ++k) { // of which the image may have fewer
          const i64 y = t / across % below * 2 + k / 2, z = t % across * 2 + k % 2;
          const i64 row = (t / (across * below) * high + y) * wide + z;
          if (y < high && z < wide)
            finish(bufs, down, made + k * apart, 0, 1, row, n, vectors, columns);
        }
        if (t + 1 == tiles * (block + q + 1) / blocks) ++q, i = 0; else ++i;
      }
    }
  }
  return 0;
}
"""


@dataclass
class WinogradWriter(Writer):
    """One such convolution."""

    def _call(self) -> tuple[str, str]:
        p, w = self.packed, self.packed.window
        assert w is not None, p
        tile = tile_of(p, self._n_tiles(), self.isa)
        near = min(MOST_BLOCKS, max(1, (NEAR_NBYTES >> 2) // _room(p.depth, tile.rows)))
        numbers = tile.rows, tile.vectors, p.width, near, *w.padding, p.depth, p.columns
        told = ", ".join(map(str, numbers))
        return "", f"packed_winograd({tile}, {told}, {self.given_sizes()})"

    def _n_tiles(self) -> int | None:
        """The tiles of all images; None where that is not known."""
        rows, _, _, high, wide = self.sizes
        if not (isinstance(rows, int) and isinstance(high, int) and isinstance(wide, int)):
            return None
        return rows // max(high * wide, 1) * (-(-high // 2) * -(-wide // 2))
