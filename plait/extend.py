"""The doors for code outside the tree: a lowering, a decomposition, a graph pass, a kernel target,
a kind of device, an object store for what is built.

Each registers for the process, before anything that needs it is compiled; what is compiled already
stays as it is. A mistake raises UserError where it is made. `examples/extending.py` goes through
all of them; CONTRIBUTING.md tells how the same is done inside the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from plait import compat
from plait.config import EXTENDED
from plait.devices import DEVICES, Facts
from plait.errors import UserError
from plait.ir.ops import OPS, SPECIAL
from plait.kernel.target import Target
from plait.kernel.targets import TARGETS
from plait.lower import core
from plait.lower.graph import load_rules
from plait.pipelines import ADDED, GRAPH, GraphPass
from plait.runtime.remote import SCHEMES, Remote

Rule = Callable[..., Any]
MACHINES = frozenset(facts.machine for facts in DEVICES.values())
"""Options that name the machine which kernels are built for."""


def lowering(*ops: OpOverload | HigherOrderOperator) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the rule of these operators.

    It is called as rule(ctx, *args, **kwargs) with a `Lowering`, Views for tensors and integer
    expressions for integers, and returns a View, or a tuple of them; docs/lowering.md tells more.
    Raises UserError for what is no operator, and for one that has a rule.
    """
    load_rules()
    for op in ops:
        if not isinstance(op, (OpOverload, HigherOrderOperator)):
            raise UserError(
                f"a lowering for {op!r}, which is no operator",
                hint="name the overload: torch.ops.mylib.scale.default",
            )
        if op in core.RULES:
            raise UserError(f"a second lowering for {op}", hint="plait has a rule for it already")
    EXTENDED.append(f"a lowering of {', '.join(map(str, ops))}")
    return core.lower(*ops)


def decomposition(op: OpOverload) -> Callable[[Rule], Rule]:
    """Registers the decorated function as what tracing puts in place of an operator: a function of
    the operator's arguments that calls other operators.

    Raises UserError for what is no operator, and for one that has a decomposition here.
    """
    if not isinstance(op, OpOverload):
        raise UserError(
            f"a decomposition of {op!r}, which is no operator",
            hint="name the overload: torch.ops.mylib.scale.default",
        )
    if op in compat.decompositions.DECOMPOSITIONS:
        raise UserError(f"a second decomposition of {op}")

    def register(rule: Rule) -> Rule:
        compat.decompositions.DECOMPOSITIONS[op] = rule
        EXTENDED.append(f"a decomposition of {op}")
        return rule

    return register


def graph_pass(name: str) -> Callable[[GraphPass], GraphPass]:
    """Registers the decorated function as a pass over captured graphs: it edits a
    torch.fx.GraphModule in place and returns how many nodes it changed.

    It runs after plait's own passes, in the order of registration; nodes without users go
    afterwards. Every node that it makes needs its fake value as meta["val"]. Raises UserError for a
    name that is taken; so does a compile in which the pass left a broken graph.
    """

    def register(run: GraphPass) -> GraphPass:
        if name in {taken for taken, _ in (*GRAPH, *ADDED)}:
            raise UserError(f"a second graph pass {name!r}", hint="each has a name of its own")
        ADDED.append((name, run))
        EXTENDED.append(f"the graph pass {name!r}")
        return run

    return register


def device(kind: str, facts: Facts, target: Target) -> None:
    """Adds a row of facts for a kind of device, by torch's name for it, and the target that makes
    its kernels. The host must see its memory: programs for it are launched as those of the CPU are,
    by the wrapper "python".

    Raises UserError for a kind that torch does not know or that has a row, for a row that no
    program could keep, and as `kernel_target` does.
    """
    try:
        known = torch.device(kind)
    except RuntimeError:
        raise UserError(f"a row for {kind!r}, which is no device of torch") from None
    if known.type != kind:
        raise UserError(f"a row for one device, {kind!r}", hint=f"name the kind: {known.type!r}")
    if kind in DEVICES:
        raise UserError(f"a second row for {kind!r}", hint="kernel_target changes the target")
    if not facts.is_host or facts.streams:
        raise UserError(f"a row for {kind!r} whose memory the host does not see")
    if facts.target != target.name:
        raise UserError(f"the row for {kind!r} names {facts.target!r}, not {target.name!r}")
    if facts.machine not in MACHINES:
        hint = f"options that name a machine are {', '.join(sorted(MACHINES))}"
        raise UserError(f"the row for {kind!r} names the option {facts.machine!r}", hint=hint)
    _check_table(target)
    DEVICES[kind], TARGETS[kind] = facts, target
    EXTENDED.append(f"the device {kind!r}")


def kernel_target(kind: str, target: Target) -> Target:
    """Makes `target` the one that makes kernels for a kind of device, such as "cpu"; returns the
    one before, which may be registered again. What it builds must be what the programs of this kind
    of device launch.

    Raises UserError if its table has no row for one of the operations of the loop IR, or names one
    that there is not, and for an unknown kind of device.
    """
    before = TARGETS.get(kind)
    if before is None:
        raise UserError(
            f"a kernel target for {kind!r}", hint=f"kinds of devices are {', '.join(TARGETS)}"
        )
    _check_table(target)
    TARGETS[kind] = target
    EXTENDED.append(f"a kernel target for {kind!r}")
    return before


def remote_cache(scheme: str, open_: Callable[[str], Remote]) -> None:
    """Makes `open_` what opens the URLs of a scheme for the option `cache_remote`: "mine" for
    mine://host/folder. It is given the whole URL.

    Raises UserError for what is no scheme, and for one that is taken.
    """
    if not re.fullmatch("[a-z][a-z0-9+.-]*", scheme):
        raise UserError(f"{scheme!r} is no scheme of a URL", hint="'mine' for mine://host/folder")
    if scheme in SCHEMES:
        raise UserError(f"a second kind of cache for {scheme}://")
    SCHEMES[scheme] = open_


def _check_table(target: Target) -> None:
    wrong = {*OPS, *SPECIAL} ^ set(target.table)
    if wrong:
        raise UserError(
            f"the table of kernel target {target.name!r} and plait/ir/ops.py differ in "
            f"{', '.join(sorted(wrong))}"
        )


__all__ = ["decomposition", "device", "graph_pass", "kernel_target", "lowering", "remote_cache"]
