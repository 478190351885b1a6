"""The fixed text that kernels build on: types, loads and stores, conversions, and functions that
are no C++ operator.

A prelude is a table name -> C++ text for one instruction set. `prelude_for(text, isa)` returns the
entries that a text names, with what these name in turn, in table order: a library holds only what
it uses. No header is included and nothing is linked: functions of SLEEF and libm are pointers that
`plait_init` takes from the table of `plait/runtime/mathtable.py`.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from plait.ir.dtypes import DTYPES
from plait.ir.ops import OPS
from plait.kernel.cpu.simd import simd
from plait.runtime.mathtable import INDEX, SLEEF, scalar_name, vector_name
from plait.runtime.toolchain import Isa

_TYPES = """\
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned u32; typedef long i64; typedef unsigned long u64;
typedef float f32; typedef double f64;
"""

_FIRST = """\
template <class T> static inline T s_{0}(T a, T b) {{ // of equal ones (0. and -0.) the first
  return b {1} a || b != b ? b : a;
}}"""

_SCALAR: dict[str, str] = {
    "s_min": _FIRST.format("min", "<"),
    "s_max": _FIRST.format("max", ">"),
    "s_fmin": (
        "template <class T> static inline T s_fmin(T a, T b) { return a <= b || b != b ? a : b; }"
    ),
    "s_fmax": (
        "template <class T> static inline T s_fmax(T a, T b) { return a >= b || b != b ? a : b; }"
    ),
    "s_abs": """\
static inline f32 s_abs(f32 a) { return __builtin_fabsf(a); }
static inline f64 s_abs(f64 a) { return __builtin_fabs(a); }
template <class T> static inline T s_abs(T a) { return a < 0 ? -a : a; }""",
    "s_sign": "template <class T> static inline T s_sign(T a) { return (T)((a > 0) - (a < 0)); }",
    "s_isinf": """\
static inline bool s_isinf(f32 a) { return __builtin_fabsf(a) == __builtin_inff(); }
static inline bool s_isinf(f64 a) { return __builtin_fabs(a) == __builtin_inf(); }""",
    "s_signbit": """\
static inline bool s_signbit(f32 a) { return __builtin_signbitf(a) != 0; }
static inline bool s_signbit(f64 a) { return __builtin_signbit(a) != 0; }""",
    "s_copysign": """\
static inline f32 s_copysign(f32 a, f32 b) { return __builtin_copysignf(a, b); }
static inline f64 s_copysign(f64 a, f64 b) { return __builtin_copysign(a, b); }""",
    # Division truncates in hardware; -1 is set apart because the least integer overflows.
    "s_truncdiv": "template <class T> static inline T s_truncdiv(T a, T b) "
    "{ return b == 0 ? 0 : (T)-1 < 0 && b == (T)-1 ? (T)(0 - a) : (T)(a / b); }",
    "s_rem": "template <class T> static inline T s_rem(T a, T b) "
    "{ return b == 0 || ((T)-1 < 0 && b == (T)-1) ? 0 : (T)(a % b); }",
    "s_floordiv": "template <class T> static inline T s_floordiv(T a, T b) "
    "{ T q = s_truncdiv(a, b), r = s_rem(a, b); return r != 0 && (r < 0) != (b < 0) ? (T)(q - 1) "
    ": q; }",
    "s_mod": "template <class T> static inline T s_mod(T a, T b) "
    "{ T r = s_rem(a, b); return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r; }",
    "s_shl": "template <class T> static inline T s_shl(T a, T b) "
    "{ return b < 0 || b >= (T)(8 * sizeof(T)) ? 0 : (T)((u64)a << b); }",
    "s_shr": "template <class T> static inline T s_shr(T a, T b) "
    "{ return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)(a < 0 ? -1 : 0) : (T)(a >> b); }",
    "s_pymod": "template <class T> static inline T s_pymod(T m, T b) "
    "{ return m != 0 && (m < 0) != (b < 0) ? m + b : m; }",
    "div_floor": (
        "static inline i64 div_floor(i64 a, i64 b) { i64 q = a / b; return q - (a % b < 0); }"
    ),
    "mod_floor": (
        "static inline i64 mod_floor(i64 a, i64 b) { i64 r = a % b; return r < 0 ? r + b : r; }"
    ),
    "from_bf16": "static inline f32 from_bf16(u16 x) "
    "{ u32 b = (u32)x << 16; f32 r; __builtin_memcpy(&r, &b, 4); return r; }",
    "to_bf16": """\
