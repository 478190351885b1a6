"""Attention as C++: scores of some queries and keys at a time stay in a core's cache.

Comes in: the operands of a `HostAttention`. Goes out: the text of a function, which calls what all
such functions share: tiles of the products (`packed_shared.py`), of queries with a copy of the keys
that lies as the columns of a matrix do, and of weights with values where they lie. Threads share
heads, or parts of their queries where heads are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.attention import HostAttention
from plait.ir.calls import TensorArg
from plait.ir.dtypes import f32
from plait.ir.expr import Size
from plait.kernel.cpu.expr import literal
from plait.kernel.cpu.packed import HEAD, OWN, Tile
from plait.kernel.cpu.packed_shared import LINE, filled, indented, most_rows, turned, walk_texts
from plait.runtime.toolchain import Isa

_SCORES = 8192
"""So many scores of a head are computed before their values are needed: 32 KiB."""
_FEWEST = 24
"""Queries at a time, at least."""
_MOST_KEYS = 512
"""At a time."""
_ROOM = 1 << 16
"""Numbers in a thread's memory: for keys, up to half of it, and for scores."""

_PEAKS = 2048
"""Queries whose peaks and sums wait for more keys, at most; half of them are asked for, since parts
of a head are whole blocks."""

_MEMORY = f"""\
static thread_local f32 heads_memory[{_ROOM}] __attribute__((aligned(64)));
static thread_local f32 heads_peaks[2 * {_PEAKS}];
"""
_TURN = """\
static void turn_keys( // LANES keys, of so many in all, and as many numbers of each
    const f32* keys, i64 step, i64 count, f32* into, i64 span) {
ROWS
}
"""
_SOFTMAX = """\
static f32 weigh( // scores of a query, of which the first `seen` count; gives their sum
    f32* p, const f32* mask, i64 seen, i64 all, f32* peak) {
  const vf32 least = splat_f32(-__builtin_inff());
  vf32 best = splat_f32(*peak), sum = splat_f32(0.0f);
  for (i64 j = 0; j < seen; j += LANES) {
    const i64 left = seen - j;
    vf32 x = ld_f32(p + j);
    if (mask) x += ldn_f32(mask + j, left);
    if (left < LANES) x = lanes_below(left) ? x : least;
    if (mask || left < LANES) st_f32(p + j, x);
    best = x > best ? x : best;
  }
  const f32 most = h_max_f32(best);
  *peak = most;
  // Where no key counts the result is 0, as ATen's is.
  const vf32 top = splat_f32(most == -__builtin_inff() ? 0.0f : most);
  i64 j = 0;
  for (; j < seen; j += LANES) {
    const vf32 x = m_exp_f32(ld_f32(p + j) - top);
    st_f32(p + j, x);
    sum += x;
  }
  for (; j < all; j += LANES) st_f32(p + j, splat_f32(0.0f));
  return h_sum_f32(sum);
}
static f32 share_of(f32 sum) { return sum == 0.0f ? 1.0f : 1.0f / sum; }
"""
_FETCH = """\
static void fetch_rows( // of the next head, and those that will be written
    const f32* x, const i64* q, const f32* y, const i64* k, const f32* z, const i64* v,
    const f32* results, const i64* out, i64 from, i64 count, i64 depth) {
  for (i64 i = from; i < from + count; ++i)
    for (i64 d = 0; d < depth; d += LINE) {
      __builtin_prefetch(x + i * q[2] + d, 0, 2);
      __builtin_prefetch(y + i * k[2] + d, 0, 2);
      __builtin_prefetch(z + i * v[2] + d, 0, 2);
      __builtin_prefetch(results + i * out[2] + d, 1);
    }
}
"""
# q, k, v, add, out: how far batches, heads and rows lie apart, `add` of what is added to scores.
# score, mix: tiles of both products. near: so many keys at a time. What later ones add to the
# result of a row that was found by then, whose peak was lower, is weighed with it: Milakov and
# Gimelshein, Online normalizer calculation for softmax, 2018.
_WALK = """\
__attribute__((noinline)) static i64 packed_heads(
    i64 tid, i64 nthreads, void* const* bufs, tile* score, i64 tall, i64 vectors, tile* mix,
    i64 high, i64 wide, f32 scale, bool causal, i64 near, i64 heads, i64 depth, i64 batch, i64 rows,
    i64 keys, const i64* q, const i64* k, const i64* v, const i64* add, const i64* out) {
  const f32* const mask = add ? (const f32*)bufs[3] : nullptr;
  const bool once = keys <= near;
  const i64 span = vectors * LANES, padded = ((once ? keys : near) + span - 1) / span * span;
  const i64 able = SCORES / padded, limit = causal && able > 4 * tall ? 4 * tall : able;
  const i64 least = limit > FEWEST ? limit : FEWEST, most = least < rows ? least : rows;
  const i64 n_heads = batch * heads;
  if (n_heads == 0 || rows == 0) return 0;
  const i64 wanted = (4 * nthreads + n_heads - 1) / n_heads, blocks = (rows + most - 1) / most;
  i64 parts = n_heads >= 4 * nthreads ? 1 : wanted < blocks ? wanted : blocks;
  const i64 fewest = (rows + PEAKS / 2 - 1) / (PEAKS / 2);
  if (!once && parts < fewest) parts = fewest < blocks ? fewest : blocks;
  f32 *const turned = heads_memory, *const p = heads_memory + padded * depth;
  const i64 last = n_heads * parts * (tid + 1) / nthreads;
  for (i64 unit = n_heads * parts * tid / nthreads, had = -1; unit < last; ++unit) {
    const i64 head = unit / parts, part = unit % parts, b = head / heads, h = head % heads;
    const f32* const queries = (const f32*)bufs[0] + b * q[0] + h * q[1];
    f32* const results = (f32*)bufs[add ? 4 : 3] + b * out[0] + h * out[1];
    const i64 then = unit + 1 < last ? (unit + 1) / parts : head, bn = then / heads;
    const f32* const q_next = (const f32*)bufs[0] + bn * q[0] + then % heads * q[1];
    const f32* const k_next = (const f32*)bufs[1] + bn * k[0] + then % heads * k[1];
    const f32* const v_next = (const f32*)bufs[2] + bn * v[0] + then % heads * v[1];
    const i64 start = blocks * part / parts, end = blocks * (part + 1) / parts;
    const i64 begin = rows * start / blocks;
    for (i64 from = 0; from < keys; from += near) {
      const i64 some_keys = keys - from < near ? keys - from : near;
      for (i64 j = 0; j < padded && !(once && head == had); j += LANES) {
        const f32* const own = (const f32*)bufs[1] + b * k[0] + h * k[1] + (from + j) * k[2];
        f32* const into = turned + j / span * span * depth + j % span;
        for (i64 d = 0; d < depth; d += LANES)
          turn_keys(own + d, k[2], some_keys - j, into + d * span, span);
      }
      had = head;
      const f32* const values = (const f32*)bufs[2] + b * v[0] + h * v[1] + from * v[2];
      for (i64 block = start; block < end; ++block) {
        const i64 m = rows * block / blocks, count = rows * (block + 1) / blocks - m;
        const i64 until = causal && m + count < keys ? m + count - from : keys - from;
        const i64 seen = until < some_keys ? until : some_keys;
        if (seen <= 0) continue;
        vf32 sums[TILE];
        const f32* lines[MOST_ROWS];
        f32 shares[count], kept[count];
        for (i64 n = 0; n < seen; n += span)
          for (i64 i = 0; i < count; i += tall) {
            const i64 some = count - i < tall ? count - i : tall;
            for (i64 r = 0; r < tall; ++r) lines[r] = queries + (m + i + (r < some ? r : 0)) * q[2];
            if (n == 0 && once)
              fetch_rows(q_next, q, k_next, k, v_next, v, results, out, m + i, some, depth);
            const f32* const panel = turned + n * depth;
            score(lines, 1, depth, panel, span, panel, 0, sums);
            for (i64 r = 0; r < some; ++r)
              for (i64 c = 0; c < vectors; ++c)
                st_f32(p + (i + r) * padded + n + c * LANES, sums[r * vectors + c] * scale);
          }
        for (i64 i = 0; i < count; ++i) {
          const i64 sees = causal && m + i + 1 < keys ? m + i + 1 - from : keys - from;
          const i64 own = sees < 0 ? 0 : sees < seen ? sees : seen;
          const f32* const given =
              mask ? mask + b * add[0] + h * add[1] + (m + i) * add[2] + from : nullptr;
          f32 peak = -__builtin_inff();
          if (once) {
            shares[i] = share_of(weigh(p + i * padded, given, own, seen, &peak));
            continue;
          }
          f32* const peaks = heads_peaks + m - begin + i;
          f32* const totals = peaks + PEAKS;
          if (from == 0) *peaks = peak, *totals = 0.0f;
          peak = *peaks;
          shares[i] = weigh(p + i * padded, given, own, seen, &peak);
          kept[i] = *peaks == peak ? 1.0f : m_exp_f32(splat_f32(*peaks - peak))[0];
          *totals = *totals * kept[i] + shares[i];
          *peaks = peak;
        }
        for (i64 i = 0; i < count; i += high) {
          const i64 some = count - i < high ? count - i : high;
          for (i64 r = 0; r < high; ++r) lines[r] = p + (i + (r < some ? r : 0)) * padded;
          for (i64 n = 0; n < depth; n += wide * LANES) {
            mix(lines, 1, seen, values + n, v[2], values + n, 0, sums);
            for (i64 r = 0; r < some; ++r) {
              f32* const into = results + (m + i + r) * out[2] + n;
              if (from > 0 && shares[i + r] == 0.0f) continue; // none of these keys counts
              for (i64 c = 0; c < wide; ++c) {
                vf32 x = sums[r * wide + c];
                if (once) x *= shares[i + r];
                if (from > 0) x += ld_f32(into + c * LANES) * kept[i + r];
                st_f32(into + c * LANES, x);
              }
            }
          }
        }
      }
    }
    for (i64 i = 0; !once && i < rows * end / blocks - begin; ++i) {
      const f32 share = share_of(heads_peaks[PEAKS + i]);
      f32* const into = results + (begin + i) * out[2];
      for (i64 d = 0; d < depth; d += LANES) st_f32(into + d, ld_f32(into + d) * share);
    }
  }
  return 0;
}
"""


