"""Graphs, fake tensors and sizes while something is traced.

For torch 2.11 and 2.12, `backed_values` looks for an older name, which can go with these.
"""

from __future__ import annotations

import linecache
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import sympy
import torch
import torch._functorch.config as functorch_config
from torch._dynamo.utils import GmWrapper, counters, flatten_graph_inputs
from torch._functorch import aot_autograd as _torchs
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._library import custom_ops
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, GraphModule, Proxy, graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils.checkpoint import CheckpointPolicy

from plait.compat.decompositions import decomposition_table, whole_table
from plait.compat.loops import positions_found, rounds_counted
from plait.compat.shared import Shared
from plait.compat.user_kernels import own_analysis

P = ParamSpec("P")
T = TypeVar("T")
Compiler = Callable[..., Callable[..., Any]]


_canonical = symbolic_shapes._canonicalize_bool_expr_impl


def _canonical_or_known(expr: Any) -> Any:
    """Nothing is left of a tautology such as `n == 1 or n != 1`, which torch does not expect."""
    return expr if isinstance(expr, sympy.logic.boolalg.BooleanAtom) else _canonical(expr)


symbolic_shapes._canonicalize_bool_expr_impl = _canonical_or_known

MUST_SAVE, MUST_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
"""Values of meta["recompute"] that make the partitioner save a node for backward, or compute it
again there."""


def unwritten(root: torch.nn.Module, graph: Graph, name: str) -> GraphModule:
    """A graph's module whose Python is not written before somebody calls it. Of an operator that is
    named by a Python word (aten::random.from) it would be no Python."""
    return _LazyGraphModule(root, graph, name)


def write_graphs(module: torch.nn.Module) -> None:
    """The Python of each graph in a module is written, where that waits for a call, as of graphs
    that Dynamo gives: a call that is traced has its changes of attributes taken back."""
    for part in module.modules():
        _LazyGraphModule.force_recompile(part)  # type: ignore[arg-type]  # it looks at the class


is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether torch.func has wrapped a tensor, as for a gradient or a batch: it has no storage."""


def storage_of(x: torch.Tensor) -> int:
    """A number that says which storage a tensor lies in, or what torch.func has wrapped; one of its
    own for a tensor without strides."""
    while is_transformed(x):
        x = torch._C._functorch.get_unwrapped(x)
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else id(x)


@contextmanager
def untraced_operators() -> Iterator[None]:
    """Operators inside run on what they are given, while tracing is under way."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch._C._DisablePythonDispatcher():
        yield


@contextmanager
def transforms_ended() -> Iterator[None]:
    """Ends the transforms of torch.func (vmap, grad) that a graph which fails inside has begun."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):
        try:
            yield
        finally:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def hint_of(x: Any) -> Any:
    """The number that a symbolic size, float or bool has in the example; others unchanged. Symbols
    that nobody knows are 2 each."""
    if not isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return x
    if x.node.has_hint():
        return x.node.hint
    known = backed_values(x.node.shape_env)
    try:
        number = x.node.expr.xreplace({s: known.get(s, 2) for s in x.node.expr.free_symbols})
    except ZeroDivisionError:
        number = 2
    return x.node.pytype(number if getattr(number, "is_number", True) else 2)


DynamoGraph = GraphModule | GmWrapper  # the latter is what `flatten_inputs` makes of a graph


def flatten_inputs(
    gm: GraphModule,
    inputs: Sequence[Any],
    compile_flat: Callable[[DynamoGraph, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A callable of nested inputs. compile_flat gets a graph of flat ones and gives a callable of
    one list of them."""
    return flatten_graph_inputs(gm, inputs, compile_flat)


_aot: Any = _torchs
_followed: Callable[[], AbstractContextManager[Any]] = _aot.PhiloxStateTracker


def _followed_if_asked() -> AbstractContextManager[Any]:
    return _followed() if functorch_config.functionalize_rng_ops else nullcontext()


def _ask() -> None:
    _aot.PhiloxStateTracker = _followed_if_asked


def _follow() -> None:
    _aot.PhiloxStateTracker = _followed


few_states = Shared(_ask, _follow)
"""Inside, AOTAutograd makes tensors of random numbers' states, in 3 ms a graph, only for whoever
wants them as inputs of graphs: nobody else looks at them."""


