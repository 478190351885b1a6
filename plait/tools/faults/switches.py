"""The smallest set of passes, options and kernels without which a program is right, and the first
decision of such a pass that makes it wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config import Config
from plait.ir.calls import all_programs
from plait.pipelines import COUNTED, LEAVABLE
from plait.schedule.limits import LIMITED
from plait.schedule.plan import Plan, Refusal


@dataclass(frozen=True)
class Switch:
    """What the compiler may do without. changes: of the configuration."""

    name: str
    changes: Mapping[str, Any]


OPTIONS = (
    Switch("options cuda_graphs", {"cuda_graphs": False}),
    Switch("options autotune", {"autotune": False}),
    Switch("options memory_planning", {"memory_planning": False}),
    Switch("options small_matmul_flops", {"small_matmul_flops": 0}),
    Switch("vector instructions (isa)", {"isa": "portable"}),
    Switch("the C++ compiler's optimisations (opt_level)", {"opt_level": 0}),
)
KERNELS = Switch("kernels (a rule in plait/lower, or how they are written)", {"kernels": False})


def without(cfg: Config, switches: Sequence[Switch]) -> Config:
    """The configuration without these."""
    passes = [s.name for s in switches if not s.changes]
    changes = {k: v for s in switches for k, v in s.changes.items()}
    names = [*filter(None, cfg.without.split(",")), *passes]
    return replace(cfg, **changes, without=",".join(dict.fromkeys(names)))


NOTHING = "nothing, where it is tried once more (in another process, but for a whole module)"


def find_switches(cfg: Config, is_right: Callable[[Config], bool]) -> tuple[str, ...]:
    """The smallest set without which a program is right: of passes, else of passes and options,
    else kernels; () if it never is. It may be right as it is, where it is tried again."""
    if is_right(cfg):
        return (NOTHING,)
    passes = [Switch(name, {}) for name in LEAVABLE]
    other = "native" if cfg.wrapper == "python" else "python"
    target = Switch(f"the wrapper {cfg.wrapper}", {"wrapper": other})
    for switches in (passes, [*passes, *OPTIONS, target], [KERNELS]):
        if is_right(without(cfg, switches)):
            small = _smallest(switches, lambda some: is_right(without(cfg, some)))
            return tuple(s.name for s in small)
    return ()


DECISIONS = {
    "inline": "computing {} within {}",
    "fuse": "fusing {} with {}",
    "fuse horizontally": "running {} in one launch with {}",
    "write over inputs": "writing {} over the argument {}",
    "arena": "placing {} in the arena",
    "write in place": "writing {} over {}",
}
"""What a pass decides on two buffers, in words."""


@dataclass(frozen=True)
class Decision:
    """One that a pass takes on two buffers. plan: in which it is not taken."""

    step: str
    number: int
    pair: Refusal
    plan: Plan

    def text(self, name: Callable[[str, Plan], str]) -> str:
        """It in words. name: of what makes a buffer."""
        return DECISIONS[self.step].format(
            *(name(b, self.plan) for b in (self.pair.a, self.pair.b))
        )


def first_wrong_decision(
    cfg: Config,
    step: str,
    is_right: Callable[[Config], bool],
    plans: Callable[[Config], Sequence[Plan]],
) -> Decision | None:
    """The decision up to which a pass makes a program right and with which it does not, if the pass
    is one of those that count theirs. The program is right without the pass, and wrong with it.
    plans: of the program's graphs."""
    if step not in COUNTED:
        return None

    def limited(n: int) -> Config:
        return without(cfg, [Switch(f"{step}:{n}", {})])

    right, wrong = 0, 1
    if not is_right(limited(0)):
        return None
    while is_right(limited(wrong)):
        right, wrong = wrong, 2 * wrong
        if wrong > MOST_DECISIONS:
            return None
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if is_right(limited(middle)) else (right, middle)
    for plan in (p for top in plans(limited(right)) for p in all_programs(top)):
        pair = next((r for r in reversed(plan.refusals) if r.reason == LIMITED), None)
        if pair is not None:
            return Decision(step, right + 1, pair, plan)
    return None


MOST_DECISIONS = 1 << 20


def _smallest(all_of: Sequence[Switch], enough: Callable[[Sequence[Switch]], bool]) -> list[Switch]:
    """A subset that is enough and of which nothing can go, by halves, quarters and so on."""
    kept, n = list(all_of), 2
    while len(kept) > 1:
        size = -(-len(kept) // n)
        parts = [kept[k : k + size] for k in range(0, len(kept), size)]
        rests = [[s for s in kept if s not in part] for part in parts] if n > 2 else []
        found = next((some for some in (*parts, *rests) if enough(some)), None)
        if found is not None:
            kept, n = found, 2 if found in parts else max(n - 1, 2)
        elif size == 1:
            break
        else:
            n = min(2 * n, len(kept))
    return kept
