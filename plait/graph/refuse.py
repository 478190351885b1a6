"""Dtypes that eager's kernels refuse although tracing takes them: `int64 @ float32`, a norm with
half weights.

Comes in: an operator with its fake operands, before it is decomposed. `eager_dtypes.txt` lists the
operators whose kernels are particular, each with the dtypes that they surely take. Anything else is
put to eager itself, on ones of the same shapes: what it refuses there, and would not refuse with
plain dtypes, is refused here with its own words. So nothing is turned away that the installed torch
runs, whatever the list says.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import guard_or_false

import plait.runtime.philox  # noqa: F401  (defines plait::within)
from plait import compat
from plait.devices import facts_of
from plait.errors import refusal
from plait.graph.edit import last_frame

LIST = Path(__file__).parent / "eager_dtypes.txt"
# Between a check and the user's line in a stack.
_OURS = ("plait", "torch", "contextlib", "functools")


@dataclass(frozen=True, slots=True)
class Taken:
    """What an operator's kernel on CPU surely takes.

    dtypes: of the tensors among which eager wants one dtype, or promotes if mixes. others: argument
    name -> dtypes of those that are something else, such as indices; the last is the plainest.
    """

    dtypes: frozenset[torch.dtype]
    others: Mapping[str, tuple[torch.dtype, ...]]
    mixes: bool

    def surely(self, values: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Whether eager need not be asked about tensors, each with the name of its argument."""
        found = set()
        for name, x in values:
            if name not in self.others:
                found.add(x.dtype)
            elif x.dtype not in self.others[name]:
                return False
        return found <= self.dtypes and (self.mixes or len(found) <= 1)


def read_list(text: str) -> dict[str, Taken]:
    """Operator's name -> what it takes. A line: `aten.index_put.default bool float32 ... |
    indices=bool,int64`, with `mixes` among the dtypes where they are promoted."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        head, _, tail = line.partition("|")
        name, *words = head.split()
        others = dict(item.split("=") for item in tail.split())
        dtypes = _dtypes(w for w in words if w != "mixes")
        found[name] = Taken(
            frozenset(dtypes),
            {k: _dtypes(v.split(",")) for k, v in others.items()},
            "mixes" in words,
        )
    return found


def _dtypes(names: Iterable[str]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names)


def tensors_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """All tensor operands, those in lists too, with the names of their arguments."""
    names = [a.name for a in op._schema.arguments]
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, torch.Tensor):
                found.append((name, x))
    return found


def check_dtypes(
    op: OpOverload, taken: Taken, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises an OperandError of the class that eager raises, if eager refuses these dtypes."""
    given = tensors_of(op, args, kwargs)
    error = _of_a_gpu(op, given)
    if error is None and not taken.surely(given):
        error = _asked(op, taken, args, kwargs, given)
    if error is not None:
        said = (str(error).strip().splitlines() or [""])[0]
        what = f"{op}({', '.join(f'{n}: {_short(x.dtype)}' for n, x in given)}): {said}"
        raise refusal(error)(what, where=users_line())


_GPU_PRODUCTS = {
    "mm": "addmm_cuda", "addmm": "addmm_cuda", "addbmm": "addmm_cuda", "bmm": "baddbmm_cuda",
    "baddbmm": "baddbmm_cuda", "mv": "addmv_impl_cuda", "addmv": "addmv_impl_cuda", "dot": "dot",
    "vdot": "dot",
}  # fmt: skip
"""Products that a GPU's library makes of floats and complex numbers alone, and what eager calls its
kernels. A table, for compilation launches nothing on a GPU, and there may be none; the list is of a
CPU, which multiplies integers as well."""
_WORDS = {
    torch.bool: "Bool", torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short",
    torch.int32: "Int", torch.int64: "Long",
}  # fmt: skip


def _of_a_gpu(op: OpOverload, given: list[tuple[str, torch.Tensor]]) -> Exception | None:
    """What eager raises for a product of integers on a GPU. Nothing is multiplied where a matrix is
    empty, and nothing refused; of dtypes that differ it says something else."""
    kernel = _GPU_PRODUCTS.get(op._schema.name.removeprefix("aten::"))
    dtypes = {x.dtype for _, x in given}
    if kernel is None or len(dtypes) > 1 or not dtypes <= _WORDS.keys():
        return None
    if any(
        not facts_of(x.device).streams or x.ndim > 1 and 0 in map(compat.tracing.hint_of, x.shape)
        for _, x in given
    ):
        return None
    return NotImplementedError(f"\"{kernel}\" not implemented for '{_WORDS[dtypes.pop()]}'")


def users_line() -> str:
    """ "file.py:12", the line of the user's program that is being traced."""
    stack = str(torch.fx.traceback.get_current_meta().get("stack_trace") or "")
    if where := last_frame(stack):
        return where
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS
        or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------ shared memory
SHARED = "a write to a tensor whose elements share memory"
CLONE = "clone() the tensor before it is written"
_MANY = 1 << 16  # elements that are too many to be looked at one by one


