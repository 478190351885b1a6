"""exp, log, tanh and erf of f32 vectors as short polynomials in registers, within one ulp: the
functions that models spend their time in.

A call of SLEEF saves and restores every vector register; these stay in line. All others go through
SLEEF (see prelude). Coefficients are minimax fits in the weighted relative error (residual
below 0.06 ulp), rounded to f32. They need fused multiply-add.
"""

from __future__ import annotations

from plait.runtime.toolchain import Isa

# exp(r) = 1 + r + r^2 * p(r) for |r| <= ln(2)/2.
_EXP = ("0x1.fffffcp-2f", "0x1.555490p-3f", "0x1.5558f4p-5f", "0x1.123a6cp-7f", "0x1.6a2352p-10f")
# log(1 + f) = f - f^2/2 + f^3 * p(f) for |f| <= 1/3.
_LOG = (
    "0x1.555506p-2f", "-0x1.fffef0p-3f", "0x1.99d028p-3f", "-0x1.559dccp-3f", "0x1.1ed716p-3f",
    "-0x1.f31140p-4f", "0x1.1e66c0p-3f", "-0x1.08058ap-3f",
)  # fmt: skip
# tanh(x) = x + x^3 * p(x^2) for |x| <= 0.95.
_TANH = (
    "-0x1.555548p-2f", "0x1.110de6p-3f", "-0x1.b99e98p-5f", "0x1.61a682p-6f", "-0x1.09e9a8p-7f",
    "0x1.403b02p-9f", "-0x1.a87512p-12f",
)  # fmt: skip
# erf(x) = x + x * p(x^2) for |x| <= 1.
_ERF = (
    "0x1.06eba8p-3f", "-0x1.81273ep-2f", "0x1.ce2cf8p-4f", "-0x1.b7f90ep-6f", "0x1.5405b2p-8f",
    "-0x1.a3f700p-11f", "0x1.496a30p-14f",
)  # fmt: skip
# log(erfc(t)) = p(t) for 0.98 <= t <= 4; beyond, erf is 1.
_LOG_ERFC = (
    "-0x1.3b0824p-12f", "-0x1.20938cp+0f", "-0x1.46989ep-1f", "-0x1.a73a84p-4f", "0x1.6778b4p-6f",
    "-0x1.859a56p-9f", "0x1.8bfd72p-13f",
)  # fmt: skip


