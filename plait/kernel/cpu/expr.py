"""Op tables of the C++ target: one expression an op, for scalars and for vectors of whole
registers.

A value of dtype d is one C++ expression, or two in vector code when d has 64 bits (each half of the
lanes has a register of its own). Bools are `bool` in scalar code and a vi32 of 0 / -1 in vector
code; f16 and bf16 are their bits in a u16 and are computed in f32. Functions named here are defined
in `prelude.py`, which is asked for by name. Rows are templates over {0}, {1}, {2} (arguments),
{t} (dtype name) or functions of (dtype, arguments).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from plait.ir.dtypes import DTYPES, DType, b1, f32, i32, u8
from plait.ir.loops import Const, Node
from plait.ir.ops import OPS
from plait.runtime.mathtable import SLEEF

Row = str | Callable[[DType, tuple[str, ...]], str]
Parts = tuple[str, ...]

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MATH = {op: f"s_{op}_{{t}}({', '.join(f'{{{k}}}' for k in range(OPS[op].arity))})" for op in SLEEF}
_VMATH = {op: text.replace("s_", "m_", 1) for op, text in _MATH.items()}


def _bool_or(scalar_bool: str, other: str) -> Row:
    return lambda d, a: (scalar_bool if d == b1 else other).format(*a, t=d.name)


SCALAR: dict[str, Row] = {
    **{
        op: f"({{0}} {sign} {{1}})"
        for op, sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/"}.items()
    },
    **{op: f"({{0}} {sign} {{1}})" for op, sign in {"and": "&", "or": "|", "xor": "^"}.items()},
    **{op: f"({{0}} {sign} {{1}})" for op, sign in _COMPARE.items()},
    **_MATH,
    **{op: f"s_{op}({{0}}, {{1}})" for op in ("floordiv", "truncdiv", "mod", "rem", "shl", "shr")},
    **{op: f"s_{op}({{0}}, {{1}})" for op in ("min", "max", "fmin", "fmax", "copysign")},
    "max_first": "s_max({0}, {1})",
    **{
        op: f"s_{op}({{0}})"
        for op in ("sqrt", "floor", "ceil", "trunc", "round", "sign", "isinf", "signbit")
    },
    "not": _bool_or("!{0}", "~{0}"),
    "neg": "-{0}",
    "abs": "s_abs({0})",
    "pymod": "s_pymod(s_fmod_{t}({0}, {1}), {1})",
    "where": "({0} ? {1} : {2})",
    "rsqrt": "(1.0f / s_sqrt({0}))",
    "reciprocal": "(1.0f / {0})",
    "isnan": "({0} != {0})",
    "fma": "s_fma({0}, {1}, {2})",
    "philox": "philox({0}, {1}, {2})",
}

# Rows of vector code work on one register of 32- or 64-bit lanes at a time; compares, where, casts
# and narrow types are below.
VECTOR: dict[str, Row] = {
    **SCALAR,
    **_VMATH,
    **{
        op: f"v_{op}_{{t}}({{0}}, {{1}})"
        for op in ("floordiv", "truncdiv", "mod", "rem", "shl", "shr")
    },
    **{op: f"v_{op}_{{t}}({{0}}, {{1}})" for op in ("min", "max", "fmin", "fmax", "copysign")},
    **{
        op: f"v_{op}_{{t}}({{0}})"
        for op in ("sqrt", "floor", "ceil", "trunc", "round", "sign", "abs")
    },
    "min": _bool_or("({0} & {1})", "v_min_{t}({0}, {1})"),
    "max": _bool_or("({0} | {1})", "v_max_{t}({0}, {1})"),
    "max_first": _bool_or("({0} | {1})", "v_max_{t}({1}, {0})"),
    "not": "~{0}",
    **{op: f"v_{op}_{{t}}({{0}})" for op in ("sinh", "cosh", "log1p")},
    "fmod": "v_fmod_{t}({0}, {1})",
    "pymod": "v_pymod_{t}(v_fmod_{t}({0}, {1}), {1})",
    "rsqrt": "(1.0f / v_sqrt_{t}({0}))",
    "fma": "v_fma_{t}({0}, {1}, {2})",
    "philox": "v_philox({0}, {1}, {2})",
    "isinf": "(v_abs_{t}({0}) == __builtin_inf{inf}())",
    "signbit": "((v{i}){0} < 0)",
}

_BOOLEAN = frozenset((*_COMPARE, "isnan", "isinf", "signbit"))


def ctype(d: DType) -> str:
    """The C++ type of a scalar value."""
    return "bool" if d == b1 else memory(d)


def memory(d: DType) -> str:
    """The C++ type of an element in memory."""
    return {"b1": "u8", "f16": "u16", "bf16": "u16"}.get(d.name, d.name)


def stored(d: DType) -> DType:
    """The dtype whose lanes have the width of d's elements in memory."""
    return u8 if d == b1 else d


