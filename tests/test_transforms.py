"""The transforms of torch.func inside compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from plait.capture import ladder
from plait.config import Config
from plait.errors import warn_once

X, W = torch.linspace(-2, 2, 20).view(5, 4), torch.linspace(1, -1, 16).view(4, 4)
ROWS = torch.tensor([0, 3, 2, 1, 3])
LINEAR = torch.nn.Linear(4, 4)


def loss(x: Tensor) -> Tensor:
    return (x @ W).tanh().square().sum()


def of_each(x: Tensor) -> Any:
    """Gradients of parameters, a sample each."""

    def one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        out = functional_call(LINEAR, parameters, (row[None],))
        return F.cross_entropy(out, torch.tensor([1]))

    return vmap(grad(one), in_dims=(None, 0))(dict(LINEAR.named_parameters()), x)


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: vmap(lambda r: (r @ W).softmax(-1))(x),
    "index": lambda x: vmap(lambda r, i: r[i] * 2)(x, ROWS[: len(x)]),
    "index of two": lambda x: vmap(vmap(lambda r, i: r.view(2, 2)[i % 2, 1]))(
        x.view(-1, 1, 4), ROWS[: len(x)].view(-1, 1)
    ),
    "scatter": lambda x: vmap(lambda r, i: r.index_add(0, i[None], torch.ones(1)))(
        x, ROWS[: len(x)]
    ),
    "grad": grad(loss),
    "vmap of grad": lambda x: vmap(grad(loss))(x),
    "of each": of_each,
    "vjp": lambda x: vjp(lambda r: (r @ W).sin(), x)[1](x * 3),
    "jvp": lambda x: jvp(loss, (x,), (x * 2,)),
    "jacrev": jacrev(lambda x: (x @ W).sin()),
    "jacfwd": jacfwd(lambda x: (x @ W).sin()),
    "hessian": hessian(loss),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_transforms(name: str) -> None:
    fn = PROGRAMS[name]
    compiled = torch.compile(fn, backend="plait", fullgraph=True, options={"strict": True})
    # Dynamo itself takes no sizes that vary to forward mode.
    for x in (X,) if name in ("jvp", "jacfwd", "hessian") else (X, X[:3]):
        torch.testing.assert_close(compiled(x), fn(x))


def test_a_failure_under_a_transform_leaves_none_behind() -> None:
    """Tracing may fail while a transform is on, which its graph would have ended."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()

    def fails(_: ladder.Steps) -> str:
        torch._C._functorch._vmap_increment_nesting(3, "error")
        raise RuntimeError("while traced")

    warn_once.cache_clear()
    cfg = Config().with_options({"strict": False})
    with pytest.warns(UserWarning, match="while traced"):
        assert ladder.descend(cfg, lambda: "it", fails, lambda _: "by eager") == "by eager"
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth
