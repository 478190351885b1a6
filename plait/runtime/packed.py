"""What the compiler puts into a graph whose weights are constants: products with weights that were
packed once, and what packs them.

    plait::pack(matrix, width) -> Tensor
        a matrix of K rows and N columns in panels of `width` columns, [panels, K, width], which a
        kernel reads from the first number to the last; columns that there are not are 0
    plait::packed_mm(a, panels, columns) -> Tensor
        a times the matrix
    plait::pack_filters(filters, width) -> Tensor
        filters as such a matrix: a row for each point of the kernel and channel
    plait::packed_conv(x, panels, columns, kernel, stride, padding, dilation) -> Tensor
        a convolution with these
    plait::scaled_conv(x, scale, panels, columns) -> Tensor
        one of points with these, of x times a number for each channel, [1, channels, 1, 1]
    plait::pack_winograd(filters, width) -> Tensor
        filters of 3x3 as a matrix for Winograd's method: a row for each of 16 sums of their points
        and channel
    plait::winograd_conv(x, panels, columns, padding) -> Tensor
        a convolution with these
    plait::pack_points(filters) -> Tensor
        a filter for each channel, as [height, width, channels]
    plait::depthwise_conv(x, points, stride, padding, dilation) -> Tensor
        a convolution with these
    plait::norm_weight(weight, gamma, var, eps, dim), plait::norm_bias(bias, gamma, beta, mean, var,
        eps, dtype) -> Tensor
        weight and bias of a convolution or product with the batch norm behind it: computed in
        double precision, and rounded once. dim: of the weight, that of channels

Kernels compute them; the functions here say what they mean, and run where a graph is left to eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.runtime.operators import register_fake

_COSTS = {48: 1.0, 64: 1.03, 80: 1.06, 32: 1.1, 16: 1.3}
"""Widths of panels, and what a column costs in one: narrow ones load more a product."""


_WINOGRAD = (1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)
DEEPEST = 768
"""The most channels of a convolution by Winograd's method."""


