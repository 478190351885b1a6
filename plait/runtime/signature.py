"""How a call's arguments and results map to a program's tensors, and the Python around programs
that need some.

A `Signature` is made when a function is traced; `with_trees` and `with_checks` wrap what the native
callable does not do. `dump` and `read` are its form in a package: JSON, in which nothing but data
can stand.
"""

from __future__ import annotations

import enum
import json
import re
import reprlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from plait.errors import InputError, Unsupported
from plait.runtime.objects import class_in, closed, opened


class _Value:
    """Stands in a list of leaves where a tensor or an integer is to be put."""

    def __repr__(self) -> str:
        return "VALUE"


VALUE = _Value()

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum) + (
    torch.dtype, torch.device, torch.layout, torch.memory_format, range, type(Ellipsis), type,
)  # fmt: skip


def is_constant(x: Any) -> bool:
    """Whether an argument or result is built into a program: a number, a name, a class, a function
    that holds no other objects."""
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, types.ModuleType)
    if isinstance(x, types.FunctionType):
        return not (x.__closure__ or x.__defaults__ or x.__kwdefaults__)
    return isinstance(x, _CONSTANTS)


@dataclass(frozen=True)
class Signature:
    """How a call's arguments and results map to the graph's.

    leaves: the example's argument leaves, VALUE where a tensor goes. names: one for each leaf.
    out_leaves: result leaves, VALUE where a tensor or size of the graph goes, otherwise a constant.
    any_order: dicts of arguments may have their keys in any order. loose: keyword arguments that
    have to come in this order; all others may come in any.
    """

    in_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    n_args: int
    keywords: tuple[str, ...]
    out_spec: pytree.TreeSpec
    out_leaves: tuple[Any, ...]
    any_order: bool = False
    loose: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[str]:
        """The names of arguments that are tensors, or ints that vary."""
        return [n for n, x in zip(self.names, self.leaves, strict=True) if x is VALUE]

    @property
    def takes_tensors(self) -> bool:
        """Whether every argument is a tensor itself."""
        n_given = self.n_args + len(self.keywords)
        if self.loose or len(self.leaves) != n_given or not all(x is VALUE for x in self.leaves):
            return False
        flat = ((VALUE,) * self.n_args, dict.fromkeys(self.keywords, VALUE))
        return pytree.tree_structure(flat) == self.in_spec

    @property
    def single(self) -> bool:
        """Whether the result is one tensor."""
        return self.out_spec.is_leaf() and self.out_leaves == (VALUE,)

    @property
    def returns_tuple(self) -> bool:
        """Whether the result is a flat tuple of tensors and sizes."""
        spec = pytree.tree_structure((VALUE,) * len(self.out_leaves))
        return all(x is VALUE for x in self.out_leaves) and spec == self.out_spec


class UnknownClass(LookupError):
    """A container that this process does not know."""


class Layers:
    """Python around a program. A class, for a function would let itself be copied."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


Check = tuple[str, Callable[..., bool]]
"""A condition that arguments must meet: its text, in which they are args[0], args[1] and so on, and
whether it holds for them."""


def as_called(
    call: Callable[..., Any], signature: Signature, checks: Sequence[Check] = ()
) -> Callable[..., Any]:
    """call itself, a callable of tensors, or call behind what it does not do: checks, nested
    arguments and results."""
    if checks:
        call = Layers(_with_checks(call, signature.tensors, checks))
    if signature.takes_tensors and (signature.single or signature.returns_tuple):
        return call
    return Layers(_with_trees(call, signature))


def named_in(text: str, names: Sequence[str]) -> str:
    """text with the names of arguments in the place of args[0], args[1] and so on."""
    return re.sub(r"args\[(\d+)\]", lambda m: names[int(m[1])], text)


def _with_checks(
    call: Callable[..., Any], names: Sequence[str], checks: Sequence[Check]
) -> Callable[..., Any]:
    """call, after conditions on sizes and strides that go beyond equality and ranges."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)) if kwargs else args
        for text, holds in checks if len(given) == len(names) else ():
            if _breaks(given, holds):
                raise InputError(_broken(text, names, given))
        return call(*args, **kwargs)

    return checked


def _breaks(args: Sequence[Any], holds: Callable[..., bool]) -> bool:
    """Whether a condition does not hold. Arguments of another kind break none: the call itself
    refuses them."""
    try:
        return not holds(*args)
    except ZeroDivisionError:
        return True
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return False


_IN_MEMORY = re.compile(r"(args\[(\d+)\]\.(stride|storage_offset)\((\d*)\))")


