"""Convolutions on a GPU against eager, with float64 as the judge: collected where torch has a CUDA
device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.against_eager import poison

CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "plain": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 8, 16, 16), (12, 8, 3, 3)),
    "relu": (lambda x, w, b: F.relu(F.conv2d(x, w, b, stride=2)), (2, 8, 17, 17), (12, 8, 3, 3)),
    "two": (
        lambda x, w, b: F.conv2d(F.conv2d(x, w, b, padding=1), w, b),
        (2, 8, 16, 16),
        (8, 8, 3, 3),
    ),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (2, 8, 16, 16), (12, 2, 3, 3)),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, groups=8), (2, 8, 16, 16), (8, 1, 3, 3)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        (2, 8, 9, 9),
        (8, 12, 3, 3),
    ),
    "transposed, padded": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (2, 8, 9, 9),
        (8, 12, 3, 3),
    ),
    "transposed 1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=4, padding=2),
        (2, 8, 40),
        (8, 12, 8),
    ),
    "point": (lambda x, w, b: F.conv2d(x * 2, w, b).relu(), (2, 128, 9, 9), (64, 128, 1, 1)),
    "patches": (lambda x, w, b: F.conv2d(x, w, b, stride=4), (2, 3, 18, 16), (64, 3, 4, 4)),
    "shuffle": (
        lambda x, w, b: F.conv2d(F.pixel_shuffle(F.conv2d(x, w, b, padding=1), 2), w[:, :3]),
        (2, 8, 16, 16),
        (12, 8, 3, 3),
    ),
    "one channel": (lambda x, w, b: F.conv1d(x, w, b, stride=5), (2, 1, 100), (12, 1, 10)),
    "depthwise 1d": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=8), (2, 8, 40), (8, 1, 4)),
    "1d": (lambda x, w, b: F.conv1d(x, w, b, dilation=2), (2, 8, 40), (12, 8, 3)),
    "3d": (lambda x, w, b: F.conv3d(x, w, b), (2, 4, 8, 8, 8), (12, 4, 3, 3, 3)),
}


STEPS = {"relu", "point"}
"""A result that TF32 rounds to the other side of 0 has another gradient."""
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [
    ("ieee", torch.float32),
    ("tf32", torch.float32),
    ("", torch.float16),
    ("", torch.bfloat16),
]


def set_tf32(on: bool) -> None:
    """Whether convolutions may round. PyTorch's own tests, in this process too, freeze the flag's
    other setter."""
    torch._C._set_cudnn_allow_tf32(on)


@pytest.mark.parametrize(("precision", "dtype"), DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_backward(name: str, last: bool, precision: str, dtype: torch.dtype) -> None:
    if precision == "tf32" and name in STEPS:
        pytest.skip("its gradient has steps")
    fn, x_shape, w_shape = CASES[name]
    args = [torch.randn(s, device="cuda", dtype=dtype) for s in (x_shape, w_shape)]
    if last and len(x_shape) == 4:
        args = [a.to(memory_format=torch.channels_last) for a in args]
    n_out = w_shape[1] if name.startswith("transposed") else w_shape[0]
    args.append(torch.randn(n_out, device="cuda", dtype=dtype))
    results = []
    set_tf32(precision == "tf32")
    try:
        for f in (fn, torch.compile(fn, backend="plait")):
            leaves = [
                a.detach().clone(memory_format=torch.preserve_format).requires_grad_() for a in args
            ]
            out = f(*leaves)
            out.backward(torch.ones_like(out))
            results.append([out.detach(), *(a.grad for a in leaves)])
            poison(results)
    finally:
        set_tf32(False)
    leaves = [a.double().requires_grad_() for a in args]
    exact = fn(*leaves)
    exact.sum().backward()
    tolerance = 1e-3 if precision == "tf32" else TOLERANCES[dtype]
    for want, got, right in zip(*results, [exact.detach(), *(a.grad for a in leaves)], strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride()
        error, eagers = ((t.double() - right).abs().max() for t in (got, want))
        assert error <= eagers + tolerance * right.abs().max()
