"""Vector functions that load and store: registers, whole or in part, and gathers."""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.kernel.cpu.simd.text import NUMBERS, either, fn, mask_of, n_lanes
from plait.runtime.toolchain import Isa


def memory(isa: Isa) -> dict[str, str]:
    """ld, st: whole registers; ldn, stn: the first n lanes (n may be <= 0 or past the end); ldm,
    stm: where the mask holds."""
    out = {}
    for t in NUMBERS:
        n, v = n_lanes(isa, t), f"v{t}"
        out[f"ld_{t}"] = fn(v, f"ld_{t}", f"const {t}* p", f"return *(const {v}u*)p;")
        out[f"st_{t}"] = fn("void", f"st_{t}", f"{t}* p, {v} x", f"*({v}u*)p = x;")
        fast = _masked_builtins(isa, t)
        plain = {
            "ldn": fn(v, f"ldn_{t}", f"const {t}* p, i64 n",
                       f"{v} r = {{}}; for (i64 k = 0; k < {n} && k < n; ++k) r[k] = p[k]; "
                       "return r;"),
            "stn": fn("void", f"stn_{t}", f"{t}* p, {v} x, i64 n",
                       f"for (i64 k = 0; k < {n} && k < n; ++k) p[k] = x[k];"),
            "ldm": fn(v, f"ldm_{t}", f"const {t}* p, {mask_of(t)} m",
                       f"{v} r = {{}}; for (int k = 0; k < {n}; ++k) if (m[k]) r[k] = p[k]; "
                       "return r;"),
            "stm": fn("void", f"stm_{t}", f"{t}* p, {v} x, {mask_of(t)} m",
                       f"for (int k = 0; k < {n}; ++k) if (m[k]) p[k] = x[k];"),
        }  # fmt: skip
        for name, text in plain.items():
            out[f"{name}_{t}"] = either(fast.get(name), text)
    return out


def _masked_builtins(isa: Isa, t: str) -> dict[str, str]:
    """Masked loads and stores of 32- and 64-bit lanes as instructions. MASK stands for the mask."""
    nbytes, v = DTYPES[t].nbytes, f"v{t}"
    if nbytes < 4 and isa.name == "avx512":
        return _narrow_masked_builtins(t)
    if nbytes < 4 or isa.name == "portable":
        return {}
    f, letter = ("f32", "s") if nbytes == 4 else ("f64", "d")
    n = n_lanes(isa, t)
    signed = v if t.startswith("i") else mask_of(t)
    if isa.name == "avx512":
        k = "u16" if nbytes == 4 else "u8"
        count = f"n >= {n} ? -1 : n <= 0 ? 0 : (1 << n) - 1"
        lanes = "__builtin_ia32_cvtd2mask512(m)" if nbytes == 4 else (
            "__builtin_ia32_cvtq2mask512("
            "(long long __attribute__((vector_size(64))))m)")  # fmt: skip
        load = (
            f"return ({v})__builtin_ia32_loadup{letter}512_mask((const {f}*)p, (v{f}){{}}, "
            f"({k})(MASK));"
        )
        store = f"__builtin_ia32_storeup{letter}512_mask(({f}*)p, (v{f})x, ({k})(MASK));"
    else:
        wide = "vi32" if nbytes == 4 else "long long __attribute__((vector_size(32)))"
        numbers = ", ".join(map(str, range(n)))
        count = f"({signed}){{{numbers}}} < splat_i{8 * nbytes}((i{8 * nbytes})n)"
        lanes = "m"
        load = f"return ({v})__builtin_ia32_maskloadp{letter}256((const v{f}*)p, ({wide})(MASK));"
        store = f"__builtin_ia32_maskstorep{letter}256((v{f}*)p, ({wide})(MASK), (v{f})x);"
    return {
        "ldn": fn(v, f"ldn_{t}", f"const {t}* p, i64 n", load.replace("MASK", count)),
        "stn": fn("void", f"stn_{t}", f"{t}* p, {v} x, i64 n", store.replace("MASK", count)),
        "ldm": fn(v, f"ldm_{t}", f"const {t}* p, {mask_of(t)} m", load.replace("MASK", lanes)),
        "stm": fn(
            "void", f"stm_{t}", f"{t}* p, {v} x, {mask_of(t)} m", store.replace("MASK", lanes)
        ),
    }