def _broken(text: str, names: Sequence[str], args: Sequence[Any]) -> str:
    """What is wrong with arguments that break a condition: their sizes, and what it reads of their
    strides."""
    sizes = (tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in args)
    found = [f"{n} {size}" for n, size in zip(names, sizes, strict=True)]
    in_memory = dict.fromkeys(_IN_MEMORY.findall(text))
    found += [
        f"{spelled} = {getattr(args[int(k)], fact)(*map(int, dim))}"
        for spelled, k, fact, dim in in_memory
    ]
    what = "strides" if in_memory else "sizes"
    return named_in(f"{what} break a condition of the program, {text}: {', '.join(found)}", names)


def _with_trees(call: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """call behind nested arguments and results; arguments that are no tensors must equal the
    example's."""
    tensors = [i for i, x in enumerate(signature.leaves) if x is VALUE]
    constants = [(i, x) for i, x in enumerate(signature.leaves) if x is not VALUE]
    out_leaves, out_spec = signature.out_leaves, signature.out_spec
    takes_objects, gives_objects = (class_in(s) is not None for s in (signature.in_spec, out_spec))

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if tuple(kwargs) != signature.keywords and set(kwargs) == set(signature.keywords):
            if (
                signature.loose
                and tuple(name for name in kwargs if name in signature.loose) != signature.loose
            ):
                raise InputError(
                    "the program goes by the order of keyword arguments, "
                    f"{', '.join(signature.loose)}"
                )
            kwargs = {name: kwargs[name] for name in signature.keywords}
        given = opened((args, kwargs)) if takes_objects else (args, kwargs)
        leaves, spec = pytree.tree_flatten(given)
        if spec != signature.in_spec:
            leaves = _by_keys(signature, given, spec)
        for i, want in constants:
            got = leaves[i]
            if type(got) is not type(want) or _differ(got, want):
                told = (
                    f"a {type(got).__name__}"
                    if isinstance(got, torch.Tensor)
                    else reprlib.repr(got)
                )
                raise InputError(
                    f"input '{signature.names[i]}': the program was compiled for "
                    f"{reprlib.repr(want)}, got {told}",
                    hint="compile once for each value, or pass a tensor",
                )
        result = call(*(leaves[i] for i in tensors))
        values = iter((result,) if signature.single else result)
        made = pytree.tree_unflatten(
            [next(values) if x is VALUE else x for x in out_leaves], out_spec
        )
        return closed(made) if gives_objects else made

    return compiled


def _differ(a: Any, b: Any) -> bool:
    """Whether two constants of one type are different. A nan is a nan, and -0.0 is not 0.0."""
    return repr(a) != repr(b) if isinstance(a, (float, complex)) else bool(a != b)


def _by_keys(signature: Signature, given: Any, spec: pytree.TreeSpec) -> list[Any]:
    """The leaves of arguments whose dicts have their keys in another order than the example's, or
    are of another kind (dict, OrderedDict, defaultdict)."""
    what = f"arguments are nested as {spec}, the program was compiled for {signature.in_spec}"
    try:
        leaves = signature.in_spec.flatten_up_to(given)
    except ValueError:
        raise InputError(what) from None
    if not signature.any_order:
        raise InputError(f"{what}, and goes by the order of keys")
    return leaves


def result_names(signature: Signature) -> tuple[str, ...]:
    """Names of the results that are no constants: their place in what is returned."""
    marks = pytree.tree_unflatten(list(range(len(signature.out_leaves))), signature.out_spec)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(marks)[0]]
    return tuple(
        f"result{p}" for p, x in zip(paths, signature.out_leaves, strict=True) if x is VALUE
    )


# ------------------------------------------------------------------------------------------ as data
_NAMED = {
    str(x): x
    for kind in (torch.dtype, torch.layout, torch.memory_format)
    for x in vars(torch).values()
    if isinstance(x, kind)
}


def dump(signature: Signature) -> dict[str, Any]:
    """The signature as JSON has it. Raises Unsupported for a container or constant that has no such
    form."""
    return {
        "inputs": _dump_spec(signature.in_spec, "arguments"),
        "leaves": [
            _dump_leaf(x, f"argument {n!r}")
            for x, n in zip(signature.leaves, signature.names, strict=True)
        ],
        "names": list(signature.names),
        "positional": signature.n_args,
        "keywords": list(signature.keywords),
        "outputs": _dump_spec(signature.out_spec, "results"),
        "constants": [_dump_leaf(x, "a result") for x in signature.out_leaves],
        "any_order": signature.any_order,
        "loose": list(signature.loose),
    }


