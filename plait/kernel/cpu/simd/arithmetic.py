"""Vector functions that compute: arithmetic, rounding, integer division, random numbers."""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.kernel.cpu.simd.text import FLOATS, NUMBERS, Functions, mask_of, n_lanes
from plait.runtime.toolchain import Isa

WITH_PAIRS = '__attribute__((target("avx512bf16")))'
"""Of functions that use sum_pairs: others may not be given these instructions."""


def arithmetic(isa: Isa) -> dict[str, str]:
    """Functions that plain vector operators express."""
    out = Functions()
    for t in NUMBERS:
        v, bits = f"v{t}", 8 * DTYPES[t].nbytes
        one, two = f"({v} a)", f"({v} a, {v} b)"
        if t in FLOATS:
            sign = f"(vu{bits})splat_{t}(-0.0)"
            for name, less, op in (("least", "<", "min"), ("most", ">", "max")):
                call = f"__builtin_ia32_{op}p{'s' if t == 'f32' else 'd'}512_mask(a, b, a, -1, 4)"
                fast = f"return {call};" if isa.name == "avx512" else None
                out.add(f"{v} {name}_{t}{two}", f"return a {less} b ? a : b;", fast)
                body = f"{v} r = {name}_{t}(a, b); return a != a ? a : r;"
                out.add(f"{v} v_{op}_{t}{two}", body)
            out.add(f"{v} v_fmin_{t}{two}", "return (a <= b) | (b != b) ? a : b;")
            out.add(f"{v} v_fmax_{t}{two}", "return (a >= b) | (b != b) ? a : b;")
            bare = f"(vu{bits})a & ~{sign}"
            out.add(f"{v} v_abs_{t}{one}", f"return ({v})({bare});")
            out.add(f"{v} v_copysign_{t}{two}", f"return ({v})({bare} | (vu{bits})b & {sign});")
            signs = f"a > 0 ? splat_{t}(1) : (a < 0 ? -splat_{t}(1) : ({v}){{}})"
            out.add(f"{v} v_sign_{t}{one}", f"return {signs};")
            body = "return (m != 0) & ((m < 0) != (b < 0)) ? m + b : m;"
            out.add(f"{v} v_pymod_{t}({v} m, {v} b)", body)
            continue
        out.add(f"{v} v_min_{t}{two}", "return a < b ? a : b;")
        out.add(f"{v} v_max_{t}{two}", "return a > b ? a : b;")
        out.add(f"{v} v_abs_{t}{one}", "return a < 0 ? -a : a;")
        out.add(f"{v} v_sign_{t}{one}", f"return ({v})(a < 0) - ({v})(a > 0);")
        inside, shift = f"(vu{bits})b < {bits}", f"({v})((vu{bits})b & {bits - 1})"
        rest = f"({v})(a < 0)" if t.startswith("i") else f"({v}){{}}"
        out.add(f"{v} v_shl_{t}{two}", f"return {inside} ? a << {shift} : ({v}){{}};")
        out.add(f"{v} v_shr_{t}{two}", f"return {inside} ? a >> {shift} : {rest};")
    return out


def rounding(isa: Isa) -> dict[str, str]:
    """Square root, rounding to integers, fused multiply-add: an instruction each where there is
    one."""
    out = Functions()
    modes = {
        "floor": ("floor", 9),
        "ceil": ("ceil", 10),
        "trunc": ("trunc", 11),
        "round": ("rint", 8),
    }
    for t in FLOATS:
        v, n, f, s = f"v{t}", n_lanes(isa, t), "f" if t == "f32" else "", "s" if t == "f32" else "d"
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
            out.add(f"{v} v_{op}_{t}({v} a)", plain, fast)
        plain = f"{v} r; for (int k = 0; k < {n}; ++k) r[k] = __builtin_fma{f}(a[k], b[k], c[k]);"
        fast = {"avx512": f"return __builtin_ia32_vfmaddp{s}512_mask(a, b, c, -1, 4);",
                "avx2": f"return __builtin_ia32_vfmaddp{s}256(a, b, c);"}.get(isa.name)  # fmt: skip
        out.add(f"{v} v_fma_{t}({v} a, {v} b, {v} c)", f"{plain} return r;", fast)
    # r: 1 / b, rounded. The first quotient is right where it is 0, infinite or no number.
    fast = """\
  const vf32 q = a * r, s = v_fma_f32(v_fma_f32(-q, b, a), r, q);
  return (s < q) | (s > q) ? s : q;"""
    head = "vf32 v_divided_f32(vf32 a, vf32 b, vf32 r)"
    out.add(head, "return a / b;", fast if isa.sleef else None)
    return out


