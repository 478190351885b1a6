"""Traces a module with torch's export machinery into one functional graph whose inputs are state
and tensor leaves.

Knows nothing of compiling: it takes a module, example arguments and a dynamic_shapes specification
and gives a graph, the facts about its sizes (ranges, extra conditions), and how arguments flatten
and results are put together.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from plait import compat, errors
from plait.capture.aliases import views_of_inputs
from plait.capture.dict_order import has_orders, in_another_order, loose_keywords
from plait.capture.early_kernels import early_changes
from plait.capture.found_numbers import mended_tracing, numbers_kept
from plait.capture.layouts import LayoutNotes
from plait.capture.least_sizes import with_least_sizes
from plait.capture.module_state import ModuleRun, with_state
from plait.capture.plain_tensors import special_kind
from plait.capture.python_state import Change, Snapshot, same_program, settled
from plait.capture.sizes_of_one import same_for_one
from plait.capture.writes import CheckWrites
from plait.compat.export import ExportEnv, export_graph
from plait.compat.questions import Question, exporting, wants_values
from plait.compat.size_facts import SizeFacts, size_facts, told_from_one
from plait.errors import InputError, PlaitError, Unsupported, UserError, warn_once
from plait.graph.captured import InputView
from plait.graph.edit import aten, drop_tokens, output_of
from plait.graph.refuse import CLONE, SHARED, answer
from plait.runtime.signature import CONSTANTS, VALUE, Signature


class FunctionModule(torch.nn.Module):
    """A function as a module: the export machinery reads the signature and the code of
    `forward`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = fn if _is_python(fn) else _in_python(fn)


def _is_python(fn: Callable[..., Any]) -> bool:
    return hasattr(fn.func if isinstance(fn, functools.partial) else fn, "__code__")


def _in_python(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function that calls fn, a builtin or a callable object, under its name and signature
    if it has any."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", type(fn).__name__)
    with suppress(ValueError):
        call.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return call


_REGISTER = (
    "torch.export.register_dataclass, or torch.utils._pytree.register_pytree_node for other "
    "containers"
)


@dataclass(frozen=True)
class Traced:
    """A traced program.

    graph: its inputs are the tensors of state, then one for each VALUE in signature.leaves; a
        trailing copy_ writes each mutated input back.
    mutated: the positions of these.
    state: parameters and buffers, by name.
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


@dataclass(frozen=True)
class _Seen:
    """What one run of a module showed.

    spec: how its results are put together.
    leaves: its results, VALUE for those of the graph.
    views: the results that are inputs or views of them.
    moved: some of these lie in inputs that got other strides.
    left: what it changed in Python objects of the module.
    in_arguments: what it changed in Python objects of its arguments.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    views: Mapping[int, InputView]
    moved: bool
    left: list[Change]
    in_arguments: list[Change]


Arrange = Callable[[pytree.TreeSpec, Iterator[Any]], Any]
Exported = tuple[GraphModule, tuple[int, ...], int]


