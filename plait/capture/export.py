"""`plait.compile`: a function or module and example inputs in, a callable with no Dynamo on its path out.

The program is traced once; parameters, buffers and constants are bound to it for good (their memory is read at every
call, so in-place updates count). Calls run without autograd. Where arguments are plain tensors and the result is a
tensor or a tuple of tensors, what is returned is the native callable itself, which checks dtype, device, sizes and
strides; other signatures get a thin layer of Python on top.
"""

from __future__ import annotations

import itertools
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

_serial = itertools.count()  # makes graph names unique within the process


def compile(
    fn: Callable[..., Any] | torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles fn for inputs like example_inputs: positional arguments, or a mapping of keyword arguments.

    dynamic_shapes: as for torch.export.export; without it every size is fixed. The result raises InputError for inputs
    that differ from what was compiled. Raises UserError for wrong arguments, Unsupported if fn cannot be traced.
    """
    cfg = Config.from_env().with_options(options, mode)
    if not callable(fn):
        raise UserError(f"plait.compile needs a function or module, got {type(fn).__name__}")
    args, kwargs = _example(example_inputs)
    module = fn if isinstance(fn, torch.nn.Module) else FunctionModule(fn)
    with collector_paused():
        return _bound(trace(module, args, kwargs, dynamic_shapes), cfg)


def _example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise UserError(
        f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}",
        hint="plait.compile(fn, (x, y))",
    )


def _bound(traced: Traced, cfg: Config) -> Callable[..., Any]:
    """Compiles and binds; adds Python only for what the native callable does not do."""
    n_state = len(traced.state)
    name = f"export_{next(_serial)}"
    captured = Captured(
        traced.graph, name, "inference", static_inputs=tuple(range(n_state)), bumped_inputs=traced.mutated
    )
    results = _results(traced.graph)
    program = compile_captured(captured, cfg)
    signature = traced.signature
    specs = [*traced.state, *(tensor_spec(i, fake, traced.sizes.bounds) for i, fake in enumerate(traced.fakes))]
    names = [n for n, x in zip(signature.names, signature.leaves, strict=True) if x is VALUE]
    call = bind(program.call, specs, names, signature.single, results, traced.mutated)
    if traced.sizes.checks:
        call = _with_checks(call, names, traced.sizes)
    if signature.takes_tensors and (signature.single or signature.returns_tuple):
        return call
    return _with_trees(call, signature)


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

    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = (*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs))
        if len(args) != len(names):
            raise InputError(f"expected {len(names)} inputs, got {len(args)}")
        for text, holds in sizes.checks:
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
            if type(leaves[i]) is not type(want) or leaves[i] != want:
                raise InputError(
                    f"input {signature.names[i]!r}: the program was compiled for {want!r}, got {leaves[i]!r}",
                    hint="compile once for each value, or pass a tensor",
                )
        result = call(*(leaves[i] for i in tensors))
        values = iter((result,) if signature.single else result)
        return pytree.tree_unflatten([next(values) if x is VALUE else x for x in out_leaves], out_spec)

    return compiled
