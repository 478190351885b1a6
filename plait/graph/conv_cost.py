"""What a convolution gains from channels-last operands, and what the copies cost that make them.

Of rows, cuDNN turns every operand, convolves, and turns the result back: that is what is gained.
Exceptions are kernels that it has for one layout only. The numbers are those of an H200 with cuDNN
9.19 (`python benchmarks/conv_gpu.py layouts`, benchmarks/results/gpu-conv.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from plait.devices import facts_of
from plait.graph.edit import aten, value_of

BYTES_A_NS = 1300.0  # of a tensor that is read in one layout and written in another
HOST_BYTES_A_NS = 10.0  # the same of a core: benchmarks/conv_cpu.py
HOST_GROUPED_A_NS = 6.0  # of images whose channels are convolved in groups
HOST_SCATTERED_A_NS = 1.5  # of transposed convolutions, whose kernels for rows are slow
HOST_FILTERS_A_NS = 4.0
"""What a core loses channels-last, in bytes of filters: those are turned twice there at each call,
of rows once."""
LAUNCH_NS = 2000.0
FEW_CHANNELS = 4
"""Of float32, gradients of inputs with so few channels on a side have kernels for rows only."""
NARROW_CHANNELS = 8
NARROW_ELEMENTS_A_NS = 110.0
"""What gradients of filters of groups of fewer channels lose, of 16 bits each, in operands."""
MOST_TAPS = 9  # 3 x 3
MOST_LINE_TAPS = 16
"""A filter of one channel with at most so many elements, or so many in a row, is a loop of ours:
with 5 x 5 in float32 one takes 1.3 ms for want of registers, cuDNN 0.03 ms."""
LARGE_TAPS = 25


@dataclass(frozen=True, slots=True)
class _Picoseconds:
    """What one product takes of a convolution with a filter a channel: of rows, channels-last in
    float32, channels-last in 16 bits."""

    rows: float
    single: float
    half: float

    def gain_ns(self, products: int, nbytes: int) -> float:
        """What so many of them gain from channels innermost."""
        return products * (self.rows - (self.half if nbytes == 2 else self.single)) / 1000


_FORWARD = _Picoseconds(0.69, 0.40, 0.17)
_OF_SMALL_FILTERS = _Picoseconds(0.95, 0.36, 0.31)  # channels-last a loop of ours
_OF_INPUT = _Picoseconds(0.90, 0.40, 0.35)
_OF_FILTER = _Picoseconds(1.50, 0.45, 0.28)
_OF_LARGE_FILTER = _Picoseconds(1.38, 5.50, 0.17)  # more than LARGE_TAPS elements
_LINE = _Picoseconds(2.2, 8.0, 8.0)  # filters of one row: cuDNN has no kernel of its own for them


@dataclass(frozen=True, slots=True)
class Convolution:
    """The arguments of a convolution, or of its gradients, by the names of aten.convolution.

    wanted: which gradients are computed: of the input, of the filter; () for the convolution itself
    """

    x: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    stride: tuple[Any, ...]
    padding: tuple[Any, ...]
    dilation: tuple[Any, ...]
    transposed: bool
    output_padding: tuple[Any, ...]
    groups: Any
    wanted: tuple[bool, ...] = ()

    @property
    def window(self) -> tuple[Any, ...]:
        """The sizes of a filter."""
        return tuple(self.weight.shape[2:])

    @property
    def is_point(self) -> bool:
        """Whether it multiplies each point of an image by one matrix."""
        ones = (*self.window, *self.stride, self.groups)
        return all(_is(1, n) for n in ones) and all(
            _is(0, n) for n in (*self.padding, *self.output_padding)
        )

    @property
    def is_loop(self) -> bool:
        """Whether its filters, of one channel each, are small enough to be written out."""
        return 0 < prod(map(hint, self.window)) <= most_taps(self.window)

    @property
    def is_oddly_grouped(self) -> bool:
        """Whether its groups have numbers of channels for which cuDNN has no channels-last kernel:
        it turns and pads them, which takes twice the time."""
        if _is(1, self.groups) or self.is_depthwise or self.is_on_host:
            return False
        filters = hint(self.result.shape[1] if self.transposed else self.weight.shape[0])
        widths = hint(self.weight.shape[1]), filters // max(hint(self.groups), 1)
        return any(n & (n - 1) for n in widths)

    @property
    def is_on_host(self) -> bool:
        """Whether a CPU computes it."""
        return facts_of(self.x.device).is_host

    @property
    def is_depthwise(self) -> bool:
        """Whether each filter has one channel of several."""
        return _is(1, self.weight.shape[1]) and not _is(1, self.groups)


def convolution_of(node: Node) -> Convolution:
    """A call of aten.convolution or aten.convolution_backward as its values stand."""
    backward = node.target is aten.convolution_backward.default
    args = node.args[1:] if backward else node.args
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    result, wanted = value_of(node), ()
    if backward:
        result, wanted = value_of(node.args[0]), tuple(args[9][:2])  # type: ignore[arg-type, index]
    return Convolution(
        value_of(x), value_of(weight), result, tuple(stride), tuple(padding), tuple(dilation),  # type: ignore[arg-type]
        bool(transposed), tuple(output_padding), groups, wanted,  # type: ignore[arg-type]
    )  # fmt: skip


def gain_ns(node: Node) -> float:
    """How much sooner a convolution is done with channels-last operands."""
    c = convolution_of(node)
    if c.is_on_host:
        return host_gain_ns(c)
    if c.is_point and not c.transposed:
        return _product_gain_ns(c)
    if c.is_depthwise:
        return _depthwise_gain_ns(c)
    if not c.wanted:
        return _moved_ns(c, c.transposed)
    gain = _moved_ns(c, not c.transposed) if c.wanted[0] else 0.0
    if c.wanted[1]:
        single = c.x.dtype == torch.float32
        if not _is(1, c.groups) and hint(c.weight.shape[1]) < NARROW_CHANNELS:
            operands = prod(map(hint, c.x.shape)) + prod(map(hint, c.result.shape))
            gain -= 0.0 if single else operands / NARROW_ELEMENTS_A_NS
        else:
            gain += _moved_ns(c, False) / (2 if single else 1)
    return gain


def host_gain_ns(c: Convolution) -> float:
    """The same on one core of a CPU."""
    images, filters = nbytes_of(c.x) + nbytes_of(c.result), nbytes_of(c.weight)
    if c.is_point and not c.transposed:
        single = c.x.dtype == torch.float32  # which is a product in either layout
        return 0.0 if single else images / HOST_BYTES_A_NS / 2
    if c.is_depthwise:
        return images / HOST_BYTES_A_NS
    grouped = not _is(1, c.groups)
    rate = HOST_GROUPED_A_NS if grouped else HOST_BYTES_A_NS
    return images / (HOST_SCATTERED_A_NS if c.transposed else rate) - filters / HOST_FILTERS_A_NS


def _moved_ns(c: Convolution, scatters: bool) -> float:
    """What it takes to turn all operands and the result. scatters: each element of the operand goes
    to several of the result."""
    moved = sum(LAUNCH_NS + nbytes_of(t) / BYTES_A_NS for t in (c.x, c.weight, c.result))
    few = min(hint(c.x.shape[1]), hint(c.result.shape[1])) <= FEW_CHANNELS
    return -moved if scatters and few and c.x.dtype == torch.float32 else moved


def _product_gain_ns(c: Convolution) -> float:
    """In rows, a matrix for each image: if their rows are not aligned, as slow kernels' are."""
    points = prod(map(hint, c.result.shape[2:]))
    if points * c.x.dtype.itemsize % 16 == 0:
        return 0.0
    return (sum(c.wanted) or 1) * (nbytes_of(c.x) + nbytes_of(c.result)) / BYTES_A_NS


