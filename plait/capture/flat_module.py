"""What is traced: a module as a function of tensors, to tensors. State and arguments come in as one
tuple, results go out as another. A function is wrapped in a module first.

It may be traced several times, under other answers to what it asks of sizes or with what an earlier
call left; `again` says whether that gives the same program.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from plait import compat
from plait.capture.aliases import views_of_inputs
from plait.capture.found_numbers import mended_tracing, numbers_kept
from plait.capture.layouts import LayoutNotes
from plait.capture.least_sizes import quiet
from plait.capture.module_state import ModuleRun
from plait.capture.owners import reachable
from plait.capture.plain_tensors import is_wrapper, special_kind
from plait.capture.python_state import Change, Snapshot, same_program
from plait.capture.recurrent import packed_sequences
from plait.capture.wrapped_state import unwrapped, wrapped
from plait.capture.writes import CheckWrites
from plait.compat.export import ExportEnv, export_graph
from plait.compat.questions import Question, exporting
from plait.compat.shared import Shared
from plait.compat.tracing import name_modules
from plait.errors import Unsupported
from plait.graph.captured import InputView
from plait.graph.edit import source_meta
from plait.runtime.objects import closed, opened
from plait.runtime.signature import VALUE, is_constant

REGISTER = (
    "torch.export.register_dataclass, or torch.utils._pytree.register_pytree_node for other "
    "containers"
)


class FunctionModule(torch.nn.Module):
    """A function as a module: the export machinery reads the signature and the code of
    `forward`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = fn if is_python(fn) else _in_python(fn)


def is_python(fn: Callable[..., Any]) -> bool:
    """Whether fn is a function in Python, or a partial one."""
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


@dataclass(frozen=True)
class Seen:
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


class FlatModule:
    """A module as a function from state and tensor leaves to a tuple of tensors and sizes. It is
    run more than once; `seen` is of the last run that counts."""

    def __init__(
        self,
        module: torch.nn.Module,
        who: str,
        env: ExportEnv,
        given: tuple[list[Any], pytree.TreeSpec],
        state: Mapping[str, torch.Tensor],
        early: Shared,
    ) -> None:
        self.module, self.who, self.env, self.early = module, who, env, early
        self.leaves, self.spec = given
        self.state, self.plain = state, unwrapped(state)
        self.is_value = [isinstance(x, (torch.Tensor, torch.SymInt)) for x in env.leaves]
        self.fakes: tuple[Any, ...] = tuple(
            x for x in env.leaves if isinstance(x, (torch.Tensor, torch.SymInt))
        )
        self.inputs = [*(env.fake_state(t) for t in self.plain.values()), *self.fakes]
        self.arrange: Arrange = lambda spec, leaves: pytree.tree_unflatten(leaves, spec)
        self.before: list[Change] = []  # what the run before left
        self.seen: Seen | None = None
        # As first found: a size may be known only when the module is run again.
        self.is_result: list[bool] = []
        self.paths = _paths(module)
        compat.tracing.write_graphs(module)

    def run(self, *flat: Any) -> tuple[Any, ...]:
        """Calls the module, notes what is seen, returns the results that are values."""
        given = iter(flat[len(self.plain) :])
        leaves = [
            next(given) if value else real if fake is None else fake
            for value, real, fake in zip(self.is_value, self.leaves, self.env.leaves, strict=True)
        ]
        args, kwargs = closed(self.arrange(self.spec, iter(leaves)))
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments = Snapshot(SimpleNamespace(**bound.arguments), deep=True)
        module_run = ModuleRun(self.module, self.who, self.before)
        state = wrapped(self.state, iter(flat[: len(self.plain)]))
        with module_run.state(self.state, state), LayoutNotes(self.env) as layouts:
            name_modules(self.paths)
            with CheckWrites() as writes:
                result = opened(self.module(*args, **kwargs))
            writes.check_inputs(flat)
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
        self.seen = Seen(spec, known, views, moved, left, in_arguments)
        return results

    def _check_results(self, paths: list[tuple[pytree.KeyPath, Any]]) -> None:
        for path, x in paths:
            if isinstance(x, torch.Tensor) and is_wrapper(x):
                raise Unsupported(f"{self.who} of a function whose result is {special_kind(x)}")
            if not _is_value(x) and not is_constant(x):
                at = f" (at {pytree.keystr(path)})" if path else ""
                what = f"a result of {name_of(self.module)}, {type_name(x)}{at}"
                raise Unsupported(f"{self.who} of {what}, which may hold tensors", hint=REGISTER)

    def export(
        self, turned: Collection[Question] = (), at: Mapping[Any, Any] | None = None
    ) -> Exported:
        """The graph of a run, the positions of the inputs that it writes, and its tokens. turned,
        at: as `export_graph` has them."""
        module = FunctionModule(self.run)
        with self.early, numbers_kept, mended_tracing, packed_sequences:
            made = export_graph(self.env, module, self.inputs, self.who, turned, at)
            if self.known.moved:
                # Of their new values: how results lie is right where nothing is made functional.
                with self.env.mode, exporting, torch.no_grad():
                    self.run(*pytree.tree_map_only(torch.Tensor, torch.detach, self.inputs))
        if isinstance(self.module, GraphModule):
            _tell_origins(made[0], self.module)
        return made

    @property
    def known(self) -> Seen:
        assert self.seen is not None, "the module was run"
        return self.seen

    def again(
        self,
        first: Exported,
        turned: Collection[Question] = (),
        at: Mapping[Any, Any] | None = None,
        alike: Callable[[GraphModule, GraphModule], bool] = same_program,
    ) -> Seen | None:
        """What one more run shows, if it traces the same program; `seen` stays that of the first
        one."""
        made = self.known
        try:
            with quiet():
                graph, mutated, _ = self.export(turned, at)
        except Exception:  # noqa: BLE001  whatever comes of what is no tensor
            return None
        else:
            now = self.known
            same = mutated == first[1] and alike(graph, first[0])
            return now if same and (now.spec, now.leaves) == (made.spec, made.leaves) else None
        finally:
            self.seen = made


def _paths(module: torch.nn.Module) -> dict[int, str]:
    """The paths of the modules, by id, whose code a call may run."""
    fn = module.forward if isinstance(module, FunctionModule) else module
    roots = (x for x in reachable(fn).values() if isinstance(x, torch.nn.Module))
    return {id(part): path for root in roots for path, part in root.named_modules() if path}


def _tell_origins(graph: GraphModule, of: GraphModule) -> None:
    """Nodes that come from a line of another graph's code get the user's lines and modules that its
    node of that line has."""
    code, nodes, of_lines = type(of).forward.__code__, list(of.graph.nodes), of._lineno_map or {}
    frame = re.compile(f'"{re.escape(code.co_filename)}", line (\\d+)')
    for node in graph.graph.nodes:
        line = frame.search(node.meta.get("stack_trace") or "")
        at = of_lines.get(int(line[1]) - code.co_firstlineno) if line else None
        # Its code may be of before it was changed.
        node.meta |= source_meta(nodes[at]) if at is not None and at < len(nodes) else {}


def type_name(x: Any) -> str:
    """What messages call an object that is no tensor."""
    return f"an object of class {type(x).__qualname__}"


def name_of(module: torch.nn.Module) -> str:
    """What messages call a module: its class, or its function."""
    if isinstance(module, FunctionModule):
        return getattr(module.forward, "__name__", "the function")
    return type(module).__name__


def _is_value(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
