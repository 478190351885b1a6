"""Programs on a GPU against eager, through torch.compile: collected where torch has a CUDA
device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from tests.against_eager import same
from tests.models import MODELS
from tests.test_models import build, close, double, trains_as_eager

CUDA = torch.device("cuda")


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def extremes() -> Tensor:
    """Every pair of infinities, NaN, zeros, and numbers at the ends of the range."""
    x = torch.tensor(
        [0.0, -0.0, 1.5, -2.5, 3e38, -3e38, 1e-30, torch.inf, -torch.inf, torch.nan], device=CUDA
    )
    return x.expand(10, 10)


def columns(dtype: torch.dtype) -> Tensor:
    """More than the cache holds, in rows of an odd length; columns whose parts, or all, are no
    number or infinite."""
    x = r(16, 4096, 1023, dtype=dtype)
    x[:, ::4, 3], x[:, 1:, 4], x[:, :, 5] = -torch.inf, -torch.inf, -torch.inf
    x[:, 77, 6], x[:, 4095, 7] = torch.nan, torch.inf
    return x


def moved(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model without dropout, its float64 twin and an input, on the GPU."""
    model, exact, x = build(name)
    return model.to(CUDA), exact.to(CUDA), x.to(CUDA)


@pytest.mark.parametrize("wrapper", ["native", "python", "fx"])
@pytest.mark.parametrize("name", list(MODELS))
def test_inference(name: str, wrapper: str) -> None:
    model, exact, x = moved(name)
    model.eval(), exact.eval()
    compiled = torch.compile(model, backend="plait", options={"wrapper": wrapper})
    with torch.no_grad():
        for _ in range(2):
            close(compiled(x), model(x), exact(double(x)), name)


@pytest.mark.parametrize("name", list(MODELS))
def test_training_step(name: str) -> None:
    trains_as_eager(name, *moved(name))


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "by graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_length(wrapper: str, dtype: torch.dtype) -> None:
    """Whichever form a length picks, in place of a product too."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x * 2, -1), torch.softmax(y @ x, -1)

    by = {"cuda_graphs": True} if wrapper == "by graphs" else {"wrapper": wrapper}
    compiled = torch.compile(fn, backend="plait", dynamic=True, options=by)
    for n in (100, 128, 129, 512, 513, 3000, 2, 100):
        x, y = r(40, n, dtype=dtype), r(30, 40, dtype=dtype)
        for got, want in zip(compiled(x, y), fn(x, y), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2 / n)


def test_integers_divided_by_zero() -> None:
    """Some number, as in eager, and the device goes on."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a % 0

    a, b = torch.arange(40, device=CUDA) - 20, torch.arange(40, device=CUDA) - 7
    for got, want in zip(torch.compile(fn, backend="plait")(a, b)[:4], fn(a, b)[:4], strict=True):
        assert torch.equal(got[b != 0], want[b != 0])


