"""Whether a kernel may write one buffer over another that it reads.

It may where each element is read only at the point that stores there, and where every pass that
reads the old buffer comes before the store: the store depends on the result of every reduction that
reads it, and no later statement does.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.ir.expr import Size, numel
from plait.ir.layouts import flat_index
from plait.ir.loops import Buffer, Load, Node, walk
from plait.schedule.deps import extent, load_of
from plait.schedule.plan import Kernel, Reduce, Stmt, Store, stmt_roots


def users_of(kernel: Kernel) -> Mapping[str, set[int]]:
    """For every buffer the parts of a kernel that touch it."""
    users: dict[str, set[int]] = {}
    for k, part in enumerate(kernel.parts):
        for b in part.args:
            users.setdefault(b.name, set()).add(k)
    return users


def overwritable(
    kernel: Kernel,
    new: str,
    old: str,
    buffers: Mapping[str, Buffer],
    users: Mapping[str, set[int]] | None = None,
) -> bool:
    """Whether `new`, made by the kernel, may take the memory of `old`, which nobody reads after it.
    Both have the same size in bytes. users: see `users_of`, for who asks more than once."""
    if kernel.parts:
        users = users_of(kernel) if users is None else users
        using = users.get(new, set()) | users.get(old, set())
        if len(using) > 1:  # these run at one time
            return False
        kernel = kernel.parts[using.pop()] if using else kernel
    if kernel.sequential or buffers[new].dtype.nbytes != buffers[old].dtype.nbytes:
        return False
    stores = [k for k, s in enumerate(kernel.stmts) if isinstance(s, Store) and s.buf == new]
    if len(stores) != 1 or any(isinstance(s, Store) and s.buf == old for s in kernel.stmts):
        return False
    at = stores[0]
    store = kernel.stmts[at]
    assert isinstance(store, Store), store
    if store.mode != "store" or store.mask is not None or store.index_args:
        return False
    if not _covers(kernel, store, buffers[new].shape):
        return False
    address = flat_index(buffers[new], store.index)
    for k, s in enumerate(kernel.stmts):
        nodes = walk(stmt_roots(s))
        loads = [n for n in nodes if isinstance(n.attr, Load) and n.attr.buf == old]
        if not loads:
            continue
        if any(n.args or flat_index(buffers[old], load_of(n).index) != address for n in loads):
            return False
        if k > at or not _done_before(s, store, kernel):
            return False
    return True


def _covers(kernel: Kernel, store: Store, shape: tuple[Size, ...]) -> bool:
    """Whether every point stores to an element of its own: there are as many points as elements."""
    level = (*kernel.vars, *kernel.rvars) if store.full else kernel.vars
    return numel(extent(v) for v in level) == numel(shape)


def _done_before(s: Stmt, store: Store, kernel: Kernel) -> bool:
    """Whether a statement has surely run for a point when the store runs there."""
    if s is store:
        return True
    mine = _results_used(store, kernel)
    return s.name in mine if isinstance(s, Reduce) else _results_used(s, kernel) <= mine


def _results_used(s: Stmt, kernel: Kernel) -> set[str]:
    """The reductions that a statement depends on, directly or not."""
    reduces = {r.name: r for r in kernel.stmts if isinstance(r, Reduce)}
    out: set[str] = set()
    todo = [s]
    while todo:
        for name in _accs(todo.pop()):
            found = reduces.get(name) or reduces.get(name.rsplit(".", 1)[0])
            if found is not None and found.name not in out:
                out.add(found.name)
                todo.append(found)
    return out


def _accs(s: Stmt) -> list[str]:
    roots: tuple[Node, ...] = stmt_roots(s)
    return [str(n.attr) for n in walk(roots) if n.op == "acc"]
