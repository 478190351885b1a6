"""Op table of the Triton target: one expression an op, and the helper functions that expressions
may call.

Rows are templates over {0}, {1}, {2} (arguments) and {t} (Triton's name of the first argument's
dtype), or functions of (dtype, arguments). A name that begins with `p_` is a helper of `PRELUDE`,
written into a module only where it is used. Elementary functions are libdevice's, which eager's
kernels use too; `/` and sqrt round as IEEE asks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from plait.ir.dtypes import DType, b1, bf16, f32, i32
from plait.ir.loops import Const
from plait.ir.ops import OPS
from plait.ir.reductions import REDUCTIONS

Row = str | Callable[[DType, tuple[str, ...]], str]

TYPES: dict[str, str] = {
    "b1": "tl.int1", "u8": "tl.uint8", "u16": "tl.uint16", "u32": "tl.uint32", "u64": "tl.uint64",
    "i8": "tl.int8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64",
    "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "f64": "tl.float64",
}  # fmt: skip
"""DType -> Triton's type."""

POINTERS: dict[str, str] = {
    "b1": "*i1", "f16": "*fp16", "bf16": "*bf16", "f32": "*fp32", "f64": "*fp64",
    **{t: f"*{t}" for t in ("u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64")},
}  # fmt: skip
"""DType -> a pointer argument in a kernel's signature."""


def _by_kind(floats: str, ints: str, bools: str = "") -> Row:
    """A row that depends on the kind of its argument."""

    def row(d: DType, args: tuple[str, ...]) -> str:
        text = floats if d.is_float else bools if d == b1 and bools else ints
        return text.format(*args, t=TYPES[d.name])

    return row


def _f32_or(single: str, other: str) -> Row:
    return lambda d, args: (single if d == f32 else other).format(*args)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
_LIBDEVICE = {
    **{name: name for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
        "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma",
        "pow", "atan2", "fmod", "copysign", "nextafter", "hypot", "trunc", "rsqrt",
    )},
    "round": "nearbyint",
}  # fmt: skip

TABLE: dict[str, Row] = {
    **{op: f"({{0}} {sign} {{1}})" for op, sign in _INFIX.items()},
    **{
        op: f"libdevice.{name}({', '.join(f'{{{k}}}' for k in range(OPS[op].arity))})"
        for op, name in _LIBDEVICE.items()
    },
    **{op: f"p_{op}({{0}}, {{1}})" for op in ("floordiv", "truncdiv", "mod", "rem", "shl", "shr")},
    "not": _by_kind("", "(~{0})", "({0} == 0)"),
    "neg": _by_kind("({0} * -1.0)", "(-{0})"),  # Triton's minus is 0 - x, which has no -0.0
    "abs": "tl.abs({0})",
    "truediv": _f32_or("tl.div_rn({0}, {1})", "({0} / {1})"),
    "reciprocal": _f32_or("tl.div_rn(1.0, {0})", "(1.0 / {0})"),
    "sqrt": _f32_or("tl.sqrt_rn({0})", "libdevice.sqrt({0})"),
    "pymod": "p_pymod({0}, {1})",
    "min": _by_kind("p_min_nan({0}, {1})", "tl.minimum({0}, {1})", "({0} & {1})"),
    "max": _by_kind("p_max_nan({0}, {1})", "tl.maximum({0}, {1})", "({0} | {1})"),
    "max_first": _by_kind("p_max_last({1}, {0})", "tl.maximum({0}, {1})", "({0} | {1})"),
    "fmin": "p_fmin({0}, {1})",
    "fmax": "p_fmax({0}, {1})",
    "where": "tl.where({0}, {1}, {2})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "sign": "p_sign({0})",
    "isnan": "({0} != {0})",
    "isinf": "(tl.abs({0}) == float('inf'))",
    "signbit": _f32_or(
        "({0}.to(tl.int32, bitcast=True) < 0)", "({0}.to(tl.int64, bitcast=True) < 0)"
    ),
    "fma": "tl.fma({0}, {1}, {2})",
    "philox": "p_philox({0}, {1}, {2})",
}
NEAR = {
    "tanh": "p_near_tanh({0})", "exp": "p_ex2({0} * 1.4426950408889634)",
    "truediv": "({0} / {1})", "reciprocal": "(1.0 / {0})", "logistic": "({0} * p_rcp({1}))",
}  # fmt: skip
"""Faster approximations, for values that are rounded to 16 bits anyway. logistic: a quotient by
1 + exp(x)."""
SPECIAL_ROWS: dict[str, str] = {
    "const": "literal", "cast": "cast", "bitcast": "bitcast",
    **dict.fromkeys(("index", "load", "bounded", "nonzero", "acc"), "values.Values"),
}  # fmt: skip
"""Ops with an attribute -> what writes them."""


