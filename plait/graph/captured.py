"""What capture hands to the compiler: one functional ATen graph with its facts.

Comes in from `capture/`, goes to `graph/` passes and `lower/`. Placeholders and nodes carry fake
tensors, SymInts or plain ints in `meta["val"]`; the only mutation left in the graph is a trailing
`aten.copy_` into a placeholder. This file must not know who captured the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch.fx

from plait.errors import Fallback

GraphKind = Literal["inference", "forward", "backward", "subprogram"]


@dataclass(frozen=True)
class InputView:
    """How a result lies in the storage of an input.

    input: its position. shape, strides, offset: in elements of the result's dtype; offset counts
    from the start of the storage, as `storage_offset()` does. whole: the result is the input
    itself.
    """

    input: int
    shape: tuple[int | torch.SymInt, ...]
    strides: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt
    whole: bool = False


@dataclass(frozen=True)
class Captured:
    """One graph to compile.

    name: unique within the process, such as "inference_0" or "backward_3"; used for debug folders.
    donated_inputs: positions of placeholders that nobody reads after the call (saved tensors of a
    backward).
    bumped_inputs: positions of mutated placeholders whose autograd version the program itself must
    bump, once a call.
    n_results: of a forward graph: how many of its outputs are for the caller, the others are for
    its backward graph.
    wrapper_reason: why calls go through AOTAutograd's runtime wrapper; "" where they do not.
    input_views: the outputs (by position) that are inputs or views of them, where they lie.
    watcher: what the program shows its intermediates to, see `wrapper/watch.py`.
    ladder: steps down the ladder that were taken before, on the way here.
    guarded: whether Dynamo or AOTAutograd looks at inputs before a call; else the program checks
    strides that vary.
    input_names, result_names: the user's words for placeholders and outputs, by position, "" where
    there are none; empty where nobody asks."""

    graph: torch.fx.GraphModule
    name: str
    kind: GraphKind
    donated_inputs: tuple[int, ...] = ()
    bumped_inputs: tuple[int, ...] = ()
    n_results: int | None = None
    wrapper_reason: str = ""
    input_views: Mapping[int, InputView] = field(default_factory=dict)
    watcher: Callable[[str, str, torch.Tensor | None], None] | None = None
    ladder: tuple[Fallback, ...] = ()
    guarded: bool = True
    input_names: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()
