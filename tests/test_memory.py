"""Memory of whole calls: the peak against eager's, and nothing left behind by thousands of
calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import allocator_peak, peak
from plait.config import Config
from plait.pipelines import schedule
from plait.runtime.load import arena_stats
from tests.models import MODELS, images, tokens
from tests.schedule_tools import Builder

MIB = 1 << 20
SLOW = pytest.mark.slow


class Block(nn.Module):
    """A pre-norm transformer block with attention of four heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind())
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Pointwise(nn.Module):
    """A chain of elementwise operations and two row-wise ones, with a weight so that it can be
    trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) * torch.sigmoid(x) * self.scale - torch.exp(x)
        return torch.softmax(F.gelu(F.layer_norm(y, (1024,))), -1)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **{n: (MODELS[n][0], partial(tokens, 128)) for n in ("gpt2", "bert", "llama")},
    **{n: (MODELS[n][0], partial(images, 128)) for n in ("vit", "resnet", "unet")},
    "tf6": (
        lambda: nn.Sequential(*(Block(256) for _ in range(6))),
        lambda: torch.randn(8, 64, 256),
    ),
    "pw": (Pointwise, lambda: torch.randn(1024, 1024)),
}


def step(f: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """Forward and backward, with fresh gradients."""
    model.zero_grad(set_to_none=True)
    f(x).square().mean().backward()


def infer(f: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return f(x)


def compare_peaks(
    make: Callable[[], nn.Module], mode: Callable[..., object], first: Tensor, *others: Tensor
) -> str:
    """Compiles with the first batch and compares the peaks of calls on the others, or on that one,
    with eager's; gives the numbers in words."""
    model = make()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    model.train(mode is step)
    compiled = torch.compile(model, backend="plait")
    mode(compiled, model, first)
    lines = []
    for x in others or (first,):
        eager, _ = peak(partial(mode, model, model, x))
        plait, arena = peak(partial(mode, compiled, model, x))
        lines.append(
            f"eager {eager / MIB:.2f} MiB, plait {plait / MIB:.2f} MiB, of it arenas "
            f"{arena / MIB:.2f}"
        )
        print(lines[-1])
        assert eager > MIB, "the program is too small to show anything"
        assert plait <= eager * 1.02 + MIB, lines[-1]
    return "; ".join(lines)


PEAKS = [
    pytest.param(n, mode, id=f"{what}-{n}", marks=SLOW if n in MODELS and not often else [])
    for n in CASES
    for what, mode, often in (("inference", infer, n == "resnet"), ("training", step, False))
]
"""Of training, every day has two that are no models, and GPT-2 for any batch."""


@pytest.mark.parametrize("name, mode", PEAKS)
def test_peak(name: str, mode: Callable[..., object], record_property: Callable[..., None]) -> None:
    make, data = CASES[name]
    record_property("peak", compare_peaks(make, mode, data()))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gpt2" else SLOW) for n in MODELS]
)
@pytest.mark.parametrize(
    "mode", [pytest.param(infer, marks=SLOW), step], ids=["inference", "training"]
)
def test_peak_at_another_batch(
    name: str, mode: Callable[..., object], record_property: Callable[..., None]
) -> None:
    """A program compiled for any batch, at a larger and a smaller batch than it was compiled
    with."""
    make, data = CASES[name]
    large = data()
    batches = [large[:n].clone() for n in (64, 128, 40)]
    for x in batches:
        torch._dynamo.mark_dynamic(x, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        record_property("peak", compare_peaks(make, mode, *batches))


def test_the_peak_is_measured_exactly() -> None:
    old = torch.empty(MIB)

    def call() -> Tensor:
        nonlocal old
        a = torch.empty(1000, dtype=torch.uint8)
        old = torch.empty(0)  # was there before: freeing it does not count
        b = torch.empty(5000, dtype=torch.uint8)
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b
        return c

    assert allocator_peak(call) == 6000


def live_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows of."""
    gc.collect()
    held = {}
    for obj in gc.get_objects():
        if type(obj) in (Tensor, nn.Parameter) and obj.layout == torch.strided:
            storage = obj.untyped_storage()
            with suppress(RuntimeError):  # one that was made while tracing has no memory
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def resident_bytes() -> int:
    """What the process holds in memory."""
    with Path("/proc/self/statm").open() as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.parametrize("mode", [infer, step], ids=["inference", "training"])
def test_nothing_leaks(mode: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))
    compiled = torch.compile(model, backend="plait")
    call = partial(mode, compiled, model, torch.randn(64, 64))
    for _ in range(200):
        call()
    tensors, arenas, grown = live_bytes(), arena_stats(), []
    while not grown or grown[-1] >= 8 * MIB and len(grown) < 4:
        resident = resident_bytes()
        for _ in range(1000):
            call()
        grown.append(resident_bytes() - resident)
    assert live_bytes() == tensors
    assert arena_stats() == arenas
    # One tensor of a call's 64 x 64 floats left behind each time would be 16 MB, every time; what
    # other tests left in the process is freed, or taken, once.
    assert grown[-1] < 8 * MIB, grown


def test_kernels_write_over_the_results_of_calls() -> None:
    """Between two calls a kernel needs no memory of its own; what is returned is not on a call's
    memory."""
    b = Builder()
    x = b.input(64, 64)
    first = b.extern((64, 64), x, may_keep=False, fallback=False)
    inner = b.map("tanh", first)
    second = b.extern((64, 64), inner, may_keep=False, fallback=False)
    b.output(b.map("exp", second))
    memory = schedule(b.program(), Config()).memory
    assert memory.in_place == {inner: first} and not memory.offsets


def test_what_a_backward_pass_keeps_idle_is_small() -> None:
    b = Builder()
    x = b.input(512, 1024)
    b.donated.append(x)
    y = b.extern((512, 1024), b.map("tanh", x), may_keep=False)
    b.output(b.reduce((), (512, 1024), "sum", lambda o, i, j: o.load(y, i, j)))
    program = b.program()
    nbytes = [
        schedule(p, Config()).memory.arena_nbytes for p in (program, replace(program, donated=()))
    ]
    assert nbytes == [64, 512 * 1024 * 4]  # a scalar's line of cache, or the large one too
