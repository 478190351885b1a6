"""Weights that wrap plain tensors, as torchao's quantised ones do, in `plait.compile` and in
packages: the program is bound to the tensors inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import plait


class Scaled(Tensor):
    """Integers and a scale; operators see their product. The scale may be such a tensor, too."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    codes: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, sizes: Any, strides: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fn is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args, kwargs = tree_map_only(Scaled, lambda x: x.value(), (args, kwargs or {}))
        return fn(*args, **kwargs)

    def value(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale


class Other(Scaled):
    pass


def quantised(weight: Tensor, nested: bool = False, kind: type[Scaled] = Scaled) -> nn.Parameter:
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    codes = (weight.detach() / scale).round().to(torch.int8)
    if nested:
        scale = Scaled(torch.ones_like(scale, dtype=torch.int32), scale)
    return nn.Parameter(kind(codes, scale), requires_grad=False)


class Model(nn.Module):
    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.first.weight = quantised(self.first.weight, nested)
        self.last.weight = quantised(self.last.weight)
        self.tied = nn.Linear(16, 8, bias=False)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x) + self.tied(x.sin())  # type: ignore[no-any-return]


def check(run: Any, model: nn.Module) -> None:
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("target", ["native", "python", "cpp", "fx"])
@pytest.mark.parametrize("nested", [False, True])
def test_compile(nested: bool, target: str) -> None:
    model = Model(nested)
    check(plait.compile(model, (torch.randn(4, 8),), options={"wrapper": target}), model)


def test_changes_count() -> None:
    model = Model()
    run = plait.compile(model, (torch.randn(4, 8),))
    weight: Any = model.first.weight
    weight.scale.mul_(3)
    check(run, model)
    model.first.weight = quantised(torch.randn(16, 8))
    check(run, model)
    model.last.weight = model.tied.weight = quantised(torch.randn(8, 16))
    check(run, model)
    model.tied.weight = quantised(torch.randn(8, 16))
    with pytest.raises(plait.InputError, match="were one tensor when compiled"):
        run(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.randn(16, 8), "'first.weight.codes': expected a Scaled as it was when compiled"),
        (quantised(torch.randn(16, 8), kind=Other), "expected a Scaled as it was"),
        (quantised(torch.randn(16, 8), nested=True), "expected a Scaled as it was"),
        (quantised(torch.randn(16, 4)), "expected a Scaled as it was"),
        (quantised(torch.randn(16, 8).double()), "'first.weight.scale'"),
    ],
    ids=["plain", "class", "nested", "size", "dtype"],
)
def test_what_does_not_fit_is_refused(weight: Tensor, said: str) -> None:
    model = Model()
    run = plait.compile(model, (torch.randn(4, 8),))
    model.first.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(plait.InputError) as error:
        run(torch.randn(4, 8))
    assert said in str(error.value), error.value


def test_packages(tmp_path: Path) -> None:
    model, path = Model(nested=True), tmp_path / "model.plait"
    plait.package(model, path, (torch.randn(4, 8),), machines="avx2")
    check(plait.load(path), model)


def test_results_and_arguments_are_plain() -> None:
    model = Model()
    with pytest.raises(plait.PlaitError, match="result is one of class Scaled"):
        plait.compile(lambda x: model.first.weight, (torch.randn(4, 8),))
    with pytest.raises(plait.PlaitError, match="one of class Scaled"):
        plait.compile(lambda x: x + 1, (quantised(torch.randn(4, 8)).detach(),))


def test_results_that_wrap_state() -> None:
    class Gives(Model):
        def forward(self, x: Tensor) -> Any:
            return self.first.weight

    with pytest.raises(plait.PlaitError, match="result is one of class Scaled"):
        plait.compile(Gives(), (torch.randn(4, 8),))
