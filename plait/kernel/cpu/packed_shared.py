"""What kernels of products with packed weights share, as C++: sums of a tile, and the walk over
tiles. A network has many such kernels, which differ in sizes and in a few epilogues: what compilers
take long for is written, and compiled, once.

Comes in: what kernels name. Goes out: the text of these functions, or their declarations where
they stand in a translation unit that is the same for every network (`dense_unit`), so that it can
be compiled before a program is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plait.runtime.toolchain import Isa

LONGEST_SUM = 512
"""So many products are added up one after the other, about as many as vendors' libraries do."""
# Registers, rows by columns of vectors, that left none to be spilled and were fastest on an AVX-512
# machine with 2 cores: benchmarks/packed_cpu.py.
MOST_ROWS = {5: 5, 4: 6, 3: 8, 2: 8, 1: 12}
FEW_REGISTERS = {1: 8, 2: 5}
"""The same of machines with 16 vector registers."""
LARGEST_TILE = max(vectors * rows for vectors, rows in MOST_ROWS.items())
NEAR_NBYTES = 1 << 19
"""Of rows that stay in a core's own cache while all panels go by."""
_MANY_BLOCKS = 4
"""Of rows, that a thread has at least before it has rows of its own."""
_FAR_NBYTES = 3 << 19
"""Results that are larger are no longer in a core's cache, where their memory was used before."""
LINE = 16
"""Numbers in a line of a cache."""
_AHEAD = 32
"""So many rows of a panel before their turn they are fetched from far memory."""

GLOBAL = 'extern "C" __attribute__((visibility("hidden")))'
"""Of functions that other units of a library call."""
# An epilogue makes results, of so many rows from `row` on, and vectors of columns from n on, of
# sums that lie `apart` vectors from row to row. down: how far the rows of each buffer that it loads
# lie apart, 0 where all rows load the same.
TYPES = """\
typedef void epilogue(
    void* const* bufs, const i64* down, const vf32* sums, i64 apart, i64 count, i64 row, i64 n,
    i64 vectors, i64 columns);
typedef const f32* tile(
    const f32* const* rows, i64 stretches, i64 length, const f32* b, i64 width, const f32* next,
    i64 step, vf32* sums);
"""
_FETCH = """\
__attribute__((noinline)) static void fetch_results( // and rows that the epilogue loads
    void* const* bufs, i64 given, const i64* down, i64 row, i64 count, i64 n, i64 vectors,
    i64 columns) {
  f32* const out = (f32*)bufs[2 + given];
  for (i64 i = 0; i < count; ++i, ++row) {
    for (i64 at = n; at < n + vectors * LANES; at += LINE) {
      __builtin_prefetch(out + row * columns + at, 1);
      for (i64 k = 0; k < given; ++k)
        if (down[k]) __builtin_prefetch((const f32*)bufs[2 + k] + row * down[k] + at);
    }
  }
}
"""
_SCALE = """\
__attribute__((noinline)) static void scale_lines( // times a number for each column
    const f32** lines, i64 count, i64 tall, const f32* scale, i64 length, f32* into) {
  for (i64 i = 0; i < count; ++i) {
    for (i64 k = 0; k < length; k += LANES) {
      const i64 left = length - k;
      stn_f32(into + i * length + k, ldn_f32(lines[i] + k, left) * ldn_f32(scale + k, left), left);
    }
  }
  for (i64 i = 0; i < tall; ++i) lines[i] = into + (i < count ? i : 0) * length;
}
"""
# A thread has rows of its own, which are in its core's cache if it has made them, or where they are
# few, panels. All panels go by as many rows as stay near, then by the next ones.
_ARGUMENTS = """
    i64 tid, i64 nthreads, void* const* bufs, i64 given, const i64* down, epilogue* finish,
    tile* make, tile* add, i64 tall, i64 vectors, i64 span, i64 near, i64 each, i64 depth,
    i64 columns, """
