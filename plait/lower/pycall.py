"""Calls of Python callables: what no instruction can spell (subgraphs, generators, exotic dtypes)
is kept in a `PythonCall`.

Tensors, symbolic integers and objects that the graph is given become operands, symbolic floats
one-element tensors that are read when the call happens; everything else stays in the callable,
which goes to the program's table of callables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from plait.errors import Unsupported
from plait.ir.calls import Extern
from plait.ir.dtypes import f64
from plait.ir.expr import Expr
from plait.lower.core import Lowering, NoRule, View
from plait.lower.float_nodes import to_scalar_node
from plait.lower.operands import is_object_input, operand, results
from plait.runtime.generated import flat, settled


class PythonCall:
    """A callable of real tensors and ints: fills them into the arguments of an operator and calls
    it.

    holes: which leaves of the argument tree are filled at run time.
    items: of those, the ones that take the value of a one-element tensor.
    strides: of each flat result that is a tensor of known sizes, else None; a result that came out
        with others is copied.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        leaves: Sequence[Any],
        holes: Sequence[int],
        items: Sequence[int],
        tree: pytree.TreeSpec,
        strides: Sequence[tuple[int, ...] | None],
    ) -> None:
        self.op, self.leaves, self.holes, self.items = (
            op,
            tuple(leaves),
            tuple(holes),
            frozenset(items),
        )
        self.tree, self.strides = tree, tuple(strides)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """The flat results. Raises what the operator raises."""
        leaves = list(self.leaves)
        for k, value in zip(self.holes, operands, strict=True):
            leaves[k] = value.item() if k in self.items else value
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return tuple(settled(self.op(*args, **kwargs), self.strides))

    def __repr__(self) -> str:
        return f"PythonCall({getattr(self.op, '__name__', self.op)})"


def _static_strides(val: Any) -> tuple[int, ...] | None:
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    strides = val.stride()
    return strides if all(isinstance(s, int) for s in (*val.shape, *strides)) else None


def call_python(
    ctx: Lowering,
    op: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    reason: str,
    effectful: bool,
    fresh: bool = False,
) -> Any:
    """Records a call of `op`, the current node's operator, from Python, and returns its results as
    a rule would. reason: why nothing better stands for it, which is counted; "" where a rule chose
    the call. fresh: its results share memory with nothing.

    Raises Unsupported for arguments that cannot be found and results that no program can hold."""
    node, val = ctx.node, ctx.node.meta["val"]
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    fakes = pytree.tree_leaves((node.args, {k: node.kwargs[k] for k in kwargs}))
    items = [k for k, v in enumerate(leaves) if isinstance(v, torch.SymFloat)]
    for k in items:
        leaves[k] = number_of(ctx, leaves[k])
    if any(isinstance(v, torch.fx.Node) for v in leaves):
        raise Unsupported(f"an argument of {name} in a container of an unknown kind")
    holes = [k for k, v in enumerate(leaves) if isinstance(v, (View, Expr)) or is_object_input(v)]
    operands = tuple(operand(ctx, leaves[k], None if k in items else fakes[k]) for k in holes)
    kept = [None if k in holes else v for k, v in enumerate(leaves)]
    outs, symbols, result = results(ctx, val)
    ctx.tables.callables.append(
        PythonCall(op, kept, holes, items, tree, [_static_strides(v) for v in flat(val)])
    )
    given = tuple(dict.fromkeys(leaves[k].buf for k in holes if isinstance(leaves[k], View)))
    if reason:
        ctx.fell_back("python", name, reason)
    ctx.ops.append(
        Extern(
            outs, name, operands, symbols=symbols, aliases=() if fresh else given,
            effectful=effectful,
            callable_index=len(ctx.tables.callables) - 1, fallback=bool(reason),
            origin=ctx.origin,
        )
    )  # fmt: skip
    return result


def number_of(ctx: Lowering, value: torch.SymFloat) -> View:
    """A symbolic float as a tensor of one element."""
    return ctx.pointwise((), f64, lambda ops, i: to_scalar_node(ops, value, ctx.float_readers()))


def rule_or_python(
    ctx: Lowering, op: Any, rule: Callable[[], Any], args: Sequence[Any],
    kwargs: Mapping[str, Any], fresh: bool = False,
) -> Any:  # fmt: skip
    """What a rule makes of a higher-order operator; if it declines, a call of Python that says
    why. fresh: as in `call_python`."""
    mark = ctx.mark()
    try:
        return rule()
    except (NoRule, Unsupported) as e:
        ctx.undo(mark)
        why = f"runs as Python: {e.what if isinstance(e, Unsupported) else e}"
    name = f"{op.namespace}::{op.__name__}"
    return call_python(ctx, op, name, args, kwargs, reason=why, effectful=True, fresh=fresh)
