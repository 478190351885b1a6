"""Inlining: a pointwise loop vanishes into the loops that read it.

Always where it is evaluated no more often than before (one reader, no broadcast); otherwise only
where recomputing is cheaper than writing the result to memory and reading it back, within
Config.max_recompute (beyond it only for loops that an operator parts), and where no reader has more
memory to keep alive than before. A buffer that must exist anyway (output, operand of an extern) may
still be read around, where its loop hardly does more than move data. What is stored after all, and
ends in a cast that keeps the value, is stored before the cast. What is made of a large product
alone stays out of what also reads a later one: the kernel of each finishes its own. Interning makes
common subexpressions of what meets in one body the same node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.config import Config
from plait.devices import facts_of
from plait.ir.calls import Extern
from plait.ir.effects import defines, updates
from plait.ir.loops import (
    Load,
    Loop,
    LoopProgram,
    Node,
    Op,
    Pointwise,
    Scatter,
    cast,
    fences,
    node,
    walk,
)
from plait.ir.product import is_large_product
from plait.ir.record import inline
from plait.ir.rules import Simplifier, preserves
from plait.schedule.cost import buffer_nbytes, evaluations, hint_numel
from plait.schedule.deps import Bodies, Facts, extent, load_of, memory_roots, reads, roots, space
from plait.schedule.limits import Limits

# Bounds keep compile time linear; costs are in cycles of the op table and were not fitted by
# themselves: benchmarks/kernels_cpu.py shows what they do, tests/test_growth.py the bounds.
MAX_NODES = 400  # of a body, so that compile time and registers stay bounded
MAX_LOADS = 4  # places of one body where a producer is spliced in
MORE_TO_READ = 1.25  # what several readers may each read instead of a result, in results
FAR = 64  # ops
TINY_NBYTES = 1 << 15
COPY_COST = 1.0  # cycles of what hardly does more than move data


@dataclass(slots=True)
class _ReadingLoop:
    """A loop that reads a producer. loads: its load nodes of that producer."""

    op: int
    loads: list[Node]


class _Inliner:
    """The state of one inlining pass over a program, which goes from producers to consumers."""

    def __init__(self, program: LoopProgram, cfg: Config, bodies: Bodies, limits: Limits) -> None:
        self.program, self.cfg, self.bodies, self.limits = program, cfg, bodies, limits
        self.ops: list[Op] = list(program.ops)
        self.buffers = dict(program.buffers)
        self.readers: dict[str, list[_ReadingLoop]] = {}
        self.n_writers: dict[str, int] = {}
        # Inputs and constants are in memory all the time.
        self.given = program.given - frozenset(program.donated)
        self.pinned = set(program.returned)
        self.memory = memory_roots(program.ops)
        self.updated: dict[str, list[int]] = {}
        self.products: dict[str, int] = {}  # what is made of one large product, and where that is
        self.fences = fences(program.ops)
        self.facts: dict[int, Facts] = {}  # of loops as they are given
        self.spliced: dict[str, Facts] = {}  # of loops that go into others, by what they make
        for k, op in enumerate(program.ops):
            self._look_at(k, op)
        self.pinned.update(self.memory)
        self.pinned.update(self.memory.values())
        # Per reader: what to splice into it.
        self.splice: dict[int, dict[str, Pointwise]] = {}
        self.simplify = Simplifier()

    def _look_at(self, k: int, op: Op) -> None:
        if not isinstance(op, Loop):
            self.pinned.update(reads(op, self.bodies))
        else:
            loads: dict[str, list[Node]] = {}
            self.facts[k] = self.bodies.of(roots(op))
            for n in self.facts[k].loads:
                loads.setdefault(load_of(n).buf, []).append(n)
            for name, found in loads.items():
                self.readers.setdefault(name, []).append(_ReadingLoop(k, found))
        if is_large_product(op):
            self.products |= dict.fromkeys(defines(op), k)
        elif self.products and isinstance(op, Pointwise):
            at = {self.products.get(name, -1) for name in self.facts[k].bufs}
            if len(at) == 1 and -1 not in at:
                self.products[op.out] = at.pop()
        for name in defines(op):
            self.n_writers[name] = self.n_writers.get(name, 0) + 1
        for name in updates(op):
            self.updated.setdefault(self.memory.get(name, name), []).append(k)

    def run(self) -> LoopProgram:
        for k in range(len(self.ops)):
            loop = self.ops[k]
            if not isinstance(loop, Loop):
                continue
            loop = self.ops[k] = self._finished(loop, self.splice.pop(k, {}))
            if isinstance(loop, Pointwise) and loop.index is None and self._keeps_value(loop.out):
                chosen = self._choose(k, loop)
                if not chosen and loop.out not in self.pinned and _widens(loop.body):
                    chosen = [r.op for r in self.readers.get(loop.out, [])]
                    if self._stays_out(loop, chosen):
                        continue
                    loop = self._narrowed(k, loop)
                else:
                    chosen = [r for r in chosen if not self._stays_out(loop, [r])]
                for reader in chosen:
                    self.splice.setdefault(reader, {})[loop.out] = loop
                    self.spliced[loop.out] = self.bodies.of((loop.body,))
        return replace(self.program, ops=tuple(self.ops), buffers=self.buffers)

    def _stays_out(self, loop: Pointwise, readers: Sequence[int]) -> bool:
        """Whether `Config.without` keeps a loop from going into these."""
        others = [defines(self.ops[r])[0] for r in readers]
        return self.limits.refuses("inline", loop.out, (*others, loop.out)[0]) is not None

    def _narrowed(self, k: int, loop: Pointwise) -> Pointwise:
        """What makes the cast that a loop ends in, for all readers: of the value, which is stored
        without it, or of where it is read."""
        (value,) = loop.body.args
        facts = self.bodies.of((loop.body,))
        if value.op == "load" and all(
            self._may(k, facts, r) for r in self.readers.get(loop.out, [])
        ):
            return loop
        self.ops[k] = replace(loop, body=value)
        self.buffers[loop.out] = replace(self.buffers[loop.out], dtype=value.dtype)
        load = node("load", (), Load(loop.out, loop.vars), value.dtype)
        return replace(loop, body=cast(load, loop.body.dtype))

    def _keeps_value(self, buf: str) -> bool:
        """Whether one loop alone defines a buffer and nothing updates it in place."""
        return self.n_writers[buf] == 1 and self.memory.get(buf, buf) not in self.updated

    def _finished(self, loop: Loop, producers: Mapping[str, Pointwise]) -> Loop:
        """A loop with its producers spliced in, simplified."""
        if isinstance(loop, Pointwise) and not producers:
            body = self.simplify(loop.body)
            return loop if body is loop.body else replace(loop, body=body)
        table = {name: (p.vars, p.body) for name, p in producers.items()}

        def fn(n: Node) -> Node:
            return self.simplify(inline(n, table) if table else n)

        texts = [t for p in producers.values() for t in p.origin]
        origin = tuple(dict.fromkeys((*texts, *loop.origin)))
        if isinstance(loop, Pointwise):  # most are; `replace` takes longer
            return Pointwise(loop.out, loop.vars, fn(loop.body), loop.index, origin)
        if not isinstance(loop, Scatter):
            return replace(loop, body=fn(loop.body), origin=origin)
        args = tuple(fn(a) for a in loop.index_args)
        mask = None if loop.mask is None else fn(loop.mask)
        return replace(loop, body=fn(loop.body), index_args=args, mask=mask, origin=origin)

    def _choose(self, k: int, loop: Pointwise) -> list[int]:
        """The readers into which a loop goes."""
        facts = self.bodies.of((loop.body,))
        readers = self.readers.get(loop.out, [])
        allowed = [r for r in readers if self._may(k, facts, r)]
        if len(readers) > 1 and any(map(self._is_compared, readers)):
            return []
        if loop.out in self.pinned or len(allowed) < len(readers):
            return [r.op for r in allowed if self._is_copy(loop, facts, r)]
        return [r.op for r in allowed] if self._pays(k, loop, facts, readers) else []

    def _is_compared(self, reader: _ReadingLoop) -> bool:
        """Whether a reader compares a value with another float, which may be made of it: made again
        by another kernel it may differ in the last bit."""
        equalities = self.facts[reader.op].equalities
        return bool(equalities) and not set(reader.loads).isdisjoint(walk(equalities))

    def _may(self, k: int, facts: Facts, reader: _ReadingLoop) -> bool:
        """Whether a loop can go into a reader at all."""
        if facts.checks and any(load_of(n).masked for n in reader.loads):
            return False
        if self.fences and any(k < fence < reader.op for fence in self.fences):
            return False
        for name in facts.bufs if self.updated else ():
            changes = self.updated.get(self.memory.get(name, name), ())
            if any(k < u <= reader.op for u in changes):
                return False
        if self.products and self._is_apart(k, facts, reader):
            return False
        spliced = self.splice.get(reader.op, {})
        every = [facts, self.facts[reader.op], *[self.spliced[name] for name in spliced]]
        if sum([f.size for f in every]) > MAX_NODES:
            return False
        most = self.cfg.max_fusion_reads + 1
        if sum([len(f.bufs) for f in every]) <= most:
            return True
        return len({name for f in every for name in f.bufs} - spliced.keys()) <= most

    def _is_apart(self, k: int, facts: Facts, reader: _ReadingLoop) -> bool:
        """Whether a loop is made of a product alone, no larger than that, and its reader also of a
        later one: silu(gate) * up of 1024 x 5632 x 2048 takes 87.7 us so, and 90.3 (H200)."""
        whole = len(facts.bufs) == 1 and facts.bufs[0] in self.products
        if not whole or any(r.op > k for r in self.readers[facts.bufs[0]]):
            return False
        later = any(self.products.get(name, 0) > k for name in self.facts[reader.op].bufs)
        return later and self._nbytes(defines(self.ops[k])[0]) <= self._read_nbytes(facts)

    def _is_copy(self, loop: Pointwise, facts: Facts, reader: _ReadingLoop) -> bool:
        """Whether reading around a buffer that exists anyway is no worse than reading it."""
        if facts.cost > COPY_COST or len(facts.loads) > 1 or len(reader.loads) > 1:
            return False
        return self._read_nbytes(facts) <= self._nbytes(loop.out)

    def _read_nbytes(self, facts: Facts, without: frozenset[str] = frozenset()) -> int:
        return sum([self._nbytes(name) for name in facts.bufs if name not in without])

    def _nbytes(self, name: str) -> int:
        return buffer_nbytes(self.buffers[name], self.program.hints)

    def _pays(self, k: int, loop: Pointwise, facts: Facts, readers: list[_ReadingLoop]) -> bool:
        """Whether a loop that nobody needs in memory is better off inside all of its readers."""
        points = hint_numel(map(extent, loop.vars), self.program.hints)
        evaluated = sum([self._evaluations(r) for r in readers])
        nbytes = self._nbytes(loop.out)
        many = any(len(r.loads) > MAX_LOADS for r in readers)
        if many and self.buffers[loop.out].fixed:  # it was laid out for being read so often
            return False
        if len(readers) == 1 and evaluated <= points:
            # Far from its reader, a result is put into memory if it is smaller than what it is made
            # of.
            return readers[0].op - k <= FAR or self._read_nbytes(facts, self.given) <= nbytes
        if not facts.loads and facts.cost <= COPY_COST:
            return True
        if many:
            return False
        repeated = evaluated - points
        budget = self.cfg.max_recompute * points * max(len(readers) - 1, 1)
        much = repeated * facts.cost > budget
        once = evaluated <= points * len(readers)
        kind = facts_of(self.buffers[loop.out].device)
        cycles = facts.cost + 0.5 * max(len(facts.loads) - 1, 0)
        # What channels have in common, on a device to which a launch costs more than the work.
        tiny = nbytes <= TINY_NBYTES and not kind.is_host and budget
        tiny = tiny and repeated * cycles <= kind.rates.launch_ns * kind.rates.cycles_a_ns / 2
        parted = once and budget and much and self._parted(readers[0].op, readers[-1].op)
        # A part of a concatenation, evaluated for the others too, where arithmetic costs little.
        part = len(readers) == 1 and evaluated <= 2 * points and not kind.is_host and budget
        part = part and all(load_of(n).masked for n in readers[0].loads)
        if much and not (tiny or parted or part):
            return False
        more = 0
        for r in readers:
            known = frozenset(self.facts[r.op].bufs)
            new = self._read_nbytes(facts, known)
            if len(readers) > 1 and new > nbytes * MORE_TO_READ:
                return False
            more += new
        rates = kind.rates
        saved = rates.moved_ns(nbytes) * (1 + len(readers))
        if tiny or part or not much:
            saved += rates.moved_ns(self._read_nbytes(facts)) + rates.launch_ns
        return rates.moved_ns(more) + repeated * cycles / rates.cycles_a_ns <= saved

    def _parted(self, first: int, last: int) -> bool:
        """Whether an operator reads what one loop makes, and another loop what that makes: they
        never share a kernel, so that a value for both is written and read back."""
        last = self._end(last)
        if last - first > FAR:
            return False
        begun, beyond = {*defines(self.program.ops[first])}, set[str]()
        for op in self.program.ops[first + 1 : last + 1]:
            used, made = {*reads(op, self.bodies)}, {*defines(op), *updates(op)}
            if used & beyond or (used & begun and isinstance(op, Extern)):
                beyond |= made
            elif used & begun:
                begun |= made
        return not beyond.isdisjoint(reads(self.program.ops[last], self.bodies))

    def _end(self, k: int) -> int:
        """The loop that a chain of loops ends in, each of which goes into its one reader."""
        for _ in range(FAR):
            op = self.ops[k]
            if not isinstance(op, Pointwise) or op.out in self.pinned:
                break
            readers = self.readers.get(op.out, [])
            if len(readers) != 1:
                break
            k = readers[0].op
        return k

    def _evaluations(self, reader: _ReadingLoop) -> int:
        loop = self.ops[reader.op]
        assert isinstance(loop, Loop), "it reads in its body"
        return sum(evaluations(space(loop), n, self.program.hints) for n in reader.loads)


def _widens(n: Node) -> bool:
    """Whether a value is a cast of one that takes less memory and is equal to it."""
    return (
        n.op == "cast"
        and n.args[0].dtype.nbytes < n.dtype.nbytes
        and preserves(n.args[0].dtype, n.dtype)
    )


def inline_loops(program: LoopProgram, cfg: Config, bodies: Bodies, limits: Limits) -> LoopProgram:
    """The program with pointwise loops inlined where that pays; those that nobody reads any more
    are still there."""
    return _Inliner(program, cfg, bodies, limits).run() if cfg.fusion else program
