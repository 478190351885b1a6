"""Convolutions with a filter for each channel as C++: some results of a row of the image at a time,
for some vectors of channels.

Threads share rows of results, and blocks of channels, whose filters stay near. Results whose filter
reaches beyond the image are computed one by one, of the points that there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plait.kernel.cpu.packed import KERNEL, Tile, Writer, indented
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
    """The functions of sums that texts call, each once."""
    found = {f for text in texts for f in re.findall(r"each_(\d+)x(\d+)", text)}
    return [_function(int(r), int(v), isa) for r, v in sorted(found)]


def _function(results: int, vectors: int, isa: Isa) -> str:
    """The sums of some results in a row, at least so many as are made at once: of a few of them
    and of channels, then of the next ones; last of channels that are no such number of vectors."""
    lines: list[str] = []
    for v, part in (vectors, False), (1, False), (1, True):
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


@dataclass
class DepthwiseWriter(Writer):
    """One such convolution. A filter's points lie apart as channels do."""

    @property
    def is_whole(self) -> bool:
        """See Writer."""
        return self.packed.columns % self.isa.lanes == 0

    def text(self) -> str:
        """The function."""
        p = self.packed
        assert p.window is not None, p
        self.tile = Tile(1, 1)
        (high, wide), (dy, dx) = p.window.kernel, p.window.dilation
        (sy, sx), (top, side) = p.window.stride, p.window.padding
        some, block = self._results_at_once(), _BLOCK * self.isa.lanes
        blocks = -(-p.columns // block)
        self.operands()
        self.add(
            f"const i64 whole = (width + {side} - {(wide - 1) * dx}) >= 1 ? "
            f"(width + {side} - {(wide - 1) * dx} - 1) / {sx} + 1 : 0;",
            f"const i64 begin = {-(-side // sx)} < wide ? {-(-side // sx)} : wide;",
            "const i64 end = whole > wide ? wide : whole < begin ? begin : whole;",
            "const i64 lines = rows / wide;",
            f"const i64 all = lines * {blocks}, last = all * (tid + 1) / nthreads;",
            "for (i64 job = all * tid / nthreads; job < last; ++job) {",
            f"const i64 first = job / lines * {block}, line = job % lines;",
            f"const i64 channels = {p.columns} - first < {block} ? {p.columns} - first : {block};",
            f"const i64 y = line % high * {sy} - {top};",
            f"i64 above = 0, below = {high};",
            f"while (above < below && y + above * {dy} < 0) ++above;",
            f"while (below > above && y + (below - 1) * {dy} >= height) --below;",
            f"const f32* const row = x + (line / high * height + y + above * {dy}) * width * "
            f"{p.columns} + first;",
            f"const f32* const filter = panels + above * {wide * p.columns} + first;",
            "for (i64 z = 0, count; z < wide; z += count) {",
            f"const bool several = z >= begin && z < end && end - begin >= {some};",
            f"const i64 runs = (end - z + {_RUN - 1}) / {_RUN};",
            "count = several ? (end - z + runs - 1) / runs : 1;",
            f"i64 at = z * {sx} - {side}, from = 0, to = {wide};",
            f"while (from < to && at + from * {dx} < 0) ++from;",
            f"while (to > from && at + (to - 1) * {dx} >= width) --to;",
            f"const f32* const point = row + (at + from * {dx}) * {p.columns};",
            f"vf32 sums[{_RUN * _BLOCK}];",
            f"(several ? each_{some}x2 : each_1x4)(point, {sx * p.columns}, count, below - above, "
            f"{dy * p.columns} * width, to - from, {dx * p.columns}, "
            f"filter + from * {p.columns}, {wide * p.columns}, {p.columns}, channels, sums);",
            "for (i64 i = 0; i < count; ++i)",
            f"for (i64 v = 0; v < channels; v += {self.isa.lanes}) {{",
            "const i64 row = line * wide + z + i, n = first + v;",
            f"const vf32* const made = sums + i * {_BLOCK} + v / {self.isa.lanes};",
        )
        self.result()
        self.add("}", "}", "}", "return 0;")
        head = f'extern "C" i64 {KERNEL}(i64 tid, i64 nthreads, void* const* bufs, const i64* syms)'
        return f"{head} {{\n{indented(self.lines)}}}\n"

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
