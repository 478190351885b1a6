"""Pooling and resampling, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from plait.schedule.plan import Kernel
from plait.wrapper.program import Program
from tests.lower_tools import check

aten = torch.ops.aten
r = torch.randn
x = r(2, 3, 9, 11)

WINDOWS = [  # kernel, stride, padding, dilation, ceil_mode
    ((3, 3), (2, 2), (1, 1), (1, 1), False),
    ((2, 2), (2, 2), (0, 0), (1, 1), True),
    ((3, 3), (1, 1), (1, 1), (2, 2), False),
    ((3, 2), (2, 1), (1, 1), (1, 1), True),
]


@pytest.mark.parametrize("window", WINDOWS)
def test_max_pool(window) -> None:
    kernel, stride, padding, dilation, ceil = window

    def pool(a):
        return F.max_pool2d(a, kernel, stride, padding, dilation, ceil, return_indices=True)

    check(pool, x)
    check(pool, x.to(memory_format=torch.channels_last))
    check(pool, (x * 9).int())
    out, index = pool(x)
    check(
        lambda g, a, i: aten.max_pool2d_with_indices_backward(
            g, a, kernel, stride, padding, dilation, ceil, i
        ),
        r(out.shape),
        x,
        index,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_of_zeros_the_first_is_the_greatest(dtype: torch.dtype) -> None:
    y = torch.where(x > 0.3, 0.0, torch.where(x < -0.3, -1.0, -0.0)).to(dtype)
    for z in (y, y.to(memory_format=torch.channels_last)):
        check(lambda a: F.max_pool2d(a, 3, 1, 1).signbit(), z)
        check(lambda a: F.max_pool2d(a, 2, 2, 1).signbit(), z)
        check(lambda a: F.adaptive_max_pool2d(a, (3, 5)).signbit(), z)
    check(lambda a: F.max_pool3d(a, 2, 1).signbit(), y)


@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("window", [w for w in WINDOWS if w[3] == (1, 1)])
def test_avg_pool(window, divisor: int | None, include_pad: bool) -> None:
    kernel, stride, padding, _, ceil = window
    rest = (kernel, stride, padding, ceil, include_pad, divisor)
    check(lambda a: F.avg_pool2d(a, *rest), x)
    grad = r(F.avg_pool2d(x, *rest).shape)
    check(lambda g, a: aten.avg_pool2d_backward(g, a, *rest), grad, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: F.avg_pool2d(a, 7, 3, 2),
        lambda a: F.avg_pool1d(a[0], 3, 2, 1),
        lambda a: F.max_pool1d(a[0], 3, 2, 1),
        lambda a: F.max_pool3d(a, 2, 2, 1),
        lambda a: F.avg_pool3d(a, 2, 2, 1),
        lambda a: F.avg_pool2d(a.bfloat16(), 3, 2, 1),
        lambda a: F.max_pool2d(a * float("nan"), 3, 2, 1),
        lambda a: F.max_pool2d(a * 0 - float("inf"), 3, 2, 1, return_indices=True),
        lambda a: F.interpolate(a, scale_factor=2),
        lambda a: F.interpolate(a, size=(5, 13)),
        lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"),
        lambda a: F.interpolate(a, size=(5, 13), mode="bilinear"),
        lambda a: F.interpolate(a, size=(5, 13), mode="bilinear", align_corners=True),
        lambda a: F.interpolate(a, scale_factor=1.7, mode="bilinear", recompute_scale_factor=False),
        lambda a: aten.upsample_nearest2d_backward(a.repeat(1, 1, 2, 3), [18, 33], [2, 3, 9, 11]),
    ],
)
def test_other(fn) -> None:
    check(fn, x)


@pytest.mark.parametrize("size", [1, 3, (3, 11), (4, 5), (9, 11), (12, 3)])
def test_adaptive(size) -> None:
    check(lambda a: F.adaptive_avg_pool2d(a, size), x)
    check(lambda a: F.adaptive_max_pool2d(a, size, return_indices=True), x, fallback=size == 1)
    if size != 1:
        grad = r(F.adaptive_avg_pool2d(x, size).shape)
        check(lambda g, a: aten._adaptive_avg_pool2d_backward(g, a), grad, x)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_unpool(rank: int) -> None:
    pool, unpool = getattr(F, f"max_pool{rank}d"), getattr(F, f"max_unpool{rank}d")
    size = (7, 6, 4)[:rank]
    out, index = pool(r(2, 3, *size), 3, 2, return_indices=True)
    check(lambda a, i: unpool(a, i, 3, 2, output_size=size), out, index, exact=True)


BEYOND = [  # kernel, stride, padding, ceil_mode: windows longer than the input along some dimension
    (1280, None, 0, True),
    (7, 1, 3, True),
    (6, 1, 3, False),
    ((1280, 2), (1280, 1), (5, 1), True),
    ((3, 9), (2, 2), (1, 4), True),
    (30, 1, 15, False),
    (11, 3, 5, True),
]


@pytest.mark.parametrize("window", BEYOND)
@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_beyond_the_input(window, dynamic: bool) -> None:
    """They are cut off at its ends: values, positions and gradients are eager's."""
    kernel, stride, padding, ceil = window
    pools = {
        "avg": lambda a: F.avg_pool2d(a, kernel, stride, padding, ceil),
        "avg without padding": lambda a: F.avg_pool2d(a, kernel, stride, padding, ceil, False),
        "max": lambda a: F.max_pool2d(a, kernel, stride, padding, 1, ceil, return_indices=True),
    }
    for name, pool in pools.items():
        torch._dynamo.reset()
        found = []
        for fn in (pool, torch.compile(pool, backend="plait", dynamic=dynamic)):
            a = torch.arange(120.0).view(2, 3, 4, 5).sin().requires_grad_()
            out = fn(a)
            outs = out if isinstance(out, tuple) else (out,)
            (outs[0] * torch.arange(outs[0].numel()).view(outs[0].shape)).sum().backward()
            found.append((*(t.detach() for t in outs), a.grad))
        torch.testing.assert_close(found[1], found[0], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backward", [False, True])
def test_a_window_walks_over_the_input_only(programs: list[Program], backward: bool) -> None:
    """What a kernel does is a matter of the input's 16 elements, not of the window's 1,638,400."""
    a = torch.randn(2, 3, 4, 4, requires_grad=backward)
    out = torch.compile(lambda a: F.avg_pool2d(a, 1280, ceil_mode=True), backend="plait")(a)
    if backward:
        out.sum().backward()
    kernels = [s for p in programs for s in p.record.plan.steps if isinstance(s, Kernel)]
    assert len(kernels) == 1 + backward
    assert all(isinstance(k.work_ns, int) and k.work_ns < 1000 for k in kernels)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_adaptive_windows_of_nothing(kind: str, n: int) -> None:
    """Eager gives no windows of something, and refuses windows of nothing."""
    pool = getattr(F, f"adaptive_{kind}_pool{n}d")
    for batch in (0, 2):
        a = r(batch, 3, *[4] * n)
        got = torch.compile(lambda a: pool(a, 0), backend="plait", options={"strict": True})(a)
        assert got.shape == pool(a, 0).shape
    with pytest.raises(RuntimeError, match="non-zero size"):
        torch.compile(lambda a: pool(a, 2), backend="plait")(r(2, 3, *[4] * (n - 1), 0))
