"""Weights as constants: plait.compile(freeze=True), plait.package(fold=True)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensorMode

import plait
from plait.compat.fake_shapes import short_shapes
from plait.errors import InputError
from plait.ir.calls import Extern
from plait.runtime.toolchain import NEXT_UNIT

TARGETS = ["native", "python", "cpp", "fx"]


def frozen(model: nn.Module, *args: Tensor, **more) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = plait.compile(model, args, freeze=True, **more)
    return compiled


def launches(compiled: Callable[..., Tensor]) -> list[str]:
    """The products that are kernels of ours, and other operators that are called."""
    steps = compiled.record.plan.steps
    return [s.op for s in steps if isinstance(s, Extern)]


def check(compiled: Callable[..., Tensor], model: nn.Module, *args: Tensor) -> None:
    """As near to float64 as eager is, twice: memory that a call leaves is poison for the next."""
    model.double()
    wanted = model(*(x.double() if x.is_floating_point() else x for x in args))
    model.float()
    eager = model(*args)
    error = (eager - wanted).abs().max()
    for _ in range(2):
        torch.full((1 << 20,), float("nan"))  # what allocators hand out next
        got = compiled(*args)
        assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
        assert (got - wanted).abs().max() <= 2 * error + 1e-5 * wanted.abs().max()


def trained(model: nn.Module) -> nn.Module:
    """In evaluation mode, with statistics and weights that are no longer those of a new model."""
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            if m.affine:
                m.weight.data.normal_()
                m.bias.data.normal_()
    return model.eval()


class Residual(nn.Module):
    def __init__(self, n: int, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(n, n, 3, padding=1, bias=False), nn.Conv2d(n, n, 1)
        self.norm, self.act = nn.BatchNorm2d(n), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.two(self.act(self.norm(self.one(x)))) + x)


CONVOLUTIONS = {
    "points": (nn.Conv2d(24, 40, 1), (2, 24, 7, 5)),
    "strided points": (nn.Conv2d(16, 32, 1, 2, bias=False), (2, 16, 9, 6)),
    "padded": (nn.Conv2d(17, 33, 3, padding=1), (2, 17, 8, 7)),
    "dilated": (nn.Conv2d(16, 48, (3, 2), (2, 1), (2, 1), (2, 3)), (1, 16, 12, 9)),
    "unpadded": (nn.Conv2d(20, 64, 3), (2, 20, 9, 8)),
    "few channels": (nn.Conv2d(3, 24, 7, 2, 3), (2, 3, 31, 20)),
    "deep": (nn.Conv2d(160, 16, 3, padding=1), (1, 160, 5, 5)),
    "depthwise": (nn.Conv2d(24, 24, 5, 2, 2, groups=24), (2, 24, 11, 10)),
    "depthwise, odd": (nn.Conv2d(37, 37, (3, 2), 1, (1, 1), 2, 37), (3, 37, 9, 5)),
    "depthwise, wide": (nn.Conv2d(64, 64, 3, groups=64, bias=False), (1, 64, 8, 9)),
    "depthwise, long rows": (nn.Conv2d(16, 16, 7, 1, 3, groups=16), (1, 16, 9, 60)),
    "depthwise, 5 wide": (nn.Conv2d(56, 56, 5, 1, 2, groups=56), (2, 56, 9, 31)),
    "depthwise, 5 of rows": (
        nn.Conv2d(144, 144, (3, 5), (2, 1), (2, 2), (2, 1), 144),
        (1, 144, 8, 7),
    ),
    "depthwise, blocks": (nn.Conv2d(200, 200, 3, 1, 1, groups=200), (2, 200, 14, 13)),
    "depthwise, small": (nn.Conv2d(136, 136, 5, 2, 2, groups=136), (2, 136, 3, 4)),
    "grouped": (nn.Conv2d(24, 48, 3, padding=1, groups=3), (2, 24, 6, 6)),
    "transposed": (nn.ConvTranspose2d(16, 24, 3, 2), (2, 16, 5, 6)),
    "padded by words": (nn.Conv2d(16, 16, 3, padding="same"), (2, 16, 6, 6)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("last", [False, True])
def test_convolution(name: str, last: bool) -> None:
    conv, shape = CONVOLUTIONS[name]
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels), nn.Hardswish()))
    x = torch.randn(shape)
    if last:
        x = x.to(memory_format=torch.channels_last)
    compiled = frozen(model, x)
    check(compiled, model, torch.randn_like(x))
    kind = name.partition(",")[0]
    calls = {"grouped": ["aten::convolution"], "transposed": ["aten::convolution"]}
    assert launches(compiled) == calls.get(kind, ["plait::packed_conv"])


@pytest.mark.parametrize(
    "act", [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.LeakyReLU(0.1)]
)
def test_activation_and_residual(act: nn.Module) -> None:
    model, x = trained(Residual(32, act)), torch.randn(2, 32, 9, 9)
    compiled = frozen(model, x)
    check(compiled, model, x)
    # The residual comes with its channels apart, so one loop turns it around.
    assert len(compiled.record.plan.steps) <= 4


LINEARS = [  # rows, depth, columns
    (1, 64, 64), (7, 64, 48), (64, 700, 40), (33, 1030, 130), (256, 32, 20), (5, 2000, 96),
]  # fmt: skip


@pytest.mark.parametrize("shape", LINEARS)
def test_linear(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    model = trained(nn.Sequential(nn.Linear(depth, columns), nn.BatchNorm1d(columns), nn.Tanh()))
    x = torch.randn(rows, depth)
    compiled = frozen(model, x, options={"small_matmul_flops": 0})
    check(compiled, model, x)
    assert launches(compiled) == ["plait::packed_mm"]
    assert len(compiled.record.plan.steps) == 1, "all of it is one kernel"


class Block(nn.Module):
    """What epilogues meet: gates, a product that two read, one that is returned too, scalars,
    broadcasts along rows, and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 96), nn.Linear(48, 96, bias=False), nn.Linear(96, 48)
        self.norm, self.scale = nn.LayerNorm(48), nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = self.a(x)
        h = F.silu(gate) * self.b(x)
        z = self.c(h) * self.scale + x
        return self.norm(z), gate, (self.c(gate.relu()) + y).clamp(min=0.5) * 2 + x[:, :1]


