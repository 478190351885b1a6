"""What is told of recompiles: which guard failed, and what would avoid it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch

import plait
from plait.capture.recompiles import ADVICE, Recompiles, advice, of_process

nn, ones = torch.nn, torch.ones


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Recompiles]:
    """fn by a back end that compiles nothing, and what it is told of recompiles."""
    recompiles = Recompiles()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recompiles.note()
        return gm.forward

    return torch.compile(fn, backend=backend, **options), recompiles


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Way(Enum):
    UP = 1
    DOWN = 2


@dataclass
class Flag:
    on: bool


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * by


one = ones(3)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], str, str]] = {
    "size": (sine, (ones(4),), (ones(5),), "size mismatch at index 0", "mark_dynamic"),
    "one": (sine, (ones(4),), (ones(1),), "size mismatch", "sizes 0 and 1 have a graph each"),
    "dtype": (sine, (ones(4),), (ones(4).double(),), "expected Float", "convert before"),
    "rank": (sine, (ones(4),), (ones(4, 4),), "rank mismatch", "reshape before"),
    "layout": (sine, (ones(4, 3),), (ones(3, 4).t(),), "stride mismatch", ".contiguous()"),
    "gradient": (sine, (one,), (ones(3).requires_grad_(),), "requires_grad=0", ".detach()"),
    "argument": (
        lambda x, n: x * n,
        (one, 2),
        (one, 3),
        "== 2",
        "lets a number that is an argument vary",
    ),
    "attribute": (Counting(), (one,), (one,), ".calls == 0", "buffer"),
    "closure": (lambda x, f: f(x), (one, scaled(2)), (one, scaled(3)), "== 2", "as an argument"),
    "flag": (
        lambda x, f: x * 2 if f.on else -x,
        (one, Flag(True)),
        (one, Flag(False)),
        ".on",
        "value of a flag",
    ),
    "text": (lambda x, how: x + len(how), (one, "a"), (one, "b"), "how == 'a'", "each text"),
    "items": (lambda xs: sum(xs), ([one],), ([one, one + 1],), "len(xs) == 1", "pad the list"),
    "keys": (lambda d: sum(d.values()), ({"a": one},), ({"b": one},), "'a'", "set of keys"),
    "shared": (lambda x, y: x + y, (one, ones(3)), (one, one), "Duplicate tensor", "one tensor"),
    "apart": (lambda x, y: x + y, (one, one), (one, ones(3)), " is ", "one tensor"),
    "class": (sine, (one,), (nn.Parameter(one, False),), "expected type", "no plain tensor"),
    "object": (lambda x, e: x + e.value, (one, Way.UP), (one, Way.DOWN), "check_obj_id", "one obj"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_guard_that_failed_and_what_avoids_it(case: str) -> None:
    fn, before, now, guard, remedy = CASES[case]
    call, recompiles = compiled(fn)
    call(*before)
    assert not recompiles.found
    call(*now)
    (found,) = recompiles.found
    assert found.number == 2 and "test_recompiles.py:" in found.function
    (failed,) = found.guards
    assert guard in failed.text and remedy in advice(failed.text), failed
    assert f"compile 2: `{failed.text}`" in found.line and remedy in found.line


def test_state_around_a_call() -> None:
    call, recompiles = compiled(sine)
    call(one)
    with torch.no_grad():
        call(one)
    with torch.autocast("cpu"):
        call(one)
    first, second = recompiles.found
    assert "grad_mode` failed: with and without" in first.line
    assert "autocast" in second.line and "enter it inside the function" in second.line


def test_functions_that_dynamo_names_are_told_in_words() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    call, recompiles = compiled(f)
    for n in (4, 5):
        call(ones(n))
    line = f.__code__.co_firstlineno + 2
    assert f".f (after its break in line {line}) (test_rec" in recompiles.found[-1].function
    call, recompiles = compiled(nn.Sequential(nn.ReLU()))
    for n in (4, 5):
        call(ones(n))
    assert recompiles.found[0].function.startswith("a module of torch's own (")


def test_lines_of_the_user() -> None:
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x[:2] if x.shape[0] % 2 == 0 else x  # asks

    call, recompiles = compiled(halved, dynamic=True)
    call(ones(4))
    call(ones(5))
    (found,) = recompiles.found
    line = halved.__code__.co_firstlineno
    assert f"halved (test_recompiles.py:{line}), compile 2" in found.line
    assert "% 2) == 0`" in found.line and "where nothing is asked, one graph" in found.line


def test_of_several_graphs_advice_is_given_once() -> None:
    call, recompiles = compiled(Counting())
    for _ in range(3):
        call(one)
    assert [r.number for r in recompiles.found] == [2, 3]
    line = recompiles.found[-1].line
    assert "calls == 1" in line and "calls == 0" in line and line.count("buffer") == 1


def test_a_graph_whose_object_is_gone() -> None:
    recompiles = Recompiles()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recompiles.note()
        return gm.forward

    for rate in (0.1, 0.2):
        parameter = nn.Parameter(ones(3))
        parameter.grad = ones(3)
        optimiser = torch.optim.SGD([parameter], lr=rate)
        torch.compile(optimiser.step, backend=backend)()
        del optimiser, parameter
        gc.collect()
    (found,) = recompiles.found
    assert "got deallocated` failed: an object that the graph was made for is gone" in found.line


def test_guards_of_other_back_ends_are_not_told() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(f, backend="eager")(ones(4))
    call, recompiles = compiled(f)
    call(ones(5))
    assert not recompiles.found
    call(ones(6, 6))
    (found,) = recompiles.found
    assert [g.text for g in found.guards] == [found.guards[0].text] and "rank" in found.line


def test_the_log_and_explain_tell(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    call = torch.compile(f, backend="plait")
    with caplog.at_level(logging.INFO, logger="plait"):
        call(ones(4))
        call(ones(5))
    (found,) = of_process.found
    assert f"compiled again: {found.line}" in caplog.messages
    report = plait.explain(lambda x: x + 1, ones(3), quiet=True)
    assert report.recompiles == (found.line,)
    assert f"compiled again in this process:\n  {found.line}\n" in report.text
    # explain compiles apart: nothing of it is a recompile, and nothing of it stays.
    assert plait.explain(call, ones(5), quiet=True).recompiles == (found.line,)
    assert len(of_process.found) == 1


def test_explain_tells_what_its_own_call_compiles_again() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    def twice(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + inner(x[:-1])[0]

    report = plait.explain(twice, ones(5), quiet=True)
    assert any("inner" in line and "size mismatch" in line for line in report.recompiles)
    assert not of_process.found


def test_what_tools_compile_is_no_recompile_of_the_users() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    for _ in range(2):
        plait.bisect(outer, ones(5), quiet=True)
        plait.profile(outer, ones(5), calls=1, quiet=True)
    assert not of_process.found
    assert not plait.explain(outer, ones(5), quiet=True).recompiles


@pytest.mark.parametrize("guard", ["x ** 2 == n", "something new"])
def test_what_nobody_knows_has_no_advice(guard: str) -> None:
    assert advice(guard) == ""


def test_threads_that_compile_at_once_have_advice() -> None:
    told = "Unexpected recompilation: runtime guards failed even though they passed during"
    assert "threads" in advice(told)


def test_each_advice_is_one_sentence() -> None:
    assert all(text and text[-1] != "." and "\n" not in text for _, text in ADVICE)


def test_what_is_told_twice_is_one_line() -> None:
    def again(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    for _ in range(2):
        torch._dynamo.reset()
        run = torch.compile(again, backend="plait")
        run(ones(4)), run(ones(4, 2))
    lines = plait.explain(again, ones(4), quiet=True).recompiles
    assert len([line for line in lines if "again (test_recompiles.py" in line]) == 1


@pytest.mark.parametrize("other", [None, "eager"])
def test_the_first_compile_made_no_graph(other: str | None) -> None:
    """It ended at a break before any operator. What another back end did so is none of ours."""

    def fn(x: torch.Tensor, train: bool) -> torch.Tensor:
        if train:
            torch._dynamo.graph_break()
        return x.sin() + 1

    if other is not None:
        torch.compile(fn, backend=other)(one, True)
    ours = torch.compile(fn, backend="plait")
    of_process.found.clear()
    of_process.compiles.clear()  # a reset begins to count again
    if other is None:
        ours(one, True)
    ours(one, False)
    told = [(r.number, [g.text for g in r.guards]) for r in of_process.found]
    assert told == ([] if other else [(2, ["train == True"])])
