"""Convolutions of several images as one of each, under `batch_invariant`.

Libraries choose a convolution's kernel by how many images there are, and with it the order of sums.
Runs after convolutions that are products have become such. Images of a number that is not known
stay together: `explain` tells of them.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from plait.graph.edit import aten, insert, insert_like, replace, value_of


def convolve_images_apart(gm: GraphModule) -> int:
    """Changes the graph in place; returns how many convolutions it replaced."""
    found = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    apart = [n for n in found if type(n0 := value_of(n).shape[0]) is int and n0 > 1]
    for node in apart:
        images: Any = node.args[0]
        made = []
        for k in range(value_of(node).shape[0]):
            one = insert(node, images, aten.slice.Tensor, 0, k, k + 1)
            made.append(insert(node, one, aten.convolution.default, *node.args[1:]))
        replace(node, insert_like(node, value_of(node), aten.cat.default, made, 0))
    return len(apart)
