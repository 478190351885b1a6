"""Tracing without Dynamo, by torch's export machinery: symbolic sizes and one functional graph.

Comes in: a module, arguments and dynamic_shapes. Goes out: fake arguments (`ExportEnv`) and the
graph (`export_graph`); `size_facts.py` says what it assumes of sizes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._dynamo.exc import UserError as TorchUserError
from torch._export import non_strict_utils
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.export import Dim
from torch.export.dynamic_shapes import _combine_args, _DerivedDim, _tree_map_with_path
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.numbers import int_oo

from plait.compat.composites import composites_traced
from plait.compat.decompositions import inference_table, whole_table
from plait.compat.fake_shapes import short_shapes
from plait.compat.kernel_calls import kernels_traced
from plait.compat.loops import rounds_counted
from plait.compat.one_run import OneRun, one_run
from plait.compat.questions import Question, exporting
from plait.compat.size_checks import Check, condition
from plait.compat.tracing import few_states
from plait.errors import Unsupported, UserError


class ExportEnv:
    """Fake arguments for one export.

    leaves: the flattened arguments, tensors replaced by fake ones (on device, if there is one).
    asked: what the traced program asked about sizes. allowed: values of symbols that are allowed
    all the same: the questions that have the other answer then. apart: those of which a call must
    not have all.
    whole: operators that have kernels in eager are not decomposed.
    asks_offsets: the program asked where a tensor begins in its storage. dynamic_shapes,
    equalities, python_signature: what torch solves for sizes. root_checks: what calls must meet
    besides. was_exported: the module is a graph that torch.export made."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
        device: torch.device | None = None,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        args, kwargs = _apart(args), _apart(kwargs)
        try:
            if dynamic_shapes:
                _each_size(_combine_args(module, args, kwargs), dynamic_shapes, _check_varies)
            self.dynamic_shapes, self.root_checks = _without_roots(
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
        self.mode, fake_args, fake_kwargs, self.equalities, self.python_signature, _ = found
        self.device = device
        self.was_exported = isinstance(module, GraphModule)
        self.leaves = [self._moved(x) for x in pytree.tree_leaves((fake_args, fake_kwargs))]
        self.asked: list[Question] = []
        self.allowed: dict[tuple[Any, int], set[Question]] = {}
        self.apart: list[dict[Any, int]] = []
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

    def free(x: torch.Tensor, dim: int, d: Any) -> Any:
        (arg,) = (k for k, t in enumerate(tensors) if t is x)
        return freed((arg, dim), d)

    shapes = _each_size(_combine_args(module, args, kwargs), dynamic_shapes, free)
    return shapes, [condition(e, where) for e in conditions]


def _each_size(given: Any, dynamic_shapes: Any, change: Callable[..., Any]) -> Any:
    """dynamic_shapes with change(tensor, dimension, what it says) for all that it says. given: the
    arguments by name."""

    def sizes_of(_: Any, x: Any, sizes: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not isinstance(sizes, (dict, list, tuple)):
            return sizes
        items = sizes.items() if isinstance(sizes, dict) else enumerate(sizes)
        return {dim: change(x, dim, d) for dim, d in items}

    if not isinstance(dynamic_shapes, dict):
        given = type(dynamic_shapes)(given.values())
    return _tree_map_with_path(sizes_of, given, dynamic_shapes, tree_name="inputs")


def _check_varies(x: torch.Tensor, dim: int, d: Any) -> None:
    """torch takes a size of 0 or 1 in the example for that number, whatever is said of it."""
    if getattr(d, "type", None) is Dim.DYNAMIC.type and x.shape[dim] < 2:
        raise UserError(
            f"dynamic_shapes says Dim.DYNAMIC of dimension {dim}, which is {x.shape[dim]} in the "
            "example: the program would be for that size alone",
            hint="an example with another size, or Dim.AUTO",
        )


def export_graph(
    env: ExportEnv,
    flat: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    who: str,
    turned: Collection[Question] = (),
    at: Mapping[Any, Any] | None = None,
) -> tuple[GraphModule, tuple[int, ...], int]:
    """Traces flat(*inputs) functionally and without autograd.

    Also gives the positions of mutated inputs, and a number of tokens. The graph's first inputs and
    outputs are that many tokens; then come the new values of mutated inputs.

    turned: questions that get the other answer. at: symbols with the values for which all
    questions are answered. Nothing is learnt of sizes then; raises Unsupported where more would
    have to be known of others.
    """
    shape_env = env.mode.shape_env
    again = bool(turned or at)
    shape_env.asked = [] if again else env.asked
    shape_env.turned = {(q.condition, q.exprs): not q.answer for q in turned}
    known = _learnt(shape_env) if again else {}
    shape_env.at = at
    try:
        made = None if shape_env.var_to_range else _at_once(env, flat, inputs)
        graph, signature = made or _traced(env, flat, inputs)
        if at and len(shape_env.guards) > len(known["guards"]):
            raise Unsupported("sizes for which more has to be known of others")
    except (AssertionError, RuntimeError) as error:
        if not re.search("entirely functional graph|mutating a non-functional tensor", str(error)):
            raise
        what = (
            f"{who} of a function that changes a tensor which is neither argument nor parameter "
            "nor buffer"
        )
        raise Unsupported(what, hint="make it a buffer of a module, or an argument") from error
    finally:
        del shape_env.asked, shape_env.turned, shape_env.at
        if again:
            _forget(shape_env, known)
    assert isinstance(graph, GraphModule), graph
    positions = {name: i for i, name in enumerate(signature.user_inputs)}
    mutated = tuple(positions[name] for name in signature.user_inputs_to_mutate.values())
    return graph, mutated, len(signature.input_tokens)


def _traced(env: ExportEnv, flat: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    # What torch remembers of fake tensors is of the answers that it gave.
    anew = disable_fake_tensor_cache(env.mode) if env.mode.shape_env.at else nullcontext()
    with (
        env.mode,
        tracing(TracingContext(env.mode)),
        exporting,
        short_shapes,
        kernels_traced(),
        rounds_counted,
        few_states,
        composites_traced,
        anew,
    ):
        table = whole_table() if env.whole else inference_table()
        return aot_export_module(flat, inputs, trace_joint=False, decompositions=table)


def _at_once(env: ExportEnv, flat: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """What `_traced` gives, in one run of flat. None where that takes two, and where it fails:
    torch tells best then what is wrong."""
    run = flat.forward
    flat.one_run = flat.forward = OneRun(run, env.mode.shape_env)
    try:
        with one_run:
            return _traced(env, flat, inputs)
    except Exception:  # noqa: BLE001  whatever the function raises
        return None
    finally:
        flat.forward = run
        del flat.one_run


def _learnt(shape_env: Any) -> dict[str, Any]:
    """What a ShapeEnv knows of sizes, by attribute."""
    kept = {name: copy.copy(getattr(shape_env, name)) for name in _LEARNT}
    asserts = {s: list(those) for s, those in shape_env.deferred_runtime_asserts.items()}
    return {**kept, "deferred_runtime_asserts": asserts}


_LEARNT = "guards replacements var_to_range axioms divisible num_deferred_runtime_asserts".split()


def _forget(shape_env: Any, known: dict[str, Any]) -> None:
    """Takes a ShapeEnv back to what it knew."""
    vars(shape_env).update(known)
    forget_answers(shape_env)


def forget_answers(shape_env: Any) -> None:
    """Has a ShapeEnv answer anew, by what it knows."""
    shape_env._update_version_counter()
    # Answers are remembered by the one, what sizes were replaced by is by the other.
    for counter in ("_version_counter", "_replacements_version_counter"):
        if hasattr(shape_env, counter):
            setattr(shape_env, counter, getattr(shape_env, counter) + 1)
