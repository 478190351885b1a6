"""The only file that knows torch versions (2.11 to 2.13): every private or moving torch name is met here.

Each function says in plait's own terms what is needed and finds it in whichever torch is installed. Nothing here
compiles anything; nothing else in plait compares versions or reads fields that differ between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.exc import ShortenTraceback
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from plait.errors import InternalError, PlaitError, Unsupported, UserError

Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

MUST_SAVE = CheckpointPolicy.MUST_SAVE
"""Value of meta["recompute"] that makes the partitioner save a node for backward."""


# ---------------------------------------------------------------------------------------------- errors
class _ThroughDynamo(ShortenTraceback):
    """Mixed into a PlaitError so that torch.compile raises it as it is instead of wrapping it."""

    def __init__(self, error: PlaitError) -> None:
        Exception.__init__(self, str(error))
        self.first_useful_frame = None
        self.what, self.where, self.hint = error.what, error.where, error.hint
        self.real_stack = None  # what torch's own errors carry; None: nothing to show


class _UserErrorThroughDynamo(_ThroughDynamo, UserError):
    pass


class _UnsupportedThroughDynamo(_ThroughDynamo, Unsupported):
    pass


class _InternalErrorThroughDynamo(_ThroughDynamo, InternalError):
    pass


def through_dynamo(error: PlaitError) -> Exception:
    """The same error, still a UserError, Unsupported or InternalError, that torch.compile does not wrap."""
    if isinstance(error, UserError):
        return _UserErrorThroughDynamo(error)
    if isinstance(error, Unsupported):
        return _UnsupportedThroughDynamo(error)
    return _InternalErrorThroughDynamo(error)


# ---------------------------------------------------------------------------------------------- AOTAutograd
@lru_cache(maxsize=1)
def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """Core ATen decompositions, less those that lose: an attention kernel whose decomposed gradient is wrong."""
    table = dict(torch._decomp.core_aten_decompositions())
    for op in (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,):
        table.pop(op, None)
    return table


def aot_compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Callable[..., tuple[GraphModule, GraphModule]],
) -> Callable[..., Any]:
    """Runs AOTAutograd over one Dynamo graph with these compilers; the result takes Dynamo's arguments."""
    return aot_module_simplified(  # only keywords that every supported torch has
        gm,
        example_inputs,
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decomposition_table(),
        keep_inference_input_mutations=True,
    )


def min_cut_partition(
    joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into forward and backward. torch's own CSE is off: it would import a whole compiler."""
    with functorch_config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


# ---------------------------------------------------------------------------------------------- metadata
def forward_metadata() -> Any:
    """AOTAutograd's facts about the graph being compiled (ViewAndMutationMeta), or None outside AOTAutograd."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def static_input_indices(meta: Any) -> tuple[int, ...]:
    """Positions of inputs whose memory never moves: parameters and buffers."""
    return tuple(getattr(meta, "static_input_indices", None) or ())


def donated_input_indices(meta: Any) -> tuple[int, ...]:
    """Positions of backward inputs that nobody reads after the call."""
    return tuple(getattr(meta, "bw_donated_idxs", None) or ())


def bumped_input_indices(meta: Any) -> tuple[int, ...]:
    """Inputs mutated inside the graph whose autograd version must go up."""
    return tuple(meta.mutated_graph_handled_indices_seen_by_autograd)


def wrapper_reason(meta: Any) -> str:
    """Why this inference graph needs AOTAutograd's runtime wrapper around it, or "" if it needs none."""
    if meta is None:
        return "no metadata"
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        return "the first call is fake"
    counts = (
        ("num_mutated_inp_runtime_indices", "an input mutation is applied outside the graph"),
        ("num_outputs_aliased", "an output aliases an input or an intermediate"),
        ("num_intermediate_bases", "outputs are views of an intermediate"),
        ("tokens", "effect tokens"),
        ("is_rng_op_functionalized", "functionalised random state"),
        ("dynamic_outputs", "outputs carry marks of dynamic dimensions"),
    )
    for name, reason in counts:
        if getattr(meta, name):
            return reason
    if meta.grad_enabled_mutation is not None:
        return "the graph switches grad mode"
    for info in (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta):
        if type(info).__name__ != "PlainTensorMeta":
            return "tensor subclasses"
    return ""