static inline u16 to_bf16(f32 x) {
  u32 b; __builtin_memcpy(&b, &x, 4);
  return x != x ? 0x7fc0 : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}""",
    # What the processor gives for numbers out of range, the least integer. C++ leaves their value
    # open: g++ makes others of constants.
    "s_to_i32": "template <class T> static inline i32 s_to_i32(T x) "
    "{ return __builtin_constant_p(x) && !(x >= (T)-0x1p31 && x < (T)0x1p31) "
    "? -0x7fffffff - 1 : (i32)x; }",
    "s_to_i64": "template <class T> static inline i64 s_to_i64(T x) "
    "{ return __builtin_constant_p(x) && !(x >= (T)-0x1p63 && x < (T)0x1p63) "
    "? -0x7fffffffffffffffl - 1 : (i64)x; }",
    # A negative number wraps around, as in eager. C++ leaves its value open: some instruction sets
    # convert by way of i64, others have an instruction that gives 2**64 - 1.
    "s_to_u64": "template <class T> static inline u64 s_to_u64(T x) "
    "{ return x >= (T)0x1p63 ? (u64)s_to_i64(x - (T)0x1p63) ^ 1ul << 63 : (u64)s_to_i64(x); }",
    # Scaling by a power of two lets the f32 unit handle half's subnormals.
    "from_f16": """\
static inline f32 from_f16(u16 x) {
  u32 b = (u32)(x & 0x7fff) << 13, s = (u32)(x & 0x8000) << 16; f32 r;
  __builtin_memcpy(&r, &b, 4); r *= 0x1p112f; __builtin_memcpy(&b, &r, 4);
  b = (b >= 0x47800000u ? b | 0x7f800000u : b) | s; __builtin_memcpy(&r, &b, 4); return r;
}""",
    "to_f16": """\
static inline u16 to_f16(f32 x) {
  u32 b, r; __builtin_memcpy(&b, &x, 4);
  u32 s = b >> 16 & 0x8000; b &= 0x7fffffff;
  if (b >= 0x47800000u) return (u16)(s | (b > 0x7f800000u ? 0x7e00 : 0x7c00));
  if (b < 0x38800000u) {
    f32 m; __builtin_memcpy(&m, &b, 4); m += 0.5f; __builtin_memcpy(&r, &m, 4); return
  (u16)(s | (r - 0x3f000000u)); }
  return (u16)(s | ((b - 0x38000000u + 0xfff + (b >> 13 & 1)) >> 13));
}""",
    # Without it g++ takes the lanes out of the register one by one, which is slower than to read
    # them back.
    "in_memory": """\
template <class T> static inline void in_memory(T& array) { asm("" : "+m"(array)); }""",
    "philox": """\
static inline i64 philox(i64 seed, i64 counter, i64 word) {
  u32 k0 = (u32)seed, k1 = (u32)((u64)seed >> 32);
  u32 c0 = (u32)counter, c1 = (u32)((u64)counter >> 32);
  u32 c2 = (u32)(word >> 2), c3 = 0;
  for (int i = 0; i < 10; ++i) {
    u64 a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ k0; c1 = (u32)b; c2 = (u32)(a >> 32) ^ c3 ^ k1; c3 = (u32)a;
    k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
  }
  switch (word & 3) { case 0: return c0; case 1: return c1; case 2: return c2; default: return c3; }
}""",
    "atomic_update": """\
