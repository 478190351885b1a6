"""plait's operators against PyTorch's: cases with every kind of size, stride and type, and their
check. Run on the CPU (test_ops.py), by Triton's interpreter (operators.py) and on a GPU
(test_gpu_operators.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import plait.ops as ops

HALF, F32, F64 = torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 1e-9}


@dataclass(frozen=True)
class Case:
    """op(*args, **kwargs) is compared with eager, which computes in float64. args: tensors, or
    makers of some."""

    op: Callable[..., Any]
    eager: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [
            f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, Tensor) else str(a)
            for a in self.args
        ]
        said += [
            f"{k}={v.tolist() if isinstance(v, Tensor) else v}" for k, v in self.kwargs.items()
        ]
        return f"{self.op.__name__} {' '.join(said)}"


_generator = torch.Generator().manual_seed(7)


def r(*shape: int, dtype: torch.dtype = F32, grad: bool = True) -> Tensor:
    """Random numbers."""
    x = torch.randn(shape, generator=_generator, dtype=F64).to(dtype)
    return x.requires_grad_() if grad else x


def strided(x: Tensor, *order: int) -> Tensor:
    """Equal values with gaps between elements and dimensions in another order in memory."""
    x = x.detach()
    memory = x.new_zeros([2 * x.shape[d] for d in order])
    view = memory[tuple(slice(0, None, 2) for _ in order)].permute(
        [order.index(d) for d in range(x.ndim)]
    )
    return view.copy_(x).requires_grad_(x.is_floating_point())


def moved(a: Any, device: str) -> Any:
    """A tensor's whole memory on a device, and the tensor there."""
    if not isinstance(a, Tensor):
        return a
    n = a.untyped_storage().nbytes() // a.element_size()
    memory = a.detach().as_strided((n,), (1,), 0).to(device)
    return memory.as_strided(a.shape, a.stride(), a.storage_offset()).requires_grad_(
        a.requires_grad
    )


def labels(n_classes: int, *shape: int) -> Tensor:
    return torch.randint(n_classes, shape, generator=_generator)


def eager_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, offsets: Tensor | None = None, offset: int = 0,
    interleaved: bool = False, inverse: bool = False,
) -> Tensor:  # fmt: skip
    """By complex numbers."""
    at = (
        torch.arange(x.shape[1], device=x.device)[None]
        + offset
        + (0 if offsets is None else offsets[:, None])
    )
    wide = torch.promote_types(x.dtype, F32)
    turn = torch.complex(cos.to(wide), sin.to(wide))[at][:, :, None]
    turn = turn.conj() if inverse else turn
    half = cos.shape[1]
    some, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    one, two = (some[..., ::2], some[..., 1::2]) if interleaved else some.chunk(2, -1)
    turned = torch.complex(one, two) * turn
    both = [turned.real, turned.imag]
    return torch.cat(
        [torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest], -1
    ).to(x.dtype)


def eager_add_rms_norm(
    x: Tensor, residual: Tensor, shape: Sequence[int], *args: Any
) -> tuple[Tensor, Tensor]:
    return F.rms_norm(x + residual, shape, *args), x + residual


