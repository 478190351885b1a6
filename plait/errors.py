"""Every error that plait raises: three kinds, each saying what, where and what to try.

`UserError` is a mistake of the caller, `Unsupported` is something that plait cannot do,
`InternalError` is a bug of plait's own. A refusal in the middle of the compiler (a fusion that is
not legal) is a value, never an exception. What the compiler gets round is a `Fallback`, or a
warning by `warn_once`. This file imports nothing of plait; how errors pass through torch.compile
unwrapped is known to `compat`.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self


class PlaitError(Exception):
    """Base of all errors of plait.

    what: one sentence. where: the user's "file:line", or "" if no line is to blame. hint: what to
    try.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if hint:
            lines.append(f"  try: {hint}")
        super().__init__("\n".join(lines))

    @property
    def line(self) -> str:
        """The whole text in one line."""
        return "; ".join(line.strip() for line in str(self).splitlines() if line.strip())

    def placed(self, what: str, where: str) -> Self:
        """The same kind of error with another sentence and a place."""
        return type(self)(what, where=where, hint=self.hint)


class UserError(PlaitError):
    """The caller's mistake: a wrong option, a wrong input, a call that contradicts what was
    compiled."""


class InputError(UserError):
    """A compiled function was called with inputs that differ from those that it was compiled
    for."""


class OperandError(UserError):
    """Operands that eager refuses, too. Each one raised is also of the class that eager raises: see
    `refusal`."""


class _RuntimeOperandError(OperandError, RuntimeError): ...


class _NotImplementedOperandError(OperandError, NotImplementedError): ...


class _IndexOperandError(OperandError, IndexError): ...


class _TypeOperandError(OperandError, TypeError): ...


class _ValueOperandError(OperandError, ValueError): ...


_REFUSALS: dict[type[Exception], type[OperandError]] = {
    NotImplementedError: _NotImplementedOperandError,
    RuntimeError: _RuntimeOperandError,
    IndexError: _IndexOperandError,
    TypeError: _TypeOperandError,
    ValueError: _ValueOperandError,
}


def refusal(error: Exception) -> type[OperandError]:
    """The OperandError that is caught wherever eager's own error is."""
    return next(
        (mine for kind, mine in _REFUSALS.items() if isinstance(error, kind)), _RuntimeOperandError
    )


class Unsupported(PlaitError):
    """A correct program that plait cannot compile."""


class InexpressibleSize(Unsupported):
    """A size that plait has no expression for. symbols: the sizes of the inputs that it is made of,
    by name: were they numbers, it would be one."""

    def __init__(
        self, what: str, *, where: str = "", hint: str = "", symbols: tuple[str, ...] = ()
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.symbols = symbols

    def placed(self, what: str, where: str) -> Self:
        return type(self)(what, where=where, hint=self.hint, symbols=self.symbols)


class GradientError(Unsupported, RuntimeError):
    """A gradient that plait cannot take. A RuntimeError too: code that asks autograd expects
    those."""


class ToolchainError(Unsupported):
    """The machine's compiler is missing or refused a kernel."""


class RefusedKernel(ToolchainError):
    """The compiler's no to one kernel. kernel: its symbol."""

    kernel: str = ""


class InternalError(PlaitError):
    """A bug in plait. The message names the pass and the object that broke a rule."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(
            f"bug in plait: {what}",
            where=where,
            hint=hint or "report it with the folder that PLAIT_DEBUG_DIR=plait_debug writes",
        )


def raised_at(error: BaseException) -> str:
    """The line that raised it: "norm.py:31, in _rstd"."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}"


Rung = Literal["operators", "aten", "python", "specialise", "eager"]
"""The ladder below a kernel: an operator becomes others that have kernels; PyTorch's own operator
is called; an operator is called from Python; a size is taken for a number, with a guard; the whole
graph is run by eager."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """A step down the ladder that one graph took.

    what: the operator, size or graph. reason: why it got no better. where: the user's "file:line",
    or "".
    """

    rung: Rung
    what: str
    reason: str
    where: str = ""

    @property
    def line(self) -> str:
        """It in one line."""
        return f"{self.what}: {self.reason}" + (f" (at {self.where})" if self.where else "")


_PASSED_OVER = ("plait", "torch", "contextlib", "functools")
# What stands between the compiler and the user's line in a stack.


class CacheWarning(UserWarning):
    """A cache entry was damaged, or the cache folder cannot be used."""


@cache
def warn_once(text: str, category: type[Warning] = UserWarning) -> None:
    """A warning of one line, once a process and text, at the user's line that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "torch").partition(".")[0]
        in _PASSED_OVER  # AOTAutograd's code has no name
        or frame.f_code.co_filename.startswith("<eval_with_key>")  # what torch.fx made
    ):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")  # Python drops a warning of the module None
    warnings.warn_explicit(
        " ".join(text.split()), category, frame.f_code.co_filename, frame.f_lineno, module
    )
