"""Functions of nodes, for formulas: `where(x > 0, x, exp(x) - 1.0)`. What Python has an operator
for is written with it (`ir/loops.py`, Node); what the functions mean stands in the op table."""

from __future__ import annotations

from collections.abc import Callable

from plait.ir.loops import Const, Node, apply

Function = Callable[..., Node]  # of nodes and Python numbers


def _function(op: str) -> Function:
    def function(*args: Node | Const) -> Node:
        return apply(op, *args)

    return function


copysign = _function("copysign")
cos = _function("cos")
eq = _function("eq")
erf = _function("erf")
erfc = _function("erfc")
exp = _function("exp")
exp2 = _function("exp2")
expm1 = _function("expm1")
floor = _function("floor")
fma = _function("fma")
fmod = _function("fmod")
isinf = _function("isinf")
isnan = _function("isnan")
log = _function("log")
maximum = _function("max")
minimum = _function("min")
mod = _function("mod")
ne = _function("ne")
philox = _function("philox")
reciprocal = _function("reciprocal")
rounded = _function("round")
rsqrt = _function("rsqrt")
sign = _function("sign")
signbit = _function("signbit")
sin = _function("sin")
sqrt = _function("sqrt")
tan = _function("tan")
tanh = _function("tanh")
trunc = _function("trunc")
where = _function("where")
