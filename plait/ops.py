"""Operators written with Triton kernels, launched from C++ (triton_launch/ops, whose README.md says
what each does).

Importing this module loads their library, which registers `torch.ops.plait.*`; the public ones are
functions here, too. plait's compiler does not call them: it takes each apart into the ATen
operators that its composition is of, which fuse with what is around them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import triton_launch
from plait import compat

KERNELS = triton_launch.OPERATORS
"""The file of the kernels, for packs."""

_LIBRARY = Path(__file__).parent / "lib" / "libplait_ops.so"
_PRIMITIVES = (
    "add", "softmax", "rotary", "_softmax_backward", "_rms_norm", "_rms_norm_backward",
    "_cross_entropy", "_cross_entropy_backward", "_bmm",
)  # fmt: skip

_torch_ops: Any = torch.ops
_torch_ops.load_library(_LIBRARY)
_ops = _torch_ops.plait
_ops._use_python(sys.executable)

for _name in _PRIMITIVES:
    _op = getattr(_ops, _name).default
    compat.decompositions.DECOMPOSITIONS[_op] = partial(
        _op._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd
    )

add, softmax, rms_norm, add_rms_norm = _ops.add, _ops.softmax, _ops.rms_norm, _ops.add_rms_norm
rotary, cross_entropy, matmul = _ops.rotary, _ops.cross_entropy, _ops.matmul


def use_pack(path: str | Path) -> None:
    """Kernels come from this pack (`python -m plait.tools.pack`) from now on, in the whole
    process."""
    _ops._use_pack(str(path))


def use_python(python: str = sys.executable) -> None:
    """Kernels are compiled, and cached, by this Python from now on: the default, with the Python
    that runs."""
    _ops._use_python(python)


def use_tiles(how: Literal["tune", "first", "error"]) -> None:
    """What happens to a product of a size that was not met before: its tiles are timed, and the
    choice kept on disk (the default); the first ones are taken; or it is an error. For all kernels
    with @triton.autotune in the process."""
    _ops._use_tiles(how)


def signatures() -> list[str]:
    """The kernels launched so far in this process, as `python -m plait.tools.pack` takes them."""
    found: list[str] = _ops._signatures()
    return found
