"""The op table: every scalar operation a loop body may hold, with its arity, dtype rule and
reference meaning.

One row an op. All interpreters (recorder, reference evaluator, value ranges, emitters) are tables
over these names, and a test proves that no table has a hole. Arguments of arithmetic have one
dtype: lowering rules insert `cast`s, the IR never promotes. Arithmetic on f16/bf16 is never
recorded: rules cast to f32, compute, and cast back (as eager does), which lets fusion drop the
rounding between two ops only where eager would not round either (it always rounds: a cast down then
up is kept).

Reference meanings work on numpy scalars of the argument dtype and are what tests trust.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.ir.dtypes import DType, b1

DTypeRule = Callable[..., DType]


def same(*args: DType) -> DType:
    """All arguments have one dtype and so has the result."""
    if any(a != args[0] for a in args):
        raise TypeError(f"arguments of dtypes {args} must agree")
    return args[0]


def boolean(*args: DType) -> DType:
    """Arguments agree, the result is b1."""
    same(*args)
    return b1


def selected(cond: DType, *args: DType) -> DType:
    """where(cond, a, b)."""
    if cond != b1:
        raise TypeError(f"a condition must be b1, not {cond}")
    return same(*args)


@dataclass(frozen=True, slots=True)
class OpDef:
    """arity: number of arguments. dtype: the rule. on: kinds of argument dtypes it is defined for
    ('f', 'i', 'u', 'b').
    cost: estimated CPU cycles an element (vectorised f32), used by the scheduler. meaning: in
    words."""

    arity: int
    dtype: DTypeRule
    on: str
    cost: float
    meaning: str


def _rows(
    names: str, arity: int, dtype: DTypeRule, on: str, cost: float, meaning: str
) -> dict[str, OpDef]:
    return {n: OpDef(arity, dtype, on, cost, meaning) for n in names.split()}


OPS: dict[str, OpDef] = {
    **_rows("add sub mul", 2, same, "fiu", 0.5, "a+b, a-b, a*b; integers wrap around"),
    **_rows("and or xor", 2, same, "iub", 0.5, "bitwise; logical on b1"),
    **_rows("not", 1, same, "iub", 0.5, "bitwise complement; logical on b1"),
    **_rows("neg abs", 1, same, "fi", 0.5, "-a, |a|; the least integer maps to itself"),
    **_rows("truediv", 2, same, "f", 2, "a/b, IEEE"),
    **_rows("floordiv", 2, same, "iu", 45, "floor(a/b), towards minus infinity; b == 0 gives 0"),
    **_rows("truncdiv", 2, same, "iu", 45, "a/b towards zero, as C; b == 0 gives 0"),
    **_rows("mod", 2, same, "iu", 45, "a - b*floor(a/b), sign of b; b == 0 gives 0"),
    **_rows("rem", 2, same, "iu", 45, "a - b*trunc(a/b), sign of a, as C; b == 0 gives 0"),
    **_rows("fmod", 2, same, "f", 20, "C fmod, sign of a"),
    **_rows(
        "pymod",
        2,
        same,
        "f",
        20,
        "remainder with the sign of b: m = fmod(a, b); m + b if m and (m < 0) != (b < 0)",
    ),
    **_rows(
        "shl shr",
        2,
        same,
        "iu",
        1,
        "shift; shr is arithmetic on signed; a shift by >= width or < 0 gives 0 (shr of a "
        "negative: -1)",
    ),
    **_rows("min max", 2, same, "fiub", 0.5, "NaN if either is NaN"),
    **_rows("fmin fmax", 2, same, "f", 1, "the other one if one is NaN"),
    **_rows(
        "max_first",
        2,
        same,
        "fiub",
        0.5,
        "b where it is greater than a or NaN, else a: the first of equal ones",
    ),
    **_rows(
        "eq ne lt le gt ge", 2, boolean, "fiub", 0.5, "comparison; NaN compares false except ne"
    ),
    **_rows("where", 3, selected, "fiub", 0.5, "cond ? a : b; both are evaluated"),
    **_rows("sqrt", 1, same, "f", 3, "IEEE square root"),
    **_rows("rsqrt", 1, same, "f", 4, "1/sqrt(a), correctly rounded steps"),
    **_rows("reciprocal", 1, same, "f", 2, "1/a"),
    **_rows(
        "floor ceil trunc round",
        1,
        same,
        "f",
        0.5,
        "to an integral float; round is to nearest even",
    ),
    **_rows(
        "sign",
        1,
        same,
        "fi",
        1,
        "-1, 0, 1; NaN gives 0 as in PyTorch's sign (nan -> nan is not kept)",
    ),
    **_rows("isnan isinf", 1, boolean, "f", 0.5, "tests"),
    **_rows("signbit", 1, boolean, "f", 0.5, "true for negative, -0.0 included"),
    **_rows("copysign", 2, same, "f", 1, "|a| with the sign of b"),
    **_rows("nextafter", 2, same, "f", 10, "next float after a towards b"),
    **_rows("hypot", 2, same, "f", 10, "sqrt(a*a+b*b) without overflow"),
    **_rows("exp exp2 log log2 log10", 1, same, "f", 6, "elementary functions, within 1 ulp"),
    **_rows("expm1 log1p", 1, same, "f", 30, "e^a - 1 and log(1 + a), within 1 ulp"),
    **_rows(
        "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh",
        1,
        same,
        "f",
        10,
        "elementary functions, within 1 ulp",
    ),
    **_rows("erf erfc", 1, same, "f", 10, "error function and its complement, within 1 / 1.5 ulp"),
    **_rows("lgamma", 1, same, "f", 25, "log|gamma(a)|"),
    **_rows("pow", 2, same, "f", 70, "C pow"),
    **_rows("atan2", 2, same, "f", 40, "C atan2"),
    **_rows("fma", 3, same, "f", 0.5, "a*b + c with one rounding"),
    # Random bits: args are (seed i64, index i64); the result is the float or word of Philox4x32-10
    # described in plait/graph/random.py.
    **_rows(
        "philox",
        3,
        lambda *a: a[0],
        "i",
        15,
        "word args[2] (i64 constant 0..3) of Philox4x32-10 with key args[0], counter args[1], as "
        "i64 in 0..2^32-1",
    ),
}

# Nodes with an attribute; they are rows of every table too, but have rules of their own.
SPECIAL: dict[str, str] = {
    "const": "attr: a Python bool, int or float; dtype: any loop dtype",
    "index": (
        "attr: a Size over loop variables, size symbols and Arg symbols; the value of that "
        "integer expression as i64"
    ),
    "cast": (
        "attr None or LOOSE; to the node's dtype, as C++ static_cast does and PyTorch's .to() does "
        "(float->int truncates; anything -> b1 is a != 0)"
    ),
    "bitcast": "same size, same bits",
    "load": "attr: Load; element of a buffer; see plait/ir/loops.py",
    "bounded": (
        "attr: Bound; args (v i64) or (v, mask b1): v, promised to be in [0, size); where it is "
        "not (and mask holds) the call fails with the bound's check and the value is 0"
    ),
    "nonzero": (
        "attr: Check; args (v integer) or (v, mask b1): v itself; where it is 0 (and mask holds) "
        "the call fails with that check"
    ),
    "acc": (
        "attr: name of a Reduce statement of the same kernel; its value at this outer point "
        "(made by the scheduler only)"
    ),
}

# Nodes that can make the call fail.
CHECKED = ("bounded", "nonzero")

ATOMICS: dict[str, tuple[str, ...]] = {
    "add": ("f16", "bf16", "f32", "f64", "i32", "i64", "u32", "u64"),
    "min": ("i32", "i64", "u32", "u64"),
    "max": ("i32", "i64", "u32", "u64"),
}
"""How points that collide may combine on a GPU: mode of a store -> dtypes that it has an atomic
for. Those of floats for min and max compare bits, which loses NaNs."""
