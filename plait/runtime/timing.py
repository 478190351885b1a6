"""Times of a program's kernels, one by one, over the buffers of real calls; and the main part of a
generated module.

In: the `call` of a generated module (its kernels are in its closure, and operators that are timed)
and what makes its inputs. Out: a `KernelTime` for each launch or call, and text. Kernels are timed
within whole calls, so that their data lies where the program leaves it. What runs on a CPU runs on
one core; the call of it from Python is in its time, about a microsecond for a kernel and some for
an operator. What runs on a GPU is timed by the device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_AHEAD_CYCLES = 200_000  # 100 us: several times what a launch from Python takes
Boxed = Callable[[list[object]], tuple[object, ...]]


@dataclass
class KernelTime:
    """One launch, or call of an operator. nbytes: of its arguments and results, each counted once.
    estimate_ns: what the compiler thought, on one core; 0 on a GPU and of an operator. best_ns: the
    fastest of all calls, on one core or the GPU."""

    name: str
    nbytes: int
    estimate_ns: int
    best_ns: int


@dataclass
class Watch:
    """What the kernels of one program tell while it is timed. at: number of the next launch of the
    call."""

    launches: list[KernelTime] = field(default_factory=list)
    at: int = 0

    def ran(self, name: str, ns: int, tensors: Sequence[Tensor], estimate_ns: int) -> None:
        """A kernel or an operator ran."""
        if self.at == len(self.launches):
            nbytes = sum(touched_nbytes(t) for t in tensors)
            self.launches.append(KernelTime(name, nbytes, estimate_ns, ns))
        launch = self.launches[self.at]
        launch.best_ns = min(launch.best_ns, ns)
        self.at += 1


class Watched(Protocol):
    """A kernel or an operator that tells a watch of its runs while it has one."""

    watch: Watch | None


def gpu_ns(launch: Callable[[], object]) -> int:
    """Nanoseconds that a GPU takes for what `launch` puts on the current stream."""
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    # The host gets ahead meanwhile: the device waits for no launch.
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    launch()
    stop.record()
    stop.synchronize()
    ms: float = start.elapsed_time(stop)
    return round(ms * 1e6)


def touched_nbytes(t: Tensor) -> int:
    """The bytes of a tensor's elements; a dimension that is expanded counts once."""
    n = t.element_size()
    for size, stride in zip(t.shape, t.stride(), strict=True):
        n *= size if stride != 0 else min(size, 1)
    return n


@contextmanager
def one_core() -> Iterator[None]:
    """Inside, PyTorch's operators run on one core in this thread, and in no other:
    torch.set_num_threads is also for threads that begin later, which would keep it."""
    linked = ctypes.CDLL(torch._C.__file__)
    set_local = getattr(linked, "MKL_Set_Num_Threads_Local", lambda n: n)
    threads, of_mkl = torch.get_num_threads(), set_local(1)
    linked.omp_set_num_threads(1)
    try:
        yield
    finally:
        linked.omp_set_num_threads(threads)
        set_local(of_mkl)


def time_kernels(
    call: Boxed, inputs: Callable[[], list[object]], seconds: float = 0.5
) -> list[KernelTime]:
    """Calls for about so many seconds (at least 3 times, at most 100) and gives the launches, and
    the calls that are timed, in order.

    inputs: makes the inputs of one call. Raises what the program raises."""
    cells = getattr(call, "__closure__", None) or ()
    kernels: list[Watched] = [c.cell_contents for c in cells if hasattr(c.cell_contents, "watch")]
    watch = Watch()
    end = time.perf_counter() + seconds
    try:
        for kernel in kernels:
            kernel.watch = watch
        with one_core():  # for operators: of kernels a watch runs all of the work itself
            for k in range(100):
                watch.at = 0
                call(inputs())
                if k >= 2 and time.perf_counter() > end:
                    break
    finally:
        for kernel in kernels:
            kernel.watch = None
    return watch.launches


def table(launches: Sequence[KernelTime]) -> list[str]:
    """A line a launch or call: time, bytes of the arguments, GB/s, the estimate of a kernel of a
    CPU; then the sum of several."""
    if not launches:
        return ["no kernels"]
    width = max(len(k.name) for k in launches)
    lines = [f"{'kernel':<{width}}  best of calls      memory         speed    estimate"]
    for k in launches:
        speed = k.nbytes / max(k.best_ns, 1)
        lines.append(
            f"{k.name:<{width}}  {_us(k.best_ns)}  {_size(k.nbytes)}  {speed:7.2f} GB/s  "
            f"{_us(k.estimate_ns) if k.estimate_ns else ''}".rstrip()
        )
    if len(launches) == 1:
        return lines
    what = f"all {len(launches)} of them"
    return [*lines, f"{what:<{width}}  {_us(sum(k.best_ns for k in launches))}"]


def _us(ns: int) -> str:
    return f"{ns / 1e3:10.1f} us"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:6.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:6.2f} KiB"


# --------------------------------------------------------------------------- running a module alone
def random_tensor(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], device: str
) -> Tensor:
    """Random contents: normal for floats, 0 or 1 for integers (valid as an index wherever there are
    two rows)."""
    out = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        return out.normal_()
    return out.random_(0, 2)


def load_constants(path: str, beside: str) -> list[Tensor]:
    """The constants that were saved beside a module; [] for the empty path."""
    if not path:
        return []
    loaded: dict[int, Tensor] = torch.load(Path(beside).parent / path, weights_only=True)
    return list(loaded.values())


def benchmark(call: Boxed, inputs: Callable[[], list[object]], name: str) -> None:
    """Calls once, then for about a second, and prints the outputs' shapes, the fastest and the
    median time; then calls for half a second more to time each kernel, and prints these times."""
    given = inputs()
    outs = call(list(given))
    shapes = [
        f"{str(o.dtype)[6:]}{list(o.shape)}" if isinstance(o, Tensor) else repr(o) for o in outs
    ]
    times: list[int] = []
    end = time.perf_counter_ns() + 1_000_000_000
    while time.perf_counter_ns() < end and len(times) < 10_000:
        start = time.perf_counter_ns()
        call(list(given))
        times.append(time.perf_counter_ns() - start)
    times.sort()
    middle = times[len(times) // 2]
    print(f"{name}: {', '.join(shapes)}")
    print(
        f"{name}: best {times[0] / 1e3:.1f} us, median {middle / 1e3:.1f} us of {len(times)} calls"
    )
    print(
        "\n".join(
            [
                "",
                "each kernel, on a CPU on one core:",
                *table(time_kernels(call, lambda: list(given))),
            ]
        )
    )
