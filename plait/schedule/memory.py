"""Where buffers live: one arena for what never leaves the call, memory of dying buffers, written in
place, allocations of their own for the rest.

An arena is held for a whole call, so it can cost more than allocations that come and go: the peak
of both is computed, and where the arena is worse its largest buffers are taken out of it. A kernel
may write over a buffer that it reads for the last time, element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce

from plait.config import Config
from plait.ir.calls import Extern
from plait.ir.effects import defines, extern_reads, needs, updates
from plait.ir.expr import Expr, Mono, Size, ceildiv, free_symbols, known_nonneg, smax, total
from plait.ir.loops import Buffer, LoopProgram, Mutate, fences
from plait.schedule.cost import Hints, buffer_nbytes, hint
from plait.schedule.deps import memory_roots
from plait.schedule.limits import Limits
from plait.schedule.overwrite import overwritable, users_of
from plait.schedule.plan import Kernel, MemoryPlan, Plan, Step
from plait.schedule.spans import Skyline, Timeline

# A line of memory; bounds on compile time and on waste (tests/test_memory.py) that were chosen.
ALIGN = 64
MAX_ENDS = 8  # expressions of which an offset is the largest
SLACK_NBYTES = 1 << 18  # how much more than coming and going the arena may hold
SLACK = 1.01


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer from the step that makes it to the step that uses it last."""

    name: str
    nbytes: Size
    start: int
    end: int


def storage_nbytes(b: Buffer) -> Size:
    """The bytes that a buffer takes, gaps between its elements included."""
    if 0 in b.shape:
        return 0
    reach = total([(s - 1) * t for s, t in zip(b.shape, b.strides, strict=True)])
    if all(isinstance(s, int) for s in b.shape):
        return (reach + 1) * b.dtype.nbytes
    return smax(reach + 1, 1) * b.dtype.nbytes


