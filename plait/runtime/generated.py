"""What a generated Python module calls: kernels by data pointer, memory, checks, and the timing of
its main part.

The module that `wrapper/python.py` writes imports torch and this file only. Each function is the
meaning of one instruction of `wrapper/instructions.py`; nothing here knows the compiler. Offsets
and strides are in elements.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import plait.runtime.philox  # noqa: F401  (defines operators that programs call)
from plait._native import launch_cubin, load_cubin
from plait.devices import facts_of
from plait.runtime.functions import FUNCTIONS as FUNCTIONS
from plait.runtime.mathtable import NAMES
from plait.runtime.timing import Boxed as Boxed
from plait.runtime.timing import Watch, gpu_ns
from plait.runtime.timing import benchmark as benchmark
from plait.runtime.timing import load_constants as load_constants
from plait.runtime.timing import random_tensor as random_tensor
from plait.runtime.trust import Library, loadable

# Of Python's threads: benchmarks/results/constants-cpu.md.
_MIN_SPLIT_NS = 50_000  # below this, waking other threads costs more than it saves


# ------------------------------------------------------------------------------------------ kernels
Checks = Sequence[tuple[type[Exception], str]]  # what a kernel that returns 1, 2, ... fails with


class CpuKernel:
    """A kernel of a library: called with tensors and integers, it runs on their data pointers."""

    def __init__(self, function: Callable[..., int], name: str, checks: Checks = ()) -> None:
        self.function, self.name, self.checks = function, name, checks
        self.watch: Watch | None = None  # who times every run, each on one core

    def __call__(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int] = (),
        work_ns: int = 0,
        parallel: bool = True,
        writes: Sequence[int] = (),
    ) -> None:
        """Runs all of it. work_ns: the estimate that decides whether it is split over torch's
        number of threads. writes: positions of tensors that it writes and that the caller may hold.

        Raises what the first of the kernel's run-time checks that failed says."""
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(self.name):
                return self.run(tensors, sizes, work_ns, parallel, writes)
        return self.run(tensors, sizes, work_ns, parallel, writes)

    def run(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        work_ns: int,
        parallel: bool,
        writes: Sequence[int],
    ) -> None:
        """The same, unseen by a profiler."""
        plain = [without_lazy_bits(t) for t in tensors]
        bufs = (ctypes.c_void_p * len(plain))(*(t.data_ptr() for t in plain))
        syms = (ctypes.c_int64 * len(sizes)).from_buffer(array("q", sizes))  # fails beyond 64 bits
        n = torch.get_num_threads() if parallel and work_ns >= _MIN_SPLIT_NS else 1
        if self.watch is not None:
            start = time.perf_counter_ns()
            failed = self.function(0, 1, bufs, syms)
            self.watch.ran(self.name, time.perf_counter_ns() - start, plain, work_ns)
        elif n == 1:
            failed = self.function(0, 1, bufs, syms)
        else:
            shares = _pool(n).map(lambda tid: self.function(tid, n, bufs, syms), range(n))
            failed = max(list(shares))
        if failed:
            known = failed <= len(self.checks)
            error, message = self.checks[failed - 1] if known else (RuntimeError, f"check {failed}")
            raise error(f"{message} (in kernel {self.name})")
        for k in writes:
            if plain[k] is not tensors[k]:
                tensors[k].copy_(plain[k])


class GpuKernel:
    """A kernel of a pack of cubins: called with tensors and integers, it is put on the device's
    current stream."""

    def __init__(self, pack: Library, name: str, device: str) -> None:
        self.pack: Library | None = pack  # until it is loaded, at the first call
        self.name, self.device = name, torch.device(device)
        self.loaded: object = None
        self.watch: Watch | None = None  # who times every run

    def __call__(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int] = (),
        grid: int = 1,
        writes: Sequence[int] = (),
    ) -> None:
        """Runs `grid` programs. Copies of tensors are used that do not start at a multiple of 16
        bytes; those at the positions `writes` are copied back."""
        used = [self.readable(t) for t in tensors]
        with torch.cuda.device(self.device):
            if (pack := self.pack) is not None:
                self.loaded = load_cubin(
                    loadable(pack), self.name, self.device.index, len(used) + len(sizes)
                )
                self.pack = None
            given = [t.data_ptr() for t in used], list(sizes), grid
            if self.watch is None:
                launch_cubin(self.loaded, *given)
            else:
                ns = gpu_ns(lambda: launch_cubin(self.loaded, *given))
                self.watch.ran(self.name, ns, used, 0)
        for k in writes:
            if used[k] is not tensors[k]:
                tensors[k].copy_(used[k])

    @staticmethod
    def readable(t: Tensor) -> Tensor:
        """t, or a copy that starts at a multiple of 16 bytes and has the strides of t, which the
        kernel goes by."""
        plain = without_lazy_bits(t)
        return plain if plain.data_ptr() % 16 == 0 else _copied(plain)