_BEGIN = """\
__attribute__((noinline)) static i64 packed_NAME(ARGUMENTS) {
  const f32* const x = (const f32*)bufs[0];
  const f32* const panels = (const f32*)bufs[1];
  const i64 blocks = (rows + tall - 1) / tall, n_panels = (columns + span - 1) / span;
  const bool apart = blocks >= MANY_BLOCKS * nthreads, far = 4 * rows * columns >= FAR_NBYTES;
  const i64 first = apart ? blocks * tid / nthreads : 0, all = blocks * n_panels;
  const i64 own = apart ? blocks * (tid + 1) / nthreads - first : blocks;
  const i64 begin = apart ? 0 : all * tid / nthreads;
  const i64 end = apart ? own * n_panels : all * (tid + 1) / nthreads;
  if (begin >= end) return 0;
  const i64 few = rows / blocks, more = rows % blocks; // so many blocks have a row more
"""
_JOBS = """\
  i64 part = begin / (near * n_panels), rest = begin % (near * n_panels);
  i64 most = own - part * near < near ? own - part * near : near;
  i64 panel = rest / most, nth = rest % most;
  for (i64 job = begin; job < end; ++job, ++nth) {
    if (nth == most) {
      nth = 0;
      if (++panel == n_panels) panel = 0, ++part;
      most = own - part * near < near ? own - part * near : near;
    }
    const i64 block = first + part * near + nth, step = most > 1 ? (span - 1 + most) / most : 0;
    const i64 m = block * few + (block < more ? block : more), count = few + (block < more);
    const i64 last = (panel + 1) * span < columns ? (panel + 1) * span : columns;
"""
# each: so many numbers of long rows are multiplied before the next ones, whose sums are added. A
# tile's rows that there are not are its first one.
_ROWS = """\
JOBS
    const f32* lines[MOST_ROWS];
    for (i64 i = 0; i < tall; ++i) lines[i] = x + (m + (i < count ? i : 0)) * depth;
    f32 products[scaled ? tall * depth : 1];
    if (scaled) scale_lines(lines, count, tall, (const f32*)bufs[2], depth, products);
    for (i64 n = panel * span; n < last; n += vectors * LANES) {
      const f32* const b = panels + panel * depth * span + n % span;
      const f32* const next = b + depth * span + nth * (depth * step);
      if (far) fetch_results(bufs, given, down, m, count, n, vectors, columns);
      vf32 sums[TILE];
      make(lines, 1, each, b, span, next, step, sums);
      for (i64 from = each; from < depth; from += each) {
        const f32* rest[MOST_ROWS];
        for (i64 i = 0; i < tall; ++i) rest[i] = lines[i] + from;
        vf32 more[TILE];
        make(rest, 1, depth - from < each ? depth - from : each, b + from * span, span,
             next + from * step, step, more);
        for (i64 k = 0; k < tall * vectors; ++k) sums[k] += more[k];
      }
      finish(bufs, down, sums, vectors, count, m, n, vectors, columns);
    }
  }
  return 0;
}
"""
# Of an image each point of a window has a stretch of numbers; where nothing is padded, those of
# `side` points that lie side by side are one. each: so many stretches at a time, whose sums are
# added up. zeros: what lies beyond the image.
_IMAGE = """\
JOBS
    i64 y_ = m / wide, z_ = m % wide, image = y_ / high;
    y_ -= image * high;
    i64 y[MOST_ROWS], z[MOST_ROWS];
    const f32* at[MOST_ROWS];
    for (i64 i = 0; i < tall; ++i) {
      y[i] = y_ * stride_y - padding_y;
      z[i] = z_ * stride_z - padding_z;
      at[i] = x + ((image * height + y[i]) * width + z[i]) * depth;
      if (i + 1 >= count || ++z_ < wide) continue;
      z_ = 0;
      if (++y_ == high) y_ = 0, ++image;
    }
    const i64 stretches = points_y * points_z, length = depth * side, deep = stretches * length;
    const f32* lines[stretches * MOST_ROWS];
    const f32** line = lines;
    for (i64 j = 0; j < points_y; ++j)
      for (i64 k = 0; k < points_z; ++k) {
        const i64 down_ = j * dilation_y, right = k * dilation_z;
        const i64 from = (down_ * width + right) * depth;
        for (i64 i = 0; i < tall && !zeros; ++i) *line++ = at[i] + from;
        for (i64 i = 0; i < tall && zeros; ++i) {
          const bool within = (u64)(y[i] + down_) < (u64)height && (u64)(z[i] + right) < (u64)width;
          *line++ = within ? at[i] + from : zeros;
        }
      }
    for (i64 n = panel * span; n < last; n += vectors * LANES) {
      const f32* b = panels + panel * deep * span + n % span;
      const f32* const next = b + deep * span + nth * (deep * step);
      if (far) fetch_results(bufs, given, down, m, count, n, vectors, columns);
      vf32 sums[TILE];
      for (i64 k = 0; k < stretches; k += each) {
        const i64 some = stretches - k < each ? stretches - k : each;
        b = (k ? add : make)(
            lines + k * tall, some, length, b, span, next + k * length * step, step, sums);
      }
      finish(bufs, down, sums, vectors, count, m, n, vectors, columns);
    }
  }
  return 0;
}
"""
_WALKS = {
    "rows": ("i64 rows, bool scaled", _ROWS),
    "image": (
        "i64 points_y, i64 points_z, i64 side, i64 stride_y, i64 stride_z, i64 padding_y,\n"
        "    i64 padding_z, i64 dilation_y, i64 dilation_z, const f32* zeros, i64 rows, "
        "i64 height,\n    i64 width, i64 high, i64 wide",
        _IMAGE,
    ),
}


def stretch_of(depth: int, longest: int = LONGEST_SUM) -> int:
    """So many products are added up at a time, of that many in all: about `longest`."""
    return depth if depth <= longest * 3 // 2 else -(-depth // -(-depth // longest))


def most_rows(isa: Isa) -> dict[int, int]:
    """The rows of a tile of so many vectors that registers have room for."""
    return MOST_ROWS if isa.name == "avx512" else FEW_REGISTERS


