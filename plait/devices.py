"""Kinds of devices: one row of facts for each. The compiler asks a row, never a device's name.

A row holds what differs between kinds of devices: where memory is, what eager's kernels do there,
and the measured numbers that decisions are made with. It knows nothing of torch, and of the
languages that kernels are written in only names (`plait/kernel` has a folder for each). What
differs between machines of a kind has rows there: `runtime/toolchain.ISAS` for CPUs (vector width),
`kernel/triton/dialects.py` for GPUs (lanes, library, instructions, how to wait).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What scheduling knows: how fast the device is, and how much work keeps it busy.

    A unit of work is what runs without the others: a result, or `neighbours` results that lie side
    by side. A reduction is cut in two stages if it has split_nbytes or more, unit_nbytes or more a
    unit, and fewer than min_units.

    cycles_a_ns: cycles of the op table that pass in a nanosecond
    cache_bytes_a_ns: bytes a nanosecond, up to cache_nbytes of them
    far_bytes_a_ns: bytes a nanosecond, of more
    launch_ns: what a kernel costs by being there
    units: how many units a cut reduction aims at
    narrow_units: the same across memory, of elements of at most two bytes
    min_along, min_across: points side by side in memory, or not, that a partial result is worth
    align_along, align_across: what the first point of a part is a multiple of, where it can be
    fewer_across, more_across: how far parts of equal length may be fewer or more than aimed at
    vector_nbytes: bytes of a vector, whose address must be a multiple of that; 0: of any address
    column_programs: programs that each sum the columns of a part of the rows; 0: none do
    column_min_rows: the fewest rows of a part
    column_max_row: the longest row of a tensor whose columns they sum
    column_points: how many elements all programs together have under way
    column_min_nbytes: the smallest such tensor
    min_outer: outer points from which on a large loop joins a reduction
    short_row: or how many of its points there are at most for each of fewer outer ones
    tiny_nbytes: groups near each other that move no more are joined if only their shapes agree;
        twice that where each has enough results
    step_nodes: operations of a kernel that makes more values than it may write, most of them for
        itself: steps of a recurrence, of which a compiler can have too many
    read_nodes: what each place counts as that such a kernel reads, for finding it
    """

    cycles_a_ns: float
    cache_bytes_a_ns: float
    far_bytes_a_ns: float
    cache_nbytes: int
    launch_ns: float
    split_nbytes: int
    unit_nbytes: int
    min_units: int
    units: int
    narrow_units: int
    neighbours: int
    min_along: int
    min_across: int
    align_along: int
    align_across: int
    fewer_across: int
    more_across: int
    vector_nbytes: int
    column_programs: int
    column_min_rows: int
    column_max_row: int
    column_points: int
    column_min_nbytes: int
    min_outer: int
    short_row: int
    tiny_nbytes: int
    step_nodes: int
    read_nodes: int

    def moved_ns(self, nbytes: float) -> float:
        """Nanoseconds that it takes to read or write so many bytes."""
        return nbytes / (
            self.cache_bytes_a_ns if nbytes <= self.cache_nbytes else self.far_bytes_a_ns
        )


@dataclass(frozen=True, slots=True)
class Products:
    """What kernels of products do with a product before they store it.

    results: how many they store at most
    given: how many tensors they read
    nodes: of a loop that they take over
    in_rows: they know f32 and conditions alone, which they load and store in rows of the product;
        loops are taken over before they go into others, and layouts follow the product
    """

    results: int
    given: int
    nodes: int
    in_rows: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """A row of the table.

    is_host: the host reads and writes its memory, and work there is done when a call returns
    streams: torch.cuda drives it; it has streams, graphs and a generator of random numbers
    eager_cpu: eager runs its CPU kernels there; plait keeps their rounding, checks and strides
    target: the kernel target, by name ('' for none)
    machine: the option that names the machine which kernels are built for
    kernel_file: what the debug folder calls the kernels' source
    share: points of one tensor that are updated at once by a thread, or a program, of a launch that
        updates many
    multiprocessors: of the device that kernels are for where it is not at hand
    programs: how many of a kernel fill one of them
    rates: what scheduling knows
    products: what kernels of products can do
    """

    is_host: bool
    streams: bool
    eager_cpu: bool
    target: str
    machine: str
    kernel_file: str
    share: int
    multiprocessors: int
    programs: int
    rates: Rates
    products: Products

    def busy(self, multiprocessors: int) -> int:
        """Programs that fill a device."""
        return multiprocessors * self.programs


