"""Convolutions with a filter for each channel as C++: some results of a row of the image at a time,
for some vectors of channels.

Threads share rows of results, and blocks of channels, whose filters stay near. Results whose filter
reaches beyond the image are computed one by one, of the points that there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.kernel.cpu.packed import Writer
from plait.kernel.cpu.packed_shared import GLOBAL, TYPES, as_global, filled, indented
from plait.runtime.toolchain import Isa

_BLOCK = 8
"""Vectors of channels."""
_RUN = 24
"""The most results that one call makes."""
_SUMS = (4, 6, 5, 8, 3)
"""Results in a row that are made at once, of two vectors each, the best first."""
_SUMS_OF_ONE = (8, 6, 5, 4, 3)
"""The same of one vector each."""


def depthwise_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """Types, and the declarations of what texts call, which stands in a unit of its own."""
    found = {int(r) for text in texts for r in re.findall(r"\beach_(\d+)x2", text)}
    sums = [f"{GLOBAL} each each_{r}x2;\n" for r in sorted(found)]
    return [TYPES, _TYPE, *sums, f"{GLOBAL} i64 packed_depthwise({_ARGUMENTS});\n"]


def depthwise_unit(isa: Isa) -> str:
    """The unit of the walk, and of all sums."""
    sums = [_function(r, 2, isa) for r in sorted({*_SUMS, *_SUMS_OF_ONE})]
    walk = _WALK.replace("ARGUMENTS", _ARGUMENTS).replace("CHANNELS", str(_BLOCK * isa.lanes))
    walk = walk.replace("RUN", str(_RUN)).replace("BLOCK", str(_BLOCK))
    last = (_function(1, 4, isa), as_global(filled(walk, isa)))
    return "".join((TYPES, _TYPE, *map(as_global, sums), *last))


def _function(results: int, vectors: int, isa: Isa) -> str:
    """The sums of some results in a row, at least so many as are made at once: of a few of them
    and of channels, then of the next ones; last of channels that are no such number of vectors."""
    lines: list[str] = []
    one = [] if isa.name == "avx512" else [(1, False)]  # whose masks cost nothing
    for v, part in (vectors, False), *one, (1, True):
        end = "c < channels" if part else f"c + {v * isa.lanes} <= channels"
        lines += [
            f"for (; {end}; c += {v * isa.lanes})",
            f"for (i64 i = 0, z; z = i + {results} <= count ? i : count - {results}, i < count; "
            f"i += {results}) {{",
            *_sums(results, v, part, isa),
            "}",
        ]
    head = (
        f"__attribute__((noinline)) static void each_{results}x{vectors}(\n"
        "    const f32* x, i64 step, i64 count, i64 high, i64 down, i64 wide, i64 right,\n"
        "    const f32* filter, i64 next, i64 n, i64 channels, vf32* sums)"
    )
    return f"{head} {{\n{indented(['i64 c = 0;', *lines])}}}\n"


def _sums(results: int, vectors: int, part: bool, isa: Isa) -> list[str]:
    """Sums of points times points of a filter. part: some lanes may lie beyond the channels."""
    both = [(i, v) for i in range(results) for v in range(vectors)]
    load, left = ("ldn", ", channels - c") if part else ("ld", "")
    lines = ["const f32 *line = x + c + z * step, *f = filter + c;"]
    lines.append(f"vf32 {', '.join(f'c{i}_{v} = splat_f32(0.0f)' for i, v in both)};")
    lines += ["for (i64 j = 0; j < high; ++j, line += down, f += next) {"]
    lines += ["const f32 *p = line, *g = f;"]
    lines += ["for (i64 k = 0; k < wide; ++k, p += right, g += n) {"]
    lines += [f"const vf32 f{v} = {load}_f32(g + {v * isa.lanes}{left});" for v in range(vectors)]
    for i, v in both:
        point = f"{load}_f32(p + {i} * step + {v * isa.lanes}{left})"
        lines.append(f"c{i}_{v} = v_fma_f32({point}, f{v}, c{i}_{v});")
    lines += ["}", "}", f"vf32* const made = sums + z * {_BLOCK} + c / {isa.lanes};"]
    lines += [f"made[{i * _BLOCK + v}] = c{i}_{v};" for i, v in both]
    return lines


# The walk over rows of results, and runs of results in these.
_TYPE = """\
typedef void each(
    const f32* x, i64 step, i64 count, i64 high, i64 down, i64 wide, i64 right, const f32* filter,
    i64 next, i64 n, i64 channels, vf32* sums);
