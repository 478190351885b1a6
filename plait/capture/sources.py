"""What plait compiles, however it is given: a function, a module or a
`torch.export.ExportedProgram`.

An ExportedProgram comes with its example and its dynamic sizes: it is traced again as the module
that it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import AdditionalInputs, Dim, ExportedProgram, ShapesCollection

from plait.capture.flat_module import FunctionModule
from plait.errors import UserError

Source = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any]
"""A module, positional and keyword arguments of an example, and dynamic_shapes."""

Program = Callable[..., Any] | torch.nn.Module | ExportedProgram
Examples = Sequence[Any] | Mapping[str, Any] | torch.Tensor | None


def source_of(fn: Program, example_inputs: Examples, dynamic_shapes: Any, who: str) -> Source:
    """What is to be traced. who: the function that wants to know. Raises UserError for wrong
    arguments."""
    if isinstance(fn, ExportedProgram):
        return _exported(fn, example_inputs, dynamic_shapes, who)
    check_callable(fn, who)
    module = fn if isinstance(fn, torch.nn.Module) else FunctionModule(fn)
    args, kwargs = example_arguments(example_inputs)
    if isinstance(dynamic_shapes, (ShapesCollection, AdditionalInputs)):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)  # type: ignore[no-untyped-call]
    return module, args, kwargs, _by_parameter(module, args, dynamic_shapes)


def _by_parameter(module: torch.nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    """dynamic_shapes by argument as torch has it, by parameter: of `*xs` all in one."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = [p.kind for p in parameters]
    if (
        not isinstance(dynamic_shapes, (tuple, list))
        or len(dynamic_shapes) != len(args)
        or inspect.Parameter.VAR_POSITIONAL not in kinds
    ):
        return dynamic_shapes
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    own, rest = dynamic_shapes[:first], tuple(dynamic_shapes[first:])
    is_nested = len(rest) == 1 and isinstance(rest[0], (tuple, list)) and len(args) == first + 1
    if is_nested and all(isinstance(x, (dict, tuple, list, type(None))) for x in rest[0]):
        return dynamic_shapes
    return (*own, rest)


def check_callable(fn: Any, who: str) -> None:
    """Raises UserError if fn is no function or module; who needs one."""
    if isinstance(fn, type):
        hint = f"an instance: {fn.__name__}(...)"
        raise UserError(f"{who} needs a function or module, got the class {fn.__name__}", hint=hint)
    if not callable(fn):
        raise UserError(f"{who} needs a function or module, got {type(fn).__name__}")


def example_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: one tensor, a sequence of arguments or a mapping of keyword
    arguments."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise UserError(
        f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}",
        hint="(x, y)",
    )


def _exported(
    program: ExportedProgram, example_inputs: Examples, dynamic_shapes: Any, who: str
) -> Source:
    if dynamic_shapes is not None:
        raise UserError(
            f"{who} of an ExportedProgram takes no dynamic_shapes: the program has its own"
        )
    module = program.module(check_guards=False)
    if example_inputs is not None:
        args, kwargs = example_arguments(example_inputs)
    elif program.example_inputs is not None:
        args, kwargs = program.example_inputs
    else:
        raise UserError(
            f"{who} of an ExportedProgram without example inputs", hint="example_inputs=(x, y)"
        )
    return module, args, kwargs, _dynamic_shapes(program, module, args, kwargs)


def _dynamic_shapes(
    program: ExportedProgram, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The sizes that the program leaves open, by argument; None if it leaves none."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    users = program.graph.find_nodes(op="placeholder")[-len(leaves) :] if leaves else []
    dims: dict[Any, Any] = {}
    found = [_open(node.meta.get("val"), program.range_constraints, dims) for node in users]
    if not any(found):
        return None
    by_position, by_name = _shaped(spec, iter(found))
    return dict(inspect.signature(module.forward).bind(*by_position, **by_name).arguments)


def _shaped(spec: pytree.TreeSpec, found: Iterator[Any]) -> Any:
    """The tree of spec, in which a class stands as the list of its fields, as dynamic_shapes has
    it."""
    if spec.is_leaf():
        return next(found)
    children = [_shaped(child, found) for child in spec.children()]
    if spec.type not in pytree.BUILTIN_TYPES:
        return children
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _open(value: Any, ranges: Mapping[Any, Any], dims: dict[Any, Any]) -> Any:
    """What varies of one input: its dynamic dimensions, or the int itself; None for one of which
    nothing does."""
    if isinstance(value, torch.SymInt):
        return Dim.DYNAMIC
    if not isinstance(value, torch.Tensor):
        return None
    sizes: tuple[Any, ...] = tuple(value.shape)
    exprs = {k: s.node.expr for k, s in enumerate(sizes) if isinstance(s, torch.SymInt)}
    return {k: _dim(e, ranges, dims) for k, e in exprs.items() if not e.is_number} or None


def _dim(expr: Any, ranges: Mapping[Any, Any], dims: dict[Any, Any]) -> Any:
    """A size as dynamic_shapes has it: a symbol is a Dim, a linear expression of one follows it."""
    if expr.is_symbol:
        if expr not in dims:
            span = ranges[expr]
            high = int(span.upper) if span.upper < 2**62 else None
            dims[expr] = Dim(str(expr), min=int(span.lower), max=high)
        return dims[expr]
    polynomial = expr.as_poly()
    if (
        polynomial is None
        or len(polynomial.gens) != 1
        or polynomial.degree() != 1
        or not polynomial.gen.is_symbol
    ):
        return Dim.DYNAMIC
    scale, offset = map(int, polynomial.all_coeffs())
    derived = _dim(polynomial.gen, ranges, dims)
    derived = scale * derived if scale != 1 else derived
    return derived + offset if offset else derived
