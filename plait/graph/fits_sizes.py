"""Sizes, dimensions and indices that eager's kernels refuse although tracing takes them.

Each function looks at the operands of the operators that fits.py names it for. It raises, or gives
NotImplemented, by which the operator is traced as it is, or what is traced instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._prims_common as prims
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, sym_or

from plait.devices import facts_of
from plait.graph.demands import demand, demand_equal, demand_room, is_sure
from plait.graph.strides import is_view  # what it puts in order is looked at before

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_least: Any = torch.sym_min


# --------------------------------------------------------------------------------------- dimensions
def dims_of(op: OpOverload) -> list[tuple[int, str, Any]]:
    """Place, name and default of each argument that is one of the dimensions of the first."""
    first, *rest = op._schema.arguments
    if str(first.type) != "Tensor" or op._schema.name.endswith("backward"):
        return []
    known = ("dim", "dim1", "dim2")
    found = [(k, a) for k, a in enumerate(rest, 1) if a.name in known and str(a.type) == "int"]
    return [(k, a.name, a.default_value) for k, a in found]


def dimensions(dims: Sequence[tuple[int, str, Any]], *args: Any, **kwargs: Any) -> Any:
    n = max(args[0].dim(), 1)
    for k, name, default in dims:
        dim = args[k] if len(args) > k else kwargs.get(name, default)
        says = "Dimension out of range (expected to be in range of "
        demand(-n <= dim < n, f"{says}[{-n}, {n - 1}], but got {dim})", IndexError)
    return NotImplemented


def squeezed(x: Tensor, dims: int | Sequence[int] | None = None) -> Any:
    """Tracing takes a size that a run finds for another than 1. Where it is 1, eager has a
    dimension less."""
    given = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in given:
        n: Any = x.shape[dim] if x.dim() else 1
        if isinstance(n, torch.SymInt) and free_unbacked_symbols(n) and not is_sure(n == 1):
            demand(
                n != 1,
                f"squeeze: the size of dimension {dim} is 1 in this run, and was traced as "
                "another one",
            )
    return NotImplemented


# ------------------------------------------------------------------------------------------ indices
def index_source(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *reduce: str, **kwargs: Any
) -> Any:
    n, dim = index.numel(), dim % max(x.dim(), 1)
    if source.dim() == 0:
        says = "Dimension specified as 0 but tensor has no dimensions"
        demand(n == 1, says, IndexError)
    else:
        says = f"Indexing dim {dim} is out of bounds of the source tensor with dim {source.dim()}"
        demand(dim < source.dim(), says)
        says = f"Number of indices ({n}) should be equal to source.size(dim): ({source.shape[dim]})"
        demand(n == source.shape[dim], f"{says}, for dim: {dim}")
    shapes = [list(t.shape) for t in (x, source)]
    if x.dim() and source.dim():
        for shape in shapes:
            del shape[dim]
    says = "source tensor shape must match self tensor shape, excluding the specified dimension"
    demand_equal(
        shapes[0], shapes[1], f"{says}. Got self.shape = {x.shape} source.shape = {source.shape}"
    )
    if x.dim() == 1 and facts_of(x.device).eager_cpu:
        kind = IndexError if kwargs.get("include_self", True) else RuntimeError
        demand(sym_or(x.shape[dim] > 0, n == 0), "index out of range in self", kind)
    return NotImplemented


def index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if x.dim() == 0:
        n = index.numel()
        says = f"index_select(): Index to scalar can have only 1 value, got {n} value(s)"
        demand(n == 1, says)
    return NotImplemented


def isin(x: Any, given: Tensor, **kwargs: Any) -> Any:
    """Eager compares with all of a few elements, which it sees as one row."""
    seen = given.to(torch.result_type(x, given)) if facts_of(given.device).eager_cpu else given
    as_row = is_view(seen, [seen.numel()])
    n = x.numel() if isinstance(x, Tensor) else 1
    if not is_sure(as_row) and is_sure(given.numel() + 1 <= 10.0 * n**0.145):
        says = (
            "view size is not compatible with input tensor's size and stride. Use .reshape(...) "
            "instead."
        )
        demand(as_row, says)
    return NotImplemented


def masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Any:
    given = [list(i.shape) for i in indices if i is not None]
    says = f"shape mismatch: indexing tensors could not be broadcast together with shapes {given}"
    for k, one in enumerate(given):
        for other in given[:k]:
            for a, b in zip(reversed(one), reversed(other), strict=False):
                demand(sym_or(a == b, a == 1, b == 1), says, IndexError)
    return NotImplemented


# ------------------------------------------------------------------------------------------- losses
def _by_target(x: Tensor, target: Tensor, weight: Tensor | None = None, *_: Any) -> None:
    demand_room(x.shape, target)
    demand_room(x.shape, weight)


def _reduced(loss: Tensor, reduction: int) -> Any:
    return (lambda x: x, torch.mean, torch.sum)[reduction](loss)


def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Any:
    """The weight does not count for the dtype."""
    _by_target(x, target, weight)
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    loss = aten.binary_cross_entropy.default(x, target, None, 0)
    return _reduced((loss * weight).to(x.dtype), reduction)


def with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    for t in (weight, pos_weight):
        demand_room(target.shape, t)
    return NotImplemented


def soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Any:
    """Eager works in memory of the input's dtype."""
    _by_target(x, target)
    if x.dtype == target.dtype or not x.is_floating_point():
        return NotImplemented
    return _reduced((-x * target).to(x.dtype).exp().log1p(), reduction)


