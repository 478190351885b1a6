"""Programs with Triton kernels of the user, in every way that one can be called, and what checks
them.

`python -m tests.user_triton` runs them on the CPU, where PyTorch would find no driver for Triton:
Dynamo is told that there is one, and in the place of a launch Triton's interpreter runs the kernel.
`test_gpu_user_triton.py` runs them on a GPU as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from plait.tools.explain import explain

WRAPPERS = ("native", "python", "cpp", "fx")


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def scale_kernel(x, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) * by, mask=at < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def square_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(out + at, v * v, mask=at < n)


def added(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out


def squared(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    square_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out


@triton_op("plait_user_triton::mysum", mutates_args={})
def mysum(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out


mysum.register_autograd(lambda ctx, grad: (mysum(grad, torch.zeros_like(grad)), grad * 1))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return added(x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return added(grad, grad)


def called(x: Tensor, y: Tensor) -> Tensor:
    return added(x * 2, y).relu() + 1


def autotuned(x: Tensor, y: Tensor) -> Tensor:
    return squared(x + y) * 2


def operator(x: Tensor, y: Tensor) -> Tensor:
    return mysum(x.sin(), y) + x


def in_place(x: Tensor, y: Tensor) -> Tensor:
    """Writes to an input, and to an intermediate that has been read."""
    z = x + y
    w = z * 3
    for t in (z, x):
        scale_kernel[(triton.cdiv(t.numel(), 16),)](t, t.numel(), 0.5, BLOCK=16)
    return z + w + x


def function(x: Tensor, y: Tensor) -> Tensor:
    return Doubled.apply(x * y).exp()


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "called": (called, lambda x, y: (x * 2 + y).relu() + 1),
    "autotuned": (autotuned, lambda x, y: (x + y) ** 2 * 2),
    "operator": (operator, lambda x, y: x.sin() + y + x),
    "in_place": (in_place, lambda x, y: (x + y) * 3.5 + x.mul_(0.5)),
    "function": (function, lambda x, y: (2 * x * y).exp()),
}
"""A program with kernels, and the same without."""
TRAINED = ("operator", "function")


def check(name: str, wrapper: str, device: str, dynamic: bool = False) -> None:
    """The compiled program does what the one without kernels does, its inputs included."""
    torch._dynamo.reset()
    fn, plain = CASES[name]
    compiled = torch.compile(
        fn,
        backend="plait",
        fullgraph=True,
        dynamic=dynamic or None,
        options={"wrapper": wrapper, "strict": True},
    )
    for n in (40, 40, 71):
        x, y = torch.randn(n, device=device), torch.randn(n, device=device)
        mine, theirs = (x.clone(), y.clone()), (x.clone(), y.clone())
        if name in TRAINED:
            for t in (*mine, *theirs):
                t.requires_grad_()
        got, want = compiled(*mine), plain(*theirs)
        torch.testing.assert_close(got, want)
        if name in TRAINED:
            got.sum().backward()
            want.sum().backward()
            mine, theirs = (
                tuple(t.grad for t in ts if t.grad is not None) for ts in (mine, theirs)
            )
            assert len(mine) == 2
        torch.testing.assert_close(mine, theirs)


def check_told(device: str, launched: bool) -> None:
    """explain shows the call, which runs as Python where no GPU launches it."""
    torch._dynamo.reset()
    x = torch.randn(40, device=device)
    report = explain(called, x, x, quiet=True)
    if launched:
        assert not report.ladder, report.ladder
        return
    (step,) = report.ladder
    assert (step.rung, step.what) == ("python", "higher_order::triton_kernel_wrapper_functional"), (
        step
    )
    assert step.where.startswith("user_triton.py:"), step


def interpreted() -> None:
    """Kernels are run by Triton's interpreter, and Dynamo thinks that a device can run them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {k: v for k, v in kwargs.items() if k in self.arg_names}
        InterpretedFunction(self.fn)[grid](*args, **named)

    def tuned(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for config in self.configs:
            self.fn.run(*args, grid=grid, warmup=warmup, **kwargs, **config.kwargs)

    # What a kernel writes is read off what Triton makes of it for a GPU.
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_benchmarker=lambda: None,
    )
    triton.runtime.driver.set_active(gpu)
    JITFunction.run, Autotuner.run = run, tuned
    torch.utils._triton.has_triton = lambda: True


if __name__ == "__main__":
    interpreted()
    for wrapper in sys.argv[1:] or WRAPPERS:
        for name in CASES:
            check(name, wrapper, "cpu")
            print("passed", name, wrapper, flush=True)
    check("called", "native", "cpu", dynamic=True)
    check("function", "native", "cpu", dynamic=True)
    check_told("cpu", launched=False)
    print("passed all")
