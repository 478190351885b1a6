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
        last = _raise_after(code[start : start + _LONGEST])
        if last is not None and not _catches(frame.f_code, code, last.offset):
            return truth != turned
    return None


def _raise_after(code: Sequence[dis.Instruction]) -> dis.Instruction | None:
    """The `raise` that instructions lead straight to."""
    for instruction in code:
        if instruction.opname == "RAISE_VARARGS":
            return instruction
        if instruction.opname.startswith(_ELSEWHERE):
            return None
    return None


def _catches(function: Any, code: Sequence[dis.Instruction], offset: int) -> bool:
    """Whether a function looks at what it raises there: `with` alone hands it on."""
    known: Any = dis.Bytecode(function)
    handlers = {e.target for e in known.exception_entries if e.start <= offset < e.end}
    names = [i.opname for k, i in enumerate(code) if k and code[k - 1].offset in handlers]
    return any(name != "WITH_EXCEPT_START" for name in names)