# One core with AVX-512, fitted to the measured times of 412 kernels of models and of
# benchmarks/kernel_cases.py: cycles are those of narrow vectors; far is between the last cache (50)
# and memory (10).
_CORE = Rates(
    cycles_a_ns=45.0, cache_bytes_a_ns=90.0, far_bytes_a_ns=36.0, cache_nbytes=1 << 20,
    launch_ns=110.0, split_nbytes=1 << 20, unit_nbytes=0, min_units=8, units=16,
    narrow_units=16, neighbours=64, min_along=1024, min_across=1024, align_along=1,
    align_across=1, fewer_across=1, more_across=4, vector_nbytes=0, column_programs=0,
    column_min_rows=0, column_max_row=0, column_points=0, column_min_nbytes=0,
    min_outer=4, short_row=0, tiny_nbytes=4096, step_nodes=300,
    read_nodes=0,
)  # fmt: skip
# A whole Hopper device; units are programs, eight (or four) for each of its 132 multiprocessors.
# Chosen with benchmarks/kernels_gpu.py (benchmarks/results/gpu-kernels.md). Steps: one of Triton's
# passes (which gives neighbours to a thread) takes time as the cube of a kernel's operations: 16
# steps of RWKV's recurrence 0.3 s, 32 of them 3 s, 64 of them 18 s.
_HOPPER = Rates(
    cycles_a_ns=20000.0, cache_bytes_a_ns=5000.0, far_bytes_a_ns=3000.0, cache_nbytes=32 << 20,
    launch_ns=2500.0, split_nbytes=1 << 19, unit_nbytes=1 << 18, min_units=256, units=1024,
    narrow_units=512, neighbours=64, min_along=4096, min_across=128, align_along=64,
    align_across=32, fewer_across=2, more_across=2, vector_nbytes=16, column_programs=512,
    column_min_rows=8, column_max_row=8192, column_points=1 << 20, column_min_nbytes=2 << 20,
    min_outer=128, short_row=1 << 14, tiny_nbytes=1 << 20, step_nodes=2320, read_nodes=16,
)  # fmt: skip

DEVICES: dict[str, Facts] = {
    "cpu": Facts(
        is_host=True, streams=False, eager_cpu=True, target="cpp", machine="isa",
        kernel_file="4_kernels.cpp", share=4096, multiprocessors=1, programs=1, rates=_CORE,
        products=Products(results=1, given=32, nodes=60, in_rows=True),
    ),
    "cuda": Facts(
        is_host=False, streams=True, eager_cpu=False, target="triton", machine="gpu_arch",
        kernel_file="4_kernels_cuda.py", share=1024, multiprocessors=132, programs=2,
        rates=_HOPPER, products=Products(results=4, given=8, nodes=400, in_rows=False),
    ),
}  # fmt: skip
_OTHER = Facts(
    is_host=False, streams=False, eager_cpu=False, target="", machine="", kernel_file="",
    share=0, multiprocessors=1, programs=1, rates=_CORE,
    products=Products(results=0, given=0, nodes=0, in_rows=False),
)  # fmt: skip


def facts_of(device: object) -> Facts:
    """The row of a device, such as 'cuda:0' or torch's device; of one that plait has no kernels
    for, a row that promises nothing."""
    found = DEVICES.get(device) if isinstance(device, str) else None
    return found or DEVICES.get(str(device).partition(":")[0], _OTHER)
