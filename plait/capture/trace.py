"""Traces a module with torch's export machinery into one functional graph whose inputs are state
and tensor leaves.

Knows nothing of compiling: it takes a module, example arguments and a dynamic_shapes specification
and gives a graph, the facts about its sizes (ranges, extra conditions), and how arguments flatten
and results are put together.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from plait.capture.dict_order import has_orders, in_another_order, loose_keywords
from plait.capture.early_kernels import early_kernels_of
from plait.capture.flat_module import REGISTER, Exported, FlatModule, is_python, name_of, type_name
from plait.capture.least_sizes import with_least_sizes
from plait.capture.plain_tensors import special_kind
from plait.capture.python_state import Change, settled
from plait.capture.sizes_left_out import same_at, same_layout, same_views
from plait.capture.trace_errors import tell
from plait.compat.export import ExportEnv
from plait.compat.size_facts import SizeFacts, allow, left_out, size_facts, together, told_from_one
from plait.config import Config
from plait.errors import Unsupported, UserError, warn_once
from plait.graph.captured import InputView
from plait.graph.edit import aten, drop_tokens, output_of
from plait.runtime.objects import opened
from plait.runtime.signature import VALUE, Signature, is_constant


@dataclass(frozen=True)
class Traced:
    """A traced program.

    graph: its inputs are the tensors of state, then one for each VALUE in signature.leaves; a
        trailing copy_ writes each mutated input back.
    mutated: the positions of these.
    state: parameters and buffers, by name; of wrappers, the plain tensors inside.
    fakes: the fake tensors and symbolic ints of the VALUEs.
    signature: how arguments flatten and results are put together.
    sizes: what is known of the sizes of inputs.
    views: the results that are inputs or views of them.
    """

    graph: GraphModule
    mutated: tuple[int, ...]
    state: dict[str, torch.Tensor]
    fakes: tuple[torch.Tensor | torch.SymInt, ...]
    signature: Signature
    sizes: SizeFacts
    views: Mapping[int, InputView]


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    who: str,
    cfg: Config,
    device: torch.device | None = None,
) -> Traced:
    """Traces module(*args, **kwargs) without autograd, on device if there is one, which the machine
    may lack. who: the function that wants it.

    Raises UserError for a dynamic_shapes that contradicts the program, Unsupported for what cannot
    be traced, and what the module raises, with a note of the user's line.
    """
    _check_module(module, who)
    given = args, kwargs
    args, kwargs = opened((args, dict(kwargs)))
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    names = _leaf_names(module, args, kwargs)
    for name, x in zip(names, leaves, strict=True):
        _check_argument(name, x, who)
    env = ExportEnv(module, args, dict(kwargs), dynamic_shapes, device, cfg.keeps_bits)
    state = state_of(module)
    flat = FlatModule(module, who, env, (leaves, in_spec), state, early_kernels_of(cfg))
    try:
        exported = flat.export()
    except Exception as error:
        tell(error, module, who, (state, *given) if device is None else None)
        raise
    graph, mutated, tokens = exported
    _allow_more(flat, exported)
    left = _settle(flat, exported)
    if flat.known.in_arguments:
        told = _names(flat.known.in_arguments)
        warn_once(
            f"{who}: a call of {name_of(module)} changes {told} of its arguments, one of the "
            "program does not"
        )
    loose, (args_spec, kwargs_spec) = loose_keywords(module.forward, kwargs), in_spec.children()
    any_order = not has_orders(args_spec, kwargs_spec, loose)
    if not any_order and not left:
        flat.arrange = in_another_order
        any_order = flat.again(exported) is not None
    drop_tokens(graph.graph, tokens)
    _write_back(graph, mutated)
    signature = Signature(
        in_spec,
        tuple(VALUE if value else x for value, x in zip(flat.is_value, leaves, strict=True)),
        names,
        len(args),
        tuple(kwargs),
        flat.known.spec,
        flat.known.leaves,
        any_order,
        () if any_order else loose,
    )
    facts = with_least_sizes(size_facts(env, flat.fakes, graph), graph)
    return Traced(graph, mutated, flat.plain, flat.fakes, signature, facts, flat.known.views)


def _allow_more(flat: FlatModule, exported: Exported) -> None:
    """Allows the sizes that the trace leaves out for nothing."""
    env = flat.env
    for size, questions in told_from_one(env, flat.fakes).items():
        alike = functools.partial(same_at, point=dict([size]), whole=env.whole)
        if flat.again(exported, questions, alike=alike):
            allow(env, size, questions)

    def is_right(point: dict[Any, int]) -> bool:
        def alike(a: GraphModule, b: GraphModule) -> bool:
            return same_at(a, b, point, env.whole) and same_layout(a, b, point)

        now = flat.again(exported, at=point, alike=alike)
        return now is not None and same_views(now.views, flat.known.views, point)

    others = left_out(env, flat.fakes)
    right = {size: those for size, those in others.items() if is_right(dict([size]))}
    env.apart += [pair for pair in together(env, right) if not is_right(pair)]
    for size, questions in right.items():
        allow(env, size, questions)


def _check_module(module: torch.nn.Module, who: str) -> None:
    if not is_python(module.forward):
        kind = type(module.forward).__name__
        what = f"{who} of a {type(module).__name__} whose forward is a {kind}, not Python"
        raise Unsupported(what)
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{who} of {name_of(module)}, of which {name!r} is a ScriptModule, not Python"
            raise Unsupported(what, hint="the module that it was scripted from")


def _settle(flat: FlatModule, exported: Exported) -> list[Change]:
    """What the next call finds left by this one. Raises Unsupported where it would be another
    program."""
    left = flat.known.left
    if not left:
        return left
    flat.before = left
    now = flat.again(exported)
    name = name_of(flat.module)
    if now is None or not settled(left, now.left):
        what = f"{name}, of which a call asks for what the one before it left: {_names(left)}"
        raise Unsupported(f"{flat.who} of {what}", hint=_KEEP)
    warn_once(f"{flat.who}: a call of {name} assigns {_names(left)}, one of the program does not")
    return now.left


def _names(changes: list[Change]) -> str:
    return ", ".join(dict.fromkeys(repr(change.name) for change in changes))


_KEEP = (
    "a buffer (register_buffer) or an argument for what changes; what is made once has to be "
    "there before: call it once with the largest sizes"
)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, without the constants of subgraphs of an exported program:
    tracing meets these as they are."""
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    for name, x in module.named_buffers():
        path, _, last = name.rpartition(".")
        constant = last.startswith("_tensor_constant")
        if not (constant and isinstance(module.get_submodule(path), GraphModule)):
            state[name] = x
    return state