class TimedOperator:
    """An operator of PyTorch's whose calls are timed, as kernels are."""

    def __init__(self, operator: Callable[..., object], name: str) -> None:
        self.operator, self.name = operator, name
        self.watch: Watch | None = None  # who times every call

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls it, timed by the device that its tensors are on."""
        if self.watch is None:
            return self.operator(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        device = next((t.device for t in given if not facts_of(t.device).is_host), None)
        made: list[object] = []

        def call() -> None:
            made.append(self.operator(*args, **kwargs))

        if device is not None:
            with torch.cuda.device(device):
                ns = gpu_ns(call)
        else:
            start = time.perf_counter_ns()
            call()
            ns = time.perf_counter_ns() - start
        results = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        every = {id(t): t for t in (*given, *results)}.values()  # one that is written is a result
        self.watch.ran(self.name, ns, [*every], 0)
        return made[0]


def without_lazy_bits(t: Tensor) -> Tensor:
    """t, or its values in memory with its strides if a bit of t says conjugate or negate: kernels
    know no such bits."""
    return _copied(t) if t.is_neg() or t.is_conj() else t


def _copied(t: Tensor) -> Tensor:
    """The values of t in memory of their own, with its strides, gaps and all."""
    held = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    whole = [slice(0, 1) if r == 0 else slice(None) for r in t.stride()]
    held[tuple(whole)].copy_(t[tuple(whole)])
    return held


@lru_cache(maxsize=4)
def _pool(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="plait")


LIBRARIES: dict[str, Any] = {}
"""By path; they stay loaded, since an FX graph knows them by their paths and files may be gone
later. Tests put in what is called in the same way."""


def load_library(library: Library) -> Any:
    """Opens a kernel library and hands it the table of maths functions. Raises OSError if it cannot
    be opened."""
    known = LIBRARIES.get(str(library))
    if known is not None:
        return known
    opened = ctypes.CDLL(loadable(library))
    init = getattr(opened, "plait_init", None)
    if init is not None:
        init.restype = None
        init(_math_table())
    return LIBRARIES.setdefault(str(library), opened)


@lru_cache(maxsize=1)
def _math_table() -> ctypes.Array[ctypes.c_void_p]:
    """Addresses in the order of mathtable.NAMES, null where libtorch has none. Never freed: kernels
    keep it."""
    found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    addresses = [
        ctypes.cast(getattr(found, n), ctypes.c_void_p).value if hasattr(found, n) else None
        for n in NAMES
    ]
    return (ctypes.c_void_p * len(NAMES))(*addresses)


def kernel(library: Library, name: str, checks: Checks = ()) -> CpuKernel:
    """Kernel `name` of a library. checks: errors of its run-time checks.

    Raises RuntimeError if it is not there."""
    try:
        function = getattr(load_library(library), name)
    except AttributeError:
        raise RuntimeError(f"kernel {name} is not in library {library}") from None
    function.restype = ctypes.c_int64
    function.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return CpuKernel(function, name, checks)


# ----------------------------------------------------------------------------------------- the call
def require_operators(names: Sequence[str]) -> None:
    """Raises RuntimeError for operators 'namespace::name' or 'namespace::name.overload' that this
    process does not know."""
    unknown = [n for n in names if not torch._C._dispatch_has_kernel(n)]
    if unknown:
        raise RuntimeError(
            f"there is no operator {', '.join(unknown)}: import the module, or load the library, "
            "that defines it "
            "before the program is called"
        )


def callers_stream() -> torch.cuda.StreamContext:
    """What is inside may leave another stream behind, should it fail."""
    return torch.cuda.stream(torch.cuda.current_stream())


class below_autograd:
    """ATen calls inside go straight to the kernels: no gradients, no autocast, no version counters.

    A class, since every call enters it and a generator would cost as much as the guards."""

    guards: Any

    def __enter__(self) -> None:
        self.with_gradients = torch.is_grad_enabled()
        self.guards = torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast()
        torch._C._set_grad_enabled(False)
        for guard in self.guards:
            guard.__enter__()

    def __exit__(self, *error: object) -> None:
        for guard in reversed(self.guards):
            guard.__exit__(*error)
        torch._C._set_grad_enabled(self.with_gradients)


Keys = tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]


def dispatch_state() -> Keys:
    """What the caller of a program included and excluded; `python_call` restores it."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def python_call(
    outer: Keys, function: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """Calls a user's Python function in the dispatch state of the program's caller, gradients
    off."""
    with torch._C._ForceDispatchKeyGuard(*outer):
        return function(*args, **kwargs)


