"""Calls of users' Triton kernels while a program is traced without Dynamo.

PyTorch's tracing by the dispatcher sees only kernels that are wrapped (`wrap_triton`). Here
`kernel[grid](...)` on the tensors of a trace is such a call, tensor descriptors included, which
PyTorch leaves to Dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.node import base_types

from plait.compat.shared import Shared
from plait.compat.user_kernels import own_analysis


def _get(kernel: Any, grid: Any) -> Any:
    """kernel[grid] of a trace."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [getattr(x, "base", x) for x in pytree.tree_leaves((args, kwargs))]
        traced = any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in given)
        wrapped: Any = torch.library.wrap_triton(kernel) if traced else kernel
        if wrapped is kernel:  # its tensors are there, or Triton's interpreter runs it
            return _theirs[0](kernel, grid)(*args, **kwargs)
        return _tracer().call_triton_kernel(wrapped[grid], args, kwargs, None)

    return call


@cache
def _tracer() -> Any:
    from torch._higher_order_ops import triton_kernel_wrap as home

    class Tracer(home.TracingTritonHOPifier):
        """What PyTorch makes of a call, with tensor descriptors."""

        def call_HOP(self, variable: Any, grids: Any, combined_args: Any, tx: Any) -> None:
            described: Any = {}
            given = {}
            for k, x in combined_args.items():
                if type(x).__name__ == "TensorDescriptor":
                    if (tuple(x.shape), tuple(x.strides)) != (x.base.shape, x.base.stride()):
                        self.raise_unsupported(f"{k}, a descriptor of part of a tensor")
                    described[k] = ("stable", (list(x.block_shape),))
                    x = x.base
                given[k] = x
            graphable = {
                k: x
                for k, x in given.items()
                if isinstance(x, base_types) and not isinstance(x, Enum)
            }
            others = {k: x for k, x in given.items() if k not in graphable}
            home.triton_kernel_wrapper_mutation(
                kernel_idx=variable.kernel_idx,
                constant_args_idx=home.kernel_side_table.add_constant_args(others),
                grid=grids, tma_descriptor_metadata=described, kwargs=graphable,
            )  # fmt: skip

    return Tracer()


_theirs: list[Any] = []
"""How Triton gives a kernel a grid, once that was replaced."""


def _change() -> None:
    if (jit := sys.modules.get("triton.runtime.jit")) is not None:
        if not _theirs:
            _theirs.append(jit.KernelInterface.__getitem__)
        jit.KernelInterface.__getitem__ = _get


def _undo() -> None:
    if _theirs:
        home: Any = sys.modules["triton.runtime.jit"]
        home.KernelInterface.__getitem__ = _theirs[0]


_traced = Shared(_change, _undo)


@contextmanager
def kernels_traced() -> Iterator[None]:
    """Inside, a kernel that is given tensors of a trace is part of the trace, and PyTorch asks us
    what it writes."""
    with _traced, own_analysis():
        yield