def vtype(d: DType) -> str:
    """The C++ type of one register of a vector value."""
    return "vi32" if d == b1 else f"v{memory(d)}"


def n_parts(d: DType) -> int:
    """Registers of a vector value."""
    return 2 if d.nbytes == 8 else 1


def _render(row: Row, d: DType, args: tuple[str, ...]) -> str:
    if callable(row):
        return row(d, args)
    inf, i = ("f", "i32") if d.nbytes == 4 else ("", "i64")
    return row.format(*args, t=d.name, inf=inf, i=i)


# ----------------------------------------------------------------------------------------- literals
def literal(value: Const, d: DType) -> str:
    """A constant as a C++ expression of the scalar type."""
    if d == b1:
        return "true" if value else "false"
    if d.is_int:
        return _int_literal(int(value), d)
    x = float(value)
    if d.name in ("f16", "bf16"):
        return f"(u16){half_bits(x, d)}"
    suffix = "f" if d == f32 else ""
    if d == f32 and math.isfinite(x):
        x = to_f32(x)
    if math.isnan(x):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(x):
        return f"{'-' if x < 0 else ''}__builtin_inf{suffix}()"
    return f"{x.hex()}{suffix}" if x >= 0 and not str(x).startswith("-") else f"({x.hex()}{suffix})"


def _int_literal(value: int, d: DType) -> str:
    bits = 8 * d.nbytes
    value &= (1 << bits) - 1
    if d.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    if d.nbytes >= 4 and value == -(1 << (bits - 1)):  # C++ negates the number without its sign
        return f"({value + 1}{'l' if d.nbytes == 8 else ''} - 1)"
    if d.nbytes < 4:
        return f"({d.name}){value}" if value >= 0 else f"({d.name})({value})"
    text = f"{value}{'u' if d.kind == 'u' else ''}{'l' if d.nbytes == 8 else ''}"
    return f"({text})" if value < 0 else text


def to_f32(x: float) -> float:
    """x rounded to float32 (infinite where it overflows)."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def half_bits(x: float, d: DType) -> int:
    """The 16 bits of x rounded to nearest even."""
    if d.name == "f16":
        if math.isnan(x):
            return 0x7E00
        try:
            return int(struct.unpack("<H", struct.pack("<e", x))[0])
        except OverflowError:
            return 0x7C00 if x > 0 else 0xFC00
    (bits,) = struct.unpack("<I", struct.pack("<f", to_f32(x)))
    if math.isnan(x):
        return 0x7FC0
    return int((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


# -------------------------------------------------------------------------------------- scalar code
def scalar_op(op: str, d: DType, args: tuple[str, ...], out: DType) -> str:
    """One op of the table on scalars. d: dtype of the (last) argument; out: of the result."""
    if d.name in ("f16", "bf16") and op != "where":
        wide = tuple(scalar_cast(a, d, f32) for a in args)
        text = scalar_op(op, f32, wide, f32)
        return text if out == b1 else scalar_cast(text, f32, out)
    return _render(SCALAR[op], d, args)


def scalar_cast(x: str, src: DType, dst: DType) -> str:
    """x converted as PyTorch's .to() does."""
    if src == dst:
        return x
    if src.name in ("f16", "bf16"):
        return scalar_cast(f"from_{src.name}({x})", f32, dst)
    if dst.name in ("f16", "bf16"):
        return f"to_{dst.name}({scalar_cast(x, src, f32)})"
    if dst == b1:
        return f"({x} != 0)"
    if src.is_float and dst.is_int:
        if dst.nbytes < 4:
            return f"({dst.name})s_to_i32({x})"
        return f"(u32)s_to_i64({x})" if dst.name == "u32" else f"s_to_{dst.name}({x})"
    return f"({dst.name}){x}"


# -------------------------------------------------------------------------------------- vector code
def vector_op(op: str, d: DType, args: tuple[Parts, ...], out: DType) -> Parts:
    """One op of the table on vectors. d: dtype of the last argument."""
    if op == "where":
        return tuple(
            f"({mask_part(args[0][0], d, k)} ? {args[1][k]} : {args[2][k]})"
            for k in range(n_parts(d))
        )
    if d.name in ("f16", "bf16"):
        wide = tuple(vector_cast(a, d, f32) for a in args)
        text = vector_op(op, f32, wide, f32 if out == d else out)
        return text if out == b1 else vector_cast(text, f32, out)
    if d == b1 and op in _COMPARE:
        return (_bool_compare(op, args[0][0], args[1][0]),)
    parts = tuple(_render(VECTOR[op], d, tuple(a[k] for a in args)) for k in range(n_parts(d)))
    if op in _BOOLEAN:
        return (mask_from(parts, d),)
    return parts


