"""Weights of packages: all names of shared ones, and their exchange, which is all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.export import export

import plait
from plait._native import inspect_package
from plait.errors import UserError

IDS = torch.tensor([[1, 2, 0], [3, 3, 9]])


class Tied(nn.Module):
    """A parameter with two names, a buffer with two, a layer that is registered twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.e, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.e.weight
        self.register_buffer("scale", torch.rand(4))
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)
        self.first = nn.Linear(4, 4)
        self.again = nn.Sequential(self.first)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.again(self.first(self.e(ids)) * self.scale) + self.inner.scale)
        return y


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("z", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias + self.z.real


def packaged(path: Path, model: Any, *args: Any, **options: Any) -> plait.Package:
    plait.package(model, path, args, machines=["portable"], **options)
    return plait.load(path)


def same_as_eager(loaded: plait.Package, model: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(loaded(*args), model(*args))


@pytest.mark.parametrize("exported", [False, True])
def test_a_shared_weight_has_all_its_names(tmp_path: Path, exported: bool) -> None:
    model, other, path = Tied().eval(), Tied(1).eval(), tmp_path / "p.plait"
    given = Tied().eval()
    plait.package(export(given, (IDS,)) if exported else given, path, None if exported else (IDS,))
    loaded = plait.load(path)
    assert set(loaded.weights) == set(model.state_dict())
    assert loaded.weights["head.weight"].data_ptr() == loaded.weights["e.weight"].data_ptr()
    same_as_eager(loaded, model, IDS)
    loaded.load_weights(other.state_dict())
    same_as_eager(loaded, other, IDS)
    loaded.load_weights({"head.weight": model.head.weight})
    assert torch.equal(loaded.weights["e.weight"], model.e.weight)
    assert {"e.weight", "head.weight"} <= set(inspect_package(str(path), True)["weights"])


def test_two_values_for_one_weight(tmp_path: Path) -> None:
    loaded, model = packaged(tmp_path / "p", Tied().eval(), IDS), Tied().eval()
    before = {name: x.clone() for name, x in loaded.weights.items()}
    state = {**Tied(1).state_dict(), "head.weight": torch.full((10, 4), torch.nan)}
    text = "share memory, and are given different values\n.*try: "
    for wrong, names in [
        (state, "'e.weight' and 'head.weight'"),
        (dict(reversed(state.items())), "'head.weight' and 'e.weight'"),
    ]:
        with pytest.raises(UserError, match=f"weights {names} {text}"):
            loaded.load_weights(wrong)
        assert all(torch.equal(before[name], x) for name, x in loaded.weights.items())
    loaded.load_weights({**model.state_dict(), "head.weight": model.e.weight.clone()})  # equal ones
    same_as_eager(loaded, model, IDS)
    nan = torch.full((10, 4), torch.nan)
    loaded.load_weights({"e.weight": nan, "head.weight": nan.clone()})  # a nan is a nan
    assert loaded.weights["e.weight"].isnan().all()


def test_folding_locks_every_name(tmp_path: Path) -> None:
    class Folded(Tied):
        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.e(ids) + self.again(self.scale.exp() * self.inner.scale.sin())
            return y

    loaded = packaged(tmp_path / "p", Folded().eval(), IDS, fold=True)
    assert set(loaded.weights) == {"e.weight", "head.weight"}
    for name in Tied().state_dict().keys() - loaded.weights.keys():
        with pytest.raises(UserError, match=f"weight '{name}' was folded into the program"):
            loaded.load_weights({name: torch.zeros(4)})


def read_by_fake(shape: tuple[int, ...]) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 2), 1, 0, torch.quint8)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=layout)