@pytest.mark.parametrize("target", TARGETS)
def test_epilogues(target: str) -> None:
    model = Block()
    x, y = torch.randn(3, 20, 48), torch.randn(20, 1)
    options = {"small_matmul_flops": 0, "wrapper": target}
    compiled = frozen(model, x, y, options=options)
    with torch.no_grad():
        for _ in range(2):
            for got, wanted in zip(compiled(x, y), model(x, y), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_other_instructions(isa: str) -> None:
    from tests.kernel_tools import usable_isas

    if isa not in [i.name for i in usable_isas()]:
        pytest.skip(f"this machine has no {isa}")
    model = trained(
        nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 56, 3, padding=1),
            nn.BatchNorm2d(56), nn.GELU(), nn.Conv2d(56, 56, 3, 1, 1, groups=56), nn.Flatten(),
            nn.Linear(56 * 25, 70),
        )
    )  # fmt: skip
    x = torch.randn(3, 3, 9, 9)
    check(frozen(model, x, options={"isa": isa}), model, x)


class Passing(nn.Module):
    """A product of what another one makes of many rows, and rows that both start from."""

    def __init__(self, depth: int, between: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(depth, between), nn.Linear(between, depth, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("shape", [(1030, 20, 770), (1600, 37, 530)])
def test_rows_are_passed_on(isa: str, shape: tuple[int, int, int]) -> None:
    """From one product to the next, by threads, whose shares no tile divides."""
    from tests.kernel_tools import usable_isas

    if isa not in [i.name for i in usable_isas()]:
        pytest.skip(f"this machine has no {isa}")
    rows, *sizes = shape
    model, x = Passing(*sizes), torch.randn(rows, sizes[0])
    compiled = frozen(model, x, options={"isa": isa})
    assert [len(s.made) for s in compiled.record.plan.steps] == [2], "one launch"
    check(compiled, model, x)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_passed_on_where_nothing_else_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    monkeypatch.setattr("plait.schedule.pair_products.MIN_ROWS", 1)
    monkeypatch.setattr("plait.schedule.pair_products.MIN_NBYTES", 0)
    model = Block()
    x, y = torch.randn(3, 20, 48), torch.randn(20, 1)
    options = {"small_matmul_flops": 0, "wrapper": target, "cache_dir": str(tmp_path)}
    options["finite_asserts"] = True  # what nothing reads afterwards is nobody's
    compiled = frozen(model, x, y, options=options)
    steps = [s for s in compiled.record.plan.steps if isinstance(s, Extern)]
    assert sorted(len(s.made) for s in steps) == [1, 1, 2], "`gate` is returned"
    with torch.no_grad():
        for _ in range(2):
            for got, wanted in zip(compiled(x, y), model(x, y), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


class Heads(nn.Module):
    """Attention of what one product makes. Large queries: few keys count."""

    def __init__(self, heads: int, depth: int, causal: bool, mask: Tensor | None = None) -> None:
        super().__init__()
        self.sizes, self.causal, self.mask = (3, heads, depth), causal, mask
        self.all = nn.Linear(24, 3 * heads * depth)

    def forward(self, x: Tensor) -> Tensor:
        made = self.all(x).unflatten(-1, self.sizes).permute(2, 0, 3, 1, 4)
        q, k, v = made * torch.tensor([9.0, 1.0, 1.0], dtype=x.dtype).view(3, 1, 1, 1, 1)
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


def kernels_of_attention(compiled: Callable[..., Tensor]) -> int:
    steps = compiled.record.plan.steps
    named = (s.kernel.name for s in steps if isinstance(s, Extern) and s.kernel is not None)
    return sum(name.startswith("plait_attention") for name in named)


ATTENTION = {  # heads, depth, rows, batch, causal
    "few rows": (2, 16, 5, 3, True),
    "odd rows": (3, 48, 130, 2, False),
    "one head": (1, 80, 77, 1, True),
    "wide": (2, 128, 200, 1, False),
    "long": (1, 32, 512, 2, True),
    "two rows": (2, 112, 2, 2, False),
}


@torch.no_grad()
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, isa: str) -> None:
    from tests.kernel_tools import usable_isas

    if isa not in [i.name for i in usable_isas()]:
        pytest.skip(f"this machine has no {isa}")
    heads, depth, rows, batch, causal = ATTENTION[name]
    model, x = Heads(heads, depth, causal), torch.randn(batch, rows, 24)
    compiled = frozen(model, x, options={"isa": isa, "small_matmul_flops": 0})
    assert kernels_of_attention(compiled) == 1
    check(compiled, model, x)
    x[0, rows // 2] = float("nan")
    made = compiled(x).isnan()
    assert made[0, rows // 2 :].all(), "who sees it is no number"
    assert not (made & ~model(x).isnan()).any()


@torch.no_grad()
@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_all_targets(target: str) -> None:
    model, x = Heads(3, 32, True), torch.randn(2, 40, 24)
    compiled = frozen(model, x, options={"wrapper": target, "small_matmul_flops": 0})
    assert kernels_of_attention(compiled) == 1
    check(compiled, model, x)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 3, 21, 21), (2, 1, 21, 21), (1, 3, 1, 21), (21, 21)])
@pytest.mark.parametrize("numbers", [True, False])
def test_masks_of_attention(shape: tuple[int, ...], numbers: bool) -> None:
    """Numbers that are added, and queries that see no key."""
    seen = torch.rand(shape) < 0.7
    seen[..., -1, :] = False
    mask = torch.randn(shape).masked_fill(~seen, float("-inf")) if numbers else seen
    model, x = Heads(3, 32, False, mask), torch.randn(2, 21, 24)
    compiled = frozen(model, x, options={"small_matmul_flops": 0})
    assert kernels_of_attention(compiled) == 1
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize(("depth", "rows"), [(20, 6), (16, 520), (16, 1), (4608, 7)])
def test_attention_that_is_no_kernel_of_ours(depth: int, rows: int) -> None:
    model, x = Heads(2, depth, True), torch.randn(1, rows, 24)
    compiled = frozen(model, x, options={"small_matmul_flops": 0})
    assert kernels_of_attention(compiled) == 0
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


WINOGRAD = {  # depth, columns, padding, image
    "even": (32, 48, 1, (2, 8, 8)),
    "odd": (37, 50, 1, (2, 9, 7)),
    "unpadded": (40, 32, 0, (1, 8, 9)),
    "wide padding": (32, 33, (2, 0), (3, 5, 6)),
    "groups of tiles": (64, 112, 1, (3, 17, 15)),
    "deep": (768, 32, 1, (1, 7, 8)),
}


@pytest.mark.parametrize("name", WINOGRAD)
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@torch.no_grad()
def test_winograd(name: str, isa: str) -> None:
    """With an epilogue, and with numbers that are none, which reach no more results than
    eager's."""
    from tests.kernel_tools import usable_isas

    if isa not in [i.name for i in usable_isas()]:
        pytest.skip(f"this machine has no {isa}")
    depth, columns, padding, (n, *image) = WINOGRAD[name]
    conv = nn.Conv2d(depth, columns, 3, padding=padding)
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(columns), nn.SiLU()))
    x = torch.randn(n, depth, *image)
    compiled = frozen(model, x, options={"isa": isa})
    (call,) = [s for s in compiled.record.plan.steps if isinstance(s, Extern)]
    assert "winograd" in call.kernel.name
    check(compiled, model, torch.randn_like(x))
    x[0, 3, 2, 2], x[0, 5, 1, 1], x[-1, 0, 0, 3] = float("inf"), float("nan"), -float("inf")
    got, wanted = compiled(x), model(x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@torch.no_grad()
def test_what_packed_operators_mean() -> None:
    """What runs where a graph is left to eager."""
    x, filters = torch.randn(2, 8, 6, 7), torch.randn(20, 8, 3, 3)
    panels = torch.ops.plait.pack_winograd(filters, 16)
    got = torch.ops.plait.winograd_conv(x, panels, 20, [1, 0])
    torch.testing.assert_close(got, F.conv2d(x, filters, None, 1, (1, 0)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth, stride", [(16, 2), (32, 1)])
def test_sizes_that_vary(depth: int, stride: int) -> None:
    conv = nn.Conv2d(depth, 32, 3, stride, 1)
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(32), nn.ReLU()))
    # Eager takes another kernel for 16 images and more.
    lo, hi = (2, 15) if stride == 1 else (0, None)
    dims = {0: torch.export.Dim("n", min=lo, max=hi)}
    dims |= {k: torch.export.Dim("hw"[k - 2], min=3) for k in (2, 3)}
    compiled = frozen(model, torch.randn(2, depth, 9, 8), dynamic_shapes=(dims,))
    few = [(0, 4, 4), (1, 3, 3)] if stride > 1 else []
    for n, high, wide in ((2, 9, 8), (7, 5, 17), (5, 3, 4), *few):
        x = torch.randn(n, depth, high, wide)
        torch.testing.assert_close(compiled(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_rows_that_vary() -> None:
    linear = nn.Sequential(nn.Linear(96, 48), nn.GELU())
    rows = torch.export.Dim("rows")
    compiled = frozen(linear, torch.randn(4, 96), dynamic_shapes=({0: rows},))
    assert launches(compiled) == ["plait::packed_mm"]
    for n in (4, 1, 2, 7, 100, 0):
        check(compiled, linear, torch.randn(n, 96)) if n else compiled(torch.randn(0, 96))


# ------------------------------------------------------------------------------------------ weights
@pytest.fixture(params=TARGETS)
def model_and_compiled(request: pytest.FixtureRequest):
    model = trained(
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(1))
    )
    model.append(nn.Linear(32 * 9, 32))
    x = torch.randn(2, 16, 5, 5)
    return model, frozen(model, x, options={"wrapper": request.param}), x


@torch.no_grad()
def test_changes_are_seen(model_and_compiled) -> None:
    """In place, by an optimizer, by loading a state, and other tensors in their place."""
    model, compiled, x = model_and_compiled

    def same() -> None:
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)

    same()
    model[0].weight.mul_(2)
    same()
    model[1].running_var.add_(1)
    same()
    model[4].bias.fill_(3)
    same()
    model[4].weight = nn.Parameter(torch.randn(32, 288))
    same()
    model[4].weight.zero_()  # the new one
    same()
    model[0].weight.data = torch.randn(32, 16, 3, 3)  # other memory
    same()
    other = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in
             model.state_dict().items()}  # fmt: skip
    other["1.running_var"] = other["1.running_var"].abs() + 0.5
    model.load_state_dict(other)
    same()
    model.train()  # built in as it was
    before = compiled(x)
    model.eval()
    torch.testing.assert_close(before, compiled(x))