"""
_ARGUMENTS = """
    i64 tid, i64 nthreads, void* const* bufs, i64 given, const i64* down, epilogue* finish,
    each* several, i64 some, i64 columns, i64 points_y, i64 points_z, i64 stride_y, i64 stride_z,
    i64 padding_y, i64 padding_z, i64 dilation_y, i64 dilation_z, i64 rows, i64 height, i64 width,
    i64 high, i64 wide"""
_WALK = """\
__attribute__((noinline)) static i64 packed_depthwise(ARGUMENTS) {
  const f32* const x = (const f32*)bufs[0];
  const f32* const points = (const f32*)bufs[1];
  const i64 reach = width + padding_z - (points_z - 1) * dilation_z - 1;
  const i64 whole = reach >= 0 ? reach / stride_z + 1 : 0;
  const i64 left = (padding_z + stride_z - 1) / stride_z, begin = left < wide ? left : wide;
  const i64 end = whole > wide ? wide : whole < begin ? begin : whole;
  const i64 lines = rows / wide, all = lines * ((columns + CHANNELS - 1) / CHANNELS);
  const i64 last = all * (tid + 1) / nthreads;
  for (i64 job = all * tid / nthreads; job < last; ++job) {
    const i64 first = job / lines * CHANNELS, line = job % lines;
    const i64 channels = columns - first < CHANNELS ? columns - first : CHANNELS;
    const i64 y = line % high * stride_y - padding_y;
    i64 above = 0, below = points_y;
    while (above < below && y + above * dilation_y < 0) ++above;
    while (below > above && y + (below - 1) * dilation_y >= height) --below;
    const i64 top = line / high * height + y + above * dilation_y;
    const f32* const row = x + top * width * columns + first;
    const f32* const filter = points + above * points_z * columns + first;
    for (i64 z = 0, count; z < wide; z += count) {
      const bool run = z >= begin && z < end && end - begin >= some;
      const i64 runs = (end - z + RUN - 1) / RUN;
      count = run ? (end - z + runs - 1) / runs : 1;
      i64 at = z * stride_z - padding_z, from = 0, to = points_z;
      while (from < to && at + from * dilation_z < 0) ++from;
      while (to > from && at + (to - 1) * dilation_z >= width) --to;
      vf32 sums[RUN * BLOCK];
      (run ? several : each_1x4)(
          row + (at + from * dilation_z) * columns, stride_z * columns, count, below - above,
          dilation_y * columns * width, to - from, dilation_z * columns, filter + from * columns,
          points_z * columns, columns, channels, sums);
      finish(
          bufs, down, sums, BLOCK, count, line * wide + z, first, (channels + LANES - 1) / LANES,
          columns);
    }
  }
  return 0;
}
"""


@dataclass
class DepthwiseWriter(Writer):
    """One such convolution. A filter's points lie apart as channels do."""

    def _call(self) -> tuple[str, str]:
        p, w = self.packed, self.packed.window
        assert w is not None, p
        some = self._results_at_once()
        numbers = some, p.columns, *w.kernel, *w.stride, *w.padding, *w.dilation
        told = ", ".join(map(str, numbers))
        return "", f"packed_depthwise(each_{some}x2, {told}, {self.given_sizes()})"

    def _results_at_once(self) -> int:
        """As many as the row of results has, or divide it well."""
        w, (_, _, width, _, wide) = self.packed.window, self.sizes
        able = _SUMS if self.packed.columns >= 2 * self.isa.lanes else _SUMS_OF_ONE
        if w is None or not (isinstance(width, int) and isinstance(wide, int)):
            return able[0]
        reach = width + w.padding[1] - (w.kernel[1] - 1) * w.dilation[1]
        n = min(wide, (reach - 1) // w.stride[1] + 1) - -(-w.padding[1] // w.stride[1])
        fitting = [r for r in able if r <= n] or [able[0]]
        return min(fitting, key=lambda r: (-(-n // r) * (r + 0.5), able.index(r)))
