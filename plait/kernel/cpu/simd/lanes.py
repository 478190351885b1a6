"""Vector functions that move or combine lanes: copies, halves, rearrangements, reductions, scans,
tiles. Masks have lanes 0 or -1."""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.ir.ops import OPS
from plait.ir.reductions import REDUCTIONS
from plait.kernel.cpu.simd.text import FLOATS, NUMBERS, Functions, n_lanes
from plait.runtime.toolchain import Isa


def shape(isa: Isa) -> dict[str, str]:
    """Splats, halves, lane numbers."""
    out = Functions()
    for t in NUMBERS:
        copies = ", ".join(["x"] * n_lanes(isa, t))
        out.add(f"v{t} splat_{t}({t} x)", f"return (v{t}){{{copies}}};")
    n = isa.lanes
    lanes = [str(k) for k in range(n)]
    parts = (("lo", 0, ", ".join(lanes[: n // 2])), ("hi", n // 2, ", ".join(lanes[n // 2 :])))
    numbers = ", ".join(lanes)
    for t in ("f32", "i32", "u32"):
        out.add(
            f"v{t} cat_{t}(h{t} a, h{t} b)",
            f"v{t} r; __builtin_memcpy(&r, &a, sizeof a); "
            "__builtin_memcpy((char*)&r + sizeof a, &b, sizeof b); return r;",
            shuffled=f"return __builtin_shufflevector(a, b, {numbers});",
        )
        for half, start, picks in parts:
            out.add(
                f"h{t} {half}_{t}(v{t} a)",
                f"h{t} r; __builtin_memcpy(&r, (char*)&a + {4 * start}, sizeof r); return r;",
                shuffled=f"return __builtin_shufflevector(a, a, {picks});",
            )
    body = f"return (vi32)((vi32){{{numbers}}} < splat_i32((i32)n));"
    out.add("vi32 lane_mask(i64 n)", body)
    out.add("vi32 lanes_below(i64 n)", f"return lane_mask(n < 0 ? 0 : n < {n} ? n : {n});")
    for half, _, picks in parts:
        body = f"return splat_i64(a) + (vi64){{{picks}}} * c;"
        out.add(f"vi64 iota_{half}(i64 a, i64 c)", body)
    fast = {
        "avx512": "return __builtin_ia32_cvtd2mask512((vi32)m) != 0;",
        "avx2": "return __builtin_ia32_movmskps256((vf32)m) != 0;",
    }.get(isa.name)
    body = f"i32 r = 0; for (int k = 0; k < {n}; ++k) r |= m[k]; return r != 0;"
    out.add("bool any(vi32 m)", body, fast)
    return out


def rearranged(isa: Isa) -> dict[str, str]:
    """turned_<type>: lanes backwards. evens_<type>(a, b): every second of the elements in memory
    that a starts at and b ends at."""
    out = Functions()
    for t in NUMBERS:
        n, v = n_lanes(isa, t), f"v{t}"
        back = ", ".join(str(n - 1 - k) for k in range(n))
        second = ", ".join(str(2 * k if 2 * k < n else 2 * k + 1) for k in range(n))
        for head, text, lane in (
            (f"turned_{t}({v} a)", f"a, a, {back}", f"a[{n - 1} - k]"),
            (f"evens_{t}({v} a, {v} b)", f"a, b, {second}",
             f"2 * k < {n} ? a[2 * k] : b[2 * k + 1 - {n}]"),
        ):  # fmt: skip
            loop = f"{v} r; for (int k = 0; k < {n}; ++k) r[k] = {lane}; return r;"
            out.add(f"{v} {head}", loop, shuffled=f"return __builtin_shufflevector({text});")
    return out


_COMBINE = {
    "add": "{0} + {1}", "mul": "{0} * {1}", "max": "v_max_{t}({0}, {1})",
    "min": "v_min_{t}({0}, {1})",
}  # fmt: skip


_PAIRS = {
    "add": "{0} + {1}", "mul": "{0} * {1}", "or": "{0} | {1}", "and": "{0} & {1}",
    "xor": "{0} ^ {1}", "max": "({0} > {1} ? {0} : {1})", "min": "({0} < {1} ? {0} : {1})",
}  # fmt: skip


def horizontal(isa: Isa) -> dict[str, str]:
    """h_<kind>_<type>: all lanes of a register combined, as a tree."""
    out = Functions()
    for t in NUMBERS:
        n, size = n_lanes(isa, t), DTYPES[t].nbytes
        for kind, row in REDUCTIONS.items():
            if not row.merges or DTYPES[t].kind not in OPS[row.op].on:
                continue
            first, how = "", _PAIRS[row.op]
            if t in FLOATS and row.op in ("max", "min"):  # of NaNs once for all
                nan = "__builtin_nan" + ("f" if t == "f32" else "")
                first = f'if (any((vi32)(a != a))) return {nan}(""); '
            loop = f"for (int n = {n // 2}; n > 0; n /= 2) for (int k = 0; k < n; ++k) "
            loop += f"a[k] = {how.format('a[k]', 'a[k + n]')}; return a[0];"
            out.add(
                f"{t} h_{kind}_{t}(v{t} a)", first + loop, shuffled=first + _halved(n, size, how)
            )
    return out


def _halved(n: int, size: int, how: str) -> str:
    """The steps of such a tree: halves, which are registers of their own down to 16 bytes, and then
    lanes that change places."""
    steps, x, width = [], "a", n
    while n > 1:
        n //= 2
        is_cut = n * size >= 16
        width = n if is_cut else width
        picks = [range(width), [k + n if is_cut else k ^ n for k in range(width)]]
        low, high = (f"__builtin_shufflevector({x}, {x}, {', '.join(map(str, p))})" for p in picks)
        steps.append(f"const auto l{n} = {low}, h{n} = {high};")
        x = f"x{n}"
        steps.append(f"const auto {x} = {how.format(f'l{n}', f'h{n}')};")
    return f"{' '.join(steps)} return {x}[0];"


def scans(isa: Isa) -> dict[str, str]:
    """scan_<kind>_<type>(a, carry): lane k is carry and lanes 0..k of a combined. last_<type>: the
    last lane in every lane."""
    out = Functions()
    for t in NUMBERS:
        n, v = n_lanes(isa, t), f"v{t}"
        out.add(f"{v} last_{t}({v} a)", f"return splat_{t}(a[{n - 1}]);")
        for kind, row in REDUCTIONS.items():
            if not row.scans:
                continue
            how, steps = _COMBINE[row.op], []
            first = "carry[0]" if row.op in ("max", "min") else str(row.identity(DTYPES[t]))
            for s in (1 << k for k in range(n.bit_length() - 1)):
                picks = ", ".join(str(k if k < s else n + k - s) for k in range(n))
                steps.append(
                    f"a = {how.format(f'__builtin_shufflevector(e, a, {picks})', 'a', t=t)};"
                )
            loop = (
                f"{t} r = carry[0]; for (int k = 0; k < {n}; ++k) a[k] = r = "
                f"{_scalar_combine(row.op)}; return a;"
            )
            tree = f"const {v} e = splat_{t}({first}); {' '.join(steps)} "
            tree += f"return {how.format('carry', 'a', t=t)};"
            out.add(f"{v} scan_{kind}_{t}({v} a, {v} carry)", loop, shuffled=tree)
    return out


def _scalar_combine(op: str) -> str:
    return {"add": "r + a[k]", "mul": "r * a[k]"}.get(op, f"s_{op}(a[k], r)")


def tiles(isa: Isa) -> dict[str, str]:
    """turn_<type>(p, step, out, na, nb): out[b * lanes + a] = p[a * step + b] for a < na, b < nb;
    whole tiles in registers."""
    out = {}
    n = isa.lanes
    for t in NUMBERS:
        loop = (
            f"for (i64 a = 0; a < na; ++a) for (i64 b = 0; b < nb; ++b) out[b * {n} + a] = p[a * "
            "step + b];"
        )
        params = f"const {t}* p, i64 step, {t}* out, i64 na, i64 nb"
        whole = _fn_lines(t, n) if DTYPES[t].nbytes in (2, 4) else ""
        out[f"turn_{t}"] = f"static void turn_{t}({params}) {{\n{whole}  {loop}\n}}"
    return out


def _fn_lines(t: str, n: int) -> str:
    """A whole tile: log2(n) rounds in which pairs of registers exchange blocks of lanes."""
    lines = [f"  v{t} r{k} = ld_{t}(p + {k} * step);" for k in range(n)]
    s = n // 2
    while s:
        for i in range(n):
            if i & s:
                continue
            j = i | s
            low = ", ".join(str(n + k - s if k & s else k) for k in range(n))
            high = ", ".join(str(n + k if k & s else k + s) for k in range(n))
            lines.append(
                f"  {{ v{t} a = __builtin_shufflevector(r{i}, r{j}, {low}); "
                f"r{j} = __builtin_shufflevector(r{i}, r{j}, {high}); r{i} = a; }}"
            )
        s //= 2
    lines += [f"  st_{t}(out + {k * n}, r{k});" for k in range(n)]
    body = "\n".join(lines)
    test = f"na == {n} && nb == {n}"
    return (
        f"#if __has_builtin(__builtin_shufflevector)\n  if ({test}) {{\n{body}\n  return; "
        "}\n#endif\n"
    )
