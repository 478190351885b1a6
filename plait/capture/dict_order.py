"""Dict arguments whose keys come in another order than in the example, and keyword arguments that
`**kwargs` takes.

A program reads them by their keys. Whether a function goes by their order
(`torch.cat(list(d.values()))`) shows when it is traced once more with the keys of all dicts in
another order: no key is where it was.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.utils._pytree as pytree

_DICTS = (dict, OrderedDict, defaultdict)
_LEAF = pytree.tree_structure(0)


def loose_keywords(fn: Callable[..., Any], keywords: Iterable[str]) -> tuple[str, ...]:
    """The keyword arguments that have no parameter of their own."""
    parameters = inspect.signature(fn).parameters
    return tuple(name for name in keywords if name not in parameters)


def has_orders(args: pytree.TreeSpec, kwargs: pytree.TreeSpec, loose: Sequence[str]) -> bool:
    """Whether something that may be seen, in arguments or keyword arguments, has several keys."""
    return len(loose) > 1 or any(map(_has_several, (args, *kwargs.children())))


def _has_several(spec: pytree.TreeSpec) -> bool:
    return (spec.type in _DICTS and spec.num_children > 1) or any(
        map(_has_several, spec.children())
    )


def in_another_order(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """The tree of these leaves, its dicts with their keys in another order."""
    if spec.is_leaf():
        return next(leaves)
    parts = [in_another_order(child, leaves) for child in spec.children()]
    context = spec.context
    if spec.type in _DICTS:
        places = list(range(len(parts)))[::-1]
        middle = len(places) // 2
        if len(places) % 2 and middle:
            places[middle], places[-1] = places[-1], places[middle]
        keys = [(context[1] if spec.type is defaultdict else context)[k] for k in places]
        context = [context[0], keys] if spec.type is defaultdict else keys
        parts = [parts[k] for k in places]
    return pytree.tree_unflatten(parts, pytree.TreeSpec(spec.type, context, [_LEAF] * len(parts)))
