"""What the user is told of an error of tracing: what eager raises for the same call, or the line of
the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plait import errors
from plait.capture.flat_module import name_of
from plait.capture.module_state import with_state
from plait.compat.questions import wants_values
from plait.errors import InputError, PlaitError, Unsupported
from plait.graph.refuse import CLONE, SHARED, answer


def tell(
    error: Exception,
    module: torch.nn.Module,
    who: str,
    eager: tuple[Mapping[str, torch.Tensor], tuple[Any, ...], Mapping[str, Any]] | None,
) -> None:
    """Raises what says more than an error of tracing, if there is something; else notes the user's
    line. eager: state, args and kwargs, where eager can be asked what it raises."""
    line = users_line(error)
    if isinstance(error, InputError):
        what = f"{who} of {name_of(module)}, which calls what plait.compile returned"
        hint = "call the function itself: its __wrapped__"
        raise Unsupported(what, where=line, hint=hint) from error
    if isinstance(error, PlaitError):
        return
    if wants_values(error):
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{who} cannot trace {name_of(module)}: {first_line}"
        hint = 'torch.compile(fn, backend="plait"), which can break graphs'
        raise Unsupported(what, where=line, hint=hint) from error
    if "unhashable type: non-nested SymInt" in str(error):  # Dynamo looks up a stride in a table
        what = f"{who} of {name_of(module)}, which gives control flow a tensor of size 1"
        hint = "a clone() of what is given, or Dim.STATIC for its sizes: its stride would vary"
        raise Unsupported(what, where=line, hint=hint) from error
    if "internal overlap" in str(error):  # of a tensor that a view of it is written through
        raise Unsupported(SHARED, where=line, hint=CLONE) from error
    found = _raised_by_eager(module, *eager) if eager is not None else None
    note = f"raised while {who} traced {name_of(module)}" + (f", at {line}" if line else "")
    if found is None:
        error.add_note(note)
        return
    found.add_note(note)
    try:
        raise found from error
    finally:
        del found  # its traceback holds this frame, with all tensors of the call


def _raised_by_eager(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Exception | None:
    """What eager raises for copies of the arguments. Asked where tracing raised: the class is
    another one there for many a mistake."""

    def copy(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    with with_state(module, state, [copy(x) for x in state.values()]):
        return answer(module, args, kwargs, copy, torch.device("cpu"))


def users_line(error: Exception) -> str:
    """file:line of the innermost frame that is neither torch's nor plait's, "" if there is none."""
    ours = tuple(f"{Path(p).parent}/" for p in (torch.__file__, errors.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((*ours, "<"))]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