def aot_compile(
    gm: DynamoGraph,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Callable[..., tuple[GraphModule, GraphModule]],
    whole: bool = False,
) -> Callable[..., Any]:
    """Runs AOTAutograd over one Dynamo graph with these compilers; the result takes Dynamo's
    arguments. whole: operators that have kernels in eager are not decomposed."""
    with own_analysis(), rounds_counted, few_states, positions_found(example_inputs):
        made: Callable[..., Any] = (
            aot_module_simplified(  # only keywords that every supported torch has
                gm,
                example_inputs,
                fw_compiler=forward,
                bw_compiler=backward,
                inference_compiler=inference,
                partition_fn=partition,
                decompositions=whole_table() if whole else decomposition_table(),
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


@lru_cache
def write_joint_graphs() -> None:
    """Joint graphs of scan and map have their code written anew. torch hands them to its own
    compiler there, which takes seconds to load and is never run; its CSE would load more of it."""
    home: Any = import_module("torch._higher_order_ops.partitioner")
    own, split = home.HopJointGraph._rename_phs, home.HopJointGraph.partition

    def renamed(joint: Any) -> None:
        vars(joint.joint_gm)["compile"] = joint.joint_gm.recompile
        own(joint)
        del vars(joint.joint_gm)["compile"]

    def partition(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(cse=False):
            return split(*args, **kwargs)

    home.HopJointGraph._rename_phs, home.HopJointGraph.partition = renamed, partition


def min_cut_partition(
    joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into forward and backward. torch's own CSE is off: it would import a
    whole compiler."""
    with functorch_config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def backed_values(shape_env: Any) -> dict[Any, Any]:
    """What the symbols of sizes are in the example inputs; the table itself."""
    # The older name.
    named = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    found: dict[Any, Any] = getattr(shape_env, named)
    return found


def size_hints(shape_env: Any) -> dict[str, int]:
    """The sizes that symbols have in the example inputs, or that the user gave as hints."""
    known = {**backed_values(shape_env), **getattr(shape_env, "var_to_hint_override", {})}
    return {s.name: int(v) for s, v in known.items() if isinstance(v, int | sympy.Integer)}


@contextmanager
def beside(x: torch.Tensor) -> Iterator[None]:
    """Inside, operators make fake tensors like x, a fake tensor. torch does not remember them: its
    key takes longer than the result, above all where the sizes are symbols."""
    assert isinstance(x, fake_tensor.FakeTensor), x
    with x.fake_mode as mode, fake_tensor.disable_fake_tensor_cache(mode):
        yield


class Fakes:
    """Fake tensors whose sizes are symbols of our own names. What is found out about them binds
    nobody."""

    def __init__(self) -> None:
        self.env = symbolic_shapes.ShapeEnv()
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


def triton_kernel(kernel: int, constants: int) -> tuple[Any, dict[str, Any]]:
    """The kernel and the constant arguments of these numbers in that table."""
    _, table = triton_operator()
    return table.get_kernel(kernel), dict(table.get_constant_args(constants))


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


def name_modules(paths: Mapping[int, str]) -> None:
    """From now on each operator of the graph that is being traced, if any is, notes the modules in
    whose calls it is, as Dynamo notes them. torch itself knows no parts but of the traced module,
    and fails after a call that raises what its caller catches. paths: of modules, by id."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", SimpleNamespace())

    def call(module: Any, forward: Callable[..., T], args: Any, kwargs: Any) -> T:
        outer = tracer.module_stack
        if (path := paths.get(id(module))) is None:
            return forward(*args, **kwargs)
        tracer.module_stack = OrderedDict(outer, **{path: (path, type(module))})
        try:
            return forward(*args, **kwargs)
        finally:
            tracer.module_stack = outer

    tracer.call_module = call


def source_of(placeholder: torch.fx.Node) -> str:
    """Where Dynamo finds an argument, as Python: `L['self']._modules['head']._parameters['bias']`;
    "" where it is no argument. The name of a source is a method before torch 2.13."""
    name: str | Callable[[], str] = getattr(
        getattr(placeholder.meta.get("grapharg"), "source", None), "name", ""
    )
    return name if isinstance(name, str) else name()


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


def trace_values(
    fn: Callable[..., Any], values: Sequence[Any], spelled: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """The graph of fn(*values), which are fake tensors of one mode and sizes, in the operators that
    captured graphs are made of. spelled: decompositions besides."""
    with untraced_operators():
        return make_fx(fn, {**decomposition_table(), **spelled}, "symbolic")(*values)


_OF_GRAPHS: tuple[Any, ...] = (
    torch.ops.higher_order.cond,
    torch.ops.higher_order.while_loop,
    torch.ops.higher_order.while_loop_stack_output,
)
_calls: dict[Any, Any] = {type(op): type(op).__call__ for op in _OF_GRAPHS}


def _call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    traced = any(isinstance(x, Proxy) for x in tree_leaves((args, kwargs)))
    known = HigherOrderOperator.__call__ if traced else _calls[type(op)]
    return known(op, *args, **kwargs)


def _set_calls(calls: Mapping[Any, Any]) -> None:
    for kind, call in calls.items():
        kind.__call__ = call


proxies_for_graphs = Shared(
    lambda: _set_calls(dict.fromkeys(_calls, _call)), lambda: _set_calls(_calls)
)
"""While torch.fx makes a graph of code: `cond` and loops, which ask first whether they are given
tensors and numbers, take its proxies too."""
