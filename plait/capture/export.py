"""`plait.compile`: a function or module and example inputs in, a callable with no Dynamo on its
path out.

The program is traced once; parameters, buffers and other tensors that it takes from its
surroundings are bound to it (their memory is read at every call, so in-place updates count). There
are no guards of Dynamo's: that a module holds other tensors by now, or other sub-modules, is seen
by its dicts (`owners.py`). Calls run without autograd. Where arguments are plain tensors and the
result is a tensor or a tuple of tensors, what is returned is the native callable itself, which
checks dtype, device, sizes and strides; other signatures get a thin layer of Python on top.
`__wrapped__` of what is returned is the function, `record` the record of its compilation, `given`
what it was compiled with besides its example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from plait.capture.aliases import results_of
from plait.capture.bound_program import argument_specs, bind, captured_from
from plait.capture.freeze import FrozenOwners, expect_kernels, frozen, require_other_bits
from plait.capture.outside_tensors import bind_outside
from plait.capture.owners import Owners, reachable
from plait.capture.program import collector_paused, compile_captured, follow, roomy
from plait.capture.sources import Examples, Program, source_of
from plait.capture.trace import Traced, trace
from plait.config import Config
from plait.errors import UserError
from plait.runtime.signature import as_called
from plait.wrapper.program import CompileRecord
from plait.wrapper.watch import watcher


@roomy
def compile(
    fn: Program,
    example_inputs: Examples = None,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    *,
    freeze: bool = False,
) -> Callable[..., Any]:
    """Compiles fn for inputs like example_inputs: positional arguments, or a mapping of keyword
    arguments. An ExportedProgram has an example and dynamic sizes already.

    fn is called, maybe several times, on tensors without values: what it prints is printed then,
    not at calls of the result. What it keeps in Python (attributes, items of lists) is taken back,
    with a warning: calls of the result keep nothing, nor do they put anything into dicts and lists
    among the arguments. Unsupported where a call asks for what the one before it kept.

    Training or evaluation mode, autocast and arguments that are no tensors are built in as they are
    now; at a call autocast makes no difference, and gradients are never taken.

    Parameters and buffers count as they are at a call: changes of their values, and other tensors
    of the same dtype, device, sizes and strides in their place. InputError where one does not fit,
    is gone, or a sub-module was replaced. A tensor that fn takes from a closure or a global is the
    one of now; changes of its values count.

    freeze: parameters and buffers are constants, for inference: what depends on them alone is
    computed now, batch norms go into the weights before them, and weights are packed for the
    kernels that read them. A change in place that their version tells of, and another tensor in
    their place, is seen at the next call, which computes all that again; what leaves no version
    (`.data`, numpy) is not seen.

    dynamic_shapes: as for torch.export.export; without it every size is fixed. The result raises
    InputError for inputs that differ from what was compiled; keys of dicts may come in any order,
    unless fn goes by it. Raises UserError for wrong arguments, Unsupported if fn cannot be traced,
    and what fn itself raises.
    """
    cfg = Config.from_env().with_options(options, mode)
    if cfg.report_to:
        follow(cfg.report_to)
    source = source_of(fn, example_inputs, dynamic_shapes, "plait.compile")
    if record_of(fn) is not None:
        raise UserError(
            "plait.compile of what plait.compile returned",
            hint="the function itself: its __wrapped__",
        )
    if freeze:
        require_other_bits(cfg, "plait.compile with freeze=True")
    with collector_paused():
        roots = reachable(source[0] if isinstance(fn, ExportedProgram) else fn)
        if freeze:
            expect_kernels(source[0], cfg)
        traced = trace(*source, "plait.compile", cfg)
        call, record = (_frozen if freeze else _bound)(traced, roots, cfg)
    call.__wrapped__, call.__doc__, call.__reduce_ex__, call.record = fn, _DOC, _refuse_copy, record
    sizes, own = dynamic_shapes and source[3], dict(options or {})  # by argument, without tensors
    call.given = {"dynamic_shapes": sizes, "options": own, "mode": mode, "freeze": freeze}
    return call  # type: ignore[no-any-return]


_DOC = """A function or module (`__wrapped__`) as plait.compile compiled it, for arguments like
the example's.

Built in as they were at that time: training or evaluation mode, autocast, sizes that are not
dynamic, arguments that are no tensors. Parameters and buffers count as they are at a call, also
others in their place, which have to fit. No gradients are taken: an argument with a forward-mode
tangent is an InputError. `record` tells how it was compiled, and plait.explain prints it.
"""


def _refuse_copy(protocol: int) -> Any:
    raise TypeError(
        "what plait.compile returns cannot be copied or pickled: it is tied to compiled code and "
        "to the parameters of its module; copy the module (`__wrapped__`) and compile that"
    )


def record_of(fn: Any) -> CompileRecord | None:
    """How plait.compile compiled fn; None if it did not."""
    record = getattr(fn, "record", None)
    return record if isinstance(record, CompileRecord) else None


def _frozen(traced: Traced, roots: Mapping[str, Any], cfg: Config) -> tuple[Any, CompileRecord]:
    """As `_bound`, with weights as constants, which are bound as weights are."""
    done = frozen(traced, cfg)
    module = done.traced.graph
    constants = [getattr(module, name) for name in done.folded.names]
    outside = bind_outside(module)
    bound = [*done.traced.state.values(), *outside]
    found = Owners(roots, [*done.sources.values(), *bound])
    owners = FrozenOwners(found, done, bound, constants)
    call, record = _compiled(done.traced, outside, owners, cfg)
    done.folded.ready.result()
    return call, replace(record, frozen=done.told)


def _bound(traced: Traced, roots: Mapping[str, Any], cfg: Config) -> tuple[Any, CompileRecord]:
    """Compiles and binds. roots: the modules and tensors among which the program's are found."""
    outside = bind_outside(traced.graph)
    return _compiled(traced, outside, Owners(roots, [*traced.state.values(), *outside]), cfg)


def _compiled(
    traced: Traced, outside: Sequence[torch.Tensor], owners: Owners | FrozenOwners, cfg: Config
) -> tuple[Any, CompileRecord]:
    """Compiles and binds; adds Python only for what the native callable does not do. outside: what
    the program takes from its surroundings."""
    results = results_of(traced.graph, traced.views)  # before the graph is cleaned
    signature = traced.signature
    taken = [owners.name_of(len(traced.state) + k) for k in range(len(outside))]
    names = (*traced.state, *signature.tensors, *taken)
    captured = replace(captured_from(traced), watcher=watcher(), input_names=names)
    program = compile_captured(captured, cfg)
    specs = [("bound", name, x) for name, x in traced.state.items()] + argument_specs(traced)
    specs += [("bound", name, x) for name, x in zip(taken, outside, strict=True)]
    call = bind(
        program.call, specs, signature.tensors, signature.single, results, traced.mutated, owners
    )
    checks = [(check.text, check.holds) for check in traced.sizes.checks]
    return as_called(call, signature, checks), program.record
