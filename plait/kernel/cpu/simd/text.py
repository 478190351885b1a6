"""Words of the vector functions: types of lanes, and functions as C++ text.

vT is one register of T (see prelude).
"""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.runtime.toolchain import Isa

NUMBERS = ("f32", "f64", "i32", "u32", "i64", "u64", "i16", "u16", "i8", "u8")


FLOATS = ("f32", "f64")


def fn(result: str, name: str, params: str, body: str) -> str:
    return f"static inline {result} {name}({params}) {{ {body} }}"


def n_lanes(isa: Isa, t: str) -> int:
    return isa.lanes_of(DTYPES[t].nbytes)


def mask_of(t: str) -> str:
    return f"vi{8 * DTYPES[t].nbytes}"


def either(gcc: str | None, plain: str) -> str:
    return plain if gcc is None else f"#ifdef __clang__\n{plain}\n#else\n{gcc}\n#endif"
