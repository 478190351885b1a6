"""From finished groups to Kernels: arguments, size symbols and names.

Equal kernels (up to the names of buffers) get equal content hashes; a name is telling and unique in
its program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain

from plait.ir.expr import Atom, Expr, Size, free_symbols, symbol, total
from plait.ir.loops import Buffer, Load, Node, exprs_of, index_exprs, is_arg, walk
from plait.schedule.cost import Hints, hint
from plait.schedule.deps import extent, load_of
from plait.schedule.plan import PART, Kernel, Reduce, Stmt, Store, stmt_roots
from plait.schedule.work import kernel_work_ns


def all_nodes(stmts: Sequence[Stmt]) -> list[Node]:
    """All nodes of statements, each once, arguments first."""
    return list(walk(tuple(r for s in stmts for r in stmt_roots(s))))


def make_kernel(
    name: str,
    vars_: tuple[Expr, ...],
    rvars: tuple[Expr, ...],
    stmts: Sequence[Stmt],
    buffers: Mapping[str, Buffer],
    origin: tuple[str, ...],
    hints: Hints,
) -> Kernel:
    """A Kernel with its arguments and size symbols found in the statements: loaded buffers first,
    then stored ones."""
    nodes = all_nodes(stmts)
    loaded = [load_of(n).buf for n in nodes if n.op == "load"]
    stored = [s.buf for s in stmts if isinstance(s, Store)]
    args = tuple(buffers[b] for b in dict.fromkeys((*loaded, *stored)))
    outs = tuple(dict.fromkeys(stored))
    sequential = any(isinstance(s, Store) and _collides(s) for s in stmts)
    sizes = size_symbols(vars_ + rvars, stmts, nodes, args)
    work_ns = kernel_work_ns(vars_, rvars, stmts, nodes, buffers)
    values = tuple(hint(s, hints) for s in sizes)
    return Kernel(
        name, vars_, rvars, tuple(stmts), args, outs, sizes, sequential, work_ns, origin, (), values
    )


def joined(parts: Sequence[Kernel], names: Names) -> Kernel:
    """One kernel of several that need nothing of each other."""
    args = tuple({b.name: b for p in parts for b in p.args}.values())
    outs = tuple(dict.fromkeys(o for p in parts for o in p.outs))
    sizes = {str(s): (s, h) for p in parts for s, h in zip(p.sizes, p.hints, strict=True)}
    ordered = [both for _, both in sorted(sizes.items())]
    origin = tuple(dict.fromkeys(o for p in parts for o in p.origin))
    content = "\n".join(map(names.content_of, parts))
    work_ns = total(p.work_ns for p in parts)
    return Kernel(
        names.new(origin_words([origin]) or ["pack"], content),
        (),
        (),
        (),
        args,
        outs,
        tuple(s for s, _ in ordered),
        all(p.sequential for p in parts),
        work_ns,
        origin,
        tuple(parts),
        tuple(h for _, h in ordered),
    )


def inner_nodes(nodes: Sequence[Node], rvars: Sequence[Expr], stmts: Sequence[Stmt]) -> set[Node]:
    """The nodes at full level: those that hold a reduced variable, or a result at that level."""
    atoms = {v.symbol for v in rvars}
    running = {s.name for s in stmts if isinstance(s, Reduce) and s.inner}
    out: set[Node] = set()
    for n in nodes:
        if not out.isdisjoint(n.args) or (n.op == "acc" and n.attr in running):
            out.add(n)
        elif atoms and any(not atoms.isdisjoint(free_symbols(e)) for e in index_exprs(n)):
            out.add(n)
    return out


def _collides(s: Store) -> bool:
    """Whether two points may store to one element."""
    return bool(s.index_args) or s.mode not in ("store", "sum")


def size_symbols(
    vars_: tuple[Expr, ...], stmts: Sequence[Stmt], nodes: Sequence[Node], args: Sequence[Buffer]
) -> tuple[Expr, ...]:
    """The size symbols of a kernel, by name."""
    exprs: list[Size] = [extent(v) for v in vars_]
    for n in nodes:
        exprs += exprs_of(n)
    for s in stmts:
        if isinstance(s, Store):
            exprs += s.index
    for b in args:
        exprs += (*b.shape, *b.strides)
    loop = {v.symbol for v in vars_}
    found: dict[str, Atom] = {}
    for e in exprs:
        if isinstance(e, int):
            continue
        for a in free_symbols(e):
            if a not in loop and a.name != PART and not is_arg(a):
                found[a.name] = a
    return tuple(symbol(a.name, a.lo, a.hi, a.extent) for _, a in sorted(found.items()))


_WORD = re.compile(r"[a-z][a-z0-9_]*")
_MAX_WORDS = 4


def origin_words(origins: Sequence[tuple[str, ...]]) -> list[str]:
    """Names of ATen ops found in the origins of loops ('model.py:31 aten.softmax.int'), each
    once."""
    return [w for w in dict.fromkeys(map(_word, chain.from_iterable(origins))) if w]


@lru_cache(1 << 12)
def _word(origin: str) -> str:
    """The name of the ATen op in one text of an origin, "" where there is none."""
    parts = origin.split()[-1].split(".") if origin else []
    if len(parts) < 2 or ":" in parts[0]:
        return ""
    word = parts[1].strip("_").lower()
    return word if _WORD.fullmatch(word) else ""


class Names:
    """Gives out kernel names that are unique in a program and its subprograms."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._contents: dict[str, str] = {}

    def new(self, words: Sequence[str], content: str) -> str:
        """plait_<words>_<hash of content>, with a number behind it where that is taken."""
        digest = hashlib.sha256(content.encode()).hexdigest()[:6]
        base = "_".join(("plait", *words[:_MAX_WORDS], digest))
        n = self._used[base] = self._used.get(base, 0) + 1
        name = base if n == 1 else f"{base}_{n}"
        self._contents[name] = content
        return name

    def content_of(self, k: Kernel) -> str:
        """The content of a nest that was named here (or not)."""
        return self._contents.get(k.name) or content_text(k.vars, k.rvars, k.stmts, k.args)


