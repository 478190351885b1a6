"""Sizes, dimensions and numbers that eager's kernels refuse although tracing takes them, and
results whose dtype or sizes are others in eager than PyTorch's own shape functions say.

A rule looks at an operator's operands before it is traced. What a size decides that is a number in
the example becomes a guard; what only a run tells becomes a check when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._prims_common as prims
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    guard_or_false,
    sym_and,
    sym_or,
)

from plait import compat
from plait.devices import facts_of
from plait.errors import refusal
from plait.graph.refuse import or_else, users_line
from plait.graph.strides import is_view  # what it puts in order is looked at before

aten = torch.ops.aten
Rule = Callable[..., Any]
_HALF = (torch.float16, torch.bfloat16)
_least: Any = torch.sym_min


# ------------------------------------------------------------------------------------------ demands
def _demand(holds: Any, says: str, kind: type[Exception] = RuntimeError) -> None:
    """Raises an OperandError that is caught as `kind` unless a condition holds; what nobody knows
    yet is looked at when the program runs."""
    if isinstance(holds, torch.SymBool) and free_unbacked_symbols(holds):
        when_run: Any = torch._check
        when_run(holds, lambda: says)
    elif not holds:
        raise refusal(kind())(says, where=users_line())


def _demand_equal(x: Sequence[Any], y: Sequence[Any], says: str) -> None:
    _demand(len(x) == len(y), says)
    for a, b in zip(x, y, strict=True):
        _demand(a == b, says)


def _is(holds: Any) -> bool:
    """Whether a condition holds, False where only a run tells."""
    return bool(guard_or_false(holds))


def _demand_room(shape: Sequence[Any], x: Tensor | None) -> None:
    """x may be broadcast to a shape that is not changed by it."""
    if x is None:
        return
    says = f"output with shape {list(shape)} doesn't match the broadcast shape with {list(x.shape)}"
    _demand(x.dim() <= len(shape), says)
    for have, got in zip(reversed(shape), reversed(x.shape), strict=False):
        _demand(sym_or(have == got, got == 1), says)


# --------------------------------------------------------------------------------------- dimensions
def _dims_of(op: OpOverload) -> list[tuple[int, str, Any]]:
    """Place, name and default of each argument that is one of the dimensions of the first."""
    first, *rest = op._schema.arguments
    if str(first.type) != "Tensor" or op._schema.name.endswith("backward"):
        return []
    known = ("dim", "dim1", "dim2")
    found = [(k, a) for k, a in enumerate(rest, 1) if a.name in known and str(a.type) == "int"]
    return [(k, a.name, a.default_value) for k, a in found]


def _dimensions(dims: Sequence[tuple[int, str, Any]], *args: Any, **kwargs: Any) -> Any:
    n = max(args[0].dim(), 1)
    for k, name, default in dims:
        dim = args[k] if len(args) > k else kwargs.get(name, default)
        says = "Dimension out of range (expected to be in range of "
        _demand(-n <= dim < n, f"{says}[{-n}, {n - 1}], but got {dim})", IndexError)
    return NotImplemented


_BY_DIMENSION = """
    _log_softmax _log_softmax_backward_data _logcumsumexp _safe_softmax _softmax
    _softmax_backward_data cummax cummin cumprod cumsum diagonal diagonal_copy diagonal_scatter
    gather index_add index_copy index_fill index_reduce index_select kthvalue logcumsumexp median
    mode nanmedian renorm scatter scatter_add scatter_reduce select select_scatter slice
    slice_scatter sort topk unbind unfold
