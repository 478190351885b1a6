"""Operators of which our kernels have eager's bits, whatever the operands: with
`numerics="eager"` kernels are made of these, and all others are called as eager calls them.

An operator is here if it moves elements, decides between them, counts with integers, or computes
what IEEE 754 rounds in one way alone: a sum, a product, a quotient. Left out is
where an order of sums, an approximation or a fused product and sum is eager's own: sums and
products of floats, functions such as exp, whose kernels use one approximation in vectors and
another at their ends. Half types need no word: every operator computes in float32 and rounds once,
as eager's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch._ops import OpOverload

from plait.lower.core import Lowering, Value, View

Given = tuple[Sequence[Value], dict[str, Value]]
"""Arguments by position and by name."""

_VIEWS = """
    view _unsafe_view reshape _reshape_alias view_copy alias detach resolve_conj resolve_neg permute
    permute_copy transpose t movedim expand expand_copy squeeze unsqueeze slice narrow_copy select
    split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk
    unbind unbind_copy diagonal unfold as_strided as_strided_copy view_as_real view_as_complex
"""
_MOVES = """
    _to_copy clone lift_fresh_copy lift_fresh contiguous alias_copy copy copy_ full full_like
    new_full zeros zeros_like new_zeros ones ones_like new_ones empty empty_like empty_strided
    empty_permuted new_empty new_empty_strided _efficientzerotensor scalar_tensor zero eye cat stack
    index _unsafe_index gather index_select embedding take slice_scatter select_scatter
    diagonal_scatter masked_fill where tril triu flip roll repeat constant_pad_nd reflection_pad1d
    reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    index_copy index_fill masked_scatter _foreach_clone _foreach_copy _foreach_zero
"""
_DECIDES = """
    maximum minimum fmax fmin clamp relu threshold hardtanh hardtanh_backward leaky_relu eq ne lt le
    gt ge isnan isinf signbit logical_and logical_or logical_xor logical_not any all argmax argmin
    cummax cummin max_pool2d_with_indices max_pool3d_with_indices abs neg sign sgn positive
    conj_physical copysign ceil floor trunc round bitwise_not bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ nextafter
"""
_ROUNDS_ONE_WAY = """
    mul div true_divide reciprocal _foreach_mul _foreach_neg
    convert_element_type view_of iota
"""
ALWAYS = frozenset((_VIEWS + _MOVES + _DECIDES + _ROUNDS_ONE_WAY).split())
"""Names of operators that are here whatever their arguments."""


def _without_scale(ctx: Lowering, given: Given) -> bool:
    """a + alpha * b: eager multiplies and adds in one rounding."""
    args, kwargs = given
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    return _makes_integers(ctx, given) or (isinstance(alpha, (int, float)) and alpha == 1)


def _makes_integers(ctx: Lowering, given: Given) -> bool:
    """Sums and products of integers are the same in any order."""
    values = (*given[0], *given[1].values())
    val = ctx.node.meta.get("val")
    results = val if isinstance(val, (tuple, list)) else (val,)
    floats = any(isinstance(x, View) and x.dtype.kind not in "iub" for x in values)
    return not floats and all(
        not isinstance(r, torch.Tensor) or not (r.is_floating_point() or r.is_complex())
        for r in results
    )


def _divides_integers(ctx: Lowering, given: Given) -> bool:
    """What is divided by 0 raises an error on a CPU, and is anything on a GPU."""
    return ctx.facts().is_host and _makes_integers(ctx, given)


def _not_by_mkl(ctx: Lowering, given: Given) -> bool:
    """Eager's square roots on a CPU are a library's, which does not round the nearest way; those of
    16 bits are right all the same."""
    wide = ctx.out_dtype().nbytes > 2
    return not (ctx.facts().is_host and wide)


def _replaces(ctx: Lowering, given: Given) -> bool:
    """Whether elements are put, not added, to where they go."""
    args, kwargs = given
    return not kwargs.get("accumulate", args[3] if len(args) > 3 else False)


_WHERE: dict[str, Callable[[Lowering, Given], bool]] = {
    **dict.fromkeys(("add", "sub", "_foreach_add", "_foreach_sub"), _without_scale),
    **dict.fromkeys(
        (
            "sum", "prod", "cumsum", "cumprod", "arange", "amax", "amin", "max", "min",
            "scatter_add", "index_add",
        ),
        _makes_integers,
    ),
    **dict.fromkeys(("floor_divide", "remainder", "fmod"), _divides_integers),
    **dict.fromkeys(("sqrt", "_foreach_sqrt"), _not_by_mkl),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _replaces),
}  # fmt: skip
"""Those for which it depends on the call."""


def is_exact(
    ctx: Lowering, op: OpOverload, args: Sequence[Value], kwargs: dict[str, Value]
) -> bool:
    """Whether the rule of op makes a kernel that has eager's bits."""
    name = _name(op.namespace, op._schema.name.partition("::")[2], op._overloadname)
    asks = _WHERE.get(name)
    return name in ALWAYS if asks is None else asks(ctx, (args, kwargs))


def _name(namespace: str, name: str, overload: str) -> str:
    """The name in the tables, "" of an operator that is in none."""
    if name == "div" and overload.endswith("_mode"):
        return "floor_divide"
    if overload == "decimals":  # a product, a rounding and a quotient
        return ""
    return name if namespace in ("aten", "prims") else ""


def other_bits(origins: Iterable[str], joins: bool) -> list[str]:
    """Operators of a kernel that may give it other bits than eager's, by name; [] where it has
    eager's by construction. origins: where it comes from, such as "model.py:3 aten.exp.default".
    joins: a product and a sum in it may be rounded once."""
    parts = [o.split()[-1].split(".") for o in origins]
    names = [_name(p[0], p[1], p[2] if len(p) > 2 else "") or p[-1] for p in parts if len(p) > 1]
    found = [n for n in names if n not in ALWAYS and n not in ("add", "sub")]
    if joins and "mul" in names and {"add", "sub"} & {*names}:
        found.append("a product and a sum, rounded once")
    return list(dict.fromkeys(found))