def content_text(
    vars_: tuple[Expr, ...], rvars: tuple[Expr, ...], stmts: Sequence[Stmt], args: Sequence[Buffer]
) -> str:
    """Everything that decides a kernel's code, with buffers and results of reductions named by
    position."""
    bufs = {b.name: f"b{k}" for k, b in enumerate(args)}
    accs = {s.name: f"a{k}" for k, s in enumerate(s for s in stmts if isinstance(s, Reduce))}
    lines = [f"{v}<{extent(v)}" for v in vars_] + [f"r {v}<{extent(v)}" for v in rvars]
    lines += [f"{b.dtype} {b.shape} {b.strides}" for b in args]
    number: dict[Node, int] = {}
    for n in all_nodes(stmts):
        number[n] = len(number)
        operands = " ".join(str(number[a]) for a in n.args)
        lines.append(f"{n.op} {_attr_text(n, bufs, accs)} {n.dtype} {operands}")
    for s in stmts:
        if isinstance(s, Reduce):
            lines.append(f"reduce {s.kind} {number[s.value]} {s.running}{_segment(s)}")
        else:
            rest = [number[a] for a in s.index_args]
            mask = None if s.mask is None else number[s.mask]
            lines.append(
                f"{s.mode} {bufs[s.buf]} {s.index} {number[s.value]} {s.full} {rest} {mask}"
                f"{_segment(s)}"
            )
    return "\n".join(lines)


def _segment(s: Stmt) -> str:
    return f" of {s.segment}" if s.segment else ""


def _attr_text(n: Node, bufs: Mapping[str, str], accs: Mapping[str, str]) -> str:
    if isinstance(n.attr, Load):
        return f"{bufs[n.attr.buf]}{n.attr.index}{n.attr.masked}"
    if n.op == "acc":
        name, _, part = str(n.attr).rpartition(".")
        return accs.get(str(n.attr)) or f"{accs.get(name)}.{part}"
    return repr(n.attr)