def read(data: dict[str, Any]) -> Signature:
    """What `dump` wrote. Raises UnknownClass for a container that this process does not know,
    ValueError for parts that do not fit each other, and whatever Python raises for what `dump`
    never writes."""
    signature = Signature(
        _read_spec(data["inputs"]),
        tuple(map(_read_leaf, data["leaves"])),
        tuple(data["names"]),
        data["positional"],
        tuple(data["keywords"]),
        _read_spec(data["outputs"]),
        tuple(map(_read_leaf, data["constants"])),
        data.get("any_order") is True,
        tuple(data.get("loose", ())),
    )
    n_leaves, n_results = len(signature.leaves), len(signature.out_leaves)
    if not (
        signature.in_spec.num_leaves == n_leaves == len(signature.names)
        and _all_texts(signature.names)
    ):
        raise ValueError(
            f"{signature.in_spec.num_leaves} arguments, {n_leaves} values, names {signature.names}"
        )
    if signature.out_spec.num_leaves != n_results:
        raise ValueError(f"{signature.out_spec.num_leaves} results, {n_results} values")
    if not _all_texts((*signature.keywords, *signature.loose)) or type(signature.n_args) is not int:
        raise ValueError("wrong names of keywords or number of positional arguments")
    return signature


def _all_texts(items: Sequence[Any]) -> bool:
    """Whether all are strings."""
    return all(isinstance(x, str) for x in items)


def _dump_spec(spec: pytree.TreeSpec, what: str) -> Any:
    if (cls := class_in(spec)) is not None:
        raise Unsupported(
            f"a package of a program with an object of class {cls.__module__}.{cls.__qualname__} "
            f"among its {what}",
            hint="tuples, lists and dicts, or torch.utils._pytree.register_pytree_node with a "
            "serialized_type_name for the class",
        )
    try:
        text = pytree.treespec_dumps(_without_return_types(spec))
        if _with_return_types(pytree.treespec_loads(text)) == spec:
            return json.loads(text)
        reason = "its keys are no strings or numbers"
    except (NotImplementedError, TypeError) as error:
        reason = str(error).splitlines()[0]
    raise Unsupported(
        f"a package of a program whose {what} are nested as {spec}: {reason}",
        hint="tuples, lists and dicts, or register the class with a serialized_type_name",
    )


def _read_spec(data: Any) -> pytree.TreeSpec:
    try:
        return _with_return_types(pytree.treespec_loads(json.dumps(data)))
    except NotImplementedError as error:
        raise UnknownClass(str(error)) from None


# What x.sort() returns has a class that torch does not write: it stands as a dict with one key, the
# name of the class.
_RETURN_TYPES = "torch.return_types."


def _without_return_types(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """spec with such dicts."""
    children = [_without_return_types(child) for child in spec.children()]
    name = getattr(spec.type, "__name__", "")
    if spec.is_leaf() or getattr(torch.return_types, name, None) is not spec.type:
        return pytree.TreeSpec(spec.type, spec.context, children)
    return pytree.TreeSpec(dict, [_RETURN_TYPES + name], [pytree.TreeSpec(tuple, None, children)])


def _with_return_types(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """spec with the classes that such dicts stand for. Raises UnknownClass for one that this torch
    lacks."""
    if spec.is_leaf():
        return spec
    if (
        spec.type is dict
        and len(spec.context) == 1
        and str(spec.context[0]).startswith(_RETURN_TYPES)
    ):
        name = spec.context[0].removeprefix(_RETURN_TYPES)
        found = getattr(torch.return_types, name, None)
        if not isinstance(found, type):
            raise UnknownClass(spec.context[0])
        (values,) = spec.children()
        return pytree.TreeSpec(
            found, None, [_with_return_types(child) for child in values.children()]
        )
    return pytree.TreeSpec(
        spec.type, spec.context, [_with_return_types(child) for child in spec.children()]
    )


def _dump_leaf(x: Any, what: str) -> list[Any]:
    """A tag, then what the value is made of."""
    if x is VALUE:
        return ["value"]
    if type(x) in (type(None), bool, int, str):
        return ["plain", x]
    if type(x) is float:
        return ["float", x.hex()]
    if type(x) is complex:
        return ["complex", x.real.hex(), x.imag.hex()]
    if type(x) is bytes:
        return ["bytes", x.hex()]
    if isinstance(x, torch.device):
        return ["device", str(x)]
    if str(x) in _NAMED:
        return ["named", str(x)]
    raise Unsupported(
        f"a package of a program of which {what} is {x!r}", hint="pass a number or a string"
    )


def _read_leaf(data: Sequence[Any]) -> Any:
    kind, *values = data
    match kind:
        case "value":
            return VALUE
        case "plain":
            return values[0]
        case "float":
            return float.fromhex(values[0])
        case "complex":
            return complex(*map(float.fromhex, values))
        case "bytes":
            return bytes.fromhex(values[0])
        case "device":
            return torch.device(values[0])
        case "named":
            return _NAMED[values[0]]
        case _:
            raise ValueError(f"a constant of kind {kind!r}")
