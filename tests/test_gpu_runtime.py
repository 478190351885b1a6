"""What happens around a program on a GPU: streams, threads, no memory left, huge tensors, a second
GPU, data races."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from tests.models import gpt2, tokens
from tests.test_models import close
from tests.test_threads import call_at_once

ROOT = Path(__file__).parent.parent
CUDA = torch.device("cuda", 0)
SLEEP = 20_000_000  # clock cycles, about 10 ms
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, there is one")
sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)


def several_kernels(x: Tensor, w: Tensor) -> Tensor:
    """Intermediates that live in the arena, a product between the kernels, and an output of its
    own."""
    y = F.softmax(x, -1) @ w
    return F.layer_norm(y, (y.shape[-1],)) @ w.t()


def checked(got: Tensor, fn: Callable[..., Tensor], *args: Tensor) -> None:
    """got is fn's result, no further from float64 than eager's."""
    close(got, fn(*args), fn(*(a.double() for a in args)), "result")


# ------------------------------------------------------------------------------------------ streams
def test_another_stream() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 2).sum(-1)

    compiled = torch.compile(fn, backend="plait")
    x = torch.randn(4096, 4096, device=CUDA)
    compiled(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        x += 1
        for _ in range(20):
            y = compiled(x)
    stream.synchronize()
    checked(y, fn, x)


def test_two_streams_at_once() -> None:
    """A call on one stream starts while the kernels of a call on another one wait: intermediates
    stay apart."""
    compiled = torch.compile(several_kernels, backend="plait")
    w = torch.randn(256, 256, device=CUDA)
    xs = [torch.randn(512, 256, device=CUDA) * (k + 1) for k in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    compiled(xs[0], w)
    for _ in range(3):
        got: list[Tensor] = []
        torch.cuda.synchronize()
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                got.append(compiled(x, w))
        torch.cuda.synchronize()
        for x, y in zip(xs, got, strict=True):
            checked(y, several_kernels, x, w)


def test_an_output_recorded_on_another_stream() -> None:
    """Its memory is not given to a later call before the other stream has read it."""
    compiled = torch.compile(several_kernels, backend="plait")
    w = torch.randn(256, 256, device=CUDA)
    x, other = torch.randn(512, 256, device=CUDA), torch.randn(512, 256, device=CUDA)
    want = compiled(x, w).clone()
    reader = torch.cuda.Stream()
    y = compiled(x, w)
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLEEP)
        copied = y.clone()
        y.record_stream(reader)
    del y
    for _ in range(10):
        compiled(other, w)
    torch.cuda.synchronize()
    assert torch.equal(copied, want)


def test_backward_on_a_side_stream() -> None:
    compiled = torch.compile(several_kernels, backend="plait")
    w = torch.randn(256, 256, device=CUDA)
    x, twin = (
        torch.randn(512, 256, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
        for _ in "ab"
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        compiled(x.requires_grad_(), w).square().sum().backward()
    stream.synchronize()
    truth = twin.double().requires_grad_()
    several_kernels(twin.requires_grad_(), w).square().sum().backward()
    several_kernels(truth, w.double()).square().sum().backward()
    assert x.grad is not None and twin.grad is not None and truth.grad is not None
    close(x.grad, twin.grad, truth.grad, "gradient")


# ------------------------------------------------------------------------------------------ threads
def test_threads_on_their_own_streams() -> None:
    model = gpt2().eval().to(CUDA)
    compiled = torch.compile(model, backend="plait")
    inputs = [tokens(2).to(CUDA) for _ in range(4)]
    with torch.no_grad():
        compiled(inputs[0])
        want = [model(x) for x in inputs]
    torch.cuda.synchronize()
    call_at_once(
        compiled,
        inputs,
        want,
        times=50,
        rtol=1e-3,
        atol=1e-4,
        around=lambda: torch.cuda.stream(torch.cuda.Stream()),
    )


def test_a_thread_that_never_met_cuda() -> None:
    """A program's first call may be the first that its thread asks of the driver."""
    x = torch.randn(64, 64, device=CUDA)
    compiled = plait.compile(lambda t: t.exp() + 1, (x,))
    got: list[Tensor] = []
    t = threading.Thread(target=lambda: got.append(compiled(x)))
    t.start()
    t.join(timeout=60)
    torch.testing.assert_close(got[0], x.exp() + 1)


