"""Runs one function eagerly and compiled on equal inputs and compares all that a caller can see.

That is: values, dtypes, strides, Python types, which results share memory with which inputs, what
happened to the inputs, and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from plait import _native


def compiled(
    fn: Callable[..., Any], dynamic: bool | None = None, **kwargs: Any
) -> Callable[..., Any]:
    """fn through torch.compile with plait."""
    return torch.compile(fn, backend="plait", dynamic=dynamic, **kwargs)


def unchecked(call: Any) -> Any:
    """What a callable for Dynamo runs once its arguments are checked."""
    while isinstance(call, (_native.Tangents, _native.Apart)):
        call = call.call
    return call


def poison(results: Any) -> None:
    """Leaves what is no number in the memory that allocators hand out next for results as these:
    what a kernel does not write is seen."""
    made = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    for x in [torch.empty_like(x) for x in made]:
        x.untyped_storage().fill_(255)


def same(
    fn: Callable[..., Any],
    make: Callable[[], Sequence[Any]],
    *,
    dynamic: bool | None = None,
    grad: bool = False,
    calls: int = 2,
    other: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compares fn with its compiled self (or with `other`) on make()'s arguments, `calls` times;
    returns the latter.

    grad: float inputs require gradients and a weighted sum of the float results is differentiated.
    """
    run = other or compiled(fn, dynamic=dynamic)
    for _ in range(calls):
        seen = []
        for f in (fn, run):
            args = make()
            _require(args, grad)
            with torch.set_grad_enabled(grad):
                out = f(*args)
            seen.append((args, out, _gradients(args, out) if grad else None))
        (eager_args, eager_out, eager_grads), (args, out, grads) = seen
        tree_equal(out, eager_out, "result")
        tree_equal(list(args), list(eager_args), "argument after the call")
        assert sharing(args, out) == sharing(eager_args, eager_out), "memory is shared differently"
        tree_equal(grads, eager_grads, "gradient")
    return run


def _require(args: Sequence[Any], grad: bool) -> None:
    for x in pytree.tree_leaves(args):
        if grad and isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf:
            x.requires_grad_()


def _gradients(args: Sequence[Any], out: Any) -> list[torch.Tensor | None]:
    leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves:
        return []
    weights = [
        torch.linspace(0.5, 1.5, max(x.numel(), 1), device=x.device)[: x.numel()].view(x.shape)
        for x in leaves
    ]
    total = sum((x * w).sum() for x, w in zip(leaves, weights, strict=True))
    total.backward()
    inputs = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [x.grad if x.is_leaf else None for x in inputs]


def tree_equal(got: Any, want: Any, what: str) -> None:
    """Same nesting, types, and tensors that are close and alike in dtype, sizes and strides."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec, f"{what}: {got_spec} is not {want_spec}"
    for i, (g, w) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        name = f"{what} {i}"
        if not isinstance(w, torch.Tensor):
            assert type(g) is type(w) and g == w, f"{name}: {g!r} is not {w!r}"
            continue
        assert type(g) is type(w), name
        assert g.requires_grad == w.requires_grad, f"{name}: requires_grad"
        torch.testing.assert_close(
            g, w, rtol=2e-5, atol=2e-5, equal_nan=True, check_stride=g.numel() > 0
        )


def sharing(args: Sequence[Any], out: Any) -> list[tuple[int, int]]:
    """Pairs of tensors, counted through arguments and then results, that share one storage."""
    tensors = [x for x in pytree.tree_leaves((list(args), out)) if isinstance(x, torch.Tensor)]
    tensors = [
        x for x in tensors if type(x) in (torch.Tensor, torch.nn.Parameter) and x.numel() > 0
    ]
    where = [x.untyped_storage().data_ptr() for x in tensors]
    n = len(where)
    return [(i, j) for i in range(n) for j in range(i + 1, n) if where[i] == where[j]]