_OVERFLOWS = frozenset(
    {"add", "sub", "mul", "neg", "abs", "floordiv", "truncdiv", "mod", "rem", "shl"}
)
"""Ops of integers that can leave the range of 16 bits."""


def render(op: str, d: DType, args: tuple[str, ...]) -> str:
    """The expression of an op whose first argument has dtype d (for `where`: the second)."""
    row = TABLE[op]
    if op in _OVERFLOWS and d.is_int and d.nbytes == 2:
        wide = render(op, i32, tuple(f"{a}.to(tl.int32)" for a in args))
        return f"p_low_half({wide}).to({TYPES[d.name]})"
    return row(d, args) if callable(row) else row.format(*args, t=TYPES[d.name])


def literal(value: Const, d: DType) -> str:
    """A scalar of exactly that dtype. Triton makes 0 of small bfloat16 constants: a cast rounds
    those."""
    if d.is_float:
        x = float(value)
        text = repr(x) if math.isfinite(x) else f"float('{x}')"
        if d == bf16:
            return f"tl.full([], {text}, tl.float32).to(tl.bfloat16)"
    else:
        bits = 8 * d.nbytes
        number = int(value) & ((1 << bits) - 1) if d != b1 else int(bool(value))
        if d.kind == "i" and number >> (bits - 1):
            number -= 1 << bits
        text = str(number)
    return f"tl.full([], {text}, {TYPES[d.name]})"


def cast(text: str, old: DType, new: DType) -> str:
    """A value in another dtype."""
    if new == b1:
        return f"({text} != 0)"
    if old.is_int and new.name in ("f16", "bf16"):  # eager rounds twice, too
        text = f"{text}.to(tl.float32)"
    if new.is_int and new.nbytes == 2 and not old.is_float:
        text = f"p_low_half({text})"
    return f"{text}.to({TYPES[new.name]})"


def bitcast(text: str, new: DType) -> str:
    """The same bits as another dtype."""
    return f"{text}.to({TYPES[new.name]}, bitcast=True)"


def combiner(kind: str, d: DType, running: bool = False) -> str:
    """The helper that combines two values of a reduction, in any order; of a running one in theirs,
    so that of -0.0 and 0.0 the later is the extreme, as in eager."""
    op = {"or": "max", "and": "min"}.get(REDUCTIONS[kind].op, REDUCTIONS[kind].op)
    if d.is_float and op in ("max", "min"):
        return f"p_{op}_last" if running else f"p_{op}_nan"
    return f"p_{op}"


# ------------------------------------------------------------------------------------------ helpers
_OF_THE_DIALECT = ""
_TWO = "def {name}(a, b):\n    return {body}\n"


def _binary(name: str, body: str) -> tuple[str, str]:
    return name, _TWO.format(name=name, body=body)


_PAIRS = (("add", "tl.sum({})", "-0.0"), ("mul", "tl.reduce({}, p_mul)", "1.0"))
"""Ops whose order matters: how pairs are combined, and with what a number stays what it is."""