# ------------------------------------------------------------------------------------------- memory
@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """This process may take no more of the device's memory than it holds now."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(CUDA) + nbytes) / total, CUDA
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("wrapper", ["native", "python"])
def test_out_of_memory(wrapper: str) -> None:
    """A clean error wherever in the call it happens, nothing is kept, and the next call works."""

    def fn(x: Tensor) -> Tensor:
        y = torch.sin(x[:, None] * x[None, :])
        z = y @ y
        return (z @ y).relu()

    compiled = torch.compile(fn, backend="plait", dynamic=True, options={"wrapper": wrapper})
    small = torch.randn(300, device=CUDA)
    checked(compiled(small), fn, small)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left in cycles must not be freed in the middle of this one
    for n in (
        26000,
        14000,
        18000,
    ):  # the first, the second, ... of three matrices of n*n floats does not fit into 2 GB
        before = torch.cuda.memory_allocated()
        with at_most(2 << 30):
            big = torch.randn(n, device=CUDA)
            with pytest.raises(torch.OutOfMemoryError):
                compiled(big)
            del big
            assert torch.cuda.memory_allocated() == before
            checked(compiled(small), fn, small)
        assert torch.cuda.memory_allocated() == before
    big = torch.randn(9000, device=CUDA)
    assert compiled(big).shape == (9000, 9000)


def test_out_of_memory_in_a_backward_pass() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.sin(x[:, None] * x[None, :]).matmul(x).cos().sum()

    compiled = torch.compile(fn, backend="plait", dynamic=True)

    def gradient(n: int) -> Tensor:
        x = torch.linspace(-1, 1, n, device=CUDA, requires_grad=True)
        compiled(x).backward()
        assert x.grad is not None
        return x.grad

    want = gradient(300)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with at_most(1 << 30), pytest.raises(torch.OutOfMemoryError):
        gradient(40000)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(gradient(300), want)


def test_calls_keep_nothing() -> None:
    compiled = torch.compile(several_kernels, backend="plait")
    w = torch.randn(256, 256, device=CUDA, requires_grad=True)
    x = torch.randn(512, 256, device=CUDA)
    seen = []
    for _ in range(4):
        compiled(x, w).sum().backward()
        w.grad = None
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert len(set(seen[1:])) == 1, seen


# ----------------------------------------------------------------------------------- beyond 32 bits
def test_segments_that_grow() -> None:
    """Programs and recordings where the allocator's segments are expandable, which is so for all of
    a process."""
    names = (
        "test_moving_inputs_are_patched", "test_results_stay_valid",
        "test_one_recording_for_each_size", "test_what_is_saved_survives_other_recordings",
    )  # fmt: skip
    tests = [f"tests/test_gpu_graphs.py::{name}" for name in names]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0 and f"{len(names)} passed" in done.stdout, done.stdout + done.stderr


def wait_for_memory(nbytes: int) -> None:
    """Until so much of the device is free: tests beside this one hold some for a while."""
    deadline = time.monotonic() + 240
    while torch.cuda.mem_get_info()[0] < nbytes:
        assert time.monotonic() < deadline, torch.cuda.mem_get_info()
        time.sleep(0.5)


def test_more_elements_than_32_bits_count() -> None:
    wait_for_memory(28 << 30)  # eager's sum of 2**31 bools takes 16 GiB
    n = 2**31 + 7
    x = torch.zeros(n, dtype=torch.int8, device=CUDA)
    x[-5:] = 3
    x[12345] = 7

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, (x == 3).sum(), x.argmax(), x[n - 6 :] * 2

    got, want = torch.compile(fn, backend="plait")(x), fn(x)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)
    del got, want
    index = torch.tensor([n - 1, 0, 12345, n - 6], device=CUDA)
    taken = torch.compile(lambda x, i: x[i] + 1, backend="plait")(x, index)
    assert taken.tolist() == [4, 1, 8, 1]


def test_a_huge_matrix_with_dynamic_sizes() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() + x.shape[0] % 5, x.sum(0)

    compiled = torch.compile(fn, backend="plait", dynamic=True)
    for n in (100, 46343):
        x = torch.randint(-9, 9, (n, n), dtype=torch.int8, device=CUDA)
        got, want = compiled(x), fn(x)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert got[0].stride() == want[0].stride()


# ----------------------------------------------------------------------------------------- two GPUs
@two_gpus
def test_a_program_on_the_second_gpu() -> None:
    """While the first is current; equal kernels on both share what was built but not what was
    loaded."""
    compiled = torch.compile(several_kernels, backend="plait")
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        w, x = torch.randn(256, 256, device=device), torch.randn(512, 256, device=device)
        for _ in range(2):
            y = compiled(x, w)
            assert y.device == torch.device(device) and torch.cuda.current_device() == 0
            checked(y, several_kernels, x, w)


@two_gpus
def test_gradients_on_the_second_gpu() -> None:
    compiled = torch.compile(several_kernels, backend="plait")
    w = torch.randn(256, 256, device="cuda:1")
    x = torch.randn(64, 256, device="cuda:1", requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    compiled(x, w).sum().backward()
    several_kernels(twin, w).sum().backward()
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-3, atol=1e-3)


@two_gpus
def test_a_program_over_two_gpus() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = (x.sin() * 2).to("cuda:1")
        return (a + y).exp().sum(-1), (y * 3).to("cuda:0") + x

    compiled = torch.compile(fn, backend="plait")
    x, y = torch.randn(128, 64, device="cuda:0"), torch.randn(128, 64, device="cuda:1")
    for _ in range(3):
        for got, want in zip(compiled(x, y), fn(x, y), strict=True):
            assert got.device == want.device
            torch.testing.assert_close(got, want)


# -------------------------------------------------------------------------------------------- races
@sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str, tmp_path: Path) -> None:
    """A sample of kernels, each tensor in an allocation of its own. What they need is built first,
    without the tool."""
    env = {**os.environ, "PLAIT_CACHE_DIR": str(tmp_path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, "-m", "tests.gpu_programs"]
    checker = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--target-processes",
        "application-only",
        "--error-exitcode",
        "9",
    ]
    checker += [
        "--report-api-errors",
        "no",
    ]  # asking for a parameter too many is how the launcher counts them
    for command in (program, [*checker, *program]):
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[:8000]
        assert "programs run" in done.stdout
