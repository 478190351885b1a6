"""Steps of optimizers for which PyTorch has one operator, `_fused_adamw_` and its like, written out
as operators on lists, before tracing: PyTorch cannot trace these with an empty list among their
arguments, and plait makes as few kernels of the operators on lists.

Comes in: the graph that Dynamo captured. Numbers are those of PyTorch's kernels: half types are
computed in float32 and rounded once, gradients are scaled back in place, and where `found_inf` is 1
nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

Tensors = list[Tensor] | tuple[Tensor, ...]


def write_out_fused(gm: GraphModule) -> int:
    """Puts functions that are written out in the place of PyTorch's operators; returns how many."""
    found = 0
    for node in gm.graph.nodes:
        known = node.op == "call_function" and _STEPS.get(node.target)
        # A parameter that is given twice is updated twice.
        if known and len(set(written := _lists(node))) == len(written):
            node.target = known
            found += 1
    if found:
        gm.recompile()
    return found


def _lists(node: Node) -> list[Any]:
    """The tensors in the lists that a step is given, but for its counters and gradients."""
    lists = [*node.args, *node.kwargs.values()]
    return [x for k, a in enumerate(lists) if isinstance(a, (list, tuple)) and k != 1 for x in a]


# ------------------------------------------------------------------------------------ what is alike
def _wide(xs: Tensors) -> list[Tensor]:
    """As PyTorch computes with them."""
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in xs]


def _counted(steps: Tensors, params: Tensors) -> list[Tensor]:
    """The numbers of steps, as exact as the parameters."""
    exact = [torch.float64 if p.dtype == torch.float64 else torch.float32 for p in params]
    plain = [s if s.dim() == 0 else s.reshape(()) for s in steps]
    return [s if s.dtype == d else s.to(d) for s, d in zip(plain, exact, strict=True)]


def _gradients(
    grads: Tensors, params: Tensors, maximize: bool, decay: float, scale: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients back to scale, and what the step makes of them."""
    unscaled = _wide(grads)
    if scale is not None:
        unscaled = list(torch._foreach_div(unscaled, scale.reshape(())))
    found = list(torch._foreach_neg(unscaled)) if maximize else unscaled
    if decay:
        found = list(torch._foreach_add(found, params, alpha=decay))
    return unscaled, found


def _store(olds: Tensors, news: Tensors, found_inf: Tensor | None) -> None:
    """New values in the place of the old, unless a gradient was not finite."""
    if found_inf is not None:
        bad = found_inf.reshape(()) == 1
        news = [torch.where(bad, w, n) for w, n in zip(_wide(olds), news, strict=True)]
    torch._foreach_copy_(olds, news)


def _rest_of(beta: float, steps: Tensors) -> list[Tensor]:
    """1 - beta**step, exact also where that is little."""
    log = math.log(beta) if beta > 0 else -math.inf
    return list(torch._foreach_neg(torch._foreach_expm1(torch._foreach_mul(steps, log))))


def _times(xs: Tensors, factor: float | Tensor) -> list[Tensor]:
    if isinstance(factor, Tensor):
        return list(torch._foreach_mul(xs, factor.reshape(())))
    return list(torch._foreach_mul(xs, factor))


# ---------------------------------------------------------------------------------------- the steps
def adam(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, largest: Tensors,
    steps: Tensors, *, lr: float | Tensor, beta1: float, beta2: float, weight_decay: float,
    eps: float, amsgrad: bool, maximize: bool, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None, decoupled: bool = False,
) -> None:  # fmt: skip
    """`_fused_adam_`; decoupled: `_fused_adamw_`."""
    if not params:
        return
    ps, decay = _wide(params), 0.0 if decoupled else weight_decay
    unscaled, gs = _gradients(grads, ps, maximize, decay, grad_scale)
    ms = torch._foreach_lerp(_wide(means), gs, 1 - beta1)
    vs = torch._foreach_addcmul(torch._foreach_mul(_wide(squares), beta2), gs, gs, 1 - beta2)
    tops = torch._foreach_maximum(_wide(largest), vs) if amsgrad else vs
    counted = _counted(steps, params)
    roots = torch._foreach_sqrt(_rest_of(beta2, counted))
    below = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(tops), roots), eps)
    sizes = _times(torch._foreach_reciprocal(_rest_of(beta1, counted)), lr)
    moves = torch._foreach_mul(torch._foreach_div(ms, below), sizes)
    if decoupled and weight_decay:
        ps = _times(ps, 1 - lr * weight_decay)
    _store(params, torch._foreach_sub(ps, moves), found_inf)
    _store(means, ms, found_inf)
    _store(squares, vs, found_inf)
    if amsgrad:
        _store(largest, tops, found_inf)
    if grad_scale is not None:
        _store(grads, unscaled, found_inf)


def adamw(*args: Any, **kwargs: Any) -> None:
    """`_fused_adamw_`."""
    adam(*args, **kwargs, decoupled=True)


def sgd(
    params: Tensors, grads: Tensors, momenta: Tensors, *, weight_decay: float, momentum: float,
    lr: float | Tensor, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """`_fused_sgd_`."""
    if not params:
        return
    ps = _wide(params)
    unscaled, gs = _gradients(grads, ps, maximize, weight_decay, grad_scale)
    if momenta:
        new = gs
        if not is_first_step:
            kept = torch._foreach_mul(_wide(momenta), momentum)
            new = list(torch._foreach_add(kept, gs, alpha=1 - dampening))
        gs = list(torch._foreach_add(gs, new, alpha=momentum)) if nesterov else new
        _store(momenta, new, found_inf)
    _store(params, torch._foreach_sub(ps, _times(gs, lr)), found_inf)
    if grad_scale is not None:
        _store(grads, unscaled, found_inf)


def adagrad(
    params: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, *, lr: float | Tensor,
    lr_decay: float, weight_decay: float, eps: float, maximize: bool,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """`_fused_adagrad_`."""
    if not params:
        return
    ps = _wide(params)
    unscaled, gs = _gradients(grads, ps, maximize, weight_decay, grad_scale)
    new = torch._foreach_addcmul(_wide(sums), gs, gs, 1.0)
    past = torch._foreach_mul(torch._foreach_sub(_counted(steps, params), 1), lr_decay)
    sizes = _times(torch._foreach_reciprocal(torch._foreach_add(past, 1)), lr)
    below = torch._foreach_add(torch._foreach_sqrt(new), eps)
    moves = torch._foreach_mul(torch._foreach_div(gs, below), sizes)
    _store(params, torch._foreach_sub(ps, moves), found_inf)
    _store(sums, new, found_inf)
    if grad_scale is not None:
        _store(grads, unscaled, found_inf)


def _every(name: str, step: Callable[..., None]) -> dict[Any, Callable[..., None]]:
    """All names under which a graph calls an operator of PyTorch, if there is one."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return {}
    overloads = [getattr(packet, kind) for kind in packet.overloads()]
    public = getattr(torch, name, None)  # not every one has such a name
    return dict.fromkeys([*overloads, packet, *([public] if public else [])], step)


_STEPS: dict[Any, Callable[..., None]] = {
    **_every("_fused_adam_", adam),
    **_every("_fused_adamw_", adamw),
    **_every("_fused_sgd_", sgd),
    **_every("_fused_adagrad_", adagrad),
}
