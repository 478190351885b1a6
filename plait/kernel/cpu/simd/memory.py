"""Vector functions that load and store: registers, whole or in part, and gathers."""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.kernel.cpu.simd.text import NUMBERS, Functions, mask_of, n_lanes
from plait.runtime.toolchain import Isa


def memory(isa: Isa) -> dict[str, str]:
    """ld, st: whole registers; ldn, stn: the first n lanes (n may be <= 0 or past the end); ldm,
    stm: where the mask holds."""
    out = Functions()
    for t in NUMBERS:
        v, (loads, stores) = f"v{t}", _masked_builtins(isa, t)
        out.add(f"{v} ld_{t}(const {t}* p)", f"return *(const {v}u*)p;")
        out.add(f"void st_{t}({t}* p, {v} x)", f"*({v}u*)p = x;")
        below = f"for (i64 k = 0; k < {n_lanes(isa, t)} && k < n; ++k)"
        where = f"for (int k = 0; k < {n_lanes(isa, t)}; ++k) if (m[k])"
        for letter, loop, more in (("n", below, "i64 n"), ("m", where, f"{mask_of(t)} m")):
            out.add(
                f"{v} ld{letter}_{t}(const {t}* p, {more})",
                f"{v} r = {{}}; {loop} r[k] = p[k]; return r;",
                loads.get(letter),
            )
            out.add(
                f"void st{letter}_{t}({t}* p, {v} x, {more})",
                f"{loop} p[k] = x[k];",
                stores.get(letter),
            )
    return out


def _masked_builtins(isa: Isa, t: str) -> tuple[dict[str, str], dict[str, str]]:
    """The bodies of masked loads and of masked stores that are an instruction, by the letter of
    their names."""
    nbytes, v, n = DTYPES[t].nbytes, f"v{t}", n_lanes(isa, t)
    if isa.name == "portable" or (nbytes < 4 and isa.name != "avx512"):
        return {}, {}
    count = f"n >= {n} ? -1 : n <= 0 ? 0 : (1 << n) - 1"
    f, letter = ("f32", "s") if nbytes == 4 else ("f64", "d")
    if nbytes < 4:
        one, letters, size = ("char", "qi", 128) if nbytes == 1 else ("short", "hi", 256)
        lanes = f"{one} __attribute__((vector_size(16 * {nbytes})))"
        mask = f"__builtin_ia32_cvt{'b' if nbytes == 1 else 'w'}2mask{size}(({lanes})m)"
        name = f"dqu{letters}{size}_mask"
        load = (
            f"return ({v})__builtin_ia32_load{name}((const {one}*)p, ({lanes}){{}}, (u16)(MASK));"
        )
        store = f"__builtin_ia32_store{name}(({one}*)p, ({lanes})x, (u16)(MASK));"
    elif isa.name == "avx512":
        k, name = "u16" if nbytes == 4 else "u8", f"up{letter}512_mask"
        wide = "" if nbytes == 4 else "(long long __attribute__((vector_size(64))))"
        mask = f"__builtin_ia32_cvt{'d' if nbytes == 4 else 'q'}2mask512({wide}m)"
        load = f"return ({v})__builtin_ia32_load{name}((const {f}*)p, (v{f}){{}}, ({k})(MASK));"
        store = f"__builtin_ia32_store{name}(({f}*)p, (v{f})x, ({k})(MASK));"
    else:
        wide = "vi32" if nbytes == 4 else "long long __attribute__((vector_size(32)))"
        numbers, i = ", ".join(map(str, range(n))), f"i{8 * nbytes}"
        signed = v if t.startswith("i") else mask_of(t)
        count, mask = f"({signed}){{{numbers}}} < splat_{i}(({i})n)", "m"
        load = f"return ({v})__builtin_ia32_maskloadp{letter}256((const v{f}*)p, ({wide})(MASK));"
        store = f"__builtin_ia32_maskstorep{letter}256((v{f}*)p, ({wide})(MASK), (v{f})x);"
    loads, stores = (
        {"n": text.replace("MASK", count), "m": text.replace("MASK", mask)}
        for text in (load, store)
    )
    return loads, stores


def gathers(isa: Isa) -> dict[str, str]:
    """gather_<type>(p, at): lane k is p[at[k]]; lanes that lie within one register's width, as they
    do when an image is resized or padded, are loaded at once. mod_lanes, div_lanes(x, c, n): (x + c
    * k) % n and (x + c * k) // n for lanes k, of which one at most starts anew."""
    n = isa.lanes
    numbers = f"(vi32){{{', '.join(map(str, range(n)))}}}"
    out = Functions()
    for name, text in (
        ("mod", "r - (r >= d ? splat_i32(d) : splat_i32(0))"),
        ("div", "splat_i32((i32)(x / d)) - (vi32)(r >= d)"),
    ):
        body = f"const vi32 r = splat_i32((i32)(x % d)) + {numbers} * (i32)c; return {text};"
        out.add(f"vi32 {name}_lanes(i64 x, i64 c, i32 d)", body)
    fast = {
        "avx512": "__builtin_ia32_gathersiv16sf((vf32){}, p, at, -1, 4)",
        "avx2": "__builtin_ia32_gathersiv8sf((vf32){}, (const f32*)p, at, (vf32)splat_i32(-1), 4)",
    }.get(isa.name)
    for t in ("f32", "i32", "u32"):
        loop = f"v{t} r; for (int k = 0; k < {n}; ++k) r[k] = p[at[k]]; return r;"
        near = (
            f"const u32 span = at[{n - 1}] - at[0]; const vu32 d = (vu32)(at - at[0]); "
            f"if (span == {n - 1} && !any((vi32)d != {numbers})) return ld_{t}(p + at[0]); "
            f"if (span < {n} && !any((vi32)(d > span))) "
            f"return __builtin_shuffle(ldn_{t}(p + at[0], span + 1), (vi32)d);"
        )
        far = fast and f"{near} return (v{t}){fast};"
        out.add(f"v{t} gather_{t}(const {t}* p, vi32 at)", loop, far)
    return out
