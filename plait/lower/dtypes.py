"""The border between torch's dtypes and the IR's."""

from __future__ import annotations

from functools import cache

import torch

from plait.devices import facts_of
from plait.ir import dtypes as ir
from plait.ir.dtypes import DType

FROM_TORCH: dict[torch.dtype, DType] = {
    torch.bool: ir.b1,
    torch.uint8: ir.u8,
    torch.uint16: ir.u16,
    torch.uint32: ir.u32,
    torch.uint64: ir.u64,
    torch.int8: ir.i8,
    torch.int16: ir.i16,
    torch.int32: ir.i32,
    torch.int64: ir.i64,
    torch.float16: ir.f16,
    torch.bfloat16: ir.bf16,
    torch.float32: ir.f32,
    torch.float64: ir.f64,
    torch.complex32: ir.c32,
    torch.complex64: ir.c64,
    torch.complex128: ir.c128,
    torch.float8_e4m3fn: ir.f8e4m3fn,
    torch.float8_e5m2: ir.f8e5m2,
    torch.float8_e4m3fnuz: ir.f8e4m3fnuz,
    torch.float8_e5m2fnuz: ir.f8e5m2fnuz,
    torch.float8_e8m0fnu: ir.f8e8m0fnu,
}
TO_TORCH: dict[DType, torch.dtype] = {v: k for k, v in FROM_TORCH.items()}


@cache
def device_name(device: torch.device) -> str:
    """'cpu', or a device with its number: 'cuda:0'."""
    numbered = not facts_of(device).is_host and device.type != "meta"
    return f"{device.type}:{device.index or 0}" if numbered else device.type


def from_torch(dtype: torch.dtype) -> DType:
    """The IR's name of a torch dtype; `opaque` for those that only extern calls understand
    (quantised ones...)."""
    return FROM_TORCH.get(dtype, ir.opaque)


def compute_dtype(dtype: DType) -> DType:
    """The dtype that arithmetic on `dtype` happens in: f32 for f16 and bf16, itself otherwise
    (ATen's opmath)."""
    return ir.f32 if dtype in (ir.f16, ir.bf16) else dtype