SubProgram = Callable[[list[object]], Sequence[object]]
"""Takes what it is given in a list, which it clears."""


def run_programs(
    outer: Keys,
    kind: str,
    programs: Sequence[SubProgram],
    given: list[object],
    carried: int,
    scanned: int,
) -> Sequence[object]:
    """Control flow as `ir.calls.Control` says, in the dispatch state of the program's caller.
    Raises RuntimeError for a scan of tensors that do not have as many slices, at least one."""
    with torch._C._ForceDispatchKeyGuard(*outer):
        if kind in ("loop", "rounds"):
            return _loop(programs[0], programs[1], given, carried, kind == "rounds")
        if kind == "scan":
            return _scan(programs[0], given, carried, scanned)
        holds = kind == "call" or given.pop(0)
        return programs[0 if holds else 1](given)


def _loop(
    holds: SubProgram, body: SubProgram, given: list[object], carried: int, stacks: bool
) -> Sequence[object]:
    made: deque[list[object]] = deque(maxlen=None if stacks else 1)
    while holds(list(given))[0]:
        given[:carried] = body(list(given))
        made.append(given[:carried])
    if not made:  # results are never operands
        made.append([x.clone() if isinstance(x, Tensor) else x for x in given[:carried]])
    if not stacks:
        return made[0]
    return [torch.stack(x) if isinstance(x[0], Tensor) else x[-1] for x in zip(*made, strict=True)]


def _scan(body: SubProgram, given: list[Any], carried: int, scanned: int) -> Sequence[object]:
    state, rest = given[:carried], given[carried + scanned :]
    whole = given[carried : carried + scanned]
    if len({len(x) for x in whole}) != 1 or not len(whole[0]):
        raise RuntimeError("a scan needs tensors with as many slices, at least one")
    made: list[Sequence[Any]] = []
    for slices in zip(*whole, strict=True):
        results = body([*state, *(x.contiguous() for x in slices), *rest])
        state = list(results[:carried])
        made.append(results[carried:])
    stacked = (None if x[0] is None else torch.stack(x) for x in zip(*made, strict=True))
    return [*state, *stacked]


def flat(result: object) -> list[object]:
    """The results of a call from left to right, lists laid open; those with names in the order of
    the names."""
    if isinstance(result, Mapping):
        return [x for name in sorted(result) for x in flat(result[name])]
    if isinstance(result, (tuple, list)):
        return [x for item in result for x in flat(item)]
    return [result]


def settled(result: object, strides: Sequence[Sequence[int] | None]) -> list[object]:
    """`flat`, with a copy of each tensor that has other strides than promised (None: any)."""
    return [_with_strides(x, s) for x, s in zip(flat(result), strides, strict=False)]


