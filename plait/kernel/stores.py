"""How a store is done: the table that targets read.

A store statement runs at every point of its loops. A target handles several points at once: the
lanes of a vector, the points of a block. The row of a store depends on its mode and on what
differs between these points: the value (or the mask), the index, both, or neither.
"""

from __future__ import annotations

from enum import Enum


class How(Enum):
    """ONCE: one write, since all points write the same, or since further ones change nothing.
    REPEAT: one element, updated with one value as often as there are points.
    EACH: one element, written by one point after the other.
    ROW: elements of their own where the index walks along memory, so that points write together;
    otherwise one point after the other."""

    ONCE = "once"
    REPEAT = "repeat"
    EACH = "each"
    ROW = "row"


_COUNTS = {"neither": How.REPEAT, "value": How.EACH, "index": How.ROW, "both": How.ROW}
_IDEMPOTENT = {"neither": How.ONCE, "value": How.EACH, "index": How.ROW, "both": How.ROW}
STORES: dict[str, dict[str, How]] = {
    "store": _IDEMPOTENT,  # of several values for one element the last one stays
    "add": _COUNTS,
    "mul": _COUNTS,
    "min": _IDEMPOTENT,
    "max": _IDEMPOTENT,
}
"""Mode of a store -> what differs between the points -> how it is done."""


def how_to_store(mode: str, value_moves: bool, index_moves: bool) -> How:
    """The row of a store. value_moves: the value or the mask differs between points."""
    moves = {(False, False): "neither", (True, False): "value", (False, True): "index"}
    return STORES[mode][moves.get((value_moves, index_moves), "both")]
