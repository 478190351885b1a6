"""Conditions on values that a function traced by `plait.compile` asks for only to raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plait
from plait.errors import Unsupported

X = torch.linspace(0.5, 2, 12).view(3, 4)


_names: dict[str, Any] = {}
exec(  # pytest writes its own code for assertions
    compile(
        "def asserts(x):\n"
        "    assert (x > 0).all(), f'{x.shape} has values that are not positive'\n"
        "    return x.log()\n",
        "asserted.py",
        "exec",
    ),
    _names,
)
asserts: Callable[[Tensor], Tensor] = _names["asserts"]


def raises(x: Tensor) -> Tensor:
    if torch.any(x < 0):
        raise ValueError("negative: " + str(len(x)))
    return x.sqrt()


def raises_otherwise(x: Tensor) -> Tensor:
    if (x >= 0).all():
        y = x.sqrt()
    else:
        raise ValueError("negative")
    return y + 1


def raises_in_a_loop(x: Tensor) -> Tensor:
    for row in x:
        if not row.min() > 0:
            raise ValueError("not positive")
    return x * 2


def counted(x: Tensor) -> Tensor:
    if (x < 0).sum():
        raise ValueError
    return x * 2


def raises_in_a_context(x: Tensor) -> Tensor:
    with torch.no_grad():
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt()


ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "assert": asserts,
    "raise": raises,
    "else": raises_otherwise,
    "loop": raises_in_a_loop,
    "context": raises_in_a_context,
    "number": counted,
    "loss": lambda x: F.gaussian_nll_loss(x, x * 2, x),
    "distribution": lambda x: torch.distributions.Normal(x, x, True).log_prob(x),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_condition_is_looked_at_when_the_program_runs(name: str) -> None:
    fn = ASKED[name]
    run = plait.compile(fn, (X,))
    for x in (X, X + 1):
        torch.testing.assert_close(run(x), fn(x))
    with pytest.raises((ValueError, AssertionError)):
        fn(-X)
    with pytest.raises(RuntimeError, match="a condition does not hold that is asked for at"):
        run(-X)


@pytest.mark.parametrize("wrapper", ["python", "cpp", "fx"])
def test_in_other_targets(wrapper: str) -> None:
    run = plait.compile(raises, (X,), options={"wrapper": wrapper})
    torch.testing.assert_close(run(X), raises(X))
    with pytest.raises(RuntimeError, match="a condition does not hold"):
        run(-X)


def test_in_a_package(tmp_path: Path) -> None:
    path = tmp_path / "model.plait"
    plait.package(asserts, path, (X,), machines="portable")
    run = plait.load(path)
    torch.testing.assert_close(run(X), asserts(X))
    with pytest.raises(RuntimeError, match="a condition does not hold"):
        run(-X)


def chooses(x: Tensor) -> Tensor:
    if (x > 1).any():
        x = x * 2
    return x + 1


def sometimes_raises(x: Tensor) -> Tensor:
    if (x > 1).any():
        if x.dim() > 1:
            raise ValueError
        return x
    return x + 1


def catches(x: Tensor) -> Tensor:
    try:
        if (x < 0).any():
            raise ValueError
    except ValueError:
        return x * 2
    return x + 1


@pytest.mark.parametrize("fn", [chooses, sometimes_raises, catches])
def test_where_more_follows_it_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match="cannot trace"):
        plait.compile(fn, (X,))
