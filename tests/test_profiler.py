"""torch.profiler over compiled programs: kernels by name, PyTorch's own operators, forward,
backward, both targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import plait
from plait.tools.report import Report
from plait.wrapper.instructions import Launch


class Net(nn.Module):
    """A matmul, an op without a rule and kernels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.nn.functional.gelu(self.linear(x))).softmax(0).cumprod(1)


def launches(report: Report) -> Counter[str]:
    """How often each kernel is launched by the graphs of a report."""
    return Counter(i.kernel for g in report.graphs for i in g.wrapper.body if isinstance(i, Launch))


def ranges(run: Callable[[], object]) -> dict[str, list[float]]:
    """Name -> durations in microseconds of everything that a profiler shows of run()."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    found: dict[str, list[float]] = {}
    for event in profiled.events():
        found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return found


@pytest.mark.parametrize("wrapper", ["native", "python"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_training_step_shows_every_kernel_and_call(wrapper: str, threads: int) -> None:
    torch._dynamo.reset()
    before = torch.get_num_threads()
    net, x, options = Net(), torch.randn(500, 96, requires_grad=True), {"wrapper": wrapper}
    want = launches(plait.explain(net, x, options=options, quiet=True))
    compiled = torch.compile(net, backend="plait", options=options)
    torch.set_num_threads(threads)
    try:
        compiled(x).sum().backward()
        found = ranges(lambda: compiled(x).sum().backward())
    finally:
        torch.set_num_threads(before)
    shown = Counter({n: len(times) for n, times in found.items() if n.startswith("plait_")})
    assert shown == want and len(want) >= 3
    assert all(time > 0 for name in want for time in found[name])
    assert "aten::addmm" in found and "aten::mm" in found  # forward and backward


def test_a_direct_callable_shows_its_kernels() -> None:
    net, x = Net().eval(), torch.randn(50, 96)
    compiled = plait.compile(net, (x,))
    found = ranges(lambda: compiled(x))
    assert sum(len(t) for n, t in found.items() if n.startswith("plait_")) >= 2
    assert "aten::addmm" in found


def test_a_stopped_profiler_sees_and_changes_nothing() -> None:
    net, x = Net().eval(), torch.randn(50, 96)
    compiled = torch.compile(net, backend="plait")
    with torch.no_grad():
        want = compiled(x)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            assert torch.equal(compiled(x), want)
        seen = len(profiled.events())
        assert torch.equal(compiled(x), want)
        assert len(profiled.events()) == seen
