"""`plait.compile`: a function or module and example inputs in, a callable with no Dynamo on its path out.

The program is traced once; parameters, buffers and constants are bound to it for good (their memory is read at every
call, so in-place updates count). Calls run without autograd. Where arguments are plain tensors and the result is a
tensor or a tuple of tensors, what is returned is the native callable itself, which checks dtype, device, sizes and
strides; other signatures get a thin layer of Python on top. `__wrapped__` of what is returned is the function,
`record` the record of its compilation.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node

from plait import compat
from plait.capture.bound import Result, bind, tensor_spec
from plait.capture.direct import is_plain_view
from plait.capture.program import collector_paused, compile_captured
from plait.capture.trace import VALUE, FunctionModule, Signature, Traced, trace
from plait.config import Config
from plait.errors import InputError, UserError
from plait.graph.captured import Captured
from plait.graph.edit import output_of
from plait.wrapper.program import CompileRecord
from plait.wrapper.watch import watcher

_serial = itertools.count()  # makes graph names unique within the process


def compile(
    fn: Callable[..., Any] | torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles fn for inputs like example_inputs: positional arguments, or a mapping of keyword arguments.

    fn is called twice, on tensors without values; what else it does (printing, keeping a tensor in a list) happens
    then, not at calls of the result. Training or evaluation mode, autocast and arguments that are no tensors are built
    in as they are now; at a call autocast makes no difference, and gradients are never taken. Parameters and buffers
    are used where they are: changes of their values count, other tensors in their place do not.

    dynamic_shapes: as for torch.export.export; without it every size is fixed. The result raises InputError for inputs
    that differ from what was compiled. Raises UserError for wrong arguments, Unsupported if fn cannot be traced, and
    what fn itself raises.
    """
    cfg = Config.from_env().with_options(options, mode)
    check_callable(fn, "plait.compile")
    if record_of(fn) is not None:
        raise UserError("plait.compile of what plait.compile returned", hint="the function itself: its __wrapped__")
    args, kwargs = example_arguments(example_inputs)
    module = fn if isinstance(fn, torch.nn.Module) else FunctionModule(fn)
    with collector_paused():
        call, record = _bound(trace(module, args, kwargs, dynamic_shapes), cfg)
    call.__wrapped__, call.__doc__, call.__reduce_ex__, call.record = fn, _DOC, _refuse_copy, record
    return call  # type: ignore[no-any-return]


_DOC = """A function or module (`__wrapped__`) as plait.compile compiled it, for arguments like the example's.

Built in as they were at that time: training or evaluation mode, autocast, sizes that are not dynamic, arguments that
are no tensors. Parameters and buffers are used where they are: changes of their values count, other tensors in their
place do not. No gradients are taken. `record` tells how it was compiled, and plait.explain prints it.
"""


def _refuse_copy(protocol: int) -> Any:
    raise TypeError(
        "what plait.compile returns cannot be copied or pickled: it is tied to compiled code and to the parameters "
        "of its module; copy the module (`__wrapped__`) and compile that"
    )


def check_callable(fn: Any, who: str) -> None:
    """Raises UserError if fn is no function or module; who needs one."""
    if isinstance(fn, type):
        hint = f"an instance: {fn.__name__}(...)"
        raise UserError(f"{who} needs a function or module, got the class {fn.__name__}", hint=hint)
    if not callable(fn):
        raise UserError(f"{who} needs a function or module, got {type(fn).__name__}")


def record_of(fn: Any) -> CompileRecord | None:
    """How plait.compile compiled fn; None if it did not."""
    record = getattr(fn, "record", None)
    return record if isinstance(record, CompileRecord) else None


def example_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: one tensor, a sequence of arguments or a mapping of keyword arguments."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise UserError(f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}", hint="(x, y)")


