"""Writes that eager refuses, seen before AOTAutograd makes copies of them: to memory that several
elements share (`x.expand(3, 4).add_(1)`), to memory that overlaps what is read
(`x[1:].copy_(x[:-1])`), and of results that what is written cannot hold (`x.mul_(2.5)` of
integers).

Comes in: a Dynamo graph, or each function that a trace without Dynamo calls. Whether a write of a
suspicious kind is refused only eager knows, so it is asked, on zeros that lie as the operands do.
What it does take is Unsupported where elements of the written tensor share memory: AOTAutograd's
copies would then hold other numbers (filling an expanded tensor adds up what each element changed
by). So is a write to windows (`x.unfold(0, 1, 2).neg_()`) that leave elements of x out: its copies
hold zeros there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from plait import compat
from plait.errors import PlaitError, Unsupported, refusal
from plait.graph.edit import last_frame
from plait.graph.refuse import CLONE, SHARED, answer, repeats, users_line

_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "ior", "ipow", "irshift", "isub",
        "itruediv", "ixor", "setitem",
    )
)  # fmt: skip
_METHODS = frozenset(f"__{op.__name__}__" for op in _OPERATORS)
_SHAPES = frozenset(  # these write no elements
    """as_strided_ detach_ requires_grad_ rename_ resize_ resize_as_ retain_grad_ set_
    share_memory_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_""".split()
)
_INSIDE = ("linear",)  # these write their own result once more: they add to it
_KEYWORDS = ("and_", "is_", "not_", "or_")  # Python's operators with these names write nothing
_FLOATS = ("ldexp_", "logit_")  # these make floats of integers, too, and tracing does not see it
_REFUSED = re.compile(  # how eager's text starts
    "unsupported operation|.*(can't be cast|out tensor to have dtype|not implemented for 'Bool')"
)
_GAPS = "a write to windows (unfold) that leave out elements of their tensor"
_SLICES = "write to slices, or to x.as_strided(...)"
_PLACED = "a write to an input, of which a view says where it begins (as_strided with an offset)"
_SLICES_ALONE = "slices, or x.as_strided(...) without an offset"
_BIAS = "a bias of the dtype of the input"
_CAST = "the operation without an underscore gives a result of its own dtype"


def check_writes(gm: torch.nn.Module) -> None:
    """Raises an OperandError for the first write of a Dynamo graph that eager refuses."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            windows, placed = _Windows(), _Placed()
            for node in module.graph.nodes:
                if node.op not in ("call_method", "call_function"):
                    continue
                operands, out = _operands(node), node.meta.get("example_value")
                placed.note(node.target, *operands, out)
                if may_write(node.target, node.kwargs) or _name(node.target) in _INSIDE:
                    _check_node(node, windows)
                else:
                    windows.note(node.target, *operands, out)
            inputs = module.graph.find_nodes(op="placeholder")
            placed.check([n.meta.get("example_value") for n in inputs])


def _operands(node: Node) -> tuple[Any, Any]:
    """The arguments of a node of a Dynamo graph."""
    found: tuple[Any, Any] = torch.fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda n: n.meta.get("example_value")
    )
    return found


