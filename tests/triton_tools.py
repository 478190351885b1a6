"""Runs Triton kernels without a GPU: through Triton's interpreter on CPU tensors.

The interpreter has no libdevice: its functions are numpy's and scipy-free torch's here. Set
TRITON_INTERPRET=1 before Triton is imported to use `Runner`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from plait.ir.calls import unpack_grid
from plait.ir.expr import evaluate
from plait.kernel.triton.dialects import GPUS, NVIDIA
from plait.kernel.triton.target import emit_kernel
from plait.runtime.cubin import Gpu
from plait.runtime.triton_worker import load_module
from plait.schedule.plan import Kernel
from tests.kernel_tools import as_tensor


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
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin",
            "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
            "lgamma", "pow", "atan2", "fmod", "copysign", "nextafter", "hypot", "trunc", "rsqrt",
            "nearbyint", "sqrt",
        )
    }
)  # fmt: skip


def _to_code(kind: torch.dtype) -> Callable[[core.tensor], core.tensor]:
    """Makes codes of a float of 8 bits: infinity is the largest number there is."""

    def call(x: core.tensor) -> core.tensor:
        numbers = torch.from_numpy(np.ascontiguousarray(x.handle.data))
        codes = numbers.to(kind).view(torch.uint8)
        most = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}[kind]
        beyond = numbers.abs() > torch.finfo(kind).max  # in some versions of torch, NaN
        codes = torch.where(beyond, most + (numbers < 0) * 0x80, codes)
        handle = TensorHandle(codes.to(torch.uint8).numpy(), core.uint8)
        return core.tensor(handle, _like(x, core.uint8))

    return call


def _nearest(kind: torch.dtype, of: core.dtype) -> Callable[[core.tensor], core.tensor]:
    """Rounds to an integer, which is clamped; NaN is 0."""

    def call(x: core.tensor) -> core.tensor:
        numbers = torch.from_numpy(np.ascontiguousarray(x.handle.data)).double()
        limits = torch.iinfo(kind)
        whole = numbers.round().nan_to_num(0.0).clamp(limits.min, limits.max).to(kind)
        return core.tensor(TensorHandle(whole.numpy(), of), _like(x, of))

    return call


def _of_code(kind: torch.dtype) -> Callable[[core.tensor], core.tensor]:
    def call(x: core.tensor) -> core.tensor:
        numbers = torch.from_numpy(np.ascontiguousarray(x.handle.data)).view(kind).float()
        return core.tensor(TensorHandle(numbers.numpy(), core.float32), _like(x, core.float32))

    return call


def _like(x: core.tensor, kind: core.dtype) -> core.dtype:
    return core.block_type(kind, x.type.shape) if x.type.is_block() else kind


INSTRUCTIONS = {
    "p_ex2": lambda x: tl.exp2(x),
    "p_rcp": lambda x: 1.0 / x,
    "p_low_half": lambda x: x.to(tl.int16),
    "p_as_bf16": lambda x: x.to(tl.bfloat16).to(tl.float32),
    "p_tf32": lambda x: (
        ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    ),
    **{
        f"p_{name}_{kind}": _to_code(dtype) for name in ("one", "four")
        for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
    },
    "p_nearest": _nearest(torch.int32, core.int32), "p_four_i8": _nearest(torch.int8, core.int8),
    "p_four_u8": _nearest(torch.uint8, core.uint8),
    "p_number_of_e4m3": _of_code(torch.float8_e4m3fn),
    "p_number_of_e5m2": _of_code(torch.float8_e5m2),
}  # fmt: skip
"""Instructions of NVIDIA's, which the interpreter has not."""


def _patch_index() -> None:
    """Triton 3.6's interpreter makes every scalar an array of one element, which numpy 2.4 no
    longer turns into an int: a loop over a range with a size argument would fail."""
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


def _dot(
    self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *how: object
) -> TensorHandle:
    """A product, of bfloat16 too: the interpreter multiplies its bits."""
    wide = [_cast(self, x, core.float32) if x.dtype.scalar == core.bfloat16 else x for x in (a, b)]
    return TensorHandle(
        np.matmul(wide[0].data, wide[1].data, dtype=d.data.dtype) + d.data, d.dtype.scalar
    )


