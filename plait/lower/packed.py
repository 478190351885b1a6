"""Rules for products with weights that were packed (`plait/runtime/packed.py`): one launch each, of
a kernel that knows the shape of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

import plait.runtime.packed  # noqa: F401  (defines the operators)
from plait.ir.dtypes import f32
from plait.ir.expr import Expr, Size, contiguous_strides
from plait.ir.loops import Node
from plait.ir.product import Panels, Window
from plait.ir.record import Recorder
from plait.lower.core import Lowering, View, lower
from plait.lower.elementwise import inside, load_if
from plait.lower.memory import tensor_arg
from plait.lower.product import call

_FEW_CHANNELS = 16
"""Of an image that is copied with its padding: then what a row of the kernel covers lies side by
side, and no point is outside."""


@lower(torch.ops.plait.packed_mm.default)
def packed_mm(ctx: Lowering, a: View, panels: View, columns: int) -> View:
    rows, depth = a.shape
    assert isinstance(depth, int), "a matrix of fixed size has been packed"
    label = f"plait_mm_{depth}x{columns}"
    out = ctx.new_buffer(f32, (rows, columns), fixed=True)
    return _launch(ctx, label, (a, panels), out, depth, (rows,), None)


@lower(torch.ops.plait.packed_conv.default)
def packed_conv(
    ctx: Lowering, x: View, panels: View, columns: int, kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> View:  # fmt: skip
    batch, channels, *image = x.shape
    assert isinstance(channels, int), "a matrix of fixed size has been packed"
    *_, high, wide = ctx.out_shape()
    if any(padding) and channels < _FEW_CHANNELS:
        x, padding = _padded(ctx, x, padding), (0, 0)
        image = [*x.shape[2:]]
    window = Window(*(_pair(v) for v in (kernel, stride, padding, dilation)))
    label = f"plait_conv{kernel[0]}x{kernel[1]}_{channels}x{columns}"
    out = ctx.new_buffer(f32, ctx.out_shape(), _last(ctx.out_shape()), fixed=True)
    sizes = (batch * high * wide, *image, high, wide)
    return _launch(ctx, label, (x, panels), out, channels, sizes, window)


@lower(torch.ops.plait.scaled_conv.default)
def scaled_conv(ctx: Lowering, x: View, scale: View, panels: View, columns: int) -> View:
    _, channels, *image = x.shape
    assert isinstance(channels, int), "a matrix of fixed size has been packed"
    window = Window((1, 1), (1, 1), (0, 0), (1, 1))
    label = f"plait_scaled_conv1x1_{channels}x{columns}"
    out = ctx.new_buffer(f32, ctx.out_shape(), _last(ctx.out_shape()), fixed=True)
    sizes = (image[0] * image[1], *image, *image)
    return _launch(ctx, label, (x, panels, scale), out, channels, sizes, window)


@lower(torch.ops.plait.winograd_conv.default)
def winograd_conv(
    ctx: Lowering, x: View, panels: View, columns: int, padding: Sequence[int]
) -> View:  # fmt: skip
    batch, channels, *image = x.shape
    assert isinstance(channels, int), "a matrix of fixed size has been packed"
    *_, high, wide = ctx.out_shape()
    window = Window((3, 3), (1, 1), _pair(padding), (1, 1))
    out = ctx.new_buffer(f32, ctx.out_shape(), _last(ctx.out_shape()), fixed=True)
    sizes = (batch * high * wide, *image, high, wide)
    label = f"plait_winograd3x3_{channels}x{columns}"
    return _launch(ctx, label, (x, panels), out, channels, sizes, window, "winograd")


def _pair(v: Sequence[int]) -> tuple[int, int]:
    a, b = v
    return a, b


def _last(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Strides with the channels innermost."""
    _, channels, high, wide = shape
    return high * wide * channels, 1, wide * channels, channels


def _padded(ctx: Lowering, x: View, padding: Sequence[int]) -> View:
    """A copy with zeros around it."""
    high, wide = x.shape[2:]
    top, left = padding
    shape = (*x.shape[:2], high + 2 * top, wide + 2 * left)

    def body(ops: Recorder, i: tuple[Expr, ...]) -> Node:
        at = (i[2] - top, i[3] - left)
        within = inside(ops, at, ((0, high), (0, wide)))
        return load_if(ops, within, lambda: x.load(ops, (*i[:2], *at)), 0.0)

    return ctx.pointwise(shape, f32, body, _last(shape))


def _launch(
    ctx: Lowering,
    label: str,
    operands: tuple[View, ...],
    out: str,
    depth: int,
    sizes: tuple[Size, ...],
    window: Window | None,
    form: str = "dense",
) -> View:
    x, panels, *scale = operands
    strides = contiguous_strides(x.shape) if window is None else _last(x.shape)
    made = ctx.buffers[x.buf]
    if ctx.is_whole(x) and not made.fixed:  # it is made as it is read
        ctx.buffers[x.buf] = replace(made, strides=strides)
    others = (tensor_arg(ctx, v, contiguous_strides(v.shape)) for v in (panels, *scale))
    args = (tensor_arg(ctx, x, strides), *others)
    columns, (_, length, width) = ctx.buffers[out].shape[1], panels.shape
    assert isinstance(columns, int) and isinstance(width, int), "panels have a fixed size"

    def place(v: tuple[Expr, ...]) -> tuple[Size, ...]:
        _, _, i, j = v
        if window is None:
            return i, j
        high, wide = sizes[3:]
        return i // (high * wide), j, i // wide % high, i % wide

    op = "plait::packed_mm" if window is None else "plait::packed_conv"
    how = Panels(depth, columns, width, window, form, bool(scale))
    of = (1, 1, sizes[0], columns)
    if form == "winograd":  # one row of 16 sums for four of the result
        length = 4 * depth
    elif form == "depthwise":
        length = prod(window.kernel)  # type: ignore[union-attr]
    return call(ctx, (op, label), (*args, *sizes), out, of, place, length, how)


@lower(torch.ops.plait.depthwise_conv.default)
def depthwise_conv(
    ctx: Lowering, x: View, filters: View, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> View:  # fmt: skip
    batch, columns, *image = x.shape
    kernel = filters.shape[:2]
    assert isinstance(columns, int) and all(isinstance(n, int) for n in kernel), kernel
    *_, high, wide = ctx.out_shape()
    window = Window(*(_pair(v) for v in (kernel, stride, padding, dilation)))  # type: ignore[arg-type]
    out = ctx.new_buffer(f32, ctx.out_shape(), _last(ctx.out_shape()), fixed=True)
    sizes = (batch * high * wide, *image, high, wide)
    label = f"plait_depthwise{kernel[0]}x{kernel[1]}_{columns}"
    return _launch(ctx, label, (x, filters), out, 1, sizes, window, "depthwise")