@torch.no_grad()
def test_what_leaves_no_version_is_not_seen() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    compiled = frozen(model, x, options={"small_matmul_flops": 0})
    before = compiled(x)
    model.weight.data.mul_(2)
    torch.testing.assert_close(compiled(x), before)
    model.weight.add_(0)  # a version, and all is seen
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_weights_that_do_not_fit(model_and_compiled) -> None:
    model, compiled, x = model_and_compiled
    old = model[4].weight
    model[4].weight = nn.Parameter(torch.randn(32, 288).double())
    for _ in range(2):
        with pytest.raises(InputError, match=r"4\.weight.*float64"):
            compiled(x)
    model[4].weight = old
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    del model[1].running_mean
    with pytest.raises(InputError):
        compiled(x)


class Tied(nn.Module):
    """A weight under two names, a view of another one, and a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 48)
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.table.weight
        self.both = nn.Parameter(torch.randn(96, 48))
        self.register_buffer("count", torch.zeros(48))

    def forward(self, ids: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.table(ids)
        x = x @ self.both[:48] + x @ self.both[48:] + self.count
        return self.head(x)


@torch.no_grad()
def test_shared_and_written() -> None:
    model, ids = Tied(), torch.randint(40, (5, 6))
    compiled = frozen(model, ids, options={"small_matmul_flops": 0})
    for k in range(3):
        got, count = compiled(ids), model.count.clone()
        assert count.eq(2 * k + 1).all(), "the program writes to the module's buffer"
        model.count.sub_(1)
        torch.testing.assert_close(got, model(ids), rtol=1e-4, atol=1e-4)
        model.count.add_(1)
        (model.head.weight if k else model.both).mul_(0.5)


@torch.no_grad()
def test_threads() -> None:
    """Calls while weights change give what one of the two weights gives."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(8, 64)
    compiled = frozen(model, x, options={"small_matmul_flops": 0})
    one = model(x)
    wrong: list[Tensor] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            ratio = compiled(x) / one
            if not any(torch.allclose(ratio, torch.tensor(r), rtol=1e-3) for r in (1.0, 2.0)):
                wrong.append(ratio)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for t in threads:
        t.start()
    old, new = model.weight, nn.Parameter(model.weight * 2)
    for k in range(100):
        model.weight = (new, old)[k % 2]
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_explain_tells_of_copies() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 20))
    compiled = frozen(model, torch.randn(32, 256))
    text = str(plait.explain(compiled, quiet=True))
    assert "second copy of weights in the order of kernels (0.3 MiB)" in text, text