def _all_ones(self: object, kind: core.dtype) -> TensorHandle:
    """-1 in any integer type; numpy 2 refuses it for unsigned ones."""
    return TensorHandle(
        np.full(1, -1, np.int64).astype(interpreter._get_np_dtype(kind)), kind.scalar
    )


def _bf16(self: object, value: float) -> TensorHandle:
    """A constant; the interpreter has none of this type."""
    return TensorHandle(
        torch.tensor([value]).to(torch.bfloat16).view(torch.uint16).numpy(), core.bfloat16
    )


def _splat(self: object, block: core.block_type, arg: TensorHandle) -> TensorHandle:
    """A scalar as a block. The handle of a comparison has the type of what was compared, its data
    that of a bool."""
    dtype = arg.data.dtype if arg.data.dtype == np.bool_ else interpreter._get_np_dtype(arg.dtype)
    return TensorHandle(np.full(block.shape, arg.data.reshape(()), dtype), arg.dtype.scalar)


def _fma(self: object, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Rounds once, as the device does: float64 holds the product of two numbers in float32."""
    kind = z.data.dtype
    wide = np.float64 if kind == np.float32 else kind
    made = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
    return TensorHandle(made.astype(kind), z.dtype.scalar)


def _assert(self: object, condition: TensorHandle, message: str) -> None:
    assert condition.data.all(), message


_patch_index()
interpreter.InterpreterBuilder.create_assert = _assert
interpreter.InterpreterBuilder.get_bf16 = _bf16
interpreter.InterpreterBuilder.create_splat = _splat
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
    debug=True, sanitize_overflow=False
)
interpreter.InterpreterBuilder.cast_impl = _cast
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_fma = _fma
interpreter.InterpreterBuilder.get_all_ones_value = _all_ones
# One kernel runs after the other.
tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None


class Runner:
    """Kernels run by Triton's interpreter, with the interface of kernel_tools.Loaded."""

    def __init__(self, kernels: list[Kernel], folder: Path, gpu: Gpu = GPUS["sm_80"]) -> None:
        self.folder = folder
        self.made = {k.name: emit_kernel(k, k.name, gpu=gpu) for k in kernels}

    def __call__(
        self,
        kernel: Kernel,
        arrays: dict[str, np.ndarray],
        sizes: dict[str, int] | None = None,
        threads: int = 1,
    ) -> int:
        made = self.made[kernel.name]
        function = interpreted(made.name, made.text, self.folder)
        args = [as_tensor(arrays[b.name], b.dtype) for b in kernel.args]
        grid = evaluate(made.grid, sizes or {})
        return launch(function, args, [(sizes or {})[str(s)] for s in kernel.sizes], grid)


def interpreted(name: str, text: str, folder: Path) -> Callable[..., None]:
    """The kernel of a module, with a libdevice."""
    module = load_module(name, text, folder)
    module.libdevice = LIBDEVICE  # type: ignore[attr-defined]
    # Loops count in Python's integers here; a constant cannot be what these are divided by.
    core.constexpr.__rmod__ = lambda c, n: core.constexpr(n % c.value)
    for helper, body in INSTRUCTIONS.items() if NVIDIA.library in text else ():
        if hasattr(module, helper):
            setattr(module, helper, body)
    function: Callable[..., None] = getattr(module, name)
    return function


def launch(function: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int], grid: int) -> int:
    """Runs all programs of a kernel. Returns 1 where a run-time check failed, else 0.

    Raises NotImplementedError for atomics of 16-bit floats, which the interpreter has not."""
    return int(grid and failed(lambda: function[unpack_grid(grid)](*tensors, *sizes)))


def failed(run: Callable[[], object]) -> bool:
    """Runs an interpreted kernel: whether a run-time check failed. Raises NotImplementedError as
    `launch` does."""
    try:
        run()
    except interpreter.InterpreterError as error:
        if isinstance(error.__cause__, AssertionError):
            return True
        if str(error.__cause__) == "Unsupported data type":
            raise NotImplementedError("an atomic of a 16-bit float") from error
        raise
    return False