def without_memory() -> Tensor:
    x = torch.ones(2, 2)
    x.untyped_storage().resize_(0)
    return x


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(2, 2, device="meta"), "is on the device meta"),
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "got one of layout torch.sparse_coo"),
    "compressed": (lambda: torch.ones(2, 2).to_sparse_csr(), "got one of layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "got one of layout torch._mkldnn"),
    "quantised": (quantised, "got torch.quint8"),
    "nested": (lambda: nested(torch.strided), "got a nested one"),
    "jagged": (lambda: nested(torch.jagged), "got one of layout torch.jagged"),
    "fake": (lambda: read_by_fake((2, 2)), "got one of class FakeTensor"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2, 2)), "got one of a transform"),
    "freed": (without_memory, "the memory of its new value was freed"),
    "type": (lambda: torch.ones(2, 2).long(), "expected torch.float32 .*, got torch.int64"),
    "sizes": (lambda: torch.ones(1, 2), r"got torch.float32 of sizes \(1, 2\)"),
    "list": (lambda: [[1.0, 2.0], [3.0, 4.0]], "expected a tensor, got list"),
    "module": (lambda: nn.Linear(2, 2), "expected a tensor, got Linear"),
    "none": (lambda: None, "expected a tensor, got NoneType"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_all_weights_or_none(tmp_path: Path, kind: str) -> None:
    loaded = packaged(tmp_path / "p", Plain(), torch.ones(2))
    make, text = MISFITS[kind]
    with pytest.raises(UserError, match=f"^weight 'weight'.*{text}(.|\n)*"):
        loaded.load_weights({"bias": torch.ones(2), "weight": make()})
    assert not loaded.weights["bias"].any()


def test_within_a_transform(tmp_path: Path) -> None:
    loaded = packaged(tmp_path / "p", Plain(), torch.ones(2))

    def load(x: Tensor) -> Tensor:
        loaded.load_weights({"bias": torch.ones(2), "weight": x})
        return x

    text = r"weight 'weight': .*got one of a transform of torch\.func"
    with pytest.raises(UserError, match=text):
        torch.vmap(load)(torch.ones(3, 2, 2))
    assert not loaded.weights["bias"].any()


@pytest.mark.parametrize("weights", [None, 3, nn.Linear(2, 2), [("bias", torch.ones(2))]])
def test_weights_come_by_name(tmp_path: Path, weights: Any) -> None:
    loaded = packaged(tmp_path / "p", Plain(), torch.ones(2))
    text = rf"by name, got {type(weights).__name__}\n.*state_dict\(\)"
    with pytest.raises(UserError, match=text):
        loaded.load_weights(weights)
    with pytest.raises(UserError, match="there is no weight 3"):
        loaded.load_weights({"bias": torch.ones(2), 3: torch.ones(2)})  # type: ignore[dict-item]
    assert not loaded.weights["bias"].any()


W = torch.arange(4.0).view(2, 2) + 1
Z = torch.tensor([1 + 2j, 3 - 4j])
VALUES: dict[str, Callable[[], Mapping[str, Tensor]]] = {
    "transposed": lambda: {"weight": W.t()},
    "expanded": lambda: {"weight": W[0, :1].expand(2, 2), "bias": W[1, 1].expand(2)},
    "overlapping": lambda: {"weight": torch.arange(3.0).as_strided((2, 2), (1, 1))},
    "one memory for two": lambda: {"weight": W, "bias": W[1]},
    "conjugated": lambda: {"z": Z.conj()},
    "negated": lambda: {"bias": Z.conj().imag, "z": Z.conj()},
    "parameters": lambda: {"weight": nn.Parameter(W), "bias": W[0].clone().requires_grad_()},
    "part of a graph": lambda: {"weight": W.clone().requires_grad_() * 2},
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_sort(tmp_path: Path, kind: str) -> None:
    loaded, values = packaged(tmp_path / "p", Plain(), torch.ones(2)), VALUES[kind]()
    loaded.load_weights(values)
    for name, value in values.items():
        assert torch.equal(loaded.weights[name], value.detach()), name
        assert loaded.weights[name].grad_fn is None and not loaded.weights[name].requires_grad
    loaded(torch.ones(2))


def test_values_of_inference_mode_and_with_tangents(tmp_path: Path) -> None:
    loaded = packaged(tmp_path / "p", Plain(), torch.ones(2))
    with torch.inference_mode():
        values = {"weight": W * 2, "bias": W[0] + 1}
        loaded.load_weights({"bias": W[1]})
    loaded.load_weights(values)
    assert torch.equal(loaded.weights["weight"], W * 2)
    assert torch.equal(loaded.weights["bias"], W[0] + 1)
    loaded.weights["weight"].requires_grad_()
    loaded.load_weights({"weight": W})
    assert torch.equal(loaded.weights["weight"].detach(), W)
    with forward_ad.dual_level():
        loaded.load_weights({"bias": forward_ad.make_dual(W[0], W[1])})
        assert forward_ad.unpack_dual(loaded.weights["bias"]).tangent is None


def test_values_that_lie_in_weights_are_those_from_before(tmp_path: Path) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.arange(4.0).view(2, 2) + n) for n in (0, 10))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a @ self.b

    loaded = packaged(tmp_path / "p", Three(), torch.ones(2))
    a, b = (x.clone() for x in loaded.weights.values())
    loaded.load_weights(loaded.weights)
    loaded.load_weights({"a": loaded.weights["b"], "b": loaded.weights["a"]})
    assert torch.equal(loaded.weights["a"], b) and torch.equal(loaded.weights["b"], a)
    loaded.load_weights({"a": loaded.weights["a"].t()})
    assert torch.equal(loaded.weights["a"], b.t())
    loaded.load_weights({"b": torch.from_numpy(loaded.weights["b"].numpy()[::-1, ::-1].copy())})
    other = torch.from_numpy(loaded.weights["b"].numpy()).t()  # another storage on the same memory
    want = other.clone()
    loaded.load_weights({"b": other})
    assert torch.equal(loaded.weights["b"], want)


def test_weights_that_share_memory_with_others(tmp_path: Path) -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.arange(6.0)
            self.register_buffer("left", flat[:4])
            self.register_buffer("right", flat[2:])
            self.register_buffer("wide", torch.tensor([[3.0]]).expand(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.left + self.right + self.wide

    loaded, model = packaged(tmp_path / "p", Overlapping(), torch.ones(4)), Overlapping()
    loaded.load_weights(model.state_dict())
    state = {"left": torch.tensor([1.0, 2, 3, 4]), "right": torch.tensor([3.0, 4, 5, 6])}
    loaded.load_weights({**state, "wide": torch.full((4, 4), 8.0)})
    assert torch.equal(loaded.weights["right"], state["right"])
    assert loaded.weights["wide"].eq(8).all()
    for wrong, text in [
        ({**state, "right": torch.zeros(4)}, "weights 'left' and 'right' share memory"),
        ({"wide": torch.arange(16.0).view(4, 4)}, "elements of weight 'wide' share memory"),
    ]:
        with pytest.raises(UserError, match=text):
            loaded.load_weights({"left": torch.tensor([9.0, 9, 3, 4]), **wrong})
        assert torch.equal(loaded.weights["left"], state["left"])
        assert loaded.weights["wide"].eq(8).all()
