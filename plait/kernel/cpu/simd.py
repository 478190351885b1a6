"""Vector functions of the prelude, one table an instruction set.

Everything has a version in plain vector extensions that any compiler takes; where g++ makes slow
code of it and an instruction exists, an instruction's builtin is used under g++. vT is one register
of T (see prelude). m: a mask, lanes 0 or -1.
"""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.kernel.cpu.elementary import elementary
from plait.runtime.toolchain import Isa

_NUMBERS = ("f32", "f64", "i32", "u32", "i64", "u64", "i16", "u16", "i8", "u8")
_FLOATS = ("f32", "f64")


def simd(isa: Isa) -> dict[str, str]:
    """name -> definition, in an order in which later entries use earlier ones."""
    out: dict[str, str] = {}
    for part in (
        _shape,
        _arithmetic,
        _conversions,
        _memory,
        _rounding,
        _lanewise,
        _halves,
        _gathers,
        _rearranged,
        _horizontal,
        _scans,
        _tiles,
        _random,
    ):
        out.update(part(isa))
    return {**out, **elementary(isa), **_extremes(isa)}


def _fn(result: str, name: str, params: str, body: str) -> str:
    return f"static inline {result} {name}({params}) {{ {body} }}"


def _lanes(isa: Isa, t: str) -> int:
    return isa.lanes_of(DTYPES[t].nbytes)


def _mask(t: str) -> str:
    return f"vi{8 * DTYPES[t].nbytes}"


def _either(gcc: str | None, plain: str) -> str:
    return plain if gcc is None else f"#ifdef __clang__\n{plain}\n#else\n{gcc}\n#endif"