def panel_width(columns: int) -> int:
    """The columns of a panel: as few as possible stay empty."""
    return min(_COSTS, key=lambda w: -(-columns // w) * w * _COSTS[w])


def _fill(panels: Tensor, matrix: Tensor) -> None:
    _, rows, width = panels.shape
    whole, rest = divmod(matrix.shape[1], width)
    panels[:whole] = matrix[:, : whole * width].reshape(rows, whole, width).transpose(0, 1)
    if rest:
        panels[whole] = F.pad(matrix[:, whole * width :], (0, width - rest))


def _pack(matrix: Tensor, width: int) -> Tensor:
    panels = _fake_pack(matrix, width)
    _fill(panels, matrix)
    return panels


def _fake_pack(matrix: Tensor, width: int) -> Tensor:
    rows, columns = matrix.shape
    return matrix.new_empty((-(-columns // width), rows, width))


def _rows_of(filters: Tensor) -> Tensor:
    return filters.permute(2, 3, 1, 0).reshape(-1, len(filters))


def _pack_filters(filters: Tensor, width: int) -> Tensor:
    return _pack(_rows_of(filters), width)


def _fake_pack_filters(filters: Tensor, width: int) -> Tensor:
    rows = filters.numel() // len(filters)
    return filters.new_empty((-(-len(filters) // width), rows, width))


def _pack_points(filters: Tensor) -> Tensor:
    return filters.select(1, 0).permute(1, 2, 0).contiguous()


def _fake_pack_points(filters: Tensor) -> Tensor:
    columns, _, high, wide = filters.shape
    return filters.new_empty((high, wide, columns))


def _norm_scale(gamma: Tensor | None, var: Tensor, eps: float) -> Tensor:
    scale = (var.double() + eps).rsqrt()
    return scale if gamma is None else scale * gamma


def _norm_weight(weight: Tensor, gamma: Tensor | None, var: Tensor, eps: float, dim: int) -> Tensor:
    shape = [-1 if d == dim else 1 for d in range(weight.dim())]
    return (weight.double() * _norm_scale(gamma, var, eps).view(shape)).to(weight.dtype)


def _norm_bias(
    bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor,
    eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    shift = -mean.double() if bias is None else bias - mean.double()
    shift = shift * _norm_scale(gamma, var, eps)
    return (shift if beta is None else shift + beta).to(dtype)


def _fake_norm_bias(
    bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor, var: Tensor,
    eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return mean.new_empty(mean.shape, dtype=dtype)


def _matrix(panels: Tensor, columns: int) -> Tensor:
    """What was packed."""
    return panels.transpose(0, 1).flatten(1)[:, :columns]


def _mm(a: Tensor, panels: Tensor, columns: int) -> Tensor:
    return a @ _matrix(panels, columns)


def _conv(
    x: Tensor,
    panels: Tensor,
    columns: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    filters = _matrix(panels, columns).view(*kernel, -1, columns).permute(3, 2, 0, 1)
    made: Tensor = torch.conv2d(x, filters, None, stride, padding, dilation)
    return made


def _scaled_conv(x: Tensor, scale: Tensor, panels: Tensor, columns: int) -> Tensor:
    return _conv(x * scale, panels, columns, (1, 1), (1, 1), (0, 0), (1, 1))


def _winograd_sums(filters: Tensor) -> Tensor:
    g = filters.new_tensor(_WINOGRAD, dtype=torch.float64)
    sums = torch.einsum("ia,jb,ocab->ijco", g, g, filters.double())
    return sums.flatten(0, 2).to(filters.dtype)


def _pack_winograd(filters: Tensor, width: int) -> Tensor:
    return _pack(_winograd_sums(filters), width)


def _fake_pack_winograd(filters: Tensor, width: int) -> Tensor:
    columns, depth, *_ = filters.shape
    return filters.new_empty((-(-columns // width), 16 * depth, width))


def _winograd(x: Tensor, panels: Tensor, columns: int, padding: Sequence[int]) -> Tensor:
    sums = _matrix(panels, columns).view(4, 4, -1, columns).double()
    back = torch.linalg.pinv(sums.new_tensor(_WINOGRAD))
    filters = torch.einsum("ai,bj,ijco->ocab", back, back, sums)
    made: Tensor = torch.conv2d(x, filters.to(x.dtype), None, 1, padding)
    return made


def _fake_winograd(x: Tensor, panels: Tensor, columns: int, padding: Sequence[int]) -> Tensor:
    made: Tensor = torch.conv2d(x, x.new_empty((columns, x.shape[1], 3, 3)), None, 1, padding)
    return made


def _depthwise(
    x: Tensor, points: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    filters = points.permute(2, 0, 1).unsqueeze(1)
    made: Tensor = torch.conv2d(x, filters, None, stride, padding, dilation, groups=len(filters))
    return made


def _register() -> Any:
    library: Any = torch.library.Library("plait", "FRAGMENT")  # type: ignore[no-untyped-call]
    filters = "(Tensor filters, int width) -> Tensor"
    geometry = "int[] stride, int[] padding, int[] dilation) -> Tensor"
    for name, schema, run, fake in (
        ("pack", "(Tensor matrix, int width) -> Tensor", _pack, _fake_pack),
        ("packed_mm", "(Tensor a, Tensor panels, int columns) -> Tensor", _mm, _mm),
        (
            "packed_conv",
            f"(Tensor x, Tensor panels, int columns, int[] kernel, {geometry}",
            _conv,
            _conv,
        ),
        (
            "scaled_conv",
            "(Tensor x, Tensor scale, Tensor panels, int columns) -> Tensor",
            _scaled_conv,
            _scaled_conv,
        ),
        ("pack_filters", filters, _pack_filters, _fake_pack_filters),
        ("pack_winograd", filters, _pack_winograd, _fake_pack_winograd),
        ("pack_points", "(Tensor filters) -> Tensor", _pack_points, _fake_pack_points),
        (
            "norm_weight",
            "(Tensor weight, Tensor? gamma, Tensor var, float eps, int dim) -> Tensor",
            _norm_weight,
            lambda weight, *_: torch.empty_like(weight),
        ),
        (
            "norm_bias",
            "(Tensor? bias, Tensor? gamma, Tensor? beta, Tensor mean, Tensor var, float eps, "
            "ScalarType dtype) -> Tensor",
            _norm_bias,
            _fake_norm_bias,
        ),
        (
            "winograd_conv",
            "(Tensor x, Tensor panels, int columns, int[] padding) -> Tensor",
            _winograd,
            _fake_winograd,
        ),
        ("depthwise_conv", f"(Tensor x, Tensor points, {geometry}", _depthwise, _depthwise),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        register_fake(library, name, fake)
    return library


_LIBRARY = _register()  # the operators live as long as this object
_PLAIT: Any = torch.ops.plait
FILLS: dict[Any, Callable[..., Any]] = {
    _PLAIT.pack.default: lambda out, matrix, _: _fill(out, matrix),
    _PLAIT.pack_filters.default: lambda out, filters, _: _fill(out, _rows_of(filters)),
    _PLAIT.pack_winograd.default: lambda out, filters, _: _fill(out, _winograd_sums(filters)),
    _PLAIT.pack_points.default: lambda out, filters: out.copy_(_pack_points(filters)),
}
"""What packs, into memory that is there. out: a tensor like the operator's result."""
PACKED_SHAPES: dict[Any, Callable[..., Tensor]] = {
    _PLAIT.pack.default: _fake_pack,
    _PLAIT.pack_filters.default: _fake_pack_filters,
    _PLAIT.pack_winograd.default: _fake_pack_winograd,
    _PLAIT.pack_points.default: _fake_pack_points,
}
"""Memory for what these make."""