def parts(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Results of a kernel, and views of x."""
    return w * 2, x * 2, x[1:], x.t(), x


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "by graphs"])
@pytest.mark.parametrize("road", ["compile", "export", "training", "training, x too"])
def test_views_of_an_input_at_an_odd_address(road: str, wrapper: str) -> None:
    """Kernels read a copy that is aligned; views of the input lie in the input itself."""
    w, x = r(3), r(16 * 33 + 1)[1:].view(16, 33)
    w.requires_grad_(road.startswith("training")), x.requires_grad_("too" in road)
    options: dict[str, Any] = (
        {"cuda_graphs": True} if wrapper == "by graphs" else {"wrapper": wrapper}
    )
    if road == "export":
        compiled = plait.compile(parts, (w, r(16, 33)), options=options)
    else:
        compiled = torch.compile(parts, backend="plait", options=options)
    for _ in range(4):
        for got, want in zip(compiled(w, x), parts(w, x), strict=True):
            torch.testing.assert_close(got, want)
            assert (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset())
            of_x = [
                t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                for t in (got, want)
            ]
            assert of_x[0] == of_x[1]


ODD: dict[str, Any] = {
    "rows with gaps": lambda: r(4, 16, dtype=torch.half).t()[1:],
    "columns with gaps": lambda: r(5, 16)[:, 3:7],
    "windows": lambda: r(65)[1:].as_strided((15, 4), (2, 1)),
    "repeated": lambda: r(65)[1:5].expand(6, 4),
}
"""Tensors that begin at an odd address and do not fill their memory row by row."""


class Beside(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.pad(x, (-1, 1), value=3), x.sum(0), self.held * x, self.held.amax(0)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "by graphs"])
@pytest.mark.parametrize("road", ["compile", "export"])
@pytest.mark.parametrize("name", ODD)
def test_inputs_and_constants_at_an_odd_address(name: str, road: str, wrapper: str) -> None:
    """Their copies have their strides."""
    x, options = (
        ODD[name](),
        {"cuda_graphs": True} if wrapper == "by graphs" else {"wrapper": wrapper},
    )
    module = Beside(ODD[name]())
    if road == "export":
        compiled = plait.compile(module, (x,), options=options)
    else:
        compiled = torch.compile(module, backend="plait", options=options)
    for _ in range(4):
        x = ODD[name]()
        for got, want in zip(compiled(x), module(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "by graphs"])
@pytest.mark.parametrize("name", ["rows with gaps", "columns with gaps"])
def test_writes_to_an_input_at_an_odd_address(name: str, wrapper: str) -> None:
    options: dict[str, Any] = (
        {"cuda_graphs": True} if wrapper == "by graphs" else {"wrapper": wrapper}
    )
    compiled = torch.compile(lambda x: x.mul_(2).sum(), backend="plait", options=options)
    for _ in range(4):
        x = ODD[name]()
        whole = torch.as_strided(x, (64 if x.dtype == torch.half else 80,), (1,), 0)
        want = whole.clone()
        torch.as_strided(want, x.shape, x.stride(), x.storage_offset()).mul_(2)
        compiled(x)
        assert torch.equal(whole, want)


@pytest.mark.parametrize("wrapper", ["native", "python", "cpp", "fx", "by graphs"])
def test_views_from_the_start_of_the_memory_of_an_input_at_an_odd_address(wrapper: str) -> None:
    """They see what lies before the input, of which a copy is not made."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x * 2,
            torch.as_strided(x, (2,), (1,), 1),
            torch.as_strided(x, (3,), (2,), 0) + x[0, 0],
        )

    options: dict[str, Any] = (
        {"cuda_graphs": True} if wrapper == "by graphs" else {"wrapper": wrapper}
    )
    compiled = torch.compile(fn, backend="plait", options=options)
    for _ in range(3):
        x = torch.arange(40.0, device=CUDA)[5:30].view(5, 5)
        got, want = compiled(x), fn(x)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        assert got[1].data_ptr() == want[1].data_ptr()


