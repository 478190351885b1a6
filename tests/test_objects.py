"""Objects among arguments and results of `plait.compile`: namedtuples, dataclasses, namespaces,
users' classes, subclasses of containers, functions."""

from __future__ import annotations

import collections
import functools
import math
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.export import Dim

import plait
from plait.errors import InputError, Unsupported
from plait.runtime.objects import closed, opened

X = torch.linspace(-1, 1, 24).view(4, 6)
Y = torch.linspace(1, 2, 24).view(4, 6)
Pair = namedtuple("Pair", "a b")


class Named(NamedTuple):
    a: Tensor
    b: Tensor | None = None
    n: int = 3


@dataclass
class Data:
    a: Tensor
    b: Tensor | None = None
    n: int = 2
    made: list[Any] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Tensor
    b: Tensor


class Own:
    kind = "own"

    def __init__(self, a: Tensor, b: Any) -> None:
        self.a, self.b, self.inner = a, b, [types.SimpleNamespace(c=a * 2)]

    def total(self) -> Tensor:
        return self.a + self.b + self.inner[0].c


class Table(OrderedDict[str, Tensor]):
    pass


class Row(tuple[Tensor, ...]):
    pass


class Items(list[Tensor]):
    title = ""


def titled(x: Tensor) -> Items:
    made = Items([x, x + 1])
    made.title = "two"
    return made


def several(x: Tensor) -> Iterator[Tensor]:
    for k in range(3):
        yield x * k


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "namedtuple": lambda x: Pair(x + 1, [Pair(x * 2, None)]),
    "NamedTuple": lambda x: Named(x + 1),
    "dataclass": lambda x: Data(x + 1, n=5),
    "frozen": lambda x: {"r": Frozen(x, x * 2)},
    "namespace": lambda x: types.SimpleNamespace(z=x * 2, a=Pair(x, 1.5)),
    "own": lambda x: Own(x.sin(), x.cos()),
    "subclass of dict": lambda x: Table(z=x * 2, a=x),
    "subclass of tuple": lambda x: Row((x * 2, x)),
    "subclass of list": titled,
    "sizes": lambda x: (x * 2, x.shape),
    "set": lambda x: (x * 2, {3, 1}, frozenset("ab")),
    "slice and range": lambda x: (x * 2, slice(1, 3), range(4), ...),
    "class": lambda x: (x * 2, int, math.sqrt, torch.relu),
    "generator": several,
    "map": lambda x: map(torch.sin, x),
    "partial": lambda x: functools.partial(torch.add, x * 2),
    "proxy": lambda x: types.MappingProxyType({"a": x * 2}),
    "distribution": lambda x: torch.distributions.Normal(x, x.exp()),
}


