"""Kernels that people write, in the style of Triton's tutorials, each beside what it computes in
PyTorch: with grids of several dimensions, helpers and constants of the module, defaults, strings,
types, reductions, atomics, integers and floats among the arguments.

`user_triton_as_gpu.py` runs them without a GPU, `test_gpu_user_triton.py` on one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from plait.tools.explain import explain
from tests import user_kernels_odd

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SIGN = tl.constexpr(-1)


@triton.jit
def squared_sum(x):
    return tl.sum(x * x, 0)


@triton.jit
def rms_norm_kernel(x, weight, out, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(squared_sum(v) / n + eps)
    w = tl.load(weight + at, mask=at < n, other=0.0)
    tl.store(out + row * stride + at, v * rstd * w, mask=at < n)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, n = x.shape
    rms_norm_kernel[(rows,)](
        x, weight, out, x.stride(0), n, 1e-5, BLOCK=triton.next_power_of_2(n), num_warps=2
    )
    return out


@triton.jit
def rotary_kernel(
    q, cos, sin, s_batch, s_row, s_head, s_table, half: tl.constexpr, INVERSE: tl.constexpr = False
):
    """One head of one position; \"\"\" and ''' in its text."""
    batch, row, head = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    at = tl.arange(0, half)
    first = q + batch * s_batch + row * s_row + head * s_head + at
    c, s = tl.load(cos + row * s_table + at), tl.load(sin + row * s_table + at)
    if INVERSE:
        s = SIGN * s
    a, b = tl.load(first), tl.load(first + half)
    tl.store(first, a * c - b * s)
    tl.store(first + half, b * c + a * s)


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, rows, heads, width = q.shape
    q = q + 1
    rotary_kernel[(heads, rows, batch)](
        q, cos, sin, q.stride(0), q.stride(1), q.stride(2), cos.stride(0), width // 2
    )
    return q * 2


def rotary_plain(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = (q + 1).chunk(2, -1)
    c, s = (t[None, :, None, :] for t in (cos, sin))
    return torch.cat([a * c - b * s, b * c + a * s], -1) * 2


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = (m[:, None] < M) & (k[None, :] + start < K)
        right = (k[:, None] + start < K) & (n[None, :] < N)
        x = tl.load(a + m[:, None] * sam + (k[None, :] + start) * sak, mask=left, other=0.0)
        y = tl.load(b + (k[:, None] + start) * sbk + n[None, :] * sbn, mask=right, other=0.0)
        total += tl.dot(x, y, input_precision="ieee")
    if ACTIVATION == "leaky":
        total = tl.where(total > 0, total, total * 0.01)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * scm + n[None, :] * scn, total.to(c.dtype.element_ty), mask=inside)


_SHAPES = [(16, 16, 16), (32, 16, 16)]
autotuned_matmul = triton.autotune(
    configs=[
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=w, num_stages=2)
        for (m, n, k), w in zip(_SHAPES, (4, 2), strict=True)
    ],
    key=["M", "N", "K"],
)(matmul_kernel)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)

    def grid(meta: Any) -> tuple[int, int]:
        return triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"])

    autotuned_matmul[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), ACTIVATION="leaky"
    )
    return c


