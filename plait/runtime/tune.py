"""Which of several versions of a GPU kernel is fastest on the device at hand: measured once, then known on disk.

Comes in: a `Contest` a kernel. Goes out: an `Outcome` each. Outcomes lie in the cache folder by content (versions,
sizes, device), and one process of a machine measures at a time: whoever waited finds the outcome, so that every process
runs the same versions and computes the same numbers.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from plait._native import launch_cubin
from plait.config import Config
from plait.errors import ToolchainError, warn_once
from plait.runtime.cubin import Cubin, Job, pack, pool
from plait.runtime.store import CacheWarning, Store, key_of

KERNEL_S = 0.1
"""Time on the device for one kernel, all versions together, once each has run twice."""
GRAPH_S = 20.0
"""Time for the kernels of a graph; what is left then stays as it is."""
MAX_REPEATS = 25
MARGIN = 0.97
MARGIN_US = 0.3
"""How much faster than the first a version must be to take its place: what events cannot tell apart is no gain."""


@dataclass(frozen=True)
class Scratch:
    """A buffer that a kernel is measured with. Numbers that are no floats are 0, since they may be indices."""

    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Contest:
    """Versions of one kernel. labels: what each is called. version: the job of the one at a position, under a name of
    its own, and how many programs it is launched with; the first is what is taken unless another is faster. buffers,
    sizes: the arguments. device: such as 'cuda:0'."""

    labels: tuple[str, ...]
    version: Callable[[int], tuple[Job, int]]
    buffers: tuple[Scratch, ...]
    sizes: tuple[int, ...]
    device: str

    def key(self) -> str:
        """The name of its outcome in the store."""
        job, grid = self.version(0)
        facts = (torch.cuda.get_device_name(self.device), torch.version.cuda, job.key(), grid, self.buffers, self.sizes)
        return key_of((*map(repr, facts), *self.labels))


@dataclass(frozen=True)
class Outcome:
    """Which version to take. us: microseconds of each, infinite where one did not run. known: from the store. reason:
    why nothing was measured, or ""."""

    choice: int = 0
    us: tuple[float, ...] = ()
    known: bool = False
    reason: str = ""

    def text(self, contest: Contest) -> str:
        """What came of it, for people."""
        if self.reason:
            return f"not tuned: {self.reason}"
        best = f"{contest.labels[self.choice]} of {len(self.us)} versions"
        first = f"{self.us[0]:.1f} us, {contest.labels[0]}"
        said = f"{first}: the best" if self.choice == 0 else f"{first} -> {self.us[self.choice]:.1f} us, {best}"
        return said + (", measured before" if self.known else "")


def tune(contests: Sequence[Contest], cfg: Config) -> list[Outcome]:
    """An outcome for each contest."""
    reasons = [obstacle(c) for c in contests]
    if any(reasons):
        return [Outcome(reason=r or "another kernel of the graph cannot be measured") for r in reasons]
    store = Store(Path(cfg.cache_dir) / "tuned", ".json")
    keys = [c.key() for c in contests]
    found = [_known(c, key, store) for c, key in zip(contests, keys, strict=True)]
    todo = [k for k, outcome in enumerate(found) if outcome is None]
    if todo:
        with _alone(store.folder.expanduser()):
            deadline = time.monotonic() + GRAPH_S
            versions = {k: [contests[k].version(n) for n in range(len(contests[k].labels))] for k in todo}
            cubins = {k: pool().submit([job for job, _ in versions[k]], cfg) for k in todo}
            for k in todo:
                made = [(job, grid, c) for (job, grid), c in zip(versions[k], cubins[k], strict=True)]
                found[k] = _known(contests[k], keys[k], store)  # by now
                found[k] = found[k] or _measured(contests[k], made, keys[k], store, deadline)
    return [outcome or Outcome() for outcome in found]


def obstacle(contest: Contest) -> str:
    """Why its versions cannot be measured now, or ""."""
    capability = contest.version(0)[0].capability
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(contest.device) != divmod(capability, 10):
        return f"no device with sm_{capability} at hand"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being recorded"
    return ""


Versions = Sequence[tuple[Job, int, Future[Cubin]]]


def _measured(contest: Contest, versions: Versions, key: str, store: Store, deadline: float) -> Outcome:
    if time.monotonic() > deadline:
        return Outcome(reason=f"the graph's {GRAPH_S:.0f} s were over")
    try:
        us = times_us(contest, [(job, grid, _made(cubin)) for job, grid, cubin in versions])
    except torch.cuda.OutOfMemoryError:
        return Outcome(reason="no memory for a copy of its tensors")
    best = min(range(len(us)), key=us.__getitem__)
    choice = best if us[best] < min(MARGIN * us[0], us[0] - MARGIN_US) else 0
    store.put(key, json.dumps({"choice": choice, "us": us}).encode())
    return Outcome(choice, tuple(us))


def _made(result: Future[Cubin]) -> Cubin | None:
    """A cubin, or None if the compiler refused it."""
    try:
        return result.result()
    except ToolchainError:
        return None


def _known(contest: Contest, key: str, store: Store) -> Outcome | None:
    data = store.read(key)
    if data is None:
        return None
    try:
        read = json.loads(data)
        us, choice = tuple(map(float, read["us"])), int(read["choice"])
        if len(us) == len(contest.labels) and 0 <= choice < len(us):
            return Outcome(choice, us, known=True)
    except (ValueError, TypeError, KeyError):
        pass
    warn_once(f"plait tunes a kernel again: an entry in {store.folder} is damaged", CacheWarning)
    return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process of this machine measures inside, unless the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------- on the device
def times_us(contest: Contest, versions: Sequence[tuple[Job, int, Cubin | None]]) -> list[float]:
    """Microseconds of each version with cold caches, infinite for one that does not run."""
    device = torch.device(contest.device)
    with torch.utils._python_dispatch._disable_current_modes(), torch.cuda.device(device), torch.no_grad():
        buffers = _buffers(contest.buffers, device)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        sweep = torch.empty(4 * cache, dtype=torch.int8, device=device)
        pointers = [b.data_ptr() for b in buffers]
        runs: dict[int, Callable[[], None]] = {}
        with _file({job.name: cubin for job, _, cubin in versions if cubin is not None}) as path:
            for k, (job, grid, cubin) in enumerate(versions):
                run = partial(launch_cubin, path, job.name, device.index or 0, pointers, contest.sizes, grid)
                try:
                    if cubin is not None:
                        run()
                        runs[k] = run
                except RuntimeError:  # it wants more memory or registers than there are
                    continue
        times = _race(runs, sweep)
    return [times.get(k, math.inf) for k in range(len(versions))]


_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def _buffers(wanted: Sequence[Scratch], device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device)
    generator.manual_seed(0)
    made = []
    for b in wanted:
        dtype = _FLOATS.get(b.dtype)
        if dtype is None:
            made.append(torch.zeros(b.nbytes, dtype=torch.uint8, device=device))
        else:
            made.append(
                torch.empty(b.nbytes // dtype.itemsize, dtype=dtype, device=device).normal_(generator=generator)
            )
    return made


@contextmanager
def _file(cubins: Mapping[str, Cubin]) -> Iterator[str]:
    """A pack that is read once."""
    with tempfile.NamedTemporaryFile(prefix="plait-tune-", suffix=".cubins") as file:
        file.write(pack(cubins))
        file.flush()
        yield file.name


def _race(runs: Mapping[int, Callable[[], None]], sweep: torch.Tensor) -> dict[int, float]:
    """The median time of each; those that are far behind run no more than once."""
    times = {k: [us] for k, us in _round(runs, sweep).items()}
    if not times:
        return {}
    limit = 1.5 * min(t[0] for t in times.values())
    left = {k: run for k, run in runs.items() if k == 0 or times[k][0] <= limit}
    a_round = sum(times[k][0] + 50 for k in left) / 1e6
    for _ in range(min(MAX_REPEATS, max(2, int(KERNEL_S / a_round)))):
        for k, us in _round(left, sweep).items():
            times[k].append(us)
    return {k: statistics.median(t) for k, t in times.items()}


def _round(runs: Mapping[int, Callable[[], None]], sweep: torch.Tensor) -> dict[int, float]:
    """Microseconds of one run of each, the cache swept before."""
    events = {k: (_event(), _event()) for k in runs}
    for k, run in runs.items():
        sweep.zero_()
        events[k][0].record()
        run()
        events[k][1].record()
    torch.cuda.synchronize(sweep.device)
    return {k: start.elapsed_time(end) * 1e3 for k, (start, end) in events.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