def _narrow_masked_builtins(t: str) -> dict[str, str]:
    """Masked loads and stores of 8- and 16-bit lanes of AVX-512."""
    v, nbytes = f"v{t}", DTYPES[t].nbytes
    one, letters, size = ("char", "qi", 128) if nbytes == 1 else ("short", "hi", 256)
    lanes = f"{one} __attribute__((vector_size(16 * {nbytes})))"
    test = "cvtb2mask128" if nbytes == 1 else "cvtw2mask256"
    mask = f"__builtin_ia32_{test}(({lanes})m)"
    count = "n >= 16 ? -1 : n <= 0 ? 0 : (1 << n) - 1"
    load = (
        f"return ({v})__builtin_ia32_loaddqu{letters}{size}_mask((const {one}*)p, ({lanes}){{}}, "
        "(u16)(MASK));"
    )
    store = f"__builtin_ia32_storedqu{letters}{size}_mask(({one}*)p, ({lanes})x, (u16)(MASK));"
    return {
        f"ld{kind}": fn(v, f"ld{kind}_{t}", f"const {t}* p, {more}", load.replace("MASK", text))
        for kind, more, text in (("n", "i64 n", count), ("m", f"{mask_of(t)} m", mask))
    } | {
        f"st{kind}": fn(
            "void", f"st{kind}_{t}", f"{t}* p, {v} x, {more}", store.replace("MASK", text)
        )
        for kind, more, text in (("n", "i64 n", count), ("m", f"{mask_of(t)} m", mask))
    }


def gathers(isa: Isa) -> dict[str, str]:
    """gather_<type>(p, at): lane k is p[at[k]]; lanes that lie within one register's width, as they
    do when an image is resized or padded, are loaded at once. mod_lanes, div_lanes(x, c, n): (x + c
    * k) % n and (x + c * k) // n for lanes k, of which one at most starts anew."""
    n = isa.lanes
    numbers = f"(vi32){{{', '.join(map(str, range(n)))}}}"
    out = {}
    for name, text in (
        ("mod", "r - (r >= d ? splat_i32(d) : splat_i32(0))"),
        ("div", "splat_i32((i32)(x / d)) - (vi32)(r >= d)"),
    ):
        body = f"const vi32 r = splat_i32((i32)(x % d)) + {numbers} * (i32)c; return {text};"
        out[f"{name}_lanes"] = fn("vi32", f"{name}_lanes", "i64 x, i64 c, i32 d", body)
    fast = {
        "avx512": "__builtin_ia32_gathersiv16sf((vf32){}, p, at, -1, 4)",
        "avx2": "__builtin_ia32_gathersiv8sf((vf32){}, (const f32*)p, at, (vf32)splat_i32(-1), 4)",
    }.get(isa.name)
    for t in ("f32", "i32", "u32"):
        loop = f"v{t} r; for (int k = 0; k < {n}; ++k) r[k] = p[at[k]]; return r;"
        params = f"const {t}* p, vi32 at"
        near = (
            f"const u32 span = at[{n - 1}] - at[0]; const vu32 d = (vu32)(at - at[0]); "
            f"if (span == {n - 1} && !any((vi32)d != {numbers})) return ld_{t}(p + at[0]); "
            f"if (span < {n} && !any((vi32)(d > span))) "
            f"return __builtin_shuffle(ldn_{t}(p + at[0], span + 1), (vi32)d);"
        )
        out[f"gather_{t}"] = either(
            fast and fn(f"v{t}", f"gather_{t}", params, f"{near} return (v{t}){fast};"),
            fn(f"v{t}", f"gather_{t}", params, loop),
        )
    return out
