"""Types of the extension module; docs/native-interface.md says what everything means."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

class PlanError(ValueError): ...
class LoadError(RuntimeError): ...

@final
class Library:
    def __new__(cls, path: str, math_names: Sequence[str]) -> Library: ...

@final
class Boxed:
    @property
    def __name__(self) -> str: ...
    @property
    def _boxed_call(self) -> bool: ...
    @property
    def program(self) -> Program: ...
    def __call__(self, args: list[Any], /) -> tuple[Any, ...]: ...

@final
class Program:
    def __new__(
        cls,
        plan: bytes,
        library: Library | None,
        constants: Sequence[torch.Tensor],
        callables: Sequence[object],
        cubins: str | None = None,
        generated: str | None = None,
        entry: str = "plait_run",
    ) -> Program: ...
    def __call__(self, *args: Any) -> tuple[Any, ...]: ...
    @property
    def __name__(self) -> str: ...
    @property
    def boxed(self) -> Boxed: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Bound:
    def __new__(
        cls,
        program: Program,
        inputs: Sequence[tuple[Any, ...]],
        names: Sequence[str],
        single: bool,
        results: Sequence[tuple[Any, ...]] = ...,
    ) -> Bound: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def __name__(self) -> str: ...
    @property
    def program(self) -> Program: ...

@final
class Training:
    def __new__(
        cls,
        forward: Program,
        wrapper: Callable[..., Any],
        compile_backward: Callable[[bool], Program],
        differentiable: Sequence[bool],
        n_saved: int,
        n_sizes: int,
        tangents: Sequence[str | tuple[Sequence[int], Sequence[int]]],
        wants_grad: Sequence[tuple[int, Sequence[int]]],
        nondeterministic: bool,
        marks: Sequence[tuple[int, str, frozenset[int]]],
        switches: Sequence[tuple[dict[str, Any], str]],
        wrapper_first: bool,
    ) -> Training: ...
    def __call__(self, *args: Any) -> Any: ...
    @property
    def __name__(self) -> str: ...
    @property
    def forward(self) -> Program: ...

@final
class Direct:
    def __new__(
        cls,
        program: Program,
        wrapper: Callable[..., Any],
        results: Sequence[tuple[Any, ...]],
        marks: Sequence[tuple[int, str, frozenset[int]]],
        wrapper_first: bool,
    ) -> Direct: ...
    def __call__(self, *args: Any) -> Any: ...
    @property
    def __name__(self) -> str: ...
    @property
    def program(self) -> Program: ...

def arena_stats() -> dict[str, int]: ...
def trim_arenas() -> None: ...
def math_addresses(names: Sequence[str]) -> tuple[int, ...]: ...
def load_cubin(path: str, name: str, device: int, n_arguments: int) -> object: ...
def launch_cubin(kernel: object, pointers: Sequence[int], sizes: Sequence[int], grid: int) -> None: ...
