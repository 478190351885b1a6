"""Programs on a GPU against eager, through torch.compile: collected where torch has a CUDA device."""

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


def moved(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model without dropout, its float64 twin and an input, on the GPU."""
    model, exact, x = build(name)
    return model.to(CUDA), exact.to(CUDA), x.to(CUDA)


@pytest.mark.parametrize("wrapper", ["native", "python"])
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


CASES: dict[str, tuple[Any, Any]] = {
    "pointwise": (lambda x, y: F.gelu(x + y) * 2, lambda: (r(64, 33), r(33))),
    "transposed": (lambda x, y: x.t() + y, lambda: (r(130, 70), r(70, 130))),
    "softmax": (lambda x: F.softmax(x, -1), lambda: (r(37, 1000),)),
    "long rows": (lambda x: F.log_softmax(x, -1), lambda: (r(5, 50257),)),
    "norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), lambda: (r(64, 256), r(256), r(256))),
    "sum of all": (lambda x: (x.sum(), x.amax(), x.argmax()), lambda: (r(1000, 3001),)),
    "columns": (lambda x: torch.var_mean(x, 0), lambda: (r(5000, 37),)),
    "bf16": (
        lambda x, y: (x @ y).relu().sum(-1),
        lambda: (r(64, 64, dtype=torch.bfloat16), r(64, 64, dtype=torch.bfloat16)),
    ),
    "index": (lambda x, i: (x[i], x.index_add(0, i, x[i])), lambda: (r(40, 8), torch.arange(0, 40, 3, device=CUDA))),
    "embedding": (lambda x, i: F.embedding(i, x), lambda: (r(40, 8), torch.arange(0, 40, 3, device=CUDA))),
    "cumsum": (lambda x: x.cumsum(1), lambda: (r(7, 300),)),
    "sort": (lambda x: x.sort(-1).values + 1, lambda: (r(7, 300),)),
    "int64": (lambda x: (x * 3 // 2, x % 5), lambda: (torch.arange(-50, 50, device=CUDA),)),
    "empty": (lambda x: (x + 1, x.sum(0)), lambda: (r(0, 5),)),
    "a number on the host": (lambda x, s: x * s + s, lambda: (r(8), torch.tensor(3.0))),
    "both devices": (lambda x, y: (x + 1, y * 2, x.cpu() + y), lambda: (r(8), torch.randn(8))),
    "misaligned": (lambda x: x * 2, lambda: (r(65)[1:],)),
    "an input changed": (lambda x: x.mul_(2).sum(), lambda: (r(65),)),
    "a misaligned input changed": (lambda x: x.mul_(2).sum(), lambda: (r(65)[1:],)),
    "views": (lambda x: (x[2:], x.t(), x + 1), lambda: (r(8, 6),)),
    "item": (lambda x: x * int(x.shape[0]), lambda: (r(8, 6),)),
    "channels last": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last), lambda: (r(2, 8, 16, 16),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_case(name: str) -> None:
    torch._dynamo.reset()
    fn, make = CASES[name]
    torch.manual_seed(0)
    state = torch.get_rng_state(), torch.cuda.get_rng_state()

    def again() -> Any:
        torch.set_rng_state(state[0]), torch.cuda.set_rng_state(state[1])
        return make()

    same(fn, again)


def test_one_compile_for_many_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: F.softmax(x @ w, -1).sum(0), backend="plait", dynamic=True)
    w = r(64, 48)
    for n in (5, 17, 64, 1000, 0):
        x = r(n, 64)
        torch.testing.assert_close(compiled(x, w), F.softmax(x @ w, -1).sum(0))


def test_dropout() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x, 0.25), backend="plait")
    x = torch.ones(1000, 1000, device=CUDA, requires_grad=True)
    torch.manual_seed(3)
    y = compiled(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert abs(float((y == 0).double().mean()) - 0.25) < 0.002
    torch.manual_seed(3)
    assert torch.equal(compiled(x.detach()), y.detach()) and not torch.equal(compiled(x.detach()), y.detach())


def test_another_stream() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(-1), backend="plait")
    x = r(4096, 4096)
    compiled(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            y = compiled(x)
    stream.synchronize()
    torch.testing.assert_close(y, (x * 2).sum(-1))


def test_exported() -> None:
    x = r(16, 32)
    compiled = plait.compile(lambda t: F.softmax(t, -1), (x,))
    torch.testing.assert_close(compiled(x), F.softmax(x, -1))
    with pytest.raises(Exception, match="cuda"):
        compiled(x.cpu())