def _check_argument(name: str, x: Any, who: str) -> None:
    if isinstance(x, torch.Tensor):
        if kind := special_kind(x):
            what = f"{who} of argument {name!r}: it takes plain tensors, this is {kind}"
            raise Unsupported(what, hint='torch.compile(fn, backend="plait")')
    elif not is_constant(x):
        what = (
            f"argument {name!r} is {type_name(x)}, neither a tensor nor a constant nor a container"
        )
        raise UserError(f"example_inputs: {what}", hint=REGISTER)


def _leaf_names(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """A name for every argument leaf: the parameter's, with the path inside it."""
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UserError(f"example_inputs do not fit {name_of(module)}: {error}") from None
    parameters = inspect.signature(module.forward).parameters
    names: list[str] = []
    for name, value in arguments.items():
        kind = parameters[name].kind
        inner = {"": value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            inner = {f"[{i}]": v for i, v in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            inner = dict(value)
        for suffix, part in inner.items():
            prefix = suffix if kind is inspect.Parameter.VAR_KEYWORD else name + suffix
            for path, _ in pytree.tree_flatten_with_path(part)[0]:
                names.append(prefix + pytree.keystr(path))
    return tuple(names)


def _write_back(graph_module: GraphModule, mutated: tuple[int, ...]) -> None:
    """The graph's first outputs are new values of the inputs at positions `mutated`: makes them
    trailing copies."""
    graph = graph_module.graph
    output = output_of(graph)
    values = list(output.args[0])  # type: ignore[arg-type]
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(output):
        for position, value in zip(mutated, values, strict=False):
            copy = graph.call_function(aten.copy_.default, (placeholders[position], value))
            copy.meta["val"] = placeholders[position].meta["val"]
    output.args = (tuple(values[len(mutated) :]),)
    graph_module.recompile()
