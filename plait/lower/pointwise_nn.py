"""Activations that reach lowering whole."""

from __future__ import annotations

import math

import torch

from plait.ir.loops import Node
from plait.ir.maths import erf, exp, expm1, maximum, minimum, reciprocal, tanh, where
from plait.lower.core import Lowering, View, lower
from plait.lower.elementwise import FLOAT, elementwise, overloads, register

aten = torch.ops.aten


def sigmoid(x: Node) -> Node:
    """1 / (1 + exp(-x)); exact at both ends, where exp overflows to inf or vanishes."""
    return reciprocal(exp(-x) + 1.0)


register(overloads("sigmoid"), sigmoid, FLOAT)


def gelu_erf(x: Node) -> Node:
    """x * Phi(x)."""
    return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)


def gelu_tanh(ctx: Lowering, x: View) -> View:
    """The tanh approximation of gelu."""
    # On a GPU tanh branches, and what to take for tanh(u) + 1 there depends on what else reads the
    # tanh; rows that keep their bits have what needs no such choice.
    logistic = ctx.cfg.batch_invariant and ctx.facts().streams

    def formula(x: Node) -> Node:
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x / (exp(inner * -2.0) + 1.0) if logistic else x * 0.5 * (tanh(inner) + 1.0)

    return elementwise(ctx, formula, (x,))


@lower(aten.gelu.default)
def _gelu(ctx: Lowering, x: View, *, approximate: str = "none") -> View:
    return gelu_tanh(ctx, x) if approximate == "tanh" else elementwise(ctx, gelu_erf, (x,))


@lower(aten.elu.default)
def _elu(
    ctx: Lowering, x: View, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> View:
    def formula(a: Node) -> Node:
        low = expm1(a * input_scale) * (float(alpha) * float(scale))
        return where(a <= 0, low, a * scale)

    return elementwise(ctx, formula, (x,))


@lower(aten.leaky_relu.default)
def _leaky_relu(ctx: Lowering, x: View, negative_slope: float = 0.01) -> View:
    return elementwise(ctx, lambda a: where(a > 0, a, a * negative_slope), (x,))


@lower(aten.hardtanh.default)
def _hardtanh(ctx: Lowering, x: View, min_val: float = -1, max_val: float = 1) -> View:
    return elementwise(ctx, lambda a: minimum(maximum(a, min_val), max_val), (x,))


@lower(aten.hardsigmoid.default)
def _hardsigmoid(ctx: Lowering, x: View) -> View:
    return elementwise(ctx, lambda a: minimum(maximum(a + 3.0, 0.0), 6.0) / 6.0, (x,))


@lower(aten.hardswish.default)
def _hardswish(ctx: Lowering, x: View) -> View:
    return elementwise(ctx, lambda a: a * minimum(maximum(a + 3.0, 0.0), 6.0) / 6.0, (x,))


@lower(aten.threshold.default)
def _threshold(ctx: Lowering, x: View, threshold: float, value: float) -> View:
    def formula(a: Node, least: Node, other: Node) -> Node:
        return where(a <= least, other, a)

    numbers = (threshold, value) if x.dtype.is_float else (int(threshold), int(value))
    return elementwise(ctx, formula, (x, *numbers), common=x.dtype)


# --------------------------------------------------------------- gradients, as eager's are for NaNs
@lower(aten.hardtanh_backward.default)
def _hardtanh_backward(ctx: Lowering, grad: View, x: View, min_val: float, max_val: float) -> View:
    def formula(g: Node, a: Node) -> Node:
        return where((a > min_val) & (a < max_val), g, 0.0)

    return elementwise(ctx, formula, (grad, x))


@lower(aten.hardswish_backward.default)
def _hardswish_backward(ctx: Lowering, grad: View, x: View) -> View:
    def formula(g: Node, a: Node) -> Node:
        between = g * (a / 3.0 + 0.5)
        return where(a <= -3.0, 0.0, where(a >= 3.0, g, between))

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
    def formula(g: Node, a: Node) -> Node:
        low = g * float(input_scale)
        if is_result:
            low = low * (a + (float(alpha) * float(scale)))
        else:
            low = low * (float(alpha) * float(scale)) * exp(a * float(input_scale))
        return where(a > 0.0, g * float(scale), low)

    return elementwise(ctx, formula, (grad, x))


@lower(aten.logit_backward.default)
def _logit_backward(ctx: Lowering, grad: View, x: View, eps: float | None = None) -> View:
    low, outside = (0.0, math.nan) if eps is None else (eps, 0.0)

    def formula(g: Node, a: Node) -> Node:
        beyond = (a < low) | (a > (1.0 - low))
        slope = g / (a * (1.0 - a))
        return where(beyond, outside, slope)

    return elementwise(ctx, formula, (grad, x))
