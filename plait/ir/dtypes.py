"""Element types of the IR, independent of torch.

A DType has a short name that every stage, dump and kernel signature uses. The border to torch's own
dtypes is `plait/lower/dtypes.py`; nothing in this file imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. nbytes: size of one element in memory. kind: 'b' bool, 'i' int, 'u' uint,
    'f' float, 'c' complex, '8' float of 8 bits."""

    name: str
    nbytes: int
    kind: str

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    def __repr__(self) -> str:
        return self.name


b1 = DType("b1", 1, "b")
u8 = DType("u8", 1, "u")
u16 = DType("u16", 2, "u")
u32 = DType("u32", 4, "u")
u64 = DType("u64", 8, "u")
i8 = DType("i8", 1, "i")
i16 = DType("i16", 2, "i")
i32 = DType("i32", 4, "i")
i64 = DType("i64", 8, "i")
f16 = DType("f16", 2, "f")
bf16 = DType("bf16", 2, "f")
f32 = DType("f32", 4, "f")
f64 = DType("f64", 8, "f")
# Complex and other types cross the program in extern calls only; no loop touches them.
c32 = DType("c32", 4, "c")
c64 = DType("c64", 8, "c")
c128 = DType("c128", 16, "c")
# Loops see these as bytes, which rules take apart and put together: plait/lower/float8.py.
f8e4m3fn = DType("f8e4m3fn", 1, "8")
f8e5m2 = DType("f8e5m2", 1, "8")
f8e4m3fnuz = DType("f8e4m3fnuz", 1, "8")
f8e5m2fnuz = DType("f8e5m2fnuz", 1, "8")
f8e8m0fnu = DType("f8e8m0fnu", 1, "8")
opaque = DType("opaque", 1, "o")

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        b1, u8, u16, u32, u64, i8, i16, i32, i64, f16, bf16, f32, f64, c32, c64, c128,
        f8e4m3fn, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, f8e8m0fnu, opaque,
    )
}  # fmt: skip
LOOP_DTYPES: frozenset[DType] = frozenset(d for d in DTYPES.values() if d.kind in "biuf")
