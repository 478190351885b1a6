"""Tracing without Dynamo, by torch's export machinery: symbolic sizes, what is assumed of them, one
graph.

Comes in: a module, arguments and dynamic_shapes. Goes out: fake arguments and their `SizeFacts`
(`ExportEnv`), and a functional graph (`export_graph`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._dynamo.exc import UserError as TorchUserError
from torch._export import non_strict_utils
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_tensor
from torch.export import Dim
from torch.export.dynamic_shapes import _combine_args, _DerivedDim, _tree_map_with_path
from torch.fx import GraphModule, _lazy_graph_module
from torch.fx import proxy as fx_proxy
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from plait import errors
from plait.compat.decompositions import decomposition_table
from plait.compat.shared import Shared
from plait.errors import InternalError, Unsupported, UserError


@dataclass(frozen=True)
class Check:
    """A condition on sizes and ints. text: in which these arguments are args[0], args[1] and so on.
    holds: for these. tokens: the same as a package has it (wrapper/package.py); nothing if it is
    beyond that."""

    text: str
    holds: Callable[..., bool]
    tokens: tuple[str, ...]


Bounds = tuple[int | None, int | None]
Place = tuple[int, int | None]
"""An argument and its dimension; None: the argument is an int."""


@dataclass(frozen=True)
class SizeFacts:
    """What a traced program assumes about sizes.

    bounds: symbol -> inclusive range, None for no limit. checks: conditions that sizes must meet
    besides.
    """

    bounds: dict[str, Bounds]
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Question:
    """What a traced program asked about sizes. condition: what makes it of exprs. firm: plait
    asked."""

    answer: bool
    condition: Any
    exprs: tuple[Any, ...]
    firm: bool

    def holds(self, now: Callable[[Any], Any]) -> Any:
        """The condition that the answer stays what it was. now: an expression as it is put
        there."""
        condition = self.condition(*map(now, self.exprs))
        return condition if self.answer else sympy.Not(condition)

    def turns(self, now: Callable[[Any], Any]) -> bool:
        """Whether the answer is the other one."""
        try:
            return self.holds(now) is sympy.false
        except ZeroDivisionError:
            return False


class ExportEnv:
    """Fake arguments for one export.

    leaves: the flattened arguments, tensors replaced by fake ones (on device, if there is one).
    asked: what the traced program asked about sizes. ones: sizes that may be 1 all the same, by
    symbol: the questions that have the other answer then.
    asks_offsets: the program asked where a tensor begins in its storage."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
        device: torch.device | None = None,
    ) -> None:
        args, kwargs = _apart(args), _apart(kwargs)
        try:
            self.dynamic_shapes, self._root_checks = _without_roots(
                module, args, kwargs, dynamic_shapes
            )
            make: Any = non_strict_utils.make_fake_inputs
            # Strides and offsets that are equal in the example may differ at a call.
            with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                found = make(module, args, kwargs, self.dynamic_shapes)
        except (
            ConstraintViolationError,
            TorchUserError,
            AssertionError,
            IndexError,
            TypeError,
            ValueError,
        ) as error:
            if dynamic_shapes is None:
                raise
            what = (
                "it names a dimension that a tensor does not have"
                if isinstance(error, IndexError)
                else error
            )
            raise UserError(f"dynamic_shapes does not fit: {what}") from error
        self.mode, fake_args, fake_kwargs, self._equalities, self._python_signature, _ = found
        self.device = device
        self._was_exported = isinstance(module, GraphModule)
        self.leaves = [self._moved(x) for x in pytree.tree_leaves((fake_args, fake_kwargs))]
        self.asked: list[Question] = []
        self.ones: dict[Any, set[Question]] = {}
        self.asks_offsets = False
        # Fake tensors are memoised by the tensors they stand for, which must live for that.
        self._alive: list[torch.Tensor] = []

    def fake_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake, detached tensor of fixed sizes for a parameter or buffer."""
        detached = tensor.detach()
        self._alive.append(detached)
        fake: torch.Tensor = self._moved(self.mode.from_tensor(detached, static_shapes=True))
        return fake

    def _moved(self, x: Any) -> Any:
        if self.device is None or not isinstance(x, torch.Tensor):
            return x
        with self.mode:
            return x.to(self.device)

    def told_from_one(
        self, fakes: Sequence[torch.Tensor | torch.SymInt]
    ) -> dict[Any, set[Question]]:
        """The sizes that the program tells from 1, as symbols, and the questions that do."""
        found: dict[Any, set[Question]] = {}
        for _, dim, size in _symbolic_sizes(fakes):
            if dim is None or not size.is_symbol:
                continue
            replace, one = self.mode.shape_env.replace, {size: 1}
            at_one = {q for q in self.asked if q.turns(lambda e: replace(e).xreplace(one))}  # noqa: B023
            if at_one and not any(q.firm for q in at_one):
                found[size] = at_one
        return found

    def size_facts(
        self, fakes: Sequence[torch.Tensor | torch.SymInt], graph: GraphModule
    ) -> SizeFacts:
        """What the trace assumed. Raises UserError if that contradicts dynamic_shapes."""
        shape_env = self.mode.shape_env
        if self.dynamic_shapes:
            try:
                non_strict_utils.produce_guards_and_solve_constraints(
                    self.mode, graph, self.dynamic_shapes, self._equalities, self._python_signature
                )
            except (ConstraintViolationError, TorchUserError) as error:
                what = _one_size_only(str(error)) or str(error)
                # Of a program with Dim.AUTO some sizes in a range may not fit; calls check that.
                if not self._was_exported or not _some_do_not_fit(str(error)):
                    raise UserError(
                        f"dynamic_shapes contradicts the program: {what}", hint=_FIXED
                    ) from error
        where: dict[Any, Place] = {}
        for arg, dim, expr in _symbolic_sizes(fakes):
            if expr.is_symbol:
                where.setdefault(expr, (arg, dim))
            if expr.is_number and dim is None:
                raise UserError(
                    f"dynamic_shapes contradicts the program: it needs {expr} for an int that may "
                    "vary",
                    hint="leave the int out of dynamic_shapes",
                )
        bounds: dict[Any, Bounds] = {}
        for symbol, (_, dim) in where.items():
            span = shape_env.bound_sympy(symbol)
            low = int(span.lower) if span.lower > -(2**62) else None
            # torch assumes that a dynamic size is neither 0 nor 1 and lets them pass all the same.
            low = 0 if low is not None and low <= 2 and dim is not None else low
            bounds[symbol] = (low, int(span.upper) if span.upper < 2**62 else None)
        strides = _symbolic_strides(fakes)
        # torch has all of these positive, and answers by that.
        plain = {
            s: sympy.Symbol(s.name, integer=True, nonnegative=True)
            for s in (*where, *strides)
            if s.is_positive
        }
        known = {
            s for s in strides if not shape_env.replace(s).is_symbol
        }  # since the trace found what it is equal to

        def found(expr: Any) -> Any:
            now = {s: shape_env.replace(s) for s in expr.free_symbols if s not in known}
            return expr.xreplace(now).xreplace(plain)

        guards = [found(guard.expr) for guard in shape_env.guards]
        for question in self.asked:
            ones = [
                sympy.Eq(plain[s], 1) for s, allowed in self.ones.items() if question in allowed
            ]
            guards.append(sympy.Or(question.holds(found), *ones))
        own = {plain.get(s, s): place for s, place in where.items()}
        apart = {plain.get(s, s): token for s, token in strides.items()}
        ranges = {
            **dict.fromkeys(apart, (0, None)),
            **{plain.get(s, s): b for s, b in bounds.items()},
        }
        conditions = [_condition(e, own, apart) for e in _not_implied(guards, ranges)]
        offsets = _known_offsets(fakes) if self.asks_offsets else ()
        checks = (*self._root_checks, *_derived_sizes(fakes, where, strides), *conditions, *offsets)
        return SizeFacts({str(s): b for s, b in bounds.items()}, checks)


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
    steps = "a loop over it, such as the steps of nn.GRU, was traced step by step"
    return sizes and f"it is traced for {sizes} alone, maybe since {steps}"


def _apart(tree: Any) -> Any:
    """The same arguments with a tensor that is given twice made two, since a call may give two
    different ones, and None for constants that torch.export does not know (a dtype, a device)."""
    seen: set[int] = set()

    def fresh(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x if isinstance(x, (int, float, str)) else None
        if id(x) in seen:
            return x.detach()
        seen.add(id(x))
        return x

    return pytree.tree_map(fresh, tree)


def _without_roots(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[Any, list[Check]]:
    """dynamic_shapes in which sizes such as 2 * Dim("h") vary freely where no input has the size h,
    so that no program takes it; and what is to be checked for them, among it that such an h is a
    whole number."""
    dims = [d for d in pytree.tree_leaves(dynamic_shapes) if isinstance(d, Dim)]
    known = {d.__name__ for d in dims if not isinstance(d, _DerivedDim)}
    if all(d.root.__name__ in known for d in dims if isinstance(d, _DerivedDim)):
        return dynamic_shapes, []
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    where: dict[Any, tuple[int, int]] = {}
    conditions: list[Any] = []
    roots: dict[str, Any] = {}

    def freed(size: tuple[int, int], d: Any) -> Any:
        if not isinstance(d, _DerivedDim) or d.root.__name__ in known:
            return d
        own = sympy.Symbol(f"size_{size[0]}_{size[1]}", integer=True)
        where[own] = size
        offset, scale = d.fn(0), d.fn(1) - d.fn(0)
        conditions.append(sympy.Eq(Mod(own - offset, scale), 0))
        root = FloorDiv(own - offset, scale)
        if roots.setdefault(d.root.__name__, root) != root:
            conditions.append(sympy.Eq(root, roots[d.root.__name__]))
        conditions.extend([own >= d.min] if d.min > 2 else [])
        conditions.extend([own <= d.max] if d.max != int_oo else [])
        return Dim.DYNAMIC

    def free(_: Any, x: Any, sizes: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not isinstance(sizes, (dict, list, tuple)):
            return sizes
        (arg,) = (k for k, t in enumerate(tensors) if t is x)
        return {
            dim: freed((arg, dim), d)
            for dim, d in (sizes.items() if isinstance(sizes, dict) else enumerate(sizes))
        }

    given = _combine_args(module, args, kwargs)
    if not isinstance(dynamic_shapes, dict):
        given = type(dynamic_shapes)(given.values())
    shapes = _tree_map_with_path(free, given, dynamic_shapes, tree_name="inputs")
    return shapes, [_condition(e, where) for e in conditions]


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
            yield _condition(equal, {**where, own: (arg, dim)}, strides)


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
            yield _condition(sympy.Eq(own, x.storage_offset()), {}, {own: f"offset {arg}"})


def _condition(
    expr: Any, where: Mapping[Any, Place], strides: Mapping[Any, str] | None = None
) -> Check:
    """A sympy condition on sizes, and on strides, as text and as a Python function of the
    arguments."""
    own = {s: f"int {a}" if d is None else f"size {a} {d}" for s, (a, d) in where.items()}
    names = {**(strides or {}), **own}
    if missing := [s for s in expr.free_symbols if s not in names]:
        raise InternalError(f"size condition {expr} has a symbol {missing[0]} of no input")
    texts = {
        s: sympy.Symbol(_spelled(*token.split()), **s.assumptions0) for s, token in names.items()
    }
    source = PythonPrinter().doprint(expr.xreplace(texts))
    holds = eval(f"lambda *args: {source}", {"math": math, "torch": torch})
    return Check(source, holds, _postfix(expr, names) or ())


def _spelled(kind: str, arg: str, dim: str = "") -> str:
    """What a token stands for, in Python."""
    ends = {
        "int": "",
        "size": f".shape[{dim}]",
        "stride": f".stride({dim})",
        "offset": ".storage_offset()",
    }
    return f"args[{arg}]{ends[kind]}"


_TOKENS = {
    sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "floordiv", CleanDiv: "floordiv", Mod: "mod",
    PythonMod: "mod", sympy.Min: "min", Min: "min", sympy.Max: "max", Max: "max", sympy.Eq: "eq",
    sympy.Ne: "ne", sympy.Lt: "lt", sympy.Le: "le", sympy.And: "mul", sympy.Or: "max",
}  # fmt: skip


def _postfix(expr: Any, names: dict[Any, str]) -> tuple[str, ...] | None:
    """Operands, each followed by what it is combined by; None for one beyond these operators. What
    is true is 1."""
    if expr.is_Symbol:
        return (names[expr],)
    if expr.is_Integer or expr in (sympy.true, sympy.false):
        return (f"const {int(bool(expr)) if expr.is_Boolean else int(expr)}",)
    if isinstance(expr, sympy.Gt | sympy.Ge):
        return _postfix(expr.reversed, names)
    if expr.is_Pow and expr.exp.is_Integer and 0 < expr.exp <= 8:
        return _joined([expr.base] * int(expr.exp), "mul", names)
    if isinstance(expr, sympy.Not):
        inner = _postfix(expr.args[0], names)
        return None if inner is None else (*inner, "const 0", "eq")
    kind = _TOKENS.get(expr.func)
    return None if kind is None else _joined(expr.args, kind, names)


def _joined(args: Sequence[Any], kind: str, names: dict[Any, str]) -> tuple[str, ...] | None:
    inner = [_postfix(arg, names) for arg in args]
    rest = [(*i, kind) for i in inner[1:] if i is not None]
    return None if None in inner else sum(rest, inner[0] or ())


_NO_VALUES = (
    GuardOnDataDependentSymNode,
    NotImplementedError,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_STAND_INS = re.compile(
    r"FakeTensor|FunctionalTensor|tensor subclass|data pointer|does not have storage"
)


def wants_values(error: Exception) -> bool:
    """Whether traced code failed because its tensors have no values: torch has classes of errors
    for some of this, for the rest (`x.numpy()`, `f"{x:.1f}"`, `float(f"{x}")`) the text tells."""
    told = (
        isinstance(error, (RuntimeError, TypeError, ValueError))
        and _STAND_INS.search(str(error)) is not None
    )
    return told or isinstance(error, _NO_VALUES)


class _Forwards(traceback.StackSummary):
    """What a tracer of modules keeps of a stack. All other frames and their lines take a fifth of a
    trace's time."""

    @classmethod
    def extract(cls, *_: object, **__: object) -> _Forwards:
        frames = [
            f for f, _ in traceback.walk_stack(sys._getframe(1)) if f.f_code.co_name == "forward"
        ]
        return cls(
            traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, "forward")
            for f in reversed(frames)
        )

    def summary(self) -> _Forwards:
        return self


