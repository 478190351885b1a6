"""Decides which values are computed in another form than their ops': approximations where a result
is rounded to 16 bits, quotients by a reciprocal that is computed once a row, floats of 8 bits by
instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plait.ir.dtypes import bf16, f8e4m3fn, f8e5m2, f32, i8, u8
from plait.ir.float8 import FORMATS, decodes, encodes
from plait.ir.loops import Node, walk
from plait.ir.rules import Simplifier
from plait.kernel.triton.layout import Layout
from plait.kernel.triton.ops import NEAR, cast, render
from plait.kernel.triton.passes import peak_of, rescales
from plait.schedule.legalize.find_narrow import find_narrow
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


STEP = (
    "tl.where(tl.abs({0}) < 2.0**-64, 2.0**64, tl.where(tl.abs({0}) > 2.0**64, 2.0**-64, 1.0))",
    "{0} * {1}",
    "tl.div_rn(1.0, {2})",
)
"""What brings the size of a step between codes near 1, that, and its reciprocal."""


def choose_forms(layout: Layout, float8: bool) -> Mapping[Node, Form]:
    """The forms of the values that have another than their op's. float8: there are instructions for
    floats of 8 bits."""
    roots = layout.linear.roots()
    narrow = find_narrow(layout.linear)
    users = Counter(a for n in walk(roots) for a in n.args)
    sums = {s.name: s for s in layout.linear.stmts if isinstance(s, Reduce)}
    forms, simplify = {}, Simplifier()
    for n in walk(roots):
        code = codec(n, simplify) if float8 else None
        if quotient := _coded_quotient(n, code, users, layout):
            forms[quotient] = Form("p_quotient({0} * {2}, {3}, {4})", quotient.args, STEP)
    for n in walk(roots):
        form = (
            forms.get(n)
            or _quotient(n, layout, sums)
            or _share(n, sums)
            or _one_more(n, n in narrow, users)
            or _rounding(n)
            or (_near(n) if n in narrow else None)
            or (codec(n, simplify) if float8 else None)
        )
        if form is not None:
            forms[n] = form
    return forms


def _near(n: Node) -> Form | None:
    text = NEAR.get("logistic" if _is_logistic(n) else n.op)
    return Form(text, n.args) if text else None


def _is_logistic(n: Node) -> bool:
    """Whether it is a quotient by 1 + exp(x), whose reciprocal needs no scale."""
    ops = {a.op: a for a in n.args[1].args} if n.op == "truediv" and n.args[1].op == "add" else {}
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


def _rounding(n: Node) -> Form | None:
    """A float32 value with the precision of bfloat16."""
    if n.op != "cast" or n.dtype != f32:
        return None
    (a,) = n.args
    if a.op != "cast" or a.dtype != bf16 or a.args[0].dtype != f32:
        return None
    return Form("p_as_bf16({0})", a.args)


def _coded_quotient(
    n: Node, code: Form | None, users: Mapping[Node, int], layout: Layout
) -> Node | None:
    """The quotient by what a row shares that a code of 8 bits is made of, and nothing else."""
    if code is not None and code.text.startswith("p_to_"):
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
    varies, shared = (layout.dims(a) for a in n.args)
    return n if "r" in varies and "r" not in shared else None


def codec(n: Node, simplify: Simplifier) -> Form | None:
    """A float of 8 bits that is made of a number, or taken apart."""
    for name, form in CODECS:
        if (number := encodes(n, form, simplify)) is not None:
            return Form(f"p_to_{name}({{0}})", (number,))
        if (code := decodes(n, form, simplify)) is not None:
            return Form(f"p_of_{name}({{0}})", (code,))
    return None


def _quotient(n: Node, layout: Layout, sums: Mapping[str, Reduce]) -> Form | None:
    """A quotient that becomes a 16-bit float. Where the divisor is the same all along a row, its
    reciprocal is: one rounding of 24 bits more does not show in 11."""
    if n.op != "cast" or n.dtype.name not in ("f16", "bf16"):
        return None
    (a,) = n.args
    if a.op != "truediv" or a.dtype != f32 or _is_softmax(a, sums):
        return None
    if "r" not in layout.dims(a.args[0]) or "r" in layout.dims(a.args[1]):
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
    if s is None or s.kind != "sum" or s.running or s.value is not a or a.dtype != f32:
        return False
    peak = sums.get(peak_of(s))
    return peak is not None and rescales(s, peak)
