"""A minimum cut: splits the nodes of a network in two so that what crosses costs least."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from itertools import pairwise
from math import inf

_LEAST = 1e-6  # what is left of a float's capacity below it is rounding


class Network:
    """Nodes with directed edges between them. `add` what an edge costs if its first node is on the
    source's side and its second one on the sink's."""

    def __init__(self) -> None:
        self._left: defaultdict[Hashable, dict[Hashable, float]] = defaultdict(dict)

    def add(self, a: Hashable, b: Hashable, cost: float = inf) -> None:
        """Adds to the cost of an edge."""
        self._left[a][b] = self._left[a].get(b, 0.0) + cost
        self._left[b].setdefault(a, 0.0)

    def sources_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """The nodes on the source's side of a cut that costs least: the smallest such set. No path
        from source to sink may have infinite cost (Dinic's algorithm)."""
        while sink in (levels := self._levels(source)):
            self._saturate(source, sink, levels)
        return set(levels)

    def _levels(self, source: Hashable) -> dict[Hashable, int]:
        """How many edges with something left lead to each node that can be reached."""
        levels, todo = {source: 0}, deque([source])
        while todo:
            node = todo.popleft()
            for b, left in self._left[node].items():
                if left > _LEAST and b not in levels:
                    levels[b] = levels[node] + 1
                    todo.append(b)
        return levels

    def _saturate(self, source: Hashable, sink: Hashable, levels: dict[Hashable, int]) -> None:
        """Sends what fits along shortest paths."""
        path, edges = [source], dict[Hashable, Iterator[Hashable]]()
        while path:
            node = path[-1]
            if node == sink:
                path = self._send(path)
                continue
            for b in edges.setdefault(node, iter(tuple(self._left[node]))):
                if levels.get(b) == levels[node] + 1 and self._left[node][b] > _LEAST:
                    path.append(b)
                    break
            else:
                path.pop()

    def _send(self, path: list[Hashable]) -> list[Hashable]:
        """Sends what fits along one path; returns it up to the first edge that has nothing left."""
        flow = min(self._left[a][b] for a, b in pairwise(path))
        for a, b in pairwise(path):
            self._left[a][b] -= flow
            self._left[b][a] += flow
        full = next(k for k, (a, b) in enumerate(pairwise(path)) if self._left[a][b] <= _LEAST)
        return path[: full + 1]