def test_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Conv1d(32, 8, 1))
        x = torch.randn(32, 64)
        compiled = frozen(model, x)
        assert compiled.record.frozen is not None and "second copy" in compiled.record.frozen
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # the model is still of inference tensors
        torch.testing.assert_close(frozen(model, x)(x), model(x), rtol=1e-4, atol=1e-4)


def test_the_end_of_the_interpreter_waits_for_weights_that_are_packed() -> None:
    code = """
import plait, torch
import plait.capture.export as export
def leave(*_): raise SystemExit(3)
export._compiled = leave
layers = [torch.nn.Linear(1024, 1024) for _ in range(12)]
plait.compile(torch.nn.Sequential(*layers), (torch.randn(8, 1024),), freeze=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr


# ----------------------------------------------------------------------------------------- packages
@torch.no_grad()
def test_package_in_a_fresh_process(tmp_path: Path) -> None:
    model = trained(
        nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), Residual(32, nn.SiLU()),
            nn.Flatten(), nn.Linear(32 * 25, 50),
        )
    )  # fmt: skip
    x = torch.randn(2, 3, 9, 9)
    plait.package(model, tmp_path / "m.plait", (x,), fold=True)
    torch.save((x, model(x)), tmp_path / "x.pt")
    code = f"""
import plait, torch
x, wanted = torch.load({str(tmp_path / "x.pt")!r})
run = plait.load({str(tmp_path / "m.plait")!r})
for _ in range(2):
    torch.testing.assert_close(run(x), wanted, rtol=1e-4, atol=1e-4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


class Chain(nn.Module):
    """A constant that another one is made of, one whose size is a matter of values, and a view of a
    weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.w.exp()
        return x + y, x * y.sum() + self.w[self.w > 0].sum(), self.w[:2]


@torch.no_grad()
def test_constants_of_constants() -> None:
    model, x = Chain(), torch.randn(3, 4)
    compiled = frozen(model, x)
    for _ in range(3):
        model.w.add_(0.3)  # more of them are positive
        for got, wanted in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted)


@torch.no_grad()
@pytest.mark.parametrize("target", ["native", "python"])
def test_tiles_are_shared_by_threads(target: str) -> None:
    """Much work, with rows, columns and lengths that no tile divides."""
    model = trained(
        nn.Sequential(
            nn.Conv2d(48, 90, 3, 2, 1), nn.BatchNorm2d(90), nn.SiLU(), nn.Conv2d(90, 50, 1),
            nn.Flatten(2), nn.Linear(21 * 19, 1600), nn.ReLU(), nn.Linear(1600, 333),
        )
    )  # fmt: skip
    x = torch.randn(5, 48, 41, 37)
    check(frozen(model, x, options={"wrapper": target}), model, x)


def test_kernels_are_compiled_in_several_units(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each has its own functions of mathematics, and what kernels share."""
    monkeypatch.setattr("plait.kernel.cpu.target.UNIT_LENGTH", 1)
    model = trained(
        nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.Softmax(1),
            nn.Conv2d(32, 48, 1),
            nn.Softmax(3),
        )
    )
    x = torch.randn(2, 32, 9, 8)
    compiled = frozen(model, x, options={"cache_dir": str(tmp_path)})
    assert compiled.record.kernel_source.count(NEXT_UNIT) == 5, "3 of its own, 2 shared"
    check(compiled, model, x)


