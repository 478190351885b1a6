"""The passes over convolutions, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch.fx import GraphModule

from plait.graph.convolution_gradients import split_gradients
from plait.graph.long_groups import widen_long_groups
from plait.graph.memory_format import channels_last
from plait.graph.patches import unfold_patches
from plait.graph.point_convolutions import multiply_points

CONVOLUTIONS: tuple[tuple[str, Callable[[GraphModule], int]], ...] = (
    ("split gradients", split_gradients),
    ("widen long groups", widen_long_groups),
    ("unfold patches", unfold_patches),
    ("channels last", channels_last),
    ("multiply points", multiply_points),  # of images whose channels are innermost now
)
OF_ROWS = frozenset((unfold_patches, multiply_points))
"""Those that ask nothing of how many images there are."""


def before_packing(by_rows: bool) -> list[Callable[[GraphModule], int]]:
    """Those that run where a CPU's convolutions are going to read packed filters, channels-last.
    by_rows: OF_ROWS alone."""
    packs = (channels_last, multiply_points)
    return [
        partial(run, packs=True) if run in packs else run
        for _, run in CONVOLUTIONS
        if run in OF_ROWS or not by_rows
    ]
