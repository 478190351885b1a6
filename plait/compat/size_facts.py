"""What a trace assumed about sizes: ranges of symbols, and conditions that calls must meet.

Comes in: the `ExportEnv` of a trace that has ended, its fake inputs and its graph. Goes out:
`SizeFacts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from plait.compat.export import ExportEnv, forget_answers
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


Size = tuple[Any, int]
"""A symbol and a value of it."""


def told_from_one(
    env: ExportEnv, fakes: Sequence[torch.Tensor | torch.SymInt]
) -> dict[Size, set[Question]]:
    """The sizes that the program tells from 1, and the questions that do. plait asks where that
    makes a difference: of those none is here."""
    sizes = {(s, 1) for _, dim, s in _symbolic_sizes(fakes) if dim is not None and s.is_symbol}
    found = {size: _turned(env, size) for size in sorted(sizes, key=str)}
    return {
        size: those for size, those in found.items() if those and not any(q.firm for q in those)
    }


def left_out(
    env: ExportEnv, fakes: Sequence[torch.Tensor | torch.SymInt]
) -> dict[Size, set[Question]]:
    """The single sizes, within their ranges, for which what was asked has the other answer, and
    the questions of the program among these; no more than are worth a trace each. A size of 1 that
    the program asks for is none."""
    shape_env = env.mode.shape_env
    known = {expr for *_, expr in _symbolic_sizes(fakes) if expr.is_symbol}
    asked = [question.holds(shape_env.replace) for question in env.asked]
    by_operators = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    sizes = {size for c in (*asked, *by_operators) for size in _exceptions(env, c)}
    ones = {(s, 1) for c in by_operators for s in c.free_symbols if not _holds(c, (s, 1))}
    sizes = {size for size in sizes | ones if size[0] in known}
    found = {size: _turned(env, size) for size in sorted(sizes, key=lambda x: (-x[1], str(x)))}
    even_so = {
        size: those
        for size, those in found.items()
        if not any(q.firm or size[1] == 1 for q in those)
    }
    return dict(itertools.islice(even_so.items(), _MOST))


_MOST = 4


def allow(env: ExportEnv, size: Size, questions: set[Question]) -> None:
    """Allows a size for which questions have the other answer."""
    env.allowed[size] = questions
    shape_env = env.mode.shape_env
    guards, shape_env.guards = shape_env.guards, []
    for guard in guards:
        parts = sympy.And.make_args(shape_env.replace(guard.expr))
        gone = [part for part in parts if _is_allowed(env, part)]
        for part in gone:
            for known, _ in shape_env.get_implications(shape_env.simplify(part)):
                shape_env.axioms.pop(known, None)
        if gone:
            guard = guard._replace(expr=sympy.And(*(part for part in parts if part not in gone)))
        if guard.expr is not sympy.true:
            shape_env.guards.append(guard)
    forget_answers(shape_env)


def together(env: ExportEnv, sizes: Iterable[Size]) -> list[dict[Any, int]]:
    """Pairs of sizes, of two symbols each. No more are worth a trace each: others are kept
    apart."""
    pairs = [dict(pair) for pair in itertools.combinations(sizes, 2) if pair[0][0] != pair[1][0]]
    env.apart += pairs[_MOST:]
    return pairs[:_MOST]


def _is_allowed(env: ExportEnv, condition: Any) -> bool:
    """Whether all sizes for which a condition does not hold are known, and allowed."""
    found = set(_exceptions(env, condition))
    return bool(found) and found <= env.allowed.keys()


def _turned(env: ExportEnv, size: Size) -> set[Question]:
    """The questions that have the other answer for a size."""
    known, at = env.mode.shape_env.replace, dict([size])
    return {q for q in env.asked if q.turns(lambda e: known(e).xreplace(at))}


def _holds(condition: Any, size: Size) -> bool:
    """Whether a condition holds for a size, as far as others do not matter."""
    try:
        return condition.xreplace(dict([size])) is not sympy.false
    except ZeroDivisionError:
        return True


_FEW, _COUNTABLE = 2, 1024
"""How many sizes are few, and of how many in a range each is tried."""


def _exceptions(env: ExportEnv, condition: Any) -> Iterator[Size]:
    """The sizes of 2 and more, within their ranges, for which a part of a condition does not hold;
    none of a part that asks for several symbols, or that does not hold for more than a few
    sizes."""
    for part in sympy.And.make_args(condition):
        if len(part.free_symbols) == 1:
            (symbol,) = part.free_symbols
            span = env.mode.shape_env.bound_sympy(symbol)
            tried = _worth_a_try(part, symbol, max(span.lower, 2), span.upper)
            wrong = [n for n in tried if not _holds(part, (symbol, n))]
            yield from ((symbol, n) for n in wrong if len(wrong) <= _FEW)


def _worth_a_try(part: Any, symbol: Any, low: Any, high: Any) -> Sequence[int]:
    """Sizes among which are all for which a condition does not hold, or more than a few of these;
    none where that is not known."""
    if high - low < _COUNTABLE:
        return range(int(low), int(high) + 1)
    difference = (part.lhs - part.rhs).as_poly(symbol) if part.is_Relational else None
    if difference is None:
        return ()
    if isinstance(part, sympy.Ne):
        return [int(x) for x in difference.ground_roots() if x.is_integer and low <= x <= high]
    if difference.degree() != 1 or isinstance(part, sympy.Eq):
        return ()
    ends = [range(int(low), int(low) + _FEW + 1)] if low > -(2**62) else []
    ends += [range(int(high) - _FEW, int(high) + 1)] if high < 2**62 else []
    return [n for end in ends for n in end]


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
    known_as = env.mode.shape_env.replace
    # These keep their symbols, which stand for what a call has there.
    known = {s for s in strides if not known_as(s).is_symbol}
    allowed = [(plain.get(s, s), n) for s, n in env.allowed]

    def found(expr: Any) -> Any:
        now = {s: known_as(s) for s in expr.free_symbols if s not in known}
        return expr.xreplace(now).xreplace(plain)

    guards = []
    for guard in env.mode.shape_env.guards:
        for part in sympy.And.make_args(found(guard.expr)):
            also = [sympy.Eq(s, n) for s, n in allowed if not _holds(part, (s, n))]
            guards.append(sympy.Or(part, *also))
    for question in env.asked:
        also = [
            sympy.Eq(plain.get(s, s), n)
            for (s, n), those in env.allowed.items()
            if question in those
        ]
        guards.append(sympy.Or(question.holds(found), *also))
    for sizes in env.apart:
        guards.append(sympy.Or(*(sympy.Ne(plain.get(s, s), n) for s, n in sizes.items())))
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
