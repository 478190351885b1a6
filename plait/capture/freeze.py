"""Weights as constants, for inference: what depends on them alone is computed when a program is
compiled, and again when they have changed.

`frozen` takes weights out of a traced graph. `FrozenOwners` makes their constants again: of other
tensors in the place of weights, and of weights that were changed in place, which their versions
tell. A program is bound to constants as it is to weights; the native callable looks at the versions
of `sources` before a call, `PythonBound` has them looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from plait import compat
from plait.capture.owners import Owners
from plait.capture.trace import Traced
from plait.compat.fake_shapes import short_shapes
from plait.config import Config
from plait.devices import facts_of
from plait.errors import InputError, UserError
from plait.graph.fold import Folded, fold_weights
from plait.kernel.targets import TARGETS


@dataclass(frozen=True)
class Frozen:
    """A traced program without the weights that became constants.

    traced: the program. Its other weights are in `traced.state` as they were.
    folded: what became of them.
    sources: the weights that constants are made of, all that may be, by name.
    names: of those that are built in.
    """

    traced: Traced
    folded: Folded
    sources: Mapping[str, torch.Tensor]
    names: tuple[str, ...]

    @property
    def told(self) -> str:
        """A line for people."""
        module, folded = self.traced.graph, self.folded
        nbytes = sum(getattr(module, n).nbytes for n in folded.packed)
        copies = f", {len(folded.packed)} of them a second copy of weights in the order of kernels "
        copies += f"({nbytes / 2**20:.1f} MiB)"
        return (
            f"{len(self.names)} weights are built in, as {len(folded.names)} constants"
            f"{copies if folded.packed else ''}"
        )


def require_other_bits(cfg: Config, who: str) -> None:
    """Raises UserError where results are to have eager's bits. who: what folds weights."""
    if cfg.keeps_bits:
        raise UserError(
            f"{who} and numerics='eager'",
            hint="one of the two: weights that are folded or packed give other bits than eager's",
        )


def frozen(traced: Traced, cfg: Config) -> Frozen:
    """traced with constants in the place of what depends on weights alone. Weights that the program
    writes are none, nor is what shares their memory."""
    inputs: list[Node] = traced.graph.graph.find_nodes(op="placeholder")
    state = list(traced.state.items())
    written = {compat.tracing.storage_of(state[k][1]) for k in traced.mutated if k < len(state)}
    sources = {
        node: k
        for k, (node, (_, value)) in enumerate(zip(inputs, state, strict=False))
        if value.layout == torch.strided and compat.tracing.storage_of(value) not in written
    }
    small_flops = cfg.small_matmul_flops if cfg.kernels else None
    weights = {node: state[k][1] for node, k in sources.items()}
    with short_shapes:
        folded = fold_weights(traced.graph, weights, small_flops, cfg.batch_invariant)
    kept = [k for k, node in enumerate(inputs) if node not in folded.frozen]
    for node in folded.frozen:
        traced.graph.graph.erase_node(node)
    traced.graph.recompile()
    place = {old: new for new, old in enumerate(kept)}
    names = {state[k][0] for node, k in sources.items() if node in folded.frozen}
    views = {
        k: replace(v, input=place[v.input]) for k, v in traced.views.items() if v.input in place
    }
    left = replace(
        traced,
        state={name: x for name, x in state if name not in names},
        mutated=tuple(place[k] for k in traced.mutated),
        views=views,
    )
    return Frozen(
        left, folded, {state[k][0]: state[k][1] for k in sources.values()}, (*sorted(names),)
    )


def expect_kernels(module: torch.nn.Module, cfg: Config) -> None:
    """Begins to build what the kernels of a frozen module will share, while it is traced."""
    forms = set()
    for p in module.parameters():
        if p.dtype == torch.float32 and facts_of(p.device).eager_cpu and p.dim() in (2, 4):
            forms.add("depthwise" if p.dim() == 4 and p.shape[1] == 1 else "dense")
    if cfg.kernels and forms:
        TARGETS["cpu"].expect(forms, cfg)


class FrozenOwners:
    """Finds what a program is bound to, like `Owners`.

    owners: of the weights that constants are made of, then of what the program is bound to.
    dicts, moved: as of these.
    sources: the weights that constants were made of, with version and address at that time. A
        program looks whether they are others now.
    """

    def __init__(
        self,
        owners: Owners,
        frozen: Frozen,
        bound: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
    ) -> None:
        """bound: what the program is bound to, of which some are constants, in the order of their
        recipe."""
        self.owners, self.frozen, self.dicts = owners, frozen, owners.dicts
        self.sources = _looked(frozen.sources.values())
        self._layouts = [_layout(x) for x, _, _ in self.sources]
        self._constants = list(constants)
        self._turn = threading.Lock()
        place, source = _numbers(constants), _numbers(frozen.sources.values())
        self._places = {k: place[id(x)] for k, x in enumerate(bound) if id(x) in place}
        self._sources = {k: source[id(x)] for k, x in enumerate(bound) if id(x) in source}

    @property
    def moved(self) -> bool:
        """See Owners."""
        return self.owners.moved

    def name_of(self, number: int) -> str:
        """The name of what the program is bound to."""
        if number in self._places:
            return f"constant {self._places[number]}"
        return self.owners.name_of(len(self.sources) + number)

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """What the program is to be bound to now, by number. Raises InputError as Owners does, and
        where a weight does not fit in the place of the one that there was."""
        with self._turn:
            now, n = [x for x, _, _ in self.sources], len(self.sources)
            found: list[tuple[int, torch.Tensor]] = []
            for number, x in self.owners.tensors():
                source = number if number < n else self._sources.get(number - n)
                if source is not None:
                    now[source] = x
                if number >= n:
                    found.append((number - n, x))
            self._remake(now)
            return found + [(k, self._constants[number]) for k, number in self._places.items()]

    def _remake(self, now: Sequence[torch.Tensor]) -> None:
        """Makes the constants of these weights, if they are others or were changed."""
        looked = _looked(now)  # before they are read: a change meanwhile is seen at the next call
        if all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(looked, self.sources, strict=True)):
            return
        for name, layout, x in zip(self.frozen.sources, self._layouts, now, strict=True):
            if _layout(x) != layout:
                raise InputError(
                    f"parameter or buffer {name!r}: its data is now {_spelled(_layout(x))}, the "
                    f"program was compiled for {_spelled(layout)}"
                )
        self._constants = self.frozen.folded.values(now)
        self.sources = looked


Looked = tuple[torch.Tensor, int, int]


def _looked(tensors: Iterable[torch.Tensor]) -> tuple[Looked, ...]:
    """Tensors, with what tells that they have changed; inference tensors have no version."""
    return tuple((x, 0 if x.is_inference() else x._version, x.data_ptr()) for x in tensors)


def _numbers(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {id(x): k for k, x in enumerate(tensors)}


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.device, list(x.shape), list(x.stride())


def _spelled(layout: tuple[Any, ...]) -> str:
    dtype, device, sizes, strides = layout
    short = str(dtype).removeprefix("torch.")
    return f"{short} on {device} with sizes {sizes} and strides {strides}"
