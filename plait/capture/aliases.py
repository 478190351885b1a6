"""Which results of a graph lie in the memory of its inputs, and where: facts for the compiler and
for whoever makes the user's results.

Functionalised graphs do not tell: `x.mul_(2)[k:]` is a slice of a product there. What eager makes
is known from the fake tensors of Dynamo's graph, or from those that the user's function returned
while it was traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from plait import compat
from plait.errors import Unsupported
from plait.graph.captured import InputView
from plait.graph.edit import begins_anywhere, output_of
from plait.lower.symbols import to_size

Result = tuple[Any, ...]
"""("program",), or ("view", number of the program's input, requires_grad, offset or None: the
program's tensor tells)."""


def dynamo_views(gm: GraphModule) -> dict[int, InputView]:
    """The results of a Dynamo graph that are inputs or views of them. Raises Unsupported for one
    that AOTAutograd's wrapper would give other lazy bits than eager does."""
    given = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    outputs: Any = output_of(gm.graph).args[0]
    made: list[Any] = [
        n.meta.get("example_value") if isinstance(n, Node) else None for n in outputs
    ]
    if any(
        i is not None and _loses_bits(given[i], x)
        for x, i in zip(made, _owners(made, given), strict=True)
    ):
        raise Unsupported(
            "a result that is a lazily conjugated or negated view of an input",
            hint="return result.resolve_conj()",
        )
    return views_of_inputs(made, given)


def input_views(
    meta: Any, dynamo: Mapping[int, InputView], inputs: Sequence[Any]
) -> dict[int, InputView]:
    """The outputs of an AOTAutograd graph that eager makes as views of inputs. meta: its metadata,
    of a graph whose inputs are the user's; dynamo: the same of Dynamo's graph. Raises Unsupported
    for one to which AOTAutograd's wrapper would give another gradient than eager does."""
    first = meta.num_mutated_inp_runtime_indices  # before the results come new values of inputs
    found = {}
    for k, info in enumerate(meta.output_info):
        kind, view = info.output_type.name, dynamo.get(k)
        if (
            kind in ("alias_of_input", "is_input")
            and view is not None
            and view.input == info.base_idx
        ):
            found[first + k] = replace(view, whole=kind == "is_input")
            again = kind == "is_input" or _repeats_steps(info)
            if info.requires_grad and not again and repeats_memory(inputs[view.input]):
                raise Unsupported(
                    "a result that lies in an input whose elements share memory, at a place that "
                    "varies",
                    hint="return result.clone()",
                )
    return found


Argument = tuple[bool, int, int]
"""(whether it is written, the first of those that share its storage, its offset there, or -1 where
that varies or it is the only one)."""


def shared_arguments(
    given: Sequence[Any], written: Sequence[bool], has_bases: bool
) -> list[Argument]:
    """What the arguments of Dynamo's graph are to those that share memory while they are traced.
    AOTAutograd looks after these, if it joins any (has_bases), as long as they lie where they did:
    else all count as apart."""
    keys = [
        compat.tracing.storage_of(x) if has_bases and _is_dense(x) else k
        for k, x in enumerate(given)
    ]
    first: dict[object, int] = {}
    firsts = [first.setdefault(key, k) for k, key in enumerate(keys)]
    offsets = [
        x.storage_offset() if firsts.count(f) > 1 else -1
        for x, f in zip(given, firsts, strict=True)
    ]
    return [
        (w, f, at if isinstance(at, int) else -1)
        for w, f, at in zip(written, firsts, offsets, strict=True)
    ]


def check_bases(graph: GraphModule, meta: Any) -> None:
    """Raises Unsupported for a result that lies in an input that AOTAutograd replaced by a base,
    the memory that it shares with an input that is written to: AOTAutograd's wrapper repeats on the
    base the steps that led from the input to the result."""
    inputs = graph.graph.find_nodes(op="placeholder")
    aliases = [i for i in meta.output_info if i.output_type.name in ("alias_of_input", "is_input")]
    if any(compat.autograd.is_base(inputs[i.base_idx]) for i in aliases):
        raise Unsupported(
            "a result that lies in inputs that share memory, one of which is written to",
            hint="return result.clone()",
        )


def _repeats_steps(info: Any) -> bool:
    """Whether AOTAutograd's wrapper makes a result by the steps to it that were traced: none of
    them varies."""
    steps = info.view_meta_sequence
    return steps is not None and not any(step.has_symbolic_inputs for step in steps.sequence)


def views_of_inputs(results: Sequence[Any], inputs: Sequence[Any]) -> dict[int, InputView]:
    """The results that are inputs or views of them that are read alike, while their function is
    traced."""
    found = {}
    for k, (x, base) in enumerate(zip(results, _owners(results, inputs), strict=True)):
        if base is not None and same_bits(inputs[base], x):
            found[k] = InputView(
                base, tuple(x.shape), tuple(x.stride()), x.storage_offset(), x is inputs[base]
            )
    return found


def _loses_bits(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view with other lazy bits than its base is made anew from sizes and strides, which
    do not tell them: where the steps to it cannot be repeated."""
    layout = (*view.shape, *view.stride(), view.storage_offset())
    varies = any(isinstance(n, torch.SymInt) for n in layout)
    return not same_bits(base, view) and (varies or base.dtype != view.dtype)


def _owners(results: Sequence[Any], inputs: Sequence[Any]) -> list[int | None]:
    """The input in whose memory each result lies."""
    owners = {
        compat.tracing.storage_of(x): k
        for k, x in reversed(list(enumerate(inputs)))
        if _is_dense(x)
    }
    return [owners.get(compat.tracing.storage_of(x)) if _is_dense(x) else None for x in results]


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def results_of(graph: GraphModule, views: Mapping[int, InputView]) -> list[Result]:
    """What the user's results are made from; nothing if no result is a view of an input. graph: as
    it was traced."""
    inputs = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    outputs: Any = output_of(graph.graph).args[0]
    results: list[Result] = []
    for k, node in enumerate(outputs):
        base = inputs[views[k].input] if k in views else None
        if base is None or views[k].whole or not same_bits(base, node.meta["val"]):
            results.append(("program",))
        else:
            results.append(("view", views[k].input, True, offset_in(base, node, views[k].offset)))
    return results if any(r[0] == "view" for r in results) else []


def offset_in(base: torch.Tensor, node: Node, offset: int | torch.SymInt) -> int | None:
    """How far a view of base, a value of a graph, begins behind it, in elements, where that is a
    constant and both have one dtype."""
    if begins_anywhere(node) or base.dtype != node.meta["val"].dtype:
        return None
    behind = to_size(offset) - to_size(base.storage_offset())
    return behind if isinstance(behind, int) else None


def repeats_memory(x: torch.Tensor) -> bool:
    """Whether several elements of x may lie at one place. A view of such a tensor is made anew by
    its own steps only: made from sizes and strides, its gradient would be that of places and not of
    elements."""
    end: int | torch.SymInt = 0  # of what the dimensions so far span
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True), key=lambda pair: pair[0]):
        if size != 1:
            if stride <= end:
                return x.numel() != 0
            end = end + stride * (size - 1)
    return False


def view_like(base: torch.Tensor, like: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """A view of base where like, of another dtype, lies in its storage."""
    item, other = base.element_size(), like.element_size()
    step = max(item, other)
    n = base.untyped_storage().nbytes() // step * step // item
    flat = base.as_strided((n,), (1,), 0)
    if base.is_complex() and like.dtype == base.real.dtype:
        flat = torch.view_as_real(flat).view(-1)
    elif like.is_complex() and base.dtype == like.real.dtype:
        flat = torch.view_as_complex(flat.view(-1, 2))
    else:
        return (
            flat.view(like.dtype)
            .as_strided(like.shape, like.stride(), like.storage_offset())
            .detach()
        )
    view = flat.as_strided(like.shape, like.stride(), like.storage_offset())
    return view.detach() if view.requires_grad and not requires_grad else view


def same_bits(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether both are tensors of memory that is read alike: neither lazily negated nor conjugated
    on its own."""
    return base.layout == view.layout == torch.strided and (
        (view.is_conj(), view.is_neg()) == (base.is_conj(), base.is_neg())
    )