def walk_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """Types, and the walks over tiles and sums of tiles that texts call, each once."""
    found = {f for text in texts for f in re.findall(r"\btile_(\d+)x(\d+)(_more)?", text)}
    tiles, common = {(int(r), int(v), more) for r, v, more in found}, _common(isa)
    made = [tile_text(*tile, isa) for tile in sorted(tiles - common)]
    walks = [
        f"{GLOBAL} i64 packed_{name}({_ARGUMENTS}{more});\n"
        for name, (more, _) in _WALKS.items()
        if any(f"packed_{name}(" in text for text in texts)
    ]
    declared = [f"{GLOBAL} tile tile_{r}x{v};\n" for r, v, _ in sorted(tiles & common)]
    return [TYPES, *declared, *walks, *made]


def _common(isa: Isa) -> set[tuple[int, int, str]]:
    """The tiles of nearly all kernels: of many rows, or of one."""
    return {
        (r, v, "") for v, most in most_rows(isa).items() for r in (1, *range(most - 2, most + 1))
    }


def dense_unit(isa: Isa) -> str:
    """The unit of walks, and of the sums of common tiles."""
    made = [tile_text(r, v, more, isa) for r, v, more in sorted(_common(isa))]
    made += [filled(_FETCH, isa), filled(_SCALE, isa)]
    for name, (more, body) in _WALKS.items():
        head = _BEGIN.replace("NAME", name).replace("ARGUMENTS", _ARGUMENTS + more)
        made.append(filled(head + body.replace("JOBS\n", _JOBS), isa))
    return "".join((TYPES, *map(as_global, made)))


def as_global(text: str) -> str:
    """The text of a function that other units call."""
    return text.replace("__attribute__((noinline)) static", GLOBAL, 1)


def filled(text: str, isa: Isa) -> str:
    """A text with the numbers that stand for their names."""
    numbers = {
        "LANES": isa.lanes, "LINE": LINE, "MOST_ROWS": max(MOST_ROWS.values()),
        "TILE": LARGEST_TILE, "MANY_BLOCKS": _MANY_BLOCKS, "FAR_NBYTES": _FAR_NBYTES,
    }  # fmt: skip
    for name, number in numbers.items():
        text = re.sub(rf"\b{name}\b", str(number), text)
    return text


def tile_text(rows: int, vectors: int, more: str, isa: Isa) -> str:
    """Sums of products of numbers of rows, which lie in stretches of one length, with the rows of
    a panel; gives where the panel goes on. Meanwhile it fetches, from memory far away, what comes
    soon in this panel, and a share of the next one. more: "_more" where they are added to other
    sums."""
    sums = [(i, v) for i in range(rows) for v in range(vectors)]
    lines = [f"vf32 {', '.join(f'c{i}_{v} = splat_f32(0.0f)' for i, v in sums)};"]
    lines.append(f"for (i64 s = 0; s < stretches; ++s, rows += {rows}) {{")
    lines += [f"const f32* const r{i} = rows[{i}];" for i in range(rows)]
    lines.append("for (i64 k = 0; k < length; ++k, b += width, next += step) {")
    lines.append("__builtin_prefetch(next, 0, 2);")
    for v in range(vectors):
        lines.append(f"const vf32 b{v} = ld_f32(b + {v * isa.lanes});")
        if v * isa.lanes % LINE == 0:
            lines.append(f"__builtin_prefetch(b + {_AHEAD} * width + {v * isa.lanes});")
    for i in range(rows):
        lines.append(f"const vf32 a{i} = splat_f32(r{i}[k]);")
        lines += [f"c{i}_{v} = v_fma_f32(a{i}, b{v}, c{i}_{v});" for v in range(vectors)]
    lines += ["}", "}"]
    stored = "+=" if more else "="
    lines += [f"sums[{k}] {stored} c{i}_{v};" for k, (i, v) in enumerate(sums)]
    head = (
        f"__attribute__((noinline)) static const f32* tile_{rows}x{vectors}{more}(\n"
        "    const f32* const* rows, i64 stretches, i64 length, const f32* b, i64 width, "
        "const f32* next,\n    i64 step, vf32* sums)"
    )
    return f"{head} {{\n{indented([*lines, 'return b;'])}}}\n"


def turned(names: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """What exchanges rows of a square of numbers with its columns, and the names of the results:
    pairs of rows exchange halves of their blocks of 2, 4, 8, ... lanes. names: of the rows."""
    n, step = len(names), 1
    lines: list[str] = []
    while step < n:
        low = [x if x & step == 0 else n + x - step for x in range(n)]
        high = [x + step if x & step == 0 else n + x for x in range(n)]
        for i in range(n):
            if i & step == 0:
                a, b = names[i], names[i + step]
                for name, lanes in ((f"{a}_", low), (f"{b}_", high)):
                    told = ", ".join(map(str, lanes))
                    lines.append(f"const vf32 {name} = __builtin_shufflevector({a}, {b}, {told});")
        names = [f"{x}_" for x in names]
        step *= 2
    return lines, names


def indented(lines: Sequence[str]) -> str:
    """Lines indented by their nesting."""
    out, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out) + "\n"
