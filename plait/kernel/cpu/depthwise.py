"""Convolutions with a filter for each channel as C++: some results of a row of the image at a time,
for some vectors of channels.

Threads share rows of results, or blocks of channels, whose filters stay near. Results whose filter
reaches beyond the image are computed one by one, of the points that there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

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
_WIDE, _SUMS_OF_WIDE = 5, (8, 5, 3)
"""The same of filters so wide and neighbours, whose points are loaded once for all results."""


def depthwise_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """Types, and the declarations of what texts call, which stands in a unit of its own."""
    found = {name for text in texts for name in re.findall(r"\beach_\d+x2\w*", text)}
    sums = [f"{GLOBAL} each {name};\n" for name in sorted(found)]
    return [TYPES, _TYPE, *sums, f"{GLOBAL} i64 packed_depthwise({_ARGUMENTS});\n"]


def depthwise_unit(isa: Isa) -> str:
    """The unit of the walk, and of all sums."""
    able = sorted({*_SUMS, *_SUMS_OF_ONE})
    sums = [_function(r, 2, isa) for r in able]
    if _has_wide(isa):
        sums += [_function(r, 2, isa, _WIDE) for r in _SUMS_OF_WIDE]
    walk = filled(_WALK, isa).replace("ARGUMENTS", _ARGUMENTS).replace("RUN", str(_RUN))
    walk = walk.replace("CHANNELS", str(_BLOCK * isa.lanes)).replace("BLOCK", str(_BLOCK))
    last = (_function(1, 4, isa), as_global(walk))
    return "".join((TYPES, _TYPE, *map(as_global, sums), *last))


def _has_wide(isa: Isa) -> bool:
    """Whether there are registers for points and filters of a row."""
    return isa.name == "avx512"


def _function(results: int, vectors: int, isa: Isa, wide: int = 0) -> str:
    """The sums of some results in a row, at least so many as are made at once: of a few of them
    and of channels, then of the next ones; last of channels that are no such number of vectors.
    wide: of the filters, whose points and those of the image lie side by side; 0: any."""
    sums = partial(_line, wide=wide) if wide else _sums
    lines: list[str] = []
    one = [] if isa.name == "avx512" else [(1, False)]  # whose masks cost nothing
    for v, part in (vectors, False), *one, (1, True):
        end = "c < channels" if part else f"c + {v * isa.lanes} <= channels"
        lines += [
            f"for (; {end}; c += {v * isa.lanes})",
            f"for (i64 i = 0, z; z = i + {results} <= count ? i : count - {results}, i < count; "
            f"i += {results}) {{",
            *sums(results, v, part, isa),
            "}",
        ]
    name = f"each_{results}x{vectors}{f'w{wide}' if wide else ''}"
    head = (
        f"__attribute__((noinline)) static void {name}(\n"
        "    const f32* x, i64 step, i64 count, i64 high, i64 down, i64 wide, i64 right,\n"
        "    const f32* filter, i64 next, i64 n, i64 channels, vf32* sums)"
    )
    return f"{head} {{\n{indented(['i64 c = 0;', *lines])}}}\n"


def _sums(results: int, vectors: int, part: bool, isa: Isa) -> list[str]:
    """Sums of points times points of a filter. part: some lanes may lie beyond the channels."""
    both = [(i, v) for i in range(results) for v in range(vectors)]
    begin, end = _around(results, vectors, isa)
    lines = ["const f32 *p = line, *g = f;"]
    lines += ["for (i64 k = 0; k < wide; ++k, p += right, g += n) {"]
    lines += [f"const vf32 f{v} = {_loaded('g', v, part, isa)};" for v in range(vectors)]
    for i, v in both:
        point = _loaded(f"p + {i} * step", v, part, isa)
        lines.append(f"c{i}_{v} = v_fma_f32({point}, f{v}, c{i}_{v});")
    return [*begin, *lines, "}", *end]


def _line(results: int, vectors: int, part: bool, isa: Isa, wide: int) -> list[str]:
    """The same of neighbours and filters so wide: a point is loaded once for all results that it
    is a part of."""
    begin, end = _around(results, vectors, isa)
    lines = []
    for k, v in product(range(wide), range(vectors)):
        lines.append(f"const vf32 f{k}_{v} = {_loaded(f'f + {k} * n', v, part, isa)};")
    for at, v in product(range(results + wide - 1), range(vectors)):
        lines.append(f"const vf32 p{at}_{v} = {_loaded(f'line + {at} * n', v, part, isa)};")
        for i in range(max(0, at - wide + 1), min(at + 1, results)):
            lines.append(f"c{i}_{v} = v_fma_f32(p{at}_{v}, f{at - i}_{v}, c{i}_{v});")
    return [*begin, *lines, *end]


def _around(results: int, vectors: int, isa: Isa) -> tuple[list[str], list[str]]:
    """What stands before and behind the sums of a row of a filter."""
    both = [(i, v) for i in range(results) for v in range(vectors)]
    begin = [
        "const f32 *line = x + c + z * step, *f = filter + c;",
        f"vf32 {', '.join(f'c{i}_{v} = splat_f32(0.0f)' for i, v in both)};",
        "for (i64 j = 0; j < high; ++j, line += down, f += next) {",
    ]
    end = ["}", f"vf32* const made = sums + z * {_BLOCK} + c / {isa.lanes};"]
    end += [f"made[{i * _BLOCK + v}] = c{i}_{v};" for i, v in both]
    return begin, end


def _loaded(place: str, vector: int, part: bool, isa: Isa) -> str:
    """A vector of channels. part: some lanes may lie beyond."""
    load, left = ("ldn", ", channels - c") if part else ("ld", "")
    return f"{load}_f32({place} + {vector * isa.lanes}{left})"


# The walk over rows of results, and runs of results in these. A thread has rows of its own, as in
# products, so that they are in its core's cache; or blocks of channels where rows are few.
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
  const i64 every = rows / wide;
  const bool apart = every % nthreads == 0 || every >= MANY_BLOCKS * nthreads;
  const i64 own = apart ? every * tid / nthreads : 0;
  const i64 lines = apart ? every * (tid + 1) / nthreads - own : every;
  const i64 all = lines * ((columns + CHANNELS - 1) / CHANNELS);
  const i64 last = apart ? all : all * (tid + 1) / nthreads;
  for (i64 job = apart ? 0 : all * tid / nthreads; job < last; ++job) {
    const i64 first = job / lines * CHANNELS, line = own + job % lines;
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
        wide = _has_wide(self.isa) and w.stride[1] == w.dilation[1] == 1 and w.kernel[1] == _WIDE
        some = self._results_at_once(_SUMS_OF_WIDE if wide else ())
        numbers = some, p.columns, *w.kernel, *w.stride, *w.padding, *w.dilation
        told = ", ".join(map(str, numbers))
        each = f"each_{some}x2{f'w{_WIDE}' if wide else ''}"
        return "", f"packed_depthwise({each}, {told}, {self.given_sizes()})"

    def _results_at_once(self, able: Sequence[int]) -> int:
        """As many as the row of results has, or divide it well. able: those that there are, if it
        is no matter of channels."""
        w, (_, _, width, _, wide) = self.packed.window, self.sizes
        able = able or (_SUMS if self.packed.columns >= 2 * self.isa.lanes else _SUMS_OF_ONE)
        if w is None or not (isinstance(width, int) and isinstance(wide, int)):
            return able[0]
        reach = width + w.padding[1] - (w.kernel[1] - 1) * w.dilation[1]
        n = min(wide, (reach - 1) // w.stride[1] + 1) - -(-w.padding[1] // w.stride[1])
        fitting = [r for r in able if r <= n] or [able[0]]
        return min(fitting, key=lambda r: (-(-n // r) * (r + 0.5), able.index(r)))