def heads_text(
    kernel: HostAttention, tensors: Sequence[TensorArg], sizes: Sequence[Size], isa: Isa
) -> str:
    """The function. sizes: batches, queries, keys, and the strides of operands and result, as far
    as they count."""
    heads, depth = tensors[0].shape[1], tensors[0].shape[3]
    assert isinstance(heads, int) and isinstance(depth, int), tensors
    keys, near = sizes[2], most_keys(depth)
    least = min(keys, near) if isinstance(keys, int) else near
    score, mix = _tile(least, isa, True), _tile(depth, isa, False)
    dynamic = iter(range(len(sizes)))
    given = [str(n) if isinstance(n, int) else f"syms[{next(dynamic)}]" for n in sizes]
    names = ["q", "k", "v", *["add"] * (len(tensors) - 3), "out"]
    lines = [
        f"const i64 {name}[] = {{{', '.join(given[3 + 3 * n : 6 + 3 * n])}}};"
        for n, name in enumerate(names)
    ]
    causal = "true" if kernel.causal else "false"
    lines.append(
        f"return packed_heads(tid, nthreads, bufs, {score}, {score.rows}, {score.vectors}, {mix}, "
        f"{mix.rows}, {mix.vectors}, {literal(kernel.scale, f32)}, {causal}, {near}, {heads}, "
        f"{depth}, {', '.join(given[:3])}, q, k, v, {'add' if 'add' in names else 'nullptr'}, out);"
    )
    return f"{OWN}{HEAD} {{\n{indented(lines)}}}\n"