class _Windows:
    """Views of windows, and views of such views: which leave elements of their tensor out."""

    def __init__(self) -> None:
        # View -> (elements of the tensor, of its windows).
        self._sizes: Any = WeakIdKeyDictionary()

    def note(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """A call of fn gave out."""
        given = _tensors((args, kwargs))
        windows = _name(fn) == "unfold"
        before = next((self._sizes[x] for x in given if x in self._sizes), None)
        if not given or not (windows or before):
            return
        memory = _memory(given)
        for x in _tensors(out):
            if memory & _memory(x):
                self._sizes[x] = before or (given[0].numel(), x.numel())

    def has_gaps(self, x: torch.Tensor) -> bool:
        """Whether x is such a view. Of sizes that vary this makes a guard."""
        whole, seen = self._sizes.get(x, (0, 0))
        return bool(seen < whole)


class _Placed:
    """Views that begin where they say (`x.as_strided(..., offset)`). Of an input's new value
    AOTAutograd takes such a view as if that began where its memory does and had all that the
    memory of the input holds."""

    def __init__(self) -> None:
        self._views: Any = WeakIdKeyDictionary()
        self.some = False  # of them
        self._written, self._wrong = set[int](), set[int]()

    def note(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """A call of fn gave out."""
        offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
        places = _name(fn) == "as_strided" and offset is not None
        seen = [x for x in _tensors((args, kwargs)) if x in self._views] if self.some else []
        self._wrong |= _memory(seen) & self._written
        if may_write(fn, kwargs):
            written = _tensors(_written(args, kwargs))
            self._wrong |= _memory([x for x in written if x in self._views])
            self._written |= _memory(written)
        if places or seen:
            self.some = True
            memory = _memory(args[:1] if places else seen)
            for x in _tensors(out):
                if memory & _memory(x):
                    self._views[x] = True

    def check(self, inputs: Sequence[Any]) -> None:
        """Raises Unsupported if one of an input is written, or read after a write."""
        if self._wrong & _memory(inputs):
            raise Unsupported(_PLACED, hint=_SLICES_ALONE)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]


def _memory(tensors: Any) -> set[int]:
    """The storages of tensors that have some."""
    return {compat.tracing.storage_of(x) for x in _tensors(tensors) if x.layout == torch.strided}


def _written(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function that writes may write."""
    out = kwargs.get("out")
    return (*args, *kwargs.values())[0] if out is None else out


def _check_node(node: Node, windows: _Windows) -> None:
    fn: Any = node.target
    args, kwargs = _operands(node)
    if node.op == "call_method" and args:
        fn = getattr(torch.Tensor, fn, None)
    if fn is not None and (wrong := _verdict(fn, args, kwargs, windows)):
        kind, what, hint = wrong
        raise kind(what, where=last_frame(str(node.meta.get("stack_trace") or "")), hint=hint)


class CheckWrites(TorchFunctionMode):
    """While it is active, functions with a wrong write raise an error of plait instead of being
    traced."""

    def __init__(self) -> None:
        super().__init__()
        self._windows, self._has_windows = _Windows(), False
        self._placed = _Placed()

    def check_inputs(self, inputs: Sequence[Any]) -> None:
        """Raises Unsupported for inputs whose writes tracing gets wrong, after a run."""
        self._placed.check(inputs)

    def __torch_function__(
        self,
        fn: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if fn == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise Unsupported(
                "an assignment to x.data", where=users_line(), hint="x.copy_(...) writes into x"
            )
        windows = self._windows if self._has_windows else None
        suspicious = may_write(fn, named) or _name(fn) in _INSIDE
        if suspicious and (wrong := _verdict(fn, args, named, windows)):
            kind, what, hint = wrong
            raise kind(what, where=users_line(), hint=hint)
        out = fn(*args, **named)
        # Dynamo traces this for bodies of control flow: nothing more where there are no such views.
        if suspicious or self._placed.some or _name(fn) == "as_strided":
            self._placed.note(fn, args, named, out)
        if self._has_windows or _name(fn) == "unfold":
            self._has_windows = True
            self._windows.note(fn, args, named, out)
        return out


def may_write(fn: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function, or one of that name, may write its first argument or `out`."""
    if kwargs.get("out") is not None or fn in _OPERATORS:
        return True
    if isinstance(fn, OpOverload):
        return fn.namespace == "aten" and fn._schema.is_mutable
    name = _name(fn)
    return name in _METHODS or (
        name.endswith("_") and not name.endswith("__") and name not in _KEYWORDS
    )


def _name(fn: Any) -> str:
    return fn if isinstance(fn, str) else getattr(fn, "__name__", "")


def _verdict(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], windows: _Windows | None
) -> tuple[type[PlaitError], str, str] | None:
    """The class and text of what is wrong with a write, and what to try; None if nothing is."""
    given = _tensors((args, kwargs))
    if not given or any(x.layout != torch.strided or x.device.type == "meta" for x in given):
        return None
    written = _tensors(_written(args, kwargs))
    name = _name(fn)
    inside, writes = name in _INSIDE, name not in _SHAPES and name not in _INSIDE
    if windows is not None and writes and any(map(windows.has_gaps, written)):
        return Unsupported, _GAPS, _SLICES
    if any(map(compat.tracing.is_transformed, given)):  # by torch.func: their strides say nothing
        return None
    shares = not inside and any(map(repeats, written))
    storages = set(map(compat.tracing.storage_of, given))
    shared = not inside and len(storages) < len({id(x) for x in given})
    own = kwargs.get("out") is not None or name in _FLOATS
    # A user's operator holds what it likes.
    is_users = isinstance(fn, OpOverloadPacket) and not str(fn).startswith("aten.")
    casts = not is_users and _may_not_hold(written, given, (args, kwargs), own)
    if not shares and not shared and not casts:
        return None
    error = _tried(fn, args, kwargs)
    text = str(error).strip()
    if error is not None and _REFUSED.match(text):
        hint = CLONE if text.startswith("unsupported") else _BIAS if inside else _CAST
        return refusal(error), text.splitlines()[0], hint
    if error is None and shares and writes:
        return Unsupported, SHARED, CLONE
    return None


_FLOAT, _COMPLEX = 2, 3


def _may_not_hold(
    written: Sequence[torch.Tensor], given: Sequence[torch.Tensor], operands: Any, own: bool
) -> bool:
    """Whether the result may be of a dtype that what is written cannot hold. own: it may be the
    operator's own; else it is of the kind of an operand."""
    least = min(map(_kind, written), default=_COMPLEX)
    if own and (least < _FLOAT or len({x.dtype for x in given}) > 1):
        return True
    return max(map(_kind, pytree.tree_leaves(operands))) > least


def _kind(x: Any) -> int:
    """0 for a bool, 1 for an integer, _FLOAT, _COMPLEX; a tensor's is that of its elements. All
    else is -1."""
    if isinstance(x, torch.Tensor):
        return (
            _COMPLEX
            if x.is_complex()
            else _FLOAT
            if x.is_floating_point()
            else int(x.dtype != torch.bool)
        )
    kinds = (bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat), (complex,)
    return next((k for k, kind in enumerate(kinds) if isinstance(x, kind)), -1)


def _tried(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """What fn raises for zeros that lie in memory as its operands do."""
    storages: dict[int, torch.Tensor] = {}

    def real(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return compat.tracing.hint_of(x)
        sizes, strides = (
            [compat.tracing.hint_of(s) for s in found] for found in (x.shape, x.stride())
        )
        key, offset = compat.tracing.storage_of(x), compat.tracing.hint_of(x.storage_offset())
        end = offset + 1 + sum((n - 1) * st for n, st in zip(sizes, strides, strict=True))
        nbytes = max(end * x.itemsize, compat.tracing.hint_of(x.untyped_storage().nbytes()), 1)
        if key not in storages or storages[key].numel() < nbytes:
            storages[key] = torch.zeros(nbytes, dtype=torch.uint8)
        flat = torch.empty(0, dtype=x.dtype)
        return flat.set_(storages[key].untyped_storage(), offset, sizes, strides)

    return answer(fn, args, kwargs, real, torch.device("cpu"))
