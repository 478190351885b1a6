"""Which of several versions of a GPU kernel is fastest on the device at hand: measured once, then
known on disk.

Comes in: a `Contest` a kernel. Goes out: an `Outcome` each. Outcomes lie in the cache folder by
content (versions, sizes, device), also that a kernel stays as planned because time or memory was
short, and one process of a machine measures at a time: whoever waited finds the outcome. So
processes that share the folder run the same versions and compute the same numbers, except where
`obstacle` kept one from measuring before another did. Ranks of a process group always do
(`runtime/ranks.py`).

What is measured is what a program sees. A time is the least of several rounds, in which all
versions take turns: others that use the device, and its clock, make some rounds slower and none
faster. Weights come from memory, and what other kernels made is in the cache; launches follow each
other in a recording, as they do in a program. Where nothing was measured, and where there is no
clear winner, what is taken is what it would be without tuning.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from plait._native import launch_cubin, load_cubin
from plait.config import Config
from plait.errors import CacheWarning, ToolchainError, warn_once
from plait.log import progress
from plait.runtime import ranks
from plait.runtime.cubin import Cubin, Job, pack
from plait.runtime.cubin_pool import pool
from plait.runtime.graphs import Capture
from plait.runtime.store import TUNED, Store, key_of

# What a user waits at most is chosen; benchmarks/tuning_gpu.py shows what it buys.
KERNEL_S = 0.1
"""Time for one kernel, all versions together; so many rounds are run at least:"""
MIN_ROUNDS = 5
FIRST_ROUNDS = 3
"""Rounds after which versions run no more that are far behind."""
FAR = 1.3
GRAPH_S = 20.0
"""Time for the kernels of a graph: versions that are not with the compiler by then stay there as
they are."""
AHEAD = 2
"""Kernels whose versions compile while another is measured."""
LOCK_S = 60.0
"""How long to wait for another process that measures."""
MAX_ROUNDS = 25
CALLS = 8
"""Launches in a row whose weights are all different, as far as these need little memory:"""
COLD_NBYTES = 192 << 20
MOST_SWEEPS = 64
"""How often the cache is swept before a measurement, which is put on the stream meanwhile: once,
and more often where the host is busy and that takes longer: what waits for the host is not
measured."""
MARGIN = 0.97
MARGIN_US = 0.3
"""How much faster than what is taken without tuning a version must be to take its place: what
events cannot tell apart is no gain."""


@dataclass(frozen=True)
class Scratch:
    """A buffer that a kernel is measured with. Numbers that are no floats are 0, since they may be
    indices."""

    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Strided:
    """A tensor of numbers."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def made(self, device: torch.device) -> torch.Tensor:
        """One, of random numbers."""
        dtype = _FLOATS.get(self.dtype, torch.int8)
        empty = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
        return empty.normal_() if dtype.is_floating_point else empty.random_(-128, 128)


@dataclass(frozen=True)
class Rival:
    """The vendor's product of two matrices, in whose place a kernel is.

    name: of the operator
    dims: of what it adds: 2 of a matrix, 1 of a row; 0: it adds nothing
    gelu: what the activation is; else relu
    nbytes: that a kernel beside it moves; 0: there is none
    more_us: what else it takes more than the kernel does
    is_usual: it is taken where nothing is measured
    """

    name: str
    left: Strided
    right: Strided
    dims: int = 0
    gelu: bool = False
    nbytes: int = 0
    more_us: float = 0.0
    is_usual: bool = False

    def calls(self, device: torch.device, n: int) -> Callable[[int], object]:
        """What runs it, with one of n right matrices."""
        a, rights = self.left.made(device), [self.right.made(device) for _ in range(n)]
        shape = (*a.shape[:-1], self.right.shape[-1])
        dtype = a.dtype if a.is_floating_point() else torch.int32
        size, moved = math.prod(shape), self.nbytes // 2 // dtype.itemsize
        space = torch.zeros(max(size, moved), dtype=dtype, device=device)
        out, row = space[:size].view(shape), torch.ones(shape[-1], dtype=dtype, device=device)
        source, target = space[:moved], torch.empty(moved, dtype=dtype, device=device)
        product = self._product(a, row, out)

        def call(k: int) -> None:
            product(rights[k])
            if moved:
                torch.neg(source, out=target)

        return call

    def _product(
        self, a: torch.Tensor, row: torch.Tensor, out: torch.Tensor
    ) -> Callable[[torch.Tensor], object]:
        """The operator as a function of the right matrix."""
        if self.name == "_int_mm":
            return lambda b: torch._int_mm(a, b, out=out)
        if self.name == "_addmm_activation":
            called = torch.ops.aten._addmm_activation.out
            return lambda b: called(row, a, b, use_gelu=self.gelu, out=out)
        if self.dims == 0:
            return lambda b: torch.matmul(a, b, out=out)
        # ATen would copy another matrix first, which programs do not (native/core/blaslt.h).
        added = row if self.dims == 1 else out
        return lambda b: torch.addmm(added, a, b, out=out)