# erf(t) = t * (c0 + u * p(u)) with u = t * 3.8125 - k, |u| <= 0.5, for t < 4.06: row j holds the
# coefficients of u^j for k = 0..15, the last row what rounding c0 lost.
_ERF_ROWS = (
    (
        "0x1.20dd76p+0f", "0x1.1a6004p+0f", "0x1.086b2cp+0f", "0x1.ddbad4p-1f",
        "0x1.a4b804p-1f", "0x1.6d8e40p-1f", "0x1.3cdcc4p-1f", "0x1.143b48p-1f",
        "0x1.e688f6p-2f", "0x1.b16990p-2f", "0x1.8651a4p-2f", "0x1.62e4a4p-2f",
        "0x1.4554a0p-2f", "0x1.2c4ea8p-2f", "0x1.16db6ap-2f", "0x1.044444p-2f",
    ),
    (
        "-0x1.433480p-27f", "-0x1.96e3e8p-5f", "-0x1.68615cp-4f", "-0x1.bc8238p-4f",
        "-0x1.c91e34p-4f", "-0x1.a35c54p-4f", "-0x1.65c3f2p-4f", "-0x1.250348p-4f",
        "-0x1.d864a8p-5f", "-0x1.7d5a32p-5f", "-0x1.374dfcp-5f", "-0x1.01e67cp-5f",
        "-0x1.b1b284p-6f", "-0x1.7198a4p-6f", "-0x1.3eb126p-6f", "-0x1.159e16p-6f",
    ),
    (
        "-0x1.a7f720p-6f", "-0x1.758f48p-6f", "-0x1.ea5018p-7f", "-0x1.7061bep-8f",
        "0x1.1082a0p-9f", "0x1.aee5a2p-8f", "0x1.074d04p-7f", "0x1.eefbd8p-8f",
        "0x1.9a20bep-8f", "0x1.3fa5b6p-8f", "0x1.e7a022p-9f", "0x1.74a926p-9f",
        "0x1.209fd8p-9f", "0x1.c6b4aap-10f", "0x1.6c30d6p-10f", "0x1.281f0ep-10f",
    ),
    (
        "-0x1.f8a92cp-20f", "0x1.01ea70p-9f", "0x1.919156p-9f", "0x1.86ab8ep-9f",
        "0x1.0ebee6p-9f", "0x1.f01d7ep-11f", "0x1.877d68p-14f", "-0x1.6ec616p-12f",
        "-0x1.f03234p-12f", "-0x1.c40610p-12f", "-0x1.628036p-12f", "-0x1.05aad6p-12f",
        "-0x1.7c9828p-13f", "-0x1.16fd8cp-13f", "-0x1.9ff01ap-14f", "-0x1.3bd25ep-14f",
    ),
    (
        "0x1.1bd4cap-11f", "0x1.ac7cbap-12f", "0x1.049e9ap-13f", "-0x1.351504p-13f",
        "-0x1.2389c2p-12f", "-0x1.0ef7b8p-12f", "-0x1.531cd8p-13f", "-0x1.107286p-14f",
        "-0x1.3278c6p-18f", "0x1.5101c2p-16f", "0x1.906fe8p-16f", "0x1.4b03aep-16f",
        "0x1.e2f004p-17f", "0x1.52873cp-17f", "0x1.da2f2cp-18f", "0x1.511b22p-18f",
    ),
    (
        "-0x1.b40bd8p-17f", "-0x1.810a98p-15f", "-0x1.022220p-14f", "-0x1.64d482p-15f",
        "-0x1.3c0f2cp-17f", "0x1.ec67d6p-17f", "0x1.664208p-16f", "0x1.0ef566p-16f",
        "0x1.0ef434p-17f", "0x1.356f86p-19f", "-0x1.8940f4p-22f", "-0x1.217e3ep-20f",
        "-0x1.0a272ep-20f", "-0x1.858a64p-21f", "-0x1.096726p-21f", "-0x1.65a420p-22f",
    ),
    (
        "-0x1.f71d24p-25f", "0x1.038680p-25f", "0x1.3e075ep-26f", "0x1.4ad7eap-27f",
        "0x1.ddfa46p-26f", "-0x1.035acep-26f", "0x1.20fe3ap-27f", "0x1.10a9b0p-26f",
        "0x1.7984acp-28f", "0x1.af154ep-28f", "-0x1.68ee9cp-27f", "0x1.19385ep-28f",
        "-0x1.4c398cp-27f", "0x1.f8c79ep-27f", "-0x1.011224p-30f", "-0x1.74cfb8p-29f",
    ),
)  # fmt: skip


def _polynomial(x: str, coefficients: tuple[str, ...]) -> str:
    """Horner's scheme."""
    text = f"splat_f32({coefficients[-1]})"
    for c in coefficients[-2::-1]:
        text = f"v_fma_f32({text}, {x}, splat_f32({c}))"
    return text


