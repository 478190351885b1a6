"""What @triton.heuristics, @triton.autotune and their hooks make of a call from C++.

Their functions are the user's Python. They get stand-ins for tensors, and arguments that note which
of them were read: C++ asks once for all calls that agree in those.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

from triton_launch.functions import for_triton, write_config, write_constant
from triton_launch.specialization import DESCRIPTOR, TORCH_DTYPES, Reader, write_value


class _Memory:
    """Stands for a tensor where a decorator's function gets one."""

    def __init__(self, dtype: str, **known: Any) -> None:
        self.triton_dtype = dtype
        vars(self).update(known)

    @property
    def dtype(self) -> Any:
        import torch

        return getattr(torch, TORCH_DTYPES[self.triton_dtype])

    def element_size(self) -> int:
        size: int = self.dtype.itemsize
        return size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"C++ tells a decorator's function the dtype of a tensor, not its {name}"
        )


class _Hooked(_Memory):
    """The same for a configuration's pre_hook."""

    def zero_(self) -> _Hooked:
        self.zero = True
        return self


def _stand_in(word: str) -> Any:
    """For a tensor or a descriptor that is given by its type."""
    if word.startswith("*"):
        return _Memory(word[1:])
    if (found := DESCRIPTOR.fullmatch(word)) is None:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    kind: Any = type("Descriptor", (_Memory, TensorDescriptor), {})  # it is one to those who ask
    return kind(found[1], block_shape=[int(n) for n in found[2].split(",")])


class _Watched(dict[str, Any]):
    """A call's arguments, for functions that say what they depend on by reading it. What they add
    is their own."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.given, self.own, self.read = tuple(given), set[str](), dict[Any, None]()

    def add(self, name: str, value: Any) -> None:
        self.own.add(name)
        super().__setitem__(name, value)

    def note(self, *names: Any) -> None:
        self.read.update((n, None) for n in names if n not in self.own)

    def __getitem__(self, name: str) -> Any:
        self.note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.note(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.note(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.note(*self.given)
        return super().__iter__()

    def keys(self) -> Any:
        self.note(*self.given)
        return super().keys()

    def values(self) -> Any:
        self.note(*self.given)
        return super().values()

    def items(self) -> Any:
        self.note(*self.given)
        return super().items()


def evaluate(fn: Any, layers: Sequence[Any], kind: str, arguments: str) -> str:
    """What a decorator makes of a call: names that it depends on, and on a second line the
    answer."""
    layer = layers[int(kind.lstrip(string.ascii_letters))]
    positional, keywords = _read_arguments(fn, arguments)
    if kind.startswith("heuristics"):
        return _heuristics(layer, _Watched({**positional, **keywords}))
    if kind.startswith("hook"):
        return _hook(layer, {**positional, **keywords}, {*arguments.split(";")})
    layer.nargs = positional
    try:
        configs = layer.prune_configs({**keywords, "grid": None, "warmup": False})
    finally:
        layer.nargs = None
    return f"{','.join(layer.keys)},@types,@gpu\n" + "|".join(map(write_config, configs))


def _heuristics(layer: Any, given: _Watched) -> str:
    found = []
    for name, heuristic in layer.values.items():  # each sees what those before it made
        given.add(name, value := heuristic(given))
        found.append(f"{name}={_write_set(name, value)}")
    return f"{','.join(given.read)}\n{';'.join(found)}"


def _hook(layer: Any, arguments: dict[str, Any], written: set[str]) -> str:
    """What the pre_hook of the configuration that is among the arguments does to tensors."""
    fitting = (c for c in layer.configs if {*write_config(c).split(";")} <= written)
    config = max(fitting, key=lambda c: len(c.all_kwargs()))
    memory: dict[str, Any] = {n: v for n, v in arguments.items() if isinstance(v, _Memory)}
    for name, v in memory.items():
        memory[name] = v if hasattr(v, "block_shape") else _Hooked(v.triton_dtype)
    given = _Watched({**arguments, **memory})
    if config.pre_hook is not None:
        config.pre_hook(given)
    shapes = {n: vars(v)["block_shape"] for n, v in memory.items() if "block_shape" in vars(v)}
    found = [f"{n}.block_shape={write_value(tuple(shape))}" for n, shape in shapes.items()]
    found += [f"{n}.zero=True" for n, v in memory.items() if "zero" in vars(v)]
    return f"{','.join(given.read)}\n{';'.join(found)}"


def _write_set(name: str, value: Any) -> str:
    """A value that a heuristic set. Raises TypeError for what C++ cannot say."""
    if (text := write_constant(value)) == "?":
        raise TypeError(
            f"@triton.heuristics makes {name} a {type(value).__name__}, which C++ cannot pass"
        )
    return text


def _read_arguments(fn: Any, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments as C++ writes them: those by position, and those by name, which follow an item
    `*`."""

    def value(text: str) -> Any:
        return for_triton(Reader(text).value(_stand_in), fn)

    first, _, second = (f";{text};").partition(";*;")
    parts = [
        dict(i.split("=", 1) for i in part.split(";") if i and i[0] != "@")
        for part in (first, second)
    ]
    positional, keywords = ({k: value(v) for k, v in part.items()} for part in parts)
    return positional, keywords
