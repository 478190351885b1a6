"""Equal bits: what `numerics="eager"` promises, over PyTorch's own op samples, forward and
gradient. `python -m tests.bits [--device cuda] [--only NAME]` goes through all of them and prints
what differs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from plait.log import watched
from tests import opinfo_tools as tools

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
GRADIENTS = (torch.float32, torch.bfloat16)
DYNAMOS = ("addcdiv",)
"""Operators that Dynamo writes out as others before plait sees them."""
TRACED = ("max.reduction_no_dim", "min.reduction_no_dim", "median", "nanmedian")
"""Ops whose gradient PyTorch writes in another way where it is traced: its zeros have signs."""
Run = Callable[..., Any]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, sizes and bits, but for those of NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    equal = (a == b) & (a.signbit() == b.signbit()) | nan
    return bool(equal.all()) and torch.equal(nan, b.isnan())


def compiled(fn: Run, **options: Any) -> Run:
    """fn under the contract, on a code object of its own."""
    torch._dynamo.reset()
    options = {"numerics": "eager", **options}
    return torch.compile(lambda *xs, **named: fn(*xs, **named), backend="plait", options=options)


def outcome(run: Run, args: Sequence[Any], named: dict[str, Any], train: bool) -> list[Any]:
    """The tensors that a call gives; with train the gradients of its arguments, too."""
    torch.manual_seed(0)
    found = [x for x in tree_leaves(run(*args, **named)) if isinstance(x, torch.Tensor)]
    wanted = [
        x for x in tree_leaves((args, named)) if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    outs = [x for x in found if x.requires_grad]
    if train and outs and wanted:
        weights = [torch.linspace(-1, 1, x.numel()).reshape(x.shape) for x in outs]
        # AOTAutograd gives gradients the strides of the results.
        weights = [torch.empty_like(x).copy_(w) for x, w in zip(outs, weights, strict=True)]
        found += torch.autograd.grad(outs, wanted, weights, allow_unused=True)
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in found]


def equal(wants: Sequence[Any], gots: Sequence[Any]) -> bool:
    """Whether all tensors have the same bits; None stands for a gradient that there is not."""
    return len(wants) == len(gots) and all(
        (a is None and b is None)
        or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_bits(a, b))
        for a, b in zip(wants, gots, strict=True)
    )


def differing(
    op: Any, dtype: torch.dtype, train: bool, device: str = "cpu", most: int = 4
) -> Iterator[str]:
    """What differs, or fails, of the first samples of an op."""
    samples = islice(op.sample_inputs(device, dtype, requires_grad=train), most)

    def run(*args: Any, **named: Any) -> Any:
        """AOTAutograd derives what is a view of an argument without a graph of plait."""
        return tree_map(_apart, op.op(*args, **named)) if train else op.op(*args, **named)

    for k, sample in enumerate(samples):
        args = (sample.input, *sample.args)
        try:
            wants = outcome(run, args, sample.kwargs, train)
        except (RuntimeError, NotImplementedError):
            continue  # eager refuses
        if not equal(wants, outcome(run, args, sample.kwargs, train)):
            continue  # eager itself gives other bits each time: sums in any order
        gots = outcome(compiled(run), args, sample.kwargs, train)
        if not equal(wants, gots):
            yield f"sample {k} of {tools.name_of(op)}, {dtype}{', gradient' if train else ''}"


def together(
    ops: Sequence[Any], dtypes: Sequence[torch.dtype], most: int, device: str = "cpu"
) -> bool:
    """Whether the first samples of these ops have eager's bits, all in one program."""
    samples = [
        (op, sample)
        for op in ops
        for dtype in dtypes
        if op.supports_dtype(dtype, device)
        for sample in islice(op.sample_inputs(device, dtype), most)
    ]

    def run(*groups: Any) -> list[Any]:
        return [
            op.op(*args, **sample.kwargs)
            for (op, sample), args in zip(samples, groups, strict=True)
        ]

    groups = [(s.input, *s.args) for _, s in samples]
    return equal(outcome(run, groups, {}, False), outcome(compiled(run), groups, {}, False))


def _apart(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def cases(device: str = "cpu") -> Iterator[tuple[Any, torch.dtype, bool]]:
    """Every op with its dtypes, forward and, of two of them, gradient."""
    for op in op_db:
        if (
            op.name.startswith(("jiterator", "torch.ops"))
            or "empty" in op.name
            or op.name in DYNAMOS
        ):
            continue
        for dtype in DTYPES:
            if not op.supports_dtype(dtype, device):
                continue
            yield op, dtype, False
            trains = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
            if trains and dtype in GRADIENTS and tools.name_of(op) not in TRACED:
                yield op, dtype, True


def main() -> None:
    """Goes through all of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="")
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th case, from the K-th")
    args = parser.parse_args()
    k, n = map(int, args.shard.split("/"))
    mine = [c for c in islice(cases(args.device), k, None, n) if args.only in tools.name_of(c[0])]
    for op, dtype, train in watched("cases", mine):
        try:
            for line in differing(op, dtype, train, args.device):
                print("other bits:", line, flush=True)
        except Exception as error:  # noqa: BLE001  (a finding)
            text = " ".join(str(error).split())[:200]
            print(
                f"{tools.name_of(op)} {dtype} {train}: {type(error).__name__}: {text}", flush=True
            )
    print(f"{len(mine)} cases")


if __name__ == "__main__":
    main()