def elementary(isa: Isa) -> dict[str, str]:
    """Definitions by the names of the prelude's maths functions. Empty without fused
    multiply-add."""
    if not isa.sleef:
        return {}
    scale_gcc = (
        "return __builtin_ia32_scalefps512_mask(p, n, p, -1, 4);" if isa.name == "avx512" else ""
    )
    scale = """\
  vi32 k = cvt_f32_i32(n), h = k >> 1;
  return p * (vf32)((h + 127) << 23) * (vf32)((k - h + 127) << 23);"""
    if scale_gcc:
        scale = f"#ifdef __clang__\n{scale}\n#else\n  {scale_gcc}\n#endif"
    return {
        "v_scale": f"static inline vf32 v_scale(vf32 p, vf32 n) {{\n{scale}\n}}",
        # The clamp keeps a NaN; 2^128 overflows and 2^-150 vanishes as they should.
        "m_exp_f32": f"""\
static inline vf32 m_exp_f32(vf32 x) {{
  const vf32 magic = splat_f32(0x1.8p+23f);  // adding and subtracting it rounds to an integer
  x = most_f32(splat_f32(-104.0f), least_f32(splat_f32(89.0f), x));
  vf32 n = v_fma_f32(x, splat_f32(0x1.715476p+0f), magic) - magic;
  vf32 r = v_fma_f32(n, splat_f32(-0x1.62e430p-1f), x);
  r = v_fma_f32(n, splat_f32(0x1.05c610p-29f), r);
  vf32 p = {_polynomial("r", _EXP)};
  return v_scale(v_fma_f32(r * r, p, r) + 1.0f, n);
}}""",
        # x = 2^k * m with 2/3 <= m < 4/3; subnormal x is scaled first.
        "m_log_f32": f"""\
static inline vf32 m_log_f32(vf32 x) {{
  const vi32 small = (vi32)(x < 0x1p-126f);
  vi32 b = (vi32)(small ? x * 0x1p+23f : x), k = (b - 0x3f2aaaab) >> 23;
  vf32 f = (vf32)(b - (k << 23)) - 1.0f, s = f * f;
  vf32 n = cvt_i32_f32(k - (small & 23));
  vf32 q = v_fma_f32({_polynomial("f", _LOG)}, f, splat_f32(-0.5f));
  vf32 r = v_fma_f32(n, splat_f32(0x1.62e400p-1f), v_fma_f32(s, q, n * 0x1.7f7d1cp-20f) + f);
  r = x < __builtin_inff() ? r : x;
  return x > 0 ? r : (x == 0 ? splat_f32(-__builtin_inff()) : splat_f32(__builtin_nanf("")));
}}""",
        "m_tanh_f32": f"""\
static inline vf32 m_tanh_f32(vf32 x) {{
  vf32 t = v_abs_f32(x), s = x * x;
  vf32 far = 1.0f - 2.0f / (m_exp_f32(t + t) + 1.0f);
  vf32 near = v_fma_f32(t * s, {_polynomial("s", _TANH)}, t);
  return v_copysign_f32(t < 0.95f ? near : far, x);
}}""",
        "m_erf_f32": _erf(isa),
    }


def _erf(isa: Isa) -> str:
    """Two ranges, or for AVX-512 under g++ 16 intervals whose coefficients lie in registers'
    lanes."""
    two_ranges = f"""\
static inline vf32 m_erf_f32(vf32 x) {{
  vf32 t = v_abs_f32(x), s = x * x;
  vf32 c = least_f32(splat_f32(4.0f), t);
  vf32 far = 1.0f - m_exp_f32({_polynomial("c", _LOG_ERFC)});
  vf32 near = v_fma_f32({_polynomial("s", _ERF)}, t, t);
  return v_copysign_f32(t < 1.0f ? near : far, x);
}}"""
    if isa.name != "avx512":
        return two_ranges
    rows = "\n".join(
        f"  const vf32 c{j} = {{{', '.join(row)}}};" for j, row in enumerate(_ERF_ROWS)
    )
    p = "__builtin_shuffle(c5, k)"
    for row in (4, 3, 2, 1, 6):
        p = f"v_fma_f32({p}, u, __builtin_shuffle(c{row}, k))"
    return f"""\
#ifdef __clang__
{two_ranges}
#else
static inline vf32 m_erf_f32(vf32 x) {{
{rows}
  const vf32 scale = splat_f32(3.8125f), magic = splat_f32(0x1.8p+23f);
  vf32 t = least_f32(splat_f32(4.0f), v_abs_f32(x));
  vf32 m = v_fma_f32(t, scale, magic), u = v_fma_f32(t, scale, magic - m);
  vi32 k = (vi32)m;  // its low bits are the interval
  vf32 p = {p};
  p = v_fma_f32(t, __builtin_shuffle(c0, k), t * p);
  return (vf32)((vu32)p | ((vu32)x & 0x80000000u));
}}
#endif"""
