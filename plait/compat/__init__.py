"""The only room that knows torch versions (2.11 to 2.13): every private or moving torch name is met
here.

Each function says in plait's own terms what is needed and finds it in whichever torch is installed.
Nothing here compiles anything; nothing else in plait compares versions or reads fields that differ
between them.
"""

from __future__ import annotations

import linecache
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

import sympy
import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch._dynamo import compiled_autograd, graph_bytecode_inputs
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import GmWrapper, counters, flatten_graph_inputs
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._library import custom_ops
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, GraphModule, graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils.checkpoint import CheckpointPolicy

from plait.errors import PlaitError

P = ParamSpec("P")
T = TypeVar("T")

Compiler = Callable[..., Callable[..., Any]]

MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
"""Values of meta["recompute"] that make the partitioner save a node for backward, or compute it
again there."""

CALLERS_STREAM: int | None = getattr(graph_bytecode_inputs, "CURRENT_STREAM_INDEX", None)
"""The caller's stream by number, as graphs name streams. None in torch 2.11, whose graphs lose
waits between them."""
BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"
_streams: dict[int, object] = {}


def keep_streams() -> None:
    """What graphs name by number, streams and events, lives as long as the process where torch
    leaves weak references to dead ones dangling (its pull request 183403): Dynamo has such
    references, and crashes when it drops one."""
    if not BEFORE_2_13:
        return
    found = (known() for known in graph_bytecode_inputs.index_to_external_object_weakref.values())
    _streams.update((id(x), x) for x in found if x is not None)


# ------------------------------------------------------------------------------------------- errors
class _ThroughDynamo(ShortenTraceback):
    """Mixed into a PlaitError so that torch.compile raises it as it is instead of wrapping it."""

    def __init__(self, error: PlaitError) -> None:
        Exception.__init__(self, str(error))
        self.first_useful_frame = None
        self.what, self.where, self.hint = error.what, error.where, error.hint
        self.real_stack = None  # what torch's own errors carry; None: nothing to show


@lru_cache(maxsize=32)
def _passing(kind: Any) -> type[_ThroughDynamo]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_ThroughDynamo, kind), names)


def through_dynamo(error: PlaitError) -> Exception:
    """The same error, of a subclass of its class with the same name, that torch.compile does not
    wrap."""
    kind: Any = type(error)
    return _passing(kind)(error)


# -------------------------------------------------------------------------------------- AOTAutograd
def unwritten(root: torch.nn.Module, graph: Graph, name: str) -> GraphModule:
    """A graph's module whose Python is not written before somebody calls it. Of an operator that is
    named by a Python word (aten::random.from) it would be no Python."""
    return _LazyGraphModule(root, graph, name)


@lru_cache(maxsize=1)
def kept_whole() -> tuple[Any, ...]:
    """Operators whose decomposition loses: wrong gradients of an attention kernel and of NaNs,
    other integers of linspace, no error or another one, gathers for borders, a choice for a row put
    into a tensor, an index taken for a number, a square that overflows, and roundings in between.
    With that of alias_copy and of detach together, torch takes results of `scan` for its inputs."""
    names = """
        _scaled_dot_product_flash_attention_for_cpu.default linspace.default std_mean.correction
        addcmul.default linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor
        take.default bernoulli.default max_unpool2d.default max_unpool3d.default index_add.default
        index_copy.default index_fill.int_Scalar index_fill.int_Tensor nll_loss_forward.default
        nll_loss2d_forward.default nll_loss_backward.default nll_loss2d_backward.default
        roll.default smooth_l1_loss_backward.default select_scatter.default addcdiv.default
        hardtanh_backward.default hardswish_backward.default elu_backward.default threshold.default
        reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default std.correction
        replication_pad1d.default replication_pad2d.default replication_pad3d.default
        alias_copy.default native_group_norm_backward.default _softmax_backward_data.default
        soft_margin_loss_backward.default logit_backward.default
    """
    packets = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in packets)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Of operators that are not ATen's: who registers an operator puts its decomposition here."""

CHECKS: dict[Any, Callable[[Any], Callable[..., Any]]] = {}
"""Of operators whose operands are looked at first: wraps the decomposition, or the None that stands
for no one."""