def same(a: Any, b: Any) -> None:
    """Two results are of the same classes and hold the same."""
    if isinstance(b, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    elif isinstance(b, (types.GeneratorType, map)):
        same(list(a), list(b))
    else:
        assert type(a) is type(b)
        nodes_a, nodes_b = (pytree.tree_flatten(opened(x)) for x in (a, b))
        assert nodes_a[1] == nodes_b[1]
        if nodes_b[1].is_leaf():
            assert a == b
        else:
            for x, y in zip(nodes_a[0], nodes_b[0], strict=True):
                same(x, y)


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    fn = RESULTS[name]
    run = plait.compile(fn, (X,))
    for x in (X, Y):
        first, second = run(x), run(x)
        assert first is not second
        same(first, fn(x))
        same(second, fn(x))


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "namedtuple": (lambda p: p.a * p.b[0], lambda x: Pair(x, [x])),
    "NamedTuple": (lambda p: p.a * p.n if p.b is None else p.a, lambda x: Named(x)),
    "dataclass": (lambda d: d.a * d.b * d.n, lambda x: Data(x, x + 1)),
    "frozen": (lambda d: d.a - d.b, lambda x: Frozen(x, x * 2)),
    "namespace": (
        lambda d: d.a - d.b.inner[0].c,
        lambda x: types.SimpleNamespace(a=x, b=Own(x, 1)),
    ),
    "own": (lambda d: d.total(), lambda x: Own(x, x * 2)),
    "subclass of dict": (lambda d: sum(d.values()), lambda x: Table(b=x, a=x * 3)),
    "subclass of tuple": (lambda d: d[0] / d[1], lambda x: Row((x, x + 3))),
    "subclass of list": (lambda d: torch.stack(d) * len(d.title), lambda x: titled(x)),
    "sizes": (lambda s: torch.ones(s) * s.numel(), lambda x: x.shape),
    "set": (lambda d: d["x"] * len(d["s"]), lambda x: {"x": x, "s": {2, 1}}),
    "slice": (lambda d: d["x"][d["s"]], lambda x: {"x": x, "s": slice(1, 3)}),
    "function": (lambda d: d["f"](d["x"]), lambda x: {"x": x, "f": torch.sigmoid}),
    "partial": (lambda d: d(1), lambda x: functools.partial(torch.add, x, alpha=3)),
    "proxy": (lambda d: d["x"] * 2, lambda x: types.MappingProxyType({"x": x})),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    fn, make = ARGUMENTS[name]
    run = plait.compile(fn, (make(X),))
    for x in (X, Y):
        same(run(make(x)), fn(make(x)))


def test_what_is_built_in_is_compared() -> None:
    run = plait.compile(lambda d: d.a * d.n, (Data(X, n=2),))
    with pytest.raises(InputError, match=r"'d.n': the program was compiled for 2, got 3"):
        run(Data(X, n=3))
    with pytest.raises(InputError, match="arguments are nested as"):
        run(types.SimpleNamespace(a=X, n=2))
    with pytest.raises(InputError, match=r"input 'd.a': expected size 4 in dimension 0, got 2"):
        run(Data(X[:2]))


def test_sizes_of_an_object_may_vary() -> None:
    n = Dim("n")
    run = plait.compile(lambda d: d.a + d.b, (Frozen(X, Y),), ([{0: n}, {0: n}],))
    assert torch.equal(run(Frozen(X[:3], Y[:3])), X[:3] + Y[:3])


def test_changes_of_an_object_are_told() -> None:
    def keeps(d: Any) -> Tensor:
        d.a = d.a * 2
        return d.a + 1  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match="changes 'd.a' of its arguments"):
        run = plait.compile(keeps, (Data(X),))
    given = Data(X)
    assert torch.equal(run(given), X * 2 + 1) and given.a is X


def test_nothing_is_registered() -> None:
    plait.compile(lambda d: Data(d.a + 1), (Data(X),))
    assert pytree.tree_leaves(Data(X)) != pytree.tree_leaves(opened(Data(X)))
    assert type(closed(opened([Data(X)]))[0]) is Data


def test_what_cannot_be_made_again() -> None:
    inside: list[Any] = [X]
    knot = types.SimpleNamespace(a=inside)
    inside.append(knot)
    with pytest.raises(Unsupported, match="SimpleNamespace that holds itself"):
        plait.compile(lambda d: d.a[0] * 2, (knot,))
    with pytest.raises(Unsupported, match="class _deque_iterator"):
        plait.compile(lambda x: iter(collections.deque([x * 2])), (X,))
    with pytest.raises(Unsupported, match=r"class function.*may hold tensors"):
        plait.compile(lambda x: (x * 2, lambda: x), (X,))


def test_jagged_tensors_inside() -> None:
    """torch refuses to make one while anything is traced."""

    def fn(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.nested.nested_tensor_from_jagged(x, offsets)
        return (made.sin() * 2).values(), made.sum(1)

    x, offsets = torch.randn(9, 4), torch.tensor([0, 2, 5, 9])
    run = plait.compile(fn, (x, offsets))
    for where in (offsets, torch.tensor([0, 1, 8, 9])):
        torch.testing.assert_close(run(x, where), fn(x, where))
