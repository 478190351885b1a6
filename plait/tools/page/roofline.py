"""How fast this machine's memory and arithmetic are, measured for one core or a GPU: what times of
kernels and calls are compared with.

Memory: copies of blocks of several sizes, since small ones lie in caches. Arithmetic: products of
square matrices of a type, by the library that PyTorch calls. A step can be no faster than the
slower of the two would be for its bytes and its operations.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch

from plait.compat import precision
from plait.devices import facts_of
from plait.ir.dtypes import DTYPES
from plait.lower.dtypes import TO_TORCH
from plait.runtime.timing import gpu_ns, one_core

AS = " as "  # `f32 as tf32`: what the library makes of float32, where flags let it
_LARGEST = 1 << 27  # bytes of a block that is copied
_ENOUGH_NS = 30_000_000  # of one product: larger ones would be no faster


def set_rooflines(steps: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Gives steps that have a time their share of the roofline, and returns what was measured for
    it: `copy_ns` and `product_flops`, as docs/report.md describes them. A device whose memory is
    full has none."""
    timed = [s for s in steps if s.get("time_ns")]
    copies: dict[str, dict[str, int]] = {}
    for device in sorted({s["device"] for s in timed}):
        with suppress(torch.OutOfMemoryError):
            copies[device] = copy_times(device)
    timed = [s for s in timed if s["device"] in copies]
    kinds = sorted({(s["device"], s["precision"]) for s in timed if s["precision"]})
    rates: dict[str, dict[str, int]] = {}
    for device, kind in kinds:
        if rate := product_rate(device, kind):
            rates.setdefault(device, {})[kind] = rate
    for s in timed:
        best = copied_ns(s["read_nbytes"] + s["written_nbytes"], copies[s["device"]])
        if s["precision"]:
            rate = rates.get(s["device"], {}).get(s["precision"], 0)
            if not rate:  # nothing is known of products of this type
                continue
            best = max(best, s["operations"] / rate * 1e9)
        s["roofline"] = round(best / s["time_ns"], 3)
    return {"copy_ns": copies, "product_flops": rates}


def library_of(device: str) -> str:
    """Whose flags decide what becomes of float32 on a device."""
    return "mkldnn" if facts_of(device).is_host else "cuda"


# -------------------------------------------------------------------------------------- arithmetic
def product_rate(device: str, kind: str) -> int:
    """Operations a second of the fastest of some products; 0 for types that `mm` does not take.

    kind: of the matrices' elements: `bf16`, or `f32 as tf32`."""
    name, _, as_what = kind.partition(AS)
    dtype = TO_TORCH.get(DTYPES[name])
    if dtype is None or not dtype.is_floating_point:
        return 0
    how = precision.float32_as(library_of(device), as_what) if as_what else nullcontext()
    host = facts_of(device).is_host
    rate = 0.0
    try:
        with how, torch.no_grad(), one_core():
            for n in (256, 512, 1024) if host else (1024, 2048, 4096):
                ns = min(_product_ns(n, dtype, device) for _ in range(10))
                rate = max(rate, 2e9 * n**3 / ns)
                if ns > _ENOUGH_NS:
                    break
    except (RuntimeError, NotImplementedError):  # of 8 bits, say
        return 0
    return round(rate)


def _product_ns(n: int, dtype: torch.dtype, device: str) -> int:
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    if not facts_of(device).is_host:
        with torch.cuda.device(device):
            return gpu_ns(lambda: torch.mm(a, b))
    start = time.perf_counter_ns()
    torch.mm(a, b)
    return time.perf_counter_ns() - start


# ------------------------------------------------------------------------------------------ memory
def copied_ns(nbytes: int, copy_ns: Mapping[str, int]) -> float:
    """How long a copy takes that moves so many bytes, by the times of others."""
    moved, ns = min((int(n), ns) for n, ns in copy_ns.items() if int(n) >= min(nbytes, 1 << 28))
    return ns * nbytes / moved if nbytes > 1 << 12 else ns


def copy_times(device: str) -> dict[str, int]:
    """How long a GPU, or one core, takes to copy memory: bytes moved, half of them read and half
    written, to nanoseconds; the best of several for each power of two from 4 KiB to 256 MiB."""
    copy = _host_copy(_LARGEST) if facts_of(device).is_host else _gpu_copy(_LARGEST, device)
    sizes = [1 << bits for bits in range(11, _LARGEST.bit_length())]
    return {str(2 * n): min(copy(n) for _ in range(5 if n > 1 << 24 else 15)) for n in sizes}


def _host_copy(largest: int) -> Callable[[int], int]:
    a, b = ((ctypes.c_char * largest).from_buffer(bytearray(largest)) for _ in range(2))

    def copy(n: int) -> int:
        start = time.perf_counter_ns()
        ctypes.memmove(a, b, n)
        return time.perf_counter_ns() - start

    return copy


def _gpu_copy(largest: int, device: str) -> Callable[[int], int]:
    a, b = (torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2))

    def copy(n: int) -> int:
        with torch.cuda.device(device):
            return gpu_ns(lambda: a[:n].copy_(b[:n]))

    return copy