@pytest.mark.parametrize(
    "shape", [(1, 4, 3, 5), (2, 4, 3, 5), (1, 4, 1, 5), (1, 4, 1, 1), (0, 4, 3, 3)]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_short_shapes_are_those_of_the_steps_that_operators_are_made_of(
    shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    def shapes() -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        FakeTensorMode.cache_clear()
        with FakeTensorMode():
            whole = torch.empty(shape).to(memory_format=layout)
            made: list[Tensor] = []
            for x in (whole, torch.empty((*shape, 2))[..., 1], whole[1:], whole.bfloat16()):
                for weights in (0, 2):
                    given = [torch.empty(4) if k < weights else None for k in range(2)]
                    made += norm(x, *given, torch.empty(4), torch.empty(4), 0.1, 1e-5)
                made += [F.hardswish(x), F.hardsigmoid(x)]
            return [(t.shape, t.stride(), t.dtype) for t in made]

    norm = torch.ops.aten._native_batch_norm_legit_no_training.default
    wanted, steps = shapes(), dict(decomposition_table)
    with short_shapes:
        assert shapes() == wanted
        assert decomposition_table == steps, "others may read it meanwhile"


@pytest.mark.parametrize("activation", [F.hardswish, F.hardsigmoid])
def test_activations_that_stay_whole(activation: Callable[[Tensor], Tensor]) -> None:
    edges = torch.tensor([float("nan"), float("inf"), -float("inf"), 3, -3, 0, -0.0])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.cat((edges, torch.randn(100) * 4)).to(dtype)
        compiled = plait.compile(activation, (x,))
        assert torch.equal(compiled(x).nan_to_num(5), activation(x).nan_to_num(5))
        assert not compiled.record.ladder, "it has a kernel"
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        plait.compile(activation, (torch.arange(4),))


class Excited(nn.Module):
    """Channels are scaled by what is made of their means."""

    def __init__(self, channels: int, swapped: bool) -> None:
        super().__init__()
        self.scale, self.out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 40, 1)
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        scale = F.hardsigmoid(self.scale(x.mean((2, 3), keepdim=True)))
        return F.relu(self.out(scale * x if self.swapped else x * scale) + x[:, :40])


@pytest.mark.parametrize("channels, side, batch", [(72, 9, 1), (960, 7, 1), (41, 5, 1), (48, 6, 2)])
@pytest.mark.parametrize("swapped", [False, True])
def test_channels_are_scaled_inside_a_convolution(
    channels: int, side: int, batch: int, swapped: bool
) -> None:
    model, x = Excited(channels, swapped), torch.randn(batch, channels, side, side + 1)
    x = x.to(memory_format=torch.channels_last)
    compiled = frozen(model, x)
    check(compiled, model, x)
    assert ("scaled_conv1x1" in compiled.record.kernel_source) == (batch == 1)
    dirty = x.clone()
    dirty[0, 3, 2, 1] = float("nan")
    torch.testing.assert_close(compiled(dirty), model(dirty), equal_nan=True)
