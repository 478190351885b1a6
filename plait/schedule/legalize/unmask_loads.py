"""Loads once what two branches of a choice load, each where it is taken: the byte of which one has
the low half and the other the high one."""

from __future__ import annotations

from plait.ir.loops import Load, Node, node, rewrite, walk, with_args
from plait.ir.rules import Simplifier
from plait.schedule.legalize.linear import LinearKernel, map_nodes


def unmask_loads(linear: LinearKernel) -> LinearKernel:
    """The kernel without masks of loads that branches of a choice have in common."""
    masked = {
        n.args[-1] for n in walk(linear.roots()) if isinstance(n.attr, Load) and n.attr.masked
    }
    choices = [n for n in walk(linear.roots()) if n.op == "where" and n.args[0] in masked]
    found = next(((n, whole) for n in choices if (whole := _unmasked(n)) is not None), None)
    if found is None:
        return linear
    choice, whole = found
    return unmask_loads(
        map_nodes(linear, lambda n, args: whole if n == choice else with_args(n, args))
    )


def _unmasked(choice: Node) -> Node | None:
    """A choice with loads that either branch has, of the same elements; None if it has none."""
    met, *branches = choice.args
    masks = (met, Simplifier((met,))(node("not", (met,))))
    loads = [
        {_whole(n): n for n in walk((b,)) if isinstance(n.attr, Load) and _is_under(n, mask)}
        for b, mask in zip(branches, masks, strict=True)
    ]
    both = loads[0].keys() & loads[1].keys()
    if not both:
        return None
    new = {found[n]: n for found in loads for n in both}
    if any(not new.keys().isdisjoint(walk(_places(n))) for n in walk(branches)):
        return None  # where another load reads is held by the kernel, too: `indirect`
    yes, no = (rewrite(b, lambda n, args: new.get(n) or with_args(n, args)) for b in branches)
    return node("where", (met, yes, no))


def _is_under(n: Node, mask: Node) -> bool:
    assert isinstance(n.attr, Load), n
    return n.attr.masked and n.args[-1] in (mask, Simplifier()(mask))


def _places(n: Node) -> tuple[Node, ...]:
    """What the index of a load is made of; () for other nodes."""
    if not isinstance(n.attr, Load):
        return ()
    return n.args[:-1] if n.attr.masked else n.args


def _whole(n: Node) -> Node:
    """A load without its mask."""
    assert isinstance(n.attr, Load), n
    if not n.attr.masked:
        return n
    return node("load", _places(n), Load(n.attr.buf, n.attr.index, False), n.dtype)