def pair_sums(isa: Isa) -> dict[str, str]:
    """sum_pairs(c, a, b): c and the products of both bfloat16 numbers in each lane of a and b. The
    instruction takes denormal numbers for 0, and gives 0 for them, whatever the thread's flags say;
    so do vendors' products. Its operands have other types in each compiler's builtin."""
    if not isa.bf16_pairs:
        return {}
    head = f"static inline {WITH_PAIRS} vf32 sum_pairs(vf32 c, vu32 a, vu32 b)"
    body = 'asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); return c;'
    return {"sum_pairs": f"{head} {{ {body} }}"}


def lanewise(isa: Isa) -> dict[str, str]:
    """Integer division: no vector instruction exists, so lane by lane; of numbers below 2^52 that
    of f64, which is one off at most, and in floordiv and mod the sign of the remainder tells."""
    out = Functions()
    for t in NUMBERS:
        if t in FLOATS:
            continue
        for op in ("floordiv", "truncdiv", "mod", "rem"):
            body = (
                f"v{t} r; for (int k = 0; k < {n_lanes(isa, t)}; ++k) r[k] = s_{op}(a[k], b[k]); "
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
            out.add(f"v{t} v_{op}_{t}(v{t} a, v{t} b)", body)
    return out


def random(isa: Isa) -> dict[str, str]:
    """Philox4x32-10 on 64-bit lanes: a 32 x 32 bit product needs the whole lane."""
    wide = f"long long __attribute__((vector_size({8 * isa.lanes_of(8)})))"
    product = {
        "avx512": f"(vu64)__builtin_ia32_pmuludq512_mask((vi32)a, (vi32)b, ({wide})a, -1)",
        "avx2": "(vu64)__builtin_ia32_pmuludq256((vi32)a, (vi32)b)",
        "portable": "(vu64)__builtin_ia32_pmuludq128((vi32)a, (vi32)b)",
    }[isa.name]
    out = Functions()
    plain = "return (a & 0xffffffffu) * (b & 0xffffffffu);"
    out.add("vu64 mul_wide(vu64 a, vu64 b)", plain, f"return {product};")
    # Upper halves of lanes hold rubbish, which a product of lower halves does not see.
    out["v_philox4"] = """\
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
    out["v_philox"] = """\
static inline vi64 v_philox(vi64 seed, vi64 counter, vi64 word) {
  const vphilox r = v_philox4(seed, counter, word >> 2);
  word &= 3;
  return word == 0 ? r.word[0] : (word == 1 ? r.word[1] : (word == 2 ? r.word[2] : r.word[3]));
}"""
    return out


FAR = {"f32": "88.0f", "f64": "709.0"}
"""Where the exponential is near its overflow."""


def extremes(isa: Isa) -> dict[str, str]:
    """Functions of SLEEF that lose at the ends of a dtype, with what they lose made good: fmod
    takes a few steps of a long division, sinh and cosh overflow with exp(x), log1p takes subnormals
    for 0."""
    out = Functions()
    for t in FLOATS:
        n, v, m = n_lanes(isa, t), f"v{t}", mask_of(t)
        least = {"f32": "0x1p-100f", "f64": "0x1p-1000"}[t]
        body = f"return v_abs_{t}(x) < {least} ? x : m_log1p_{t}(x);"
        out.add(f"{v} v_log1p_{t}({v} x)", body)
        some = "any(far)" if t == "f32" else "any(join_i64(far, far))"
        out.add(
            f"{v} v_fmod_{t}({v} a, {v} b)",
            f"{v} r = m_fmod_{t}(a, b); const {m} far = ({m})(v_abs_{t}(a / b) >= 0x1p20); "
            f"if ({some}) for (int k = 0; k < {n}; ++k) "
            f"if (far[k]) r[k] = s_fmod_{t}(a[k], b[k]); return r;",
        )
        for op, sign in (("sinh", f"v_copysign_{t}(e * half * e, x)"), ("cosh", "e * half * e")):
            half = f"const {v} half = splat_{t}(0.5)"
            out.add(
                f"{v} v_{op}_{t}({v} x)",
                f"const {v} r = m_{op}_{t}(x), a = v_abs_{t}(x); "
                f"const {m} far = ({m})(a > {FAR[t]}); if (!{some}) return r; "
                f"{half}, e = m_exp_{t}(a * half); return far ? {sign} : r;",
            )
    return out