def _with_strides(value: object, strides: Sequence[int] | None) -> object:
    if strides is None or not isinstance(value, Tensor) or value.stride() == tuple(strides):
        return value
    made = torch.empty_strided(value.shape, tuple(strides), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def check_inputs(
    args: Sequence[object], promised: Sequence[tuple[str, torch.dtype, str | None] | None]
) -> None:
    """Raises TypeError for a wrong number of inputs or a tensor of another dtype or device (None:
    any) than promised."""
    if len(args) != len(promised):
        raise TypeError(f"expected {len(promised)} inputs, got {len(args)}")
    for value, want in zip(args, promised, strict=True):
        if want is None:
            continue
        name, dtype, device = want
        if not isinstance(value, Tensor):
            raise TypeError(f"input '{name}': expected a tensor, got {type(value).__name__}")
        if value.dtype != dtype:
            raise TypeError(f"input '{name}': expected dtype {dtype}, got {value.dtype}")
        if device is not None and value.device != torch.device(device):
            raise TypeError(
                f"input '{name}': expected a plain tensor on device {device}, got one on "
                f"{value.device}"
            )


# ------------------------------------------------------------------------------------------- memory
def arena(nbytes: int, device: str) -> Tensor:
    """A block of bytes for the intermediates of one call."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def place(
    block: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """The tensor at byte `offset` of an arena."""
    at = block.storage_offset() + offset
    return _over(block, dtype, at // dtype.itemsize, shape, strides)


def reuse(old: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor on the memory of one that dies."""
    return _over(old, dtype, old.storage_offset() * old.itemsize // dtype.itemsize, shape, strides)


def view(
    base: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    relative: bool = True,
) -> Tensor:
    """base's memory seen in another way; offset from base's first element, or from its storage's
    start."""
    at = base.storage_offset() * base.itemsize // dtype.itemsize if relative else 0
    if dtype == base.dtype:
        return torch.as_strided(base, shape, strides, at + offset)
    return _over(base, dtype, at + offset, shape, strides)


def _over(
    t: Tensor, dtype: torch.dtype, at: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    made = torch.empty(0, dtype=dtype, device=t.device)
    return made.set_(t.untyped_storage(), at, tuple(shape), tuple(strides))


def copy(dst: Tensor, src: Tensor, bump: bool) -> None:
    """dst.copy_(src); bump: dst's autograd version goes up."""
    dst.copy_(src)
    if bump:
        bump_version(dst)


def bump_version(t: Tensor) -> None:
    """t was written: whoever saved it for a backward pass will notice."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


# ------------------------------------------------------------------------------------------- checks
def require(holds: int, message: str, *values: int, error: type[Exception] = RuntimeError) -> None:
    """Raises error(message) unless holds; its first marks {} stand for values."""
    if not holds:
        for value in values:
            message = message.replace("{}", str(value), 1)
        raise error(message)


def require_layout(
    t: Tensor,
    name: str,
    dtype: torch.dtype | None,
    shape: Sequence[int],
    strides: Sequence[int],
    origin: str = "",
) -> None:
    """Raises RuntimeError unless t has this dtype (None: any), these sizes and strides (these free
    in dimensions of size 1, in empty tensors and where a layout has none). origin: what made t, for
    the error."""
    if not _has_layout(t, name, dtype, shape, strides, origin):
        _refuse_layout(t, name, shape, strides, origin)


def with_layout(
    t: Tensor,
    name: str,
    dtype: torch.dtype | None,
    shape: Sequence[int],
    strides: Sequence[int],
    origin: str = "",
) -> Tensor:
    """t, or a copy with these strides where t has others. Raises RuntimeError unless t has this
    dtype (None: any) and these sizes."""
    if _has_layout(t, name, dtype, shape, strides, origin):
        return t
    if tuple(t.shape) != tuple(shape):
        _refuse_layout(t, name, shape, strides, origin)
    made = torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device)
    return made.copy_(t)


def _has_layout(
    t: Tensor,
    name: str,
    dtype: torch.dtype | None,
    shape: Sequence[int],
    strides: Sequence[int],
    origin: str,
) -> bool:
    if dtype is not None and t.dtype != dtype:
        raise RuntimeError(
            f"{_named(name, origin)} has dtype {str(t.dtype)[6:]}, expected {str(dtype)[6:]}"
        )
    if t.is_nested:
        return True
    if tuple(t.shape) != tuple(shape):
        return False
    if t.layout != torch.strided or t.numel() == 0:
        return True
    return all(n == 1 or s == r for n, s, r in zip(shape, t.stride(), strides, strict=True))


def _named(name: str, origin: str) -> str:
    return f"'{name}', made by {origin}," if origin else f"'{name}'"


def _refuse_layout(
    t: Tensor, name: str, shape: Sequence[int], strides: Sequence[int], origin: str
) -> NoReturn:
    found = f" and strides {list(t.stride())}" if t.layout == torch.strided else ""
    traced = " when it was traced" if origin else ""
    raise RuntimeError(
        f"{_named(name, origin)} has sizes {list(t.shape)}{found}, expected {list(shape)} and "
        f"{list(strides)}{traced}"
    )


def require_aligned(t: Tensor, name: str, nbytes: int) -> None:
    """Raises RuntimeError unless t's data pointer is a multiple of nbytes."""
    if t.data_ptr() % nbytes:
        raise RuntimeError(f"'{name}' is not aligned to {nbytes} bytes")


def item(t: Tensor, name: str) -> int:
    """The value of a one-element tensor as an integer. Raises RuntimeError for another number of
    elements."""
    if t.numel() != 1:
        raise RuntimeError(f"'{name}' has {t.numel()} elements, one was expected")
    return int(t.item())


def require_finite(t: Tensor, name: str, origin: str, infinities: bool) -> None:
    """Raises RuntimeError if t holds a NaN or, if they count, an infinity."""
    if not t.is_floating_point() and not t.is_complex():
        return
    if not bool(torch.isfinite(t).all()) if infinities else bool(torch.isnan(t).any()):
        what = "a NaN or an infinity" if infinities else "a NaN"
        raise RuntimeError(f"'{name}' holds {what}, computed by {origin}")