class _Layers:
    """Python around a program. A class, for a function would let itself be copied."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _bound(traced: Traced, cfg: Config) -> tuple[Any, CompileRecord]:
    """Compiles and binds; adds Python only for what the native callable does not do."""
    n_state = len(traced.state)
    name = f"export_{next(_serial)}"
    captured = Captured(
        traced.graph,
        name,
        "inference",
        static_inputs=tuple(range(n_state)),
        bumped_inputs=traced.mutated,
        watcher=watcher(),
    )
    results = _results(traced.graph)
    program = compile_captured(captured, cfg)
    signature = traced.signature
    specs = [("bound", name, x) for name, x in traced.state.items()]
    specs += [tensor_spec(i, fake, traced.sizes.bounds) for i, fake in enumerate(traced.fakes)]
    names = [n for n, x in zip(signature.names, signature.leaves, strict=True) if x is VALUE]
    call = bind(program.call, specs, names, signature.single, results, traced.mutated)
    if traced.sizes.checks:
        call = _Layers(_with_checks(call, names, traced.sizes))
    if not signature.takes_tensors or not (signature.single or signature.returns_tuple):
        call = _Layers(_with_trees(call, signature))
    return call, program.record


def _results(graph: GraphModule) -> list[Result]:
    """Which of the graph's results are views of inputs, in eager too, and where they begin."""
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    storages = {x.untyped_storage()._cdata: k for k, x in enumerate(inputs) if x.layout == torch.strided}
    outputs: Any = output_of(graph.graph).args[0]
    results: list[Result] = []
    for node in outputs:
        val = node.meta.get("val") if isinstance(node, Node) else None
        result: Result = ("program",)
        if isinstance(val, torch.Tensor) and val.layout == torch.strided and node.op != "placeholder":
            base = storages.get(val.untyped_storage()._cdata)
            if base is not None and is_plain_view(inputs[base], val):
                offset = val.storage_offset() - inputs[base].storage_offset()
                result = ("view", base, True, compat.as_constant(offset))
        results.append(result)
    return results if any(r[0] == "view" for r in results) else []


def _with_checks(call: Callable[..., Any], names: list[str], sizes: compat.SizeFacts) -> Callable[..., Any]:
    """call, after conditions on sizes that go beyond equality and ranges."""
    checks = [(re.sub(r"args\[(\d+)\]", lambda m: names[int(m[1])], text), holds) for text, holds in sizes.checks]

    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = (*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs))
        if len(args) != len(names):
            raise InputError(f"expected {len(names)} inputs, got {len(args)}")
        for text, holds in checks:
            if not holds(*args):
                shapes = ", ".join(f"{n} {tuple(a.shape)}" for n, a in zip(names, args, strict=True))
                raise InputError(f"sizes break a condition of the program, {text}: {shapes}")
        return call(*args)

    return checked


def _with_trees(call: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """call behind nested arguments and results; arguments that are no tensors must equal the example's."""
    tensors = [i for i, x in enumerate(signature.leaves) if x is VALUE]
    constants = [(i, x) for i, x in enumerate(signature.leaves) if x is not VALUE]
    out_leaves, out_spec = signature.out_leaves, signature.out_spec

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if tuple(kwargs) != signature.keywords and set(kwargs) == set(signature.keywords):
            kwargs = {name: kwargs[name] for name in signature.keywords}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != signature.in_spec:
            raise InputError(f"arguments are nested as {spec}, the program was compiled for {signature.in_spec}")
        for i, want in constants:
            got = leaves[i]
            if type(got) is not type(want) or (got != want and (got == got or want == want)):  # a nan is a nan
                given = f"a {type(got).__name__}" if isinstance(got, torch.Tensor) else reprlib.repr(got)
                raise InputError(
                    f"input {signature.names[i]!r}: the program was compiled for {reprlib.repr(want)}, got {given}",
                    hint="compile once for each value, or pass a tensor",
                )
        result = call(*(leaves[i] for i in tensors))
        values = iter((result,) if signature.single else result)
        return pytree.tree_unflatten([next(values) if x is VALUE else x for x in out_leaves], out_spec)

    return compiled
