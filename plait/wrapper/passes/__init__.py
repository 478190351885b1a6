"""Passes over wrapper programs, each a file and a pure function WrapperProgram -> WrapperProgram,
in order as data.

No pass may drop an assert, a launch or a call: `run_passes` checks that, and the program, after
each. All sizes may be symbolic. Decided before there are instructions is which buffer takes over
the memory of another and where each lies in the arena (`schedule/memory.py`, which has to look into
kernels; `wrapper/build.py` makes Reuse, Place and Arena of it). Passes that need more than the
program run beside these where they are wanted: `wrapper/checks.py`, `wrapper/watch.py` and
`wrapper/streams.py` before them, `wrapper/partition.py` after them.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.wrapper.instructions import WrapperProgram
from plait.wrapper.passes.drop_dead import drop_dead
from plait.wrapper.passes.find_barriers import find_barriers
from plait.wrapper.passes.merge_views import merge_views
from plait.wrapper.passes.place_frees import place_frees
from plait.wrapper.passes.share_sizes import share_sizes
from plait.wrapper.verify import verify, verify_kept

Pass = Callable[[WrapperProgram], WrapperProgram]
Show = Callable[[str, WrapperProgram], None]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("merge views", merge_views),
    ("drop dead", drop_dead),  # after merging: a view's view may have lost its only use
    ("find barriers", find_barriers),
    ("share sizes", share_sizes),  # after all that compare sizes
    ("place frees", place_frees),  # only now are the last uses known
)


def run_passes(
    program: WrapperProgram, check: bool = False, show: Show | None = None
) -> WrapperProgram:
    """The program after all passes.

    check: verify before the first and after each, and that none dropped an effect. show: called
    with each result.
    """
    if check:
        verify(program)
    for name, step in PASSES:
        now = step(program)
        if check:
            verify(now, after=name)
            verify_kept(program, now, after=name)
        if show is not None:
            show(name, now)
        program = now
    return program
