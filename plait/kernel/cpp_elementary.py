"""exp, tanh and erf of f32 vectors as short polynomials in registers, within one ulp: the functions that models spend their time in.

A call of SLEEF saves and restores every vector register; these stay in line. All others go through SLEEF (see cpp_prelude). Coefficients are
minimax fits in the weighted relative error (residual below 0.06 ulp), rounded to f32. They need fused multiply-add.
"""

from __future__ import annotations

from plait.runtime.toolchain import Isa

# exp(r) = 1 + r + r^2 * p(r) for |r| <= ln(2)/2.
_EXP = ("0x1.fffffcp-2f", "0x1.555490p-3f", "0x1.5558f4p-5f", "0x1.123a6cp-7f", "0x1.6a2352p-10f")
# tanh(x) = x + x^3 * p(x^2) for |x| <= 0.95.
_TANH = (
    "-0x1.555548p-2f", "0x1.110de6p-3f", "-0x1.b99e98p-5f", "0x1.61a682p-6f", "-0x1.09e9a8p-7f", "0x1.403b02p-9f",
    "-0x1.a87512p-12f",
)  # fmt: skip
# erf(x) = x + x * p(x^2) for |x| <= 1.
_ERF = (
    "0x1.06eba8p-3f", "-0x1.81273ep-2f", "0x1.ce2cf8p-4f", "-0x1.b7f90ep-6f", "0x1.5405b2p-8f", "-0x1.a3f700p-11f",
    "0x1.496a30p-14f",
)  # fmt: skip
# log(erfc(t)) = p(t) for 0.98 <= t <= 4; beyond, erf is 1.
_LOG_ERFC = (
    "-0x1.3b0824p-12f", "-0x1.20938cp+0f", "-0x1.46989ep-1f", "-0x1.a73a84p-4f", "0x1.6778b4p-6f", "-0x1.859a56p-9f",
    "0x1.8bfd72p-13f",
)  # fmt: skip


def _polynomial(x: str, coefficients: tuple[str, ...]) -> str:
    """Horner's scheme."""
    text = f"splat_f32({coefficients[-1]})"
    for c in coefficients[-2::-1]:
        text = f"v_fma_f32({text}, {x}, splat_f32({c}))"
    return text


def elementary(isa: Isa) -> dict[str, str]:
    """Definitions by the names of the prelude's maths functions. Empty without fused multiply-add."""
    if not isa.sleef:
        return {}
    scale_gcc = "return __builtin_ia32_scalefps512_mask(p, n, p, -1, 4);" if isa.name == "avx512" else ""
    scale = """\
  vi32 k = __builtin_convertvector(n, vi32), h = k >> 1;
  return p * (vf32)((h + 127) << 23) * (vf32)((k - h + 127) << 23);"""
    if scale_gcc:
        scale = f"#ifdef __clang__\n{scale}\n#else\n  {scale_gcc}\n#endif"
    return {
        "v_scale": f"static inline vf32 v_scale(vf32 p, vf32 n) {{\n{scale}\n}}",
        # The clamp keeps a NaN; 2^128 overflows and 2^-150 vanishes as they should.
        "m_exp_f32": f"""\
static inline vf32 m_exp_f32(vf32 x) {{
  const vf32 lo = splat_f32(-104.0f), hi = splat_f32(89.0f);
  x = hi < x ? hi : x; x = lo > x ? lo : x;
  vf32 n = v_round_f32(x * 0x1.715476p+0f);
  vf32 r = v_fma_f32(n, splat_f32(-0x1.62e430p-1f), x);
  r = v_fma_f32(n, splat_f32(0x1.05c610p-29f), r);
  vf32 p = {_polynomial("r", _EXP)};
  return v_scale(v_fma_f32(r * r, p, r) + 1.0f, n);
}}""",
        "m_tanh_f32": f"""\
static inline vf32 m_tanh_f32(vf32 x) {{
  vf32 t = v_abs_f32(x), s = x * x;
  vf32 far = 1.0f - 2.0f / (m_exp_f32(t + t) + 1.0f);
  vf32 near = v_fma_f32(t * s, {_polynomial("s", _TANH)}, t);
  return v_copysign_f32(t < 0.95f ? near : far, x);
}}""",
        "m_erf_f32": f"""\
static inline vf32 m_erf_f32(vf32 x) {{
  vf32 t = v_abs_f32(x), s = x * x;
  vf32 c = splat_f32(4.0f) < t ? splat_f32(4.0f) : t;
  vf32 far = 1.0f - m_exp_f32({_polynomial("c", _LOG_ERFC)});
  vf32 near = v_fma_f32({_polynomial("s", _ERF)}, t, t);
  return v_copysign_f32(t < 1.0f ? near : far, x);
}}""",
    }