class _Flattened:
    """A module as a function from state and tensor leaves to a tuple of tensors and sizes. It is
    run more than once; `seen` is of the last run that counts."""

    def __init__(
        self,
        module: torch.nn.Module,
        who: str,
        env: ExportEnv,
        given: tuple[list[Any], pytree.TreeSpec],
        state: Mapping[str, torch.Tensor],
    ) -> None:
        self.module, self.who, self.env = module, who, env
        self.leaves, self.spec = given
        self.state = state
        self.is_value = [isinstance(x, (torch.Tensor, torch.SymInt)) for x in env.leaves]
        fakes = (x for x, value in zip(env.leaves, self.is_value, strict=True) if value)
        self.fakes = tuple(fakes)
        self.inputs = [*(env.fake_state(t) for t in state.values()), *self.fakes]
        self.arrange: Arrange = lambda spec, leaves: pytree.tree_unflatten(leaves, spec)
        self.before: list[Change] = []  # what the run before left
        self.seen: _Seen | None = None
        # As first found: a size may be known only when the module is run again.
        self.is_result: list[bool] = []

    def run(self, *flat: Any) -> tuple[Any, ...]:
        """Calls the module, notes what is seen, returns the results that are values."""
        given = iter(flat[len(self.state) :])
        leaves = [
            next(given) if value else real if fake is None else fake
            for value, real, fake in zip(self.is_value, self.leaves, self.env.leaves, strict=True)
        ]
        args, kwargs = self.arrange(self.spec, iter(leaves))
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments = Snapshot(SimpleNamespace(**bound.arguments))
        module_run = ModuleRun(self.module, self.who, self.before)
        state = flat[: len(self.state)]
        with module_run.state(self.state, state), LayoutNotes(self.env) as layouts:
            result = self.module(*args, **kwargs)
        layouts.ask_of_results(flat, result)
        left, in_arguments = module_run.left, arguments.changes()
        paths, spec = pytree.tree_flatten_with_path(result)
        self._check_results(paths)
        found = module_run.write([x for _, x in paths])
        self.is_result = self.is_result or [_is_value(x) for x in found]
        of = list(zip(found, self.is_result, strict=True))
        results = tuple(x for x, value in of if value)
        views = views_of_inputs(results, flat)
        moved = any(compat.tracing.is_moved(flat[v.input]) for v in views.values())
        known = tuple(VALUE if value else x for x, value in of)
        self.seen = _Seen(spec, known, views, moved, left, in_arguments)
        return results

    def _check_results(self, paths: list[tuple[pytree.KeyPath, Any]]) -> None:
        for path, x in paths:
            if not _is_value(x) and not isinstance(x, CONSTANTS):
                what = (
                    f"a result of {_name_of(self.module)}, {_type_name(x)}{_at(path)}, which may "
                    "hold tensors"
                )
                raise Unsupported(f"{self.who} of {what}", hint=_REGISTER)

    def export(self, turned: Collection[Question] = ()) -> Exported:
        """The graph of a run, the positions of the inputs that it writes, and its tokens."""
        module = FunctionModule(self.run)
        with early_changes, numbers_kept, mended_tracing, CheckWrites():
            made = export_graph(self.env, module, self.inputs, self.who, turned)
            if self.known.moved:
                # Of their new values: how results lie is right where nothing is made functional.
                with self.env.mode, exporting, torch.no_grad():
                    self.run(*(x.detach() if _is_tensor(x) else x for x in self.inputs))
        return made

    @property
    def known(self) -> _Seen:
        assert self.seen is not None, "the module was run"
        return self.seen

    def again(
        self,
        first: Exported,
        turned: Collection[Question] = (),
        alike: Callable[[GraphModule, GraphModule], bool] = same_program,
    ) -> _Seen | None:
        """What one more run shows, if it traces the same program; `seen` stays that of the first
        one."""
        made = self.known
        try:
            graph, mutated, _ = self.export(turned)
        except Exception:  # noqa: BLE001  whatever comes of what is no tensor
            return None
        else:
            now = self.known
            same = mutated == first[1] and alike(graph, first[0])
            return now if same and (now.spec, now.leaves) == (made.spec, made.leaves) else None
        finally:
            self.seen = made


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    who: str,
    device: torch.device | None = None,
) -> Traced:
    """Traces module(*args, **kwargs) without autograd, on device if there is one, which the machine
    may lack. who: the function that wants it.

    Raises UserError for a dynamic_shapes that contradicts the program, Unsupported for what cannot
    be traced, and what the module raises, with a note of the user's line.
    """
    _check_module(module, who)
    leaves, in_spec = pytree.tree_flatten((args, dict(kwargs)))
    names = _leaf_names(module, args, kwargs)
    for name, x in zip(names, leaves, strict=True):
        _check_argument(name, x, who)
    env = ExportEnv(module, args, dict(kwargs), dynamic_shapes, device)
    state = state_of(module)
    flat = _Flattened(module, who, env, (leaves, in_spec), state)
    try:
        exported = flat.export()
    except Exception as error:
        _tell(error, module, who, (state, args, kwargs) if device is None else None)
        raise
    graph, mutated, tokens = exported
    for size, questions in told_from_one(env, flat.fakes).items():
        if flat.again(exported, questions, functools.partial(same_for_one, size=size)):
            env.ones[size] = questions
    left = _settle(flat, exported)
    if flat.known.in_arguments:
        told = _names(flat.known.in_arguments)
        warn_once(
            f"{who}: a call of {_name_of(module)} changes {told} of its arguments, one of the "
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
    return Traced(graph, mutated, state, flat.fakes, signature, facts, flat.known.views)


def _check_module(module: torch.nn.Module, who: str) -> None:
    if not _is_python(module.forward):
        kind = type(module.forward).__name__
        raise Unsupported(
            f"{who} of a {type(module).__name__} whose forward is a {kind}, not Python"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{who} of {_name_of(module)}, of which {name!r} is a ScriptModule, not Python"
            raise Unsupported(what, hint="the module that it was scripted from")


def _tell(
    error: Exception,
    module: torch.nn.Module,
    who: str,
    eager: tuple[Mapping[str, torch.Tensor], tuple[Any, ...], Mapping[str, Any]] | None,
) -> None:
    """Raises what says more than an error of tracing, if there is something; else notes the user's
    line. eager: state, args and kwargs, where eager can be asked what it raises."""
    line = users_line(error)
    if isinstance(error, InputError):
        what = f"{who} of {_name_of(module)}, which calls what plait.compile returned"
        hint = "call the function itself: its __wrapped__"
        raise Unsupported(what, where=line, hint=hint) from error
    if isinstance(error, PlaitError):
        return
    if wants_values(error):
        what = f"{who} cannot trace {_name_of(module)}: {_first_line(error)}"
        hint = 'torch.compile(fn, backend="plait"), which can break graphs'
        raise Unsupported(what, where=line, hint=hint) from error
    if "internal overlap" in str(error):  # of a tensor that a view of it is written through
        raise Unsupported(SHARED, where=line, hint=CLONE) from error
    found = _raised_by_eager(module, *eager) if eager is not None else None
    note = f"raised while {who} traced {_name_of(module)}" + (f", at {line}" if line else "")
    if found is None:
        error.add_note(note)
        return
    found.add_note(note)
    try:
        raise found from error
    finally:
        del found  # its traceback holds this frame, with all tensors of the call


def _settle(flat: _Flattened, exported: Exported) -> list[Change]:
    """What the next call finds left by this one. Raises Unsupported where it would be another
    program."""
    left = flat.known.left
    if not left:
        return left
    flat.before = left
    now = flat.again(exported)
    name = _name_of(flat.module)
    if now is None or not settled(left, now.left):
        what = (
            f"{flat.who} of {name}, of which a call asks for what the one before it left: "
            f"{_names(left)}"
        )
        raise Unsupported(what, hint=_KEEP)
    warn_once(f"{flat.who}: a call of {name} assigns {_names(left)}, one of the program does not")
    return now.left


def _names(changes: list[Change]) -> str:
    return ", ".join(dict.fromkeys(repr(change.name) for change in changes))


_KEEP = (
    "a buffer (register_buffer) or an argument for what changes; what is made once has to be "
    "there before: call it once with the largest sizes"
)


def _raised_by_eager(
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Exception | None:
    """What eager raises for copies of the arguments. Asked where tracing raised: the class is
    another one there for many a mistake."""

    def copy(x: Any) -> Any:
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    with with_state(module, state, [copy(x) for x in state.values()]):
        return answer(module, args, kwargs, copy, torch.device("cpu"))


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, without the constants of subgraphs of an exported program:
    tracing meets these as they are."""
    state: dict[str, torch.Tensor] = dict(module.named_parameters())
    for name, x in module.named_buffers():
        path, _, last = name.rpartition(".")
        if not (
            last.startswith("_tensor_constant")
            and isinstance(module.get_submodule(path), GraphModule)
        ):
            state[name] = x
    return state


def _check_argument(name: str, x: Any, who: str) -> None:
    if isinstance(x, torch.Tensor):
        if kind := special_kind(x):
            hint = 'torch.compile(fn, backend="plait")'
            raise Unsupported(
                f"{who} of argument {name!r}: it takes plain tensors, this is {kind}", hint=hint
            )
    elif not isinstance(x, CONSTANTS):
        what = (
            f"argument {name!r} is {_type_name(x)}, neither a tensor nor a constant nor a "
            "container that torch knows"
        )
        raise UserError(f"example_inputs: {what}", hint=_REGISTER)


def _type_name(x: Any) -> str:
    return f"an object of class {type(x).__qualname__}"


def _at(path: pytree.KeyPath) -> str:
    return f" (at {pytree.keystr(path)})" if path else ""


def users_line(error: Exception) -> str:
    """file:line of the innermost frame that is neither torch's nor plait's, "" if there is none."""
    ours = tuple(f"{Path(p).parent}/" for p in (torch.__file__, errors.__file__))
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((*ours, "<"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_value(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _name_of(module: torch.nn.Module) -> str:
    if isinstance(module, FunctionModule):
        return getattr(module.forward, "__name__", "the function")
    return type(module).__name__


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _leaf_names(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """A name for every argument leaf: the parameter's, with the path inside it."""
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UserError(f"example_inputs do not fit {_name_of(module)}: {error}") from None
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
