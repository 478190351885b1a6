"""Kernels with everything that calls of them may have: floats that vary, enumerations, pointers
that are swapped, branches, several configurations, functions of every kind. Each program takes one
tensor; see `user_kernels.py`."""

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")  # a kernel has an argument of this name
BLOCK = 64


def programs(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


@triton.jit
def affine_kernel(x, out, n, scale, more, flag, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n) * scale + more
    if flag:
        v = v * 2
    tl.store(out + at, v, mask=at < n)


def affine(x: Tensor, scale: Any, more: Any, flag: Any = False) -> Tensor:
    out = torch.empty_like(x)
    affine_kernel[programs(x)](x, out, x.numel(), scale, more, flag, BLOCK=BLOCK)
    return out


def floats(x: Tensor) -> Tensor:
    n = x.numel()
    return affine(x, 1 / math.sqrt(n), x[0].item() * 0.5, n % 32 == 0) + affine(x, n * 0.5, 1)


def floats_plain(x: Tensor) -> Tensor:
    n = x.numel()
    return (x / math.sqrt(n) + x[0] * 0.5) * (2 if n % 32 == 0 else 1) + x * (n * 0.5) + 1


class Mode(enum.IntEnum):
    ADD = 1
    MUL = 2


class Kind(enum.Enum):
    PLAIN = "a"
    OTHER = (1, 2)


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"
    BLUE = "blue"


class Pair(NamedTuple):
    first: Any
    second: Any = 3


OTHER = tl.constexpr(Kind.OTHER)


@triton.jit
def pair(v):
    return Pair(v, v * 2)


@triton.jit
def word_kernel(
    x, out, T, MODE: tl.constexpr, KIND: tl.constexpr, COLOUR: tl.constexpr = Colour.RED,
    BLOCK: tl.constexpr = 64,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < T)
    p = pair(v)
    if MODE == 2:
        v = p.first * p.second
    if KIND == OTHER:
        v += 1
    if COLOUR == "red":
        v += 2
    tl.store(out + at, v, mask=at < T)


def words(x: Tensor) -> Tensor:
    """The arguments that are left out have defaults: x is read, so nothing is copied."""
    y, outs = x + 1, [torch.empty_like(x) for _ in range(2)]
    word_kernel[programs(x)](y, outs[0], x.numel(), Mode.MUL, Kind.OTHER)
    word_kernel[programs(x)](y, outs[1], x.numel(), Mode.ADD, Kind.PLAIN, Colour.BLUE)
    return outs[0] + outs[1] + y


@triton.jit
def moved(p, by):
    return p + by


@triton.jit
def swap_kernel(a, b, c, n, rounds: tl.constexpr, BLOCK: tl.constexpr):
    """Reads c; writes a and b in turn."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        v = tl.load(moved(a, at), mask=at < n) + tl.load(moved(c, at), mask=at < n)
        tl.store(moved(b, at), v, mask=at < n)
        a, b = b, a


@triton.jit
def branch_kernel(a, b, c, n, which, BLOCK: tl.constexpr):
    """Writes a or b, never c."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = a
    if which == 3:
        tl.store(a + at, tl.load(c + at, mask=at < n), mask=at < n)
        return
    if which == 4:
        p = b
    tl.store(p + at, -1.0, mask=at < n)


@triton.jit
def summed_descriptor_kernel(a, b, n, c=None, BLOCK: tl.constexpr = 64):
    p = tl.make_tensor_descriptor(a, [n], [1], [BLOCK])
    q = tl.make_tensor_descriptor(b, [n], [1], [BLOCK])
    q.atomic_add([tl.program_id(0) * BLOCK], p.load([tl.program_id(0) * BLOCK]))


@triton.jit
def table_kernel(table, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    p = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(p + at, at.to(tl.float32), mask=at < n)


@triton.jit
def bad(v):
    return v.no_such_thing


@triton.jit
def refused_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, bad(tl.load(x + at, mask=at < n)), mask=at < n)


def writes(x: Tensor) -> tuple[Tensor, ...]:
    a, b, c, d = x + 1, x * 2, x.sin(), x.cos()
    swap_kernel[programs(x)](a, b, c, x.numel(), 2, BLOCK=BLOCK)
    branch_kernel[programs(x)](c, d, a, x.numel(), 4, BLOCK=BLOCK)
    return a, b, c + a, d


def writes_plain(x: Tensor) -> tuple[Tensor, ...]:
    a, c = x + 1, x.sin()
    b = a + c
    a = b + c
    return a, b, c + a, torch.full_like(x, -1)


@triton.jit
def rounds_kernel(x, out, n, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(rounds):
        tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def shared(x: Tensor) -> tuple[Tensor, ...]:
    """One tensor as two arguments, where each round reads what the one before wrote; equal tensors
    as two arguments, which are memory of their own."""
    y, z = x + 1, x * 2
    rounds_kernel[programs(x)](y, y, x.numel(), 3, BLOCK=BLOCK)
    rounds_kernel[programs(x)](x, x, x.numel(), 2, BLOCK=BLOCK)
    rounds_kernel[programs(x)](z.view(x.shape), z, x.numel(), 2, BLOCK=BLOCK)
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    rounds_kernel[programs(x)](a, b, x.numel(), 1, BLOCK=BLOCK)
    rounds_kernel[programs(x)](x, a, x.numel(), 1, BLOCK=BLOCK)
    return y, z, a, b, x * 1


def shared_plain(x: Tensor) -> tuple[Tensor, ...]:
    made = (x + 1) * 8, x * 8, x * 8, torch.zeros_like(x), x * 4
    x.mul_(4)
    return made


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Parts of what is new (the last one first, or once a part has numbers), of what was computed
    (which is read before, or afterwards), and of an input."""
    n = x.numel()
    late = torch.empty(3, n, device=x.device)
    for k in (2, 0, 1):
        scale_into(x, late[k], k + 6.0)
    new = torch.empty(n + 5, device=x.device)
    new[n:] = 7
    scale_into(x, new[:n], 2.0)
    rows = torch.stack([x, x + 1, x + 2])
    before = rows.sum()
    scale_into(rows[1], rows[1], 3.0)
    kept = x.sin().repeat(2).view(2, -1)
    seen = kept[0]
    scale_into(kept[0], kept[0], 5.0)
    some = x[:4]
    scale_into(some, some, 4.0)
    return new, rows * 2, before, kept, seen + 1, some, late


def scale_into(x: Tensor, out: Tensor, by: float) -> None:
    scaled_kernel_into[programs(x)](x, out, x.numel(), by, BLOCK=BLOCK)


@triton.jit
def scaled_kernel_into(x, out, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * by, mask=at < n)


def parts_plain(x: Tensor) -> tuple[Tensor, ...]:
    new = torch.cat([x * 2, x.new_full((5,), 7)])
    rows = torch.stack([x, (x + 1) * 3, x + 2])
    before = torch.stack([x, x + 1, x + 2]).sum()
    kept = torch.stack([x.sin() * 5, x.sin()])
    late = torch.stack([x * 6, x * 7, x * 8])
    x[:4] *= 4
    return new, rows * 2, before, kept, kept[0] + 1, x[:4], late


def branches(x: Tensor) -> Tensor:
    """Kernels that differ in a number only, at the same place of two graphs."""
    y = affine(x, 3.0, 0)
    made: Tensor = torch.cond(
        y.sum() > 0, lambda v: affine(v, 2.0, 1), lambda v: affine(v[:5], 5.0, 2).sum() + v, (y,)
    )
    return made


def branches_plain(x: Tensor) -> Tensor:
    y = x * 3
    return y * 2 + 1 if y.sum() > 0 else (y[:5] * 5 + 2).sum() + y


def _some(configs: list[Any], named: Any, **kwargs: Any) -> list[Any]:
    return [c for c in configs if c.kwargs["B"] > 16]


_CONFIGS = [
    triton.Config({"B": 16}),
    triton.Config({"B": 32}, num_warps=2),
    triton.Config({"B": 64}),
]


@triton.autotune(configs=_CONFIGS, key=["n"], prune_configs_by={"early_config_prune": _some})
@triton.jit
def pruned_kernel(x, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.autotune(configs=_CONFIGS, key=["n"], reset_to_zero=["out"], restore_value=["x"])
@triton.heuristics({"TWICE": lambda given: given["B"] >= 16})
@triton.jit
def summed_kernel(x, out, n, B: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at, mask=at < n)
    if TWICE:
        v = v * 2
    tl.store(x + at, v, mask=at < n)
    tl.atomic_add(out + at % 8, v, mask=at < n)


def tuned(x: Tensor) -> tuple[Tensor, ...]:
    y, sums = x[x > 0], x.new_zeros(8)
    positive = torch.empty_like(y)
    pruned_kernel[lambda meta: (triton.cdiv(y.numel(), meta["B"]),)](y, positive, y.numel())
    out = x + 1
    summed_kernel[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](out, sums, x.numel())
    return positive, out, sums


def tuned_plain(x: Tensor) -> tuple[Tensor, ...]:
    out = 2 * (x + 1)
    return 2 * x[x > 0], out, out.view(-1, 8).sum(0)


@triton.jit(noinline=True)
def apart(a, b):
    return a * b + 2


@triton.constexpr_function
def product(a, b):
    return a * b


def scaled_by(k: int) -> Any:
    number = tl.constexpr(k)

    @triton.jit
    def scaled_kernel(
        out: "*fp32", x: tl.const, n: "i64", BLOCK: tl.constexpr, num_warps: tl.constexpr  # noqa: F722, F821
    ):  # fmt: skip
        K: tl.constexpr = product(BLOCK, num_warps)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < n) * number + apart(n, 2) + K
        tl.store(out + at, v, mask=at < n)

    return scaled_kernel


twice_kernel, thrice_kernel = scaled_by(2), scaled_by(3)


def texts(x: Tensor) -> Tensor:
    a, b = torch.empty_like(x), torch.empty_like(x)
    twice_kernel[programs(x)](a, x, x.numel(), BLOCK=BLOCK, num_warps=2)
    thrice_kernel[programs(x)](b, x, x.numel(), BLOCK=BLOCK, num_warps=8)
    return a - b


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return affine(x, 3.0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return affine(grad.contiguous(), 3.0, 0) * (x == x)


def checkpointed(x: Tensor) -> Tensor:
    """The kernel runs again in the backward pass."""
    made: Tensor = checkpoint(lambda v: Tripled.apply(v.sin()).exp().sin(), x, use_reentrant=False)
    return made


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "floats": (floats, floats_plain),
    "words": (words, lambda x: 2 * (x + 1) ** 2 + 3 + 2 * (x + 1)),
    "writes": (writes, writes_plain),
    "shared": (shared, shared_plain),
    "parts": (parts, parts_plain),
    "branches": (branches, branches_plain),
    "tuned": (tuned, tuned_plain),
    "texts": (texts, lambda x: x * 2 + 2 * BLOCK - (x * 3 + 8 * BLOCK)),
    "checkpointed": (checkpointed, lambda x: (x.sin() * 3 + 1).exp().sin()),
}
TRAINED = ("checkpointed",)
