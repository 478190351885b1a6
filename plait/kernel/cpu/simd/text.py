"""Words of the vector functions: types of lanes, and functions as C++ text.

vT is one register of T (see prelude).
"""

from __future__ import annotations

from plait.ir.dtypes import DTYPES
from plait.runtime.toolchain import Isa

NUMBERS = ("f32", "f64", "i32", "u32", "i64", "u64", "i16", "u16", "i8", "u8")
FLOATS = ("f32", "f64")


class Functions(dict[str, str]):
    """C++ functions by name."""

    def add(
        self, head: str, body: str, fast: str | None = None, shuffled: str | None = None
    ) -> None:
        """A function. fast: another body, of g++'s builtins. shuffled: another body, where there is
        __builtin_shufflevector."""
        text = _function(head, body)
        if shuffled is not None:
            test = "#if __has_builtin(__builtin_shufflevector)"
            text = f"{test}\n{_function(head, shuffled)}\n#else\n{text}\n#endif"
        if fast is not None:
            text = f"#ifdef __clang__\n{text}\n#else\n{_function(head, fast)}\n#endif"
        self[head.partition("(")[0].split()[-1]] = text


def _function(head: str, body: str) -> str:
    return f"static inline {head} {{ {body} }}"


def n_lanes(isa: Isa, t: str) -> int:
    return isa.lanes_of(DTYPES[t].nbytes)


def mask_of(t: str) -> str:
    return f"vi{8 * DTYPES[t].nbytes}"