def _shape(isa: Isa) -> dict[str, str]:
    """Splats, halves, lane numbers."""
    out = {}
    for t in _NUMBERS:
        copies = ", ".join(["x"] * _lanes(isa, t))
        out[f"splat_{t}"] = _fn(f"v{t}", f"splat_{t}", f"{t} x", f"return (v{t}){{{copies}}};")
    n = isa.lanes
    for t in ("f32", "i32", "u32"):
        every = ", ".join(map(str, range(n)))
        shuffles = "#if __has_builtin(__builtin_shufflevector)\n" + "\n".join((
            _fn(f"v{t}", f"cat_{t}", f"h{t} a, h{t} b",
                f"return __builtin_shufflevector(a, b, {every});"),
        )) + "\n#else\n" + _fn(
            f"v{t}", f"cat_{t}", f"h{t} a, h{t} b",
            f"v{t} r; __builtin_memcpy(&r, &a, sizeof a); "
            "__builtin_memcpy((char*)&r + sizeof a, &b, sizeof b); return r;",
        ) + "\n#endif"  # fmt: skip
        out[f"cat_{t}"] = shuffles
        for half, start in (("lo", 0), ("hi", n // 2)):
            picks = ", ".join(map(str, range(start, start + n // 2)))
            out[f"{half}_{t}"] = "\n".join((
                "#if __has_builtin(__builtin_shufflevector)",
                _fn(f"h{t}", f"{half}_{t}", f"v{t} a",
                    f"return __builtin_shufflevector(a, a, {picks});"),
                "#else",
                _fn(f"h{t}", f"{half}_{t}", f"v{t} a",
                    f"h{t} r; __builtin_memcpy(&r, (char*)&a + {4 * start}, sizeof r); return r;"),
                "#endif",
            ))  # fmt: skip
    numbers = ", ".join(map(str, range(n)))
    out["lane_mask"] = _fn(
        "vi32", "lane_mask", "i64 n", f"return (vi32)((vi32){{{numbers}}} < splat_i32((i32)n));"
    )
    out["lanes_below"] = _fn(
        "vi32", "lanes_below", "i64 n", f"return lane_mask(n < 0 ? 0 : n < {n} ? n : {n});"
    )
    for half, start in (("lo", 0), ("hi", n // 2)):
        steps = ", ".join(map(str, range(start, start + n // 2)))
        body = f"return splat_i64(a) + (vi64){{{steps}}} * c;"
        out[f"iota_{half}"] = _fn("vi64", f"iota_{half}", "i64 a, i64 c", body)
    gcc = None
    if isa.name == "avx512":
        gcc = _fn("bool", "any", "vi32 m", "return __builtin_ia32_cvtd2mask512((vi32)m) != 0;")
    elif isa.name == "avx2":
        gcc = _fn("bool", "any", "vi32 m", "return __builtin_ia32_movmskps256((vf32)m) != 0;")
    out["any"] = _either(
        gcc,
        _fn(
            "bool",
            "any",
            "vi32 m",
            f"i32 r = 0; for (int k = 0; k < {n}; ++k) r |= m[k]; return r != 0;",
        ),
    )
    return out


def _conversions(isa: Isa) -> dict[str, str]:
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
    out = {}
    for a, b in pairs:
        result, param = (t if t[0] == "h" else f"v{t}" for t in (b, a))
        name = f"cvt_{a}_{b}"
        plain = _fn(result, name, f"{param} x", f"return __builtin_convertvector(x, {result});")
        builtin = fast.get((a, b))
        out[name] = _either(
            builtin and _fn(result, name, f"{param} x", f"return ({result}){builtin};"), plain
        )
    out["cvt_f64_u64"] = _fn(  # as s_to_u64
        "vu64", "cvt_f64_u64", "vf64 x",
        "const vi64 far = (vi64)(x >= 0x1p63); "
        "return (vu64)cvt_f64_i64(far ? x - 0x1p63 : x) ^ ((vu64)far << 63);",
    )  # fmt: skip
    n = isa.lanes
    evens = ", ".join(str(2 * k) for k in range(n))
    both = ", ".join(f"cvt_i64_hi32({x})" for x in "ab")
    out["join_i64"] = "\n".join((
        "#if __has_builtin(__builtin_shufflevector)",
        _fn("vi32", "join_i64", "vi64 a, vi64 b",
            f"return __builtin_shufflevector((vi32)a, (vi32)b, {evens});"),
        "#else",
        _fn("vi32", "join_i64", "vi64 a, vi64 b", f"return cat_i32({both});"),
        "#endif",
    ))  # fmt: skip
    ends = "v_min_i64(v_max_i64({0}, splat_i64(-0x80000000l)), splat_i64(0x7fffffffl))"
    halves = ", ".join(f"cvt_i64_hi32({ends.format(x)})" for x in "ab")
    sat = None
    if isa.name == "avx512":
        wide = "long long __attribute__((vector_size(64)))"
        calls = (f"__builtin_ia32_pmovsqd512_mask(({wide}){x}, (hi32){{}}, -1)" for x in "ab")
        sat = _fn("vi32", "sat_i32", "vi64 a, vi64 b", f"return cat_i32({', '.join(calls)});")
    out["sat_i32"] = _either(
        sat, _fn("vi32", "sat_i32", "vi64 a, vi64 b", f"return cat_i32({halves});")
    )
    out["mask_of_u8"] = _fn("vi32", "mask_of_u8", "vu8 x", "return (vi32)(cvt_u8_i32(x) != 0);")
    out["u8_of_mask"] = _fn("vu8", "u8_of_mask", "vi32 m", "return cvt_i32_u8(m) & 1;")
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


def _memory(isa: Isa) -> dict[str, str]:
    """ld, st: whole registers; ldn, stn: the first n lanes (n may be <= 0 or past the end); ldm,
    stm: where the mask holds."""
    out = {}
    for t in _NUMBERS:
        n, v = _lanes(isa, t), f"v{t}"
        out[f"ld_{t}"] = _fn(v, f"ld_{t}", f"const {t}* p", f"return *(const {v}u*)p;")
        out[f"st_{t}"] = _fn("void", f"st_{t}", f"{t}* p, {v} x", f"*({v}u*)p = x;")
        fast = _masked_builtins(isa, t)
        plain = {
            "ldn": _fn(v, f"ldn_{t}", f"const {t}* p, i64 n",
                       f"{v} r = {{}}; for (i64 k = 0; k < {n} && k < n; ++k) r[k] = p[k]; "
                       "return r;"),
            "stn": _fn("void", f"stn_{t}", f"{t}* p, {v} x, i64 n",
                       f"for (i64 k = 0; k < {n} && k < n; ++k) p[k] = x[k];"),
            "ldm": _fn(v, f"ldm_{t}", f"const {t}* p, {_mask(t)} m",
                       f"{v} r = {{}}; for (int k = 0; k < {n}; ++k) if (m[k]) r[k] = p[k]; "
                       "return r;"),
            "stm": _fn("void", f"stm_{t}", f"{t}* p, {v} x, {_mask(t)} m",
                       f"for (int k = 0; k < {n}; ++k) if (m[k]) p[k] = x[k];"),
        }  # fmt: skip
        for name, text in plain.items():
            out[f"{name}_{t}"] = _either(fast.get(name), text)
    return out


def _masked_builtins(isa: Isa, t: str) -> dict[str, str]:
    """Masked loads and stores of 32- and 64-bit lanes as instructions. MASK stands for the mask."""
    nbytes, v = DTYPES[t].nbytes, f"v{t}"
    if nbytes < 4 and isa.name == "avx512":
        return _narrow_masked_builtins(t)
    if nbytes < 4 or isa.name == "portable":
        return {}
    f, letter = ("f32", "s") if nbytes == 4 else ("f64", "d")
    n = _lanes(isa, t)
    signed = v if t.startswith("i") else _mask(t)
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
        "ldn": _fn(v, f"ldn_{t}", f"const {t}* p, i64 n", load.replace("MASK", count)),
        "stn": _fn("void", f"stn_{t}", f"{t}* p, {v} x, i64 n", store.replace("MASK", count)),
        "ldm": _fn(v, f"ldm_{t}", f"const {t}* p, {_mask(t)} m", load.replace("MASK", lanes)),
        "stm": _fn(
            "void", f"stm_{t}", f"{t}* p, {v} x, {_mask(t)} m", store.replace("MASK", lanes)
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
        f"ld{kind}": _fn(v, f"ld{kind}_{t}", f"const {t}* p, {more}", load.replace("MASK", text))
        for kind, more, text in (("n", "i64 n", count), ("m", f"{_mask(t)} m", mask))
    } | {
        f"st{kind}": _fn(
            "void", f"st{kind}_{t}", f"{t}* p, {v} x, {more}", store.replace("MASK", text)
        )
        for kind, more, text in (("n", "i64 n", count), ("m", f"{_mask(t)} m", mask))
    }


def _arithmetic(isa: Isa) -> dict[str, str]:
    """Functions that plain vector operators express."""
    out = {}
    for t in _NUMBERS:
        v, bits, two = f"v{t}", 8 * DTYPES[t].nbytes, f"v{t} a, v{t} b"
        if t in _FLOATS:
            sign = f"(vu{bits})splat_{t}(-0.0)"
            for name, less, op in (("least", "<", "min"), ("most", ">", "max")):
                plain = _fn(v, f"{name}_{t}", two, f"return a {less} b ? a : b;")
                letter = "s" if t == "f32" else "d"
                call = f"return __builtin_ia32_{op}p{letter}512_mask(a, b, a, -1, 4);"
                fast = _fn(v, f"{name}_{t}", two, call) if isa.name == "avx512" else None
                out[f"{name}_{t}"] = _either(fast, plain)
                body = f"{v} r = {name}_{t}(a, b); return a != a ? a : r;"
                out[f"v_{op}_{t}"] = _fn(v, f"v_{op}_{t}", two, body)
            out[f"v_fmin_{t}"] = _fn(v, f"v_fmin_{t}", two, "return (a <= b) | (b != b) ? a : b;")
            out[f"v_fmax_{t}"] = _fn(v, f"v_fmax_{t}", two, "return (a >= b) | (b != b) ? a : b;")
            out[f"v_abs_{t}"] = _fn(
                v, f"v_abs_{t}", f"{v} a", f"return ({v})((vu{bits})a & ~{sign});"
            )
            out[f"v_copysign_{t}"] = _fn(
                v,
                f"v_copysign_{t}",
                two,
                f"return ({v})((vu{bits})a & ~{sign} | (vu{bits})b & {sign});",
            )
            one = f"splat_{t}(1)"
            zero = f"({v}){{}}"
            out[f"v_sign_{t}"] = _fn(
                v, f"v_sign_{t}", f"{v} a", f"return a > 0 ? {one} : (a < 0 ? -{one} : {zero});"
            )
            out[f"v_pymod_{t}"] = _fn(
                v,
                f"v_pymod_{t}",
                f"{v} m, {v} b",
                "return (m != 0) & ((m < 0) != (b < 0)) ? m + b : m;",
            )
        else:
            out[f"v_min_{t}"] = _fn(v, f"v_min_{t}", two, "return a < b ? a : b;")
            out[f"v_max_{t}"] = _fn(v, f"v_max_{t}", two, "return a > b ? a : b;")
            out[f"v_abs_{t}"] = _fn(v, f"v_abs_{t}", f"{v} a", "return a < 0 ? -a : a;")
            out[f"v_sign_{t}"] = _fn(
                v, f"v_sign_{t}", f"{v} a", f"return ({v})(a < 0) - ({v})(a > 0);"
            )
            inside = f"(vu{bits})b < {bits}"
            shift = f"({v})((vu{bits})b & {bits - 1})"
            out[f"v_shl_{t}"] = _fn(
                v, f"v_shl_{t}", two, f"return {inside} ? a << {shift} : ({v}){{}};"
            )
            rest = f"({v})(a < 0)" if t.startswith("i") else f"({v}){{}}"
            out[f"v_shr_{t}"] = _fn(
                v, f"v_shr_{t}", two, f"return {inside} ? a >> {shift} : {rest};"
            )
    return out


def _rounding(isa: Isa) -> dict[str, str]:
    """Square root, rounding to integers, fused multiply-add: an instruction each where there is
    one."""
    out = {}
    modes = {
        "floor": ("floor", 9),
        "ceil": ("ceil", 10),
        "trunc": ("trunc", 11),
        "round": ("rint", 8),
    }
    for t in _FLOATS:
        v, n, f, s = f"v{t}", _lanes(isa, t), "f" if t == "f32" else "", "s" if t == "f32" else "d"
        for op, name, mode in (("sqrt", "sqrt", 0), *((op, *m) for op, m in modes.items())):
            plain = (
                f"{v} r; for (int k = 0; k < {n}; ++k) r[k] = __builtin_{name}{f}(a[k]); return r;"
            )
            fast = None
            if isa.name == "avx512" and op == "sqrt":
                fast = f"return __builtin_ia32_sqrtp{s}512_mask(a, a, -1, 4);"
            elif isa.name == "avx512":
                fast = f"return __builtin_ia32_rndscalep{s}_mask(a, {mode}, a, -1, 4);"
            elif isa.name == "avx2":
                call = f"sqrtp{s}256(a)" if op == "sqrt" else f"roundp{s}256(a, {mode})"
                fast = f"return __builtin_ia32_{call};"
            elif op == "sqrt":
                fast = f"return __builtin_ia32_sqrtp{s}(a);"
            out[f"v_{op}_{t}"] = _either(
                fast and _fn(v, f"v_{op}_{t}", f"{v} a", fast),
                _fn(v, f"v_{op}_{t}", f"{v} a", plain),
            )
        three = f"{v} a, {v} b, {v} c"
        plain = _fn(v, f"v_fma_{t}", three,
                    f"{v} r; for (int k = 0; k < {n}; ++k) "
                    f"r[k] = __builtin_fma{f}(a[k], b[k], c[k]); return r;")  # fmt: skip
        fast = {"avx512": f"return __builtin_ia32_vfmaddp{s}512_mask(a, b, c, -1, 4);",
                "avx2": f"return __builtin_ia32_vfmaddp{s}256(a, b, c);"}.get(isa.name)  # fmt: skip
        out[f"v_fma_{t}"] = _either(fast and _fn(v, f"v_fma_{t}", three, fast), plain)
    return out


def _lanewise(isa: Isa) -> dict[str, str]:
    """Integer division: no vector instruction exists, so lane by lane; of numbers below 2^52 that
    of f64, which is one off at most, and in floordiv and mod the sign of the remainder tells."""
    out = {}
    for t in _NUMBERS:
        if t in _FLOATS:
            continue
        for op in ("floordiv", "truncdiv", "mod", "rem"):
            body = (
                f"v{t} r; for (int k = 0; k < {_lanes(isa, t)}; ++k) r[k] = s_{op}(a[k], b[k]); "
                "return r;"
            )
            if isa.name == "avx512" and t == "i64" and op in ("floordiv", "mod"):
                body = f"""
  const vu64 low = splat_u64(1ul << 52), top = splat_u64(1ul << 53);
  if (any((vi32)(((vu64)a + low >= top) | ((vu64)b + low >= top) | (b == 0)))) {{ {body} }}
  const vi64 q = cvt_f64_i64(cvt_i64_f64(a) / cvt_i64_f64(b)), r = a - q * b;
  const vi64 off = (r != 0) & ((r ^ b) < 0);
  return {"q + off" if op == "floordiv" else "r + (off & b)"};
"""
            out[f"v_{op}_{t}"] = _fn(f"v{t}", f"v_{op}_{t}", f"v{t} a, v{t} b", body)
    return out


def _halves(isa: Isa) -> dict[str, str]:
    """Conversions of the 16-bit floats, rounding to nearest even."""
    n = isa.lanes
    to_bf16 = (
        "vu32 b = (vu32)x; b = (b + 0x7fff + (b >> 16 & 1)) >> 16; "
        "b = x != x ? splat_u32(0x7fc0) : b; return cvt_u32_u16(b);"
    )
    up = _fn(
        "vf32",
        "v_from_f16",
        "vu16 x",
        f"vf32 r; for (int k = 0; k < {n}; ++k) r[k] = from_f16(x[k]); return r;",
    )
    down = _fn(
        "vu16",
        "v_to_f16",
        "vf32 x",
        f"vu16 r; for (int k = 0; k < {n}; ++k) r[k] = to_f16(x[k]); return r;",
    )
    fast_up = {
        "avx512": "return __builtin_ia32_vcvtph2ps512_mask((vi16)x, (vf32){}, -1, 4);",
        "avx2": "return __builtin_ia32_vcvtph2ps256((vi16)x);",
    }.get(isa.name)
    fast_down = {
        "avx512": "return (vu16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (vi16){}, -1);",
        "avx2": "return (vu16)__builtin_ia32_vcvtps2ph256(x, 0);",
    }.get(isa.name)
    return {
        "v_from_bf16": _fn("vf32", "v_from_bf16", "vu16 x", "return (vf32)(cvt_u16_u32(x) << 16);"),
        "v_to_bf16": _fn("vu16", "v_to_bf16", "vf32 x", to_bf16),
        "v_from_f16": _either(fast_up and _fn("vf32", "v_from_f16", "vu16 x", fast_up), up),
        "v_to_f16": _either(fast_down and _fn("vu16", "v_to_f16", "vf32 x", fast_down), down),
    }


_COMBINE = {
    "sum": "{0} + {1}", "prod": "{0} * {1}", "max": "v_max_{t}({0}, {1})",
    "min": "v_min_{t}({0}, {1})", "any": "{0} | {1}", "all": "{0} & {1}", "xor": "{0} ^ {1}",
}  # fmt: skip


def _gathers(isa: Isa) -> dict[str, str]:
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
        out[f"{name}_lanes"] = _fn("vi32", f"{name}_lanes", "i64 x, i64 c, i32 d", body)
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
        out[f"gather_{t}"] = _either(
            fast and _fn(f"v{t}", f"gather_{t}", params, f"{near} return (v{t}){fast};"),
            _fn(f"v{t}", f"gather_{t}", params, loop),
        )
    return out


def _rearranged(isa: Isa) -> dict[str, str]:
    """turned_<type>: lanes backwards. evens_<type>(a, b): every second of the elements in memory
    that a starts at and b ends at."""
    out = {}
    for t in _NUMBERS:
        n, v = _lanes(isa, t), f"v{t}"
        back = ", ".join(str(n - 1 - k) for k in range(n))
        second = ", ".join(str(2 * k if 2 * k < n else 2 * k + 1) for k in range(n))
        for name, params, text, loop in (
            ("turned", f"{v} a", f"a, a, {back}", f"a[{n - 1} - k]"),
            ("evens", f"{v} a, {v} b", f"a, b, {second}",
             f"2 * k < {n} ? a[2 * k] : b[2 * k + 1 - {n}]"),
        ):  # fmt: skip
            out[f"{name}_{t}"] = "\n".join((
                "#if __has_builtin(__builtin_shufflevector)",
                _fn(v, f"{name}_{t}", params, f"return __builtin_shufflevector({text});"),
                "#else",
                _fn(v, f"{name}_{t}", params,
                    f"{v} r; for (int k = 0; k < {n}; ++k) r[k] = {loop}; return r;"),
                "#endif",
            ))  # fmt: skip
    return out


_PAIRS = {
    "sum": "{0} + {1}", "prod": "{0} * {1}", "any": "{0} | {1}", "all": "{0} & {1}",
    "xor": "{0} ^ {1}", "max": "({0} > {1} ? {0} : {1})", "min": "({0} < {1} ? {0} : {1})",
}  # fmt: skip


def _horizontal(isa: Isa) -> dict[str, str]:
    """h_<kind>_<type>: all lanes of a register combined, as a tree."""
    out = {}
    for t in _NUMBERS:
        n, size = _lanes(isa, t), DTYPES[t].nbytes
        for kind, how in _PAIRS.items():
            if t in _FLOATS and kind in ("any", "all", "xor"):
                continue
            first = ""
            if t in _FLOATS and kind in ("max", "min"):  # of NaNs once for all
                nan = "__builtin_nan" + ("f" if t == "f32" else "")
                first = f'if (any((vi32)(a != a))) return {nan}(""); '
            loop = f"for (int n = {n // 2}; n > 0; n /= 2) for (int k = 0; k < n; ++k) "
            loop += f"a[k] = {how.format('a[k]', 'a[k + n]')}; return a[0];"
            name = f"h_{kind}_{t}"
            out[name] = "\n".join((
                "#if __has_builtin(__builtin_shufflevector)",
                _fn(t, name, f"v{t} a", first + _halved(n, size, how)),
                "#else", _fn(t, name, f"v{t} a", first + loop), "#endif",
            ))  # fmt: skip
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


def _scans(isa: Isa) -> dict[str, str]:
    """scan_<kind>_<type>(a, carry): lane k is carry and lanes 0..k of a combined. last_<type>: the
    last lane in every lane."""
    out = {}
    for t in _NUMBERS:
        n, v = _lanes(isa, t), f"v{t}"
        out[f"last_{t}"] = _fn(v, f"last_{t}", f"{v} a", f"return splat_{t}(a[{n - 1}]);")
        start = {"sum": "0", "prod": "1", "max": "carry[0]", "min": "carry[0]"}
        for kind, first in start.items():
            how, steps = _COMBINE[kind], []
            for s in (1 << k for k in range(n.bit_length() - 1)):
                picks = ", ".join(str(k if k < s else n + k - s) for k in range(n))
                steps.append(
                    f"a = {how.format(f'__builtin_shufflevector(e, a, {picks})', 'a', t=t)};"
                )
            loop = (
                f"{t} r = carry[0]; for (int k = 0; k < {n}; ++k) a[k] = r = "
                f"{_scalar_combine(kind)}; return a;"
            )
            name = f"scan_{kind}_{t}"
            out[name] = "\n".join((
                "#if __has_builtin(__builtin_shufflevector)",
                _fn(v, name, f"{v} a, {v} carry",
                    f"const {v} e = splat_{t}({first}); {' '.join(steps)} "
                    f"return {how.format('carry', 'a', t=t)};"),
                "#else", _fn(v, name, f"{v} a, {v} carry", loop), "#endif",
            ))  # fmt: skip
    return out


def _scalar_combine(kind: str) -> str:
    return {"sum": "r + a[k]", "prod": "r * a[k]"}.get(kind, f"s_{kind}(a[k], r)")


def _tiles(isa: Isa) -> dict[str, str]:
    """turn_<type>(p, step, out, na, nb): out[b * lanes + a] = p[a * step + b] for a < na, b < nb;
    whole tiles in registers."""
    out = {}
    n = isa.lanes
    for t in _NUMBERS:
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


def _random(isa: Isa) -> dict[str, str]:
    """Philox4x32-10 on 64-bit lanes: a 32 x 32 bit product needs the whole lane."""
    wide = f"long long __attribute__((vector_size({8 * isa.lanes_of(8)})))"
    product = {
        "avx512": f"(vu64)__builtin_ia32_pmuludq512_mask((vi32)a, (vi32)b, ({wide})a, -1)",
        "avx2": "(vu64)__builtin_ia32_pmuludq256((vi32)a, (vi32)b)",
        "portable": "(vu64)__builtin_ia32_pmuludq128((vi32)a, (vi32)b)",
    }[isa.name]
    params = "vu64 a, vu64 b"
    plain = _fn("vu64", "mul_wide", params, "return (a & 0xffffffffu) * (b & 0xffffffffu);")
    # Upper halves of lanes hold rubbish, which a product of lower halves does not see.
    body = """\
struct vphilox { vi64 word[4]; };
static inline vphilox v_philox4(vi64 seed, vi64 counter, vi64 block) {
  const vu64 low = splat_u64(0xffffffffu), m0 = splat_u64(0xD2511F53u), m1 = splat_u64(0xCD9E8D57u);
  vu64 k0 = (vu64)seed, k1 = (vu64)seed >> 32, c0 = (vu64)counter, c1 = (vu64)counter >> 32;
  vu64 c2 = (vu64)block, c3 = {};
#pragma GCC unroll 10
  for (int i = 0; i < 10; ++i) {
    vu64 a = mul_wide(m0, c0), b = mul_wide(m1, c2);
    c0 = (b >> 32) ^ c1 ^ k0; c1 = b; c2 = (a >> 32) ^ c3 ^ k1; c3 = a;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  return {{(vi64)(c0 & low), (vi64)(c1 & low), (vi64)(c2 & low), (vi64)(c3 & low)}};
}"""
    one = """\
static inline vi64 v_philox(vi64 seed, vi64 counter, vi64 word) {
  const vphilox r = v_philox4(seed, counter, word >> 2);
  word &= 3;
  return word == 0 ? r.word[0] : (word == 1 ? r.word[1] : (word == 2 ? r.word[2] : r.word[3]));
}"""
    return {
        "mul_wide": _either(_fn("vu64", "mul_wide", params, f"return {product};"), plain),
        "v_philox4": body,
        "v_philox": one,
    }


FAR = {"f32": "88.0f", "f64": "709.0"}
"""Where the exponential is near its overflow."""


def _extremes(isa: Isa) -> dict[str, str]:
    """Functions of SLEEF that lose at the ends of a dtype, with what they lose made good: fmod
    takes a few steps of a long division, sinh and cosh overflow with exp(x), log1p takes subnormals
    for 0."""
    out = {}
    for t in _FLOATS:
        least = {"f32": "0x1p-100f", "f64": "0x1p-1000"}[t]
        out[f"v_log1p_{t}"] = _fn(
            f"v{t}",
            f"v_log1p_{t}",
            f"v{t} x",
            f"return v_abs_{t}(x) < {least} ? x : m_log1p_{t}(x);",
        )
        n, v, m = _lanes(isa, t), f"v{t}", _mask(t)
        some = "any(far)" if t == "f32" else "any(join_i64(far, far))"
        out[f"v_fmod_{t}"] = _fn(
            v, f"v_fmod_{t}", f"{v} a, {v} b",
            f"{v} r = m_fmod_{t}(a, b); const {m} far = ({m})(v_abs_{t}(a / b) >= 0x1p20); "
            f"if ({some}) for (int k = 0; k < {n}; ++k) "
            f"if (far[k]) r[k] = s_fmod_{t}(a[k], b[k]); return r;",
        )  # fmt: skip
        for op, sign in (("sinh", f"v_copysign_{t}(e * half * e, x)"), ("cosh", "e * half * e")):
            half = f"const {v} half = splat_{t}(0.5)"
            out[f"v_{op}_{t}"] = _fn(
                v, f"v_{op}_{t}", f"{v} x",
                f"const {v} r = m_{op}_{t}(x), a = v_abs_{t}(x); "
                f"const {m} far = ({m})(a > {FAR[t]}); if (!{some}) return r; "
                f"{half}, e = m_exp_{t}(a * half); return far ? {sign} : r;",
            )  # fmt: skip
    return out
