"""Python threads that call one compiled model at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.runtime.timing import time_kernels
from tests.models import gpt2, tokens
from tests.test_models import close


def call_at_once(
    compiled: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    want: Sequence[Tensor],
    times: int,
    rtol: float,
    atol: float,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """A thread an input calls compiled so many times, inside of `around()`, and always gets what is
    wanted."""
    wrong: list[str] = []
    start = threading.Barrier(len(inputs))

    def work(k: int) -> None:
        with torch.no_grad(), around():
            start.wait()
            for _ in range(times):
                got = compiled(inputs[k])
                if not torch.allclose(got, want[k], rtol=rtol, atol=atol):
                    wrong.append(f"thread {k} is off by {(got - want[k]).abs().max()}")
                    return

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.is_alive() for t in threads), "a call hangs"
    assert not wrong, wrong


def test_two_threads_call_one_model() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gpt2().eval()
    compiled = torch.compile(model, backend="plait")
    inputs = [tokens(2) for _ in range(2)]
    with torch.no_grad():
        compiled(inputs[0])
        want = [model(x) for x in inputs]
    call_at_once(compiled, inputs, want, times=60, rtol=1e-4, atol=1e-5)


def test_threads_compile_at_once() -> None:
    torch._dynamo.reset()

    def work(k: int, out: list[Tensor | None]) -> None:
        compiled = torch.compile(lambda x: torch.softmax(x * (k + 1), -1) + k, backend="plait")
        out[k] = compiled(torch.arange(12.0).view(3, 4))

    results: list[Tensor | None] = [None] * 4
    threads = [threading.Thread(target=work, args=(k, results)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    for k, got in enumerate(results):
        truth = torch.softmax(torch.arange(12.0, dtype=torch.float64).view(3, 4) * (k + 1), -1) + k
        assert got is not None
        close(got, truth.float(), truth, f"thread {k}")


def test_kernels_are_timed_on_one_core_in_their_own_thread_alone() -> None:
    """What begins meanwhile has all cores, for good: Dynamo guards their number, too."""
    seen: list[int] = []
    threads = torch.get_num_threads()

    def call(given: list[object]) -> tuple[object, ...]:
        seen.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return ()

    torch.set_num_threads(2)
    try:
        time_kernels(call, list, seconds=0.0)
        assert seen == [1, 2] * 3 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