@pytest.mark.parametrize("wrapper", ["native", "python", "fx"])
@pytest.mark.parametrize("kernel", [(2, 2, 0), (3, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.half, torch.float32, torch.float64])
def test_gradients_of_windows_with_several_maxima(
    dtype: torch.dtype, kernel: tuple[int, ...], wrapper: str
) -> None:
    """The first of them gets the gradient."""
    x = torch.randint(-3, 4, (1, 2, 64, 8), device=CUDA).to(dtype)
    compiled = torch.compile(F.max_pool2d, backend="plait", options={"wrapper": wrapper})
    got, want = x.clone().requires_grad_(), x.clone().requires_grad_()
    for run, y in ((compiled, got), (F.max_pool2d, want)):
        z = run(y, *kernel)
        z.backward(torch.arange(z.numel(), device=CUDA).remainder(7).view_as(z).to(dtype))
    assert torch.equal(got.grad, want.grad)


def test_gradients_of_pixels_of_nothing() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.pixel_shuffle(x[None].repeat(4, 1, 1), 2)

    got, want = (torch.ones(33, 0, device=CUDA, requires_grad=True) for _ in range(2))
    for run, x in ((torch.compile(fn, backend="plait"), got), (fn, want)):
        run(x).sum().backward()
    assert got.grad is not None and want.grad is not None and got.grad.shape == want.grad.shape


def test_numbers_of_sizes_come_back_from_a_graph() -> None:
    """A bool and a float of a size that the device finds, where Dynamo ends the graph."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.unique(x)
        n = y.shape[0]
        return y * int(n > 3), y * float(n * 0.5)

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        for wrapper in ("native", "python", "cpp", "fx"):
            torch._dynamo.reset()
            compiled = torch.compile(
                fn, backend="plait", dynamic=True, options={"wrapper": wrapper}
            )
            for k in (2, 5, 3):
                x = torch.arange(40, device=CUDA).remainder(k).float()
                for got, want in zip(compiled(x), fn(x), strict=True):
                    assert torch.equal(got, want)


CASES: dict[str, tuple[Any, Any]] = {
    "pointwise": (lambda x, y: F.gelu(x + y) * 2, lambda: (r(64, 33), r(33))),
    "transposed": (lambda x, y: x.t() + y, lambda: (r(130, 70), r(70, 130))),
    "softmax": (lambda x: F.softmax(x, -1), lambda: (r(37, 1000),)),
    "softmax of few rows": (lambda x: F.softmax(x, -1), lambda: (r(3, 1 << 20),)),
    "long rows": (lambda x: F.log_softmax(x, -1), lambda: (r(5, 50257),)),
    "norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), lambda: (r(64, 256), r(256), r(256))),
    "sums of rows and columns": (
        lambda dy, y: (
            d := y * (dy - (dy * y).sum(-1, keepdim=True)),
            d.sum((0, 1)),
            dy.sum((0, 1)),
        ),
        lambda: (r(6, 512, 771), F.softmax(r(6, 512, 771), -1)),
    ),
    "sum of all": (lambda x: (x.sum(), x.amax(), x.argmax()), lambda: (r(1000, 3001),)),
    "columns": (lambda x: torch.var_mean(x, 0), lambda: (r(5000, 37),)),
    "bf16": (
        lambda x, y: (x @ y).relu().sum(-1),
        lambda: (r(64, 64, dtype=torch.bfloat16), r(64, 64, dtype=torch.bfloat16)),
    ),
    "index": (
        lambda x, i: (x[i], x.index_add(0, i, x[i])),
        lambda: (r(40, 8), torch.arange(0, 40, 3, device=CUDA)),
    ),
    "embedding": (
        lambda x, i: F.embedding(i, x),
        lambda: (r(40, 8), torch.arange(0, 40, 3, device=CUDA)),
    ),
    "cumsum": (lambda x: x.cumsum(1), lambda: (r(7, 300),)),
    "sort": (lambda x: x.sort(-1).values + 1, lambda: (r(7, 300),)),
    "int64": (lambda x: (x * 3 // 2, x % 5), lambda: (torch.arange(-50, 50, device=CUDA),)),
    "empty": (lambda x: (x + 1, x.sum(0)), lambda: (r(0, 5),)),
    "small numbers": (
        lambda x, y: (
            F.cosine_similarity(x, y, 0),
            (x * y).clamp_min(1e-8),
            (y + 1e-30).abs() + 1e-9,
            F.normalize(y),
        ),
        lambda: (
            r(8, 4, dtype=torch.bfloat16),
            torch.zeros(8, 4, dtype=torch.bfloat16, device=CUDA),
        ),
    ),
    "a number on the host": (lambda x, s: x * s + s, lambda: (r(8), torch.tensor(3.0))),
    "both devices": (lambda x, y: (x + 1, y * 2, x.cpu() + y), lambda: (r(8), torch.randn(8))),
    "misaligned": (lambda x: x * 2, lambda: (r(65)[1:],)),
    "an input changed": (lambda x: x.mul_(2).sum(), lambda: (r(65),)),
    "a misaligned input changed": (lambda x: x.mul_(2).sum(), lambda: (r(65)[1:],)),
    "views": (lambda x: (x[2:], x.t(), x + 1), lambda: (r(8, 6),)),
    "item": (lambda x: x * int(x.shape[0]), lambda: (r(8, 6),)),
    "a number from the device": (lambda x: x * x[0, 0].item(), lambda: (r(8, 6),)),
    "data-dependent size": (lambda x: x[x > 0].exp(), lambda: (r(8, 6),)),
    "indices on the host": (lambda x, i: x[i] + 1, lambda: (r(40, 8), torch.arange(0, 40, 3))),
    "nothing at all": (
        lambda x, y: (x @ y, x.sum(), x.amax(0), torch.cat([x, x])),
        lambda: (r(5, 0), r(0, 3)),
    ),
    "a misaligned matrix": (
        lambda x, y: F.softmax(x, -1) @ y,
        lambda: (r(33 * 65 + 1)[1:].view(33, 65), r(65, 8)),
    ),
    "a misaligned half": (
        lambda x: (x * 2, x.amax(-1)),
        lambda: (r(33 * 65 + 1, dtype=torch.half)[1:].view(33, 65),),
    ),
    "extremes": (
        lambda x: (
            x.amax(1),
            x.amin(1),
            x.argmax(1),
            x.sum(1),
            x.cummax(1),
            x.sort(dim=1, stable=True),
            F.softmax(x, 1),
        ),
        lambda: (extremes(),),
    ),
    "extremes, pointwise": (
        lambda x, y: (
            torch.maximum(x, y),
            torch.fmin(x, y),
            torch.minimum(x.clamp(-1, 2), y),
            x.sign(),
            x.relu(),
            x.floor(),
            x.round(),
            x % y,
            torch.pow(x, y),
            torch.atan2(x, y),
            torch.logaddexp(x, y),
            x.exp(),
            x.log(),
            F.gelu(x),
            x == y,
            x < y,
            torch.isnan(x) | torch.isinf(y),
            x.sqrt(),
            x.tanh(),
            F.softplus(x),
            x.nan_to_num(),
        ),
        lambda: (extremes(), extremes().t()),
    ),
    "extreme integers": (
        lambda x: (
            x + 1,
            x * x,
            -x,
            x.abs(),
            x // 7,
            x % -7,
            x >> 3,
            x << 2,
            ~x,
            x.to(torch.int8),
            x.float(),
            x.amax(),
        ),
        lambda: (torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, 2**32, -(2**31)], device=CUDA),),
    ),
    "channels last": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
        lambda: (r(2, 8, 16, 16),),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_case(name: str) -> None:
    fn, make = CASES[name]
    torch.manual_seed(0)
    state = torch.get_rng_state(), torch.cuda.get_rng_state()

    def again() -> Any:
        torch.set_rng_state(state[0]), torch.cuda.set_rng_state(state[1])
        return make()

    same(fn, again)


def test_gradients_of_a_norm() -> None:
    """In half precision, where a sum in another order rounds another way: no further from float64
    than eager's."""

    def fn(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, (768,), mean, rstd, w, w, [True] * 3
        )

    dy, x, w = (
        r(*shape, dtype=torch.bfloat16) for shape in ((2, 2048, 768), (2, 2048, 768), (768,))
    )
    args = dy, x, x.float().mean(-1, True), torch.rsqrt(x.float().var(-1, keepdim=True)), w
    results = torch.compile(fn, backend="plait")(*args), fn(*args), fn(*(a.double() for a in args))
    for got, want, exact in zip(*results, strict=True):
        close(got, want, exact, "result")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_begin_anywhere(dtype: torch.dtype) -> None:
    """Rows of an odd length: parts by lanes. No further from float64 than twice eager's, and what
    is no number, or infinite, where eager has it."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return F.softmax(x, 1), x.sum(1), x.amax(1)

    x = columns(dtype)
    for got, want, exact in zip(
        torch.compile(fn, backend="plait")(x), fn(x), fn(x.double()), strict=True
    ):
        assert got.dtype == dtype and torch.equal(got.isnan(), want.isnan())
        known = want.isfinite()
        assert torch.equal(got[~known].nan_to_num(), want[~known].nan_to_num())
        ours, eagers = ((t[known].double() - exact[known]).abs().max() for t in (got, want))
        assert ours <= 2 * eagers


def test_one_compile_for_many_sizes() -> None:
    compiled = torch.compile(
        lambda x, w: F.softmax(x @ w, -1).sum(0), backend="plait", dynamic=True
    )
    w = r(64, 48)
    for n in (5, 17, 64, 1000, 0):
        x = r(n, 64)
        torch.testing.assert_close(compiled(x, w), F.softmax(x @ w, -1).sum(0))


def test_dropout() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.25), backend="plait")
    x = torch.ones(1000, 1000, device=CUDA, requires_grad=True)
    torch.manual_seed(3)
    y = compiled(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert abs(float((y == 0).double().mean()) - 0.25) < 0.002
    torch.manual_seed(3)
    assert torch.equal(compiled(x.detach()), y.detach()) and not torch.equal(
        compiled(x.detach()), y.detach()
    )


def test_exported() -> None:
    x = r(16, 32)
    compiled = plait.compile(lambda t: F.softmax(t, -1), (x,))
    torch.testing.assert_close(compiled(x), F.softmax(x, -1))
    with pytest.raises(Exception, match="cuda"):
        compiled(x.cpu())


def test_alignment_of_a_later_input() -> None:
    """One program for inputs that start at a multiple of 16 bytes and inputs that do not."""
    compiled = torch.compile(lambda x: (x.t() * 2, F.softmax(x, -1)), backend="plait")
    memory = r(64 * 64 + 8)
    for at in (0, 1, 4, 3, 0):
        x = memory[at : at + 64 * 64].view(64, 64)
        got, want = compiled(x), (x.t() * 2, F.softmax(x, -1))
        torch.testing.assert_close(got, want)


def test_gradients_cross_devices() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return ((x * 2).sigmoid().cpu() * y).sum()

    same(fn, lambda: (torch.arange(6.0, device=CUDA), torch.arange(6.0)), grad=True)


def test_autocast() -> None:
    model, exact, x = nn.Linear(64, 64).to(CUDA), nn.Linear(64, 64).to(CUDA).double(), r(32, 64)
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(lambda t: F.gelu(model(t)).sum(-1), backend="plait")
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        eager, got = F.gelu(model(x)).sum(-1), compiled(x)
    close(got, eager, F.gelu(exact(x.double())).sum(-1), "autocast")
