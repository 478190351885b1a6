"""How many decisions a step may take: all, but where `Config.without` limits it, as "fuse:3" does.

A step takes the same decisions in the same order up to its limit. So the first one that makes a
number wrong is found by halves, and named: what a step is kept from first is a Refusal of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from plait.schedule.plan import Reason, Refusal

LIMITED = Reason("the option without keeps it from that")


@dataclass
class Limits:
    """most: by step. taken: decisions so far, of those steps. refusals: the first decision that
    each step was kept from, with the two buffers that it is about."""

    most: Mapping[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)

    def refuses(self, step: str, a: str, b: str) -> Reason | None:
        """A Reason if a step may not decide on a and b; else that is a decision taken."""
        if step not in self.most:
            return None
        if self.taken.get(step, 0) >= self.most[step]:
            self.refusals.setdefault(step, Refusal(a, b, LIMITED))
            return LIMITED
        self.taken[step] = self.taken.get(step, 0) + 1
        return None

    def first(self, step: str, pairs: Mapping[str, str]) -> dict[str, str]:
        """Those of the decisions that a step may take."""
        left = self.most[step] - self.taken.get(step, 0) if step in self.most else None
        return dict(islice(pairs.items(), left))

    def take(self, step: str, pairs: Mapping[str, str]) -> dict[str, str]:
        """The same, and they are taken."""
        return {a: b for a, b in pairs.items() if self.refuses(step, a, b) is None}
