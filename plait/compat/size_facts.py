"""What a trace assumed about sizes: ranges of symbols, and conditions that calls must meet.

Comes in: the `ExportEnv` of a trace that has ended, its fake inputs and its graph. Goes out:
`SizeFacts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo.exc import UserError as TorchUserError
from torch._export import non_strict_utils
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from plait.compat.export import ExportEnv
from plait.compat.questions import Question
from plait.compat.size_checks import Check, Place, condition
from plait.errors import UserError

Bounds = tuple[int | None, int | None]
"""The least and the greatest value, inclusive; None for no limit."""


@dataclass(frozen=True)
class SizeFacts:
    """What a traced program assumes about sizes.

    bounds: symbol -> inclusive range, None for no limit. checks: conditions that sizes must meet
    besides.
    """

    bounds: dict[str, Bounds]
    checks: tuple[Check, ...]


def told_from_one(
    env: ExportEnv, fakes: Sequence[torch.Tensor | torch.SymInt]
) -> dict[Any, set[Question]]:
    """The sizes that the program tells from 1, as symbols, and the questions that do."""
    found: dict[Any, set[Question]] = {}
    for _, dim, size in _symbolic_sizes(fakes):
        if dim is None or not size.is_symbol:
            continue
        replace, one = env.mode.shape_env.replace, {size: 1}
        at_one = {q for q in env.asked if q.turns(lambda e: replace(e).xreplace(one))}  # noqa: B023
        if at_one and not any(q.firm for q in at_one):
            found[size] = at_one
    return found


def size_facts(
    env: ExportEnv, fakes: Sequence[torch.Tensor | torch.SymInt], graph: GraphModule
) -> SizeFacts:
    """What the trace assumed. Raises UserError if that contradicts dynamic_shapes."""
    if env.dynamic_shapes:
        _solve(env, graph)
    where = _places(fakes)
    bounds = {s: _bounds(env, s, dim is not None) for s, (_, dim) in where.items()}
    strides = _symbolic_strides(fakes)
    # torch has all of these positive, and answers by that.
    plain = {
        s: sympy.Symbol(s.name, integer=True, nonnegative=True)
        for s in (*where, *strides)
        if s.is_positive
    }
    own = {plain.get(s, s): place for s, place in where.items()}
    apart = {plain.get(s, s): token for s, token in strides.items()}
    ranges = {**dict.fromkeys(apart, (0, None)), **{plain.get(s, s): b for s, b in bounds.items()}}
    guards = _guards(env, plain, strides)
    conditions = [condition(e, own, apart) for e in _not_implied(guards, ranges)]
    offsets = _known_offsets(fakes) if env.asks_offsets else ()
    checks = (*env.root_checks, *_derived_sizes(fakes, where, strides), *conditions, *offsets)
    return SizeFacts({str(s): b for s, b in bounds.items()}, checks)


def _solve(env: ExportEnv, graph: GraphModule) -> None:
    """Has torch compare the guards of the trace with dynamic_shapes."""
    try:
        non_strict_utils.produce_guards_and_solve_constraints(
            env.mode, graph, env.dynamic_shapes, env.equalities, env.python_signature
        )
    except (ConstraintViolationError, TorchUserError) as error:
        # Of a program with Dim.AUTO some sizes in a range may not fit; calls check that.
        if env.was_exported and _some_do_not_fit(str(error)):
            return
        what = _one_size_only(str(error)) or str(error)
        raise UserError(f"dynamic_shapes contradicts the program: {what}", hint=_FIXED) from error


def _places(fakes: Sequence[torch.Tensor | torch.SymInt]) -> dict[Any, Place]:
    """Where each symbol stands first. Raises UserError for an int that the trace fixed."""
    where: dict[Any, Place] = {}
    for arg, dim, expr in _symbolic_sizes(fakes):
        if expr.is_symbol:
            where.setdefault(expr, (arg, dim))
        if expr.is_number and dim is None:
            raise UserError(
                f"dynamic_shapes contradicts the program: it needs {expr} for an int that may vary",
                hint="leave the int out of dynamic_shapes",
            )
    return where


def _bounds(env: ExportEnv, symbol: Any, is_size: bool) -> Bounds:
    """The range of a symbol. torch assumes that a dynamic size is neither 0 nor 1 and lets them
    pass all the same."""
    span = env.mode.shape_env.bound_sympy(symbol)
    low = int(span.lower) if span.lower > -(2**62) else None
    low = 0 if low is not None and low <= 2 and is_size else low
    return low, int(span.upper) if span.upper < 2**62 else None


def _guards(env: ExportEnv, plain: Mapping[Any, Any], strides: Mapping[Any, str]) -> list[Any]:
    """The guards of the trace and the answers that its program was given, as conditions. plain:
    what stands for a symbol in them."""
    replace = env.mode.shape_env.replace
    # These keep their symbols, which stand for what a call has there.
    known = {s for s in strides if not replace(s).is_symbol}

    def found(expr: Any) -> Any:
        now = {s: replace(s) for s in expr.free_symbols if s not in known}
        return expr.xreplace(now).xreplace(plain)

    guards = [found(guard.expr) for guard in env.mode.shape_env.guards]
    for question in env.asked:
        ones = [sympy.Eq(plain[s], 1) for s, allowed in env.ones.items() if question in allowed]
        guards.append(sympy.Or(question.holds(found), *ones))
    return guards


_FIXED = (
    "leave such sizes out of dynamic_shapes, and compile once for each; torch.compile does that "
    "by itself"
)


def _some_do_not_fit(text: str) -> bool:
    """Whether torch says no more than that some sizes in the range of a dimension do not fit."""
    said = re.findall(r"^  - (.*)", text, re.MULTILINE)
    return bool(said) and all(line.startswith("Not all values of") for line in said)


def _one_size_only(text: str) -> str:
    """What torch says of dimensions that turned out to be fixed, in one line; "" if it says
    something else."""
    found = re.findall(
        r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)", text
    )
    sizes = " and ".join(f"{name} = {size}" for name, size in dict(found).items())
    steps = "a loop over it was traced step by step"
    return sizes and f"it is traced for {sizes} alone, maybe since {steps}"


def _not_implied(guards: Sequence[Any], bounds: Mapping[Any, Bounds]) -> list[Any]:
    """Those conditions on sizes that the checked ranges do not imply, once each."""
    ranges = {
        s: ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)
        for s, (low, high) in bounds.items()
    }
    true = ValueRanges(sympy.true, sympy.true)
    return [expr for expr in dict.fromkeys(guards) if bound_sympy(expr, ranges) != true]


def _derived_sizes(
    fakes: Sequence[torch.Tensor | torch.SymInt],
    where: dict[Any, Place],
    strides: Mapping[Any, str],
) -> Iterator[Check]:
    """That sizes are what tracing found them to be by other sizes, or by strides."""
    for arg, dim, expr in _symbolic_sizes(fakes):
        if not expr.is_symbol:
            own = sympy.Symbol(f"size_{arg}_{dim}", integer=True)
            equal = sympy.Eq(own, expr, evaluate=False)
            yield condition(equal, {**where, own: (arg, dim)}, strides)


def _symbolic_sizes(
    fakes: Sequence[torch.Tensor | torch.SymInt],
) -> Iterator[tuple[int, int | None, Any]]:
    """(argument, dimension, expression) of every int (dimension None) and size that is no
    number."""
    for arg, fake in enumerate(fakes):
        sizes: dict[int | None, Any] = (
            {None: fake} if isinstance(fake, torch.SymInt) else dict(enumerate(fake.shape))
        )
        for dim, size in sizes.items():
            if isinstance(size, torch.SymInt):
                yield arg, dim, size.node.expr


def _symbolic_strides(fakes: Sequence[Any]) -> dict[Any, str]:
    """The symbols of strides and offsets that were taken to vary on their own, as tokens."""
    given = [(arg, x) for arg, x in enumerate(fakes) if isinstance(x, torch.Tensor)]
    found: list[tuple[str, Any]] = [(f"offset {arg}", x.storage_offset()) for arg, x in given]
    found += [(f"stride {arg} {d}", s) for arg, x in given for d, s in enumerate(x.stride())]
    exprs = [(token, s.node._expr) for token, s in found if isinstance(s, torch.SymInt)]
    return {expr: token for token, expr in exprs if expr.is_symbol}


def _known_offsets(fakes: Sequence[Any]) -> Iterator[Check]:
    """That tensors begin where they did, of those that were traced with a number for that."""
    for arg, x in enumerate(fakes):
        if isinstance(x, torch.Tensor) and isinstance(x.storage_offset(), int):
            own = sympy.Symbol(f"offset_{arg}", integer=True)
            yield condition(sympy.Eq(own, x.storage_offset()), {}, {own: f"offset {arg}"})
