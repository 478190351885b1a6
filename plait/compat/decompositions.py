"""Which decompositions graphs are traced with.

For torch 2.11 and 2.12, `fused_multiply_add` may be empty, which can go with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch._decomp.decompositions import isin_default
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm


@lru_cache(maxsize=1)
def kept_whole() -> tuple[Any, ...]:
    """Operators whose decomposition loses: wrong gradients of an attention kernel and of NaNs,
    other integers of linspace, no error or another one, gathers for borders, a choice for a row put
    into a tensor, an index taken for a number, a square that overflows, and roundings in between.
    With that of alias_copy and of detach together, torch takes results of `scan` for its inputs."""
    names = """
        _scaled_dot_product_flash_attention_for_cpu.default linspace.default std_mean.correction
        addcmul.default linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor
        take.default bernoulli.default max_unpool2d.default max_unpool3d.default index_add.default
        index_copy.default index_fill.int_Scalar index_fill.int_Tensor nll_loss_forward.default
        nll_loss2d_forward.default nll_loss_backward.default nll_loss2d_backward.default
        roll.default smooth_l1_loss_backward.default select_scatter.default addcdiv.default
        hardtanh_backward.default hardswish_backward.default elu_backward.default threshold.default
        reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default std.correction
        replication_pad1d.default replication_pad2d.default replication_pad3d.default
        alias_copy.default native_group_norm_backward.default _softmax_backward_data.default
        soft_margin_loss_backward.default logit_backward.default baddbmm.default
    """
    packets = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in packets)


FLOAT8 = frozenset(
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
     torch.float8_e8m0fnu)
)  # fmt: skip

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Those that are put in from outside: who registers an operator puts its decomposition here. They
go before all others."""


CHECKS: dict[Any, Callable[[Any], Callable[..., Any]]] = {}
"""Of operators whose operands are looked at first: wraps the decomposition, or the None that stands
for no one."""


def inference_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions of graphs without gradients: some activations stay whole, whose steps a
    partition into forward and backward would want to see."""
    table = decomposition_table()
    for op in (torch.ops.aten.hardswish.default, torch.ops.aten.hardsigmoid.default):
        del table[op]
        if op in CHECKS:
            table[op] = CHECKS[op](None)
    return table


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Core ATen decompositions, less those of `kept_whole`, and `DECOMPOSITIONS`."""
    table = _core_table() | DECOMPOSITIONS
    return table | {op: around(table.get(op)) for op, around in CHECKS.items()}


@lru_cache(maxsize=1)
def _core_table() -> dict[Any, Callable[..., Any]]:
    """What torch has of it, not to be changed: made once, in 2 ms.

    The public table adds 520 composite operators, which tracing decomposes anyway, and takes 80 ms
    to build.
    """
    table = dict(torch._decomp._core_aten_decompositions_post_autograd())
    for op in kept_whole():
        table.pop(op, None)
    table[torch.ops.aten.pow.Tensor_Scalar] = _bool_power
    scatter = torch.ops.aten.as_strided_scatter.default
    table[scatter] = partial(_scattered_apart, table.get(scatter))
    table[torch.ops.aten.isin.Tensor_Tensor] = _isin
    norm = torch.ops.aten.native_layer_norm_backward.default
    table[norm] = partial(_layer_norm_backward, table[norm])
    return {op: run if _fills(op) else partial(_unless_float8, run) for op, run in table.items()}


def whole_table() -> dict[Any, Callable[..., Any]]:
    """Of graphs whose operators stay eager's: what mends tracing, and `DECOMPOSITIONS`."""
    scatter = torch.ops.aten.as_strided_scatter.default
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.pow.Tensor_Scalar: _bool_power,
        scatter: partial(_scattered_apart, None),
        torch.ops.aten.native_dropout.default: _dropout,
        torch.ops.aten.native_dropout_backward.default: _dropout_backward,
        **DECOMPOSITIONS,
    }
    checks = {op: around(table.get(op)) for op, around in CHECKS.items() if op not in _WRITTEN_OUT}
    return table | checks