_ask = SymNode.bool_
_OURS = f"{Path(errors.__file__).parent}/"
_OPERATORS = (_OURS, f"{Path(torch.__file__).parent}/", contextlib.__file__, functools.__file__)


def _asked(node: SymNode) -> bool:
    """What Python gets that asks whether a condition on sizes holds. Tracing takes sizes and
    strides that vary for 2 or more and leaves no guard where that answers: an env that is tracing
    takes a note of what its program asks."""
    answer = _ask(node)
    asked = getattr(node.shape_env, "asked", None)
    if asked is not None and _is_the_program(sys._getframe(1)):
        condition, exprs = getattr(node, "compares", (sympy.And, (node.expr,)))
        if not any(map(free_unbacked_symbols, exprs)):
            asked.append(Question(answer, condition, exprs, _is_ours(sys._getframe(2))))
    return answer


def _comparing(name: str, condition: Any) -> Callable[[SymNode, SymNode], SymNode]:
    """The method of nodes that compares two, whose result knows both."""
    compare = getattr(SymNode, name)

    def compared(a: SymNode, b: SymNode) -> SymNode:
        node: Any = compare(a, b)
        node.compares = condition, (a.expr, b.expr)
        turned = getattr(a.shape_env, "turned", {})
        if (
            node.compares in turned
            and not _is_ours(sys._getframe(2))
            and _is_the_program(sys._getframe(1))
        ):
            return a.wrap_bool(turned[node.compares])
        return node  # type: ignore[no-any-return]

    return compared


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_the_program(frame: FrameType | None) -> bool:
    """Whether a frame belongs to what is traced, not to an operator that it called."""
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        if not frame.f_code.co_filename.startswith(_OPERATORS):
            return True
        frame = frame.f_back
    return frame is None


