"""Python threads that call one compiled model at once."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from tests.models import gpt2, tokens
from tests.test_models import close


def test_two_threads_call_one_model() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = gpt2().eval()
    compiled = torch.compile(model, backend="plait")
    inputs = [tokens(2) for _ in range(2)]
    with torch.no_grad():
        compiled(inputs[0])
        want = [model(x) for x in inputs]
    wrong: list[str] = []
    start = threading.Barrier(2)

    def work(k: int) -> None:
        with torch.no_grad():
            start.wait()
            for _ in range(60):
                got: Tensor = compiled(inputs[k])
                if not torch.allclose(got, want[k], rtol=1e-4, atol=1e-5):
                    wrong.append(f"thread {k} is off by {(got - want[k]).abs().max()}")
                    return

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.is_alive() for t in threads), "a call hangs"
    assert not wrong, wrong


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