@dataclass(frozen=True)
class Contest:
    """Versions of one kernel. labels: what each is called. version: the job of the one at a
    position, and how many programs it is launched with. buffers, sizes: the arguments. device: such
    as 'cuda:0'. rival: comes after all versions, if there is one. cold: the buffers that are others
    at each launch; launches follow each other then, else each finds all its memory cold."""

    labels: tuple[str, ...]
    version: Callable[[int], tuple[Job, int]]
    buffers: tuple[Scratch, ...]
    sizes: tuple[int, ...]
    device: str
    rival: Rival | None = None
    cold: tuple[int, ...] = ()

    @property
    def n_ways(self) -> int:
        """How many times an outcome has."""
        return len(self.labels) + (self.rival is not None)

    @property
    def usual(self) -> int:
        """The place of what is taken unless another is faster."""
        return len(self.labels) if self.rival and self.rival.is_usual else 0

    def name(self, way: int) -> str:
        """What the one at a place is called."""
        return (*self.labels, "the operator")[way]

    def calls(self, cache_nbytes: int) -> int:
        """Launches that follow each other, each with cold buffers of its own."""
        nbytes = sum(self.buffers[k].nbytes for k in self.cold)
        if not self.cold or nbytes >= 4 * cache_nbytes:
            return 1
        return max(2, min(CALLS, COLD_NBYTES // max(1, nbytes)))

    @cached_property
    def planned(self) -> tuple[Job, int]:
        """The first version."""
        return self.version(0)

    @cached_property
    def key(self) -> str:
        """The name of its outcome in the store, whatever the kernel is called."""
        job, grid = self.planned
        job = replace(job, name="kernel", text=job.text.replace(f"def {job.name}(", "def kernel("))
        facts = (
            torch.cuda.get_device_name(self.device),
            torch.version.cuda,
            job.key(),
            grid,
            self.buffers,
            self.sizes,
            self.rival,
            self.cold,
        )
        return key_of((*map(repr, facts), *self.labels))

    def unmeasured(self, reason: str) -> Outcome:
        """The outcome where nothing is measured."""
        return Outcome(self.usual, reason=reason)


@dataclass(frozen=True)
class Outcome:
    """Which version to take. us: microseconds of each, infinite where one did not run. known: from
    the store. reason: why nothing was measured (us is empty then), or ""."""

    choice: int = 0
    us: tuple[float, ...] = ()
    known: bool = False
    reason: str = ""

    def text(self, contest: Contest) -> str:
        """What came of it, for people."""
        if self.reason:
            return f"not tuned: {self.reason}"
        best = f"{contest.name(self.choice)} of {len(self.us)} versions"
        first = f"{self.us[contest.usual]:.1f} us, {contest.name(contest.usual)}"
        said = (
            f"{first}: the best"
            if self.choice == contest.usual
            else f"{first} -> {self.us[self.choice]:.1f} us, {best}"
        )
        return said + (", measured before" if self.known else "")


def tune(contests: Sequence[Contest], cfg: Config) -> list[Outcome]:
    """An outcome for each contest, the same on all ranks of a process group."""
    outcomes = _tuned(contests, cfg)
    if not contests or not ranks.several():
        return outcomes
    return [_agreed(c, o) for c, o in zip(contests, outcomes, strict=True)]


def _agreed(contest: Contest, mine: Outcome) -> Outcome:
    """The outcome that the first rank had which met the same kernel."""
    if missing_device(contest):
        return mine  # the first version: nothing is measured for devices elsewhere
    choice = ranks.first_choice(contest.key, mine.choice)
    if choice is None or not 0 <= choice < contest.n_ways:
        return contest.unmeasured("the other ranks cannot be asked")
    if choice == mine.choice:
        return mine
    return Outcome(choice, reason=f"another rank chose {contest.name(choice)}")


def _tuned(contests: Sequence[Contest], cfg: Config) -> list[Outcome]:
    store = Store.of(cfg, TUNED)
    found = [_found(c, store) for c in contests]
    if None not in found:
        return [o for o in found if o]
    reason = obstacle()
    if reason:
        return [o or c.unmeasured(reason) for o, c in zip(found, contests, strict=True)]
    with store.turn("", LOCK_S, "measures GPU kernels") as alone:
        reason = "" if alone else f"another process has measured for {LOCK_S:.0f} s"
        found = [o or _found(c, store) for o, c in zip(found, contests, strict=True)]  # by now
        todo = [c for o, c in zip(found, contests, strict=True) if o is None]
        made = iter([c.unmeasured(reason) for c in todo] if reason else _measured(todo, store, cfg))
        return [o or next(made) for o in found]


def missing_device(contest: Contest) -> str:
    """Why its versions can never be measured by this process, or ""."""
    gpu = contest.planned[0].gpu
    if torch.cuda.is_available() and gpu_name(contest.device) == gpu.name:
        return ""
    return f"no device with {gpu.name} at hand"


def gpu_name(device: str) -> str:
    """What a device is called by those who compile for it: sm_90 or gfx942."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{10 * major + minor}"


def obstacle() -> str:
    """Why nothing can be measured now, or ""."""
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being recorded"
    if ranks.several():
        # The device too, for a collective that they take part in.
        return "other ranks may wait for this one"
    return ""


def _measured(contests: Sequence[Contest], store: Store, cfg: Config) -> Iterator[Outcome]:
    """New outcomes, one after the other while the next versions compile."""
    deadline = time.monotonic() + GRAPH_S
    submitted: deque[Versions] = deque()
    rest = iter(contests)
    with progress("measuring GPU kernels", len(contests)) as done:
        for contest in contests:
            while (
                len(submitted) <= AHEAD
                and time.monotonic() < deadline
                and (another := next(rest, None))
            ):
                submitted.append(_submitted(another, cfg))
            if submitted:
                outcome = _measure(contest, submitted.popleft())
            else:
                outcome = contest.unmeasured(f"the graph's {GRAPH_S:.0f} s were over")
            facts = {"choice": outcome.choice, "us": outcome.us, "reason": outcome.reason}
            store.put(contest.key, json.dumps(facts).encode())
            done()
            yield outcome


Versions = Sequence[tuple[Job, int, Future[Cubin]]]


def _submitted(contest: Contest, cfg: Config) -> Versions:
    versions = [contest.version(n) for n in range(len(contest.labels))]
    cubins = pool().submit([job for job, _ in versions], cfg)
    return [(job, grid, c) for (job, grid), c in zip(versions, cubins, strict=True)]


def _measure(contest: Contest, versions: Versions) -> Outcome:
    try:
        us = times_us(contest, [(job, grid, _made(cubin)) for job, grid, cubin in versions])
    except torch.cuda.OutOfMemoryError:
        return contest.unmeasured("no memory for a copy of its tensors")
    best, usual = min(range(len(us)), key=us.__getitem__), us[contest.usual]
    wins = us[best] < min(MARGIN * usual, usual - MARGIN_US)
    return Outcome(best if wins else contest.usual, tuple(us))


def _made(result: Future[Cubin]) -> Cubin | None:
    """A cubin, or None if the compiler refused it."""
    try:
        return result.result()
    except ToolchainError:
        return None


def _found(contest: Contest, store: Store) -> Outcome | None:
    """What is known of a contest before anything is measured."""
    missing = missing_device(contest)
    if missing:
        return contest.unmeasured(missing)
    data = store.read(contest.key)
    if data is None:
        return None
    try:
        read = json.loads(data)
        us, choice, reason = tuple(map(float, read["us"])), int(read["choice"]), str(read["reason"])
        if len(us) == (0 if reason else contest.n_ways) and (
            choice == contest.usual if reason else 0 <= choice < len(us)
        ):
            return Outcome(choice, us, known=True, reason=reason)
    except (ValueError, TypeError, KeyError):
        pass
    warn_once(f"plait tunes a kernel again: an entry in {store.folder} is damaged", CacheWarning)
    return None


# ------------------------------------------------------------------------------------ on the device
def times_us(contest: Contest, versions: Sequence[tuple[Job, int, Cubin | None]]) -> list[float]:
    """Microseconds of each version, infinite for one that does not run."""
    device = torch.device(contest.device)
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        torch.cuda.device(device),
        torch.no_grad(),
    ):
        cache_nbytes = torch.cuda.get_device_properties(device).L2_cache_size
        calls = contest.calls(cache_nbytes)
        n_sets = calls + 1 if calls > 1 else 1
        buffers = _buffers(contest.buffers, contest.cold, n_sets, device)
        pointers = [[b.data_ptr() for b in of_one] for of_one in buffers]
        runs: dict[int, Run] = {}
        with _file(
            {str(k): cubin for k, (_, _, cubin) in enumerate(versions) if cubin is not None}
        ) as path:
            for k, (_, grid, cubin) in enumerate(versions):
                if cubin is None:
                    continue
                try:
                    kernel = load_cubin(
                        path, str(k), device.index or 0, len(pointers[0]) + len(contest.sizes)
                    )
                    run = partial(_launch, kernel, pointers, contest.sizes, grid)
                    runs[k] = _prepared(run, calls, device)
                except RuntimeError:  # it wants more memory or registers than there are
                    continue
        rival = contest.rival
        if rival is not None:
            runs[len(versions)] = _prepared(rival.calls(device, n_sets), calls, device)
        sweep = torch.zeros(cache_nbytes, dtype=torch.float32, device=device)  # four times as large
        times = _race(runs, sweep, calls, contest.usual)
    if rival is not None and len(versions) in times:
        times[len(versions)] += rival.more_us
    return [times.get(k, math.inf) for k in range(contest.n_ways)]


Run = Callable[[int], object]
"""A launch, with one of several sets of cold buffers."""


def _prepared(run: Run, calls: int, device: torch.device) -> Run:
    """What is measured: one launch, or several in a row, with other sets. With a further set it is
    a launch alone."""
    run(0)  # the first call of its kind takes long
    if calls == 1:
        return run
    replay = _recorded(run, calls, device)
    return lambda k: run(k) if k == calls else replay()


def _recorded(run: Run, calls: int, device: torch.device) -> Callable[[], object]:
    """So many launches as one: the host's time for each does not count, and the device goes from
    one to the next as in programs that are recorded."""

    def row() -> None:
        for each in range(calls):
            run(each)

    try:
        capture = Capture(device.index or 0)
    except RuntimeError:  # not with this allocator
        return row
    try:
        row()
        capture.ready()
    except BaseException:
        capture.abort()
        raise
    return capture.replay


def _launch(
    kernel: object, pointers: Sequence[Sequence[int]], sizes: Sequence[int], grid: int, k: int
) -> None:
    launch_cubin(kernel, pointers[k], sizes, grid)


_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def _buffers(
    wanted: Sequence[Scratch], cold: Sequence[int], n: int, device: torch.device
) -> list[list[torch.Tensor]]:
    """So many sets of buffers, which differ in those that are cold."""
    generator = torch.Generator(device)
    generator.manual_seed(0)

    def made(b: Scratch) -> torch.Tensor:
        dtype = _FLOATS.get(b.dtype)
        if dtype is None:
            return torch.zeros(b.nbytes, dtype=torch.uint8, device=device)
        empty = torch.empty(b.nbytes // dtype.itemsize, dtype=dtype, device=device)
        return empty.normal_(generator=generator)

    first = [made(b) for b in wanted]
    more = [[made(b) if k in cold else first[k] for k, b in enumerate(wanted)] for _ in range(1, n)]
    return [first, *more]


@contextmanager
def _file(cubins: Mapping[str, Cubin]) -> Iterator[str]:
    """A pack for a moment."""
    with tempfile.NamedTemporaryFile(prefix="plait-tune-", suffix=".cubins") as file:
        file.write(pack(cubins))
        file.flush()
        yield file.name


@dataclass
class _Times:
    """What is known of one version.

    us: the least time
    late_us: the same of rounds in which the device waited for the host
    sweeps: before each round
    """

    us: float = math.inf
    late_us: float = math.inf
    sweeps: int = 1


def _race(runs: Mapping[int, Run], sweep: torch.Tensor, calls: int, usual: int) -> dict[int, float]:
    """The least time of each. Those that are far behind after the first rounds run no more; the
    usual one always does."""
    times = {k: _Times() for k in runs}
    left, end = dict(runs), time.monotonic() + KERNEL_S
    for n in range(1, MAX_ROUNDS + 1):
        _round(left, sweep, calls, times)
        if n == FIRST_ROUNDS:
            limit = FAR * min((t.us for t in times.values()), default=0.0)
            left = {
                k: run
                for k, run in runs.items()
                if k == usual or not limit < times[k].us < math.inf
            }
        if n >= MIN_ROUNDS and time.monotonic() > end:
            break
    return {k: t.us if t.us < math.inf else t.late_us for k, t in times.items()}


def _round(
    runs: Mapping[int, Run], sweep: torch.Tensor, calls: int, times: Mapping[int, _Times]
) -> None:
    """Measures a run of each, the cache swept before: of one launch, or, after another one, of so
    many. Sweeping reads: what is written would go to memory during the runs."""
    events = {k: (_event(), _event()) for k in runs}
    late = set()
    for k, run in runs.items():
        start, stop = events[k]
        for _ in range(times[k].sweeps):
            sweep.sum()
        if calls > 1:
            run(calls)
        start.record()
        run(0)
        stop.record()
        if start.query():  # type: ignore[no-untyped-call]
            late.add(k)
    if runs:
        stop.synchronize()  # not the device: other streams may hold what ends much later
    for k, (start, stop) in events.items():
        us = start.elapsed_time(stop) * 1e3 / calls
        if k in late:
            times[k].late_us = min(times[k].late_us, us)
            times[k].sweeps = min(2 * times[k].sweeps, MOST_SWEEPS)
        else:
            times[k].us = min(times[k].us, us)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
