"""Conditions on values that a traced function asks for only to raise where they do not hold:
`assert (x > 0).all()`, `if torch.any(variance < 0): raise ValueError(...)`.

Tracing has no values; the code says what follows. Where one of the two answers leads straight to
`raise`, the other one is given, and the program looks at the condition when it runs.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

_LONGEST = 80
"""The most instructions on the way to a `raise`."""
_ELSEWHERE = ("POP_JUMP", "JUMP", "RETURN", "FOR_ITER", "STORE", "YIELD", "SEND")
_own: Any = FunctionalTensor.__bool__


def truth(x: torch.Tensor) -> bool:
    """`bool(x)` of a traced tensor."""
    frame = sys._getframe(1)
    wrong = _raises_for(frame) if x.numel() == 1 else None
    if wrong is None:
        return _own(x)  # type: ignore[no-any-return]
    holds = x == 0 if wrong else x != 0
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    says = f"a condition does not hold that is asked for at {where}"
    torch._assert_async(holds.reshape(()), says)
    return not wrong


def _raises_for(frame: FrameType) -> bool | None:
    """The truth of what a frame asks for after which it does nothing but raise, if there is one."""
    code = list(dis.get_instructions(frame.f_code))
    at = next((k for k, i in enumerate(code) if i.offset == frame.f_lasti), len(code))
    turned = False
    while at < len(code) and code[at].opname in ("TO_BOOL", "UNARY_NOT"):
        turned ^= code[at].opname == "UNARY_NOT"
        at += 1
    name = code[at].opname if at < len(code) else ""
    if not name.startswith("POP_JUMP") or not name.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_for = name.endswith("TRUE")
    target = next(k for k, i in enumerate(code) if i.offset == code[at].argval)
    for start, truth in ((at + 1, not jumps_for), (target, jumps_for)):
        if _only_raises(code[start : start + _LONGEST]):
            return truth != turned
    return None


def _only_raises(code: Sequence[dis.Instruction]) -> bool:
    for instruction in code:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.opname.startswith(_ELSEWHERE):
            return False
    return False
