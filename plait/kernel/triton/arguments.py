"""Arguments of a template's function, as text."""

from __future__ import annotations

from collections.abc import Sequence

from plait.ir.expr import Size

_LONG = 1 << 23  # strides from which on 256 of them have no 32 bits


def size_text(e: Size, sizes: list[Size], type_: str = "tl.int64") -> str:
    """A size, or a parameter that is it. sizes: what the parameters are; grows."""
    if isinstance(e, int):
        return str(e) if abs(e) < _LONG else f"tl.full((), {e}, {type_})"
    if e not in sizes:
        sizes.append(e)
    text = f"s{sizes.index(e)}.to({type_})"
    return f"tl.multiple_of({text}, 16)" if e % 16 == 0 else text


def tuple_text(texts: Sequence[str]) -> str:
    """A tuple."""
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
