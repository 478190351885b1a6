"""Hands a captured graph to the compiler. What escapes from it is an error of plait's own, whatever went wrong."""

from __future__ import annotations

import traceback
from pathlib import Path

from plait.compile import Program, compile_graph
from plait.config import Config
from plait.errors import InternalError, PlaitError
from plait.graph.captured import Captured


def compile_captured(captured: Captured, cfg: Config) -> Program:
    """`compile_graph`; an unexpected exception becomes the cause of an InternalError that names the graph."""
    try:
        return compile_graph(captured, cfg)
    except PlaitError:
        raise
    except Exception as error:
        # Dynamo drops the cause of what it passes on, so the place goes into the text.
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InternalError(
            f"compiling {captured.name} failed with {type(error).__name__}: {error} "
            f"({Path(last.filename).name}:{last.lineno}, in {last.name})"
        ) from error