_WRITTEN_OUT = (
    torch.ops.aten.multi_margin_loss.default,
    torch.ops.aten.multilabel_margin_loss_forward.default,
)
"""Operators whose checks decompose them."""


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Eager on a CPU multiplies by noise, drawn as the result lies in memory; traced all the same
    has the operator of GPUs, which multiplies by a mask and by a number."""
    if not x.is_cpu or train is False or not 0 < p < 1:
        return NotImplemented
    order, _ = compute_elementwise_output_logical_to_physical_perm(x)
    back = sorted(range(x.dim()), key=order.__getitem__)
    noise = torch.bernoulli(x.permute(order), 1 - p).permute(back) / (1 - p)
    return x * noise, noise != 0


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    if not grad.is_cpu or not grad.is_floating_point() or scale <= 1:
        return NotImplemented
    return grad * (mask.to(grad.dtype) / (1 / scale))


def _fills(op: Any) -> bool:
    name = op._schema.name if hasattr(op, "_schema") else ""
    return name.endswith("_like") or name.startswith(("aten::new_", "aten::fill", "aten::zero"))


def _unless_float8(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """run: a decomposition. What floats of 8 bits may be used for eager's kernels know, and those
    of the operators that it is made of take less or more."""
    if any(isinstance(x, torch.Tensor) and x.dtype in FLOAT8 for x in args):
        return NotImplemented
    return run(*args, **kwargs)


def _layer_norm_backward(run: Callable[..., Any], grad: torch.Tensor, *given: Any) -> Any:
    """run: torch's own, which divides a reciprocal deviation of half precision by the number of
    elements and rounds. Eager does so in float32."""
    x, shape, mean, rstd, *others = given
    wide = torch.promote_types(x.dtype, torch.float32)
    return run(grad, x, shape, mean.to(wide), rstd.to(wide), *others)


def _scattered_apart(
    run: Callable[..., Any] | None, x: torch.Tensor, *given: Any, **named: Any
) -> Any:
    """run: a decomposition, or None. Of an expanded tensor eager scatters into a copy whose
    elements lie apart; traced, those of the copy overlap as those of x."""
    if not any(isinstance(s, int) and s == 0 for s in x.stride()):
        return NotImplemented if run is None else run(x, *given, **named)
    return torch.ops.aten.as_strided_scatter(x.clone(), *given, **named)


def _isin(
    x: torch.Tensor, among: torch.Tensor, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Few elements are looked at one by one, many are sorted. Of sizes that vary the example
    decides, where torch's own leaves a guard; and torch's own loses its way where NaNs stand among
    what is sorted."""
    found, many = (math.prod(map(_example, y.shape)) for y in (x, among))
    if many < 10 * found**0.145:
        return isin_default(x, among, invert=invert)  # type: ignore[no-untyped-call]
    kind = torch.result_type(x, among)
    x, among = x.to(kind), among.to(kind)
    numbers = among.flatten()
    if among.is_floating_point():
        numbers = torch.where(numbers.isnan(), math.inf, numbers)
    ordered = numbers.sort().values
    first, last = (torch.searchsorted(ordered, x, right=right) for right in (False, True))
    is_in = first != last
    if among.is_floating_point():
        is_in = torch.where(x == math.inf, (among == math.inf).any(), is_in)
    return ~is_in if invert else is_in


def _example(n: int | torch.SymInt) -> int:
    return n if isinstance(n, int) else n.node.hint if n.node.has_hint() else 2


def _bool_power(x: torch.Tensor, exponent: Any) -> Any:
    """Traced, torch's own result of bool ** bool is int64; eager's is bool."""
    if x.dtype != torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return x.clone() if exponent else torch.ones_like(x)


def fused_multiply_add() -> tuple[Any, ...]:
    """The primitive fma(a, b, c) = a * b + c that Dynamo makes of addcmul_ and addcdiv_, in
    versions that have it."""
    packet = getattr(torch.ops.prims, "fma", None)
    return () if packet is None else (packet.default,)