_CONDITIONS = {
    "eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge,
}  # fmt: skip
_CHANGES: list[tuple[Any, str, Any]] = [
    *((SymNode, name, _comparing(name, condition)) for name, condition in _CONDITIONS.items()),
    (torch.compiler, "_is_compiling_flag", True), (torch.compiler, "_is_exporting_flag", True),
    (fx_proxy, "CapturedTraceback", _Forwards), (SymNode, "bool_", _asked),
    (_lazy_graph_module, "_use_lazy_graph_module_flag", True),
]  # fmt: skip
_BEFORE = [getattr(owner, name) for owner, name, _ in _CHANGES]


def _set(values: Sequence[Any]) -> None:
    for (owner, name, _), value in zip(_CHANGES, values, strict=True):
        setattr(owner, name, value)


exporting = Shared(lambda: _set([new for *_, new in _CHANGES]), lambda: _set(_BEFORE))
"""Inside, torch.compiler.is_compiling() and is_exporting() are true: models ask before they look at
values. Stacks are short, questions about sizes are noted, and of a graph no Python is made, which
has no word for `aten.random.from`."""


def export_graph(
    env: ExportEnv,
    flat: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    who: str,
    turned: Collection[Question] = (),
) -> tuple[GraphModule, tuple[int, ...], int]:
    """Traces flat(*inputs) functionally and without autograd.

    Also gives the positions of mutated inputs, and a number of tokens. The graph's first inputs and
    outputs are that many tokens; then come the new values of mutated inputs.

    turned: questions that get the other answer. Nothing is learnt of sizes then.
    """
    shape_env = env.mode.shape_env
    shape_env.asked = [] if turned else env.asked
    shape_env.turned = {(q.condition, q.exprs): not q.answer for q in turned}
    guards, equal = list(shape_env.guards), dict(shape_env.replacements)
    try:
        with env.mode, tracing(TracingContext(env.mode)), exporting:
            graph, signature = aot_export_module(
                flat, inputs, trace_joint=False, decompositions=decomposition_table()
            )
    except (AssertionError, RuntimeError) as error:
        if not re.search("entirely functional graph|mutating a non-functional tensor", str(error)):
            raise
        what = (
            f"{who} of a function that changes a tensor which is neither argument nor parameter "
            "nor buffer"
        )
        raise Unsupported(what, hint="make it a buffer of a module, or an argument") from error
    finally:
        del shape_env.asked, shape_env.turned
        if turned:
            shape_env.guards[:] = guards
            shape_env.replacements.clear()
            shape_env.replacements.update(equal)
            shape_env._update_version_counter()
    assert isinstance(graph, GraphModule)
    positions = {name: i for i, name in enumerate(signature.user_inputs)}
    mutated = tuple(positions[name] for name in signature.user_inputs_to_mutate.values())
    return graph, mutated, len(signature.input_tokens)