def touched(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The buffers that a step reads and those that it brings into being."""
    if isinstance(step, Kernel):
        return tuple(b.name for b in step.args), step.outs
    return (*needs(step), *updates(step)), defines(step)


def lives(plan: Plan) -> dict[str, Life]:
    """The lives of all buffers that the program makes; those that share memory with others end with
    the last of them."""
    memory = memory_roots(plan.program.ops)
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    given = plan.program.given
    for k, step in enumerate(plan.steps):
        read, made = touched(step)
        for name in made:
            if name not in given:
                start.setdefault(name, k)
        for name in (*read, *made):
            end[memory.get(name, name)] = k
    for name in plan.program.returned:
        end[memory.get(name, name)] = len(plan.steps)
    return {
        n: Life(n, storage_nbytes(plan.buffers[n]), k, end[memory.get(n, n)])
        for n, k in start.items()
    }


def donated(plan: Plan) -> list[Life]:
    """The lives of the inputs that are freed after their last use. Each counts what it holds
    itself: several may be views of one storage, between whose elements lie those of the others."""
    last: dict[str, int] = {}
    for k, step in enumerate(plan.steps):
        last.update(dict.fromkeys(touched(step)[0], k))
    return [
        Life(n, buffer_nbytes(plan.buffers[n], plan.program.hints), 0, last.get(n, 0))
        for n in plan.program.donated
        if n in plan.buffers
    ]


def placeable(plan: Plan, alive: Mapping[str, Life]) -> list[Life]:
    """The buffers that may live in an arena: made by kernels or `out=` calls, never handed to what
    may keep them, no outputs, nothing that shares memory."""
    memory = memory_roots(plan.program.ops)
    barred = {*plan.program.returned, *memory, *memory.values()}
    known = _known_at_start(plan.program)
    for step in plan.steps:
        if isinstance(step, Extern):
            if step.may_keep:
                barred.update(extern_reads(step))
            direct = step.out_op and not step.may_keep and len(step.made) == len(step.out_names)
            if not direct and step.kernel is None:
                barred.update(step.made)
    out = []
    for life in alive.values():
        symbols = {a.name for a in free_symbols(life.nbytes)}
        if life.name not in barred and symbols <= known and life.nbytes != 0:
            out.append(life)
    # An arena is on one device: the GPU if there is one.
    device = max((plan.buffers[life.name].device for life in out), default="cpu")
    return [life for life in out if plan.buffers[life.name].device == device]


def _known_at_start(program: LoopProgram) -> set[str]:
    """The symbols whose values follow from the inputs."""
    known = {i[1] for i in program.inputs if isinstance(i, tuple)}
    given = program.given
    for name, source in program.symbols.items():
        if isinstance(source, tuple):
            if source[0] in given:
                known.add(name)
        elif source is not None and all(a.name in known for a in free_symbols(source)):
            known.add(name)
    return known


# ----------------------------------------------------------------------------------------- in place
def in_place(plan: Plan, alive: Mapping[str, Life], inside: set[str]) -> dict[str, str]:
    """New buffer -> dying buffer whose memory the kernel that makes it writes over. inside: buffers
    meant for the arena.

    Both are in the arena, or both are allocations; a call's own result is not handed on to an
    output."""
    memory = memory_roots(plan.program.ops)
    outputs = set(plan.program.returned)
    kept = {*outputs, *memory, *memory.values()}
    kept.update(n for s in plan.steps if isinstance(s, Extern) for n in _held(s))
    of_kernels = {n for s in plan.steps if isinstance(s, Kernel) for n in s.outs}
    of_calls = fresh_results(plan) - inside
    out: dict[str, str] = {}
    for k, step in enumerate(plan.steps):
        if not isinstance(step, Kernel):
            continue
        dying = [
            b.name
            for b in step.args
            if b.name in alive and alive[b.name].end == k and alive[b.name].start < k
            and (b.name in of_kernels or b.name in of_calls or b.name in inside)
            and b.name not in kept
        ]  # fmt: skip
        taken: set[str] = set()
        users = users_of(step) if dying else {}
        for new in step.outs if dying else ():
            if new not in alive or alive[new].start != k or new in memory:
                continue
            for old in dying:
                fits = alive[old].nbytes == alive[new].nbytes and (old in inside) == (new in inside)
                if new in outputs and old in of_calls:
                    continue
                if fits and old not in taken and overwritable(step, new, old, plan.buffers, users):
                    out[new] = old
                    taken.add(old)
                    if old in of_calls:
                        of_calls.add(new)
                    break
    return out


def fresh_results(plan: Plan) -> set[str]:
    """The results of calls in memory that the call made for them."""
    return {
        o
        for s in plan.steps
        if isinstance(s, Extern) and s.is_operator and not (s.fallback or s.aliases)
        for o in s.made
    }


def _held(e: Extern) -> tuple[str, ...]:
    """The operands that an extern may keep."""
    return extern_reads(e) if e.may_keep else ()


# ---------------------------------------------------------------------------------------- the arena
@dataclass(frozen=True, slots=True)
class Block:
    """Memory for one buffer, or for several that take it over from each other. names: the first one
    gets the offset."""

    names: tuple[str, ...]
    nbytes: Size
    start: int
    end: int


def blocks(inside: Sequence[Life], over: Mapping[str, str]) -> list[Block]:
    """What has to be placed."""
    chains: dict[str, list[Life]] = {}
    first: dict[str, str] = {}
    for life in sorted(inside, key=lambda x: x.start):
        old = over.get(life.name)
        head = first[old] if old is not None and old in first else life.name
        first[life.name] = head
        chains.setdefault(head, []).append(life)
    return [
        Block(tuple(x.name for x in c), c[0].nbytes, c[0].start, max(x.end for x in c))
        for c in chains.values()
    ]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block in the arena of the example. nbytes: what is counted for it."""

    block: Block
    nbytes: Size
    at: int
    end: int


def place(all_blocks: Sequence[Block], hints: Hints) -> tuple[dict[str, Size], Size]:
    """Offsets of the first name of every block, and the arena's size.

    The sizes of the example decide which block lies above which. A block then starts where those
    below it end that live at one time with it: two such blocks never meet, whatever the sizes
    are."""
    packed = _packed(all_blocks, hints)
    if all(isinstance(x.nbytes, int) for x in packed):
        return {x.block.names[0]: x.at for x in packed}, max((x.end for x in packed), default=0)
    offsets: dict[str, Size] = {}
    highest = Skyline()
    ends: list[tuple[Size, ...]] = []  # of each block: it ends at the largest of these
    for k, x in enumerate(packed):
        below = sorted({*highest.cover(x.block.start, x.block.end, k)} - {-1}, reverse=True)
        starts = _largest(e for o in below for e in ends[o])
        offsets[x.block.names[0]] = reduce(smax, map(_aligned, starts))
        ends.append(tuple(s + x.nbytes for s in starts))
    last = _largest(e for o in sorted({*highest.tops} - {-1}) for e in ends[o])
    return offsets, reduce(smax, map(_aligned, last))


def _packed(some: Sequence[Block], hints: Hints) -> list[_Placed]:
    """The blocks from the lowest to the highest: each in turn, the largest first, got the tightest
    gap that fits."""
    placed: list[_Placed] = []
    busy = Timeline(max((b.end for b in some), default=0))
    largest = max((hint(b.nbytes, hints) for b in some), default=0)
    for b in sorted(some, key=lambda b: (-hint(b.nbytes, hints), b.start, b.names)):
        nbytes = _padded(b.nbytes, hints, largest // 64)
        size = max(hint(_aligned(nbytes), hints), ALIGN)
        at = _best_gap(busy.taken(b.start, b.end), size)
        busy.take(b.start, b.end, at, at + size)
        placed.append(_Placed(b, nbytes, at, at + size))
    return sorted(placed, key=lambda x: x.at)


def _padded(nbytes: Size, hints: Hints, spare: int) -> Size:
    """What to count for so many bytes if starts are rounded down to multiples of ALIGN: a sum of
    products that are not negative. Each is a multiple of ALIGN itself, which spares divisions, if
    that costs no more than spare bytes."""
    if isinstance(nbytes, int):
        return _aligned(nbytes + ALIGN - 1)
    if not all(known_nonneg(_product(mono)) for mono, _ in nbytes.terms):
        return smax(ceildiv(nbytes, ALIGN), 0) * ALIGN
    up = [_product(mono) * (-(-c // ALIGN) * ALIGN) for mono, c in nbytes.terms]
    whole = total([-(-nbytes.const // ALIGN) * ALIGN, *up])
    return whole if hint(whole, hints) - hint(nbytes, hints) <= spare else nbytes + (ALIGN - 1)


def _aligned(start: Size) -> Size:
    return start // ALIGN * ALIGN


def _product(mono: Mono) -> Size:
    return Expr(0, ((mono, 1),)) if mono else 1


def _terms(e: Size) -> dict[Mono, int]:
    """The coefficients of a sum of products; that of no factors is its constant."""
    return {(): e} if isinstance(e, int) else {(): e.const, **dict(e.terms)}


def _largest(some: Iterable[Size]) -> tuple[Size, ...]:
    """Those that can be the largest of sums of products that are not negative; where that may be
    many, a bound."""
    all_terms = [dict[Mono, int](), *map(_terms, dict.fromkeys(some))]
    out: list[int] = []
    # What covers another has the greater sum of coefficients: none covers one that came before it.
    for k in sorted(range(len(all_terms)), key=lambda k: -sum(all_terms[k].values())):
        if not any(_covers(all_terms[o], all_terms[k]) for o in out):
            out.append(k)
        if len(out) > MAX_ENDS:
            return (_bound(all_terms),)
    return tuple(_sum(all_terms[k]) for k in sorted(out))


def _bound(some: Iterable[Mapping[Mono, int]]) -> Size:
    """A sum that is no less than any of these."""
    most: dict[Mono, int] = {}
    for e in some:
        for mono, c in e.items():
            most[mono] = max(c, most.get(mono, 0))
    return _sum(most)


def _sum(terms: Mapping[Mono, int]) -> Size:
    return total(_product(mono) * c for mono, c in terms.items())


def _covers(a: Mapping[Mono, int], b: Mapping[Mono, int]) -> bool:
    """Whether no term of b is greater than that of a."""
    return all(a.get(mono, 0) >= b.get(mono, 0) for mono in (*b, *a))  # what a lacks is soon found


def _best_gap(busy: Sequence[tuple[int, int]], size: int) -> int:
    """The offset of the tightest gap of at least size bytes between busy ranges, sorted by
    start."""
    best: tuple[int, int] | None = None
    reach = 0
    for start, end in busy:
        gap = start - reach
        if gap >= size and (best is None or gap < best[0]):
            best = gap, reach
        reach = max(reach, end)
    return reach if best is None else best[1]


# ------------------------------------------------------------------------------------------- peaks
def peak_nbytes(
    all_lives: Sequence[Life], n_steps: int, hints: Hints, scratch: Mapping[int, int] | None = None
) -> int:
    """The most bytes alive at any step when each buffer is allocated and freed by itself (with
    hints for unknown sizes). scratch: bytes that a step holds besides."""
    change = [0] * (n_steps + 2)
    for life in all_lives:
        size = max(hint(life.nbytes, hints), 0)
        change[life.start] += size
        change[life.end + 1] -= size
    best = now = 0
    for k, c in enumerate(change):
        now += c
        best = max(best, now + (scratch.get(k, 0) if scratch else 0))
    return best


def convolution_scratch(plan: Plan) -> dict[int, int]:
    """Step -> the bytes that a convolution may hold while it runs: its operands and results once
    more, in the layout of the library that computes it."""
    out = {}
    for k, step in enumerate(plan.steps):
        if isinstance(step, Extern) and "convolution" in step.op:
            names = (*extern_reads(step), *step.made)
            out[k] = sum(buffer_nbytes(plan.buffers[n], plan.program.hints) for n in names)
    return out


IN_PLACE, OVER_INPUTS, ARENA = "write in place", "write over inputs", "arena"
"""What `Config.without` may leave out."""


def plan_memory(plan: Plan, cfg: Config, off: Set[str], limits: Limits) -> Plan:
    """The plan with its MemoryPlan. off: what is left out."""
    if fences(plan.program.ops):  # the order of steps is not that in which streams run
        return plan
    inputs = {} if OVER_INPUTS in off else limits.take(OVER_INPUTS, _into_inputs(plan))
    if not cfg.memory_planning:
        return replace(plan, memory=MemoryPlan(in_place=inputs))
    alive = {n: life for n, life in lives(plan).items() if n not in inputs}
    given = donated(plan)  # a backward pass frees what was saved for it as it goes
    n_steps, hints = len(plan.steps), plan.program.hints
    # Whether convolutions need their scratch is not known: the arena must be right either way.
    scratch = convolution_scratch(plan)
    cases: tuple[dict[int, int], ...] = (scratch, {}) if scratch else ({},)
    free = [peak_nbytes([*alive.values(), *given], n_steps, hints, c) for c in cases]
    most_nbytes = [most * SLACK + SLACK_NBYTES for most in free]
    # The pool keeps the arena of a backward pass while other parts of a training step may peak.
    idle_limit = most_nbytes[-1] - free[-1] if given else most_nbytes[-1]
    in_results = _in_results(plan, alive)
    inside = [life for life in placeable(plan, alive) if life.name not in in_results]
    placed = {life.name: life.name for life in inside if ARENA not in off}
    placed = limits.take(ARENA, placed)
    inside = [life for life in inside if life.name in placed]
    while True:
        names = {life.name for life in inside}
        every = {} if IN_PLACE in off else in_place(plan, alive, names)
        over = limits.first(IN_PLACE, every)
        offsets, nbytes = place(blocks(inside, over), hints)
        outside = [*_merged([x for n, x in alive.items() if n not in names], over), *given]
        peaks = [hint(nbytes, hints) + peak_nbytes(outside, n_steps, hints, c) for c in cases]
        fits = all(p <= most for p, most in zip(peaks, most_nbytes, strict=True))
        if not inside or (fits and hint(nbytes, hints) <= idle_limit):
            break
        largest = max(hint(x.nbytes, hints) for x in inside)
        inside = [x for x in inside if hint(x.nbytes, hints) * 2 <= largest]
    memory = MemoryPlan(nbytes, offsets, {**limits.take(IN_PLACE, every), **inputs})
    return replace(plan, memory=memory)


def _in_results(plan: Plan, alive: Mapping[str, Life]) -> set[str]:
    """The buffers that can live on in the memory of a call's result: they need none of the
    arena."""
    results = fresh_results(plan)
    placed = {life.name for life in placeable(plan, alive)} & results
    out: set[str] = set()
    for new, old in in_place(plan, alive, placed).items():
        if old in out or (old in results and old not in placed):
            out.add(new)
    return out


def _merged(separate: Sequence[Life], over: Mapping[str, str]) -> list[Life]:
    """Lives of allocations, where what is written in place goes on living in the old memory."""
    return [Life(b.names[0], b.nbytes, b.start, b.end) for b in blocks(separate, over)]


def _into_inputs(plan: Plan) -> dict[str, str]:
    """Mutated inputs whose new value a kernel can write over the old one: source -> target of the
    Mutate."""
    program = plan.program
    memory = memory_roots(program.ops)
    kept = {*program.returned, *memory, *memory.values(), *program.given}
    kept.update(n for s in plan.steps if isinstance(s, Extern) for n in _held(s))
    # The first kernel that writes counts (a fill before a scatter): from then on the old value is
    # gone.
    maker: dict[str, int] = {}
    for k, made in enumerate(plan.steps):
        for name in made.outs if isinstance(made, Kernel) else ():
            maker.setdefault(name, k)
    last_read: dict[str, int] = {}  # of memory, whatever it is seen as
    for k, step in enumerate(plan.steps):
        if not isinstance(step, Mutate):
            last_read.update({memory.get(name, name): k for name in touched(step)[0]})
    out: dict[str, str] = {}
    taken: set[str] = set()
    looked_at: dict[int, tuple[Mapping[str, set[int]], set[str | None]]] = {}
    for step in plan.steps:
        if not isinstance(step, Mutate) or step.source in kept or step.target in memory:
            continue
        if step.source not in maker or step.target in taken or step.source in out:
            continue
        k = maker[step.source]
        kernel = plan.steps[k]
        assert isinstance(kernel, Kernel), kernel
        new, old = plan.buffers[step.source], plan.buffers[step.target]
        same = new.strides == old.strides and new.dtype == old.dtype and new.shape == old.shape
        last = last_read.get(step.target, -1)
        if not same or last > k:
            continue
        if k not in looked_at:
            looked_at[k] = users_of(kernel), {memory.get(b.name) for b in kernel.args}
        users, roots = looked_at[k]
        # Not where the kernel sees the same memory otherwise.
        if last < k or step.target not in roots and overwritable(
            kernel, step.source, step.target, plan.buffers, users
        ):  # fmt: skip
            out[step.source] = step.target
            taken.add(step.target)
    return out