is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether torch.func has wrapped a tensor, as for a gradient or a batch: it has no storage."""


def storage_of(x: torch.Tensor) -> int:
    """A number that says which storage a tensor lies in; one of its own for a tensor without
    strides."""
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else id(x)


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Core ATen decompositions, less those of `kept_whole`, and `DECOMPOSITIONS`.

    The public table adds 520 composite operators, which tracing decomposes anyway, and takes 80 ms
    to build.
    """
    table = dict(torch._decomp._core_aten_decompositions_post_autograd()) | DECOMPOSITIONS
    for op in kept_whole():
        table.pop(op, None)
    table[torch.ops.aten.pow.Tensor_Scalar] = _bool_power
    norm = torch.ops.aten.native_layer_norm_backward.default
    table[norm] = partial(_layer_norm_backward, table[norm])
    return table | {op: around(table.get(op)) for op, around in CHECKS.items()}


@contextmanager
def untraced_operators() -> Iterator[None]:
    """Operators inside run on what they are given, while tracing is under way."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch._C._DisablePythonDispatcher():
        yield


def hint_of(x: Any) -> Any:
    """The number that a symbolic size, float or bool has in the example, 2 where nobody knows;
    others unchanged."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    number = x.node.expr if x.node.expr.is_number else 2
    return x.node.hint if x.node.has_hint() else x.node.pytype(number)


def _layer_norm_backward(run: Callable[..., Any], grad: torch.Tensor, *given: Any) -> Any:
    """run: torch's own, which divides a reciprocal deviation of half precision by the number of
    elements and rounds. Eager does so in float32."""
    x, shape, mean, rstd, *others = given
    wide = torch.promote_types(x.dtype, torch.float32)
    return run(grad, x, shape, mean.to(wide), rstd.to(wide), *others)


def _bool_power(x: torch.Tensor, exponent: Any) -> Any:
    """Traced, torch's own result of bool ** bool is int64; eager's is bool."""
    if x.dtype != torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return x.clone() if exponent else torch.ones_like(x)


def fused_multiply_add() -> tuple[Any, ...]:
    """The primitive fma(a, b, c) = a * b + c that Dynamo makes of addcmul_ and addcdiv_, in
    versions that have it."""
    packet = getattr(torch.ops.prims, "fma", None)
    return () if packet is None else (packet.default,)


DynamoGraph = GraphModule | GmWrapper  # the latter is what `flatten_inputs` makes of a graph