""".split()  # fmt: skip


def _squeezed(x: Tensor, dims: int | Sequence[int] | None = None) -> Any:
    """Tracing takes a size that a run finds for another than 1. Where it is 1, eager has a
    dimension less."""
    given = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in given:
        n: Any = x.shape[dim] if x.dim() else 1
        if isinstance(n, torch.SymInt) and free_unbacked_symbols(n) and not _is(n == 1):
            _demand(
                n != 1,
                f"squeeze: the size of dimension {dim} is 1 in this run, and was traced as "
                "another one",
            )
    return NotImplemented


# ------------------------------------------------------------------------------------------ indices
def _index_source(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *reduce: str, **kwargs: Any
) -> Any:
    n, dim = index.numel(), dim % max(x.dim(), 1)
    if source.dim() == 0:
        says = "Dimension specified as 0 but tensor has no dimensions"
        _demand(n == 1, says, IndexError)
    else:
        says = f"Indexing dim {dim} is out of bounds of the source tensor with dim {source.dim()}"
        _demand(dim < source.dim(), says)
        says = f"Number of indices ({n}) should be equal to source.size(dim): ({source.shape[dim]})"
        _demand(n == source.shape[dim], f"{says}, for dim: {dim}")
    shapes = [list(t.shape) for t in (x, source)]
    if x.dim() and source.dim():
        for shape in shapes:
            del shape[dim]
    says = "source tensor shape must match self tensor shape, excluding the specified dimension"
    _demand_equal(
        shapes[0], shapes[1], f"{says}. Got self.shape = {x.shape} source.shape = {source.shape}"
    )
    if x.dim() == 1 and facts_of(x.device).eager_cpu:
        kind = IndexError if kwargs.get("include_self", True) else RuntimeError
        _demand(sym_or(x.shape[dim] > 0, n == 0), "index out of range in self", kind)
    return NotImplemented


def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    if x.dim() == 0:
        n = index.numel()
        says = f"index_select(): Index to scalar can have only 1 value, got {n} value(s)"
        _demand(n == 1, says)
    return NotImplemented


def _isin(x: Any, given: Tensor, **kwargs: Any) -> Any:
    """Eager compares with all of a few elements, which it sees as one row."""
    n = x.numel() if isinstance(x, Tensor) else 1
    if _is(given.numel() + 1 <= 10.0 * n**0.145):
        seen = given.to(torch.result_type(x, given)) if facts_of(given.device).eager_cpu else given
        says = (
            "view size is not compatible with input tensor's size and stride. Use .reshape(...) "
            "instead."
        )
        _demand(is_view(seen, [seen.numel()]), says)
    return NotImplemented


def _masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Any:
    given = [list(i.shape) for i in indices if i is not None]
    says = f"shape mismatch: indexing tensors could not be broadcast together with shapes {given}"
    for k, one in enumerate(given):
        for other in given[:k]:
            for a, b in zip(reversed(one), reversed(other), strict=False):
                _demand(sym_or(a == b, a == 1, b == 1), says, IndexError)
    return NotImplemented


# ------------------------------------------------------------------------------------------- losses
def _by_target(x: Tensor, target: Tensor, weight: Tensor | None = None, *_: Any) -> None:
    _demand_room(x.shape, target)
    _demand_room(x.shape, weight)


def _reduced(loss: Tensor, reduction: int) -> Any:
    return (lambda x: x, torch.mean, torch.sum)[reduction](loss)


def _binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Any:
    """The weight does not count for the dtype."""
    _by_target(x, target, weight)
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    loss = aten.binary_cross_entropy.default(x, target, None, 0)
    return _reduced((loss * weight).to(x.dtype), reduction)


def _with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Any:
    for t in (weight, pos_weight):
        _demand_room(target.shape, t)
    return NotImplemented


def _soft_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Any:
    """Eager works in memory of the input's dtype."""
    _by_target(x, target)
    if x.dtype == target.dtype or not x.is_floating_point():
        return NotImplemented
    return _reduced((-x * target).to(x.dtype).exp().log1p(), reduction)


def _huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Any:
    """The target does not count for the dtype."""
    if x.dtype == target.dtype or not x.is_floating_point():
        return NotImplemented
    both = torch.promote_types(x.dtype, target.dtype)
    loss = aten.huber_loss.default(x.to(both), target.to(both), 0, delta)
    return _reduced(loss.to(x.dtype), reduction)


def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Any:
    _demand(beta >= 0, "smooth_l1_loss does not support negative values for beta.")
    return NotImplemented


def _nll_loss2d(x: Tensor, target: Tensor, weight: Tensor | None, *_: Any) -> Any:
    of = "only batches of spatial"
    says = f"{of} targets supported (3D tensors) but got targets of dimension: {target.dim()}"
    _demand(target.dim() == 3, says)
    says = f"{of} inputs supported (4D tensors), but got input of dimension: {x.dim()}"
    _demand(x.dim() == 4, says)
    if weight is not None:
        says = "weight tensor should be defined either for all or no classes"
        _demand(weight.numel() == x.shape[1], says)
    sizes = (x.shape[0], *x.shape[2:])
    says = f"size mismatch (got input: {list(x.shape)} , target: {list(target.shape)}"
    _demand_equal(sizes, target.shape, says)
    return NotImplemented


