"""Runs Triton kernels without a GPU: through Triton's interpreter on CPU tensors, or compiled to a cubin and not run.

The interpreter has no libdevice: its functions are numpy's and scipy-free torch's here. Set TRITON_INTERPRET=1 before
Triton is imported to use `Runner`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from plait.ir.dtypes import DType
from plait.ir.sizes import evaluate
from plait.kernel.triton import emit_kernel
from plait.runtime.triton_worker import load_module
from plait.schedule.plan import Kernel

TORCH = {
    "b1": torch.bool, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip


def _by_torch(fn: Callable[..., torch.Tensor]) -> Callable[..., core.tensor]:
    """A libdevice function on the interpreter's tensors."""

    def call(*args: core.tensor) -> core.tensor:
        data = np.broadcast_arrays(*(a.handle.data for a in args))
        shaped = max((a for a in args), key=lambda a: a.handle.data.size)
        out = fn(*(torch.from_numpy(np.ascontiguousarray(d)) for d in data)).numpy()
        return core.tensor(TensorHandle(out, shaped.handle.dtype), shaped.type)

    return call


_SPECIAL = {
    "pow": torch.pow, "nearbyint": torch.round, "fmod": torch.fmod, "lgamma": torch.lgamma,
}  # fmt: skip
LIBDEVICE = types.SimpleNamespace(
    **{
        name: _by_torch(_SPECIAL.get(name) or getattr(torch, name))
        for name in (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
            "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "pow", "atan2", "fmod",
            "copysign", "nextafter", "hypot", "trunc", "rsqrt", "nearbyint", "sqrt",
        )
    }
)  # fmt: skip


def _patch_index() -> None:
    """Triton 3.6's interpreter makes every scalar an array of one element, which numpy 2.4 no longer turns into an
    int: a loop over a range with a size argument would fail."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


def _cast(self: object, src: TensorHandle, dst_type: core.dtype) -> TensorHandle:
    """Rounds to bfloat16 as the device does; the interpreter's own cast cuts the bits off."""
    old, new = src.dtype.scalar, dst_type.scalar
    if core.bfloat16 in (old, new) and old != new:
        if new == core.bfloat16:
            wide = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float32)
            bits = wide.to(torch.bfloat16).view(torch.uint16).numpy()
            return TensorHandle(bits, new)
        bits = torch.from_numpy(np.ascontiguousarray(src.data)).view(torch.bfloat16)
        return TensorHandle(bits.to(TORCH_OF[new]).numpy(), new)
    return TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), new)


TORCH_OF = {core.float32: torch.float32, core.float64: torch.float64, core.float16: torch.float16}


def _all_ones(self: object, kind: core.dtype) -> TensorHandle:
    """-1 in any integer type; numpy 2 refuses it for unsigned ones."""
    return TensorHandle(np.full(1, -1, np.int64).astype(interpreter._get_np_dtype(kind)), kind.scalar)


def _assert(self: object, condition: TensorHandle, message: str) -> None:
    assert condition.data.all(), message


_patch_index()
interpreter.InterpreterBuilder.create_assert = _assert
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.get_all_ones_value = _all_ones


def as_tensor(array: np.ndarray, dtype: DType) -> torch.Tensor:
    """A flat array as a tensor on the same memory, of the buffer's dtype."""
    return torch.from_numpy(array.reshape(-1)).view(TORCH[dtype.name])


class Runner:
    """Kernels run by Triton's interpreter or, with device='cuda', on a GPU, with the interface of
    kernel_tools.Loaded."""

    def __init__(self, kernels: list[Kernel], folder: Path, device: str = "cpu") -> None:
        self.folder, self.device = folder, device
        self.made = {k.name: emit_kernel(k, k.name) for k in kernels}

    def __call__(
        self, kernel: Kernel, arrays: dict[str, np.ndarray], sizes: dict[str, int] | None = None, threads: int = 1
    ) -> int:
        made = self.made[kernel.name]
        module = load_module(made.name, made.text, self.folder)
        if self.device == "cpu":
            module.libdevice = LIBDEVICE  # type: ignore[attr-defined]
        host = [as_tensor(arrays[b.name], b.dtype) for b in kernel.args]
        args = [t.to(self.device) for t in host]
        values = [(sizes or {})[str(s)] for s in kernel.sizes]
        grid = evaluate(made.grid, sizes or {})
        if not grid:
            return 0
        try:
            options = {} if self.device == "cpu" else {"num_warps": made.num_warps}
            getattr(module, made.name)[(grid,)](*args, *values, **options)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, AssertionError):
                return 1  # what a failed check is here
            raise
        for mine, theirs in zip(host, args, strict=True):
            if theirs is not mine:
                mine.copy_(theirs)
        return 0
