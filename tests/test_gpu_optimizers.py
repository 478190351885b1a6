"""Steps of optimizers on a GPU: parameters of mixed size, whose updates share launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.config import WRAPPERS

SIZES = [(300, 1000), (0, 4)] + [(3 + 5 * k, 16) if k % 3 else (2 + 7 * k,) for k in range(58)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"foreach": True, "capturable": True}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "amsgrad": ("Adam", {"foreach": True, "capturable": True, "amsgrad": True}),
    "SGD": ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "RMSprop": ("RMSprop", {"foreach": True, "capturable": True, "centered": True}),
    "Adafactor": ("Adafactor", {"foreach": True}),
}


def parameters(
    dtype: torch.dtype = torch.float32, count: int = len(SIZES), empty: bool = True
) -> list[nn.Parameter]:
    """With gradients; one of them begins in the middle of a vector."""
    g = torch.Generator().manual_seed(0)
    sizes = [s for s in SIZES[:count] if empty or 0 not in s]
    made = [nn.Parameter(torch.randn(s, generator=g).to("cuda", dtype)) for s in sizes]
    made[3] = nn.Parameter(torch.randn(129, generator=g).to("cuda", dtype)[1:].view(8, 16))
    for p in made:
        p.grad = torch.randn(p.shape, generator=g).to("cuda", dtype)
    return made


def agree(kind: str, compile_it: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
    name, options = KINDS[kind]
    seen = []
    for run in (lambda f: f, compile_it):
        # Eager's Adafactor divides by the number of elements.
        given = parameters(dtype, 24, name != "Adafactor")
        optimizer = getattr(torch.optim, name)(given, lr=0.01, **options)
        step = run(optimizer.step)
        for _ in range(3):
            step()
        state = [v for s in optimizer.state.values() for v in s.values()]
        seen.append((given, state))
    near = {
        "rtol": max(2 * torch.finfo(dtype).eps, 1e-5),
        "atol": max(torch.finfo(dtype).eps, 1e-6),
    }
    # Dynamo moves counters of steps to the parameters' device.
    torch.testing.assert_close(seen[1], seen[0], **near, check_device=False)


@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind: str) -> None:
    agree(kind, lambda f: torch.compile(f, backend="plait"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_operator(dtype: torch.dtype) -> None:
    """PyTorch's own operator for a step, called in what is compiled: it is written out."""

    def step(*lists: Any) -> None:
        torch._fused_adamw_(
            *lists, lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    seen = list[Any]()
    for run in (lambda f: f, lambda f: torch.compile(f, backend="plait")):
        params = parameters(dtype, 12)
        means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
        counts = [torch.ones((), device="cuda") for _ in params]
        given: Any = (
            [p.detach() for p in params],
            [p.grad for p in params],
            means,
            squares,
            [],
            counts,
        )
        call = run(step)
        call(*given)
        call(*given)
        seen.append(given)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(seen[1], seen[0], rtol=max(4 * eps, 1e-5), atol=max(eps, 1e-6))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_targets(wrapper: str) -> None:
    agree("AdamW", lambda f: torch.compile(f, backend="plait", options={"wrapper": wrapper}))


def test_half_parameters() -> None:
    agree("SGD", lambda f: torch.compile(f, backend="plait"), torch.bfloat16)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode: str) -> None:
    agree("AdamW", lambda f: torch.compile(f, backend="plait", mode=mode))


def test_launches() -> None:
    """A launch for each kind of length and some tens of parameters, and one for all counters; of
    the empty parameter there are three, of no programs."""
    optimizer = torch.optim.AdamW(parameters(), lr=0.01, foreach=True, capturable=True)
    optimizer.step()
    told = plait.explain(optimizer.step, quiet=True)
    assert told.kernels <= 6 and not told.fallbacks, told
