"""What is called as it stands, for no loop nest of ours would do as well: factorisations and
solvers (LAPACK), Fourier transforms, recurrent layers (oneDNN), bags of embeddings (parallel over
bags), sorting and searching, results whose size depends on values, and the order of streams.

These are calls by choice: `explain` does not count them as missing rules.
"""

from __future__ import annotations

from typing import Any

import torch

import plait.runtime.philox  # noqa: F401 - it defines plait::seed
from plait.ir.dtypes import LOOP_DTYPES
from plait.lower.core import RULES, Lowering, View, lower
from plait.lower.extern import call_extern, call_op

aten = torch.ops.aten

_LINEAR_ALGEBRA = (
    "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "cholesky",
    "cholesky_inverse", "cholesky_solve", "geqrf", "linalg_cholesky_ex", "linalg_eig",
    "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve",
    "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp",
    "linalg_qr", "linalg_solve_triangular", "ormqr", "triangular_solve",
)  # fmt: skip
_TRANSFORMS = ("_fft_c2c", "_fft_c2r", "_fft_r2c")
_RECURRENT = ("mkldnn_rnn_layer",)
_PRODUCTS = (
    aten.addbmm.default, aten._trilinear.default,
    aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype,
)  # fmt: skip
# plait reads their size off the result.
_DATA_DEPENDENT = (
    aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default,
    aten._unique2.default, aten.unique_dim.default, aten.nonzero_static.default,
    aten.repeat_interleave.Tensor, aten.bincount.default,
)  # fmt: skip
_SORTED = (
    aten.topk.default, aten.kthvalue.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.searchsorted.Tensor, aten.searchsorted.Scalar,
    aten.bucketize.Tensor, aten.bucketize.Scalar, aten.histc.default,
    aten._logcumsumexp.default, aten.logcumsumexp.default,
)  # fmt: skip
_BAGS = (
    "_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward",
    "_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward",
)  # fmt: skip


def by_library(ctx: Lowering, *args: Any, **kwargs: Any) -> Any:
    """A call of the operator as it stands, on operands with eager's strides: oneDNN's layers read
    memory as if it were row-major."""
    return call_extern(ctx, args, kwargs)


for _name in dir(torch.ops.streams):
    if isinstance(_packet := getattr(torch.ops.streams, _name), torch._ops.OpOverloadPacket):
        lower(_packet.default, any_dtype=True)(by_library)

for _name in (*_LINEAR_ALGEBRA, *_TRANSFORMS, *_RECURRENT, *_BAGS):
    _packet = getattr(aten, _name)
    lower(_packet.default if "default" in _packet.overloads() else _packet.X, any_dtype=True)(
        by_library
    )
lower(*_PRODUCTS, *_DATA_DEPENDENT, any_dtype=True)(by_library)
lower(*_SORTED)(by_library)
# The source of a `put` depends on all earlier hits; a seed is drawn from torch's generator.
lower(aten.put.default, torch.ops.plait.seed.default)(by_library)


@lower(aten._conj.default, any_dtype=True)
def _conjugate(ctx: Lowering, x: View) -> Any:
    """The conjugate in memory: nothing in a program has lazy bits, which views and kernels do not
    know. Of a view whose elements share memory it is a tensor whose elements do not."""
    made = torch.empty_like(ctx.out_meta())
    return call_op(ctx, aten.conj_physical.default, (x,), {}, made)


@lower(aten._neg_view.default, any_dtype=True)
def _negate(ctx: Lowering, x: View) -> Any:
    """The same of a lazily negated view."""
    if x.dtype in LOOP_DTYPES:
        return RULES[aten.neg.default](ctx, x)
    made = torch.empty_like(ctx.out_meta())
    return call_op(ctx, aten.neg.default, (x,), {}, made)