@triton.jit
def cross_entropy_kernel(logits, target, loss, stride, n, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(target + row)
    if label == ignore:
        tl.store(loss + row, 0.0)
        return
    at = tl.arange(0, BLOCK)
    v = tl.load(logits + row * stride + at, mask=at < n, other=-float("inf"))
    top = tl.max(v, 0)
    total = tl.sum(tl.exp2((v - top) * LOG2E), 0)
    tl.store(loss + row, tl.log(total) + top - tl.load(logits + row * stride + label))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    rows, n = logits.shape
    loss = torch.empty(rows, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, target, loss, logits.stride(0), n, -100, BLOCK=triton.next_power_of_2(n)
    )
    return loss.mean()


def cross_entropy_plain(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, target, reduction="none").mean()


@triton.jit
def layer_norm_backward_kernel(dy, x, weight, dx, dw, db, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + row * n + at, mask=inside, other=0.0)
    g = tl.load(dy + row * n + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    mean = tl.sum(v, 0) / n
    centred = tl.where(inside, v - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / n + eps)
    h, wg = centred * rstd, w * g
    c1, c2 = tl.sum(h * wg, 0) / n, tl.sum(wg, 0) / n
    tl.store(dx + row * n + at, (wg - (h * c1 + c2)) * rstd, mask=inside)
    tl.atomic_add(dw + at, g * h, mask=inside)
    tl.atomic_add(db + at, g, mask=inside)


def layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x)
    dw, db = torch.zeros_like(weight), torch.zeros_like(weight)
    rows, n = x.shape
    layer_norm_backward_kernel[(rows,)](
        dy, x, weight, dx, dw, db, n, 1e-5, BLOCK=triton.next_power_of_2(n)
    )
    return dx, dw, db


def layer_norm_backward_plain(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    x, w, b = (t.detach().clone().requires_grad_() for t in (x, w, torch.zeros_like(w)))
    with torch.enable_grad():
        y = torch.nn.functional.layer_norm(x, w.shape, w, b)
    return torch.autograd.grad(y, (x, w, b), dy)


@triton.jit
def attention_kernel(
    q, k, v, out, scale, s_head, s_row, length, WIDTH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1) * s_head
    d = tl.arange(0, WIDTH)
    x = tl.load(q + head + rows[:, None] * s_row + d[None, :], mask=rows[:, None] < length)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    made = tl.zeros((BM, WIDTH), tl.float32)
    for start in range(0, length, BN):
        cols = start + tl.arange(0, BN)
        keys = tl.load(
            k + head + cols[None, :] * s_row + d[:, None], mask=cols[None, :] < length, other=0.0
        )
        score = tl.dot(x, keys, input_precision="ieee") * (scale * LOG2E)
        score = tl.where(cols[None, :] < length, score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - now[:, None])
        shrink = tl.exp2(top - now)
        values = tl.load(
            v + head + cols[:, None] * s_row + d[None, :], mask=cols[:, None] < length, other=0.0
        )
        made = made * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = now
    tl.store(
        out + head + rows[:, None] * s_row + d[None, :], made / total[:, None],
        mask=rows[:, None] < length,
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    heads, length, width = q.shape
    grid = (triton.cdiv(length, 16), heads, 1)
    attention_kernel[grid](
        q, k, v, out, 1 / math.sqrt(width), q.stride(0), q.stride(1), length, width, 16, 16
    )
    return out


def attention_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


@triton.jit
def quantise_kernel(x, out, scales, n, GROUP: tl.constexpr, dtype: tl.constexpr = tl.int8):
    at = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    v = tl.load(x + at, mask=at < n, other=0.0)
    scale = tl.max(tl.abs(v), 0) / 127.0
    q = v / scale
    tl.store(out + at, (q + tl.where(q < 0, -0.5, 0.5)).to(dtype), mask=at < n)
    tl.store(scales + tl.program_id(0), scale)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.numel()
    groups = triton.cdiv(n, 32)
    out, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(groups)
    quantise_kernel[(groups,)](x, out, scales, n, GROUP=32)
    return out, scales


def quantise_plain(x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.numel()
    padded = torch.nn.functional.pad(x, (0, -n % 32)).view(-1, 32)
    scales = padded.abs().amax(1) / 127
    q = padded / scales[:, None]
    whole = torch.trunc(q + torch.where(q < 0, -0.5, 0.5))
    return whole.to(torch.int8).flatten()[:n], scales


@triton.jit
def tma_matmul_kernel(
    a, b, c, c_out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        right = tl.load_tensor_descriptor(b, [k, n])
        total += tl.dot(a.load([m, k]), right, input_precision="ieee")
    c.store([m, n], total.to(tl.float32))
    # Another one that the device makes, of the same memory.
    again = tl.make_tensor_descriptor(c_out, [M, N], [N, 1], [BM, BN])
    tl.store_tensor_descriptor(again, [m, n], total * 2)


def tma_matmul(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    (m, k), n = a.shape, b.shape[1]
    c, twice = torch.empty(m, n, device=a.device), torch.empty(m, n, device=a.device)
    tma_matmul_kernel[triton.cdiv(m, 16), triton.cdiv(n, 16)](
        TensorDescriptor.from_tensor(a, [16, 16]), TensorDescriptor.from_tensor(b, [16, 16]),
        TensorDescriptor.from_tensor(c, [16, 16]), twice, m, n, k, 16, 16, 16,
    )  # fmt: skip
    return c, twice


@triton.jit
def grouped_kernel(x, w, out, starts, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    group = tl.program_id(0)
    first, last = tl.load(starts + group), tl.load(starts + group + 1)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    for row in range(first, last, BM):
        m = row + tl.arange(0, BM)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(
                x + m[:, None] * K + k[None, :],
                mask=(m[:, None] < last) & (k[None, :] < K),
                other=0,
            )
            b = tl.load(
                w + group * K * N + k[:, None] * N + n[None, :],
                mask=(k[:, None] < K) & (n[None, :] < N), other=0,
            )  # fmt: skip
            total += tl.dot(a, b, input_precision="ieee")
        tl.store(out + m[:, None] * N + n[None, :], total, (m[:, None] < last) & (n[None, :] < N))


def grouped(x: Tensor, w: Tensor, starts: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w.shape[2])
    groups, k, n = w.shape
    grouped_kernel[groups, triton.cdiv(n, 16)](x, w, out, starts, n, k, 16, 16, 16)
    return out


def grouped_plain(x: Tensor, w: Tensor, starts: Tensor) -> Tensor:
    ends = starts.tolist()
    return torch.cat([x[a:b] @ w[k] for k, (a, b) in enumerate(itertools.pairwise(ends))])


@triton.jit
def top_k_kernel(x, values, indices, n, k: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    for step in tl.static_range(k):
        best = tl.max(v, 0)
        place = tl.argmax(v, 0)
        tl.store(values + row * k + step, best)
        tl.store(indices + row * k + step, place.to(tl.int64))
        v = tl.where(at == place, -float("inf"), v)


def top_k(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, n = x.shape
    values, indices = x.new_empty(rows, 3), torch.empty(rows, 3, dtype=torch.int64, device=x.device)
    top_k_kernel[(rows,)](x, values, indices, n, k=3, BLOCK=triton.next_power_of_2(n))
    return values, indices


def _inputs(name: str, n: int, device: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(n)

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device)

    match name:
        case "rms_norm":
            return r(n, 48), r(48)
        case "rotary":
            return r(2, n, 3, 16), r(n, 8), r(n, 8)
        case "matmul":
            return r(n, 24), r(24, 20)
        case "cross_entropy":
            target = torch.randint(0, 30, (n,), generator=g)
            target[1] = -100
            return r(n, 30), target.to(device)
        case "layer_norm_backward":
            return r(n, 40), r(n, 40), r(40)
        case "tma_matmul":
            return r(n, 32), r(32, 20)
        case "grouped":
            starts = torch.tensor([0, 3, 3, n - 1, n])
            return r(n, 24), r(4, 24, 20), starts.to(device)
        case "top_k":
            return (r(n, 50),)
        case "attention":
            return r(2, n, 16), r(2, n, 16), r(2, n, 16)
    return (r(n * 16),)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm": (
        lambda x, w: rms_norm(x.sin() * 2, w).relu(),
        lambda x, w: torch.nn.functional.rms_norm(x.sin() * 2, w.shape, w, 1e-5).relu(),
    ),
    "rotary": (rotary, rotary_plain),
    "matmul": (
        lambda a, b: matmul(a, b) + 1,
        lambda a, b: torch.nn.functional.leaky_relu(a @ b) + 1,
    ),
    "cross_entropy": (cross_entropy, cross_entropy_plain),
    "layer_norm_backward": (layer_norm_backward, layer_norm_backward_plain),
    "attention": (attention, attention_plain),
    "quantise": (quantise, quantise_plain),
    "tma_matmul": (tma_matmul, lambda a, b: (a @ b, a @ b * 2)),
    "grouped": (grouped, grouped_plain),
    "top_k": (top_k, lambda x: tuple(x.topk(3))),
}
"""A program with a kernel, and the same without."""
CASES |= user_kernels_odd.CASES


CAPTURE = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def check(name: str, wrapper: str, device: str, dynamic: bool = False, **options: Any) -> Any:
    """The compiled program does what the one without kernels does, and no Python is called."""
    torch._dynamo.reset()
    fn, plain = CASES[name]
    options = {"wrapper": wrapper, "strict": True, **options}
    compiled = torch.compile(
        fn, backend="plait", fullgraph=True, dynamic=dynamic or None, options=options
    )
    with torch._dynamo.config.patch(CAPTURE):
        for n in (20, 20, 33, 40):
            given = _inputs(name, n, device)
            mine, theirs = ([t.clone() for t in given] for _ in range(2))
            if trained := name in user_kernels_odd.TRAINED:
                for t in (*mine, *theirs):
                    t.requires_grad_()
            got, want = compiled(*mine), plain(*theirs)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            if trained:
                got.sum().backward()
                want.sum().backward()
                mine, theirs = ([t.grad for t in ts] for ts in (mine, theirs))
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return compiled


def check_traced(name: str, made: Callable[[Any, tuple[Tensor, ...]], Any], device: str) -> None:
    """The same of what is made without Dynamo: made(function, inputs)."""
    fn, plain = CASES[name]
    compiled = made(fn, _inputs(name, 20, device))
    mine, theirs = ([t.clone() for t in _inputs(name, 20, device)] for _ in range(2))
    with torch.no_grad():
        got, want = compiled(*mine), plain(*theirs)
    torch.testing.assert_close((got, mine), (want, theirs), rtol=1e-4, atol=1e-4)


def check_launched(name: str, device: str) -> None:
    """Nothing of it is Python or a call that a kernel could be."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(CAPTURE):
        report = explain(CASES[name][0], *_inputs(name, 20, device), quiet=True)
    assert not [step for step in report.ladder if step.rung != "aten"], report.ladder
