"""`torch.use_deterministic_algorithms(True)`: no sums in any order, new memory that shows, nothing
measured; and what is the same from run to run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import bits, warm
from tests.test_cuda_programs import compile_only as compile_only
from tests.test_cuda_programs import fakes, record


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def add(x: Tensor, i: Tensor) -> Tensor:
    return x.scatter_add(0, i, x * 2)


def put(x: Tensor, i: Tensor) -> Tensor:
    return x.index_put((i,), x * 2)


def accumulate(x: Tensor, i: Tensor) -> Tensor:
    return x.index_put((i,), x * 2, accumulate=True)


CALLS: dict[Callable[..., Any], str] = {
    add: "aten::scatter_add", put: "aten::index_put", accumulate: "aten::index_put",
}  # fmt: skip


def program(fn: Callable[..., Any]) -> Any:
    mode, (x,) = fakes((1000,))
    with mode:
        i = torch.empty(1000, dtype=torch.int64, device="cuda")
    return record(fn, x, i, mode=mode)


@pytest.mark.parametrize("fn", CALLS, ids=lambda f: f.__name__)
def test_a_gpu_sums_in_order(
    fn: Callable[..., Any], compile_only: None, deterministic: None
) -> None:
    assert CALLS[fn] in program(fn).fallback_reasons
    torch.use_deterministic_algorithms(False)
    assert CALLS[fn] not in program(fn).fallback_reasons  # kernels of ours are faster


def test_integers_and_extremes_have_no_order(compile_only: None, deterministic: None) -> None:
    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        most = i.scatter_reduce(0, i, i * 3, "amax")
        return most, i.scatter_add(0, i, i * 2)

    assert program(fn).fallback_reasons == {}
    assert "tl.atomic_add" in program(fn).kernel_source


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_new_memory_is_filled_as_eager_fills_it(dtype: torch.dtype, deterministic: None) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.empty(3, dtype=dtype), x.new_empty((2, 2), dtype=dtype)

    x = torch.ones(2)
    assert bits.equal(fn(x), torch.compile(fn, backend="plait", options={"strict": True})(x))


def test_nothing_is_measured(deterministic: None) -> None:
    x = torch.randn(16)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="plait", mode="max-autotune")
    with pytest.warns(UserWarning, match="measures no kernels"):
        torch.testing.assert_close(compiled(x), x.sin() * 2)


STEPS = """
import torch
from tests.models import network, step
torch.manual_seed(0)
module, x = network().train(), torch.randn(2, 3, 31, 31)
compiled = torch.compile(module, backend="plait")
for t in step(compiled, module, x, True):
    print(hash(t.detach().double().sum().item()), t.detach().flatten()[:2].tolist())
"""


def test_processes_agree() -> None:
    """Training on a CPU, bit for bit, with the same number of threads. Strings hash otherwise in
    the second process."""
    first = warm.run("-c", STEPS, env=os.environ)
    fresh = [sys.executable, "-W", "ignore", "-c", STEPS]
    second = subprocess.run(fresh, capture_output=True, text=True, check=True)
    assert first.returncode == 0, first.stderr
    assert first.stdout and first.stdout == second.stdout
