"""`plait.explain(fn, *args)`: compiles and runs fn once and says what became of it.

In: a function or module with example arguments. Out: a `Report` with a record of every graph:
inference graphs, or forward and backward graphs where gradients are needed, and why Dynamo broke a
graph. fn is called once; what was compiled before stays compiled. What plait.compile returned is
not called: its record is shown.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from plait.capture import dynamo
from plait.capture.backend import plait_backend
from plait.capture.dynamo import Break
from plait.capture.export import record_of
from plait.capture.pending import meanwhile
from plait.capture.recompiles import Recompiles, of_process
from plait.capture.sources import check_callable
from plait.capture.warm.frames import outcomes
from plait.config import Config
from plait.tools.report import Report, given_up
from plait.wrapper.program import CompileRecord, observers


def explain(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    details: bool = False,
    quiet: bool = False,
    **kwargs: Any,
) -> Report:
    """Compiles fn, calls it with these arguments once, prints the report and returns it.

    options, mode: as for torch.compile; a keyword argument of fn that has one of the four names
    here is given through functools.partial. details: print every kernel, call and refusal of every
    graph after the summary.
    quiet: do not print. Where a result needs gradients that fn did not take itself, the backward
    graphs are compiled and run as well, and no `.grad` changes. Raises what fn or the compiler
    raises, after printing what was compiled before, and UserError for wrong arguments."""
    Config.from_env().with_options(options, mode)
    check_callable(fn, "plait.explain")
    if record := record_of(fn):
        note = "compiled by plait.compile before, not run again"
        return _shown([record], [], of_process, note, details, quiet)
    records: list[CompileRecord] = []
    known = len(dynamo.breaks())
    recompiles = Recompiles()
    recompiles.found.extend(of_process.found)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return plait_backend(gm, inputs, options=options, mode=mode, recompiles=recompiles)

    refused = dynamo.refusals()
    wrapped = (getattr(fn, name, None) for name in ("_orig_mod", "_torchdynamo_orig_callable"))
    original = next(filter(None, wrapped), fn)
    since = now()
    try:
        with _listening(lambda record: records.append(_in_words_of(original, record))):
            # A backend of its own, on code of its own: Dynamo neither reuses nor replaces what is
            # compiled already.
            result = torch.compile(fresh_caller(original), backend=backend)(*args, **kwargs)
            if not any(r.kind == "backward" for r in records):
                run_backward(result, edges_of(result, since))
    except Exception as error:
        if records:
            note = f"{type(error).__name__} after these graphs were compiled"
            _shown(records, dynamo.breaks()[known:], recompiles, note, details, quiet)
        raise
    why = ", ".join(dynamo.refusals() - refused) or "there are no operations on tensors"
    if "RNN, GRU, or LSTM" in why:
        why += "; torch._dynamo.config.allow_rnn = True lets it (docs/use.md)"
    note = "" if records else f"Dynamo captured no graph: {why}"
    return _shown(records, dynamo.breaks()[known:], recompiles, note, details, quiet)


def _shown(
    records: Sequence[CompileRecord], breaks: Sequence[Break], recompiles: Recompiles, note: str,
    details: bool, quiet: bool,
) -> Report:  # fmt: skip
    dynamo.note_skipped()
    report = Report(
        tuple(records), tuple(breaks), note, tuple(given_up()), tuple(dynamo.left_to_eager),
        tuple(recompiles.found), tuple(dict.fromkeys(o.line for o in outcomes)),
        tuple(m.line for m in meanwhile),
    )  # fmt: skip
    if quiet:
        return report
    if sys.stdout.isatty():
        from plait.tools.terminal import show

        show(report, details)
    else:
        print("\n".join([report.text, report.details] if details else [report.text]))
    return report


@contextmanager
def _listening(observer: Callable[[CompileRecord], None]) -> Iterator[None]:
    token = observers.set((*observers.get(), observer))
    try:
        yield
    finally:
        observers.reset(token)


def fresh_caller(self: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another one, or a module, and whose code object nobody has seen: Dynamo
    keeps what it compiles by code object. A module is `self` in it, as in its own code, so what it
    holds has the same names."""

    def explained(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    code = explained.__code__.replace(co_name="explained")
    return FunctionType(code, explained.__globals__, "explained", None, explained.__closure__)


def _in_words_of(fn: Callable[..., Any], record: CompileRecord) -> CompileRecord:
    """A record of `fresh_caller(fn)` with names as in fn: its parameters in place of `args[0]`,
    variables in place of cells."""
    plain = fn.func if isinstance(fn, partial) else fn
    cells: Sequence[str] = getattr(getattr(plain, "__code__", None), "co_freevars", ())
    try:
        called = fn.forward if isinstance(fn, torch.nn.Module) else fn
        parameters = [*inspect.signature(called).parameters.values()]
    except (TypeError, ValueError):  # of what is written in C
        parameters = []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [p.name for p in parameters if p.kind in kinds]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")

    def argument(found: re.Match[str]) -> str:
        k = int(found[1])
        return given[k] if k < len(given) else f"{rest}[{k - len(given)}]"

    def cell(found: re.Match[str]) -> str:
        return cells[int(found[1])] if int(found[1]) < len(cells) else found[0]

    def renamed(names: Sequence[str]) -> tuple[str, ...]:
        for pattern, word in ((_CELL, cell), (_ARGUMENT, argument)):
            names = [pattern.sub(word, name) for name in names]
        return tuple(names)

    inputs, results = renamed(record.input_names), renamed(record.result_names)
    return replace(record, input_names=inputs, result_names=results)


_CELL = re.compile(r"\bself(?:\.func)?\.__closure__\[(\d+)\]\.cell_contents")
_ARGUMENT = re.compile(r"(?<![.\w])args\[(\d+)\]")


def run_backward(result: Any, to: Sequence[GradientEdge]) -> None:
    """Backward graphs are compiled when they are first run. to: `edges_of` such a result."""
    if outs := _trained(result) if to else []:
        try:
            ones = [torch.ones_like(o) for o in outs]
            torch.autograd.grad(outs, to, ones, allow_unused=True)
        except RuntimeError as error:
            if "a second time" not in str(error):  # else who made the result has taken them
                raise


now: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def edges_of(result: Any, since: int) -> list[GradientEdge]:
    """Where gradients of a result go: to parameters, whoever holds them, and to what was computed
    before it (since: `now()` then), whose own graph is not touched."""
    edges: list[Any] = [(o.grad_fn, o.output_nr) for o in _trained(result)]
    seen: dict[Any, bool] = {}
    for edge in edges:  # which grow
        if edge not in seen and (node := edge[0]) is not None:
            seen[edge] = node.name().endswith("AccumulateGrad") or node._sequence_nr() < since
            edges += [] if seen[edge] else node.next_functions
    return [GradientEdge(*edge) for edge, ends in seen.items() if ends]


def _trained(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]
