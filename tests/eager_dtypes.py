"""What eager's kernels take, found by asking them: calls of ATen operators, recorded from PyTorch's
op samples, with their dtypes changed.

`python -m tests.eager_dtypes` writes `plait/graph/eager_dtypes.txt`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_function
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db

from plait.capture.early_kernels import Kernels, early_kernels
from plait.graph.refuse import LIST, Taken, tensors_of
from plait.log import watched
from tests.opinfo_tools import UNTRACEABLE, Case, pick, traceable

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_BY_PARTS = ("aten.matmul.default",)  # the operators that it is made of are looked at
_SAMPLES, _CALLS = 13, 24  # a number that beats with no order of samples
_HEADER = """\
# Operators whose kernels on CPU do not take every dtype, in torch 2.13: \
made by `python -m tests.eager_dtypes`.
# A line: the operator, the dtypes that it surely takes, \
`mixes` if they may differ among its tensors, and after a bar
# the arguments that are something else, such as indices. See refuse.py.
"""


@dataclass(frozen=True)
class Call:
    """One call of an operator as eager runs it."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return tensors_of(self.op, self.args, self.kwargs)

    def cast(self, dtype_of: Callable[[str, int, torch.Tensor], torch.dtype]) -> Call:
        """The call with the k-th tensor x, of argument `name`, in dtype_of(name, k, x)."""
        dtypes = iter([dtype_of(name, k, x) for k, (name, x) in enumerate(self.tensors())])
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        changed = [x.to(next(dtypes)) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(changed, spec)
        return Call(self.op, args, kwargs)

    def filled(self) -> Call:
        """The call with ones in place of numbers, so that nothing but dtypes is wrong: no division
        by 0."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        ones = [
            torch.ones_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in leaves
        ]
        args, kwargs = pytree.tree_unflatten(ones, spec)
        return Call(self.op, args, kwargs)

    def error(self) -> Exception | None:
        """What eager raises."""
        try:
            self.op(*self.args, **self.kwargs)
        except Exception as error:  # noqa: BLE001  (the answer)
            return error
        return None


def ops() -> list[Any]:
    """The op samples from which calls are recorded."""
    return [
        op
        for op in op_db
        if op.name not in (*UNTRACEABLE, "as_strided", "as_strided_scatter")
        and not op.name.startswith(("masked.", "jiterator"))
        and torch.float32 in op.supported_dtypes("cpu")
    ]


def recorded(op: Any, samples: int) -> Iterator[Call]:
    """The functional calls that some float32 samples of an op come to: by kernels that decompose
    before autograd, and before anything else is decomposed."""
    for case in pick(op, torch.float32, samples):
        if traceable(case) and all(x.layout == torch.strided for x in case.inputs()):
            yield from _calls_of(case)


def _calls_of(case: Case) -> list[Call]:
    found: list[Call] = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if (
                isinstance(target, OpOverload)
                and target.namespace == "aten"
                and not target._schema.is_mutable
            ):
                found.append(Call(target, tuple(args), dict(kwargs)))
            return super().call_function(target, args, kwargs)

    def record(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: Recorder(gm).run(*args)

    def early(op: OpOverload, kernels: Kernels) -> Kernels:
        def run(*args: Any, **kwargs: Any) -> Any:
            found.append(Call(op, args, kwargs))
            with torch._C._DisablePythonDispatcher():
                return op(*args, **kwargs)

        return kernels if op._schema.is_mutable else dict.fromkeys(kernels, run)

    with torch.no_grad():
        with early_kernels(early), enable_python_dispatcher():
            case.run([x.detach().clone() for x in case.inputs()])
        run = aot_function(lambda *xs: case.run(xs), fw_compiler=record, decompositions={})
        run(*(x.detach().clone() for x in case.inputs()))
    return found


def by_operator(found: Iterable[Call]) -> dict[str, list[Call]]:
    """At most _CALLS calls of each operator that has tensors with elements, as different as
    possible."""
    calls: dict[str, dict[Any, Call]] = {}
    for call in found:
        tensors = call.tensors()
        if not tensors or any(0 in x.shape for _, x in tensors):
            continue
        words = tuple(x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, str))
        kind = (words, *((name, x.dtype, x.dim()) for name, x in tensors))
        kinds = calls.setdefault(str(call.op), {})
        if len(kinds) < _CALLS:
            kinds.setdefault(kind, call)
    return {name: list(kinds.values()) for name, kinds in calls.items()}


def taken_by(calls: Sequence[Call]) -> Taken | None:
    """What an operator takes in all its calls; None if it takes everything, or does not run as
    recorded."""
    floats = {name for c in calls for name, x in c.tensors() if x.is_floating_point()}
    others: dict[str, tuple[torch.dtype, ...]] = {}
    for name, x in (given for c in calls for given in c.tensors()):
        if name not in floats:
            others[name] = tuple(sorted({x.dtype, *others.get(name, ())}, key=str))
    calls = [f if (f := c.filled()).error() is None else c for c in calls if c.error() is None]
    if not floats or not calls:
        return None
    dtypes = frozenset(
        d for d in DTYPES if all(uniform(c, others, d).error() is None for c in calls)
    )
    mixes = all(
        m.error() is None
        for c in calls
        for d in dtypes
        for e in dtypes
        for m in mixed(c, others, d, e)
    )
    if mixes and len(dtypes) == len(DTYPES) and not others:
        return None
    return Taken(dtypes, others, mixes)


def uniform(call: Call, others: Iterable[str], dtype: torch.dtype) -> Call:
    """The call with all its tensors but `others` in one dtype."""
    return call.cast(lambda name, _, x: x.dtype if name in others else dtype)


def mixed(call: Call, others: Iterable[str], one: torch.dtype, rest: torch.dtype) -> Iterator[Call]:
    """The call with each tensor but `others` in turn in dtype `one`, and the rest in another."""
    of_interest = [k for k, (name, _) in enumerate(call.tensors()) if name not in others]
    if one != rest and len(of_interest) > 1:
        for at in of_interest:
            yield call.cast(
                lambda name, k, x, at=at: x.dtype if name in others else one if k == at else rest
            )


def line_of(name: str, taken: Taken) -> str:
    short = [str(d).removeprefix("torch.") for d in DTYPES if d in taken.dtypes] + [
        "mixes"
    ] * taken.mixes
    others = [
        f"{k}={','.join(str(d).removeprefix('torch.') for d in v)}"
        for k, v in sorted(taken.others.items())
    ]
    return " ".join([name, *short, *(["|", *others] if others else [])])


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    found: list[Call] = []
    for op in watched("operators", ops()):
        found += recorded(op, _SAMPLES)
    lines = []
    for name, calls in sorted(by_operator(found).items()):
        if name not in _BY_PARTS and (taken := taken_by(calls)):
            lines.append(line_of(name, taken))
    LIST.write_text(_HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
