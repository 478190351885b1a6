"""Functions at their edges, forward and gradient, in sizes that fill vectors and sizes that leave a
tail.

Every element meets every special value. Where eager's vectors and what is left over beside them
differ, either is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import extremes

slow = pytest.mark.slow
INF, NAN = math.inf, math.nan
Fn = Callable[..., Tensor]
VALUES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    3.0,
    -3.0,
    6.0,
    20.0,
    -20.0,
    0.25,
    1e-3,
    INF,
    -INF,
    NAN,
)

ONE: Mapping[str, Fn] = {
    **{
        name: getattr(F, name)
        for name in (
            "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish "
            "relu relu6 selu silu softplus softshrink softsign tanhshrink"
        ).split()
    },
    **{
        name: getattr(torch, name)
        for name in (
            "abs sgn sign sqrt rsqrt log log1p reciprocal acos acosh asin atanh sigmoid exp square "
            "logit sinc angle"
        ).split()
    },
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "hardshrink of 0": lambda x: F.hardshrink(x, 0.0),
    "softshrink of 0": lambda x: F.softshrink(x, 0.0),
    "hardtanh of nothing": lambda x: F.hardtanh(x, 0.5, 0.5),
    "elu of 0": lambda x: F.elu(x, 0.0),
    "leaky_relu that falls": lambda x: F.leaky_relu(x, -0.5),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=0),
    "clamp crosswise": lambda x: x.clamp(1, -1),
    "logit within": lambda x: torch.logit(x, 1e-3),
    **{f"pow {p}": lambda x, p=p: x**p for p in (0, 0.5, 1, 2, 3, -0.5, -1, 1.5)},
    **{f"{b} to the power": lambda x, b=b: b**x for b in (0.0, 1.0, -2.0)},
    "xlogy": lambda x: torch.xlogy(x, 2.0) + torch.xlogy(0.0, x),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "l1": lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.full_like(x, 0.3), reduction="none"
    ),
    "kl_div": lambda x: F.kl_div(torch.ones_like(x), x, reduction="none"),
    "hinge": lambda x: F.hinge_embedding_loss(x, -torch.ones_like(x), reduction="none"),
    "margin_ranking": lambda x: F.margin_ranking_loss(
        x, x * 0, torch.ones_like(x), reduction="none"
    ),
}
TWO: Mapping[str, Fn] = {
    **{name: getattr(torch, name) for name in (
        "atan2 hypot maximum minimum fmax fmin copysign logaddexp pow xlogy div fmod remainder"
    ).split()},
    "clamp": lambda a, b: a.clamp(b, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "where": lambda a, b: torch.where(a > b, a, b),
    "distance": lambda a, b: (a - b).abs(),
    "logsumexp": lambda a, b: torch.stack([a, b]).logsumexp(0),
    "softmax": lambda a, b: torch.stack([a, b]).softmax(0)[0],
    "amax": lambda a, b: torch.stack([a, b]).amax(0),
}  # fmt: skip


def weights(y: Tensor) -> Tensor:
    """What a result's elements count."""
    return (torch.arange(y.numel(), dtype=torch.float64) % 3 + 0.5).view(y.shape).to(y.dtype)


def eager(fn: Fn, given: Sequence[Tensor], dy: Tensor | None = None) -> list[Tensor]:
    """The result and the gradients, if there are any."""
    given = [x.detach().clone().requires_grad_() for x in given]
    y = fn(*given)
    if not y.requires_grad:
        return [y]
    found = torch.autograd.grad(y, given, weights(y) if dy is None else dy, allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(found, given, strict=True)),
    ]


def compiled(
    fns: Mapping[str, Fn], n_given: int
) -> Callable[[Sequence[Tensor]], list[list[Tensor]]]:
    """One program of functions, each of operands of its own."""
    torch._dynamo.reset()

    def every(*xs: Tensor) -> list[Tensor]:
        return [fn(*xs[k * n_given :][:n_given]) for k, fn in enumerate(fns.values())]

    program = torch.compile(every, backend="plait", dynamic=False)

    def run(given: Sequence[Tensor]) -> list[list[Tensor]]:
        xs = [x.clone().requires_grad_() for _ in fns for x in given]
        ys = program(*xs)
        found = torch.autograd.grad(ys, xs, [weights(y) for y in ys], allow_unused=True)
        gradients = [
            torch.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)
        ]
        return [[y.detach(), *gradients[k * n_given :][:n_given]] for k, y in enumerate(ys)]

    return run


def right(fn: Fn, given: Sequence[Tensor], got: list[Tensor], of_elements: bool) -> list[str]:
    """What is wrong with results."""
    want = eager(fn, given)
    wide = eager(fn, [x.double() for x in given])
    wrong = []
    for what, (a, b, t) in enumerate(zip(got, want, wide, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        ok = extremes.right(a, b, None if t.dtype == b.dtype else t).flatten()
        for k in (~ok).nonzero().flatten().tolist():
            if of_elements:
                alone = [x.flatten()[k].repeat(n) for n in (1, 64) for x in given]
                each = (alone[: len(given)], alone[len(given) :])
                dy = weights(b).flatten()[k]
                if any(
                    extremes.near(a.flatten()[k], eager(fn, x, dy.repeat(len(x[0])))[what][0])
                    for x in each
                ):
                    continue
            place = [x.flatten()[k].item() for x in given] if of_elements else k
            wrong.append(
                f"{'gradient' if what else 'result'} at {place}: {a.flatten()[k]}, not "
                f"{b.flatten()[k]}"
            )
    return wrong


def check(fns: Mapping[str, Fn], inputs: Sequence[Sequence[Tensor]], of_elements: bool) -> None:
    run, wrong = compiled(fns, len(inputs[0])), []
    for given in inputs:
        for (name, fn), got in zip(fns.items(), run(given), strict=True):
            wrong += [f"{name}: {text}" for text in right(fn, given, got, of_elements)[:3]]
    assert not wrong, "\n".join(islice(dict.fromkeys(wrong), 20))


DTYPES = [
    pytest.param(d, marks=() if d == torch.float32 else slow)
    for d in (torch.float32, torch.float64, torch.bfloat16)
]
SIZES = [pytest.param(n, marks=() if n in (1, 33) else slow) for n in (1, 7, 16, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_one_operand(n: int, dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES, dtype=torch.float64).to(dtype)
    check(ONE, [(x.roll(k).repeat(2)[:n].clone(),) for k in range(len(x))], True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_two_operands(n: int, dtype: torch.dtype) -> None:
    x = torch.tensor((0.0, -0.0, 1.0, -1.0, 0.5, 3.0, INF, -INF, NAN), dtype=torch.float64).to(
        dtype
    )
    a, b = (t.flatten() for t in torch.meshgrid(x, x, indexing="ij"))
    step = max(1, min(n, 5))
    check(
        TWO, [(a.roll(k)[:n].clone(), b.roll(k)[:n].clone()) for k in range(0, len(a), step)], True
    )
