"""Makes a failing graph small: fewer results, operators and arguments, small sizes, plain dtypes
and numbers.

`smallest` is the loop, for whatever can be made smaller (the fuzzer of the tests shrinks its
programs by it); `candidates` are the smaller graphs of a `Piece`.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from plait.graph.edit import output_of
from plait.tools.faults.evaluate import Unknown, draws
from plait.tools.faults.pieces import Piece, cut_out

T = TypeVar("T")


def smallest(
    p: T,
    candidates: Callable[[T], Iterable[T]],
    fails: Callable[[T], bool],
    seconds: float,
    tell: Callable[[T], None] = lambda p: None,
) -> T:
    """The smallest p found in that time that still fails: the first candidate that does takes its
    place, until none does. tell: called with each."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in candidates(p):
            if time.monotonic() > end:
                return p
            if fails(candidate):
                p, again = candidate, True
                tell(p)
                break
    return p


def candidates(p: Piece) -> Iterator[Piece]:
    """Smaller pieces, the most promising first."""
    for smaller in (_heads, _tails, _without_calls, _sizes, _dtypes, _numbers):
        yield from (q for q in smaller(p) if q.outputs)


def _held(p: Piece) -> dict[Node, Any]:
    return dict(p.values().given)


def _calls(p: Piece) -> list[Node]:
    """The operators that give one tensor."""
    return [n for n in p.module.graph.nodes if n.op == "call_function"]


def _spread(n: int) -> list[int]:
    """0 to n - 1, halves before quarters before the rest."""
    found: dict[int, None] = {}
    step = n
    while step > 1:
        step = -(-step // 2)
        found |= dict.fromkeys(range(step - 1, n, step))
    return list(found | dict.fromkeys(range(n)))


def _heads(p: Piece) -> Iterator[Piece]:
    """Up to one node."""
    outs = p.outputs
    if len(outs) > 1:
        yield from (cut_out(p.module, _held(p), [n]) for n in outs)
    calls = _calls(p)
    for k in _spread(len(calls) - 1):
        if not draws(calls[k]) and isinstance(_value(p, calls[k]), Tensor):
            yield cut_out(p.module, _held(p), [calls[k]])


def _tails(p: Piece) -> Iterator[Piece]:
    """What the first operators make is given."""
    calls = _calls(p)
    for k in reversed(_spread(len(calls) - 1)):
        early = [n for n in calls[: k + 1] if any(u not in calls[: k + 1] for u in n.users)]
        values = {n: v for n in early if isinstance(v := _value(p, n), Tensor)}
        if len(values) == len(early):
            yield cut_out(p.module, {**_held(p), **values}, p.outputs)


def _without_calls(p: Piece) -> Iterator[Piece]:
    """One operator's result is given, or is one of its arguments."""
    for n in reversed(_calls(p)):
        value = _value(p, n)
        if not isinstance(value, Tensor):
            continue
        for x in n.all_input_nodes:
            like = _value(p, x)
            same = isinstance(like, Tensor) and like.shape == value.shape
            if same and like.dtype == value.dtype:
                yield _replaced(p, n, x)
        if n not in p.outputs:
            yield cut_out(p.module, {**_held(p), n: value}, p.outputs)


def _replaced(p: Piece, old: Node, new: Node) -> Piece:
    graph = Graph()
    env: dict[Node, Node] = {}
    for n in p.module.graph.nodes:
        env[n] = env[new] if n is old else graph.node_copy(n, env.__getitem__)
    module = GraphModule(p.module, graph)
    names = module.graph.find_nodes(op="placeholder")
    return cut_out(module, dict(zip(names, p.given, strict=True)), output_of(graph).all_input_nodes)


def _value(p: Piece, n: Node) -> Any:
    try:
        return p.values().of(n)[0]
    except Unknown:
        return None


def _mapped(p: Piece, change: Callable[[Any], Any], given: Sequence[Any]) -> Piece | None:
    """With other numbers in the operators' arguments and other arguments; None where eager refuses
    that."""
    graph = Graph()
    env: dict[Node, Node] = {}
    for n in p.module.graph.nodes:
        made = env[n] = graph.node_copy(n, env.__getitem__)
        if n.op == "call_function" and n.target is not operator.getitem:
            given_args: Any = map_aggregate((made.args, made.kwargs), change)
            made.args, made.kwargs = given_args
    found = Piece(GraphModule(p.module, graph), tuple(given))
    try:
        found.values().of(*found.outputs)
    except Unknown:
        return None
    return found


def _sizes(p: Piece) -> Iterator[Piece]:
    """One size is smaller, wherever it stands."""
    tensors = [x for x in p.given if isinstance(x, Tensor)]
    for size in sorted({n for x in tensors for n in x.shape}, reverse=True):
        for less in (1, 2, 4, 8, 16, -(-size // 2)):
            if less >= size:
                break

            def other(a: Any, size: int = size, less: int = less) -> Any:
                return less if type(a) is int and a == size else a

            given = [_cropped(x, size, less) for x in p.given]
            if found := _mapped(p, other, given):
                yield found


def _cropped(x: Any, size: int, less: int) -> Any:
    if not isinstance(x, Tensor):
        return less if type(x) is int and x == size else x
    at = tuple(slice(less) if n == size else slice(None) for n in x.shape)
    return x[at].clone() if size in x.shape else x


_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int32: torch.int64}


def _dtypes(p: Piece) -> Iterator[Piece]:
    """Without one of the unusual dtypes."""
    for dtype, plain in _WIDE.items():

        def other(a: Any, dtype: torch.dtype = dtype, plain: torch.dtype = plain) -> Any:
            return plain if a is dtype else a

        given = [x.to(other(x.dtype)) if isinstance(x, Tensor) else x for x in p.given]
        uses = any(x is not y for x, y in zip(given, p.given, strict=True))
        if uses and (found := _mapped(p, other, given)):
            yield found


def _numbers(p: Piece) -> Iterator[Piece]:
    """One float is a plain one; tensors that do not lie densely do."""
    floats = dict.fromkeys(
        a for n in _calls(p) for a in (*n.args, *n.kwargs.values())
        if isinstance(a, float) and a not in (0.0, 1.0, 2.0)
    )  # fmt: skip
    for number in floats:
        if found := _mapped(p, lambda a, number=number: 2.0 if a == number else a, p.given):  # type: ignore
            yield found
    for k, x in enumerate(p.given):
        if isinstance(x, Tensor) and not x.is_contiguous():
            yield Piece(p.module, (*p.given[:k], x.contiguous(), *p.given[k + 1 :]))