# ------------------------------------------------------------------------------------------- images
def _resampled(x: Tensor, size: Any, *args: Any, **kwargs: Any) -> Any:
    """Of an operator whose second argument is the sizes of its result."""
    says = f"Input and output sizes should be greater than 0, but got input {list(x.shape[2:])}"
    for n in (*x.shape[2:], *size):
        _demand(n > 0, f"{says} and output {list(size)}")
    channels = f"Non-empty {x.dim()}D data tensor expected but got a tensor with sizes {x.shape}"
    _demand(x.shape[1] != 0, channels)
    return NotImplemented


def _scaled(x: Tensor, size: Any, *rest: Any, **named: Any) -> Any:
    """Of one that takes sizes or factors."""
    factors = named["scale_factors"] if "scale_factors" in named else rest[-1]
    sizes: Any = upsample_compute_output_size
    return _resampled(x, sizes(x.shape, size, factors))


def _windows(numbers: int, *args: Any) -> Any:
    """Of im2col and col2im: `numbers` is the place of their kernel's sizes."""
    for k, name in enumerate(("kernel size", "dilation", "padding", "stride")):
        found = args[numbers + k]
        least, what = (0, "non-negative") if name == "padding" else (1, "greater than zero")
        _demand(min(found) >= least, f"{name} should be {what}, but got {list(found)}")
    return NotImplemented


