"""What capture hands to the compiler: one functional ATen graph with its facts.

Comes in from `capture/`, goes to `graph/` passes and `lower/`. Placeholders and nodes carry fake tensors,
SymInts or plain ints in `meta["val"]`; the only mutation left in the graph is a trailing `aten.copy_`
into a placeholder. This file must not know who captured the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.fx

GraphKind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True)
class Captured:
    """One graph to compile.

    name: unique within the process, such as "inference_0" or "backward_3"; used for debug folders.
    donated_inputs: positions of placeholders that nobody reads after the call (saved tensors of a backward).
    bumped_inputs: positions of mutated placeholders whose autograd version the program itself must bump, once a call.
    n_results: of a forward graph: how many of its outputs are for the caller, the others are for its backward graph.
    wrapper_reason: why calls go through AOTAutograd's runtime wrapper; "" where they do not.
    watcher: what the program shows its intermediates to, see `wrapper/watch.py`.
    """

    graph: torch.fx.GraphModule
    name: str
    kind: GraphKind
    donated_inputs: tuple[int, ...] = ()
    bumped_inputs: tuple[int, ...] = ()
    n_results: int | None = None
    wrapper_reason: str = ""
    watcher: Callable[[str, str, torch.Tensor | None], None] | None = None