def vector_node(n: Node, args: tuple[Parts, ...]) -> Parts:
    """A node of the table on vectors. Fewer instructions do for some constants: bounds that are no
    NaN, and divisors whose reciprocal, corrected once, gives what division does; of quotients below
    2^-100 the last bit may differ."""
    d = n.args[-1].dtype
    if n.op in ("min", "max") and d.name in ("f32", "f64"):
        for k, other in ((0, 1), (1, 0)):
            c = n.args[other]
            if c.op == "const" and c.attr == c.attr:
                name = {"min": "least", "max": "most"}[n.op]
                pairs = zip(args[k], args[other], strict=True)
                return tuple(f"{name}_{d.name}({y}, {x})" for x, y in pairs)
    if n.op == "truediv" and d == f32 and n.args[1].op == "const":
        by = to_f32(float(n.args[1].attr))  # type: ignore[arg-type]
        mantissa = math.frexp(by)[0]
        if 1 <= abs(by) < 2.0**60 and abs(mantissa) < 1 - 2.0**-24:
            inverse = literal(1 / by, f32)
            if abs(mantissa) == 0.5:
                return (f"({args[0][0]} * splat_f32({inverse}))",)
            return (f"v_divided_f32({args[0][0]}, {args[1][0]}, splat_f32({inverse}))",)
    return vector_op(n.op, d, args, n.dtype)


def _bool_compare(op: str, a: str, b: str) -> str:
    return {
        "eq": f"~({a} ^ {b})", "ne": f"({a} ^ {b})", "lt": f"(~{a} & {b})", "gt": f"({a} & ~{b})",
        "le": f"(~{a} | {b})", "ge": f"({a} | ~{b})",
    }[op]  # fmt: skip


def mask_from(parts: Parts, d: DType) -> str:
    """The vi32 mask of comparisons of d's registers."""
    if d.nbytes == 4:
        return f"(vi32){parts[0]}"
    if d.nbytes == 8:
        return f"join_i64((vi64){parts[0]}, (vi64){parts[1]})"
    lanes = f"i{8 * d.nbytes}"
    return convert(f"(v{lanes}){parts[0]}", lanes, "i32")


def mask_part(mask: str, d: DType, part: int) -> str:
    """A vi32 mask as lanes of d's width, for one of d's registers."""
    if d == b1 or d.nbytes == 4:
        return mask
    if d.nbytes == 8:
        return convert(f"{'hi' if part else 'lo'}_i32({mask})", "hi32", "i64")
    return convert(mask, "i32", f"i{8 * d.nbytes}")


def splat(x: str, d: DType) -> Parts:
    """A scalar value in every lane."""
    if d == b1:
        return (f"splat_i32(-(i32){x})",)
    return (f"splat_{memory(d)}({x})",) * n_parts(d)


def vector_cast(x: Parts, src: DType, dst: DType) -> Parts:
    """x converted as PyTorch's .to() does."""
    if src == dst:
        return x
    if src.name in ("f16", "bf16"):
        return vector_cast((f"v_from_{src.name}({x[0]})",), f32, dst)
    if dst.name in ("f16", "bf16"):
        return (f"v_to_{dst.name}({vector_cast(x, src, f32)[0]})",)
    if dst == b1:
        return (mask_from(tuple(f"({p} != 0)" for p in x), src),)
    if src == b1:
        return vector_cast((f"({x[0]} & 1)",), i32, dst)
    if src.is_float and dst.name == "u32":  # wraps: see s_to_u64
        return vector_cast(vector_cast(x, src, DTYPES["i64"]), DTYPES["i64"], dst)
    if src == f32 and dst.name == "u64":
        return vector_cast(vector_cast(x, src, DTYPES["f64"]), DTYPES["f64"], dst)
    t, u = memory(src), memory(dst)
    if src.nbytes == 8 and dst.nbytes == 8:
        return tuple(convert(p, t, u) for p in x)
    if src.nbytes == 8:
        mid = dst if dst.nbytes == 4 else DTYPES["i32"]
        joined = f"cat_{mid.name}({', '.join(convert(p, t, f'h{mid.name}') for p in x)})"
        return vector_cast((joined,), mid, dst)
    if dst.nbytes == 8:
        if src.nbytes < 4:
            mid = DTYPES["u32" if src.kind == "u" else "i32"]
            return vector_cast(vector_cast(x, src, mid), mid, dst)
        return tuple(convert(f"{h}_{t}({x[0]})", f"h{t}", u) for h in ("lo", "hi"))
    if (src.is_float and dst.nbytes < 4) or (dst.is_float and src.nbytes < 4):
        return vector_cast(vector_cast(x, src, i32), i32, dst)
    return (convert(x[0], t, u),)


def convert(x: str, src: str, dst: str) -> str:
    """One register converted lane by lane (prelude functions cvt_*). src, dst: type names, h<type>
    for half of the lanes."""
    return f"cvt_{src}_{dst}({x})"


def vector_bitcast(x: Parts, dst: DType) -> Parts:
    """The same bits as another dtype of the same size."""
    return tuple(f"({vtype(dst)}){p}" for p in x)
