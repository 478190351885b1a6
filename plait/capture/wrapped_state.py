"""Parameters and buffers that wrap plain tensors, such as torchao's quantised weights.

A program is bound to the tensors inside, by names such as "layer.weight.scale"; the wrappers are
made anew while it is traced, and their operators become those of the tensors inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Wrapper:
    """What a wrapper is, but for its tensors.

    kind, context: its class, and what else it is made of.
    sizes, strides: of the whole.
    inner: its attributes, and what each is; None for a plain tensor.
    """

    kind: type
    context: Any
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    inner: tuple[tuple[str, Wrapper | None], ...]

    def parts(self, x: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The plain tensors in x, which is such a wrapper, with their names in one called so."""
        for attribute, wrapper in self.inner:
            part, called = getattr(x, attribute), f"{name}.{attribute}"
            yield from [(called, part)] if wrapper is None else wrapper.parts(part, called)

    def around(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        """A wrapper of the next tensors."""
        made = {
            attribute: next(parts) if wrapper is None else wrapper.around(parts)
            for attribute, wrapper in self.inner
        }
        whole: torch.Tensor = self.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            made, self.context, self.sizes, self.strides
        )
        return whole


def wrapper_of(x: Any) -> Wrapper | None:
    """What kind of wrapper x is; None for a plain tensor, and for what is no tensor."""
    wraps: bool = isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x)
    if not wraps:
        return None
    attributes, context = x.__tensor_flatten__()
    inner = tuple((name, wrapper_of(getattr(x, name))) for name in attributes)
    return Wrapper(type(x), context, tuple(x.shape), tuple(x.stride()), inner)


def parts_of(name: str, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors that x consists of, by name: x itself, if it is one."""
    wrapper = wrapper_of(x)
    return [(name, x)] if wrapper is None else list(wrapper.parts(x, name))


def unwrapped(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The plain tensors of a module's state."""
    return {part: t for name, x in state.items() for part, t in parts_of(name, x)}


def wrapped(state: Mapping[str, torch.Tensor], plain: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """State like `state`, of these plain tensors."""
    wrappers = map(wrapper_of, state.values())
    return [next(plain) if w is None else w.around(plain) for w in wrappers]
