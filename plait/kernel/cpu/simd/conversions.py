"""Vector functions that convert lanes from one type to another, masks included."""

from __future__ import annotations

from plait.kernel.cpu.simd.text import Functions
from plait.runtime.toolchain import Isa


def conversions(isa: Isa) -> dict[str, str]:
    """cvt_<from>_<to>: lanes converted; h<type> is half of the lanes of a 32-bit type. join_i64:
    two registers of 64-bit masks as one of 32-bit ones. mask_of_u8, u8_of_mask: bools in memory.
    Left alone, g++ takes loaded bytes apart one by one and does some conversions in two halves."""
    fast = _conversion_builtins() if isa.name == "avx512" else {}
    full, narrow, words = ("f32", "i32", "u32"), ("i16", "u16", "i8", "u8"), ("f64", "i64", "u64")
    pairs = [(a, b) for a in (*full, *narrow) for b in (*full, *narrow)]
    pairs += [(a, b) for a in words for b in words]
    pairs += [(a, f"h{b}") for a in words for b in full] + [
        (f"h{a}", b) for a in full for b in words
    ]
    out = Functions()
    for a, b in pairs:
        result, param = (t if t[0] == "h" else f"v{t}" for t in (b, a))
        builtin = fast.get((a, b))
        out.add(
            f"{result} cvt_{a}_{b}({param} x)",
            f"return __builtin_convertvector(x, {result});",
            builtin and f"return ({result}){builtin};",
        )
    out.add(  # as s_to_u64
        "vu64 cvt_f64_u64(vf64 x)",
        "const vi64 far = (vi64)(x >= 0x1p63); "
        "return (vu64)cvt_f64_i64(far ? x - 0x1p63 : x) ^ ((vu64)far << 63);",
    )
    evens = ", ".join(str(2 * k) for k in range(isa.lanes))
    both = ", ".join(f"cvt_i64_hi32({x})" for x in "ab")
    out.add(
        "vi32 join_i64(vi64 a, vi64 b)",
        f"return cat_i32({both});",
        shuffled=f"return __builtin_shufflevector((vi32)a, (vi32)b, {evens});",
    )
    ends = "v_min_i64(v_max_i64({0}, splat_i64(-0x80000000l)), splat_i64(0x7fffffffl))"
    halves = ", ".join(f"cvt_i64_hi32({ends.format(x)})" for x in "ab")
    wide = "long long __attribute__((vector_size(64)))"
    calls = (f"__builtin_ia32_pmovsqd512_mask(({wide}){x}, (hi32){{}}, -1)" for x in "ab")
    sat = f"return cat_i32({', '.join(calls)});" if isa.name == "avx512" else None
    out.add("vi32 sat_i32(vi64 a, vi64 b)", f"return cat_i32({halves});", sat)
    out.add("vi32 mask_of_u8(vu8 x)", "return (vi32)(cvt_u8_i32(x) != 0);")
    out.add("vu8 u8_of_mask(vi32 m)", "return cvt_i32_u8(m) & 1;")
    return out


def _conversion_builtins() -> dict[tuple[str, str], str]:
    """Conversions of AVX-512 as g++'s builtins."""
    bytes_, wide = (
        "char __attribute__((vector_size(16)))",
        "long long __attribute__((vector_size(64)))",
    )
    out = {}
    for s, extend in (("i", "s"), ("u", "z")):
        for t in ("i32", "u32"):
            out[f"{s}8", t] = f"__builtin_ia32_pmov{extend}xbd512_mask(({bytes_})x, (vi32){{}}, -1)"
            out[f"{s}16", t] = f"__builtin_ia32_pmov{extend}xwd512_mask((vi16)x, (vi32){{}}, -1)"
            out[t, f"{s}8"] = f"__builtin_ia32_pmovdb512_mask((vi32)x, ({bytes_}){{}}, -1)"
            out[t, f"{s}16"] = "__builtin_ia32_pmovdw512_mask((vi32)x, (vi16){}, -1)"
        for t in ("i64", "u64"):
            half = "(hi32)x"
            out[f"h{s}32", t] = f"__builtin_ia32_pmov{extend}xdq512_mask({half}, ({wide}){{}}, -1)"
            out[t, f"h{s}32"] = f"__builtin_ia32_pmovqd512_mask(({wide})x, (hi32){{}}, -1)"
    out["hf32", "f64"] = "__builtin_ia32_cvtps2pd512_mask(x, (vf64){}, -1, 4)"
    return out


def halves(isa: Isa) -> dict[str, str]:
    """Conversions of the 16-bit floats, rounding to nearest even."""
    loop = f"r; for (int k = 0; k < {isa.lanes}; ++k) r[k] ="
    to_bf16 = (
        "vu32 b = (vu32)x; b = (b + 0x7fff + (b >> 16 & 1)) >> 16; "
        "b = x != x ? splat_u32(0x7fc0) : b; return cvt_u32_u16(b);"
    )
    up = {
        "avx512": "return __builtin_ia32_vcvtph2ps512_mask((vi16)x, (vf32){}, -1, 4);",
        "avx2": "return __builtin_ia32_vcvtph2ps256((vi16)x);",
    }.get(isa.name)
    down = {
        "avx512": "return (vu16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (vi16){}, -1);",
        "avx2": "return (vu16)__builtin_ia32_vcvtps2ph256(x, 0);",
    }.get(isa.name)
    out = Functions()
    out.add("vf32 v_from_bf16(vu16 x)", "return (vf32)(cvt_u16_u32(x) << 16);")
    out.add("vu16 v_to_bf16(vf32 x)", to_bf16)
    out.add("vf32 v_from_f16(vu16 x)", f"vf32 {loop} from_f16(x[k]); return r;", up)
    out.add("vu16 v_to_f16(vf32 x)", f"vu16 {loop} to_f16(x[k]); return r;", down)
    return out
