"""How recordings use the pools of torch's allocator, on one that only counts who holds a pool, as
torch's does."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.runtime import graphs

Id = tuple[int, int]


class Allocator:
    """holders: of each pool, none once it is given back. active: pools that are allocated from, the
    first one first."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.holders: dict[Id, int] = {}
        self.active: list[Id] = []
        self.fails: set[str] = set()
        self.backend = "native"

    def begin(self, _device: int, pool: Id) -> None:
        assert pool not in self.active and self.holders.get(pool) != 0
        self.holders[pool] = self.holders.get(pool, 0) + 1
        self.active.append(pool)

    def end(self, _device: int, pool: Id) -> None:
        if pool not in self.active:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.active.remove(pool)

    def release(self, _device: int, pool: Id) -> None:
        assert self.holders[pool] > 0
        self.holders[pool] -= 1


class Graph:
    allocator: Allocator
    pool: Id | None = None

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, pool: Id, capture_error_mode: str) -> None:
        self.allocator.begin(0, pool)
        if "begin" in self.allocator.fails:
            raise RuntimeError("begin")
        self.begun = pool

    def capture_end(self) -> None:
        if "end" in self.allocator.fails:
            raise RuntimeError("end")
        self.allocator.end(0, self.begun)
        self.pool = self.begun

    def instantiate(self) -> None: ...

    def raw_cuda_graph_exec(self) -> int:
        return 1

    def __del__(self) -> None:
        if self.pool is not None:
            self.allocator.release(0, self.pool)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Graph.allocator = Allocator()
    generator = SimpleNamespace(graphsafe_set_state=lambda state: None, clone_state=lambda: None)
    cuda: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, next(made.ids)), "CUDAGraph": Graph,
        "current_stream": lambda device: None, "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0, "set_stream": lambda stream: None,
        "memory_snapshot": lambda: [
            {"total_size": n, "segment_pool_id": (0, n)} for n in (*range(100), *range(100))
        ],
        "default_generators": [generator], "get_allocator_backend": lambda: made.backend,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1000),
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, method in (
        ("beginAllocateCurrentThreadToPool", made.begin),
        ("endAllocateToPool", made.end),
        ("releasePool", made.release),
        ("clearCublasWorkspaces", lambda: None),
    ):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", method, raising=False)
    monkeypatch.setattr(graphs, "_stream", lambda device: None)
    return made


def test_recordings_have_one_pool_together_and_one_each(allocator: Allocator) -> None:
    made = []
    for _ in range(2):
        capture = graphs.Capture(0)
        made.append(capture)
        (shared,) = allocator.active
        capture.keep(True)
        (own,) = allocator.active
        capture.keep(False)
        assert allocator.active == [shared] != [own]
        assert capture.end() == (1, 2 * own[1], 2 * shared[1], 500)
        assert not allocator.active and gc.isenabled()
    first, second = made
    assert first._shared is second._shared and first._kept is not second._kept
    assert allocator.holders == {first._shared.id: 3, first._kept.id: 1, second._kept.id: 1}
    gone = first._kept.id
    del made, capture, first
    assert allocator.holders == {second._shared.id: 2, gone: 0, second._kept.id: 1}
    del second
    assert not any(allocator.holders.values())
    last = graphs.Capture(0)
    last.end()
    assert allocator.holders[last._shared.id] == 2 and len(allocator.holders) == 5


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_recording_that_fails_holds_no_pool(allocator: Allocator, where: str) -> None:
    other = graphs.Capture(0)
    other.end()
    allocator.fails = {where}
    if where == "begin":
        with pytest.raises(RuntimeError, match="begin"):
            graphs.Capture(0)
    else:
        capture = graphs.Capture(0)
        capture.keep(True)
        capture.keep(False)
        with pytest.raises(RuntimeError, match="end"):
            capture.end()
        capture.abort()
        del capture
    allocator.fails = set()
    gc.collect()
    assert not allocator.active and gc.isenabled()
    assert {pool: n for pool, n in allocator.holders.items() if n} == {
        other._shared.id: 2,
        other._kept.id: 1,
    }
    graphs.Capture(0).end()


def test_other_allocators_have_no_pools(allocator: Allocator) -> None:
    allocator.backend = "cudaMallocAsync"
    with pytest.raises(RuntimeError, match="own allocator, and this one is cudaMallocAsync"):
        graphs.Capture(0)
    assert not allocator.holders
