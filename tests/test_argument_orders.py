"""Arguments in containers: dicts whose keys come in another order than in the example, keyword
arguments."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import plait
from plait.capture.dict_order import in_another_order
from plait.errors import InputError, Unsupported

A, B, C = torch.arange(3.0), torch.arange(3.0) + 5, torch.arange(3.0) * 7
Run = Callable[..., Any]


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Parts:
    a: Tensor
    b: Tensor


torch.export.register_dataclass(Parts, serialized_type_name="tests.Parts")


def made(fn: Callable[..., Any], example: Any, way: str, folder: Path) -> Run:
    if way == "package":
        plait.package(fn, folder / "p.plait", example)
        return plait.load(folder / "p.plait")
    return plait.compile(fn, example, options={"wrapper": way})


def difference(d: dict[str, Tensor]) -> Tensor:
    return d["a"] * 2 - d["b"]


def nested(x: dict[str, Any], *, scale: int) -> dict[str, Tensor]:
    first, second = x["pair"]
    return {"sum": first["a"] + second["b"], "product": x["c"] * scale * first["b"] + second["a"]}


def moved(d: dict[str, Any]) -> Tensor:
    batch = {
        key: value.to("cpu") if isinstance(value, Tensor) else value for key, value in d.items()
    }
    return batch["a"] * batch["k"] - batch["b"][batch["a"] > 0].sum()


ANY_ORDER: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "dict": (difference, ({"a": A, "b": B},), ({"b": C, "a": A},)),
    "OrderedDict": (difference, (OrderedDict(a=A, b=B),), (OrderedDict(b=C, a=A),)),
    "defaultdict": (difference, (defaultdict(list, a=A, b=B),), (defaultdict(list, b=C, a=A),)),
    "dict for an OrderedDict": (difference, (OrderedDict(a=A, b=B),), ({"b": C, "a": A},)),
    "OrderedDict for a dict": (difference, ({"a": A, "b": B},), (OrderedDict(b=C, a=A),)),
    "list of dicts": (
        lambda x: x[0]["a"] - x[1]["b"],
        ([{"a": A, "b": B}] * 2,),
        ([{"b": C, "a": A}] * 2,),
    ),
    "numbers and texts": (lambda d: d[1] * 2 - d["a"], ({1: A, "a": B},), ({"a": A, 1: C},)),
    "three keys, a constant and a mask": (
        moved,
        ({"a": A, "b": B, "k": 2},),
        ({"k": 2, "a": A, "b": C},),
    ),
    "named tuple": (lambda p: p.a * 2 - p.b, (Pair(A, B),), (Pair(B, C),)),
    "dataclass": (lambda p: p.a * 2 - p.b, (Parts(A, B),), (Parts(B, C),)),
}


@pytest.mark.parametrize("way", ["native", "python", "cpp", "fx", "package"])
@pytest.mark.parametrize("name", ANY_ORDER)
def test_any_order(name: str, way: str, tmp_path: Path) -> None:
    fn, example, args = ANY_ORDER[name]
    if way == "package" and name == "named tuple":
        torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    if way == "package" and name == "numbers and texts":
        example, args = ({"1": A, "a": B},), ({"a": A, "1": C},)
        fn = lambda d: d["1"] * 2 - d["a"]
    run = made(fn, example, way, tmp_path)
    for given in (example, args):
        torch.testing.assert_close(run(*given), fn(*given))


def test_nested_dicts_and_keyword_arguments() -> None:
    pair = {"a": A, "b": B}, {"a": C, "b": A}
    turned = {"b": B, "a": A}, {"b": A, "a": C}
    run = plait.compile(nested, {"x": {"pair": pair, "c": C}, "scale": 2})
    want = nested({"pair": pair, "c": C}, scale=2)
    got = run(scale=2, x={"c": C, "pair": turned})
    assert list(got) == list(want)
    torch.testing.assert_close(got, want)


IN_ORDER: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "values": (lambda d: torch.cat(list(d.values())), {"a": A, "b": B}),
    "the first": (lambda d: next(iter(d.values())) * 2, {"a": A, "b": B, "c": C}),
    "the middle": (lambda d: [*d.values()][1] * 2, {"a": A, "b": B, "c": C}),
    "the last": (lambda d: d[[*d][-1]] * 2, {"a": A, "b": B, "c": C}),
    "a result": (lambda d: {key: x * 2 for key, x in d.items()}, {"a": A, "b": B}),
}


@pytest.mark.parametrize("way", ["native", "package"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_functions_that_go_by_the_order(name: str, way: str, tmp_path: Path) -> None:
    """No other order gives the numbers of this one."""
    fn, d = IN_ORDER[name]
    run = made(fn, (d,), way, tmp_path)
    torch.testing.assert_close(run(dict(d)), fn(d))
    with pytest.raises(InputError, match="goes by the order of keys"):
        run(dict(reversed(d.items())))


@pytest.mark.parametrize("way", ["native", "package"])
def test_keyword_arguments_without_a_parameter(way: str, tmp_path: Path) -> None:
    run = made(lambda **named: torch.cat(list(named.values())), {"a": A, "b": B}, way, tmp_path)
    assert torch.equal(run(a=A, b=B), torch.cat([A, B]))
    with pytest.raises(InputError, match="order of keyword arguments, a, b"):
        run(b=B, a=A)
    fn = lambda x, **named: x + named["a"] * 2 - named["b"]
    run = made(fn, {"x": C, "a": A, "b": B}, way, tmp_path)
    assert torch.equal(run(b=B, x=C, a=A), fn(C, a=A, b=B))


@pytest.mark.parametrize("given", [{"a": A}, {"a": A, "b": B, "c": C}, {"a": A, "c": B}, [A, B], A])
def test_other_keys_and_containers_are_told(given: Any) -> None:
    run = plait.compile(difference, ({"a": A, "b": B},))
    with pytest.raises(InputError, match="nested as"):
        run(given)


class Own(dict[str, Tensor]):
    """Which torch does not know."""


def test_a_class_that_torch_does_not_know_has_keys_in_any_order() -> None:
    run = plait.compile(difference, (Own(a=A, b=B),))
    for given in (Own(a=A, b=C), Own(b=C, a=A)):
        assert torch.equal(run(given), difference(given))


def test_a_package_takes_no_class_that_torch_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"an object of class .*Own among its arg") as caught:
        plait.package(difference, tmp_path / "p.plait", (Own(a=A, b=B),))
    assert "register_pytree_node" in caught.value.hint


def test_no_key_stays_where_it_was() -> None:
    for n in range(2, 9):
        keys = list(map(str, range(n)))
        spec = torch.utils._pytree.tree_structure(dict.fromkeys(keys, 0))
        other = in_another_order(spec, iter(keys))
        assert sorted(other) == keys and all(key == value for key, value in other.items())
        assert not any(a == b for a, b in zip(keys, other, strict=True))