def _depthwise_gain_ns(c: Convolution) -> float:
    taps = prod(map(hint, c.window))
    products, nbytes = prod(map(hint, c.result.shape)) * taps, c.x.dtype.itemsize
    line = all(_is(1, n) for n in c.window[:-1])
    if not c.wanted:
        loop = c.is_loop and not c.transposed
        if line and loop:
            return 0.0  # in either layout
        return (_OF_SMALL_FILTERS if loop else _FORWARD).gain_ns(products, nbytes)
    gain = 0.0
    if c.wanted[0]:
        gain += (_LINE if line else _OF_INPUT).gain_ns(products, nbytes)
    if c.wanted[1]:
        large = taps > LARGE_TAPS
        of_filter = _LINE if line else _OF_LARGE_FILTER if large else _OF_FILTER
        gain += of_filter.gain_ns(products, nbytes)
    return gain


def copy_ns(source: Node, x: torch.Tensor) -> float:
    """What a copy of a value in another layout costs: less where a kernel of ours makes it, which
    then writes what the copy would have read."""
    apart = source.op == "placeholder" or source.target is aten.convolution.default
    ns = nbytes_of(x) / (HOST_BYTES_A_NS if facts_of(x.device).is_host else BYTES_A_NS)
    return LAUNCH_NS + ns if apart else ns / 2


def most_taps(window: Sequence[Any]) -> int:
    """How many elements a filter of one channel may have to be written out in a loop."""
    return MOST_LINE_TAPS if all(_is(1, n) for n in window[:-1]) else MOST_TAPS


def nbytes_of(x: torch.Tensor) -> int:
    """How much memory the elements of a tensor take."""
    return prod(map(hint, x.shape)) * x.dtype.itemsize


def hint(size: Any) -> int:
    """A size or a stride as a number: a guess where it is known at run time only."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return 1024 if known is None else int(known)


def _is(number: int, n: Any) -> bool:
    """Whether a size is this number for all inputs."""
    return type(n) is int and n == number
