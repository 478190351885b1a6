"""All that is decided about the C++ of a kernel, before a line of it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from plait.errors import InternalError
from plait.kernel.cpu.choose_levels import Place, choose_levels, faults_of_levels
from plait.kernel.cpu.passes import plan_nest
from plait.kernel.cpu.share_work import Sharing, faults_of_sharing, share_work
from plait.kernel.cpu.vectorize import Vectors, faults_of_vectors, vectorize
from plait.schedule.legalize.linear import LinearKernel
from plait.schedule.plan import Kernel


@dataclass(frozen=True)
class BodyPlan:
    """The body of a kernel's function.

    vectors: how lanes reach memory.
    sharing: how threads share its points.
    places: where the statements of each pass stand, and last the stores after all passes."""

    kernel: Kernel
    vectors: Vectors
    sharing: Sharing
    places: tuple[Place, ...]


def plan_body(
    kernel: Kernel, linear: LinearKernel, lanes: int, verifies: bool, keep: bool = True
) -> BodyPlan:
    """Decides how a kernel runs. lanes, keep: as for `plan_nest`. verifies: the rule of each
    decision is checked."""
    nest = plan_nest(linear, lanes, kernel.sequential, keep)
    vectors = vectorize(nest)
    sharing = share_work(kernel, nest)
    plan = BodyPlan(kernel, vectors, sharing, choose_levels(vectors, sharing))
    if verifies:
        verify_body(plan)
    return plan


def verify_body(plan: BodyPlan) -> None:
    """Raises InternalError unless a plan obeys the rules of all that is decided."""
    vectors, sharing = plan.vectors, plan.sharing
    faults = (
        *faults_of_vectors(vectors),
        *faults_of_sharing(plan.kernel, vectors.nest, sharing),
        *faults_of_levels(vectors, sharing, plan.places),
    )
    if faults:
        raise InternalError(f"kernel {plan.kernel.name} {faults[0]}")
