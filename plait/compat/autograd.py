"""What AOTAutograd knows of a graph: its wrapper's work, and the pieces of training.

For torch 2.11 and 2.12, `dynamic_marks` names another attribute, which can go with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._dynamo import compiled_autograd
from torch._functorch._aot_autograd import runtime_wrappers
from torch._guards import TracingContext
from torch.fx import GraphModule


def forward_metadata() -> Any:
    """AOTAutograd's facts about the graph being compiled (ViewAndMutationMeta), or None outside
    AOTAutograd."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def take_donated(meta: Any) -> tuple[int, ...]:
    """Positions of backward inputs that nobody reads after the last backward pass. AOTAutograd
    forgets them: it would refuse every pass before."""
    found: list[int] = getattr(meta, "bw_donated_idxs", None) or []
    donated = tuple(found)
    found.clear()
    return donated


def keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread leaves saved tensors for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_tangent(placeholder: Any) -> bool:
    """Whether an input of a backward graph is the gradient of a result."""
    return str(placeholder.target).startswith("tangents")


def is_base(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a graph stands for several of the caller's, which share memory."""
    bases = ("SyntheticBaseAOTInput", "ViewBaseAOTInput")
    return type(placeholder.meta.get("desc")).__name__ in bases


_WORDS: dict[str, tuple[str, str]] = {
    "ParamAOTInput": ("{}", "target"),
    "BufferAOTInput": ("{}", "target"),
    "TangentAOTInput": ("gradient of {}", "output"),
    "GradAOTOutput": ("gradient of {}", "grad_of"),
    "InputMutationAOTOutput": ("new value of {}", "mutated_input"),
    "ViewBaseAOTInput": ("memory of {}", "base_of"),
    "SyntheticBaseAOTInput": ("memory of {}", "base_of"),
    "IntermediateBaseAOTOutput": ("memory of {}", "base_of"),
    "SubclassGetAttrAOTInput": ("{}, inside", "base"),
    "SubclassGetAttrAOTOutput": ("{}, inside", "base"),
    "PlainAOTOutput": ("result {}", "idx"),
    "SavedForBackwardsAOTOutput": ("saved for the backward pass: {}", "idx"),
}
"""By AOTAutograd's description of an input or result: the words, and which of its fields they are
about: a name, a number or another description."""


def described(desc: Any, arguments: Sequence[str]) -> str:
    """AOTAutograd's description of an input or result of a graph in words; "" where it has none.
    arguments: names of what the graph was made for."""
    kind = type(desc).__name__
    if kind == "PlainAOTInput":
        return arguments[desc.idx] if desc.idx < len(arguments) else ""
    if kind not in _WORDS:
        return ""
    words, field = _WORDS[kind]
    about = getattr(desc, field)
    told = str(about) if isinstance(about, str | int) else described(about, arguments)
    return words.format(told) if told else ""


def bumped_input_indices(meta: Any) -> tuple[int, ...]:
    """Inputs mutated inside the graph whose autograd version must go up."""
    return tuple(meta.mutated_graph_handled_indices_seen_by_autograd)


def inputs_changed_after(joint: GraphModule) -> list[torch.fx.Node]:
    """The inputs of a joint graph that AOTAutograd's wrapper writes to, after the forward graph."""
    *inputs, output = (n for n in joint.graph.nodes if n.op in ("placeholder", "output"))
    written = [d.mutated_input for d in output.meta.get("desc", ()) if hasattr(d, "mutated_input")]
    return [n for n in inputs if n.meta.get("desc") in written]


def wrapper_reason(gm: GraphModule, meta: Any) -> str:
    """Why this inference graph needs AOTAutograd's runtime wrapper around it, or "" if it needs
    none."""
    if meta is None:
        return "no metadata"
    if _fake_at_first():
        return "the first call is fake"
    return _lasting_reason(gm, meta)


def _fake_at_first() -> bool:
    """Whether what a graph becomes is called with fake tensors first (by DDPOptimizer), which
    AOTAutograd's callable expects."""
    context = TracingContext.try_get()
    return context is not None and bool(context.fakify_first_call)


def _lasting_reason(gm: GraphModule, meta: Any) -> str:
    """A reason for the wrapper at every call."""
    counts = (
        ("num_mutated_inp_runtime_indices", "an input mutation is applied outside the graph"),
        ("num_intermediate_bases", "outputs are views of an intermediate"),
        ("tokens", "effect tokens"),
        ("is_rng_op_functionalized", "functionalised random state"),
    )
    for name, reason in counts:
        if getattr(meta, name):
            return reason
    if meta.grad_enabled_mutation is not None:
        return "the graph switches grad mode"
    ends = (n.meta.get("desc") for n in gm.graph.nodes if n.op in ("placeholder", "output"))
    if any(
        type(d).__name__.startswith("Subclass") for desc in ends for d in pytree.tree_leaves(desc)
    ):
        return "tensor subclasses"
    known = {"non_alias", "unsafe_view_alias", "custom_function_view", "alias_of_input", "is_input"}
    if any(info.output_type.name not in known for info in meta.output_info):
        return "an output is a view of an intermediate"
    return ""


Mark = tuple[int, str, frozenset[int]]
"""(result, attribute of its tensor, the dimensions to put there)."""


@dataclass(frozen=True)
class Epilogue:
    """What AOTAutograd's wrapper does after an inference graph without wrapper_reason.

    results: for each output ("program",), ("input", argument) or ("view", argument, requires_grad);
    the caller appends the view's offset.
    """

    results: tuple[tuple[Any, ...], ...]
    marks: tuple[Mark, ...]

    @property
    def trivial(self) -> bool:
        """Whether there is nothing to do."""
        return not self.marks and all(r == ("program",) for r in self.results)


def epilogue(meta: Any) -> Epilogue:
    """Reads it from AOTAutograd's metadata."""
    results: list[tuple[Any, ...]] = []
    for info in meta.output_info:
        kind = info.output_type.name
        if kind == "is_input":
            results.append(("input", info.base_idx))
        elif kind == "alias_of_input":
            results.append(("view", info.base_idx, bool(info.requires_grad)))
        else:
            results.append(("program",))
    return Epilogue(tuple(results), dynamic_marks(meta))


def dynamic_marks(meta: Any) -> tuple[Mark, ...]:
    """The dynamic dimensions of results, as Dynamo wants to find them on the tensors that the next
    graph gets."""
    attribute = "_dynamo_propagated_dynamic_indices"
    if not hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices"):
        attribute = "_dynamo_weak_dynamic_indices"  # before torch 2.13
    return tuple(
        (i, attribute, frozenset(info.dynamic_dims))
        for i, info in enumerate(meta.output_info)
        if info.dynamic_dims
    )


TangentLayout = str | tuple[tuple[int, ...], tuple[int, ...]]
"""How a gradient lies in memory: the name of a memory format, or sizes and strides."""


@dataclass(frozen=True)
class TrainingFacts:
    """How the outputs of a forward graph (results, saved tensors, saved sizes) are told apart, and
    what its backward graph takes.

    differentiable: one flag for each result. tangents: one layout for each result that has a
    gradient.
    wants_grad: the inputs that get a gradient. nondeterministic: deterministic algorithms were off.
    marks: as in Epilogue."""

    differentiable: tuple[bool, ...]
    n_saved: int
    n_sizes: int
    tangents: tuple[TangentLayout, ...]
    wants_grad: tuple[int, ...]
    nondeterministic: bool
    marks: tuple[Mark, ...]


def training_reason(gm: GraphModule, meta: Any) -> str:
    """Why this training graph needs AOTAutograd's autograd function, or "" if it needs none."""
    if meta is None:
        return "no metadata"
    # Fake tensors are no plain ones: the native node hands a call with one to AOTAutograd's.
    given = (n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
    if _fake_at_first() and not any(isinstance(v, torch.Tensor) for v in given):
        return "the first call is fake"
    if reason := _lasting_reason(gm, meta):
        return reason
    counts = (
        ("num_outputs_aliased", "an output is an input or a view of one"),
        ("num_backward_tokens", "effect tokens in the backward pass"),
        ("num_graphsafe_rng_states", "random states of a graph"),
        ("num_opaque_objects_saved_for_bw", "objects are saved for the backward pass"),
        ("num_tensors_saved_with_no_vc_check", "tensors are saved without a version check"),
        ("indices_of_inputs_that_requires_grad_with_mutations_in_bw", "backward mutates an input"),
        ("act_input_indices", "inputs that a collective has yet to fill"),
    )
    for name, why in counts:
        if getattr(meta, name, None):
            return why
    if any(meta.input_info[i].requires_grad for i in meta.mutated_graph_handled_indices):
        return "an input that wants a gradient is mutated"
    for info in meta.output_info:
        if info.output_type.name not in ("non_alias", "unsafe_view_alias"):
            return "an output is a view of an autograd function's"
        if info.requires_grad != getattr(info, "requires_grad_for_backward", info.requires_grad):
            return "an output was made under no_grad of something with a gradient"
    if torch._dynamo.config.compiled_autograd:
        return "compiled autograd"
    disabled = getattr(runtime_wrappers, "_should_disable_saved_tensors_hooks", None)
    if disabled is not None and disabled():
        return "saved tensors hooks are part of the graph"
    return ""


def training_facts(meta: Any, n_outputs: int, has_gradient: Sequence[bool]) -> TrainingFacts:
    """What AOTAutograd knows of a graph without training_reason.

    n_outputs: of the forward graph. has_gradient: for each output of the backward graph, whether it
    is no None.
    """
    return TrainingFacts(
        differentiable=tuple(bool(o.requires_grad) for o in meta.output_info),
        n_saved=n_outputs - meta.num_forward - meta.num_symints_saved_for_bw,
        n_sizes=meta.num_symints_saved_for_bw,
        tangents=tuple(_tangent_layout(t.memory_format) for t in meta.subclass_tangent_meta),
        wants_grad=tuple(
            i
            for i, (info, has) in enumerate(zip(meta.input_info, has_gradient, strict=True))
            if has and info.requires_grad
        ),
        nondeterministic=meta.deterministic is False,
        marks=dynamic_marks(meta),
    )


def _tangent_layout(want: Any) -> TangentLayout:
    if want.memory_format is not None:
        return str(want.memory_format).removeprefix("torch.")
    return tuple(int(s) for s in want.size), tuple(int(s) for s in want.stride)


def autograd_switches() -> tuple[tuple[dict[str, Any], str], ...]:
    """Module variables (dict, name) that are true while a call has to go through AOTAutograd's
    autograd function."""
    scope = vars(compiled_autograd)
    names = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    return tuple((scope, name) for name in names if name in scope)


def saves_by_hooks() -> bool:
    """Whether hooks of this thread take what is saved for backward passes: a checkpoint's, say."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