_FUNCTIONS: dict[str, str] = dict((
    _binary("p_add", "a + b"),
    _binary("p_any_of", "a"),
    _binary("p_mul", "a * b"),
    _binary("p_xor", "a ^ b"),
    _binary("p_max", "tl.maximum(a, b)"),
    _binary("p_min", "tl.minimum(a, b)"),
    _binary("p_max_nan", "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
    _binary("p_min_nan", "tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)"),
    _binary("p_max_last", "tl.where((a > b) | (a != a), a, b)"),
    _binary("p_min_last", "tl.where((a < b) | (a != a), a, b)"),
    _binary("p_fmax", "tl.where((a > b) | (b != b), a, b)"),
    _binary("p_fmin", "tl.where((a < b) | (b != b), a, b)"),
    # Each element of a row so many times.
    ("p_spread", """def p_spread(x, each: tl.constexpr):
    y = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], each])
    return tl.reshape(y, [x.shape[0], x.shape[1] * each])
"""),
    # Rows, combined by neighbours, by pairs of these, and so on: the same bits however a block is
    # laid out, and whatever identities stand behind a row. Of one row a number, which has no layout
    # that what is computed of it could take.
    *((f"p_tree_{op}", f"""def p_tree_{op}(x):
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(20):
        if x.shape[1] > 2:
            x = {reduced.format("tl.reshape(x, (rows, x.shape[1] // 2, 2)), 2")}
    if rows == 1:
        y = {reduced.format("x, None")}
    else:
        y = {reduced.format("x, 1")}[:, None]
    return y
""") for op, reduced, _ in _PAIRS),
    # What such a tree gives from the first point of a row up to each: where a pair is combined,
    # what is on the left of it goes to all points on the right.
    *((f"p_running_tree_{op}", f"""def p_running_tree_{op}(x):
    rows: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    second = tl.arange(0, 2)[None, None, :] == 1
    found = x
    for k in tl.static_range(20):
        if (2 << k) <= n:
            pairs = tl.reshape(x, (rows, n >> (k + 1), 2))
            first = {reduced.format(f"tl.where(second, {none}, pairs), 2")}[:, :, None]
            before = tl.where(second, first, {none})[:, :, :, None]
            found = tl.reshape(found, (rows, n >> (k + 1), 2, 1 << k))
            found = tl.reshape(p_{op}(before, found), (rows, n))
            x = {reduced.format("pairs, 2")}
    return found
""") for op, reduced, none in _PAIRS),
    # The element along an axis where a mask is set, to its last bit.
    ("p_at", """def p_at(a, mask, axis: tl.constexpr):
    bits = a.to(tl.int64 if a.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True)
    return tl.reduce(tl.where(mask, bits, 0), axis, p_xor).to(a.dtype, bitcast=True)
"""),
    ("p_divisor", """def p_divisor(b):
    return tl.where(b == 0, b + 1, b)
"""),
    _binary("p_truncdiv", "tl.where(b == 0, b, a // p_divisor(b))"),
    _binary("p_rem", "tl.where(b == 0, b, a % p_divisor(b))"),
    ("p_floordiv", """def p_floordiv(a, b):
    d = p_divisor(b)
    q = a // d
    r = a % d
    return tl.where(b == 0, b, tl.where((r != 0) & ((r < 0) != (d < 0)), q - 1, q))
"""),
    ("p_mod", """def p_mod(a, b):
    d = p_divisor(b)
    r = a % d
    return tl.where(b == 0, b, tl.where((r != 0) & ((r < 0) != (d < 0)), r + d, r))
"""),
    ("p_index_div", """def p_index_div(a, b):
    q = a // b
    return tl.where((a % b != 0) & (a < 0), q - 1, q)
"""),
    ("p_index_mod", """def p_index_mod(a, b):
    r = a % b
    return tl.where(r < 0, r + b, r)
"""),
    ("p_shl", """def p_shl(a, b):
    wide = a.dtype.primitive_bitwidth
    ok = (b >= 0) & (b < wide)
    return tl.where(ok, a << tl.where(ok, b, b - b), a - a)
"""),
    ("p_shr", """def p_shr(a, b):
    wide = a.dtype.primitive_bitwidth
    ok = (b >= 0) & (b < wide)
    return tl.where(ok, a >> tl.where(ok, b, b - b), (a - a) - (a < 0).to(a.dtype))
"""),
    ("p_pymod", """def p_pymod(a, b):
    m = libdevice.fmod(a, b)
    return tl.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)
"""),
    ("p_sign", """def p_sign(a):
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)
"""),
    ("p_one_more_than_tanh", """def p_one_more_than_tanh(x):
    return 2.0 / (1.0 + tl.exp(x * -2.0))
"""),
    # 1 / d, d >= 1: an approximation and a step of Newton's, which is the nearest float32 up to
    # 2**126, and then that or the next (tests/test_gpu_numerics.py looks at all).
    ("p_inverse", """def p_inverse(d):
    scale = tl.where(d > 2.0**64, 2.0**-64, 1.0)
    e = d * scale
    r = p_rcp(e)
    r = tl.fma(tl.fma(-e, r, 1.0), r, r) * scale
    return tl.where(d == float('inf'), 0.0, r)
"""),
    # The rest of a kernel is worth more than the last bits of these, which 16 bits do not show.
    ("p_ex2", _OF_THE_DIALECT),
    ("p_rcp", _OF_THE_DIALECT),
    ("p_near_one_more_than_tanh", """def p_near_one_more_than_tanh(x):
    return 2.0 * p_rcp(1.0 + p_ex2(x * -2.8853900817779268))
"""),
    ("p_near_tanh", """def p_near_tanh(x):
    u = tl.abs(x)
    s = u * u
    small = tl.fma(tl.fma(tl.fma(s, -0.053968254, 0.13333334), s, -0.33333334) * s, u, u)
    large = tl.fma(p_rcp(p_ex2(u * 2.8853900817779268) + 1.0), -2.0, 1.0)
    return libdevice.copysign(tl.where(u < 0.25, small, large), x)
"""),
    # erfc(u) = t p(t) exp(-u^2), t = 1 / (1 + 0.37 u); p has relative errors up to 7e-7.
    ("p_near_one_more_than_erf", """def p_near_one_more_than_erf(x):
    u = tl.abs(x)
    t = p_rcp(tl.fma(u, 0.37, 1.0))
    p = tl.fma(tl.fma(tl.fma(t, -0.142939394, 0.437070528), t, -0.188490929), t, 0.318944653)
    p = tl.fma(tl.fma(tl.fma(p, t, 0.152036834), t, 0.215009388), t, 0.208369592)
    tail = p * t * p_ex2(u * u * -1.4426950408889634)
    return tl.where(x < 0, tail, 2.0 - tail)
"""),
    ("p_low_half", _OF_THE_DIALECT),  # of integers: arithmetic of 16 bits is done in 32
    ("p_as_bf16", _OF_THE_DIALECT),
    ("p_tf32", _OF_THE_DIALECT),
    ("p_sign_bit", """def p_sign_bit(x):
    return ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
"""),
    ("p_nan_like", """def p_nan_like(x):
    return (((x.to(tl.uint32) & 0x80) << 24) | 0x7FC00000).to(tl.float32, bitcast=True)
"""),
    *((f"p_{way}_{kind}", _OF_THE_DIALECT) for way in ("one", "four", "number_of") for kind in (
        "e4m3", "e5m2"
    )),
    *((name, _OF_THE_DIALECT) for name in ("p_nearest", "p_four_i8", "p_four_u8")),
    ("p_to_e4m3", """def p_to_e4m3(x):
    return p_one_e4m3(x) | p_sign_bit(x)
"""),
    ("p_to_e5m2", """def p_to_e5m2(x):
    return tl.where(tl.abs(x) >= 61440.0, 0x7C, p_one_e5m2(x)).to(tl.uint8) | p_sign_bit(x)
"""),
    ("p_of_e4m3", """def p_of_e4m3(x):
    return tl.where((x & 0x7F) == 0x7F, p_nan_like(x), p_number_of_e4m3(x))
"""),
    ("p_of_e5m2", """def p_of_e5m2(x):
    return tl.where((x & 0x7F) > 0x7C, p_nan_like(x), p_number_of_e5m2(x))
"""),
    # A step between codes, brought between 2**-85 and 2**32; of an infinite one the scale is 0, so
    # that of quotients none but those of infinities and NaN are not 0.
    ("p_step_scale", """def p_step_scale(d):
    size = tl.abs(d)
    small = tl.where(size > 2.0**32, tl.where(size == float('inf'), 0.0, 2.0**-96), 1.0)
    return tl.where(size < 2.0**-32, 2.0**64, small)
"""),
    ("p_scaled_step", """def p_scaled_step(d, scale):
    return tl.where(scale == 0.0, tl.where(d < 0.0, -1.0, 1.0), d * scale)
"""),
    # Nearly its reciprocal, and what that lacks, which is of the same sign.
    ("p_less_than_inverse", """def p_less_than_inverse(d):
    return p_rcp(d) * (1.0 - 2.0**-22)
"""),
    ("p_rest", """def p_rest(d, r):
    off = tl.fma(-d, r, 1.0)
    rest = tl.fma(off, off, off) * r
    return tl.where(rest == rest, rest, 0.0)
"""),
    # By a reciprocal and its rest. What is clamped has no code but the last.
    ("p_short_quotient", """def p_short_quotient(x, r, rest):
    x = p_min_nan(p_max_nan(x, -(2.0**60)), 2.0**60)
    return tl.fma(x, r, x * rest)
"""),
    # A quotient as it is rounded, but where it is too small or large for a code of 8 bits: by the
    # reciprocal r of the divisor, corrected twice. Markstein, Computation of elementary functions
    # on the IBM RISC System/6000 processor, 1990.
    ("p_quotient", """def p_quotient(x, d, r):
    near = x * r
    q = tl.fma(tl.fma(-d, near, x), r, near)
    q = tl.fma(tl.fma(-d, q, x), r, q)
    return tl.where((tl.abs(near) > 2.0**-30) & (tl.abs(near) < 2.0**30), q, near)
"""),
    ("p_to_e4m3_or_nan", """def p_to_e4m3_or_nan(x):
    return tl.where(tl.abs(x) > 464.0, 0x7F, p_to_e4m3(x)).to(tl.uint8) | p_sign_bit(x)
"""),
    ("p_exp_below", """def p_exp_below(x, peak):
    return tl.exp(x - tl.where(peak == float('-inf'), 0.0, peak))
"""),
    ("p_exp_sum", """def p_exp_sum(total, old, x, peak):
    more = tl.sum(tl.sum(p_exp_below(x, peak[:, None, :, None]), 3), 1)
    return total * p_exp_below(old, peak) + more
"""),
    *((f"p_{name}", f"""def p_{name}(a, i, b, j):
    better = (a {sign} b) | ((a != a) & (b == b))
    same = (a == b) | ((a != a) & (b != b))
    take = better | (same & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)
""") for name, sign in (("argmax", ">"), ("argmin", "<"))),
    # Of two of which the second comes after the first.
    *((f"p_{name}_later", f"""def p_{name}_later(a, i, b, j):
    take = (a == a) & ~(a {sign}= b)
    return tl.where(take, b, a), tl.where(take, j, i)
""") for name, sign in (("argmax", ">"), ("argmin", "<"))),
    ("p_philox", """def p_philox(seed, counter, word):
    c2 = (word >> 2).to(tl.uint32)
    low = counter.to(tl.uint32) + tl.zeros_like(c2)
    high = (counter >> 32).to(tl.uint32) + tl.zeros_like(c2)
    a, b, c, d = tl.philox(seed, low, high, c2 + tl.zeros_like(low), tl.zeros_like(low))
    k = word & 3
    return tl.where(k == 0, a, tl.where(k == 1, b, tl.where(k == 2, c, d))).to(tl.int64)
"""),
))  # fmt: skip

_HELPER = re.compile(r"\bp_[a-z_0-9]+\b")


def prelude_for(body: str, instructions: Mapping[str, str]) -> str:
    """The helpers that a text calls, and those that these call, in the order of the table.
    instructions: those that the dialect has."""
    functions = {**_FUNCTIONS, **instructions}
    wanted: set[str] = set()
    todo = [body]
    while todo:
        for name in _HELPER.findall(todo.pop()):
            if name in functions and name not in wanted:
                wanted.add(name)
                todo.append(functions[name])
    return "\n\n".join(f"@triton.jit\n{text}" for name, text in functions.items() if name in wanted)
