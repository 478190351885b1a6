"""plait's operators as C++ launches them on the GPU that fake_gpu.cpp plays: run by
triton_launch/tests/test_ops_interpreted.py.

The Python that "compiles" describes functions as they are and makes stubs; what a stub was
specialized to lies in a file. A launch calls back into this process, which runs the function in
Triton's interpreter on the launch's pointers.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FOLDER = Path(os.environ["FAKE_GPU"])
gpu = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(FOLDER / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import plait.ops as ops  # noqa: E402
from plait.runtime.triton_worker import load_module  # noqa: E402
from tests.triton_tools import TensorHandle  # noqa: E402
from triton_launch.specialization import DType, Item, read_specialization  # noqa: E402
from triton_launch.tests import ops_cases  # noqa: E402

STUB = f"""\
#!/bin/sh
unset TRITON_INTERPRET
exec {sys.executable} -c '
import hashlib, pathlib
import triton_launch.worker as worker
from plait.runtime.cubin import Cubin

def words(item):
    if isinstance(item.type, tuple):
        return sum(map(words, item.type))
    if item.type.startswith("tensordesc"):
        return 2 + 4 * (1 + item.type.count(","))
    return int(item.type != "constexpr")

def compile_kernel(fn, capability, specialization, options):
    symbol = fn.__name__ + "_" + hashlib.sha256((specialization + options).encode()).hexdigest()[:8]
    pathlib.Path("{FOLDER}", symbol).write_text(fn.__name__ + " " + specialization)
    n = sum(map(words, worker.read_specialization(specialization))) + 2
    return Cubin(f"{{symbol}} {{n}} 0".encode(), symbol, 4, 1, 0, (0, 1), (0, 1), False, False)

worker.compile_kernel = compile_kernel
worker.main()'
"""

TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "u1": torch.bool,
    "u8": torch.uint8,
    **{f"i{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)},
}


@cache
def module() -> Any:
    return load_module("operators_interpreted", ops.KERNELS.read_text(), FOLDER)


@cache
def launched(symbol: str) -> tuple[Any, list[Item]]:
    """The function, and what it was specialized to."""
    name, _, specialization = (FOLDER / symbol).read_text().partition(" ")
    function = getattr(module(), name)
    return function.fn if hasattr(function, "configs") else function, read_specialization(
        specialization
    )


def memory_at(address: int, dtype: str) -> Tensor:
    """What lies behind the first element is the interpreter's to find."""
    memory = (
        (ctypes.c_byte * 16).from_address(address) if address else ctypes.create_string_buffer(16)
    )
    return torch.frombuffer(memory, dtype=TYPES[dtype], count=1)


def value_of(item: Item, words: Any) -> Any:
    if isinstance(item.type, tuple):
        return tuple(value_of(i, words) for i in item.type)
    if item.type == "constexpr":
        if isinstance(item.value, DType):
            long = {"u1": "int1", "u8": "uint8", **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)}}
            return tl.dtype(long.get(item.value.name, item.value.name))
        return item.value
    word = next(words)
    if item.type.startswith("*"):
        return memory_at(word, item.type[1:])
    if found := re.fullmatch(r"tensordesc<(\w+)\[(.*)]>", item.type):
        block = [int(n) for n in found[2].split(",")]
        shape, strides = ([next(words) for _ in block] for _ in range(2))
        padding = "nan" if next(words) & 1 else "zero"
        assert [next(words) & 0xFFFFFFFF for _ in block] + [
            next(words) for _ in block
        ] == shape + strides
        return TensorDescriptor(memory_at(word, found[1]), shape, strides, block, padding)
    raw = struct.pack("<Q", word)
    if item.type == "fp64":  # annotated: a tensor, which a float is not to the interpreter
        return tl.tensor(TensorHandle(np.array(struct.unpack("<d", raw)), tl.float64), tl.float64)
    return int.from_bytes(raw[: int(item.type[1:]) // 8], "little", signed=item.type[0] == "i")


LAUNCHES: list[str] = []
FAILED: list[Exception] = []


@ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_uint64),
)
def on_launch(symbol: bytes, x: int, y: int, z: int, words: Any) -> None:
    try:
        function, items = launched(symbol.decode())
        LAUNCHES.append(function.__name__)
        left = iter(words[k] for k in range(1 << 20))
        function[(x, y, z)](*(value_of(item, left) for item in items))
    except Exception as error:  # noqa: BLE001  (nothing may pass through C)
        FAILED.append(error)


gpu.fake_on_launch(on_launch)
stub = FOLDER / "python"
stub.write_text(STUB)
stub.chmod(0o755)
ops.use_python(str(stub))
ops.use_tiles("first")


def on_gpu(t: Any) -> Any:
    """A tensor of the GPU with the same values and strides, and if it wants one, with a
    gradient."""
    if not isinstance(t, Tensor):
        return t
    made: Tensor = torch.ops.fake_gpu.gpu(t.detach())
    return made.requires_grad_(t.requires_grad)


def gradients(
    outs: list[Tensor], wanted: list[Tensor], weights: list[Tensor]
) -> list[Tensor | None]:
    """What torch.autograd.grad gives, whose engine refuses a GPU that torch was not built for."""
    order: list[Any] = []

    def visit(node: Any) -> None:
        if node is not None and node not in order:
            for after, _ in node.next_functions:
                visit(after)
            order.append(node)

    coming: dict[tuple[Any, int], Tensor] = {}
    for out, weight in zip(outs, weights, strict=True):
        visit(out.grad_fn)
        coming[out.grad_fn, out.output_nr] = weight
    found: dict[int, Tensor] = {}
    for node in reversed(order):
        if hasattr(node, "variable"):
            if (node, 0) in coming:
                x = node.variable
                found[id(x)] = coming[node, 0].sum_to_size(x.shape).to(x.dtype)
            continue
        grads = [coming.get((node, k)) for k in range(len(node._input_metadata))]
        with torch.no_grad():
            made = node(*grads)
        for g, (after, k) in zip(
            made if isinstance(made, tuple) else (made,), node.next_functions, strict=True
        ):
            if after is not None and g is not None:
                if not hasattr(after, "variable"):
                    g = g.sum_to_size(after._input_metadata[k].shape).to(
                        after._input_metadata[k].dtype
                    )
                coming[after, k] = coming[after, k] + g if (after, k) in coming else g
    return [found.get(id(x)) for x in wanted]


@pytest.mark.parametrize("case", ops_cases.CASES[:: int(os.environ["EVERY"])], ids=str)
def test_as_on_the_cpu(case: ops_cases.Case) -> None:
    FAILED.clear()
    try:
        ops_cases.check(case, on_gpu, torch.ops.fake_gpu.host, gradients)
    finally:
        if FAILED:
            raise FAILED[0]