def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Any:
    """The target does not count for the dtype."""
    if x.dtype == target.dtype or not x.is_floating_point():
        return NotImplemented
    both = torch.promote_types(x.dtype, target.dtype)
    loss = aten.huber_loss.default(x.to(both), target.to(both), 0, delta)
    return _reduced(loss.to(x.dtype), reduction)


def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Any:
    demand(beta >= 0, "smooth_l1_loss does not support negative values for beta.")
    return NotImplemented


def nll_loss2d(x: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> Any:
    of = "only batches of spatial"
    says = f"{of} targets supported (3D tensors) but got targets of dimension: {target.dim()}"
    demand(target.dim() == 3, says)
    says = f"{of} inputs supported (4D tensors), but got input of dimension: {x.dim()}"
    demand(x.dim() == 4, says)
    if weight is not None:
        says = "weight tensor should be defined either for all or no classes"
        demand(weight.numel() == x.shape[1], says)
    sizes = (x.shape[0], *x.shape[2:])
    says = f"size mismatch (got input: {list(x.shape)} , target: {list(target.shape)}"
    demand_equal(sizes, target.shape, says)
    return NotImplemented


# ------------------------------------------------------------------------------------------- images
def resampled(x: Tensor, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Of an operator whose second argument is the sizes of its result."""
    says = f"Input and output sizes should be greater than 0, but got input {list(x.shape[2:])}"
    for n in (*x.shape[2:], *size):
        demand(n > 0, f"{says} and output {list(size)}")
    channels = f"Non-empty {x.dim()}D data tensor expected but got a tensor with sizes {x.shape}"
    demand(x.shape[1] != 0, channels)
    return NotImplemented


def scaled(x: Tensor, size: Any, *rest: Any, **named: Any) -> Any:
    """Of one that takes sizes or factors."""
    factors = named["scale_factors"] if "scale_factors" in named else rest[-1]
    sizes: Any = upsample_compute_output_size
    return resampled(x, sizes(x.shape, size, factors))


def windows(numbers: int, *args: Any) -> Any:
    """Of im2col and col2im: `numbers` is the place of their kernel's sizes."""
    for k, name in enumerate(("kernel size", "dilation", "padding", "stride")):
        found = args[numbers + k]
        least, what = (0, "non-negative") if name == "padding" else (1, "greater than zero")
        demand(min(found) >= least, f"{name} should be {what}, but got {list(found)}")
    return NotImplemented


def padded(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    """Eager takes away first, at one end and then the other."""
    for d, low, high in zip(range(x.dim() - 1, -1, -1), pad[::2], pad[1::2], strict=False):
        left: Any = x.shape[d]
        for n in (low, high):
            left = left + _least(n, 0)
            demand(left >= 0, "narrow(): length must be non-negative.")
    return NotImplemented


def pixel_unshuffle(x: Tensor, factor: int) -> Any:
    """Eager leaves the sizes of an empty image as they are, on a CPU."""
    for k, name in ((-2, "height"), (-1, "width")):
        says = f"expects {name} to be divisible by downscale_factor, but input.size({k})="
        holds = x.shape[k] % factor == 0
        demand(holds, f"pixel_unshuffle {says}{x.shape[k]} is not divisible by {factor}")
    return x.clone() if facts_of(x.device).eager_cpu and is_sure(x.numel() == 0) else NotImplemented


# -------------------------------------------------------------------------------------------- norms
def in_single(op: Any, x: Tensor, *args: Any) -> Any:
    """On a CPU weights or statistics of float32 make those of a half input so."""
    single = any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in args)
    if not facts_of(x.device).eager_cpu or x.dtype not in _HALF or not single:
        return NotImplemented
    out, *rest = op(x.float(), *args)
    return (out.to(x.dtype), *rest)


def group_norm(
    x: Tensor, weight: Any, bias: Any, n: Any, c: Any, size: Any, groups: int, eps: float
) -> Any:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            says = f"Expected {name} to be a vector of size equal to the number of channels in"
            demand(t.dim() == 1, f"{says} input, but got {name} of shape {t.shape}")
            demand_equal(t.shape, [c], f"{says} input, but got {name} of shape {t.shape}")
    cpu = facts_of(x.device).eager_cpu
    order = prims.suggest_memory_format(x) if cpu else torch.contiguous_format
    if not any(map(free_unbacked_symbols, (*x.shape, *x.stride()))):
        demand(
            x.is_contiguous(memory_format=order),
            "Expected X.is_contiguous(memory_format) to be true",
        )
    op = aten.native_group_norm.default
    if x.dim() < 2 or not is_sure(x.shape[0] == n) or not is_sure(x.shape[1] == c):
        out, *rest = op(x.reshape(n, c, size), weight, bias, n, c, size, groups, eps)
        return (out.reshape(x.shape), *rest)
    return in_single(op, x, weight, bias, n, c, size, groups, eps)


def batch_norm(x: Tensor, *args: Any) -> Any:
    if args[4] and facts_of(x.device).eager_cpu:
        demand(
            x.numel() > 0,
            f"input tensor must have at least one element, but got input_sizes = {list(x.shape)}",
        )
    return NotImplemented
