"""Numbers and dtypes that eager's kernels refuse although tracing takes them, and results whose
dtype or sizes are others in eager than PyTorch's own shape functions say.

Each function looks at the operands of the operators that fits.py names it for, as those of
fits_sizes.py do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, sym_and

from plait import compat
from plait.devices import facts_of
from plait.graph.demands import demand, demand_equal, demand_room, is_sure
from plait.graph.refuse import answer

aten = torch.ops.aten
Rule = Callable[..., Any]
_least: Any = torch.sym_min


def softmax_backward(grad: Tensor, out: Tensor, *_: Any) -> Any:
    says = "Expected tensor for argument #1 'grad' to have same size as tensor for argument #2"
    demand_equal(grad.shape, out.shape, f"{says} 'output'; but {grad.shape} is not {out.shape}")
    return NotImplemented


def added(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Of x + alpha * y and x - alpha * y."""
    bools = all(
        (t.dtype if isinstance(t, Tensor) else type(t)) in (bool, torch.bool) for t in (x, y)
    )
    demand(
        bools or not isinstance(alpha, bool), "Boolean alpha only supported for Boolean results."
    )
    says = "For integral input tensors, argument alpha must not be a floating point number."
    demand(not bools or not isinstance(alpha, float), says)  # of integers tracing looks itself
    return NotImplemented


def difference(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Tracing looks at the dtypes of tensors alone."""
    says = "Subtraction, the `-` operator, with a bool tensor is not supported."
    demand(not any(isinstance(t, (bool, torch.SymBool)) for t in (x, y)), says)
    return added(x, y, alpha=alpha)


def clamped(x: Tensor, *bounds: Any) -> Any:
    bools = x.dtype == torch.bool and all(isinstance(b, bool) for b in bounds if b is not None)
    demand(not bools, "clamp is not implemented for bools", NotImplementedError)
    return of_reals(x, *bounds)


def of_reals(*operands: Any) -> Any:
    """Of an operator that eager has for real numbers alone, and tracing for complex ones, too."""
    found = [t.is_complex() if isinstance(t, Tensor) else isinstance(t, complex) for t in operands]
    demand(
        not any(found), "the operator is not implemented for complex numbers", NotImplementedError
    )
    return NotImplemented


def on_bits(*operands: Any) -> Any:
    """Of integers and bools."""
    kinds = [t.dtype if isinstance(t, Tensor) else type(t) for t in operands]
    real = [
        t in (float, torch.SymFloat) or isinstance(t, torch.dtype) and t.is_floating_point
        for t in kinds
    ]
    says = "operators on bits are not implemented for floats"
    demand(not any(real), says, NotImplementedError)
    return of_reals(*operands)


def shifted(*operands: Any) -> Any:
    """Of integers; bools become integers beside one."""
    kinds = {t.dtype if isinstance(t, Tensor) else type(t) for t in operands}
    says = "shifts are not implemented for bools"
    demand(not kinds <= {bool, torch.bool}, says, NotImplementedError)
    return on_bits(*operands)


def by_numbers(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of an operator whose numbers must fit the dtype of its tensors."""
    found = [t for t in (*args, *kwargs.values()) if isinstance(t, complex)]
    says = "a complex number cannot be converted to the type of real tensors without overflow"
    demand(not x.is_floating_point() or not any(t.imag for t in found), says)
    return NotImplemented


def held(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Of an operator whose kernel first makes its numbers elements. Eager is asked where one is
    beyond the range of a dtype: of which numbers go into which dtype, and how far."""
    given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    dtypes = {*(x.dtype for x in given), kwargs.get("dtype") or torch.bool}
    numbers = [t for t in (*args, *kwargs.values()) if type(t) in (int, float)]
    if all(_in_range(number, dtype) for number in numbers for dtype in dtypes):
        return NotImplemented
    device = torch.device(given[0].device if given else kwargs.get("device") or "cpu")
    facts = facts_of(device)
    if not facts.is_host and not (facts.streams and torch.cuda.is_available()):
        return NotImplemented

    def real(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return compat.tracing.hint_of(x)
        return torch.zeros(
            [compat.tracing.hint_of(n) for n in x.shape], dtype=x.dtype, device=device
        )

    error = answer(op, args, kwargs, real, device)
    text = str(error).partition("\n")[0]
    demand("without overflow" not in text, text)
    return NotImplemented


def _in_range(number: float, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:  # some of 8 bits have no infinity
        infinite = math.isinf(number) and dtype.itemsize > 1
        return math.isnan(number) or infinite or abs(number) <= torch.finfo(dtype).max
    if dtype.is_complex or dtype == torch.bool:
        return True
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def nan_to_num(x: Tensor, *numbers: Any) -> Any:
    """Of complex numbers, where tracing refuses them: of both parts."""
    if not x.is_complex():
        return NotImplemented
    parts = torch.view_as_real(x.resolve_conj())
    return torch.view_as_complex(aten.nan_to_num.default(parts, *numbers))


def running(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    says = "a running sum or product in bools is not implemented"
    demand(dtype != torch.bool, says, NotImplementedError)
    return NotImplemented


def bits(x: Tensor) -> Any:
    says = f"bitwise_not is not implemented for {x.dtype}"
    demand(not (x.is_floating_point() or x.is_complex()), says, NotImplementedError)
    return NotImplemented


def mvlgamma(x: Tensor, p: int) -> Any:
    demand(p >= 1, "p has to be greater than or equal to 1")
    return NotImplemented


def addmv(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    demand_room(a.shape[:1], x)
    return NotImplemented


def selected(x: Tensor, dim: int, index: Any) -> Any:
    """The shape function of torch 2.11 does not look. What is found is checked when it is used."""
    n = x.shape[dim]
    if not free_unbacked_symbols((n, index)):
        says = f"select(): index {index} out of range for dimension {dim} of {list(x.shape)}"
        demand(sym_and(-n <= index, index < n), says, IndexError)
    return NotImplemented


def repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Any:
    """Eager's kernel is called with another size, and looks; PyTorch's own pass takes a result of
    no elements for made without it."""
    if output_size is not None and facts_of(repeats.device).eager_cpu and is_sure(output_size == 0):
        torch._assert_async(repeats.sum() == 0, "allocated size does not match required size")
    return NotImplemented


def addr(x: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Any:
    """A summand of fewer dimensions counts for the dtype as one of two."""
    if x.dim() == 2 or x.dtype == torch.promote_types(a.dtype, b.dtype):
        return NotImplemented
    return aten.addr.default(x.expand(a.shape[0], b.shape[0]), a, b, **kwargs)


def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    return NotImplemented if mask.dtype == torch.bool else grad * mask * scale