def _padded(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Any:
    """Eager takes away first, at one end and then the other."""
    for d, low, high in zip(range(x.dim() - 1, -1, -1), pad[::2], pad[1::2], strict=False):
        left: Any = x.shape[d]
        for n in (low, high):
            left = left + _least(n, 0)
            _demand(left >= 0, "narrow(): length must be non-negative.")
    return NotImplemented


def _pixel_unshuffle(x: Tensor, factor: int) -> Any:
    """Eager leaves the sizes of an empty image as they are, on a CPU."""
    for k, name in ((-2, "height"), (-1, "width")):
        says = f"expects {name} to be divisible by downscale_factor, but input.size({k})="
        holds = x.shape[k] % factor == 0
        _demand(holds, f"pixel_unshuffle {says}{x.shape[k]} is not divisible by {factor}")
    return x.clone() if facts_of(x.device).eager_cpu and _is(x.numel() == 0) else NotImplemented


# ------------------------------------------------------------------------------------------- norms
def _in_single(op: Any, x: Tensor, *args: Any) -> Any:
    """On a CPU weights or statistics of float32 make those of a half input so."""
    single = any(isinstance(t, Tensor) and t.dtype == torch.float32 for t in args)
    if not facts_of(x.device).eager_cpu or x.dtype not in _HALF or not single:
        return NotImplemented
    out, *rest = op(x.float(), *args)
    return (out.to(x.dtype), *rest)


def _group_norm(
    x: Tensor, weight: Any, bias: Any, n: Any, c: Any, size: Any, groups: int, eps: float
) -> Any:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            says = f"Expected {name} to be a vector of size equal to the number of channels in"
            _demand(t.dim() == 1, f"{says} input, but got {name} of shape {t.shape}")
            _demand_equal(t.shape, [c], f"{says} input, but got {name} of shape {t.shape}")
    cpu = facts_of(x.device).eager_cpu
    order = prims.suggest_memory_format(x) if cpu else torch.contiguous_format
    if not any(map(free_unbacked_symbols, (*x.shape, *x.stride()))):
        _demand(
            x.is_contiguous(memory_format=order),
            "Expected X.is_contiguous(memory_format) to be true",
        )
    op = aten.native_group_norm.default
    if x.dim() < 2 or not _is(x.shape[0] == n) or not _is(x.shape[1] == c):
        out, *rest = op(x.reshape(n, c, size), weight, bias, n, c, size, groups, eps)
        return (out.reshape(x.shape), *rest)
    return _in_single(op, x, weight, bias, n, c, size, groups, eps)


def _batch_norm(x: Tensor, *args: Any) -> Any:
    if args[4] and facts_of(x.device).eager_cpu:
        _demand(
            x.numel() > 0,
            f"input tensor must have at least one element, but got input_sizes = {list(x.shape)}",
        )
    return NotImplemented


# ------------------------------------------------------------------------------------------- others
def _softmax_backward(grad: Tensor, out: Tensor, *_: Any) -> Any:
    says = "Expected tensor for argument #1 'grad' to have same size as tensor for argument #2"
    _demand_equal(grad.shape, out.shape, f"{says} 'output'; but {grad.shape} is not {out.shape}")
    return NotImplemented


def _sum(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Of x + alpha * y and x - alpha * y."""
    bools = all(
        (t.dtype if isinstance(t, Tensor) else type(t)) in (bool, torch.bool) for t in (x, y)
    )
    _demand(
        bools or not isinstance(alpha, bool), "Boolean alpha only supported for Boolean results."
    )
    says = "For integral input tensors, argument alpha must not be a floating point number."
    _demand(not bools or not isinstance(alpha, float), says)  # of integers tracing looks itself
    return NotImplemented


def _difference(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Tracing looks at the dtypes of tensors alone."""
    says = "Subtraction, the `-` operator, with a bool tensor is not supported."
    _demand(not any(isinstance(t, (bool, torch.SymBool)) for t in (x, y)), says)
    return _sum(x, y, alpha=alpha)


def _clamped(x: Tensor, *bounds: Any) -> Any:
    bools = x.dtype == torch.bool and all(isinstance(b, bool) for b in bounds if b is not None)
    _demand(not bools, "clamp is not implemented for bools", NotImplementedError)
    return _of_reals(x, *bounds)


def _of_reals(*operands: Any) -> Any:
    """Of an operator that eager has for real numbers alone, and tracing for complex ones, too."""
    found = [t.is_complex() if isinstance(t, Tensor) else isinstance(t, complex) for t in operands]
    _demand(
        not any(found), "the operator is not implemented for complex numbers", NotImplementedError
    )
    return NotImplemented


def _on_bits(*operands: Any) -> Any:
    """Of integers and bools."""
    kinds = [t.dtype if isinstance(t, Tensor) else type(t) for t in operands]
    real = [
        t in (float, torch.SymFloat) or isinstance(t, torch.dtype) and t.is_floating_point
        for t in kinds
    ]
    says = "operators on bits are not implemented for floats"
    _demand(not any(real), says, NotImplementedError)
    return _of_reals(*operands)


def _shifted(*operands: Any) -> Any:
    """Of integers; bools become integers beside one."""
    kinds = {t.dtype if isinstance(t, Tensor) else type(t) for t in operands}
    says = "shifts are not implemented for bools"
    _demand(not kinds <= {bool, torch.bool}, says, NotImplementedError)
    return _on_bits(*operands)


def _by_numbers(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of an operator whose numbers must fit the dtype of its tensors."""
    found = [t for t in (*args, *kwargs.values()) if isinstance(t, complex)]
    says = "a complex number cannot be converted to the type of real tensors without overflow"
    _demand(not x.is_floating_point() or not any(t.imag for t in found), says)
    return NotImplemented


def _nan_to_num(x: Tensor, *numbers: Any) -> Any:
    """Of complex numbers, where tracing refuses them: of both parts."""
    if not x.is_complex():
        return NotImplemented
    parts = torch.view_as_real(x.resolve_conj())
    return torch.view_as_complex(aten.nan_to_num.default(parts, *numbers))


def _running(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    says = "a running sum or product in bools is not implemented"
    _demand(dtype != torch.bool, says, NotImplementedError)
    return NotImplemented


def _bits(x: Tensor) -> Any:
    says = f"bitwise_not is not implemented for {x.dtype}"
    _demand(not (x.is_floating_point() or x.is_complex()), says, NotImplementedError)
    return NotImplemented


def _mvlgamma(x: Tensor, p: int) -> Any:
    _demand(p >= 1, "p has to be greater than or equal to 1")
    return NotImplemented


def _addmv(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    _demand_room(a.shape[:1], x)
    return NotImplemented


def _selected(x: Tensor, dim: int, index: Any) -> Any:
    """The shape function of torch 2.11 does not look. What is found is checked when it is used."""
    n = x.shape[dim]
    if not free_unbacked_symbols((n, index)):
        says = f"select(): index {index} out of range for dimension {dim} of {list(x.shape)}"
        _demand(sym_and(-n <= index, index < n), says, IndexError)
    return NotImplemented


def _repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Any:
    """Eager's kernel is called with another size, and looks; PyTorch's own pass takes a result of
    no elements for made without it."""
    if output_size is not None and facts_of(repeats.device).eager_cpu and _is(output_size == 0):
        torch._assert_async(repeats.sum() == 0, "allocated size does not match required size")
    return NotImplemented


def _addr(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    """A summand of fewer dimensions counts for the dtype as one of two."""
    if x.dim() == 2 or x.dtype == torch.promote_types(a.dtype, b.dtype):
        return NotImplemented
    return aten.addr.default(x.expand(a.shape[0], b.shape[0]), a, b, **kwargs)


def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    return NotImplemented if mask.dtype == torch.bool else grad * mask * scale


# ---------------------------------------------------------------------------------- in the compiler
_RULES: dict[OpOverload, Rule] = {
    aten._softmax_backward_data.default: _softmax_backward,
    aten._unsafe_masked_index.default: _masked_index,
    aten._unsafe_masked_index_put_accumulate.default: _masked_index,
    aten.add.Tensor: _sum,
    aten.addcdiv.default: _by_numbers,
    aten.addmv.default: _addmv,
    aten.addr.default: _addr,
    aten.baddbmm.default: _by_numbers,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.binary_cross_entropy_with_logits.default: _with_logits,
    aten.bitwise_not.default: _bits,
    aten.clamp.default: _clamped,
    aten.clamp_max.default: _clamped,
    aten.clamp_min.default: _clamped,
    aten.col2im.default: partial(_windows, 2),
    aten.cumprod.default: _running,
    aten.cumsum.default: _running,
    aten.huber_loss.default: _huber_loss,
    aten.im2col.default: partial(_windows, 1),
    aten.isin.Scalar_Tensor: _isin,
    aten.isin.Tensor_Tensor: _isin,
    aten.index_add.default: _index_source,
    aten.index_reduce.default: _index_source,
    aten.index_select.default: _index_select,
    aten.lerp.Scalar: _by_numbers,
    aten.mvlgamma.default: _mvlgamma,
    aten.nan_to_num.default: _nan_to_num,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_dropout_backward.default: _dropout_backward,
    aten.native_group_norm.default: _group_norm,
    aten.nll_loss2d_forward.default: _nll_loss2d,
    aten.constant_pad_nd.default: _padded,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.select.int: _selected,
    aten.smooth_l1_loss.default: _smooth_l1_loss,
    aten.soft_margin_loss.default: _soft_margin_loss,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    **{
        op: partial(_in_single, op)
        for op in (
            aten.native_layer_norm.default, aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
            aten._batch_norm_with_update_functional.default,
        )
    },
}  # fmt: skip

_RESAMPLING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
""".split()  # fmt: skip

_BINARY: dict[str, Rule] = {
    **dict.fromkeys(("xlogy", "special_xlog1py"), _of_reals),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), _on_bits),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), _shifted),
    **dict.fromkeys(("sub", "rsub"), _difference),
}


def _overloads(packet: Any) -> list[OpOverload]:
    found = [getattr(packet, name) for name in packet.overloads()]
    return [op for op in found if not op._schema.is_mutable]


def _register() -> None:
    for name in _RESAMPLING:
        for op in _overloads(getattr(aten, name)):
            _put(op, _scaled if op._overloadname == "vec" else _resampled)
    for name, rule in _BINARY.items():
        for op in _overloads(getattr(aten, name)):
            _put(op, rule)
    for op, rule in _RULES.items():
        _put(op, rule)
    for name in _BY_DIMENSION:  # a dimension is looked at first
        for op in _overloads(getattr(aten, name)):
            if dims := _dims_of(op):
                _put(op, partial(_dimensions, dims))


def _put(op: OpOverload, rule: Rule) -> None:
    compat.decompositions.CHECKS[op] = partial(_fitted, compat.decompositions.CHECKS.get(op), rule)


def _fitted(checks: Callable[[Any], Rule] | None, rule: Rule, decomposition: Any) -> Rule:
    return or_else(rule, decomposition if checks is None else checks(decomposition))


_register()
