"""When each buffer of a program comes into being and goes, and where it lies.

In: a `WrapperProgram` and its plan's buffers. Out: a `Life` for everything that the program makes
or gets memory for, in instructions of its body; the bytes alive after each instruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from plait.ir.loops import Buffer
from plait.schedule.cost import Hints, buffer_nbytes, hint, hint_numel
from plait.wrapper import instructions as ins
from plait.wrapper.instructions import WrapperProgram


@dataclass
class Life:
    """name: of the buffer. where: 'arena', 'own' (allocated), 'reused' (on the memory of another),
    'call' (an operator made it) or 'input'. nbytes: of what it holds. born, dies: instructions; -1
    before the first; dies is the number of instructions where it outlives the program. offset:
    bytes in the arena, or None. on: the buffer whose memory it is."""

    name: str
    where: str
    nbytes: int
    born: int
    dies: int
    offset: int | None = None
    on: str = ""

    @property
    def counts(self) -> bool:
        """Whether the program itself holds its memory."""
        return self.where != "input"


def lives_of(p: WrapperProgram, buffers: Mapping[str, Buffer], hints: Hints) -> list[Life]:
    """Every buffer of a program, in order of birth; views have no memory of their own."""
    end = len(p.body)
    found: dict[str, Life] = {}
    last: dict[tuple[int, int], Life] = {}  # in the arena

    def add(i: ins.TensorInput | ins.Place | ins.Alloc | ins.Reuse, where: str, at: int) -> Life:
        nbytes = hint_numel(i.shape, hints) * i.dtype.nbytes
        found[i.name] = Life(i.name, where, nbytes, at, end)
        return found[i.name]

    for given in p.inputs:
        if isinstance(given, ins.TensorInput):
            add(given, "input", -1)
    for at, i in enumerate(p.body):
        if isinstance(i, ins.Place):
            life = add(i, "arena", at)
            life.offset = hint(i.offset, hints)
            old = last.get(place := (life.offset, life.nbytes))
            if old is not None and old.dies == end:  # alive, and written over
                life.on, old.dies = old.name, at
            last[place] = life
        elif isinstance(i, ins.Alloc):
            add(i, "own", at)
        elif isinstance(i, ins.Reuse):
            add(i, "reused", at).on = i.old
            if i.old in found:  # its memory is counted for the new one from here on
                found[i.old].dies = at
        elif isinstance(i, ins.CallExtern | ins.CallPython | ins.CallPrograms):
            for name in (n for n in i.outs if n in buffers):
                assert name is not None, "None is no buffer"
                nbytes = buffer_nbytes(buffers[name], hints)
                found[name] = Life(name, "call", nbytes, at, end)
        elif isinstance(i, ins.Free) and i.name in found:
            found[i.name].dies = min(found[i.name].dies, at)
    return list(found.values())


def alive(lives: Sequence[Life], n: int) -> list[int]:
    """Bytes that a program of n instructions holds after each of them."""
    change = [0] * (n + 1)
    for life in (x for x in lives if x.counts):
        change[max(life.born, 0)] += life.nbytes
        change[life.dies] -= life.nbytes
    return list(accumulate(change[:n]))


def peaks(held: Sequence[int], share: float = 0.8, most: int = 4) -> list[int]:
    """The instructions after which most memory is held, the highest first: one for each stretch in
    which it is never less than a share of the highest."""
    top = max(held, default=0)
    high = [(k, n) for k, n in enumerate(held) if n > 0 and n >= share * top]
    stretches: list[list[tuple[int, int]]] = []
    for k, n in high:
        if not stretches or stretches[-1][-1][0] != k - 1:
            stretches.append([])
        stretches[-1].append((k, n))
    highest = [max(stretch, key=lambda point: point[1]) for stretch in stretches]
    return [k for k, _ in sorted(highest, key=lambda point: -point[1])[:most]]


def bytes_text(n: int) -> str:
    """A number of bytes in words: `3.2 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
