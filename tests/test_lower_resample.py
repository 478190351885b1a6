"""Interpolation, its gradients, and those of replicated borders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lower_tools import check

aten = torch.ops.aten
r = torch.randn
x = r(2, 3, 5, 7)
BYTES = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)

RESIZES = [  # size, scale factor, align corners
    ((10, 14), None, False),
    ((15, 21), None, False),
    ((7, 9), None, False),
    ((3, 4), None, False),
    ((10, 14), None, True),
    ((9, 4), None, True),
    ((1, 1), None, True),
    (None, (1.7, 0.6), False),
    (None, (2.0, 3.0), False),
]


def resized(a: Tensor, mode: str, size, factor, align: bool) -> Tensor:
    return F.interpolate(
        a, size, factor, mode, align, recompute_scale_factor=False if factor else None
    )


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_planes(mode: str, resize) -> None:
    check(lambda a: resized(a, mode, *resize), x)
    out = resized(x, mode, *resize)
    op = getattr(aten, f"upsample_{mode}2d_backward")
    _, factor, align = resize
    scales = factor or (None, None)
    grad = r(out.shape)
    check(lambda g: op(g, out.shape[2:], x.shape, align, *scales), grad, dynamic=False)
    check(lambda g: op(g, out.shape[2:], x.shape, align, *scales), grad.double(), dynamic=False)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_bytes_stay_calls(mode: str, align: bool) -> None:
    """ATen weighs bytes in fixed point and rounds after each dimension: a loop of floats gives
    others."""
    op = getattr(aten, f"upsample_{mode}2d").default
    with torch.inference_mode():  # else its kernel for Autograd, the decomposition, is traced
        check(lambda a: op(a, [10, 4], align), BYTES, decompose=False, fallback=True, exact=True)


@pytest.mark.parametrize("align", [False, True])
def test_lines_and_volumes(align: bool) -> None:
    line, volume = r(2, 3, 6), r(1, 2, 3, 4, 5)
    check(
        lambda g: aten.upsample_linear1d_backward(g, [11], [2, 3, 6], align),
        r(2, 3, 11),
        dynamic=False,
    )
    check(lambda a: F.interpolate(a, 12, mode="linear", align_corners=align), line)
    check(lambda a: F.interpolate(a, (6, 3, 10), mode="trilinear", align_corners=align), volume)
    sizes = ([6, 4, 7], [1, 2, 3, 4, 5])
    check(
        lambda g: aten.upsample_trilinear3d_backward(g, *sizes, align),
        r(1, 2, 6, 4, 7),
        dynamic=False,
    )


@pytest.mark.parametrize("pad", [(1, 2, 3, 0), (0, 0, 0, 0), (-1, 2, 1, -2), (9, 9, 9, 9)])
def test_replicated_borders(pad: tuple[int, ...]) -> None:
    grad = r(F.pad(x, pad, mode="replicate").shape)
    check(lambda g, a: aten.replication_pad2d_backward(g, a, pad), grad, x, dynamic=False)
    thin = x[..., :1]
    if pad[0] >= 0:
        grad = r(F.pad(thin, pad, mode="replicate").shape)
        check(lambda g, a: aten.replication_pad2d_backward(g, a, pad), grad, thin, dynamic=False)


def test_wide_borders_stay_calls() -> None:
    grad = r(2, 3, 5, 7 + 60)
    check(
        lambda g, a: aten.replication_pad2d_backward(g, a, [30, 30, 0, 0]),
        grad,
        x,
        fallback=True,
        dynamic=False,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_compiled(mode: str, dynamic: bool) -> None:
    """Bytes are eager's own; floats of known sizes get their gradient from the rules here."""

    def fn(a: Tensor) -> Tensor:
        return F.interpolate(a, (7, 4), mode=mode)

    kernels = dict(aten.upsample_bilinear2d.vec.py_kernels)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="plait", dynamic=dynamic)
    for size in (5, 6):
        image = torch.randint(0, 256, (2, 3, size, 9), dtype=torch.uint8)
        assert torch.equal(compiled(image), fn(image))
    for size in (5, 6):
        mine, its = (x[..., :size].double().requires_grad_() for _ in range(2))
        compiled(mine).square().sum().backward()
        fn(its).square().sum().backward()
        torch.testing.assert_close(mine.grad, its.grad)
    assert aten.upsample_bilinear2d.vec.py_kernels == kernels  # torch's own are back