def most_keys(depth: int) -> int:
    """So many are copied at a time: what a row is the sum of follows from its depth alone."""
    return min(_MOST_KEYS, _ROOM // 2 // depth // LINE * LINE)


def _tile(columns: int, isa: Isa, padded: bool) -> Tile:
    """The tile that wastes fewest columns, or none."""
    able = most_rows(isa)
    n = -(-columns // isa.lanes)
    fitting = [v for v in able if padded or n % v == 0]
    vectors = min(fitting, key=lambda v: (-(-n // v) * v, -able[v] * v))
    return Tile(able[vectors], vectors)


def heads_texts(texts: Sequence[str], isa: Isa) -> list[str]:
    """What such functions share."""
    numbers = {"SCORES": _SCORES, "FEWEST": _FEWEST, "PEAKS": _PEAKS}
    walk = _WALK
    for name, number in numbers.items():
        walk = walk.replace(name, str(number))
    turn = _TURN.replace("ROWS", indented(_turned(isa)).rstrip("\n"))
    own = (filled(t, isa) for t in (_MEMORY, turn, _SOFTMAX, _FETCH, walk))
    return [*walk_texts(texts, isa), *own]


def _turned(isa: Isa) -> list[str]:
    n = isa.lanes
    lines = [f"vf32 r{i} = {{}};" for i in range(n)]
    lines += [f"if (count > {i}) r{i} = ld_f32(keys + {i} * step);" for i in range(n)]
    exchange, names = turned([f"r{i}" for i in range(n)])
    return [*lines, *exchange, *(f"st_f32(into + {i} * span, {x});" for i, x in enumerate(names))]