def eager_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    how = ("none", "mean", "sum")[reduction]
    return F.cross_entropy(
        x, target, weight, reduction=how, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def add_cases() -> list[Case]:
    i = torch.arange(24)
    pairs = [
        (r(3, 5), r(3, 5)), (r(3, 5), r(5)), (r(3, 1), r(4)), (r(4, 1, 6), r(3, 1)), (r(), r(2, 3)),
        (r(), r()), (r(0, 3), r(1, 3)), (r(2, 3, 4, 5).transpose(1, 3), r(5, 4, 3)),
        (strided(r(4, 6, 5), 2, 0, 1), r(4, 6, 5)), (r(1500), r(1500)),
        (r(2, 2, 2, 2, 2, 2, 2, 2), strided(r(2, 2, 2, 2, 2, 2, 2, 2), 5, 1, 0, 7, 2, 6, 3, 4)),
        (r(3, 5, dtype=HALF), r(5)), (r(3, 5, dtype=torch.float16), r(3, 5, dtype=torch.float16)),
        (r(3, 5, dtype=F64), r(5)), (r(24), i), (r(24, dtype=HALF), i), (r(3, dtype=HALF), 2.3),
        (r(3), 2), (i, 3), (i, i.to(torch.int32)), (i.to(torch.uint8), i.to(torch.int8)),
        (i > 3, i > 5), (i > 3, i), (i, 1.5), (r(7, dtype=F64)[::3], r(3).expand(3)),
        (r(40, 3).t(), r(40)),
    ]  # fmt: skip
    found = [Case(ops.add, torch.add, p) for p in pairs]
    found += [
        Case(ops.add, torch.add, p, {"alpha": 2})
        for p in (pairs[1], (i, i.to(torch.int16)), pairs[12])
    ]
    found += [
        Case(ops.add, torch.add, p, {"alpha": -0.3})
        for p in (pairs[1], pairs[11], pairs[13], pairs[16])
    ]
    return found


def softmax_cases() -> list[Case]:
    masked = r(4, 9)
    with torch.no_grad():
        masked[1, :] = masked[2, :4] = -torch.inf
    found = [Case(ops.softmax, torch.softmax, (r(*shape), dim)) for shape, dim in (
        ((3, 5), 1), ((3, 5), 0), ((2, 3, 4), 1), ((2, 3, 4), -3), ((3, 5, 1), 1), ((300, 2), 1),
        ((), 0), ((0, 3), 1), ((3, 0), 1), ((1, 1), 0), ((2, 1000), 1), ((2, 40000), 1),
        ((1, 600, 33), 1),
    )]  # fmt: skip
    found += [Case(ops.softmax, torch.softmax, (x, 1)) for x in (
        strided(r(3, 5), 0, 1), strided(r(3, 5), 1, 0), r(3, 5).t(), r(4, 6, dtype=HALF),
        r(4, 6, dtype=torch.float16), r(4, 6, dtype=F64), r(6, 8)[:, 2:7], masked,
        torch.cat([masked.detach()] * 4000, 1).requires_grad_(),
    )]  # fmt: skip
    found += [Case(ops.softmax, torch.softmax, (x, 1), {"dtype": d}) for x, d in (
        (r(4, 6, dtype=HALF), F32), (r(4, 6), F64), (r(4, 6), HALF),
        (torch.arange(6).view(2, 3), F32),
    )]  # fmt: skip
    return found


def norm_cases() -> list[Case]:
    found = []
    for x, shape, weight in (
        (r(3, 8), [8], r(8)), (r(3, 5), [5], None), (r(2, 3, 4), [3, 4], r(3, 4)),
        (r(300, 6), [6], r(6)), (r(2, 1000), [1000], r(1000)), (r(3, 20000), [20000], r(20000)),
        (r(3, 8, dtype=HALF), [8], r(8, dtype=HALF)), (r(3, 8, dtype=torch.float16), [8], r(8)),
        (r(3, 8, dtype=F64), [8], r(8, dtype=F64)), (strided(r(3, 4, 8), 0, 1, 2), [8], r(8)),
        (r(3, 4, 12)[..., 2:10], [8], strided(r(8), 0)), (r(4, 3, 8).transpose(0, 1), [8], None),
        (r(8), [8], r(8)), (r(0, 8), [8], r(8)),
    ):  # fmt: skip
        found.append(Case(ops.rms_norm, F.rms_norm, (x, shape, weight, 1e-5)))
        if len(shape) == 1:
            other = r(*x.shape, dtype=F32 if x.dtype == HALF else x.dtype)
            found.append(Case(ops.add_rms_norm, eager_add_rms_norm, (x, other, shape, weight)))
    return found


def rotary_cases() -> list[Case]:
    c, s = r(12, 4, grad=False), r(12, 4, grad=False)
    xs = [
        r(2, 5, 3, 8),
        r(2, 5, 3, 13),
        r(1, 1, 40, 8, dtype=HALF),
        r(2, 3, 5, 8).transpose(1, 2),
        r(2, 0, 3, 8),
        strided(r(2, 5, 3, 8), 3, 0, 2, 1),
    ]
    found = [
        Case(ops.rotary, eager_rotary, (x, c, s), {"interleaved": i})
        for x, i in product(xs, (False, True))
    ]
    found += [
        Case(ops.rotary, eager_rotary, (xs[0], c, s), {"offset": 3, "inverse": True}),
        Case(ops.rotary, eager_rotary, (xs[1], c, s), {"offsets": torch.tensor([7, 2])}),
        Case(
            ops.rotary,
            eager_rotary,
            (xs[0], c, s),
            {"offsets": torch.tensor([3, 0]).int(), "offset": 2},
        ),
        Case(
            ops.rotary,
            eager_rotary,
            (r(1, 4, 2, 6, dtype=F64), c[:, :3].double(), s[:, :3].double()),
        ),
        Case(
            ops.rotary,
            eager_rotary,
            (r(1, 4, 2, 6), c[:, :3].clone().requires_grad_(), s[:, :3].clone()),
        ),
    ]
    return found


def loss_cases() -> list[Case]:
    found = []
    t = labels(5, 7)
    t[2] = -100
    weight = torch.rand(5, generator=_generator)
    x = r(7, 5)
    for how, w, smoothing in product((0, 1, 2), (None, weight), (0.0, 0.1)):
        found.append(Case(ops.cross_entropy, eager_cross_entropy, (x, t, w, how, -100, smoothing)))
    found += [Case(ops.cross_entropy, eager_cross_entropy, a) for a in (
        (r(5), t[0]), (r(3, 5, 2, 4), labels(5, 3, 2, 4)),
        (r(3, 5, 2), labels(5, 3, 2), weight, 0, 1, 0.2), (r(4, 5, dtype=HALF), t[3:]),
        (r(4, 5, dtype=torch.float16), t[3:]), (r(4, 5, dtype=F64), t[3:], weight.double()),
        (r(4, 9000), labels(9000, 4), None, 1, -100, 0.1), (r(600, 3), labels(3, 600), None, 1, 2),
        (r(5, 4).t(), t[3:]), (strided(r(4, 5), 0, 1), t[3:]), (r(0, 5), t[:0]),
        (r(0, 5), t[:0], None, 2), (r(4, 5), torch.rand(4, 5, generator=_generator)),
        (r(2, 5), torch.tensor([-100, -100]), None, 2), (r(4, 8)[:, 1:6], t[3:].to(torch.uint8)),
    )]  # fmt: skip
    return found


def matmul_cases() -> list[Case]:
    pairs = [
        (r(3), r(3)), (r(3), r(3, 4)), (r(2, 3), r(3)), (r(17, 33), r(33, 5)),
        (r(1, 70), r(70, 40)), (r(5, 2, 3), r(3, 4)), (r(2, 3), r(5, 3, 4)),
        (r(5, 1, 2, 3), r(4, 3, 2)), (r(3), r(5, 3, 4)), (r(5, 2, 3), r(3)),
        (r(9, 7).t(), r(8, 9).t()), (r(4, 5, dtype=HALF), r(5, 6, dtype=HALF)),
        (r(4, 5, dtype=torch.float16), r(5, 6, dtype=torch.float16)),
        (r(4, 5, dtype=F64), r(5, 6, dtype=F64)), (r(2, 0), r(0, 3)), (r(0, 2), r(2, 3)),
        (r(130, 20), r(20, 150)), (strided(r(4, 5), 0, 1), r(5, 3)), (r(9, 20), r(20, 28)),
        (r(20, 12).t(), r(28, 20).t()), (r(2, 9, 40, dtype=HALF), r(2, 40, 24, dtype=HALF)),
        # With vectors.
        (r(1, 70), r(40, 70).t()), (r(17, 33), r(33, 1)),
        (r(3, 9, 40, dtype=HALF), r(3, 40, 1, dtype=HALF)), (r(2, 1, 20), r(2, 300, 20).mT),
        (r(50, 24, dtype=torch.float16)[:, 8:], r(24, 2, dtype=torch.float16)[8:, 1]),
        (r(7, 41, dtype=F64), r(41, dtype=F64)), (r(1, 9, 640), r(1, 640, 1)),
        (r(1, 300), r(300, 200)), (r(41, 70, dtype=F64).t(), r(41, dtype=F64)),
        (r(3, 1, 50), r(3, 50, 44)), (r(40, 3).t(), r(40)),
        (r(1, 20, dtype=F64), r(20, 9, dtype=F64)),
        # With long sums, which programs share.
        (r(5, 1100), r(1100, 40)), (r(2100), r(2100)),
        (r(3, 2200, dtype=HALF), r(60, 2200, dtype=HALF).t()),
        (r(60, 2049, dtype=torch.float16), r(2049, 9, dtype=torch.float16)),
        (r(2, 3, 1030), r(2, 1030, 5)), (r(1200, 20, dtype=F64).t(), r(1200, 6, dtype=F64)),
        # By tensor maps.
        (r(130, 72, dtype=HALF), r(72, 264, dtype=HALF)),
        (r(72, 136, dtype=HALF).t(), r(40, 72, dtype=HALF).t()),
        (r(2, 40, 24, dtype=HALF), r(2, 24, 48, dtype=HALF)),
        (r(3, 40, 24, dtype=HALF), r(1, 24, 48, dtype=HALF)),
        (r(2, 24, 40, dtype=torch.float16).mT, r(2, 48, 24, dtype=torch.float16).mT),
        (r(33, 8, dtype=HALF), r(8, 33, dtype=HALF)),
        (r(40, 80, dtype=HALF)[:, 8:40], r(32, 40, dtype=HALF)),
    ]  # fmt: skip
    return [Case(ops.matmul, torch.matmul, p) for p in pairs]


CASES = (
    add_cases() + softmax_cases() + norm_cases() + rotary_cases() + loss_cases() + matmul_cases()
)


def _map(values: Any, fn: Callable[[Any], Any]) -> Any:
    return (
        type(values)(map(fn, values))
        if isinstance(values, tuple)
        else {k: fn(v) for k, v in values.items()}
    )


Gradients = Callable[[list[Tensor], list[Tensor], list[Tensor]], Sequence[Tensor | None]]


def _run(
    fn: Any, args: Any, kwargs: Any, weights: list[Tensor], gradients: Gradients
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and gradients of what wants some. weights: of the results in what is
    differentiated."""
    out = fn(*args, **kwargs)
    outs = [out] if isinstance(out, Tensor) else list(out)
    wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
    if not wanted:
        return outs, []
    return outs, list(gradients(outs, wanted, weights))


def check(
    case: Case, place: Callable[[Any], Any] = lambda a: a,
    back: Callable[[Tensor], Tensor] = lambda t: t, gradients: Gradients = torch.autograd.grad,
) -> None:  # fmt: skip
    """Results and gradients are as near to float64's as the type allows; types, shapes and strides
    are eager's.

    place, back: of a tensor, to the device and from it. gradients: in the place of
    torch.autograd.grad."""
    of_type = case.eager(
        *_map(case.args, lambda a: a.detach() if isinstance(a, Tensor) else a), **case.kwargs
    )
    of_type = [of_type] if isinstance(of_type, Tensor) else list(of_type)

    def precise(a: Any) -> Any:
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return F64 if a in (HALF, F32) and isinstance(a, torch.dtype) else a
        return a.detach().double().requires_grad_(a.requires_grad)

    weights = [torch.randn(o.shape, generator=_generator, dtype=F64) for o in of_type]
    floating = of_type[0].is_floating_point()
    args, kwargs = _map(case.args, precise), _map(case.kwargs, precise)
    want, want_grads = _run(case.eager, args, kwargs, weights, torch.autograd.grad)
    typed = [place(w.to(o.dtype)) for w, o in zip(weights, of_type, strict=True)]
    got, grads = _run(case.op, _map(case.args, place), _map(case.kwargs, place), typed, gradients)
    assert len(got) == len(want) and len(grads) == len(want_grads)
    for g, w, t in zip(got, want, of_type, strict=True):
        assert g.dtype == t.dtype and g.shape == t.shape
        if floating:
            tolerance = TOLERANCE[t.dtype]
            torch.testing.assert_close(
                back(g.detach()).double(),
                w.detach().double(),
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
            )
        else:
            assert torch.equal(back(g), t)
    inputs = [
        a for a in (*case.args, *case.kwargs.values()) if isinstance(a, Tensor) and a.requires_grad
    ]
    for g, w, x in zip(grads, want_grads, inputs, strict=True):
        assert g is not None and w is not None and g.dtype == x.dtype and g.shape == x.shape
        tolerance = 4 * max(TOLERANCE[x.dtype], TOLERANCE[of_type[0].dtype])
        torch.testing.assert_close(
            back(g).double(),
            w,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(w.abs().max()) if w.numel() else 1.0),
            equal_nan=True,
        )
