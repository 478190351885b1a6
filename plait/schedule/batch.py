"""Kernels that do the same to tensors of several sizes run in one launch.

Comes in: kernels and other steps in order, with what they touch. Goes out: the same, where a kernel
may have moved up to an earlier one that is alike. What it makes is kept until the end, or is a few
bytes: no more memory is alive at once. All of it is linear in the number of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.devices import facts_of
from plait.ir.calls import Extern
from plait.ir.loops import LoopProgram, Mutate
from plait.schedule.cost import buffer_nbytes
from plait.schedule.deps import memory_roots
from plait.schedule.kernels import Names, joined
from plait.schedule.plan import Kernel, Step
from plait.schedule.share_lengths import LEAST, general_key

MAX_PARTS = 64
MAX_ARGS = 500  # of a launch: on a GPU arguments have 4 KB, each of them 8 bytes
SMALL = 64  # bytes that need not be kept

Touched = tuple[tuple[str, ...], tuple[str, ...]]
"""What a step reads and what it writes."""


@dataclass
class _Slot:
    """What runs in one step, the kernels that share a launch with its first one, and all that it
    touches."""

    steps: list[Step]
    touched: list[Touched]
    key: object = None

    def has_room(self, k: Kernel) -> bool:
        n = len(self.steps) + 1
        return n <= MAX_PARTS and n * (len(k.args) + 2) <= MAX_ARGS  # a length and an end beside


@dataclass
class _Batches:
    """Steps in slots. read, written: memory -> the last slot in which it is.

    hosts: the latest slot of each kind of kernel.
    """

    memory: Mapping[str, str]
    replaced: Mapping[str, str]
    slots: list[_Slot] = field(default_factory=list)
    hosts: dict[object, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    def add(self, steps: list[Step], touched: Touched, key: object = None) -> None:
        at = len(self.slots)
        self.slots.append(_Slot(steps, [touched], key))
        if key is not None:
            self.hosts[key] = at
        self._note(at, touched)

    def join(self, k: Kernel, touched: Touched, key: object) -> bool:
        """Whether a kernel could move up to the last one that is alike; it has."""
        at = self.hosts.get(key)
        if at is None or not self.slots[at].has_room(k):
            return False
        reads, writes = self._roots(touched)
        if any(self.written.get(b, -1) >= at for b in (*reads, *writes)) or any(
            self.read.get(b, -1) >= at for b in writes
        ):
            return False
        self.slots[at].steps.append(k)
        self.slots[at].touched.append(touched)
        self._note(at, touched)
        return True

    def _note(self, at: int, touched: Touched) -> None:
        reads, writes = self._roots(touched)
        for b in reads:
            self.read[b] = max(at, self.read.get(b, -1))
        for b in writes:
            self.written[b] = max(at, self.written.get(b, -1))

    def _roots(self, touched: Touched) -> tuple[set[str], set[str]]:
        """The memory that a step reads, and that it writes or would like to write: the input whose
        new value it makes."""
        reads, writes = ({self.memory.get(b, b) for b in names} for names in touched)
        return reads, writes | {self.replaced[b] for b in touched[1] if b in self.replaced}


def batch(
    program: LoopProgram, steps: Sequence[Sequence[Step]], access: Sequence[Touched], names: Names
) -> tuple[list[Step], list[Touched]]:
    """The steps, some kernels in one launch, and what each touches. steps: kernels that share a
    launch already stand together."""
    memory = memory_roots(program.ops)
    new = {s.source: s.target for some in steps for s in some if isinstance(s, Mutate)}
    kept = {*program.returned, *new}
    keys: dict[str, object] = {
        k.name: key
        for some in steps
        for k in some
        if isinstance(k, Kernel) and _may_move(program, k, kept)
        if (key := general_key(k)) is not None
    }
    counts = Counter(keys.values())
    keys = {name: key for name, key in keys.items() if counts[key] >= LEAST}
    batches = _Batches(memory, {b: memory.get(t, t) for b, t in new.items()})
    for some, touched in zip(steps, access, strict=True):
        left = [s for s in some if not isinstance(s, Kernel) or s.name not in keys]
        for k in some:
            if isinstance(k, Kernel) and k.name in keys:
                mine, key = _touched_by(k), keys[k.name]
                if not batches.join(k, mine, key):
                    batches.add([k], mine, key)
        if len(left) == len(some):
            batches.add(left, touched)
            if any(isinstance(s, Extern) and s.fence for s in left):  # nothing moves past it
                batches.hosts.clear()
        elif left:
            each = [_touched_by(s) for s in left if isinstance(s, Kernel)]
            batches.add(left, _all(each))
    return (
        [_step(slot, names) for slot in batches.slots],
        [_all(slot.touched) for slot in batches.slots],
    )


def _may_move(program: LoopProgram, k: Kernel, kept: set[str]) -> bool:
    buffers = program.buffers
    return facts_of(k.device).share > 0 and all(
        b in kept or buffer_nbytes(buffers[b], program.hints) <= SMALL for b in k.outs
    )


def _touched_by(k: Kernel) -> Touched:
    return tuple(b.name for b in k.args if b.name not in k.outs), k.outs


def _all(touched: Sequence[Touched]) -> Touched:
    reads = dict.fromkeys(b for t in touched for b in t[0])
    return tuple(reads), tuple(dict.fromkeys(b for t in touched for b in t[1]))


def _step(slot: _Slot, names: Names) -> Step:
    if len(slot.steps) == 1:
        return slot.steps[0]
    kernels = [s for s in slot.steps if isinstance(s, Kernel)]
    return replace(joined(kernels, names), alike=slot.key is not None)