template <class T, class F> static inline void atomic_update(T* p, F f) {
  T old, now; __atomic_load(p, &old, __ATOMIC_RELAXED);
  do now = f(old);
  while (!__atomic_compare_exchange(p, &old, &now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}""",
}


def _builtins() -> dict[str, str]:
    out = {}
    rounding = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}
    for op, name in rounding.items():
        out[f"s_{op}"] = (
            f"static inline f32 s_{op}(f32 a) {{ return __builtin_{name}f(a); }}\n"
            f"static inline f64 s_{op}(f64 a) {{ return __builtin_{name}(a); }}"
        )
    out["s_fma"] = (
        "static inline f32 s_fma(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }\n"
        "static inline f64 s_fma(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }"
    )
    return out


def _math_pointers(isa: Isa) -> tuple[dict[str, str], dict[str, int]]:
    """Declarations of maths functions and their places in the table. Scalar ones are a lane of
    vector ones, so that a number has the same bits wherever it lies (but remainders, which are
    exact); without SLEEF vector ones are
    scalar ones, lane after lane."""
    text: dict[str, str] = {}
    places: dict[str, int] = {}
    for op in SLEEF:
        for d in ("f32", "f64"):
            arity = OPS[op].arity
            exact = op == "fmod"
            if isa.sleef and not exact:
                given = ", ".join(f"{d} {x}" for x in "abc"[:arity])
                lanes = ", ".join(f"splat_{d}({x})" for x in "abc"[:arity])
                text[f"s_{op}_{d}"] = (
                    f"static inline {d} s_{op}_{d}({given}) {{ return m_{op}_{d}({lanes})[0]; }}"
                )
            else:
                text[f"s_{op}_{d}"] = f"static {d} (*s_{op}_{d})({', '.join([d] * arity)});"
                places[f"s_{op}_{d}"] = INDEX[scalar_name(op, d)]
            if isa.sleef:
                text[f"m_{op}_{d}"] = f"static v{d} (*m_{op}_{d})({', '.join([f'v{d}'] * arity)});"
                places[f"m_{op}_{d}"] = INDEX[vector_name(op, d, isa.sleef)]
            else:
                n = isa.lanes_of(DTYPES[d].nbytes)
                params = ", ".join(f"v{d} {x}" for x in "abc"[:arity])
                lanes = ", ".join(f"{x}[k]" for x in "abc"[:arity])
                text[f"m_{op}_{d}"] = (
                    f"static v{d} m_{op}_{d}({params}) "
                    f"{{ v{d} r; for (int k = 0; k < {n}; ++k) r[k] = s_{op}_{d}({lanes}); return "
                    "r; }"
                )
    return text, places


@lru_cache(maxsize=8)
def _table(isa: Isa) -> tuple[dict[str, str], dict[str, int]]:
    """All definitions, and the places of those that plait_init fills in."""
    math, places = _math_pointers(isa)
    vectors = simd(isa)
    places = {name: k for name, k in places.items() if name not in vectors}
    lanes = {k: t for k, t in math.items() if "splat_" in t}
    table = {
        **{k: t for k, t in math.items() if k not in vectors and k not in lanes},
        **_builtins(),
        **_SCALAR,
        **vectors,
        **lanes,
    }
    return table, places


def prelude_for(text: str, isa: Isa, unit: int = 0, units: int = 1) -> str:
    """The part of the prelude that text needs, and plait_init; of several translation units the
    first one's calls that of all others."""
    _, places = _table(isa)
    used = _used(text, isa)
    init = "".join(f" *(void**)&{name} = table[{k}];" for name, k in places.items() if name in used)
    names = [f"plait_init{k or ''}" for k in range(units)]
    lines = [_defined(used, isa)]
    if unit == 0:
        lines += [f'extern "C" void {name}(void* const* table);' for name in names[1:]]
        init += "".join(f" {name}(table);" for name in names[1:])
    lines.append(f'extern "C" void {names[unit]}(void* const* table) {{{init} }}\n')
    return "\n".join(lines)


def definitions(text: str, isa: Isa) -> str:
    """The part of the prelude that text needs."""
    return _defined(_used(text, isa), isa)


def _defined(used: set[str], isa: Isa) -> str:
    needed = (body for name, body in _table(isa)[0].items() if name in used)
    return "\n".join((_TYPES, _vector_types(isa), *needed))


def _used(text: str, isa: Isa) -> set[str]:
    """The names of the prelude that text needs."""
    table, _ = _table(isa)
    todo = [*table.keys() & set(re.findall(r"\w+", text))]
    used: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in used:
            used.add(name)
            todo.extend(_mentioned(name, isa))
    return used


@cache
def _mentioned(name: str, isa: Isa) -> frozenset[str]:
    """The names of the prelude in a definition."""
    table, _ = _table(isa)
    return frozenset(table.keys() & set(re.findall(r"\w+", table[name])))


@lru_cache(maxsize=8)
def _vector_types(isa: Isa) -> str:
    """v<type>: one register's worth of lanes (all lanes for narrow types), h<type>: half of the
    lanes."""
    out = []
    for name in ("f32", "i32", "u32", "f64", "i64", "u64", "i16", "u16", "i8", "u8"):
        d = DTYPES[name]
        n = isa.lanes_of(d.nbytes) * d.nbytes
        out.append(f"typedef {name} v{name} __attribute__((vector_size({n})));")
        out.append(f"typedef v{name} v{name}u __attribute__((aligned({d.nbytes}), may_alias));")
        if d.nbytes == 4:
            out.append(f"typedef {name} h{name} __attribute__((vector_size({n // 2})));")
    return "\n".join(out)