def repeats(x: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    sizes = [compat.tracing.hint_of(s) for s in x.shape]
    strides = [compat.tracing.hint_of(s) for s in x.stride()]
    if 0 in sizes:
        return False
    reach = 0
    for stride, n in sorted((t, n) for t, n in zip(strides, sizes, strict=True) if n > 1):
        if stride == 0:
            return True
        if stride <= reach:
            return math.prod(sizes) > _MANY or _collide(sizes, strides)
        reach += (n - 1) * stride
    return False


def _collide(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """The same, by looking at every element."""
    places = [range(0, n * t, t) if t else [0] for n, t in zip(sizes, strides, strict=True)]
    return len({sum(point) for point in itertools.product(*places)}) < math.prod(sizes)


# ------------------------------------------------------------------------------------- asking eager
def _asked(
    op: OpOverload,
    taken: Taken,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: list[tuple[str, torch.Tensor]],
) -> Exception | None:
    """What eager raises for the dtypes of these operands; None if it takes them or refuses
    something else as well."""
    device = _device(given, taken)
    if device is None:
        return None
    others = {id(x): x.dtype for name, x in given if name in taken.others}
    error = _tried(op, args, kwargs, device, others, None)
    if error is None:
        return None
    # Ones may be no good (a singular matrix), or the machine: then plain dtypes are refused, too.
    taken_of = {id(x): taken.others[name] for name, x in given if name in taken.others}
    plain = {
        key: others[key] if others[key] in dtypes else dtypes[-1]
        for key, dtypes in taken_of.items()
    }
    again = _tried(op, args, kwargs, device, plain, torch.float32)
    return (
        None
        if again is not None and (type(again), str(again)) == (type(error), str(error))
        else error
    )


def _device(given: list[tuple[str, torch.Tensor]], taken: Taken) -> torch.device | None:
    """Where eager is asked. None: nowhere, and nothing is refused. Which dtypes may not be mixed a
    CPU knows as well, where the machine lacks the GPU."""
    if any(x.layout != torch.strided for _, x in given):
        return None
    where = next((x.device for _, x in given if not facts_of(x.device).is_host), None)
    if where is None:
        return torch.device("cpu")
    # An index into nothing would break its context.
    if facts_of(where).streams and torch.cuda.is_available():
        return None if any(guard_or_false(n == 0) for _, x in given for n in x.shape) else where
    mixed = len({x.dtype for name, x in given if name not in taken.others}) > 1
    return torch.device("cpu") if mixed else None


def answer(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    real: Callable[[Any], Any],
    device: torch.device,
) -> Exception | None:
    """What eager raises for fn of real(x) for each x in args and kwargs, on device. Random numbers
    of later operators stay what they were."""
    cards = [device] if facts_of(device).streams else []
    with compat.tracing.untraced_operators(), torch.no_grad(), torch.random.fork_rng(cards):
        try:
            given, named = pytree.tree_map(real, (tuple(args), dict(kwargs)))
            fn(*given, **named)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the answer)
            return error
    return None


def _tried(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    others: Mapping[int, torch.dtype],
    dtype: torch.dtype | None,
) -> Exception | None:
    """What op raises for ones in place of its tensors, in `dtype` if there is one. others: the
    dtypes of those that are zeros, such as indices, by id."""

    def real(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return compat.tracing.hint_of(x)
        at = x.device if facts_of(x.device).is_host else device
        shape = [compat.tracing.hint_of(s) for s in x.shape]
        if id(x) in others:
            return torch.zeros(shape, dtype=others[id(x)], device=at)
        return torch.ones(shape, dtype=dtype or x.dtype, device=at)

    return answer(op, args, kwargs, real, device)


# ---------------------------------------------------------------------------------- in the compiler
@cache
def _taken() -> Mapping[str, Taken]:
    return read_list(LIST.read_text())


_RANGES = {
    "aten.binary_cross_entropy.default": {
        0: (0.0, 1.0, "all elements of input should be between 0 and 1"),
        1: (0.0, 1.0, "all elements of target should be between 0 and 1"),
    }
}
"""What eager finds wrong with values of an operand when it runs, where the decomposition does not
look."""


@cache
def _looks_at(op: OpOverload, operand: int, count: int) -> bool:
    """Whether this eager refuses a value beyond the range of one of `count` operands, all others in
    it."""
    _, high, _ = _RANGES[str(op)][operand]
    given = [high + (k == operand) for k in range(count)]
    return answer(op, given, {}, torch.tensor, torch.device("cpu")) is not None


def _in_ranges(op: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    ranges = _RANGES.get(str(op), {})
    looked = {k: r for k, r in ranges.items() if _looks_at(op, k, len(ranges))}
    return [torch.ops.plait.within(x, *looked[k]) if k in looked else x for k, x in enumerate(args)]


def or_else(first: Callable[..., Any], then: Callable[..., Any] | None) -> Callable[..., Any]:
    """first, and where it gives NotImplemented, `then`, if there is one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = first(*args, **kwargs)
        return then(*args, **kwargs) if made is NotImplemented and then is not None else made

    return run


def _checked(op: OpOverload, taken: Taken) -> Callable[[Any], Callable[..., Any]]:
    def around(decomposition: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            check_dtypes(op, taken, args, kwargs)
            return (
                NotImplemented
                if decomposition is None
                else decomposition(*_in_ranges(op, args), **kwargs)
            )

        return run

    return around


def _register() -> None:
    for name, taken in _taken().items():
        _, packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None:  # of another version of torch
            compat.decompositions.CHECKS[op] = _checked(op, taken)


_register()
