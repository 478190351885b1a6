"""Convolutions of a GPU's programs, compiled on a machine without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from plait.ir.dtypes import bf16, f32
from plait.wrapper.instructions import (
    Alloc,
    AssertSizeStride,
    CallExtern,
    Launch,
    Literal,
    Place,
    WrapperProgram,
)
from tests.test_cuda_programs import compile_only, fakes, of, record

__all__ = ["compile_only"]

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def _with_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake convolutions lay results out as cuDNN does, which a build for CPUs lacks; float32 may be
    rounded, as by default."""

    def layout(x: Tensor, weight: Tensor, _: object) -> torch.memory_format:
        last = LAST.get(weight.dim(), torch.contiguous_format)
        seen = any(suggest_memory_format(t) == last for t in (x, weight))
        return last if seen else torch.contiguous_format

    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", layout)
    conv = torch.backends.cudnn.conv
    before, conv.fp32_precision = conv.fp32_precision, "tf32"
    yield
    conv.fp32_precision = before


def convolved(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, padding=1) + y)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_bias_fuses_with_what_follows(compile_only: None, device: str) -> None:
    mode, args = fakes((2, 8, 16, 16), (8, 8, 3, 3), (8,), (2, 8, 16, 16), device=device)
    made = record(convolved, *args, mode=mode)
    (call,) = of(made.wrapper, CallExtern)
    last = of(made.wrapper, Launch)[-1]
    assert call.op == "aten::convolution" and len(last.args) == (4 if device == "cuda" else 3)
    assert (call.args[2] == Literal("none")) == (device == "cuda")


def kinds(p: WrapperProgram) -> str:
    """The steps of a program: k for a kernel, c for a call."""
    names = {Launch: "k", CallExtern: "c"}
    return "".join(names.get(type(i), "") for i in p.body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_between_convolutions_is_one_kernel(
    compile_only: None, dtype: torch.dtype
) -> None:
    mode, args = fakes((8, 64, 56, 56), (64, 64, 3, 3), (64,), (128, 64, 3, 3), dtype=dtype)

    def net(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.avg_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2), v).relu()

    p = record(net, *args, mode=mode).wrapper
    assert kinds(p) == "kkckkck"  # the image, a filter; bias and pool, a filter; the result


def test_what_two_products_read_is_written_once(compile_only: None) -> None:
    """The gradients of a convolution whose filter is a point, of channels-last images."""
    mode, (g, x, w) = fakes((8, 512, 28, 28), (8, 512, 28, 28), (512, 512), dtype=torch.bfloat16)
    with mode:
        g, x = (t.to(memory_format=torch.channels_last) for t in (g, x))

    def net(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows, given = (t.permute(0, 2, 3, 1).reshape(-1, 512) for t in (torch.tanh(g), x))
        return rows @ w, rows.t() @ given

    p = record(net, g, x, w, mode=mode).wrapper
    assert kinds(p) == "kcc"
    (launch,) = of(p, Launch)
    (made,) = launch.outs
    (strides,) = (i.strides for i in of(p, Alloc) + of(p, Place) if i.name == made)
    assert strides == (401408, 1, 14336, 512)


def test_without_kernels_all_is_as_eager_has_it(compile_only: None) -> None:
    mode, args = fakes((8, 64, 56, 56), (64, 64, 3, 3), (64, 64, 1, 1))

    def net(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(F.group_norm(F.conv2d(x, w), 4), v)

    made = record(net, *args, mode=mode, kernels=False)
    assert [i.op for i in of(made.wrapper, CallExtern)] == [
        "aten::convolution",
        "aten::native_group_norm",
        "aten::convolution",
    ]


def test_a_channel_with_a_filter_of_its_own_is_a_kernel(compile_only: None) -> None:
    mode, args = fakes((8, 64, 56, 56), (64, 64, 1, 1), (64, 1, 3, 3), (64,), (64, 1, 5, 5))

    def net(x: Tensor, p: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        y = F.relu(F.conv2d(F.conv2d(x, p), w, b, groups=64, padding=1))
        return F.conv2d(y, v, groups=64).relu()

    made = record(net, *args, mode=mode)
    # The image, a point; filters by their elements, 3 x 3 with all that follows; 5 x 5; the result.
    assert kinds(made.wrapper) == "kckkck"


def test_what_channels_have_in_common_takes_no_launch(compile_only: None) -> None:
    mode, args = fakes((8, 64, 28, 28), (64, 64, 1, 1), (64,), (64,), (64,), (64,))

    def normed(x: Tensor, p: Tensor, *norm: Tensor) -> Tensor:
        return F.relu(F.batch_norm(F.conv2d(x, p), *norm))

    assert kinds(record(normed, *args, mode=mode).wrapper) == "ck"


def test_windows_are_not_read_in_a_reduction(compile_only: None) -> None:
    mode, args = fakes((32, 64, 56, 56), (64, 64, 1, 1), (64, 1, 3, 3))

    def squeeze(x: Tensor, p: Tensor, w: Tensor) -> Tensor:
        y = F.relu(F.conv2d(F.conv2d(x, p), w, groups=64, padding=1))
        return y * y.mean((2, 3), keepdim=True)

    made = record(squeeze, *args, mode=mode)
    # The image, a point; filters by their elements, windows, the mean in two steps, the result.
    assert kinds(made.wrapper) == "kckkkkk"


@pytest.mark.parametrize(("taps", "wide"), [(128, True), (4, False)])
def test_long_filters_of_groups_compute_in_float32(
    compile_only: None, taps: int, wide: bool
) -> None:
    mode, args = fakes((2, 96, 499), (96, 48, taps), (96,), dtype=torch.bfloat16)
    p = record(lambda x, w, b: F.conv1d(x, w, b, groups=2).relu(), *args, mode=mode).wrapper
    (call,) = of(p, CallExtern)
    (result,) = [i for i in of(p, AssertSizeStride) if i.origin == "aten.convolution.default"]
    assert call.op == "aten::convolution" and result.dtype == (f32 if wide else bf16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patches_are_gathered_and_multiplied(compile_only: None, dtype: torch.dtype) -> None:
    mode, args = fakes((2, 3, 64, 64), (96, 3, 16, 16), (96,), dtype=dtype)
    call = "aten::convolution" if dtype == torch.float32 else "aten::addmm.out"

    def embed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, stride=16).flatten(2).transpose(1, 2)

    p = record(embed, *args, mode=mode).wrapper
    assert kinds(p) == "kck" and [i.op for i in of(p, CallExtern)] == [call]
