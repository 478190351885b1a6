"""The clean-up of a captured graph: an ordered list of passes, each of which edits the graph in
place.

Comes in from capture, goes to lower. A pass returns how many nodes it changed. Order matters only
where a comment says so.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule

from plait.config import Config
from plait.errors import UserError
from plait.graph.captured import Captured
from plait.graph.constants import fold_constants
from plait.graph.cse import merge_common
from plait.graph.dead import drop_dead
from plait.graph.edit import know_replaced
from plait.graph.fma import gather_products
from plait.graph.items import list_items
from plait.graph.memory_format import channels_last
from plait.graph.noop import drop_noops
from plait.graph.random import replace_random
from plait.graph.streams import order_streams

Pass = Callable[[GraphModule], int]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("know replaced", know_replaced),  # first: others take copies away, whose views lie elsewhere
    ("list items", list_items),  # before passes that drop or merge what makes no number
    ("order streams", order_streams),  # before passes that make nodes, which have no stream
    ("replace random", replace_random),  # before CSE: two equal random calls are two draws
    ("channels last", channels_last),  # before copies that change nothing go
    ("drop dead", drop_dead),  # early: the other passes are linear in what is left
    ("drop no-ops", drop_noops),
    ("gather products", gather_products),
    ("fold constants", fold_constants),
    ("merge common", merge_common),
    ("drop dead again", drop_dead),  # after folding and merging: arguments lose their users
)


ADDED: list[tuple[str, Pass]] = []
"""Passes from outside the tree, see `plait.extend.graph_pass`."""


def clean_graph(captured: Captured, cfg: Config) -> Captured:
    """Runs PASSES over the graph in place and returns the same object. The module's code is not
    regenerated."""
    for _, run in PASSES:
        if run is not replace_random or not cfg.eager_random:
            run(captured.graph)
    for name, run in ADDED:
        run(captured.graph)
        _verify_added(name, captured.graph)
    if ADDED:
        drop_dead(captured.graph)
    return captured


def _verify_added(name: str, graph: GraphModule) -> None:
    """Raises UserError where a pass from outside the tree left what lowering cannot take."""
    try:
        graph.graph.lint()
    except RuntimeError as e:
        raise UserError(f"the graph pass {name!r} left a broken graph: {e}") from e
    for n in graph.graph.nodes:
        if n.op == "call_function" and "val" not in n.meta:
            raise UserError(
                f"the graph pass {name!r} left {n.name} without its fake value",
                hint='set meta["val"] of every node that it makes',
            )
