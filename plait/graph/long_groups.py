"""Convolutions of 16 bits with groups and long filters compute in TF32 on a GPU.

cuDNN has no fast kernel for them (12.7 ms against 0.6 for the positions of a speech model, 768
channels in 16 groups with filters of 128: benchmarks/conv_gpu.py). TF32 has more digits than either
of the 16-bit types, so nothing is lost. Runs before `channels_last`.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import GraphModule, Node

from plait.graph.conv_cost import convolution_of, hint
from plait.graph.edit import aten, insert, replace, value_of
from plait.graph.memory_format import is_candidate, rounds_float32

LEAST_TAPS = 32


def widen_long_groups(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many convolutions compute in float32 from now on."""
    found = [n for n in gm.graph.nodes if n.target is aten.convolution.default and _is_slow(n)]
    for node in found:
        args = list(node.args)
        for k, x in enumerate(args[:3]):
            if isinstance(x, Node):
                args[k] = insert(node, x, aten._to_copy.default, dtype=torch.float32)
        made = insert(node, args[0], node.target, *args[1:])
        made = insert(node, made, aten._to_copy.default, dtype=value_of(node).dtype)
        replace(node, made)
    return len(found)


def _is_slow(node: Node) -> bool:
    if not is_candidate(node) or not rounds_float32():
        return False
    c = convolution_of(node)
    if c.x.dtype == torch.float32 or c.transposed or c.is_depthwise:
        return False
    return hint(c.groups) > 1 and prod(map(hint, c.window)) >= LEAST_TAPS
