"""Fewer views: equal ones become one, and a view of a view is taken from the tensor itself.

Needs a program without Free, which would name views that go. Keeps every view that is returned:
results of different names are different objects to the caller. Views count as equal where their
expressions are.
"""

from __future__ import annotations

from dataclasses import replace

from plait.wrapper import instructions as ins
from plait.wrapper.walk import rewrite, used


def merge_views(p: ins.WrapperProgram) -> ins.WrapperProgram:
    """The program with each view once, and taken from what is no view itself."""
    returned = {n for i in p.body if isinstance(i, ins.Return) for n in used(i)}
    first: dict[ins.View, str] = {}
    made: dict[str, ins.View] = {}
    names: dict[str, str] = {}
    out: list[ins.Instr] = []
    for i in p.body:
        now = rewrite(i, lambda n: names.get(n, n), lambda e: e) if names else i
        if isinstance(now, ins.View):
            now = _through(now, made.get(now.base))
            known = first.setdefault(replace(now, name=""), now.name)
            if known != now.name and now.name not in returned:
                names[now.name] = known
                continue
            made[now.name] = now
        out.append(now)
    return replace(p, body=tuple(out))


def _through(v: ins.View, base: ins.View | None) -> ins.View:
    if base is None or base.dtype != v.dtype or not v.relative:
        return v
    return replace(v, base=base.base, offset=base.offset + v.offset, relative=base.relative)
