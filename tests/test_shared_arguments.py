"""Arguments of which one is written, and which share memory though they did not when their function
was compiled: as eager has it, in every target."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import plait
from plait import _native
from plait.errors import InputError, Unsupported
from plait.wrapper.program import CompileRecord, observers

WRAPPERS = ("native", "python", "cpp", "fx")


@contextmanager
def records() -> Iterator[list[CompileRecord]]:
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    try:
        yield made
    finally:
        observers.reset(token)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="plait", options={"strict": False, **options})


def reads_after(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return b + 1


def writes_both(a: Tensor, b: Tensor) -> Tensor:
    b.add_(a.sum())
    a.sub_(b.mean())
    return a.sin() * b.sum()


def as_eager(fn: Callable[..., Any], call: Callable[..., Any], given: Callable[[], Any]) -> None:
    """given: makes the same arguments each time, and what they are views of."""
    want_args, got_args = given(), given()
    want, got = fn(*want_args[:2]), call(*got_args[:2])
    torch.testing.assert_close((got, *got_args), (want, *want_args))


def windows(i: int, j: int, n: int = 6) -> Callable[[], tuple[Tensor, ...]]:
    def make() -> tuple[Tensor, ...]:
        base = torch.arange(20.0)
        return base[i : i + n], base[j : j + n], base

    return make


def apart() -> tuple[Tensor, ...]:
    return torch.arange(6.0), torch.arange(6.0) + 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("fn", [reads_after, writes_both])
def test_apart_then_shared(fn: Callable[..., Any], wrapper: str) -> None:
    call = compiled(fn, wrapper=wrapper)
    as_eager(fn, call, apart)
    with records() as made:
        for given in (windows(0, 3), windows(4, 1), windows(2, 2), apart, windows(0, 5)):
            as_eager(fn, call, given)
    (record,) = made
    (step,) = record.ladder
    assert step.rung == "eager" and "shares memory" in step.reason, step


@pytest.mark.parametrize("dynamic", [False, None])
def test_shared_otherwise_than_at_first(dynamic: bool | None) -> None:
    """Of arguments that share memory AOTAutograd makes one, at offsets that nobody guards."""
    torch._dynamo.reset()
    call = torch.compile(writes_both, backend="plait", dynamic=dynamic, options={"strict": False})
    for given in (windows(0, 3), windows(1, 3), windows(6, 4), windows(0, 3), apart):
        as_eager(writes_both, call, given)


def test_what_lies_beside_is_no_cause() -> None:
    """Columns of one matrix, whose ranges of addresses meet, and halves of one tensor."""

    def columns() -> tuple[Tensor, ...]:
        base = torch.arange(60.0).view(6, 10)
        return base[:, :4], base[:, 4:8], base

    for given in (columns, windows(0, 6)):
        call = compiled(reads_after)
        as_eager(reads_after, call, given)
        with records() as made:
            as_eager(reads_after, call, given)
        assert not made, made[0].ladder


def test_overlapping_columns_from_the_first_call() -> None:
    """Views of two dimensions, of which AOTAutograd takes some for apart that are not."""
    rng = random.Random(0)

    def drawn(i: int, j: int, k: int, m: int) -> Callable[[], tuple[Tensor, ...]]:
        def make() -> tuple[Tensor, ...]:
            base = torch.arange(80.0)
            first = base.as_strided((3, 2), (i, 1), 0)
            return first, base.as_strided((3, 2), (j, m), k), base

        return make

    for _ in range(8):
        given = drawn(
            *(rng.randrange(2, 9) for _ in range(2)), rng.randrange(6), rng.randrange(1, 3)
        )
        as_eager(reads_after, compiled(reads_after), given)


def test_memory_of_numpy_s() -> None:
    """Two storages, one memory."""

    def shared() -> tuple[Tensor, ...]:
        array = np.arange(10, dtype=np.float32)
        return torch.from_numpy(array)[:6], torch.from_numpy(array)[2:8], torch.from_numpy(array)

    call = compiled(reads_after)
    as_eager(reads_after, call, apart)
    as_eager(reads_after, call, shared)


def test_training() -> None:
    def fn(running: Tensor, x: Tensor, w: Tensor) -> Tensor:
        running.mul_(0.5)
        return (x * w).sin().sum() + running.sum()

    call = compiled(fn)
    for shared in (False, True, False):
        grads = []
        for f in (fn, call):
            base = torch.arange(12.0)
            w = torch.ones(6, requires_grad=True)
            x = base[3:9] if shared else base[3:9].clone()
            f(base[:6] if shared else base[:6].clone(), x, w).backward()
            grads.append(w.grad)
        torch.testing.assert_close(grads[1], grads[0])


def test_strict() -> None:
    call = compiled(reads_after, strict=True)
    call(*apart())
    with pytest.raises(Unsupported, match="shares memory"):
        call(*windows(0, 3)()[:2])


def test_without_dynamo() -> None:
    call = plait.compile(reads_after, apart())
    with pytest.raises(InputError, match="share memory"):
        call(*windows(0, 3)()[:2])


def test_functions_that_write_nothing_are_not_asked() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    call = compiled(fn)
    as_eager(fn, call, apart)
    with records() as made:
        as_eager(fn, call, windows(0, 3))
    assert not made


def test_every_overlap_is_found() -> None:
    """Tensors of random strides, against the sets of bytes that they have."""
    rng = random.Random(0)
    asked = _native.Apart(lambda *_: False, lambda *_: True, ((True, 0, -1), (False, 1, -1)))
    memory = torch.zeros(4096, dtype=torch.uint8)

    def drawn() -> tuple[Tensor, set[int]]:
        dtype = rng.choice((torch.uint8, torch.int16, torch.float32, torch.float64))
        size = dtype.itemsize
        shape = [rng.choice((0, 1, 2, 3, 5)) if rng.random() < 0.2 else rng.randrange(1, 6)]
        shape += [rng.randrange(1, 5) for _ in range(rng.randrange(3))]
        strides = [rng.randrange(0, 12) for _ in shape]
        at = rng.randrange(12)
        x = memory.view(dtype).as_strided(shape, strides, at)
        places = [at]
        for n, stride in zip(shape, strides, strict=True):
            places = [p + k * stride for p in places for k in range(n)]
        return x, {p * size + k for p in places for k in range(size)}

    found = set()
    for _ in range(2000):
        (a, a_bytes), (b, b_bytes) = drawn(), drawn()
        want = not a_bytes.isdisjoint(b_bytes)
        assert asked(a, b) is want, (a.shape, a.stride(), b.shape, b.stride())
        found.add(want)
    assert found == {True, False}
