"""Stores: one element, contiguous vectors, lanes one by one, masks, tails, updates in place."""

from __future__ import annotations

import re

from plait.ir.dtypes import DType, b1
from plait.ir.expr import Size
from plait.kernel.cpu.expr import Parts, mask_part, memory, n_parts, scalar_op, stored, vector_op
from plait.kernel.cpu.lanes import lane_address, lane_array, lane_guard, lane_loop
from plait.kernel.cpu.values import Values
from plait.kernel.cpu.vectorize import Walk
from plait.schedule.plan import Store


def store(v: Values, s: Store) -> None:
    """Writes one store statement into the innermost block."""
    offset = s.index[0]
    match v.facts.stores[s]:
        case Walk.ONE:
            if v.rep == 0:
                _scalar_store(v, s, offset)
        case Walk.REPEAT:
            _repeated_store(v, s, offset)
        case Walk.ROW:
            _contiguous_store(v, s, offset)
        case _:
            _lane_store(v, s, offset)


def _scalar_store(v: Values, s: Store, offset: Size) -> None:
    value, p = v.get(s.value)[0], v.pointer(s.buf, offset)
    guard = "" if s.mask is None else f"if ({v.get(s.mask)[0]}) "
    v.line(f"{guard}{_element_store(v, s, f'*{p}', value)}")


def _repeated_store(v: Values, s: Store, offset: Size) -> None:
    """As many updates of one element as there are lanes, in a register."""
    t = memory(v.nest.linear.buffers[s.buf].dtype)
    value, p = v.get(s.value)[0], v.pointer(s.buf, offset)
    guard = "" if s.mask is None else f"if ({v.get(s.mask)[0]}) "
    if s.atomic:
        v.line(f"{guard}{lane_loop(v)}{_element_store(v, s, f'*{p}', value)}")
        return
    now = v.name()
    update = _element_store(v, s, now, value)
    v.line(f"{guard}{{ {t} {now} = *{p}; {lane_loop(v)}{update} *{p} = {now}; }}")


def _element_store(v: Values, s: Store, target: str, value: str) -> str:
    """target (mode)= value for one element."""
    d = v.nest.linear.buffers[s.buf].dtype
    if s.mode == "store":
        return f"{target} = {value};"
    t = memory(d)
    old = "(old != 0)" if d.kind == "b" else "old"
    update = scalar_op(s.mode, d, (old, value), d)
    if not s.atomic:
        return f"{{ const {t} old = {target}; {target} = ({t}){update}; }}"
    return f"atomic_update(&{target}, [&]({t} old) {{ return ({t}){update}; }});"


def _contiguous_store(v: Values, s: Store, offset: Size) -> None:
    d = v.nest.linear.buffers[s.buf].dtype
    t = memory(d)
    value = v.vector(s.value)
    p = f"{v.pointer(s.buf, offset)}{v.rep_offset(1)}"
    mask = None if s.mask is None else v.vector(s.mask)[0] + (" & lm" if v.tail else "")
    ats = [f"{p} + {k * v.lanes // 2}" if k else p for k in range(n_parts(d))]
    if s.mode != "store":
        value = vector_op(s.mode, d, (_old(v, d, ats), value), d)
    for k, at in enumerate(ats):
        text = f"u8_of_mask({value[k]})" if d == b1 else value[k]
        if mask is not None:
            v.line(f"stm_{t}({at}, {text}, {mask_part(f'({mask})', stored(d), k)});")
        elif v.tail:
            v.line(f"stn_{t}({at}, {text}, n{f' - {k * v.lanes // 2}' if k else ''});")
        else:
            v.line(f"st_{t}({at}, {text});")


def _old(v: Values, d: DType, ats: list[str]) -> Parts:
    """What memory holds before an update."""
    t = memory(d)
    names = []
    for k, at in enumerate(ats):
        left = f"n - {k * v.lanes // 2}" if k else "n"
        text = f"ldn_{t}({at}, {left})" if v.tail else f"ld_{t}({at})"
        names.append(v.define(f"v{t}", text))
    if d == b1:
        return (v.define("vi32", f"mask_of_u8({names[0]})"),)
    return tuple(names)


def _lane_store(v: Values, s: Store, offset: Size) -> None:
    depth = len(v.chain) - 1
    p, index = lane_address(v, s.buf, offset)
    value = f"{lane_array(v, s.value, depth)}[k]"
    if s.value.dtype == b1:
        value = f"({value} != 0)"
    guard = lane_guard(v, s.mask, depth)
    target = f"{p}[{index.replace('LANE', 'k')}]"
    copied = s.mode == "store" and not guard and not re.search(r"[/%?]", target)
    v.line(f"{lane_loop(v, copied)}{guard}{{ {_element_store(v, s, target, value)} }}")
