"""Decides which values are computed in another form than their ops': approximations where a result
is rounded to 16 bits, quotients by a reciprocal that is computed once a row, floats of 8 bits by
instructions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from plait.ir.dtypes import bf16, f8e4m3fn, f8e5m2, f16, f32, i8, i32, u8
from plait.ir.float8 import FORMATS, decodes, encodes
from plait.ir.loops import Node, walk
from plait.kernel.triton.layout import Layout
from plait.kernel.triton.ops import NEAR, cast, render
from plait.kernel.triton.passes import peak_of, rescales
from plait.schedule.legalize.find_narrow import find_narrow, find_rounded
from plait.schedule.plan import Reduce


@dataclass(frozen=True)
class Form:
    """How a value is computed.

    text: over {0}, {1}, ...: the operands, and then what is hoisted.
    operands: the values that must exist before it.
    hoisted: texts over {0}, the last operand, and {1}, what the first of them gives: values that
        are computed once for all that share the last operand.
    """

    text: str
    operands: tuple[Node, ...]
    hoisted: tuple[str, ...] = ()


RECIPROCAL = ("tl.where(tl.abs({0}) < 2.0**-64, 2.0**64, 1.0)", "tl.div_rn(1.0, {0} * {1})")
"""The reciprocal of a divisor, and a scale before it that keeps that of a small one finite."""
HALVES = ("tl.div_rn(1.0, {0})", "tl.fma(-{0}, {1}, 1.0) * {1}")
"""The reciprocal of a divisor from 1 to the length of a row, and what it lacks."""


CODECS = (
    ("e4m3", FORMATS[f8e4m3fn].saturating),
    ("e4m3_or_nan", FORMATS[f8e4m3fn]),
    ("e5m2", FORMATS[f8e5m2]),
)
"""Floats of 8 bits by the names of their instructions. Numbers of the first two are alike."""


STEP = ("p_step_scale({0})", "p_scaled_step({0}, {1})", "tl.div_rn(1.0, {2})")
"""What brings the size of a step between codes near 1, that, and its reciprocal."""
LIMITS = {"e4m3": 448.0, "e4m3_or_nan": 448.0, "e5m2": 57344.0}
"""The largest numbers."""


def choose_forms(layout: Layout, float8: bool) -> Mapping[Node, Form]:
    """The forms of the values that have another than their op's. float8: there are instructions for
    floats of 8 bits."""
    roots = layout.linear.roots()
    by_row = layout.linear.by_row
    narrow = find_rounded(roots) if by_row else find_narrow(layout.linear)
    users = Counter(a for n in walk(roots) for a in n.args)
    sums = {s.name: s for s in layout.linear.stmts if isinstance(s, Reduce)}
    forms: dict[Node, Form] = {}
    for n in walk(roots):
        code = codec(n) if float8 else None
        fours = users[n] == 0 and layout.size(layout.dims(n)) % 4 == 0
        if code is not None:
            forms[n] = code = _limited(code, users, fours)
        elif nearest := _nearest(n, users, fours):
            forms[n] = nearest
        if not by_row and (quotient := _coded_quotient(n, code, users, layout)):
            forms[quotient] = _step(quotient)
    for n in walk(roots):
        form = (
            forms.get(n)
            or _scaled_quotient(n, layout)
            or _quotient_by_choice(n)
            or (None if by_row else _in_context(n, layout, sums, narrow, users))
            or short_form(n)
            or (near(n) if n in narrow else None)
            or inverse(n)
        )
        if form is not None:
            forms[n] = form
    return forms


def _in_context(
    n: Node, layout: Layout, sums: Mapping[str, Reduce], narrow: Set[Node],
    users: Mapping[Node, int],
) -> Form | None:  # fmt: skip
    """A form whose last bits are others, where what is around a value allows it."""
    return _quotient(n, layout, sums, narrow) or _share(n, sums) or _one_more(n, n in narrow, users)


def near(n: Node) -> Form | None:
    """A faster form of a value that is rounded to 16 bits, if there is one."""
    text = NEAR.get("logistic" if n.op == "truediv" and _is_logistic(n) else n.op)
    return Form(text, n.args) if text else None


def inverse(n: Node) -> Form | None:
    """1 / (1 + exp(x)) in float32, rounded as division rounds, without the branches of that."""
    logistic = n.op == "reciprocal" and n.dtype == f32 and _is_logistic(n)
    return Form("p_inverse({0})", n.args) if logistic else None


def _is_logistic(n: Node) -> bool:
    """Whether it is a quotient by 1 + exp(x), whose reciprocal needs no scale."""
    divides = n.op in ("truediv", "reciprocal") and n.args[-1].op == "add"
    ops = {a.op: a for a in n.args[-1].args} if divides else {}
    return "exp" in ops and "const" in ops and ops["const"].attr == 1


def _one_more(n: Node, narrow: bool, users: Mapping[Node, int]) -> Form | None:
    """tanh(u) + 1, where nothing else needs the tanh: a logistic function, which has no branch and
    loses nothing below 0; or erf(u) + 1, for a 16-bit float."""
    if n.op != "add" or n.dtype != f32:
        return None
    for a, one in (n.args, n.args[::-1]):
        logistic = a.op == "tanh" or (a.op == "erf" and narrow)
        if logistic and one.op == "const" and one.attr == 1 and users[a] == 1:
            return Form(f"p_{'near_' if narrow else ''}one_more_than_{a.op}({{0}})", (a.args[0],))
    return None


def short_form(n: Node) -> Form | None:
    """A float32 value with the precision of bfloat16; of what has 8 bits it had that before."""
    if n.op != "cast" or n.dtype != f32 or n.args[0].op != "cast" or n.args[0].dtype != bf16:
        return None
    (a,) = n.args[0].args
    if a.dtype in (i8, u8):
        return Form(cast("{0}", a.dtype, f32), (a,))
    formats = (None, FORMATS[f8e4m3fn], FORMATS[f8e5m2])
    if any(decodes(a, form) is not None for form in formats):
        return Form("{0}", (a,))
    return Form("p_as_bf16({0})", (a,)) if a.dtype == f32 else None


def _limited(code: Form, users: Mapping[Node, int], stored: bool) -> Form:
    """A code of a number that is clamped to what codes can be: the instructions do that. stored:
    nothing else is done with the code; then four share a register, which they leave together."""
    kind = code.text.removeprefix("p_to_").removesuffix("({0})")
    limit = LIMITS.get(kind)
    n, bounds = _unclamped(code.operands[0], users)
    if limit is None or bounds != {"min": limit, "max": -limit}:
        return code
    kind = kind.removesuffix("_or_nan")
    return Form(f"p_{'four' if stored else 'one'}_{kind}({{0}})", (n,))


def _nearest(n: Node, users: Mapping[Node, int], stored: bool) -> Form | None:
    """An integer of 8 bits, of a number that is rounded and then clamped: by the one instruction
    that does both, after clamping. stored: see `_limited`; to put four together clamps them."""
    if n.op != "cast" or n.dtype not in (i8, u8) or n.args[0].dtype != f32:
        return None
    a, bounds = _unclamped(n.args[0], users)
    least, most = bounds.get("max"), bounds.get("min")
    if a.op != "round" or users[a] != 1 or least is None or most is None:
        return None
    low, high = (-128, 127) if n.dtype == i8 else (0, 255)
    if not (low <= least <= most <= high and least.is_integer() and most.is_integer()):
        return None
    text = "{0}" if stored and least == low else f"p_max_nan({{0}}, {least})"
    text = text if stored and most == high else f"p_min_nan({text}, {most})"
    if stored:
        return Form(f"p_four_{n.dtype.name}({text})", a.args)
    return Form(cast(f"p_nearest({text})", i32, n.dtype), a.args)


def _unclamped(n: Node, users: Mapping[Node, int]) -> tuple[Node, dict[str, float]]:
    """A number before it is clamped, which nothing else uses, and its bounds by the ops that they
    are given to."""
    bounds: dict[str, float] = {}
    while users[n] == 1 and n.op in ("min", "max") and n.op not in bounds:
        rest = [a for a in n.args if a.op != "const"]
        consts = [a.attr for a in n.args if isinstance(a.attr, float)]
        if len(rest) != 1 or len(consts) != 1:
            break
        bounds[n.op] = consts[0]
        (n,) = rest
    return n, bounds


def _step(n: Node) -> Form:
    """A quotient that becomes a code. Of a number with few bits none lies so near the middle of two
    that it takes more than the nearest float32 but for 2**-22 of a last bit."""
    x = n.args[0]
    if x.op == "cast" and x.args[0].dtype in (bf16, f16):
        text = "p_short_quotient({0} * {2}, {4}, {5})"
        return Form(text, n.args, (*STEP[:2], "p_less_than_inverse({2})", "p_rest({2}, {3})"))
    return Form("p_quotient({0} * {2}, {3}, {4})", n.args, STEP)


def _coded_quotient(
    n: Node, code: Form | None, users: Mapping[Node, int], layout: Layout
) -> Node | None:
    """The quotient by what a row shares that a code of 8 bits is made of, and nothing else."""
    if code is not None and not code.text.startswith("p_of_"):
        (n,) = code.operands
    elif n.op == "cast" and n.dtype in (i8, u8) and n.args[0].dtype == f32:
        (n,) = n.args
    else:
        return None
    while users[n] == 1 and n.op in ("min", "max", "round"):
        rest = [a for a in n.args if a.op != "const"]
        if len(rest) != 1:
            return None
        (n,) = rest
    if n.op != "truediv" or n.dtype != f32 or users[n] != 1:
        return None
    return n if layout.along_rows(n.args[0]) and not layout.along_rows(n.args[1]) else None


def _scaled_quotient(n: Node, layout: Layout) -> Form | None:
    """A quotient by a power of two, or by NaN, that points share: times its reciprocal, which is
    exact."""
    if n.op != "truediv" or n.dtype != f32 or layout.along_rows(n.args[1]):
        return None
    if decodes(n.args[1], None) is None:
        return None
    return Form("({0} * {2})", n.args, ("tl.div_rn(1.0, {0})",))


def _quotient_by_choice(n: Node) -> Form | None:
    """A quotient by one of several powers of two: times its reciprocal."""
    if n.op != "truediv" or n.dtype != f32 or n.args[1].op != "where":
        return None
    operands = [n.args[0]]

    def inverse(d: Node) -> str:
        if d.op == "where":
            operands.append(d.args[0])
            met = len(operands) - 1
            return f"tl.where({{{met}}}, {inverse(d.args[1])}, {inverse(d.args[2])})"
        power = d.attr if isinstance(d.attr, float) else 0.0
        if not 2.0**-100 < abs(power) < 2.0**100 or math.frexp(abs(power))[0] != 0.5:
            raise _NoPower
        return repr(1 / power)

    try:
        return Form(f"({{0}} * {inverse(n.args[1])})", tuple(operands))
    except _NoPower:
        return None


class _NoPower(Exception):
    """A number that is no power of two."""


def codec(n: Node) -> Form | None:
    """A float of 8 bits that is made of a number, or taken apart."""
    for name, form in CODECS:
        if (number := encodes(n, form)) is not None:
            return Form(f"p_to_{name}({{0}})", (number,))
        if (code := decodes(n, form)) is not None:
            return Form(f"p_of_{name}({{0}})", (code,))
    return None


def _quotient(
    n: Node, layout: Layout, sums: Mapping[str, Reduce], narrow: Set[Node]
) -> Form | None:
    """A quotient that becomes a 16-bit float. Where the divisor is the same all along a row, its
    reciprocal is: one rounding of 24 bits more does not show in 11. That of what is an
    approximation is one, too."""
    if n.op != "cast" or n.dtype.name not in ("f16", "bf16"):
        return None
    (a,) = n.args
    if a.op != "truediv" or a.dtype != f32 or _is_softmax(a, sums):
        return None
    if "r" not in layout.dims(a.args[0]) or "r" in layout.dims(a.args[1]):
        if a.args[0] in narrow and a.args[0].op in NEAR:
            return None
        return Form(cast(render("truediv", f32, ("{0}", "{1}")), f32, n.dtype), a.args)
    return Form(cast("({0} * {2} * {3})", f32, n.dtype), a.args, RECIPROCAL)


def _share(n: Node, sums: Mapping[str, Reduce]) -> Form | None:
    """A quotient by its divisor's reciprocal, in two parts: the nearest float32 but where the
    quotient is within 2**-22 of the middle of two."""
    if n.op != "truediv" or not _is_softmax(n, sums):
        return None
    return Form("tl.fma({0}, {2}, {0} * {3})", n.args, HALVES)


def _is_softmax(quotient: Node, sums: Mapping[str, Reduce]) -> bool:
    """Whether it is a / sum a, a = exp(x - max x) in float32: a divisor from 1 to the length of a
    row."""
    a, total = quotient.args
    s = sums.get(str(total.attr)) if total.op == "acc" else None
    if s is None or s.kind != "sum" or s.inner or s.value is not a or a.dtype != f32:
        return False
    peak = sums.get(peak_of(s))
    return peak is not None and not peak.inner and rescales(s, peak)
