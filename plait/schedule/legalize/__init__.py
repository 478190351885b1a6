"""From a kernel of the plan to the one that targets write: a pass a file.

Each pass takes and gives frozen data, and stands beside a check of what is legal after it.
"""

from __future__ import annotations

from plait.errors import InternalError
from plait.schedule.legalize.expand_reductions import expand_reductions, faults_of_reductions
from plait.schedule.legalize.linear import LinearKernel
from plait.schedule.legalize.linearize import faults_of_offsets, linearize
from plait.schedule.legalize.merge_axes import drop_single_axes, faults_of_axes, merge_axes
from plait.schedule.plan import Kernel


def legalize(kernel: Kernel, verifies: bool = False) -> LinearKernel:
    """The linear form of a kernel, checked on request."""
    linear = linearize(kernel)
    linear = expand_reductions(linear)
    linear = drop_single_axes(linear)  # before merging, which asks for neighbours
    linear = merge_axes(linear)
    if verifies:
        verify_linear(linear)
    return linear


def verify_linear(linear: LinearKernel) -> None:
    """Raises InternalError unless a kernel obeys the rule of every pass."""
    for check in (faults_of_offsets, faults_of_reductions, faults_of_axes):
        if faults := check(linear):
            raise InternalError(f"a kernel in linear form {faults[0]}")
