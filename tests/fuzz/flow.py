"""What programs of control flow call.

While a program is traced these are PyTorch's operators; else they are the same in plain Python, for
PyTorch's own eager mode compiles each of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan as torch_associative_scan
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch.nn import functional as F

Step = Callable[..., Any]


def cond(holds: Any, yes: Step, no: Step, given: Sequence[Any]) -> Any:
    if torch.compiler.is_compiling():
        return torch.cond(holds, yes, no, given)
    return yes(*given) if holds else no(*given)


def while_loop(holds: Step, step: Step, carried: Sequence[Any]) -> Any:
    """Its results are copies: with gradients, PyTorch's are parts of all rounds, stacked."""
    if torch.compiler.is_compiling():
        made = torch.while_loop(holds, step, carried)
        return tuple(x.clone() if isinstance(x, Tensor) else x for x in made)
    carried = tuple(x.clone() if isinstance(x, Tensor) else x for x in carried)
    while holds(*carried):
        carried = step(*carried)
    return carried


def scan(step: Step, start: Any, xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    if torch.compiler.is_compiling():
        return torch_scan(step, start, xs, dim=dim, reverse=reverse)
    carried, stacked = pytree.tree_map(torch.clone, start), []
    for k in _places(xs, dim, reverse):
        carried, made = step(carried, _slice(xs, dim, k))
        stacked.append(made)
    return carried, _stack(stacked, dim, reverse)


def map_(step: Step, xs: Any, *given: Any) -> Any:
    if torch.compiler.is_compiling():
        return torch_map(step, xs, *given)
    return _stack([step(_slice(xs, 0, k), *given) for k in _places(xs, 0, False)], 0, False)


def associative_scan(combine: Step, xs: Any, dim: int, reverse: bool, mode: str) -> Any:
    """Its results are copies: PyTorch's ways lay them out differently, and over one element some
    return what they were given."""
    made = _associative_scan(combine, xs, dim, reverse, mode)
    return pytree.tree_map(lambda x: x.clone(memory_format=torch.contiguous_format), made)


def _associative_scan(combine: Step, xs: Any, dim: int, reverse: bool, mode: str) -> Any:
    if torch.compiler.is_compiling():
        if mode == "pointwise" and pytree.tree_leaves(xs)[0].device.type == "cpu":
            return _as_on_a_gpu(combine, xs, dim, reverse)
        return torch_associative_scan(combine, xs, dim, reverse, mode)
    first, *places = _places(xs, dim, reverse)
    made = [_slice(xs, dim, first)]
    for k in places:
        made.append(combine(made[-1], _slice(xs, dim, k)))
    out = _stack(made, 0, reverse)
    return pytree.tree_map(lambda x: x.movedim(0, dim), out)


def _as_on_a_gpu(combine: Step, xs: Any, dim: int, reverse: bool) -> Any:
    """What PyTorch does on a GPU where combine works element by element."""
    leaves, spec = pytree.tree_flatten(xs)
    leaves = [x.movedim(dim, 0) for x in leaves]
    if reverse:
        leaves = [x.flip(0) for x in leaves]

    def flat(*both: Any) -> Any:
        a, b = (spec.unflatten(both[k : k + len(leaves)]) for k in (0, len(leaves)))
        return pytree.tree_leaves(combine(a, b))

    out = associative_scan_op(flat, leaves, ())
    if reverse:
        out = [x.flip(0) for x in out]
    return spec.unflatten([x.movedim(0, dim) for x in out])


def autocast(fn: Step, *given: Tensor) -> Any:
    with torch.autocast(given[0].device.type, dtype=torch.bfloat16):
        return fn(*given)


def _places(xs: Any, dim: int, reverse: bool) -> list[int]:
    n = pytree.tree_leaves(xs)[0].shape[dim]
    if n == 0:
        raise RuntimeError("a scan over nothing")
    return list(range(n))[:: -1 if reverse else 1]


def _slice(xs: Any, dim: int, k: int) -> Any:
    return pytree.tree_map(lambda x: x.select(dim, k).clone(), xs)


def _stack(made: list[Any], dim: int, reverse: bool) -> Any:
    def stack(*items: Tensor) -> Tensor:
        out = torch.stack(items[::-1] if reverse else items)
        return out.movedim(0, dim) if dim < out.ndim else out

    return pytree.tree_map(stack, *made)


region = torch.compiler.nested_compile_region
REGIONS: dict[str, Step] = {
    "mix": region(lambda x, y: (x * 2 + y, x - y)),
    "twice": region(lambda x, y: (x + y).sum(0) + x),
    "turned": region(lambda x, y: ((x * 3).mT.contiguous().mT, (y + 1).flip(-1))),
    "norm": region(lambda x, y: F.layer_norm(x.float(), (x.shape[-1],)) * y),
    "product": region(lambda x, y: (x @ y.transpose(-1, -2)).tanh() @ y),
    "soft": region(lambda x, y: (x - x.amax(-1, keepdim=True)).softmax(-1) + y.mean()),
    "whole": region(lambda x, y: torch.where(x > y, x, y * 2).cumsum(0)),
    "alone": region(lambda x, y: x.sin().cos()),
}
"""Functions of two tensors, which a program calls several times."""
