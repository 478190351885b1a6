"""Activations that reach lowering whole."""

from __future__ import annotations

import math

import torch

from plait.ir.loops import Node
from plait.lower.core import Lowering, View, lower
from plait.lower.pointwise import FLOAT, Maths, elementwise, overloads, register

aten = torch.ops.aten


def sigmoid(m: Maths, x: Node) -> Node:
    """1 / (1 + exp(-x)); exact at both ends, where exp overflows to inf or vanishes."""
    return m("reciprocal", m("add", m("exp", m("neg", x)), 1.0))


register(overloads("sigmoid"), sigmoid, FLOAT)


def gelu_erf(m: Maths, x: Node) -> Node:
    """x * Phi(x)."""
    return m("mul", m("mul", x, 0.5), m("add", m("erf", m("mul", x, math.sqrt(0.5))), 1.0))


def gelu_tanh(m: Maths, x: Node) -> Node:
    """The tanh approximation of gelu."""
    cubed = m("mul", m("mul", x, x), x)
    inner = m("mul", m("add", x, m("mul", cubed, 0.044715)), math.sqrt(2 / math.pi))
    return m("mul", m("mul", x, 0.5), m("add", m("tanh", inner), 1.0))


@lower(aten.gelu.default)
def _gelu(ctx: Lowering, x: View, *, approximate: str = "none") -> View:
    return elementwise(ctx, gelu_tanh if approximate == "tanh" else gelu_erf, (x,))


@lower(aten.elu.default)
def _elu(
    ctx: Lowering, x: View, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> View:
    def formula(m: Maths, a: Node) -> Node:
        low = m("mul", m("expm1", m("mul", a, input_scale)), float(alpha) * float(scale))
        return m("where", m("le", a, 0), low, m("mul", a, scale))

    return elementwise(ctx, formula, (x,))


@lower(aten.leaky_relu.default)
def _leaky_relu(ctx: Lowering, x: View, negative_slope: float = 0.01) -> View:
    return elementwise(
        ctx, lambda m, a: m("where", m("gt", a, 0), a, m("mul", a, negative_slope)), (x,)
    )


@lower(aten.hardtanh.default)
def _hardtanh(ctx: Lowering, x: View, min_val: float = -1, max_val: float = 1) -> View:
    return elementwise(ctx, lambda m, a: m("min", m("max", a, min_val), max_val), (x,))


@lower(aten.threshold.default)
def _threshold(ctx: Lowering, x: View, threshold: float, value: float) -> View:
    def formula(m: Maths, a: Node, least: Node, other: Node) -> Node:
        return m("where", m("le", a, least), other, a)

    numbers = (threshold, value) if x.dtype.is_float else (int(threshold), int(value))
    return elementwise(ctx, formula, (x, *numbers), common=x.dtype)


# --------------------------------------------------------------- gradients, as eager's are for NaNs
@lower(aten.hardtanh_backward.default)
def _hardtanh_backward(ctx: Lowering, grad: View, x: View, min_val: float, max_val: float) -> View:
    def formula(m: Maths, g: Node, a: Node) -> Node:
        return m("where", m("and", m("gt", a, min_val), m("lt", a, max_val)), g, 0.0)

    return elementwise(ctx, formula, (grad, x))


@lower(aten.hardswish_backward.default)
def _hardswish_backward(ctx: Lowering, grad: View, x: View) -> View:
    def formula(m: Maths, g: Node, a: Node) -> Node:
        between = m("mul", g, m("add", m("truediv", a, 3.0), 0.5))
        return m("where", m("le", a, -3.0), 0.0, m("where", m("ge", a, 3.0), g, between))

    return elementwise(ctx, formula, (grad, x))


@lower(aten.elu_backward.default)
def _elu_backward(
    ctx: Lowering,
    grad: View,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: View,
) -> View:
    def formula(m: Maths, g: Node, a: Node) -> Node:
        low = m("mul", g, float(input_scale))
        if is_result:
            low = m("mul", low, m("add", a, float(alpha) * float(scale)))
        else:
            low = m(
                "mul",
                m("mul", low, float(alpha) * float(scale)),
                m("exp", m("mul", a, float(input_scale))),
            )
        return m("where", m("gt", a, 0.0), m("mul", g, float(scale)), low)

    return elementwise(ctx, formula, (grad, x))


@lower(aten.logit_backward.default)
def _logit_backward(ctx: Lowering, grad: View, x: View, eps: float | None = None) -> View:
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)

    def formula(m: Maths, g: Node, a: Node) -> Node:
        beyond = m("or", m("lt", a, low), m("gt", a, 1.0 - low))
        slope = m("truediv", g, m("mul", a, m("sub", 1.0, a)))
        return m("where", beyond, outside, slope)

    return elementwise(ctx, formula, (grad, x))