def flatten_inputs(
    gm: GraphModule,
    inputs: Sequence[Any],
    compile_flat: Callable[[DynamoGraph, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A callable of nested inputs. compile_flat gets a graph of flat ones and gives a callable of
    one list of them."""
    return flatten_graph_inputs(gm, inputs, compile_flat)


def aot_compile(
    gm: DynamoGraph,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Callable[..., tuple[GraphModule, GraphModule]],
) -> Callable[..., Any]:
    """Runs AOTAutograd over one Dynamo graph with these compilers; the result takes Dynamo's
    arguments."""
    made: Callable[..., Any] = (
        aot_module_simplified(  # only keywords that every supported torch has
            gm,
            example_inputs,
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=decomposition_table(),
            keep_inference_input_mutations=True,
        )
    )
    # torch's DDPOptimizer reads off this counter that the first call of what it gets is one with
    # fake tensors.
    counters["aot_autograd"]["total"] += 1
    return made


@lru_cache
def see_other_types(view_like: Callable[..., torch.Tensor]) -> None:
    """Views of another dtype that AOTAutograd's wrapper makes come from view_like: torch mixes up
    their strides."""
    names, own = vars(runtime_wrappers), runtime_wrappers.__dict__["gen_alias_from_base"]
    names["gen_alias_from_base"] = lambda base, like, grad, *rest, **more: (
        own(base, like, grad, *rest, **more)
        if base.dtype == like.dtype
        else view_like(base, like, grad)
    )


def min_cut_partition(
    joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into forward and backward. torch's own CSE is off: it would import a
    whole compiler."""
    with functorch_config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


# -------------------------------------------------------------------------------------------- sizes
def backed_values(shape_env: Any) -> dict[Any, Any]:
    """What the symbols of sizes are in the example inputs; the table itself."""
    named = (
        "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    )  # the older name
    found: dict[Any, Any] = getattr(shape_env, named)
    return found


def size_hints(shape_env: Any) -> dict[str, int]:
    """The sizes that symbols have in the example inputs, or that the user gave as hints."""
    known = {**backed_values(shape_env), **getattr(shape_env, "var_to_hint_override", {})}
    return {s.name: int(v) for s, v in known.items() if isinstance(v, int | sympy.Integer)}


class Fakes:
    """Fake tensors whose sizes are symbols of our own names. What is found out about them binds
    nobody."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = fake_tensor.FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)

    def symbol(self, name: str, lo: float, hi: float, hint: int | None) -> Any:
        """A SymInt with lo <= value <= hi; hint: what it was in the example, None if nobody
        knows."""
        symbol = sympy.Symbol(
            name, integer=True, positive=lo > 0 or None, nonnegative=lo >= 0 or None
        )
        lower, upper = (x if math.isfinite(x) else (int_oo if x > 0 else -int_oo) for x in (lo, hi))
        self.env.var_to_range[symbol] = ValueRanges(lower, upper)
        if hint is not None:
            backed_values(self.env)[symbol] = sympy.Integer(hint)
        return self.env.create_symintnode(symbol, hint=hint)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Operators inside work on fake tensors."""
        with _disable_current_modes(), self.mode, self.env.suppress_guards():
            yield


def drop_text_with(module: GraphModule) -> None:
    """Lets go of a graph's text, which torch.fx keeps for tracebacks, when the graph goes."""
    filename = type(module).forward.__code__.co_filename
    for kept in (linecache.cache, graph_module._loader.eval_cache):
        weakref.finalize(module, kept.pop, filename, None).atexit = False


def triton_operator() -> tuple[Any, Any]:
    """PyTorch's operator that launches a Triton kernel, and the table that has kernels and constant
    arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    return triton_kernel_wrapper_mutation, kernel_side_table


# ----------------------------------------------------------------------------------------- metadata
def forward_metadata() -> Any:
    """AOTAutograd's facts about the graph being compiled (ViewAndMutationMeta), or None outside
    AOTAutograd."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def donated_input_indices(meta: Any) -> tuple[int, ...]:
    """Positions of backward inputs that nobody reads after the call."""
    return tuple(getattr(meta, "bw_donated_idxs", None) or ())


def is_tangent(placeholder: Any) -> bool:
    """Whether an input of a backward graph is the gradient of a result."""
    return str(placeholder.target).startswith("tangents")


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
    context = TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        return "the first call is fake"
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


# ----------------------------------------------------------------------------------------- training
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
    if reason := wrapper_reason(gm, meta):
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


def resume_tracing() -> Callable[[], AbstractContextManager[object]]:
    """Remembers the compilation that is under way; the result makes contexts that go on with it,
    later and in any thread."""
    traced, compiled = TracingContext.try_get(), CompileContext.try_get()

    @contextmanager
    def resumed() -> Iterator[None]:
        with (
            tracing(traced),
            compile_context(compiled),
            torch.no_grad(),
            torch._C._DisableAutocast(),
        ):
            yield

    return resumed


def is_stand_in(x: torch.Tensor) -> bool:
    """Whether x stands for a tensor while something is traced."""
    return isinstance(x, (fake_tensor.FakeTensor, FunctionalTensor))


def is_moved(x: torch.Tensor) -> bool:
    """Whether a tensor that is traced functionally was written, and its value lies otherwise than
    it does: views of it then tell how they lie in the value."""
    if not isinstance(x, FunctionalTensor):
        return False
    torch._sync(x)  # type: ignore[attr-defined, no-untyped-call]
    value: torch.Tensor = torch._from_functional_tensor(x.elem)
    return _place(value) != _place(x)


def _place(x: torch.Tensor) -> list[str]:
    return [str(n) for n in (*x.stride(), x.storage_offset())]


def untraced(fn: Callable[P, T]) -> Callable[P, T]:
    """fn, unseen by Dynamo: a backward pass that a compiled function runs itself after a graph
    break calls the compiler while Dynamo looks at every frame."""
    return torch._dynamo.disable(fn)  # type: ignore[no-any-return, no-untyped-call]


def operator_home(name: str) -> str:
    """The file that defines a custom operator, as far as torch tells."""
    made = custom_ops.OPDEFS.get(name)
    return "" if made is None else str(made._init_fn.__code__.co_filename)
