"""The table of maths functions that a kernel library receives: names, in the order of
`plait_init`'s pointers.

A kernel library links to nothing. After dlopen its `plait_init(void* const* table)` is called once;
table[k] is the address of NAMES[k]. Vector functions are the SLEEF ones that libtorch_cpu exports
(AVX-512 and AVX2 only), scalar ones are libm's; both are found through a handle of libtorch_cpu, of
which libm is a dependency. An entry that cannot be found may be null: a library uses only the
functions of its own instruction set.
"""

from __future__ import annotations

# op of the op table -> accuracy suffix of its SLEEF function. libm calls them by the same name.
SLEEF: dict[str, str] = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p"), "_u10"),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan"), "_u10"),
    **dict.fromkeys(("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"), "_u10"),
    "erf": "_u10",
    "erfc": "_u15",
    "lgamma": "_u10",
    "pow": "_u10",
    "atan2": "_u10",
    "hypot": "_u05",
    "fmod": "",
    "nextafter": "",
}


def scalar_name(op: str, dtype: str) -> str:
    """libm's name. dtype: 'f32' or 'f64'."""
    return op + "f" if dtype == "f32" else op


def vector_name(op: str, dtype: str, isa: str) -> str:
    """SLEEF's name for one full register. isa: 'avx512' or 'avx2'."""
    letter, lanes = ("f", 16) if dtype == "f32" else ("d", 8)
    suffix = SLEEF[op]
    if isa == "avx512":
        return f"Sleef_{op}{letter}{lanes}{suffix}"
    return f"Sleef_{op}{letter}{lanes // 2}{suffix or '_'}avx2"


NAMES: tuple[str, ...] = tuple(
    name
    for op in SLEEF
    for dtype in ("f32", "f64")
    for name in (
        scalar_name(op, dtype),
        vector_name(op, dtype, "avx512"),
        vector_name(op, dtype, "avx2"),
    )
)
INDEX: dict[str, int] = {name: k for k, name in enumerate(NAMES)}
